"""One suite for every store. What only a file can go through is in test_store_files.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.effects import (
    DropLease,
    DropSession,
    DropWorker,
    PutLease,
    PutSession,
    PutTerm,
    PutWorker,
)
from kvshuttle.controlplane.model.lease import Stop
from kvshuttle.controlplane.model.session import Usage
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import (
    Hints,
    LeaseState,
    SessionValue,
    TransferStats,
    TurnOutcome,
    WorkerRef,
    WorkerState,
)
from kvshuttle.controlplane.store import (
    MemoryStore,
    SqliteStore,
    Store,
)
from kvshuttle.controlplane.store.memory import at_rest
from tests.unit.controlplane.world import KEY, World


class Box:
    """A store that can be closed and opened again."""

    def __init__(self, make: Callable[[], Store], *, lasts: bool) -> None:
        self._make, self._lasts = make, lasts
        self.store = make()
        self.store.load()

    def reopened(self) -> Snapshot:
        if self._lasts:
            self.store.close()
            self.store = self._make()
        return self.store.load()


@pytest.fixture(params=["memory", "sqlite"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    if request.param == "memory":
        box = Box(MemoryStore, lasts=False)
    else:
        box = Box(lambda: SqliteStore(tmp_path / "store.db"), lasts=True)
    yield box
    box.store.close()


def full_world() -> World:
    """A world whose state has every optional field set somewhere."""
    world = World()
    prefill, decode, turn, order = world.returning()
    world.harden(order, decode)
    world.do(world.registry.update_session(world.now, KEY, Hints(5, SessionValue.HIGH)))
    world.stop(prefill, order.lease_id)
    world.do(
        world.registry.end_turn(
            world.now, KEY, turn.number, TurnOutcome.COMPLETED, Usage(1, 2, 3, 4)
        )
    )
    world.begin(request_id="é\"'")
    world.told(decode, c.Harden)
    world.lose(prefill)
    return world


def test_an_empty_store(box: Box) -> None:
    found = box.reopened()
    assert (found.epoch, found.lineage_id) == (0, "")
    assert not list(found.sessions)
    assert not list(found.leases)
    assert not list(found.workers)


def test_everything_comes_back_equal(box: Box) -> None:
    world = full_world()
    state = world.state
    leases = list(state.leases.values())
    assert {lease.state for lease in leases} >= {LeaseState.COMPLETED, LeaseState.FAILED}
    box.store.commit([PutTerm(7, "lineage", 9, 123)])
    box.store.commit(
        [
            *(PutSession(session) for session in state.sessions.values()),
            *(PutLease(lease) for lease in leases),
            *(PutWorker(worker) for worker in state.workers.values()),
        ]
    )
    found = box.reopened()
    assert (found.epoch, found.lineage_id, found.last_incarnation) == (7, "lineage", 9)
    assert found.time_ns == 123
    assert list(found.sessions) == list(state.sessions.values())
    assert sorted(found.leases, key=lambda x: x.order) == leases
    expected = [at_rest(worker) for worker in state.workers.values()]
    assert sorted(found.workers, key=lambda x: x.ref) == sorted(expected, key=lambda x: x.ref)
    assert {worker.state for worker in found.workers} == {WorkerState.LOST}


def test_a_lease_that_is_to_stop(box: Box) -> None:
    world = World()
    _, decode, _, order = world.returning()
    world.harden(order, decode)
    lease = world.lease(order.lease_id).stopping(LeaseState.REVOKED, "why")
    box.store.commit([PutLease(lease)])
    (found,) = box.reopened().leases
    assert found.stop == Stop(LeaseState.REVOKED, "why")
    box.store.commit([PutLease(lease.ended(LeaseState.REVOKED, "why", 5, TransferStats(1, 2)))])
    (found,) = box.reopened().leases
    assert found.stats == TransferStats(1, 2)


def test_the_last_record_of_a_name_counts(box: Box) -> None:
    session = full_world().state.sessions[KEY]
    later = session.with_hints(Hints(9), 77)
    box.store.commit([PutSession(session), PutSession(later)])
    assert list(box.reopened().sessions) == [later]
    box.store.commit([PutSession(session), DropSession(KEY)])
    assert not list(box.reopened().sessions)


def test_drops(box: Box) -> None:
    state = full_world().state
    lease = next(iter(state.leases.values()))
    worker = state.workers["d"]
    box.store.commit([PutLease(lease), PutWorker(worker)])
    box.store.commit([DropLease(lease.lease_id), DropLease("never there")])
    # Another boot has taken the name meanwhile: dropping the old one must not drop it.
    box.store.commit([DropWorker(WorkerRef("d", worker.ref.incarnation - 1))])
    found = box.reopened()
    assert not list(found.leases)
    assert [w.ref for w in found.workers] == [worker.ref]
    box.store.commit([DropWorker(worker.ref)])
    assert not list(box.reopened().workers)


def test_a_failed_commit_writes_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    session = full_world().state.sessions[KEY]

    def records() -> Iterator[PutSession]:
        yield PutSession(session)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.commit(records())
    store.close()
    store = SqliteStore(tmp_path / "s.db")
    assert not list(store.load().sessions)
    store.close()
