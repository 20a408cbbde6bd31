"""Changing numbers inside JSON text without touching a byte of the rest."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Path", "member", "with_nulls", "with_numbers"]

# Names of members, or places in a list, from the outermost value in.
Path = tuple[str | int, ...]

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?\d+(?=[ \t\r\n,}\]])")
_decode = json.JSONDecoder().raw_decode


def member(text: str, path: Path, start: int = 0) -> tuple[int, int] | None:
    """Where the value at `path` of the object at `start` begins and ends; None if there is none.

    Of members with one name the last counts, as for every reader of JSON. Raises ValueError for
    what is not JSON.
    """
    begin = _skip(text, start)
    span: tuple[int, int] | None = (begin, len(text))
    for name in path:
        assert span is not None
        span = _child(text, name, span[0])
        if span is None:
            return None
    return span


def _child(text: str, name: str | int, start: int) -> tuple[int, int] | None:
    if isinstance(name, int):
        return _item(text, name, start)
    if text[start : start + 1] != "{":
        return None
    found = None
    at = _skip(text, start + 1)
    while text[at : at + 1] == '"':
        key, at = _decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no colon after a name")
        begin = _skip(text, at + 1)
        _, end = _decode(text, begin)
        if key == name:
            found = begin, end
        at = _skip(text, end)
        if text[at : at + 1] != ",":
            break
        at = _skip(text, at + 1)
    return found


def _item(text: str, place: int, start: int) -> tuple[int, int] | None:
    if text[start : start + 1] != "[":
        return None
    at = _skip(text, start + 1)
    while text[at : at + 1] not in ("]", ""):
        _, end = _decode(text, at)
        if place == 0:
            return at, end
        place -= 1
        at = _skip(text, end)
        if text[at : at + 1] != ",":
            break
        at = _skip(text, at + 1)
    return None


def with_numbers(raw: bytes, changes: Mapping[Path, int]) -> bytes:
    """The same JSON with other whole numbers at these paths.

    A path whose value is absent or no whole number stays as it is. What cannot be read is returned
    unchanged.
    """
    try:
        text = raw.decode()
        spots = []
        for path, number in changes.items():
            span = member(text, path)
            if span is not None and (match := _NUMBER.match(text, span[0])):
                spots.append((match.start(), match.end(), str(number)))
    except (ValueError, RecursionError):
        return raw
    return _replaced(text, spots)


def with_nulls(raw: bytes, paths: Iterable[Path]) -> bytes:
    """The same JSON with null at these paths, where there is anything. What cannot be read is
    returned unchanged."""
    try:
        text = raw.decode()
        spans = [span for path in paths if (span := member(text, path)) is not None]
    except (ValueError, RecursionError):
        return raw
    return _replaced(text, [(begin, end, "null") for begin, end in spans])


def _replaced(text: str, spots: list[tuple[int, int, str]]) -> bytes:
    for begin, end, instead in sorted(spots, reverse=True):
        text = text[:begin] + instead + text[end:]
    return text.encode()


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
