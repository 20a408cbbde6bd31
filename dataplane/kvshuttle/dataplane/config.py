"""The agent's configuration: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvshuttle.addresses import is_loopback, split_address
from kvshuttle.urls import wrong_in_base_url
from kvshuttle.v1 import types_pb2

__all__ = ["AgentConfig", "ConfigError"]

_ROLES = {
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
    "both": types_pb2.WORKER_ROLE_BOTH,
}


class ConfigError(ValueError):
    """A key of the configuration is missing or wrong; names it, its value and the remedy."""


@dataclass(frozen=True)
class AgentConfig:
    """One engine's agent."""

    control_plane: str
    """``host:port`` of the control plane's agent listener."""
    worker_id: str
    """The operator's name of this engine; with mTLS it must be the certificate's."""
    role: types_pb2.WorkerRole.ValueType
    """What the engine is used for."""
    url: str
    """Base URL of this engine's OpenAI server, as gateways reach it."""
    insecure: bool = False
    """No TLS; refused unless ``control_plane`` is a loopback address."""
    tls_ca: str = ""
    """PEM file of the authority that signed the control plane's certificate."""
    tls_cert: str = ""
    """PEM file of this worker's certificate, with the URI kvshuttle://worker/<worker_id>."""
    tls_key: str = ""
    """PEM file of its key."""
    model_id: str = ""
    """Identity of the weights; empty: the model's path and revision. Set it where the same weights
    lie at different paths."""
    nixl_backend: str = "UCX"
    """NIXL's plugin: UCX, or LIBFABRIC for EFA."""
    nixl_backend_params: dict[str, str] = field(default_factory=dict)
    """Passed to the plugin."""
    traces: bool = False
    """Export OpenTelemetry traces by OTLP (extra otel), to where OTEL_EXPORTER_OTLP_ENDPOINT
    says."""

    @classmethod
    def parse(cls, extra: Mapping[str, object]) -> AgentConfig:
        """Reads and checks; unknown keys (but ``fault_*``) are refused: a typo must not pass."""
        known = set(cls.__dataclass_fields__)
        for key in extra:
            if key not in known and not key.startswith("fault_"):
                raise ConfigError(
                    f"kv_connector_extra_config: unknown key {key!r}; known are "
                    f"{', '.join(sorted(known))}"
                )
        for key in ("control_plane", "worker_id", "role", "url"):
            if not isinstance(extra.get(key), str) or not extra[key]:
                raise ConfigError(
                    f"kv_connector_extra_config.{key}: {extra.get(key)!r}; set it to a text"
                )
        role = _ROLES.get(str(extra["role"]))
        if role is None:
            raise ConfigError(
                f"kv_connector_extra_config.role: {extra['role']!r}; use prefill, decode or both"
            )
        params = extra.get("nixl_backend_params", {})
        if not isinstance(params, Mapping):
            raise ConfigError(
                f"kv_connector_extra_config.nixl_backend_params: {params!r}; use an object"
            )
        config = cls(
            control_plane=str(extra["control_plane"]),
            worker_id=str(extra["worker_id"]),
            role=role,
            url=str(extra["url"]).rstrip("/"),
            insecure=bool(extra.get("insecure", False)),
            tls_ca=str(extra.get("tls_ca", "")),
            tls_cert=str(extra.get("tls_cert", "")),
            tls_key=str(extra.get("tls_key", "")),
            model_id=str(extra.get("model_id", "")),
            nixl_backend=str(extra.get("nixl_backend", "UCX")),
            nixl_backend_params={str(k): str(v) for k, v in params.items()},
            traces=bool(extra.get("traces", False)),
        )
        config._check()
        return config

    def _check(self) -> None:
        try:
            split_address(self.control_plane)
        except ValueError as error:
            raise ConfigError(f"kv_connector_extra_config.control_plane: {error}") from None
        if wrong := wrong_in_base_url(self.url):
            raise ConfigError(
                f"kv_connector_extra_config.url: {self.url!r}: {wrong}; use http://host:port of "
                "this engine"
            )
        if self.insecure:
            if not is_loopback(self.control_plane):
                raise ConfigError(
                    f"kv_connector_extra_config.insecure: true with control_plane "
                    f"{self.control_plane!r}; without TLS only a loopback address is allowed"
                )
            return
        for key in ("tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, key)
            if not path or not Path(path).is_file():
                raise ConfigError(
                    f"kv_connector_extra_config.{key}: {path!r} is not a file; the agent's stream "
                    "gives access to memory and needs mTLS (or insecure: true on loopback)"
                )
