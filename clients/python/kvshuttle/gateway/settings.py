"""All that can be set, in one object: a flag goes before the environment, then the config file."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from kvshuttle.addresses import is_loopback_host, wrong_in_target
from kvshuttle.client import NO_RETRIES, ClientOptions, Timeouts, TlsOptions
from kvshuttle.urls import wrong_in_base_url

if TYPE_CHECKING:
    from collections.abc import Sequence

ENV_PREFIX = "KVSHUTTLE_GW_"

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Urls = Annotated[list[str], NoDecode]

# What no HTTP header can carry: control characters, and half of a surrogate pair, which is how
# bytes of a command line arrive that are not UTF-8.
_NOT_IN_HEADERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class ConfigFileError(Exception):
    """The config file cannot be used; the text says why."""


class GatewaySettings(BaseSettings):
    """OpenAI-compatible gateway that moves a conversation's KV cache both ways."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_prog_name="kvshuttle-gateway",
    )

    config: Path | None = Field(
        None, description="YAML or JSON file with any of these settings, names with underscores."
    )

    # Serving
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65_535, description="Port to listen on; 0 takes a free one.")
    ready_file: Path | None = Field(
        None, description='Write {"url": ..., "pid": ...} here once serving.'
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024, gt=0, description="Largest request body; larger ones are answered 413."
    )
    max_header_bytes: int = Field(
        64 * 1024,
        gt=0,
        description="Longest request line and headers; longer ones are answered 431.",
    )
    header_timeout_s: Seconds = Field(
        30.0, description="How long a client may take to send its headers; also the first ones."
    )
    body_timeout_s: Seconds = Field(
        60.0, description="How long a client may take to send its request."
    )
    client_stall_timeout_s: Seconds = Field(
        120.0, description="A client that reads nothing for so long is taken for gone."
    )
    max_requests: int = Field(
        8192,
        ge=1,
        description="Most requests that run at once; more are answered 429. Each needs two sockets "
        "and about 100 KB.",
    )
    max_tenant_requests: int | None = Field(
        None,
        ge=1,
        description="Most of them of one tenant; three quarters of all where there are API keys, "
        "if this is left out.",
    )
    drain_notice_s: float = Field(
        0.0,
        ge=0,
        le=600,
        description="How long after SIGTERM requests are still taken while /health says draining, "
        "so that load balancers look elsewhere first.",
    )
    drain_timeout_s: Seconds = Field(
        30.0, description="How long running requests may take to end after SIGTERM."
    )

    # Clients
    api_keys_file: Path | None = Field(
        None, description="Mapping of the SHA-256 (hex) of each API key to its tenant."
    )
    insecure_no_auth: bool = Field(
        False,
        description="Serve without API keys on an address that others can reach.",
    )

    # Control plane
    control_plane: str = Field(
        "127.0.0.1:7400", description="gRPC target of the control plane, host:port."
    )
    control_plane_ca_file: Path | None = Field(
        None, description="CA of the control plane's certificate; turns TLS on."
    )
    control_plane_cert_file: Path | None = Field(
        None, description="The gateway's certificate (kvshuttle://gateway/NAME), for mTLS."
    )
    control_plane_key_file: Path | None = Field(
        None, description="Private key of that certificate."
    )
    control_plane_server_name: str | None = Field(
        None, description="Name to expect in the control plane's certificate."
    )
    control_plane_token: SecretStr | None = Field(
        None, description="Token of role gateway, instead of a certificate."
    )
    begin_turn_timeout_s: Seconds = Field(
        0.5, description="How long a request waits for its placement before it goes without."
    )
    begin_turn_settle_s: Seconds = Field(
        5.0, description="How long a late answer is still awaited, so that its turn is ended."
    )
    over_budget: Literal["serve", "refuse"] = Field(
        "serve",
        description="A request for which the control plane's budget has no turn: serve it without "
        "one, or refuse it with 429.",
    )
    end_turn_timeout_s: Seconds = Field(2.0, description="Deadline of one try of EndTurn.")
    end_turn_attempts: int = Field(
        8, ge=1, le=100, description="Tries of EndTurn; eight span about ten seconds."
    )
    flush_timeout_s: Seconds = Field(
        5.0, description="How long a stop waits for EndTurns that are under way."
    )
    refresh_interval_s: Seconds = Field(
        5.0, description="How often the list of workers is read, for use without control plane."
    )

    # Engines
    prefill_url: Urls = Field(
        default_factory=list,
        description="Base URL of a prefill engine to know without control plane; repeatable.",
    )
    decode_url: Urls = Field(
        default_factory=list,
        description="Base URL of a decode engine to know without control plane; repeatable.",
    )
    engine_api_key: SecretStr | None = Field(
        None, description="Key sent to the engines (vLLM's --api-key)."
    )
    connect_timeout_s: Seconds = Field(2.0, description="Connecting to an engine.")
    prefill_timeout_s: Seconds = Field(120.0, description="The prefill leg as a whole.")
    decode_timeout_s: Seconds = Field(
        600.0, description="Until the decode leg's headers, and an answer that is not streamed."
    )
    stream_idle_timeout_s: Seconds = Field(
        120.0, description="Longest silence within a stream from an engine."
    )
    engine_keepalive_s: Seconds = Field(
        3.0,
        description="How long an idle connection to an engine is reused; less than vLLM's own 5 s.",
    )
    probe_timeout_s: Seconds = Field(
        1.0, description="An engine that does not answer /health or /v1/models in time is down."
    )

    engine_hang_s: Seconds = Field(
        15.0,
        description="An engine that says nothing for so long, to a leg or to /health, is taken for "
        "hung: its legs are given up, and go elsewhere where they can.",
    )

    # Logging
    traces: bool = Field(
        False,
        description="Export OpenTelemetry traces by OTLP (extra otel), to where "
        "OTEL_EXPORTER_OTLP_ENDPOINT says.",
    )

    log_format: Literal["json", "console"] = Field("json", description="Form of the log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )

    @field_validator("prefill_url", "decode_url", mode="before")
    @classmethod
    def _split_urls(cls, value: Any) -> Any:
        """The environment has them separated by commas; flags arrive as a JSON list."""
        if isinstance(value, str):
            if value.startswith("["):
                return json.loads(value)
            return [url.strip() for url in value.split(",") if url.strip()]
        return value

    @field_validator("prefill_url", "decode_url")
    @classmethod
    def _check_urls(cls, value: list[str]) -> list[str]:
        for url in value:
            if wrong := wrong_in_base_url(url):
                raise ValueError(f"{url!r} is not a base URL such as http://10.0.0.7:8000: {wrong}")
        return [url.rstrip("/") for url in value]

    @field_validator("control_plane")
    @classmethod
    def _check_control_plane(cls, value: str) -> str:
        if wrong := wrong_in_target(value):
            raise ValueError(f"{wrong}; give the control plane's, such as 127.0.0.1:7400")
        return value

    @field_validator("engine_api_key")
    @classmethod
    def _check_engine_api_key(cls, value: SecretStr | None) -> SecretStr | None:
        key = value.get_secret_value() if value is not None else ""
        if _NOT_IN_HEADERS.search(key) or key != key.strip():
            # Not quoted: it is a secret.
            raise ValueError(
                "has a line end, another control character, or space at an end, which no HTTP "
                "header can carry; give the key alone"
            )
        return value

    @model_validator(mode="after")
    def _check_exposure(self) -> GatewaySettings:
        if (
            self.api_keys_file is None
            and not self.insecure_no_auth
            and not is_loopback_host(self.host)
        ):
            raise ValueError(
                f"host {self.host} can be reached by others: set api_keys_file, or "
                "insecure_no_auth to serve everyone as tenant 'default'"
            )
        return self

    @property
    def tenant_limit(self) -> int:
        """Most requests of one tenant that run at once."""
        if self.max_tenant_requests is not None:
            return self.max_tenant_requests
        return self.max_requests if self.api_keys_file is None else -(-self.max_requests * 3 // 4)

    def client_options(self) -> ClientOptions:
        """How the control plane is reached. Raises ValueError for half of a key pair."""
        tls = None
        if self.control_plane_ca_file or self.control_plane_cert_file:
            tls = TlsOptions(
                ca_file=self.control_plane_ca_file,
                cert_file=self.control_plane_cert_file,
                key_file=self.control_plane_key_file,
                server_name=self.control_plane_server_name,
            )
        token = self.control_plane_token
        return ClientOptions(
            tls=tls,
            token=token.get_secret_value() if token is not None else None,
            timeouts=Timeouts(
                begin_turn_s=self.begin_turn_settle_s, end_turn_s=self.end_turn_timeout_s
            ),
            turn_stream=True,
            # A request falls back at once; EndTurn has its own, longer back-off.
            retries=NO_RETRIES,
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
        """Flags (added in front by pydantic), then the environment, then the file."""
        return (init_settings, env_settings, YamlConfigSettingsSource(settings_cls))


def load(argv: Sequence[str]) -> GatewaySettings:
    """The settings of a command line.

    Raises pydantic's ValidationError for values that cannot be, ConfigFileError for a file that
    cannot be read as settings, and SystemExit for unknown flags and --help.
    """
    path = _config_path(argv)
    if path is None:
        return _run(GatewaySettings, argv)
    _check_config(path)

    class _WithFile(GatewaySettings):
        model_config = SettingsConfigDict(yaml_file=path)
        __doc__ = GatewaySettings.__doc__

    return _run(_WithFile, argv)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Leaves out defaults of nothing: the description says what happens then."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and action.help.replace(" (default: None)", "").replace(
            " (default factory: list)", ""
        )


def _run(settings: type[GatewaySettings], argv: Sequence[str]) -> GatewaySettings:
    source: CliSettingsSource[Any] = CliSettingsSource(settings, formatter_class=_Help)
    return CliApp.run(settings, cli_args=list(argv), cli_settings_source=source)


def _config_path(argv: Sequence[str]) -> Path | None:
    """Looked up ahead of the rest: the file is one of the sources."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(list(argv))
    path = known.config or os.environ.get(f"{ENV_PREFIX}CONFIG")
    return Path(path) if path else None


def _check_config(path: Path) -> None:
    """Raises ConfigFileError for what pydantic would fail on with a traceback."""
    try:
        if not path.is_file():
            raise ConfigFileError(f"config file {path} does not exist, or is no file")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"config file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigFileError(f"config file {path} is neither YAML nor JSON in UTF-8") from error
    if content is None:
        return
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigFileError(
            f"config file {path} must map names of settings to their values, such as port: 8080"
        )
