"""How effects leave: the journal, the runtime, the watches."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from kvshuttle.controlplane.model.effects import PutTerm, Record, SessionChange
from kvshuttle.controlplane.model.limits import MS, Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import SessionKey
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.runtime import Runtime
from kvshuttle.controlplane.services.watch import Changed, Hub, Piece, Progress, token
from kvshuttle.controlplane.store import StoreError
from kvshuttle.controlplane.store.journal import Journal


class SlowStore:
    """Commits when the test says so, on the journal's thread."""

    kind = "slow"
    durable = True

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.entered = threading.Event()
        self.go = threading.Semaphore(0)
        self.broken = False

    def load(self) -> Snapshot:
        return Snapshot()

    def commit(self, records: Iterable[Record]) -> None:
        self.entered.set()
        assert self.go.acquire(timeout=10)
        if self.broken:
            raise StoreError("disk full")
        self.batches.append(len(list(records)))

    def close(self) -> None:
        pass


RECORD = PutTerm(1, "l", 0, 0)


async def test_what_queues_up_becomes_one_commit_and_leaves_in_order() -> None:
    store, left = SlowStore(), list[int]()
    done = asyncio.Event()
    journal = Journal(store, asyncio.get_running_loop(), lambda _: None)

    def leaver(number: int) -> Callable[[], None]:
        def leave() -> None:
            left.append(number)
            if len(left) == 6:
                done.set()

        return leave

    journal.append([RECORD], leaver(0))
    assert await asyncio.to_thread(store.entered.wait, 10)
    for number in range(1, 5):
        journal.append([RECORD, RECORD], leaver(number))
    # Nothing to store, but it must not overtake what came before.
    journal.append([], leaver(5))
    assert left == []
    store.go.release(2)
    async with asyncio.timeout(10):
        await done.wait()
    assert left == list(range(6))
    assert store.batches == [1, 8]
    await journal.close()


async def test_with_nothing_to_wait_for_effects_leave_at_once() -> None:
    journal = Journal(SlowStore(), asyncio.get_running_loop(), lambda _: None)
    left: list[int] = []
    journal.append([], lambda: left.append(1))
    assert left == [1]
    await journal.close()


class Nowhere:
    """Streams, watchers and observer of a runtime under test."""

    def deliver(self, *_: Any) -> None: ...
    def disconnect(self, *_: Any) -> None: ...
    def publish(self, *_: Any) -> None: ...
    def fact(self, *_: Any) -> None: ...
    def committed(self, *_: Any) -> None: ...
    def now_ns(self) -> int:
        return 1


async def test_a_failed_store_fails_every_caller_and_the_process() -> None:
    """Memory is ahead of the disk then: nobody may be told anything more."""
    store, sink = SlowStore(), Nowhere()
    registry = Registry(Limits(), Planner())
    runtime = Runtime(registry, store, sink, sink, sink, sink)
    waiting = runtime.post(lambda now: registry.start(now, Snapshot(), "lineage"))
    reading = asyncio.ensure_future(runtime.settled())
    store.broken = True
    store.go.release()
    for future in (waiting, reading):
        with pytest.raises(StoreError):
            await asyncio.wait_for(future, 10)
    assert isinstance(await asyncio.wait_for(runtime.failed, 10), StoreError)
    with pytest.raises(StoreError):
        await runtime.apply(registry.tick)
    with pytest.raises(StoreError):
        await runtime.settled()
    await runtime.close()


# -- watches -------------------------------------------------------------------------------------


def change(revision: int) -> SessionChange:
    session = Session(SessionKey("t", f"s{revision}"), 0, 0, version=revision)
    return SessionChange(revision, session, ())


async def nothing() -> None:
    return None


class Watched:
    def __init__(self, **limits: Any) -> None:
        self.hub: Hub[SessionChange] = Hub(
            dataclasses.replace(Limits(), watch_progress_ns=20 * MS, **limits), 0
        )
        self.revision = 0

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.revision += 1
            self.hub.publish(change(self.revision))

    def watch(self, resume: str = "") -> AsyncIterator[Any]:
        return self.hub.watch(
            resume, lambda _: True, lambda: (self.revision, [change(self.revision)]), nothing
        )


async def test_a_slow_reader_is_resynchronised_and_misses_nothing_silently() -> None:
    watched = Watched(watch_buffer=3)
    reader = watched.watch()
    assert isinstance(await anext(reader), Piece)
    watched.publish(2)
    assert (await anext(reader)).item.revision == 1
    watched.publish(10)
    piece = await anext(reader)
    while not isinstance(piece, Piece):
        piece = await anext(reader)
    assert piece.revision == 12
    watched.publish()
    assert (await anext(reader)).item.revision == 13
    await reader.aclose()  # type: ignore[attr-defined]
    assert not watched.hub._readers


async def test_a_change_in_the_snapshot_is_not_told_again() -> None:
    """It was decided before the snapshot and published after it."""
    watched = Watched()
    reader = watched.watch()
    watched.revision = 2  # decided, not yet durable
    piece = await anext(reader)
    assert isinstance(piece, Piece)
    assert piece.revision == 2
    for revision in (1, 2, 3):
        watched.hub.publish(change(revision))
    told = await anext(reader)
    assert isinstance(told, Changed)
    assert told.item.revision == 3
    await reader.aclose()  # type: ignore[attr-defined]


async def test_a_quiet_watch_says_that_it_lives() -> None:
    watched = Watched()
    watched.publish(4)
    reader = watched.watch(token(2))
    assert [(await anext(reader)).item.revision for _ in range(2)] == [3, 4]
    progress = await anext(reader)
    assert isinstance(progress, Progress)
    assert progress.revision == 4
    await reader.aclose()  # type: ignore[attr-defined]
