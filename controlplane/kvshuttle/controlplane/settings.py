"""The one settings object: flags over environment over file over defaults."""

from __future__ import annotations

import argparse
import os
import tomllib
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliSuppress,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvshuttle.addresses import is_loopback, split_address
from kvshuttle.controlplane.model.limits import SECOND, Limits, TenantLimits

__all__ = ["Settings", "SettingsError", "load"]

ENV_PREFIX = "KVSHUTTLE_CP_"
_D = Limits()


class SettingsError(Exception):
    """Settings that cannot work; the message says which and what to do."""


class TenantSettings(BaseModel):
    """Limits of one tenant, where they differ from everybody's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sessions: int | None = Field(None, ge=0)
    running_turns: int | None = Field(None, ge=0)
    leased_share: float | None = Field(None, ge=0, le=1)
    held_share: float | None = Field(None, ge=0, le=1)


class Settings(BaseSettings):
    """kvshuttle's control plane: which session's KV lies where, and who may move it.

    Each option is also a key of the file named by --config (YAML or TOML, underscores for dashes)
    and an environment variable KVSHUTTLE_CP_<OPTION>. Flags win over the environment, that over
    the file.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    config: Path | None = Field(None, description="A file with settings: .yaml, .yml or .toml")

    listen: str | None = Field(
        None,
        description="host:port of one listener for everything, instead of the next two: handy on "
        "one machine",
    )
    api_address: str = Field(
        "127.0.0.1:7400",
        description="host:port for gateways, clients and operators; port 0 takes a free one",
    )
    agent_address: str = Field(
        "127.0.0.1:7401", description="host:port for workers' agents; port 0 takes a free one"
    )
    metrics_address: str | None = Field(
        None,
        description="host:port of /metrics for Prometheus, plain HTTP; empty turns it off "
        "(default: 127.0.0.1:7402; with --listen a free port of 127.0.0.1)",
    )
    ready_file: Path | None = Field(
        None,
        description="Written once serving: JSON with the bound addresses, the epoch and the pid",
    )

    store: str | None = Field(
        None,
        min_length=1,
        description="The SQLite file where state is kept, made if absent, locked while in use; or "
        "the word memory, which forgets everything at the end and takes agents of any lineage "
        "(default: kvshuttle.db; with --insecure memory)",
    )
    accept_lineage_change: bool = Field(
        False,
        description="Accept agents that belong to another store (after the store was replaced)",
    )

    insecure: bool = Field(
        False,
        description="No TLS and no identity, on loopback addresses only: for trials and tests",
    )
    tls_cert: Path | None = Field(None, description="PEM certificate of both listeners")
    tls_key: Path | None = Field(None, description="PEM key of that certificate")
    client_ca: Path | None = Field(
        None, description="PEM certificates that sign callers' certificates (agents need one)"
    )
    tokens_file: Path | None = Field(
        None,
        description="YAML list of bearer tokens: sha256, role, name, tenant. With it the API's "
        "callers are known by token, without it by certificate",
    )

    traces: bool = Field(
        False,
        description="Export OpenTelemetry traces by OTLP (extra otel), to where "
        "OTEL_EXPORTER_OTLP_ENDPOINT says",
    )

    log_format: Literal["console", "json"] = Field("console", description="How to log")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least level to log; debug has a line for every turn"
    )
    stop_grace: float = Field(
        5.0, ge=0, description="Seconds that calls may take to end when the server stops"
    )

    lease_ttl: float = Field(
        _D.lease_ttl_ns / SECOND, gt=0, le=600, description="Seconds that a grant lasts"
    )
    guard: float = Field(
        _D.guard_ns / SECOND,
        gt=0,
        le=60,
        description="Longest seconds from asking a source to hold until the grant",
    )
    clock_drift_ppm: int = Field(
        _D.clock_drift_ppm,
        ge=0,
        le=10_000,
        description="Bound on the rate difference of two machines' clocks",
    )
    heartbeat: float = Field(
        _D.heartbeat_ns / SECOND, gt=0, description="Seconds between an agent's heartbeats"
    )
    silence: float = Field(
        _D.silence_ns / SECOND, gt=0, description="Seconds of silence after which one is lost"
    )
    retention: float = Field(
        _D.retention_ns / SECOND,
        gt=0,
        description="Seconds that decode holds what a turn leaves, at least, while its memory is "
        "not wanted; longer where a session's gaps or hints suggest it",
    )
    lookup_wait_ms: float = Field(
        _D.lookup_wait_ns / 1e6,
        ge=0,
        description="Shortest limit of the time for which a request waits for its grant; it is "
        "longer where computing is predicted to take longer",
    )
    forward: Literal["pull", "push", "auto"] = Field(
        _D.forward,
        description="How a prompt's KV reaches decode: pull (decode reads when prefill has ended), "
        "push (prefill writes layer by layer as it computes), or auto (push where the computation "
        "is long enough to hide the transfer)",
    )
    eager: bool = Field(
        _D.eager, description="Return what a turn leaves at once, not when the next turn comes"
    )
    min_tokens: int = Field(
        _D.min_tokens, ge=1, description="Fewer missing tokens than this are computed, not moved"
    )
    direct_tokens: int = Field(
        _D.direct_tokens,
        ge=0,
        description="A turn with no more new tokens than this may run at decode alone, where its "
        "KV is; 0: never",
    )
    prefix_index: int = Field(
        _D.prefix_index_hashes,
        ge=0,
        description="Hashes kept by which sessions find what others of their tenant hold (0.14 KB "
        "each); 0: sessions find only their own",
    )
    turn_timeout: float = Field(
        _D.turn_timeout_ns / SECOND,
        gt=0,
        description="Seconds after which a turn that nobody ended is abandoned",
    )

    leased_share: float = Field(
        _D.leased_share_worker,
        ge=0,
        le=1,
        description="Share of a worker's blocks that leases may hold; 0: no limit",
    )
    tenant_leased_share: float = Field(
        _D.leased_share_tenant,
        ge=0,
        le=1,
        description="The same for the leases of one tenant; 0: no limit",
    )
    tenant_held_share: float = Field(
        _D.held_share_tenant,
        ge=0,
        le=1,
        description="Share of a worker's blocks that one tenant's replicas may hold; 0: no limit",
    )
    held_share: float = Field(
        _D.held_share_worker,
        gt=0,
        le=1,
        description="Share of a worker's blocks that may be held for sessions that are away; "
        "beyond it those that are worth least turn soft",
    )
    free_share_min: float = Field(
        _D.free_share_min,
        ge=0,
        lt=1,
        description="With less of its pool free than this share, a worker is asked to hold nothing",
    )
    quarantine_share: float = Field(
        _D.quarantine_share,
        ge=0,
        le=1,
        description="Share of its pool in quarantine beyond which a worker is granted no reads",
    )
    worker_turns: int = Field(
        _D.turns_per_worker, ge=1, description="Turns that run on one worker at once, at most"
    )
    tenant_turns: int = Field(
        _D.turns_per_tenant, ge=0, description="Turns that one tenant runs at once, at most"
    )
    sessions: int = Field(_D.sessions_max, ge=1, description="Sessions at once, at most")
    tenant_sessions: int = Field(
        _D.sessions_per_tenant, ge=0, description="Sessions of one tenant at once, at most"
    )
    tenants: CliSuppress[dict[str, TenantSettings]] = Field(
        default_factory=dict,
        description="Limits of single tenants, by name: sessions, running_turns, leased_share, "
        "held_share (in the file only)",
    )

    _file: ClassVar[dict[str, Any]] = {}
    """What the file of --config says."""

    @field_validator("listen", "api_address", "agent_address", "metrics_address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if not value:
            return value
        split_address(value, any_port=True)
        return value

    @field_validator("ready_file")
    @classmethod
    def _can_be_written(cls, value: Path | None) -> Path | None:
        if value is None:
            return value
        try:
            is_folder, has_folder = value.is_dir(), value.parent.is_dir()
        except OSError as error:
            raise ValueError(f"{value}: {error.strerror}: name a file that can be made") from error
        if is_folder:
            raise ValueError(f"{value} is a directory: name a file in it")
        if not has_folder:
            raise ValueError(f"{value}: {value.parent} is not a directory: make it first")
        if not os.access(value.parent, os.W_OK | os.X_OK):
            raise ValueError(
                f"{value}: {value.parent} is read-only: let the control plane's user write it"
            )
        return value

    @field_validator("store")
    @classmethod
    def _no_uri(cls, value: str | None) -> str | None:
        """What means something else to SQLite, or is nearly the word, is no name of a file."""
        if value is None or value == "memory":
            return value
        if value.strip(": ").lower() == "memory" or value.startswith("file:"):
            raise ValueError(
                f"{value!r} is no path: for no file at all say memory, for a file of this name "
                f"./{value}"
            )
        return value

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if not all(self.listeners()):
            raise ValueError("an address to listen on cannot be empty")
        if self.heartbeat >= self.silence:
            raise ValueError("silence must be longer than heartbeat, or every worker is lost")
        if self.insecure:
            for address in self.listeners():
                if not is_loopback(address):
                    raise ValueError(
                        f"insecure is for loopback only, not for {address}: "
                        "bind it to 127.0.0.1, or set tls_cert, tls_key and client_ca instead"
                    )
        else:
            if self.listen is not None and self.tokens_file is not None:
                raise ValueError(
                    "with listen everybody needs a certificate, so tokens_file has no use: set "
                    "api_address and agent_address instead"
                )
            for name in ("tls_cert", "tls_key", "client_ca"):
                if getattr(self, name) is None:
                    raise ValueError(
                        f"{name} is not set: agents' streams give access to engines' memory and "
                        "need mTLS; for a trial on this machine alone use --insecure"
                    )
        return self

    def listeners(self) -> tuple[str, ...]:
        """The API's address and, unless one listener does for both, the agents'."""
        if self.listen is not None:
            return (self.listen,)
        return (self.api_address, self.agent_address)

    def metrics(self) -> str:
        """Where metrics are served; empty when they are not."""
        if self.metrics_address is not None:
            return self.metrics_address
        return "127.0.0.1:7402" if self.listen is None else "127.0.0.1:0"

    def store_file(self) -> Path | None:
        """The SQLite file; None for a store in memory."""
        if self.store is None:
            return None if self.insecure else Path("kvshuttle.db")
        return None if self.store == "memory" else Path(self.store)

    def limits(self) -> Limits:
        """These settings among the other limits."""

        def ns(seconds: float) -> int:
            return int(seconds * SECOND)

        return Limits(
            lease_ttl_ns=ns(self.lease_ttl),
            guard_ns=ns(self.guard),
            clock_drift_ppm=self.clock_drift_ppm,
            heartbeat_ns=ns(self.heartbeat),
            silence_ns=ns(self.silence),
            retention_ns=ns(self.retention),
            lookup_wait_ns=int(self.lookup_wait_ms * 1e6),
            forward=self.forward,
            eager=self.eager,
            min_tokens=self.min_tokens,
            direct_tokens=self.direct_tokens,
            prefix_index_hashes=self.prefix_index,
            turn_timeout_ns=ns(self.turn_timeout),
            leased_share_worker=self.leased_share,
            leased_share_tenant=self.tenant_leased_share,
            held_share_tenant=self.tenant_held_share,
            held_share_worker=self.held_share,
            free_share_min=self.free_share_min,
            quarantine_share=self.quarantine_share,
            turns_per_worker=self.worker_turns,
            turns_per_tenant=self.tenant_turns,
            sessions_max=self.sessions,
            sessions_per_tenant=self.tenant_sessions,
            tenants={
                name: TenantLimits(**limits.model_dump()) for name, limits in self.tenants.items()
            },
        )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come in as `init_settings`."""
        return (init_settings, env_settings, InitSettingsSource(settings_cls, cls._file))


def _config_path(argv: list[str]) -> Path | None:
    """The file has to be known before the rest is read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found = parser.parse_known_args(argv)[0].config or os.environ.get(f"{ENV_PREFIX}CONFIG")
    return Path(found) if found else None


def _read_config(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise SettingsError(f"config: {path} must end with .yaml, .yml or .toml")
    try:
        if not path.is_file():
            raise SettingsError(f"config: there is no file {path}")
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise SettingsError(f"config: {path} cannot be read: {why}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise SettingsError(
            f"config: {path} must have settings by name, each as in `lease_ttl: 30`"
        )
    return found


class _Help(argparse.RawDescriptionHelpFormatter):
    """Leaves out defaults of None: the description says what happens then."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and action.help.replace(" (default: None)", "")


def load(argv: list[str]) -> Settings:
    """The settings of a process. SettingsError; SystemExit for --help and unknown flags."""
    path = _config_path(argv)
    found = {} if path is None else _read_config(path)

    class WithFile(Settings):
        _file = found

    WithFile.__doc__ = Settings.__doc__
    source: CliSettingsSource[Any] = CliSettingsSource(
        WithFile,
        cli_prog_name="kvshuttle-controlplane",
        cli_parse_args=argv,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        formatter_class=_Help,
    )
    try:
        return WithFile(_cli_settings_source=source)  # type: ignore[call-arg]
    except ValueError as error:
        problems = getattr(error, "errors", None)
        if problems is None:
            raise SettingsError(str(error)) from error
        lines = []
        for problem in problems():
            where = ".".join(map(str, problem["loc"])) or "settings"
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}")
        raise SettingsError("\n".join(lines)) from error
