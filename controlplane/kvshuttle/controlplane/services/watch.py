"""Watches: one snapshot, then every change once, in order. The same code for sessions and leases.

A change's place in the order is its revision, which the registry gives. Changes are published when
they are durable, so what is read from the state may be ahead of what has been published.

A snapshot is sent in pieces, and the world goes on meanwhile. So pieces are read as they are sent,
and objects that change before the last piece are noted with their latest image and sent again. Once
everything that pieces were read from has been published, what was noted brings the reader to the
state at exactly the revision that was published last: that is the snapshot's, and changes follow
from there. Nothing is copied but the names.

What waits for one reader is bounded: one that is too slow for the changes gets a new snapshot.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from kvshuttle.controlplane.model.effects import (
    LeaseChange,
    LeaseDropped,
    SessionChange,
    SessionDropped,
)
from kvshuttle.controlplane.model.errors import (
    BudgetExceededError,
    InvalidFieldError,
    WatchCompactedError,
)
from kvshuttle.controlplane.model.ledger import Division
from kvshuttle.controlplane.services.watch_sources import Wish

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable

    from kvshuttle.controlplane.model.effects import Change
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.services.watch_sources import Source

__all__ = [
    "Changed",
    "Hub",
    "Hubs",
    "Piece",
    "Progress",
    "token",
]

C = TypeVar("C", SessionChange | SessionDropped, LeaseChange | LeaseDropped)
_TOKEN = re.compile("[0-9a-f]{1,32}")
NAMES_AT_ONCE = 500
"""Names looked at before others may run: some milliseconds where all have to be unpacked."""
RETRY_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Piece(Generic[C]):
    """A part of a snapshot: with the first, the reader drops what it knew; a later one replaces
    what an earlier one said of an object. `revision` is the whole's, and 0 before the last."""

    items: list[C]
    first: bool
    complete: bool
    revision: int = 0


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
    wish: Wish
    after: int = 0
    queue: deque[C] = field(default_factory=deque)
    # While a snapshot is on its way: what changed since it began, each object's latest image.
    noted: dict[Hashable, C] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    lagged: bool = False

    def take(self, change: C, most: int) -> None:
        """A change for this reader; it must start again when more wait than may."""
        if change.revision <= self.after or self.lagged:
            return
        if self.noted is not None:
            self.noted[change.name] = change
            full = len(self.noted) > most
        else:
            self.queue.append(change)
            full = len(self.queue) > most
        if full:
            self.queue.clear()
            self.noted = None
            self.lagged = True
        self.wake.set()

    def some_noted(self, most: int) -> list[C]:
        """Takes out what was noted, the oldest first."""
        assert self.noted is not None
        names = list(islice(self.noted, most))
        return [self.noted.pop(name) for name in names]


class Hub(Generic[C]):
    """All watches of one kind of object. Belongs to one event loop."""

    def __init__(self, limits: Limits, start: int) -> None:
        self._limits = limits
        self._history: deque[C] = deque(maxlen=limits.watch_history)
        self._readers: dict[Wish, set[_Reader[C]]] = {}
        self._count = Division()
        # Changes up to here cannot be replayed; changes up to `last` have been published.
        self._floor = start
        self.last = start

    @property
    def open(self) -> int:
        """Watches that run."""
        return self._count.total

    def publish(self, change: C) -> None:
        """One change, in order."""
        if len(self._history) == self._history.maxlen:
            self._floor = self._history[0].revision
        self._history.append(change)
        self.last = change.revision
        if not self._readers:
            return
        tenant, session_id = change.key
        for wish in (
            Wish(),
            Wish(tenant),
            Wish(None, session_id),
            Wish(tenant, session_id),
        ):
            for reader in self._readers.get(wish, ()):
                reader.take(change, self._limits.watch_buffer)

    async def watch(
        self,
        resume_token: str,
        wish: Wish,
        source: Source[C],
        settled: Callable[[], Awaitable[object]],
    ) -> AsyncGenerator[Piece[C] | Changed[C] | Progress, None]:
        """`settled` waits until whatever was applied before is published. InvalidFieldError,
        WatchCompactedError, BudgetExceededError."""
        reader: _Reader[C] = _Reader(wish, lagged=not resume_token)
        self._admit(wish)
        try:
            if resume_token:
                reader.after = self._resume(resume_token)
                reader.queue.extend(
                    change
                    for change in self._history
                    if change.revision > reader.after and wish.matches(change.key)
                )
            self._readers.setdefault(wish, set()).add(reader)
            while True:
                while reader.lagged:
                    async for piece in self._snapshot(reader, source, settled):
                        yield piece
                while reader.queue:
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
            self._count.add(wish.tenant or "", -1)
            same = self._readers.get(wish, set())
            same.discard(reader)
            if not same:
                self._readers.pop(wish, None)

    async def _snapshot(
        self,
        reader: _Reader[C],
        source: Source[C],
        settled: Callable[[], Awaitable[object]],
    ) -> AsyncIterator[Piece[C]]:
        """All pieces, or as many as were sent until the reader had lagged again."""
        size, wish = self._limits.snapshot_piece, reader.wish
        reader.noted, reader.lagged = {}, False
        first = True
        items: list[C] = []
        names = source.names(wish)
        for begin in range(0, len(names), NAMES_AT_ONCE):
            for name in islice(names, begin, begin + NAMES_AT_ONCE):
                found = source.read(name, wish)
                if found is not None:
                    items.append(found)
                if len(items) == size:
                    # A reader must not be shown what a crash could still undo.
                    await settled()
                    if reader.lagged:
                        return
                    yield Piece(items, first, complete=False)
                    first, items = False, []
                    if len(reader.noted or ()) >= size:
                        yield Piece(reader.some_noted(size), first, complete=False)
            await asyncio.sleep(0)
        # From here on nothing is read that was not published.
        await settled()
        while not reader.lagged and reader.noted and len(items) + len(reader.noted) > size:
            part = items or reader.some_noted(size)
            items = []
            yield Piece(part, first, complete=False)
            first = False
        if reader.lagged or reader.noted is None:
            return
        # In one step: what is published after this is queued.
        items += reader.noted.values()
        reader.noted, reader.after = None, self.last
        yield Piece(items, first, complete=True, revision=reader.after)

    def _admit(self, wish: Wish) -> None:
        tenant = wish.tenant or ""
        for scope, used, most in (
            ("the server", self._count.total, self._limits.watches_max),
            (
                f"tenant {tenant}" if tenant else "operators together",
                self._count.of.get(tenant, 0),
                self._limits.watches_per_tenant,
            ),
        ):
            if used >= most:
                remedy = "end watches that are not read, or share one among your readers"
                raise BudgetExceededError(
                    "WATCHES",
                    f"{scope} has {used} watches, and {most} is the most: {remedy}",
                    RETRY_NS,
                    scope=scope,
                    used=used,
                    most=most,
                    remedy=remedy,
                )
        self._count.add(tenant, 1)

    def _resume(self, given: str) -> int:
        if not _TOKEN.fullmatch(given):
            raise InvalidFieldError(
                "resume_token", given, "pass the resume_token of a message of this watch"
            )
        revision = int(given, 16)
        if not self._floor <= revision <= self.last:
            raise WatchCompactedError(
                "this watch cannot go on from so long ago: start it again without resume_token",
                resume_token=given,
                remedy="start the watch again without resume_token",
            )
        return revision


class Hubs:
    """The `Watchers` of a runtime."""

    def __init__(self, limits: Limits, start: int) -> None:
        self.sessions: Hub[SessionChange | SessionDropped] = Hub(limits, start)
        self.leases: Hub[LeaseChange | LeaseDropped] = Hub(limits, start)

    def publish(self, change: Change) -> None:
        """One change, in order."""
        if isinstance(change, SessionChange | SessionDropped):
            self.sessions.publish(change)
        else:
            self.leases.publish(change)
        # One numbering for both: a resume token never lies before what the other kind did.
        self.sessions.last = self.leases.last = change.revision


def token(revision: int) -> str:
    """A resume token; none for 0."""
    return f"{revision:x}" if revision else ""
