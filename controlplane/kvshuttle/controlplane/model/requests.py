"""Which calls were made already, by the ids that their callers gave them.

Many calls may be repeated as they are: ending a turn that has ended changes nothing. For the others
the newest ids are remembered on what they changed, and stored with it.
"""

from __future__ import annotations

__all__ = ["KEPT", "remember", "request_name"]

KEPT = 4
"""A caller repeats its last call; four leave room for as many callers of one thing."""


def request_name(call: str, request_id: str) -> str:
    """A request id is its call's: a caller may use one for all calls of a turn. Empty for none."""
    return f"{call}:{request_id}" if request_id else ""


def remember(requests: tuple[str, ...], name: str) -> tuple[str, ...]:
    """With one more; the oldest go."""
    return (*requests, name)[-KEPT:] if name else requests
