"""How effects leave: the journal, the runtime, the watches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvshuttle.controlplane.model.effects import PutTerm, Record
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.runtime import Runtime
from kvshuttle.controlplane.store import StoreError
from kvshuttle.controlplane.store.journal import SPACING_S, Journal


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


async def test_one_turn_of_the_loop_is_one_commit_and_the_next_keeps_its_distance() -> None:
    store, times = SlowStore(), list[float]()
    loop = asyncio.get_running_loop()
    journal = Journal(store, loop, lambda _: None)
    store.go.release(10)
    done = asyncio.Event()
    for _ in range(3):
        journal.append([RECORD], lambda: times.append(loop.time()))
    journal.append([RECORD], done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert store.batches == [4]
    began = journal._began
    done.clear()
    journal.append([RECORD], done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert store.batches == [4, 1]
    assert journal._began - began >= SPACING_S * 0.9
    await journal.close()


async def test_a_release_that_fails_holds_up_nothing() -> None:
    store, seen = SlowStore(), list[dict[str, Any]]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(context))
    journal = Journal(store, loop, lambda _: None)
    store.go.release(10)
    done = asyncio.Event()

    def broken() -> None:
        raise ZeroDivisionError

    journal.append([RECORD], broken)
    journal.append([RECORD], done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert isinstance(seen[0]["exception"], ZeroDivisionError)
    await journal.close()


async def test_with_nothing_to_wait_for_effects_leave_at_once() -> None:
    journal = Journal(SlowStore(), asyncio.get_running_loop(), lambda _: None)
    left: list[int] = []
    journal.append([], lambda: left.append(1))
    assert left == [1]
    await journal.close()


class Nowhere:
    """Streams, watchers and observer of a runtime under test."""

    def reaches(self, *_: Any) -> bool:
        return True

    def deliver(self, *_: Any) -> None: ...
    def disconnect(self, *_: Any) -> None: ...
    def publish(self, *_: Any) -> None: ...
    def fact(self, *_: Any) -> None: ...
    def committed(self, *_: Any) -> None: ...

    def late(self, *_: Any) -> None: ...
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
