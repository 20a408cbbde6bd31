"""Deadlines, soonest first."""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvshuttle.controlplane.model.terms import plain

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt

__all__ = ["Agenda", "Due"]

SECOND = 1_000_000_000


@plain
class Due(IntEnum):
    """What an agenda entry is about."""

    LEASE = 1
    TURN = 2
    SESSION = 3
    LEASE_FORGET = 4
    WORKER_FORGET = 5


_GRAIN_NS = {
    Due.LEASE: SECOND // 4,
    Due.TURN: SECOND,
    Due.SESSION: 60 * SECOND,
    Due.LEASE_FORGET: SECOND,
    Due.WORKER_FORGET: SECOND,
}
"""Width of a kind's buckets: a kind whose deadlines lie far away and close together, as those of
idle sessions do, gets few and full ones."""


@dataclass(slots=True)
class _Bucket:
    due_ns: array[int] = field(default_factory=lambda: array("q"))
    names: list[Hashable] = field(default_factory=list)


@dataclass(slots=True)
class Agenda:
    """An entry is a hint to look, not an order: what it names decides by its own state, so nothing
    is ever removed from the middle.

    Only what is near lies in a heap. The rest waits in buckets, 16 bytes an entry instead of 150:
    there is one entry for every session and every running turn, and most are never looked at.
    """

    _near: list[tuple[int, int, Due, Hashable]] = field(default_factory=list)
    _count: int = 0
    _buckets: dict[tuple[int, Due], _Bucket] = field(default_factory=dict)
    # The starts of the buckets.
    _starts: list[tuple[int, Due]] = field(default_factory=list)
    # Buckets that start at or before this are open: their entries lie in the heap.
    _open_ns: int = 0
    _far: int = 0

    def add(self, due_ns: int, kind: Due, name: Hashable) -> None:
        """Look at `name` at `due_ns` or later."""
        grain = _GRAIN_NS[kind]
        start = due_ns - due_ns % grain
        if start <= self._open_ns:
            self._count += 1
            heapq.heappush(self._near, (due_ns, self._count, kind, name))
            return
        bucket = self._buckets.get((start, kind))
        if bucket is None:
            bucket = self._buckets[start, kind] = _Bucket()
            heapq.heappush(self._starts, (start, kind))
        bucket.due_ns.append(due_ns)
        bucket.names.append(name)
        self._far += 1

    def add_all(self, due_ns: npt.NDArray[np.int64], kind: Due, names: Sequence[Hashable]) -> None:
        """Many of a kind at once."""
        order = np.argsort(due_ns, kind="stable")
        ordered = due_ns[order]
        starts = ordered - ordered % _GRAIN_NS[kind]
        edges = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(ordered)]
        for first, last in pairwise(edges):
            here = [names[at] for at in order[first:last].tolist()]
            if not here:
                continue
            start = int(starts[first])
            if start <= self._open_ns:
                for due, name in zip(ordered[first:last].tolist(), here, strict=True):
                    self.add(due, kind, name)
                continue
            # Makes the bucket, if there is none.
            self.add(int(ordered[first]), kind, here[0])
            bucket = self._buckets[start, kind]
            bucket.due_ns.frombytes(ordered[first + 1 : last].tobytes())
            bucket.names.extend(here[1:])
            self._far += len(here) - 1

    def _open(self, now_ns: int) -> None:
        self._open_ns = max(self._open_ns, now_ns)
        while self._starts and self._starts[0][0] <= now_ns:
            start = heapq.heappop(self._starts)
            bucket = self._buckets.pop(start)
            self._far -= len(bucket.names)
            for due_ns, name in zip(bucket.due_ns, bucket.names, strict=True):
                self._count += 1
                heapq.heappush(self._near, (due_ns, self._count, start[1], name))

    def pop(self, now_ns: int, at_most: int) -> list[tuple[Due, Hashable]]:
        """What is due, at most so much of it."""
        self._open(now_ns)
        found: list[tuple[Due, Hashable]] = []
        near = self._near
        while near and near[0][0] <= now_ns and len(found) < at_most:
            _, _, kind, name = heapq.heappop(near)
            found.append((kind, name))
        return found

    def behind(self, now_ns: int) -> bool:
        """Whether something is due now."""
        return bool(self._near) and self._near[0][0] <= now_ns

    def __len__(self) -> int:
        return len(self._near) + self._far
