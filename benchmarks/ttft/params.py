"""What a proxy of vLLM's own connectors puts into `kv_transfer_params`, leg by leg.

After vLLM's documentation of its NIXL connectors and its example proxies for one-way, multi-turn
and push deployments. Pure: engines and HTTP are in `proxy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Cache", "Mode", "PushTarget", "decode_body", "prefill_body"]

Mode = Literal["one-way", "bidirectional", "push"]
Params = dict[str, Any]

# What the first leg of a conversation says: keep the blocks for somebody who will come.
_COLD: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class PushTarget:
    """Where prefill can be reached by decode, which must know it before prefill has answered."""

    engine_id: str
    host: str
    port: int

    def params(self, request_id: str) -> Params:
        """Decode's parameters: it registers its blocks with prefill, and waits for the WRITE."""
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self.engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": request_id,
            "transfer_id": f"transfer-{request_id}",
        }


@dataclass
class Cache:
    """What decode said of the blocks it keeps, by conversation; each is used once."""

    _entries: dict[str, Params] = field(default_factory=dict)

    def put(self, conversation: str, params: Params) -> None:
        """Decode's parameters at the end of a turn."""
        self._entries[conversation] = params

    def take(self, conversation: str) -> Params | None:
        """Those of the turn before, turned round: prefill reads, and keeps its own for decode."""
        found = self._entries.pop(conversation, None)
        if found is None:
            return None
        return {**found, "do_remote_decode": True, "do_remote_prefill": False}


def prefill_body(
    request: Mapping[str, Any], mode: Mode, cached: Params | None, request_id: str
) -> dict[str, Any]:
    """The prefill leg: the request with one token to make, not streamed."""
    body = {
        key: value
        for key, value in request.items()
        if key not in ("stream_options", "max_completion_tokens", "min_tokens")
    }
    params: Params = dict(cached) if mode == "bidirectional" and cached else dict(_COLD)
    if mode == "push":
        params["transfer_id"] = f"transfer-{request_id}"
    return {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}


def decode_body(request: Mapping[str, Any], params: Params | None) -> dict[str, Any]:
    """The decode leg: the request as it came, and where its KV is."""
    return {**request, "kv_transfer_params": params} if params else dict(request)
