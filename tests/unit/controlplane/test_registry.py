"""Events against state, on a clock of the test's own. Each test is named for what it prevents."""

from __future__ import annotations

import dataclasses

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.effects import PutLease, PutSession
from kvshuttle.controlplane.model.errors import (
    BootConflictError,
    LeaseEndedError,
    LeaseNotGrantedError,
    LineageChangedError,
    NotFoundError,
)
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import Descriptors, Heartbeat, LeaseReport
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    LeaseState,
    Leg,
    ReplicaState,
    SessionState,
    TransferOutcome,
    TurnOutcome,
    TurnState,
    WorkerRole,
    WorkerState,
)
from tests.unit.controlplane.world import KEY, World, hello


def test_the_grant_carries_the_destinations_newest_clock() -> None:
    world = World()
    prefill, decode, turn, order = world.returning()
    world.agent(prefill, "heartbeat", Heartbeat(clock=99))
    world.agent(prefill, "heartbeat", Heartbeat(clock=98))  # overtaken on the way
    world.harden(order, decode)
    (grant,) = world.told(prefill, c.Grant)
    assert (grant.as_of, grant.turn_token, grant.ttl_ns) == (99, turn.token, 30 * SECOND)
    assert grant.version > order.version


def test_nothing_is_granted_after_the_guard() -> None:
    world = World()
    prefill, decode, turn, order = world.returning()
    world.now += world.limits.guard_ns + 1
    world.harden(order, decode)
    assert not world.told(prefill, c.Grant)
    (revoke,) = world.told(prefill, c.Revoke)
    assert (revoke.reason, revoke.turn_token) == ("HARDENED_TOO_LATE", turn.token)
    # Nobody was granted, so the source need not wait.
    assert world.told(decode, c.ReaderStopped)


def test_nothing_is_granted_twice() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.harden(order, decode)
    assert len(world.told(prefill, c.Grant)) == 1


def test_nothing_is_granted_in_a_stale_epoch() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.connect("late", WorkerRole.DECODE, highest_epoch=77)
    assert world.state.epoch == 78
    world.harden(order, decode)
    assert not world.told(prefill, c.Grant)
    assert world.lease(order.lease_id).end_reason == "STALE_EPOCH"


def test_nothing_is_granted_to_another_boot() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.lose(prefill)
    again = world.connect("p", WorkerRole.PREFILL, boot_id="another")
    world.harden(order, decode)
    assert again != prefill
    assert not world.told(again, c.Grant)
    assert not world.told(prefill, c.Grant)


def test_only_the_source_hardens_and_only_the_destination_stops() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.harden(order, prefill)
    assert world.lease(order.lease_id).state is LeaseState.PENDING
    world.harden(order, decode)
    world.stop(decode, order.lease_id)
    assert world.lease(order.lease_id).state is LeaseState.GRANTED


def test_a_shorter_range_is_granted_as_it_is_held() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    held = Descriptors(BlockRange(0, 7), b"seven", "ids")
    world.agent(decode, "hardened", order.lease_id, order.version, held)
    (grant,) = world.told(prefill, c.Grant)
    assert grant.blocks is held
    assert world.lease(order.lease_id).head_hash == b"seven"


@pytest.mark.parametrize("way", ["turn", "session", "revoke", "source lost", "drop"])
def test_nothing_but_the_reader_ends_the_sources_hold(way: str) -> None:
    """Not revoke, not the end of a session, not a lost stream."""
    world = World()
    prefill, decode, turn, order = world.returning()
    world.harden(order, decode)
    if way == "turn":
        world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.CANCELLED))
    elif way == "session":
        world.do(world.registry.end_session(world.now, KEY))
    elif way == "revoke":
        world.do(world.registry.revoke(world.now, order.lease_id, ""))
    elif way == "source lost":
        world.lose(decode)
    else:
        world.lose(prefill)
    assert not world.told(decode, c.ReaderStopped)
    if way != "drop":
        (revoke,) = world.told(prefill, c.Revoke)
        assert revoke.lease_id == order.lease_id
    world.keep_alive(31)
    assert not world.told(decode, c.ReaderStopped)
    assert not world.lease(order.lease_id).open
    if way != "drop":
        world.stop(prefill, order.lease_id, TransferOutcome.REVOKED)
        assert world.told(decode, c.ReaderStopped)


def test_a_lease_ends_at_its_deadline_in_the_books_only() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.agent(prefill, "active", order.lease_id)
    world.keep_alive(29)
    assert world.lease(order.lease_id).state is LeaseState.ACTIVE
    world.keep_alive(2)
    assert world.lease(order.lease_id).state is LeaseState.EXPIRED
    assert not world.told(decode, c.ReaderStopped)
    world.stop(prefill, order.lease_id, TransferOutcome.DISCARDED)
    assert world.told(decode, c.ReaderStopped)
    assert world.lease(order.lease_id).stats is not None


def test_a_published_transfer_is_completed_even_if_its_turn_has_ended() -> None:
    world = World()
    prefill, decode, turn, order = world.returning()
    world.harden(order, decode)
    world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.COMPLETED))
    world.stop(prefill, order.lease_id)
    assert world.lease(order.lease_id).state is LeaseState.COMPLETED


def test_what_is_not_needed_before_the_grant_is_given_up_at_once() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.stop(prefill, order.lease_id, TransferOutcome.UNUSED)
    assert world.lease(order.lease_id).state is LeaseState.REVOKED
    assert world.told(decode, c.ReaderStopped)
    world.harden(order, decode)
    assert not world.told(prefill, c.Grant)


def test_forward_follows_the_prefill_leg_once() -> None:
    world = World()
    prefill, decode = world.pair()
    turn = world.begin()
    world.offer(prefill, 9, turn, Leg.PREFILL)
    world.offer(prefill, 9, turn, Leg.PREFILL)
    (order,) = world.told(prefill, c.Harden)
    assert order.destination == decode
    world.harden(order, prefill)
    world.stop(decode, order.lease_id)
    assert world.told(prefill, c.ReaderStopped)
    assert [x.head_hash for x in world.told(prefill, c.ReleaseReplica)] == [bytes([9])]


def test_forward_is_not_made_for_a_turn_that_is_over() -> None:
    world = World()
    prefill, _ = world.pair()
    turn = world.begin()
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.CANCELLED))
    world.offer(prefill, 9, turn, Leg.PREFILL)
    assert not world.told(prefill, c.Harden)
    assert world.told(prefill, c.ReleaseReplica)


def test_a_turn_that_nobody_ends_is_abandoned() -> None:
    world = World()
    world.pair()
    turn = world.begin()
    world.keep_alive(599)
    assert world.state.sessions[KEY].find(turn.number).running
    world.keep_alive(2)
    ended = world.state.sessions[KEY].find(turn.number)
    assert (ended.state, ended.outcome) == (TurnState.ENDED, TurnOutcome.ABANDONED)
    assert not world.state.turns
    assert not +world.state.turns_on


def test_a_session_is_a_tree_and_the_longest_replica_is_returned() -> None:
    world = World()
    _, decode = world.pair()
    world.begin()
    for blocks in (20, 30, 25):
        world.offer(decode, blocks)
    world.begin()
    (order,) = world.told(decode, c.Harden)
    assert order.range == BlockRange(0, 30)
    world.agent(decode, "replica_changed", KEY, bytes([30]), ReplicaState.GONE, 0, "REUSED")
    world.begin()
    (order,) = world.told(decode, c.Harden)
    assert order.range == BlockRange(0, 25)


def test_replicas_of_one_session_are_bounded() -> None:
    world = World(dataclasses.replace(Limits(), replicas_per_session=2))
    _, decode = world.pair()
    world.begin()
    for blocks in (20, 30, 25):
        world.offer(decode, blocks)
    (released,) = world.told(decode, c.ReleaseReplica)
    assert released.head_hash == bytes([20])


def test_a_live_boot_is_not_pushed_out() -> None:
    world = World()
    world.connect("d", WorkerRole.DECODE)
    before = world.state.revision
    with pytest.raises(BootConflictError):
        world.registry.hello(
            world.now, hello("d", WorkerRole.DECODE, boot_id="b", highest_epoch=50)
        )
    # A refused hello has changed nothing.
    assert (world.state.revision, world.state.epoch) == (before, 1)


def test_a_restarted_source_fails_its_leases() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.lose(decode)
    world.connect("d", WorkerRole.DECODE, boot_id="another")
    world.stop(prefill, order.lease_id, TransferOutcome.FAILED)
    assert world.lease(order.lease_id).state is LeaseState.FAILED


def test_events_of_an_old_boot_are_dropped() -> None:
    world = World()
    _, decode, _, order = world.returning()
    world.lose(decode)
    new = world.connect("d", WorkerRole.DECODE, boot_id="another")
    world.offer(decode, 50)
    assert not world.state.replicas.of_worker.get("d")
    world.harden(order, new)
    assert not world.lease(order.lease_id).open


def test_a_late_end_of_an_old_stream_does_not_lose_the_new_one() -> None:
    world = World()
    decode = world.connect("d", WorkerRole.DECODE)
    world.connect("d", WorkerRole.DECODE)
    world.do(world.registry.stream_lost(world.now, decode, 1, "CLOSED"))
    assert world.state.workers["d"].state is WorkerState.READY


def test_a_lost_reader_stopped_is_said_again() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.stop(prefill, order.lease_id)
    world.told(decode, c.ReaderStopped)
    report = LeaseReport(order.lease_id, 1, is_source=True)
    world.connect("d", WorkerRole.DECODE, leases=(report,))
    (again,) = world.told(decode, c.ReaderStopped)
    assert again.lease_id == order.lease_id


def test_silence_is_a_loss() -> None:
    world = World()
    decode = world.connect("d", WorkerRole.DECODE)
    world.tick(5)
    assert not world.effects.disconnects
    world.tick(0.1)
    assert [x.ref for x in world.effects.disconnects] == [decode]
    assert world.state.workers["d"].state is WorkerState.LOST


def test_a_lost_worker_is_forgotten_after_a_while_with_its_number() -> None:
    world = World()
    decode = world.connect("d", WorkerRole.DECODE)
    world.lose(decode)
    world.tick(3_601)
    assert not world.state.workers
    again = world.connect("d", WorkerRole.DECODE)
    assert again.incarnation > decode.incarnation


def test_renewal_is_source_first_within_the_guard_and_capped() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    with pytest.raises(LeaseNotGrantedError):
        world.registry.renew(world.now, order.lease_id, SECOND)
    world.harden(order, decode)
    world.do(world.registry.renew(world.now, order.lease_id, 10_000 * SECOND))
    (extend,) = world.told(decode, c.Extend)
    assert extend.ttl_ns == world.limits.lease_ttl_max_ns
    assert not world.told(prefill, c.Extend)
    world.now += world.limits.guard_ns + 1
    world.agent(decode, "extended", order.lease_id, extend.version, True)
    assert not world.told(prefill, c.Extend)  # too late: the source may let go first
    assert world.lease(order.lease_id).renewal is None
    world.do(world.registry.renew(world.now, order.lease_id, 100 * SECOND))
    (extend,) = world.told(decode, c.Extend)
    world.agent(decode, "extended", order.lease_id, extend.version, True)
    (extend,) = world.told(prefill, c.Extend)
    world.agent(prefill, "extended", order.lease_id, extend.version, False)
    lease = world.lease(order.lease_id)
    assert lease.renewal is None
    assert lease.deadline_ns == world.now + 100 * SECOND
    world.keep_alive(99)
    assert world.lease(order.lease_id).open
    world.keep_alive(3)
    with pytest.raises(LeaseEndedError):
        world.registry.renew(world.now, order.lease_id, SECOND)


def test_ended_things_do_not_pile_up() -> None:
    world = World(
        dataclasses.replace(Limits(), ended_leases_max=3, ended_session_kept_ns=10 * SECOND)
    )
    prefill, decode = world.pair()
    world.begin()
    world.offer(decode, 20)
    for _ in range(8):
        turn = world.begin()
        (order,) = world.told(decode, c.Harden)
        world.harden(order, decode)
        world.stop(prefill, order.lease_id)
        world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.COMPLETED))
    world.tick()
    assert len(world.state.leases) == 3
    assert len(world.state.sessions[KEY].turns) == 1 + world.limits.ended_turns_kept
    world.do(world.registry.end_session(world.now, KEY))
    world.keep_alive(601)
    stored = world.store.load()
    assert not list(stored.sessions)
    assert not list(stored.leases)
    assert not world.state.replicas
    assert not any(world.state.unstopped.values())
    assert not world.state.leases_of_turn
    assert not world.state.open_leases


def test_an_idle_session_ends() -> None:
    world = World(dataclasses.replace(Limits(), session_idle_ns=100 * SECOND))
    world.pair()
    world.begin()
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED))
    world.keep_alive(90)
    assert world.state.active_sessions == 1
    world.keep_alive(30)
    assert world.state.sessions[KEY].state is SessionState.ENDED
    assert world.state.active_sessions == 0


def test_a_forgotten_turn_is_ended_without_complaint() -> None:
    world = World()
    world.pair()
    for number in range(1, 8):
        world.begin()
        world.do(world.registry.end_turn(world.now, KEY, number, TurnOutcome.COMPLETED))
    old = world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED))
    assert (old.number, old.state) == (1, TurnState.ENDED)
    with pytest.raises(NotFoundError):
        world.registry.end_turn(world.now, KEY, 99, TurnOutcome.COMPLETED)


def test_a_late_end_of_a_forgotten_sessions_turn_ends_none_of_its_namesakes() -> None:
    world = World(dataclasses.replace(Limits(), ended_session_kept_ns=10 * SECOND))
    world.pair()
    old = world.begin()
    world.do(world.registry.end_session(world.now, KEY))
    world.keep_alive(20)
    assert KEY not in world.state.sessions
    new = world.begin()
    assert (new.number, new.token != old.token) == (old.number, True)
    with pytest.raises(NotFoundError):
        world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED, token=old.token)
    assert world.state.sessions[KEY].running() == (new,)
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED, token=new.token))
    assert not world.state.sessions[KEY].running()


def test_block_ids_are_never_stored() -> None:
    world = World()
    _, decode, _, order = world.returning()
    world.harden(order, decode)
    assert any(isinstance(r, PutLease) for r in world.effects.records)
    assert "ids" not in repr(world.effects.records)
    assert "ids" not in repr(world.effects.changes)


def test_each_change_has_one_revision_and_versions_only_grow() -> None:
    world = World()
    seen = [0]
    _, decode = world.pair()
    for _ in range(3):
        world.begin()
        seen += [change.revision for change in world.effects.changes]
        world.offer(decode, 20)
        seen += [change.revision for change in world.effects.changes]
    assert seen == sorted(set(seen))
    before = world.state.sessions[KEY].version
    world.start()
    world.connect("d", WorkerRole.DECODE)
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED))
    assert world.state.sessions[KEY].version > before


def test_a_crash_at_any_record_loses_nothing_that_was_said() -> None:
    """Effects leave after their records, so what an agent was told is in the store."""
    world = World()
    prefill, decode, turn, order = world.returning()
    world.harden(order, decode)
    world.start()
    lease = world.lease(order.lease_id)
    assert lease.state is LeaseState.GRANTED
    session = world.state.sessions[KEY]
    assert session.find(turn.number).token == turn.token
    assert world.state.turns_on["p"] == 2
    assert world.state.workers["p"].state is WorkerState.LOST
    assert world.connect("p", WorkerRole.PREFILL) == prefill


def test_begin_makes_one_record_of_the_session() -> None:
    world = World()
    world.pair()
    world.begin()
    assert [type(r) for r in world.effects.records] == [PutSession]


def test_a_lease_names_its_parties() -> None:
    world = World()
    prefill, decode, turn, order = world.returning()
    lease = world.lease(order.lease_id)
    assert lease.direction is Direction.RETURN
    assert (lease.source, lease.destination, lease.turn) == (decode, prefill, turn.number)
    assert world.told(prefill, c.ExpectTurn)[-1].lease_id == lease.lease_id


def test_an_agent_of_another_store_needs_the_operators_word() -> None:
    world = World()
    with pytest.raises(LineageChangedError):
        world.connect("p", WorkerRole.PREFILL, lineage_id="another")
    assert "p" not in world.state.workers
    world.registry.accept_lineage_change = True
    assert world.connect("p", WorkerRole.PREFILL, lineage_id="another").worker_id == "p"
