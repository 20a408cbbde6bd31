"""What a store takes on disk stays bounded under steady load, and so does its log."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.effects import DropSession, PutSession, PutTerm
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import ReplicaReport
from kvshuttle.controlplane.model.terms import (
    Leg,
    ReplicaState,
    SessionKey,
    TurnOutcome,
)
from kvshuttle.controlplane.store import MemoryStore, SqliteStore, sqlite
from tests.unit.controlplane.store_files import FRAME, HEADER, PAGE, log_of, session
from tests.unit.controlplane.world import World


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "s.db")
    # Sizes do not depend on it, and the test takes seconds instead of minutes.
    store._db.execute("PRAGMA synchronous = OFF")
    yield store
    store.close()


def used(store: SqliteStore) -> tuple[int, int]:
    """Pages of the file, and those of them that are free."""
    return tuple(
        store._db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count")
    )


def live(world: World, name: str) -> None:
    """A session from its first turn to its end, with a lease, and a worker that comes and goes."""
    key = SessionKey("t", name)
    prefill, decode = (world.state.workers[x].ref for x in "pd")
    first = world.begin(key=key)
    head = os.urandom(32)
    report = ReplicaReport(key, head, 20, 640, ReplicaState.HARD, 300 * SECOND, "", Leg.DECODE)
    world.agent(decode, "offered", report)
    turn = world.begin(key=key)
    for order in world.told(decode, c.Harden):
        world.harden(order, decode)
        world.stop(prefill, order.lease_id)
    for each in (first, turn):
        world.do(world.registry.end_turn(world.now, key, each.number, TurnOutcome.COMPLETED))
    world.do(world.registry.end_session(world.now, key))
    world.sent.clear()
    world.keep_alive(6)


def test_a_steady_load_does_not_make_it_grow(store: SqliteStore) -> None:
    limits = dataclasses.replace(Limits(), ended_leases_max=50)
    world = World(limits, cast("MemoryStore", store))
    world.pair()
    sizes, logs = [], []
    for number in range(500):
        live(world, f"session-{number}-{'x' * (number % 50)}")
        if number % 50 == 49:
            sizes.append(used(store))
            logs.append(log_of(store.path).stat().st_size)
    found = store.load()
    # Ten minutes of ended sessions, six seconds each; the newest ended leases.
    assert 90 <= len(list(found.sessions)) <= 110
    assert 40 <= len(list(found.leases)) <= 52
    # Once ten minutes have passed, freed pages are used again.
    settled = sizes[3][0]
    assert all(pages <= settled * 1.15 + 2 for pages, _ in sizes[3:]), sizes
    most = HEADER + (sqlite.LOG_PAGES + 200) * FRAME
    assert all(size <= most for size in logs), logs


def test_pages_of_what_is_gone_are_used_again(store: SqliteStore) -> None:
    """Many sessions at once, then none, then as many: the file is as large as the most."""
    records = [session(number, 200) for number in range(5_000)]
    store.commit(records)
    full, _ = used(store)
    store.commit([DropSession(record.session.key) for record in records])
    pages, free = used(store)
    assert pages == full
    assert free > full * 0.95
    for _ in range(3):
        store.commit(records)
        assert used(store)[0] <= full * 1.02
        store.commit([DropSession(record.session.key) for record in records])


def test_the_log_is_cut_after_a_large_transaction(store: SqliteStore) -> None:
    large = [session(number, 2_000) for number in range(10_000)]
    store.commit(large)
    log = log_of(store.path)
    assert log.stat().st_size > sqlite.LOG_BYTES
    for number in range(3):
        store.commit([PutTerm(number, "lineage", 0, 0)])
    assert log.stat().st_size <= sqlite.LOG_BYTES


def test_the_log_stays_small_whatever_is_written(store: SqliteStore) -> None:
    most = 0
    for number in range(3_000):
        store.commit([session(number % 40, number % 900)])
        most = max(most, log_of(store.path).stat().st_size)
    assert sqlite.LOG_PAGES * PAGE < most < (sqlite.LOG_PAGES + 100) * FRAME


def test_a_session_of_many_turns_has_a_row_of_bounded_size(store: SqliteStore) -> None:
    world = World(store=cast("MemoryStore", store))
    world.pair()
    key = SessionKey("t", "s")

    def size() -> Any:
        return store._db.execute("SELECT length(body) FROM sessions").fetchone()[0]

    sizes = []
    for number in range(60):
        turn = world.begin(key=key, request_id=f"{number:0128}")
        world.do(world.registry.end_turn(world.now, key, turn.number, TurnOutcome.COMPLETED))
        world.now += 10 * SECOND
        sizes.append(size())
    assert max(sizes[20:]) <= max(sizes[:20]) + 64


def test_a_put_of_the_same_row_costs_no_page(store: SqliteStore) -> None:
    for number in range(200):
        store.commit([session(number)])
    before = used(store)[0]
    for number in range(2_000):
        store.commit([PutSession(session(number % 200).session)])
    assert used(store)[0] <= before + 1
