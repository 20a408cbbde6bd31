"""Hashes by which other sessions of a tenant find a chain: some of its blocks', from the start on.

Dense where prefixes are short and sparse where they are long, two an octave: a chain of 100k tokens
has 21. Which blocks is in the API's text (``AgentWelcome.checkpoint_interval``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["checkpoints"]


def checkpoints(hashes: Sequence[bytes], blocks: int, interval: int) -> list[bytes]:
    """Those of the first ``blocks`` blocks of a chain; none without an interval."""
    if interval <= 0:
        return []
    found: list[bytes] = []
    for step in _steps():
        if step * interval > blocks:
            break
        found.append(hashes[step * interval - 1])
    return found


def _steps() -> Iterator[int]:
    yield 1
    octave = 2
    while True:
        yield octave
        yield octave + octave // 2
        octave *= 2
