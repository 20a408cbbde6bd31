"""What a client says of the time after a turn, in headers of a request and in bodies of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvshuttle.client import hints
from kvshuttle.gateway.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.client import Value
    from kvshuttle.v1 import types_pb2 as types

__all__ = ["EXPECTED_IDLE_HEADER", "VALUE_HEADER", "hints_of_body", "hints_of_headers"]

EXPECTED_IDLE_HEADER = "x-kvshuttle-expected-idle"
VALUE_HEADER = "x-kvshuttle-value"

_VALUES: tuple[Value, ...] = ("low", "normal", "high")
_FIELDS = ("expected_idle_s", "value")
# The control plane refuses more; a number beyond it would not fit its message.
_MOST_IDLE_S = 365 * 24 * 3600.0


def hints_of_headers(headers: Mapping[str, str]) -> types.SessionHints | None:
    """Those of a request for a completion; None if it carries none. Raises a 400 ApiError."""
    idle: float | None = None
    if (text := headers.get(EXPECTED_IDLE_HEADER)) is not None:
        try:
            idle = float(text)
        except ValueError:
            raise _bad_idle("X-KVShuttle-Expected-Idle") from None
    return _hints(
        idle,
        headers.get(VALUE_HEADER),
        idle_name="X-KVShuttle-Expected-Idle",
        value_name="X-KVShuttle-Value",
    )


def hints_of_body(raw: bytes) -> types.SessionHints:
    """`{"expected_idle_s": 20, "value": "high"}`, one of them or both. Raises a 400 ApiError."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise bad_request("The body is not a JSON object. Send one.", param="body")
    for name in fields:
        if name not in _FIELDS:
            raise bad_request(
                f"{name[:40]!r} is not known here. Send {' or '.join(_FIELDS)}.", param=name[:40]
            )
    idle: Any = fields.get("expected_idle_s")
    if idle is not None and (isinstance(idle, bool) or not isinstance(idle, int | float)):
        raise _bad_idle("expected_idle_s")
    found = _hints(idle, fields.get("value"), idle_name="expected_idle_s", value_name="value")
    if found is None:
        raise bad_request(f"Nothing is said. Send {' or '.join(_FIELDS)}.", param="body")
    return found


def _hints(
    idle: float | None, value: Any, *, idle_name: str, value_name: str
) -> types.SessionHints | None:
    if idle is not None and not 0 <= idle <= _MOST_IDLE_S:
        raise _bad_idle(idle_name)
    word = value.strip().lower() if isinstance(value, str) else value
    if word is not None and word not in _VALUES:
        raise bad_request(
            f"{value_name} must be low, normal or high. Send one of them, or leave it out.",
            param=value_name,
        )
    return hints(expected_idle_s=idle, value=word)


def _bad_idle(name: str) -> Exception:
    return bad_request(
        f"{name} must be seconds, a number from 0 to a year. Send one, or leave it out.",
        param=name,
    )
