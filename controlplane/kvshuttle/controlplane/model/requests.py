"""Which calls were made already, by the ids that their callers gave them.

Many calls may be repeated as they are: ending a turn that has ended changes nothing. For the others
the newest ids are remembered on what they changed, and stored with it, each with a digest of what
was asked for: an id that was given to another call of the kind is refused, rather than answered as
if its wish had been done.
"""

from __future__ import annotations

from zlib import crc32

from kvshuttle.controlplane.model.errors import InvalidFieldError

__all__ = ["KEPT", "remember", "repeated", "request_name"]

KEPT = 4
"""A caller repeats its last call; four leave room for as many callers of one thing."""


def request_name(call: str, request_id: str, *asked: object) -> str:
    """A request id is its call's: a caller may use one for all calls of a turn. Empty for none.
    `asked` is all that repetitions of the call have in common, as plain values."""
    if not request_id:
        return ""
    digest = f"#{crc32(repr(asked).encode()):08x}" if asked else ""
    return f"{call}{digest}:{request_id}"


def repeated(requests: tuple[str, ...], name: str) -> bool:
    """Whether it was made before. InvalidFieldError if another was made under its id."""
    if not name or not requests:
        return False
    if name in requests:
        return True
    said, _, request_id = name.partition(":")
    call, _, _ = said.partition("#")
    for other in requests:
        before, _, other_id = other.partition(":")
        if other_id == request_id and before.partition("#")[0] == call:
            if "#" not in before:
                return True  # stored by a version that did not tell them apart
            raise InvalidFieldError(
                "request_id",
                request_id,
                f"it was given to another {call}: use a new one, or repeat what that one asked for",
            )
    return False


def remember(requests: tuple[str, ...], name: str) -> tuple[str, ...]:
    """With one more; the oldest go."""
    return (*requests, name)[-KEPT:] if name else requests
