"""Watches: one snapshot, then every change once, in order.

A change's place in the order is its revision, which the registry gives. The snapshot is taken at
some revision of the registry; changes up to it may still be on their way out, and each reader skips
them by their number.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvshuttle.controlplane.model.effects import LeaseChange, SessionChange
from kvshuttle.controlplane.model.errors import InvalidFieldError, WatchCompactedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvshuttle.controlplane.model.effects import Change
    from kvshuttle.controlplane.model.limits import Limits

__all__ = ["Changed", "Hub", "Hubs", "Piece", "Progress"]

C = TypeVar("C", SessionChange, LeaseChange)


@dataclass(frozen=True, slots=True)
class Piece(Generic[C]):
    """A part of a snapshot; the reader drops what it knew when the first part comes."""

    items: list[C]
    complete: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Changed(Generic[C]):
    """One change."""

    item: C


@dataclass(frozen=True, slots=True)
class Progress:
    """Nothing happened up to `revision`."""

    revision: int


@dataclass(slots=True, eq=False)
class _Reader(Generic[C]):
    wants: Callable[[C], bool]
    after: int
    queue: deque[C] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    lagged: bool = False


class Hub(Generic[C]):
    """All watches of one kind of object. Belongs to one event loop."""

    def __init__(self, limits: Limits, start: int) -> None:
        self._limits = limits
        self._history: deque[C] = deque(maxlen=limits.watch_history)
        self._readers: set[_Reader[C]] = set()
        # Changes up to here cannot be replayed; changes up to `last` have been published.
        self._floor = start
        self.last = start

    def publish(self, change: C) -> None:
        """One change, in order."""
        if len(self._history) == self._history.maxlen:
            self._floor = self._history[0].revision
        self._history.append(change)
        self.last = change.revision
        for reader in self._readers:
            if change.revision <= reader.after or reader.lagged or not reader.wants(change):
                continue
            if len(reader.queue) >= self._limits.watch_buffer:
                # Too slow: it starts again from a snapshot rather than miss a change silently.
                reader.queue.clear()
                reader.lagged = True
            else:
                reader.queue.append(change)
            reader.wake.set()

    async def watch(
        self,
        resume_token: str,
        wants: Callable[[C], bool],
        snapshot: Callable[[], tuple[int, list[C]]],
        settled: Callable[[], asyncio.Future[None] | object],
    ) -> AsyncIterator[Piece[C] | Changed[C] | Progress]:
        """`snapshot` gives a revision and the objects at it; `settled` waits until that is
        durable. InvalidFieldError, WatchCompactedError."""
        reader: _Reader[C] = _Reader(wants, 0)
        if resume_token:
            reader.after = self._resume(resume_token)
            reader.queue.extend(
                change
                for change in self._history
                if change.revision > reader.after and wants(change)
            )
        else:
            reader.lagged = True
        self._readers.add(reader)
        try:
            while True:
                if reader.lagged:
                    revision, items = snapshot()
                    # In one step with the snapshot: what comes after it is queued.
                    reader.after, reader.lagged = revision, False
                    reader.queue.clear()
                    await settled()  # type: ignore[misc]
                    size = self._limits.snapshot_piece
                    pieces = [items[i : i + size] for i in range(0, len(items), size)] or [[]]
                    for number, piece in enumerate(pieces, 1):
                        yield Piece(piece, number == len(pieces), revision)
                while reader.queue and not reader.lagged:
                    change = reader.queue.popleft()
                    yield Changed(change)
                if reader.lagged:
                    continue
                reader.wake.clear()
                try:
                    async with asyncio.timeout(self._limits.watch_progress_ns / 1e9):
                        await reader.wake.wait()
                except TimeoutError:
                    yield Progress(max(self.last, reader.after))
        finally:
            self._readers.discard(reader)

    def _resume(self, token: str) -> int:
        try:
            revision = int(token, 16)
        except ValueError:
            raise InvalidFieldError(
                "resume_token", token, "pass the resume_token of a message of this watch"
            ) from None
        if not self._floor <= revision <= self.last:
            raise WatchCompactedError(
                "this watch cannot go on from so long ago: start it again without resume_token",
                resume_token=token,
            )
        return revision


class Hubs:
    """The `Watchers` of a runtime."""

    def __init__(self, limits: Limits, start: int) -> None:
        self.sessions: Hub[SessionChange] = Hub(limits, start)
        self.leases: Hub[LeaseChange] = Hub(limits, start)

    def publish(self, change: Change) -> None:
        """One change, in order."""
        if isinstance(change, SessionChange):
            self.sessions.publish(change)
        else:
            self.leases.publish(change)
        # One numbering for both: a resume token never lies before what the other kind did.
        self.sessions.last = self.leases.last = change.revision


def token(revision: int) -> str:
    """A resume token."""
    return f"{revision:x}"
