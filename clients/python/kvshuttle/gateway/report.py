"""What happened to a request, told to its client: in headers, and at a stream's end if it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.gateway.dialects.base import dumped
from kvshuttle.gateway.errors import bad_request
from kvshuttle.gateway.metrics import reason_label

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.gateway.placing import Placing
    from kvshuttle.gateway.request import TurnRequest

__all__ = ["REPORT_HEADER", "headers", "last_comment", "wants_comment"]

REPORT_HEADER = "x-kvshuttle-report"


def wants_comment(client_headers: Mapping[str, str]) -> bool:
    """Whether the client wants to be told at a stream's end. Raises a 400 ApiError."""
    value = client_headers.get(REPORT_HEADER, "headers").strip().lower()
    if value not in ("headers", "stream"):
        raise bad_request(
            "X-KVShuttle-Report must be headers or stream. Send one of them, or leave it out.",
            param="X-KVShuttle-Report",
        )
    return value == "stream"


def headers(request: TurnRequest, placing: Placing) -> dict[str, str]:
    """What is known when the answer begins."""
    said = {"x-kvshuttle-session": request.identity.session_id, **_turn(placing)}
    if placing.fallbacks:
        said["x-kvshuttle-fallback"] = ",".join(dict.fromkeys(placing.fallbacks))
    said |= {f"x-kvshuttle-{name}": str(tokens) for name, tokens in _tokens(placing).items()}
    return said


def last_comment(request: TurnRequest, placing: Placing) -> bytes:
    """A comment for a stream: no client takes it for an event."""
    said = {name.removeprefix("x-kvshuttle-"): text for name, text in _turn(placing).items()}
    fields = {"session": request.identity.session_id, **said, **_tokens(placing)}
    return b": kvshuttle " + dumped(fields) + b"\n\n"


def _turn(placing: Placing) -> dict[str, str]:
    turn = placing.turn
    if turn is None:
        fallbacks = placing.fallbacks
        return {
            "x-kvshuttle-mode": "none",
            "x-kvshuttle-reason": fallbacks[-1] if fallbacks else placing.reason,
        }
    return {
        "x-kvshuttle-turn": str(turn.turn),
        "x-kvshuttle-mode": placing.mode,
        "x-kvshuttle-reason": reason_label(turn.plan.reason),
    }


def _tokens(placing: Placing) -> dict[str, int]:
    """As the prefill leg says, else decode's if it was alone; nothing before either has."""
    told: dict[str, int] = {}
    usage = placing.found() or placing.cost.decode
    if usage is not None:
        told["prompt-tokens"] = usage.prompt
        if usage.cached is not None:
            told["cached-tokens"] = usage.cached
    if placing.turn is not None and placing.turn.plan.reusable_tokens:
        told["reusable-tokens"] = placing.turn.plan.reusable_tokens
    return told
