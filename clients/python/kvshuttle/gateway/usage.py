"""What a turn cost, as its engines said."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.gateway.dialects.base import Usage
from kvshuttle.gateway.jsonspans import with_numbers
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from kvshuttle.gateway.dialects import Dialect

__all__ = ["TurnCost", "usage_of", "with_true_usage"]


@dataclass(slots=True)
class TurnCost:
    """What the engines said the turn cost."""

    # The prefill engine's, if there was a prefill leg: only it knows what the prompt really found.
    prefill: Usage | None = None
    decode: Usage | None = None
    time_to_first_token_s: float | None = None

    def message(self) -> session.TurnUsage:
        """For the control plane."""
        prompt = self.prefill or self.decode or Usage()
        cached = prompt.cached or 0
        usage = session.TurnUsage(
            prompt_tokens=prompt.prompt,
            # More than there was to find cannot have been found.
            cached_tokens=min(cached, prompt.prompt),
            output_tokens=self.decode.output if self.decode is not None else 0,
        )
        if self.time_to_first_token_s is not None:
            usage.time_to_first_token.FromNanoseconds(int(self.time_to_first_token_s * 1e9))
        return usage


def usage_of(raw: bytes, dialect: Dialect) -> Usage | None:
    """The usage in a whole answer or an event's data, if there is one."""
    return with_true_usage(raw, dialect, None)[1]


def with_true_usage(
    raw: bytes, dialect: Dialect, found: Usage | None
) -> tuple[bytes, Usage | None]:
    """An answer of decode's, or an event's data, whose usage says what prefill found; and the usage
    as decode said it. Numbers in its usage object are all that changes, and only those it has."""
    if b'"usage"' not in raw:
        return raw, None
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return raw, None
    for path in dialect.usage_paths:
        usage = fields
        for name in path:
            usage = usage.get(name) if isinstance(usage, dict) else None
        if isinstance(usage, dict):
            if found is not None:
                numbers = dialect.true_numbers(usage, found)
                raw = with_numbers(raw, {path + at: number for at, number in numbers.items()})
            return raw, dialect.usage(usage)
    return raw, None
