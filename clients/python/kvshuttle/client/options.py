"""How a client reaches the control plane."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvshuttle.addresses import is_loopback, wrong_in_target
from kvshuttle.client.retries import RetryPolicy

if TYPE_CHECKING:
    from typing import Any

    from kvshuttle.client.calls import Call


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files of a TLS connection, PEM. Certificate and key are given together, for mTLS.

    `server_name` is checked against the server's certificate instead of the target's host.
    """

    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("TLS: give both a certificate file and a key file, or neither")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises OSError where one cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file),
            private_key=_read(self.key_file),
            certificate_chain=_read(self.cert_file),
        )


def _read(file: Path | str | None) -> bytes | None:
    return Path(file).read_bytes() if file else None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of calls that name none, in seconds."""

    begin_turn_s: float = 0.5
    end_turn_s: float = 2.0
    read_s: float = 5.0
    write_s: float = 5.0

    def of(self, call: Call[Any]) -> float:
        """A call's own, or the default of its kind."""
        if call.timeout is not None:
            return call.timeout
        return float(getattr(self, call.default))


# A control plane that restarts must be found again within about a second: gRPC's own back-off
# goes up to two minutes. The pings find a peer that went without a word; a server allows one every
# five minutes without calls by default, so they are sent during calls and watches only.
_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long one try to connect may take. A TLS handshake over a long way,
    # or with a machine under load, takes more than the pause before a retry.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A watch only listens: without this, gRPC would send two pings and then no more.
    ("grpc.http2.max_pings_without_data", 0),
    # A control plane is reached directly; a proxy from the environment is meant for the internet.
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Everything about a connection but its target.

    `token` is sent as `authorization: Bearer`; without TLS it is refused unless the target is on a
    loopback address. `tenant` is the tenant that a gateway or an operator acts for. With
    `turn_stream`, turns are begun and ended and sessions updated over a stream a tenant, which
    spares the control plane most of a call's cost; where it knows no such stream, calls are made.
    `retries` says which failed calls are made again; `NO_RETRIES` for a caller that has its own.
    """

    tls: TlsOptions | None = None
    token: str | None = field(default=None, repr=False)
    tenant: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    turn_stream: bool = False
    retries: RetryPolicy = field(default_factory=RetryPolicy)

    def check(self, target: str) -> None:
        """Whether a channel to this target could be made: files are read, nobody is asked.

        Raises OSError where a file cannot be read, ValueError for no target and for a token in
        clear text.
        """
        if wrong := wrong_in_target(target):
            raise ValueError(f"target {wrong}; give the control plane's, such as 127.0.0.1:7400")
        if self.tls is not None:
            self.tls.credentials()
        elif self.token is not None and not is_loopback(target):
            raise ValueError(
                f"a token would travel in clear text to {target}: give TLS options, "
                "or use a loopback address"
            )

    def channel(self, target: str) -> grpc.aio.Channel:
        """Opens a channel; it connects at the first call. Raises as `check` does."""
        self.check(target)
        if self.tls is None:
            return grpc.aio.insecure_channel(target, options=self._arguments())
        return grpc.aio.secure_channel(target, self.tls.credentials(), options=self._arguments())

    def sync_channel(self, target: str) -> grpc.Channel:
        """As `channel`, for the synchronous client."""
        self.check(target)
        if self.tls is None:
            return grpc.insecure_channel(target, options=self._arguments())
        return grpc.secure_channel(target, self.tls.credentials(), options=self._arguments())

    def _arguments(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = list(_CHANNEL_OPTIONS)
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def call_metadata(self, tenant: str | None) -> tuple[tuple[str, str], ...]:
        """The metadata of one call, for `tenant` or else for the client's own."""
        metadata: list[tuple[str, str]] = []
        if self.token is not None:
            metadata.append(("authorization", f"Bearer {self.token}"))
        acting_for = tenant if tenant is not None else self.tenant
        if acting_for is not None:
            metadata.append(("kvshuttle-tenant", acting_for))
        return tuple(metadata)
