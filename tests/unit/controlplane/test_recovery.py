"""The table of docs/recovery.md, a test a row."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.errors import IncarnationMismatchError
from kvshuttle.controlplane.model.reports import LeaseReport, ReplicaReport
from kvshuttle.controlplane.model.terms import (
    LeaseState,
    ReplicaState,
    SessionKey,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
)
from tests.unit.controlplane.world import KEY, World

DOCS = Path(__file__).parents[3] / "docs" / "recovery.md"
ROWS: dict[str, Callable[[World], None]] = {}


def row(name: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def add(test: Callable[[World], None]) -> Callable[[World], None]:
        ROWS[name] = test
        return test

    return add


@pytest.mark.parametrize(
    "name", ROWS_IN_DOCS := re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(), re.M)
)
def test_row(name: str) -> None:
    ROWS[name](World())


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    assert list(ROWS) == ROWS_IN_DOCS


# -- the pieces ----------------------------------------------------------------------------------


def holds(lease_id: str) -> tuple[LeaseReport, ...]:
    return (LeaseReport(lease_id, 1, is_source=True),)


def reads(lease_id: str) -> tuple[LeaseReport, ...]:
    return (LeaseReport(lease_id, 2, is_source=False, transferring=True),)


def pending(world: World) -> tuple[WorkerRef, WorkerRef, str]:
    """Source, destination and id of a lease that is not granted yet."""
    destination, source, _, order = world.returning()
    return source, destination, order.lease_id


def granted(world: World) -> tuple[WorkerRef, WorkerRef, str]:
    destination, source, _, order = world.returning()
    world.harden(order, source)
    assert world.told(destination, c.Grant)
    return source, destination, order.lease_id


def ended(world: World) -> tuple[WorkerRef, WorkerRef, str]:
    """At its deadline, without a word of its reader."""
    source, destination, lease_id = granted(world)
    world.keep_alive(36)
    assert world.lease(lease_id).state is LeaseState.EXPIRED
    assert not world.lease(lease_id).reader_stopped
    return source, destination, lease_id


def source_says(world: World, *leases: LeaseReport, boot: str = "boot-of-d") -> WorkerRef:
    return world.connect("d", WorkerRole.DECODE, leases=leases, boot_id=boot)


def destination_says(world: World, *leases: LeaseReport, boot: str = "boot-of-p") -> WorkerRef:
    return world.connect("p", WorkerRole.PREFILL, leases=leases, boot_id=boot)


def let_go(world: World, source: WorkerRef, lease_id: str) -> bool:
    """Whether the source was told that its reader has stopped."""
    return lease_id in [x.lease_id for x in world.told(source, c.ReaderStopped)]


def told_to_stop(world: World, destination: WorkerRef, lease_id: str) -> bool:
    return lease_id in [x.lease_id for x in world.told(destination, c.Revoke)]


# -- a start -------------------------------------------------------------------------------------


@row("start-pending")
def _(world: World) -> None:
    source, destination, lease_id = pending(world)
    world.start()
    lease = world.lease(lease_id)
    assert (lease.state, lease.end_reason) == (LeaseState.REVOKED, "EPOCH_CHANGED")
    assert not lease.reader_stopped
    # A late answer to its Harden does not grant it.
    source_says(world, *holds(lease_id))
    assert not let_go(world, source, lease_id)
    destination_says(world)
    assert let_go(world, source, lease_id)
    assert not world.told(destination, c.Grant)


@row("start-granted")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.sent.clear()
    world.start()
    assert world.lease(lease_id).state is LeaseState.GRANTED
    assert lease_id in world.state.open_leases
    assert not world.sent
    world.tick(29)
    assert world.lease(lease_id).open
    world.tick(2)
    assert world.lease(lease_id).state is LeaseState.EXPIRED
    assert not let_go(world, source, lease_id)
    assert not told_to_stop(world, destination, lease_id)


@row("start-ended")
def _(world: World) -> None:
    source, _, lease_id = ended(world)
    before = world.lease(lease_id)
    world.start()
    assert world.lease(lease_id) == before
    assert not let_go(world, source, lease_id)


# -- sources -------------------------------------------------------------------------------------


@row("source-pending")
def _(world: World) -> None:
    for has in (True, False):
        world = World()
        source, destination, lease_id = pending(world)
        source_says(world, *holds(lease_id) if has else ())
        lease = world.lease(lease_id)
        assert (lease.state, lease.end_reason) == (LeaseState.FAILED, "SOURCE_RECONNECTED")
        assert let_go(world, source, lease_id)
        assert told_to_stop(world, destination, lease_id)


@row("source-holds")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.start()
    assert source_says(world, *holds(lease_id)) == source
    assert world.lease(lease_id).state is LeaseState.GRANTED
    assert not let_go(world, source, lease_id)
    destination_says(world, *reads(lease_id))
    world.stop(destination, lease_id)
    assert world.lease(lease_id).state is LeaseState.COMPLETED
    assert let_go(world, source, lease_id)


@row("source-let-go")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    source_says(world)
    assert world.lease(lease_id).open
    assert told_to_stop(world, destination, lease_id)
    assert not let_go(world, source, lease_id)
    world.keep_alive(36)
    lease = world.lease(lease_id)
    assert (lease.state, lease.end_reason) == (LeaseState.FAILED, "SOURCE_RELEASED")


@row("ended-source-holds")
def _(world: World) -> None:
    source, destination, lease_id = ended(world)
    world.start()
    source_says(world, *holds(lease_id))
    assert not let_go(world, source, lease_id)
    assert not told_to_stop(world, destination, lease_id)


@row("reader-stopped-source-holds")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.stop(destination, lease_id)
    assert let_go(world, source, lease_id)
    world.start()
    source_says(world, *holds(lease_id))
    assert let_go(world, source, lease_id)


@row("ended-source-let-go")
def _(world: World) -> None:
    source, _, lease_id = ended(world)
    world.start()
    assert world.state.ledger.leased[source].blocks.total == 20
    source_says(world)
    assert source not in world.state.ledger.leased
    assert not world.lease(lease_id).reader_stopped


@row("source-unknown")
def _(world: World) -> None:
    world.pair()
    source_says(world, *holds("of-another-history"))
    assert not [x for _, x in world.sent if isinstance(x, c.ReaderStopped | c.Revoke)]


@row("source-restarted")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.start()
    destination_says(world, *reads(lease_id))
    assert not told_to_stop(world, destination, lease_id)
    again = source_says(world, boot="another")
    assert again.incarnation > source.incarnation
    assert told_to_stop(world, destination, lease_id)
    stop = world.lease(lease_id).stop
    assert stop is not None
    assert stop.reason == "SOURCE_RESTARTED"


def test_what_was_said_and_not_stored_is_not_said_again_as_if_it_were_old() -> None:
    """An Extend is not stored; its source has obeyed it, and would take the next one for it."""
    world = World()
    source, destination, lease_id = granted(world)
    world.do(world.registry.renew(world.now, lease_id, 60_000_000_000))
    (first,) = world.told(source, c.Extend)
    world.start()
    source_says(world, LeaseReport(lease_id, first.version, is_source=True))
    destination_says(world, *reads(lease_id))
    world.do(world.registry.renew(world.now, lease_id, 60_000_000_000))
    (second,) = world.told(source, c.Extend)
    assert second.version > first.version
    assert destination != source


# -- destinations --------------------------------------------------------------------------------


@row("destination-lacks-pending")
def _(world: World) -> None:
    destination, source, _, order = world.returning()
    destination_says(world)
    assert world.lease(order.lease_id).state is LeaseState.PENDING
    world.harden(order, source)
    assert [x.lease_id for x in world.told(destination, c.Grant)] == [order.lease_id]


@row("destination-has")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.start()
    source_says(world, *holds(lease_id))
    assert destination_says(world, *reads(lease_id)) == destination
    assert world.lease(lease_id).state is LeaseState.GRANTED
    assert not told_to_stop(world, destination, lease_id)
    assert not let_go(world, source, lease_id)
    world.do(world.registry.renew(world.now, lease_id, 60_000_000_000))
    (extend,) = world.told(source, c.Extend)
    world.agent(source, "extended", lease_id, extend.version, True)
    assert len(world.told(destination, c.Extend)) == 1


@row("destination-lacks")
def _(world: World) -> None:
    source, _, lease_id = granted(world)
    world.start()
    source_says(world, *holds(lease_id))
    assert not let_go(world, source, lease_id)
    destination_says(world)
    lease = world.lease(lease_id)
    assert (lease.state, lease.end_reason) == (LeaseState.FAILED, "RECONNECTED")
    assert let_go(world, source, lease_id)


@row("stopping-destination-has")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.do(world.registry.revoke(world.now, lease_id, "OPERATOR"))
    assert told_to_stop(world, destination, lease_id)
    world.start()
    source_says(world, *holds(lease_id))
    destination_says(world, *reads(lease_id))
    (again,) = world.told(destination, c.Revoke)
    assert (again.lease_id, again.reason) == (lease_id, "OPERATOR")
    assert again.version > world.lease(lease_id).version
    assert world.lease(lease_id).open
    assert not let_go(world, source, lease_id)


@row("fenced-source-destination-has")
def _(world: World) -> None:
    """The fence was said while its stream was down, and another boot has the name since."""
    source, destination, lease_id = granted(world)
    world.lose(destination)
    world.do(world.registry.fence(world.now, source, "power off"))
    source_says(world, boot="another")
    destination_says(world, *reads(lease_id))
    assert told_to_stop(world, destination, lease_id)
    assert source in [x.worker for x in world.told(destination, c.PeerFenced)]
    world = World()
    source, destination, lease_id = granted(world)
    world.do(world.registry.fence(world.now, source, "power off"))
    world.start()
    source_says(world, boot="another")
    destination_says(world, *reads(lease_id))
    assert told_to_stop(world, destination, lease_id)
    assert source in [x.worker for x in world.told(destination, c.PeerFenced)]


@row("lost-destination-has")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.lose(destination)
    lease = world.lease(lease_id)
    assert (lease.state, lease.end_reason) == (LeaseState.FAILED, "DESTINATION_LOST")
    destination_says(world, *reads(lease_id))
    assert not told_to_stop(world, destination, lease_id)
    assert not let_go(world, source, lease_id)
    world.stop(destination, lease_id)
    assert world.lease(lease_id).stats is not None
    assert let_go(world, source, lease_id)


@row("ended-destination-has")
def _(world: World) -> None:
    source, destination, lease_id = ended(world)
    world.start()
    destination_says(world, *reads(lease_id))
    assert told_to_stop(world, destination, lease_id)
    assert not let_go(world, source, lease_id)
    # One that was told to stop and was lost before it had is no exception.
    world = World()
    source, destination, lease_id = granted(world)
    world.do(world.registry.revoke(world.now, lease_id, "OPERATOR"))
    world.told(destination, c.Revoke)
    world.lose(destination)
    destination_says(world, *reads(lease_id))
    assert told_to_stop(world, destination, lease_id)


@row("ended-destination-lacks")
def _(world: World) -> None:
    source, _, lease_id = ended(world)
    world.start()
    source_says(world, *holds(lease_id))
    destination_says(world)
    assert world.lease(lease_id).state is LeaseState.EXPIRED
    assert let_go(world, source, lease_id)


@row("destination-unknown")
def _(world: World) -> None:
    _, destination = world.pair()[::-1]
    destination_says(world, *reads("of-another-history"))
    assert told_to_stop(world, destination, "of-another-history")


@row("destination-restarted")
def _(world: World) -> None:
    source, destination, lease_id = granted(world)
    world.start()
    source_says(world, *holds(lease_id))
    again = destination_says(world, boot="another")
    assert again.incarnation > destination.incarnation
    lease = world.lease(lease_id)
    assert (lease.state, lease.end_reason) == (LeaseState.FAILED, "DESTINATION_RESTARTED")
    assert not lease.reader_stopped
    assert not let_go(world, source, lease_id)
    world.keep_alive(60)
    assert not let_go(world, source, lease_id)


@row("destination-fenced")
def _(world: World) -> None:
    for lapse in (0, 36):
        world = World()
        source, destination, lease_id = granted(world)
        world.keep_alive(lapse)
        world.start()
        source_says(world, *holds(lease_id))
        if lapse:
            destination_says(world, boot="another")  # which has taken its place
            assert not let_go(world, source, lease_id)
        world.do(world.registry.fence(world.now, destination, "power off"))
        assert not world.lease(lease_id).open
        assert let_go(world, source, lease_id)


# -- replicas and turns --------------------------------------------------------------------------


def replica(session_id: str = "s") -> ReplicaReport:
    return ReplicaReport(
        SessionKey("t", session_id), bytes([20]), 20, 640, ReplicaState.HARD, 300_000_000_000
    )


@row("replica-adopted")
def _(world: World) -> None:
    world.pair()
    world.begin()
    world.start()
    world.connect("p", WorkerRole.PREFILL)
    decode = world.connect("d", WorkerRole.DECODE, replicas=(replica(),))
    assert world.begin().plan.reason == "CHEAPER_TO_MOVE"
    assert len(world.told(decode, c.Harden)) == 1


@row("replica-of-nobody")
def _(world: World) -> None:
    world.pair()
    world.begin()
    world.do(world.registry.end_session(world.now, KEY))
    world.start()
    world.sent.clear()
    decode = world.connect("d", WorkerRole.DECODE, replicas=(replica(), replica("never")))
    released = [x.key.session_id for x in world.told(decode, c.ReleaseReplica)]
    assert released == ["s", "never"]
    assert not world.state.replicas_of_session(KEY)


@row("replica-gone")
def _(world: World) -> None:
    _, decode = world.pair()
    world.begin()
    world.offer(decode, 20)
    assert world.state.replicas_of_session(KEY)
    for again in (False, True):
        if again:
            world.start()
        world.pair()
        assert not world.state.replicas_of_session(KEY)
        assert world.begin().plan.reason == "NO_REPLICA"


@row("turn-goes-on")
def _(world: World) -> None:
    prefill, decode = world.pair()
    turn = world.begin()
    over = world.begin()
    world.do(world.registry.end_turn(world.now, KEY, over.number, TurnOutcome.COMPLETED))
    world.start()
    world.sent.clear()
    world.pair()
    for ref in (prefill, decode):
        assert [x.turn_token for x in world.told(ref, c.ExpectTurn)] == [turn.token]


# -- and besides ---------------------------------------------------------------------------------


def test_a_boot_whose_place_was_taken_can_be_attested_dead() -> None:
    """An engine that crashed is up again before anybody can say so."""
    world = World()
    source, destination, lease_id = granted(world)
    world.lose(source)
    again = source_says(world, boot="another")
    world.sent.clear()
    world.do(world.registry.fence(world.now, source, "exit 139 seen by its host", "r"))
    assert [x.worker for x in world.told(destination, c.PeerFenced)] == [source]
    assert world.state.workers["d"].ref == again
    assert world.state.workers["d"].connected
    assert not world.told(again, c.Fenced)
    # Once nobody waits for it, it is another boot like any other.
    world.stop(destination, lease_id)
    with pytest.raises(IncarnationMismatchError):
        world.do(world.registry.fence(world.now, source, "again", "q"))
    assert world.do(world.registry.fence(world.now, source, "again", "r")).ref == again
