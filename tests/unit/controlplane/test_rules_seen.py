"""Rules of the registry that nothing else would miss: each was broken once and no test saw it."""

from __future__ import annotations

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import (
    Descriptors,
    Heartbeat,
    LeaseReport,
    PoolStats,
    ReplicaReport,
)
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Hints,
    LeaseState,
    Leg,
    ReplicaState,
    WorkerRef,
    WorkerRole,
)
from tests.unit.controlplane.world import KEY, World


def granted(world: World) -> tuple[WorkerRef, WorkerRef, str]:
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    return prefill, decode, order.lease_id


@pytest.fixture
def world() -> World:
    return World(Limits(eager=False))


def test_a_start_ends_no_lease_early(world: World) -> None:
    """Its destination may have been told to count for up to a TTL more, which is not stored."""
    _, _, lease_id = granted(world)
    world.keep_alive(25)
    world.start()
    world.tick(29.9)
    assert world.lease(lease_id).state is LeaseState.GRANTED
    world.tick(0.2)
    assert world.lease(lease_id).state is LeaseState.EXPIRED


def test_a_lost_reader_that_comes_back_after_its_deadline_is_told_to_stop(world: World) -> None:
    prefill, _, lease_id = granted(world)
    world.lose(prefill)
    for _ in range(16):
        world.keep_alive(2)
    reads = (LeaseReport(lease_id, 2, is_source=False, transferring=True),)
    world.connect("p", WorkerRole.PREFILL, leases=reads)
    assert [x.lease_id for x in world.told(prefill, c.Revoke)] == [lease_id]


def test_workers_learn_of_each_other(world: World) -> None:
    prefill, decode = world.pair()
    (peer,) = world.told(prefill, c.AnnouncePeer)
    assert (peer.worker, peer.ranks) == (decode, ("rank",))
    assert peer.num_blocks == world.state.workers["d"].num_blocks
    # Again after each new boot, which has memory of its own.
    world.lose(decode)
    again = world.connect("d", WorkerRole.DECODE, boot_id="another")
    assert [x.worker for x in world.told(prefill, c.AnnouncePeer)] == [again]


def test_only_what_was_asked_for_is_granted(world: World) -> None:
    prefill, decode, _, order = world.returning()
    larger = BlockRange(order.range.start, order.range.end + 1)
    blocks = Descriptors(larger, order.head_hash, "ids")
    world.agent(decode, "hardened", order.lease_id, order.version, blocks)
    assert not world.told(prefill, c.Grant)
    assert world.lease(order.lease_id).end_reason == "WRONG_RANGE"


def test_what_an_ended_session_left_is_let_go(world: World) -> None:
    _, decode = world.pair()
    turn = world.begin()
    world.do(world.registry.end_session(world.now, KEY))
    world.told(decode, c.ReleaseReplica)
    world.offer(decode, 20, turn)
    assert [x.head_hash for x in world.told(decode, c.ReleaseReplica)] == [bytes([20])]
    assert world.state.replicas_of_session(KEY) == ()


def test_what_a_turn_uses_does_not_go_though_nothing_else_is_there(world: World) -> None:
    _, decode = world.pair()
    turn = world.begin()
    report = ReplicaReport(
        KEY, b"h", 700, 22_400, ReplicaState.HARD, 300 * SECOND, turn.token, Leg.DECODE
    )
    world.agent(decode, "offered", report)
    world.told(decode, c.RetainReplica)
    pool = PoolStats(total_blocks=1_000, free_blocks=20, held_blocks=900)
    world.agent(decode, "heartbeat", Heartbeat(1, pool))
    assert world.told(decode, c.RetainReplica) == []


def test_a_hint_moves_what_decode_holds_and_nothing_at_prefill(world: World) -> None:
    prefill, decode = world.pair()
    turn = world.begin()
    world.offer(decode, 20, turn)
    world.offer(prefill, 21, turn, Leg.PREFILL)
    for ref in (prefill, decode):
        world.told(ref, c.RetainReplica)
    world.do(world.registry.update_session(world.now, KEY, Hints(700 * SECOND)))
    assert [x.head_hash for x in world.told(decode, c.RetainReplica)] == [bytes([20])]
    assert world.told(prefill, c.RetainReplica) == []


def test_a_new_stream_ends_a_renewal_whose_answer_may_be_lost(world: World) -> None:
    """Of a boot whose old stream nobody has missed yet."""
    _, decode, lease_id = granted(world)
    world.do(world.registry.renew(world.now, lease_id, 60 * SECOND))
    assert len(world.told(decode, c.Extend)) == 1
    world.connect("d", WorkerRole.DECODE, leases=(LeaseReport(lease_id, 1, is_source=True),))
    assert world.lease(lease_id).renewal is None
    world.do(world.registry.renew(world.now, lease_id, 60 * SECOND))
    assert len(world.told(decode, c.Extend)) == 1


def test_everybody_hears_of_a_fence(world: World) -> None:
    prefill, decode = world.pair()
    world.do(world.registry.fence(world.now, decode, "seen dead"))
    assert [x.worker for x in world.told(prefill, c.PeerFenced)] == [decode]
    # Also who comes later: it may have read from that boot, or have been read.
    late = world.connect("late", WorkerRole.PREFILL)
    assert [x.worker for x in world.told(late, c.PeerFenced)] == [decode]
