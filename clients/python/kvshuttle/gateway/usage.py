"""What a turn cost, as its engines said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvshuttle.v1 import session_service_pb2 as session

__all__ = ["TurnCost"]


@dataclass(slots=True)
class TurnCost:
    """What the engines said the turn cost."""

    # The prefill engine's, if there was a prefill leg: only it knows what the prompt really found.
    prefill: dict[str, Any] | None = None
    decode: dict[str, Any] | None = None
    time_to_first_token_s: float | None = None

    def message(self) -> session.TurnUsage:
        usage = session.TurnUsage()
        prompt = self.prefill or self.decode or {}
        usage.prompt_tokens = _count(prompt.get("prompt_tokens"))
        details = prompt.get("prompt_tokens_details")
        if isinstance(details, dict):
            usage.cached_tokens = _count(details.get("cached_tokens"))
        usage.output_tokens = _count((self.decode or {}).get("completion_tokens"))
        if self.time_to_first_token_s is not None:
            usage.time_to_first_token.FromNanoseconds(int(self.time_to_first_token_s * 1e9))
        return usage


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
