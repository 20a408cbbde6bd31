"""What an eager return must not do: it is a guess, so it takes nothing from anybody."""

from __future__ import annotations

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import Heartbeat, PoolStats, ReplicaReport
from kvshuttle.controlplane.model.terms import (
    Leg,
    ReplicaState,
    ReturnMode,
    SessionKey,
    TransferOutcome,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
)
from tests.unit.controlplane.test_eager import ended_turn, granted, landed, skipped
from tests.unit.controlplane.world import KEY, World

A, B = SessionKey("t", "a"), SessionKey("t", "b")


def left(world: World, decode: WorkerRef, key: SessionKey, blocks: int = 20) -> None:
    """A turn of the session has ended, and decode has what it left."""
    turn = world.begin(key=key)
    report = ReplicaReport(
        key=key,
        head_hash=b"h" + key.session_id.encode(),
        num_blocks=blocks,
        num_tokens=blocks * 32,
        state=ReplicaState.HARD,
        hold_remaining_ns=300 * SECOND,
        turn_token=turn.token,
        leg=Leg.DECODE,
    )
    world.do(world.registry.end_turn(world.now, key, turn.number, TurnOutcome.COMPLETED))
    world.agent(decode, "offered", report)


def test_a_guess_takes_no_other_leases_place() -> None:
    # Room for one and a half.
    world = World(Limits(leased_share_tenant=0.03, lease_ttl_ns=100 * SECOND))
    prefill, decode = world.pair()
    left(world, decode, A)
    first = granted(world, prefill, decode)
    # Nobody has read it for so long that it would go for a turn that asks.
    world.keep_alive(5)
    left(world, decode, B)
    assert skipped(world) == ["WOULD_EVICT"]
    assert world.told(decode, c.Harden) == []
    assert world.lease(first.lease_id).stop is None
    assert world.told(prefill, c.Revoke) == []


def test_a_guess_is_within_the_budgets() -> None:
    world = World()
    _, decode = world.pair()
    pool = PoolStats(total_blocks=1_000, free_blocks=10)
    world.agent(decode, "heartbeat", Heartbeat(clock=1, pool=pool))
    left(world, decode, A)
    assert skipped(world) == ["WORKER_WATERMARK"]
    assert world.told(decode, c.Harden) == []


def test_decode_holds_on_to_what_prefill_has_lost_a_part_of_again() -> None:
    world = World()
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    landed(world, prefill, 20)
    world.agent(prefill, "replica_changed", KEY, bytes([20]), ReplicaState.SOFT, 15, "REUSED")
    world.stop(prefill, grant.lease_id)
    assert world.told(decode, c.RetainReplica) == []


def waiting(world: World) -> tuple[WorkerRef, WorkerRef, c.Grant]:
    """A is on its way, and B waits for its place."""
    prefill, decode = world.pair()
    left(world, decode, A)
    grant = granted(world, prefill, decode)
    left(world, decode, B)
    assert world.told(decode, c.Harden) == []
    assert B in world.state.eager_waiting["p"]
    return prefill, decode, grant


def test_what_waited_is_dropped_when_its_next_turn_is_there() -> None:
    world = World(Limits(eager_leases_per_worker=1))
    prefill, decode, grant = waiting(world)
    world.begin(key=B)
    (lazy,) = world.told(decode, c.Harden)
    assert not world.lease(lazy.lease_id).eager
    world.stop(prefill, grant.lease_id, TransferOutcome.FAILED)
    assert skipped(world) == ["NEXT_TURN_BEGAN"]
    assert world.told(decode, c.Harden) == []


def test_what_waited_is_dropped_with_its_session() -> None:
    world = World(Limits(eager_leases_per_worker=1))
    prefill, decode, grant = waiting(world)
    world.do(world.registry.end_session(world.now, B))
    world.stop(prefill, grant.lease_id, TransferOutcome.FAILED)
    assert skipped(world) == ["SESSION_ENDED"]
    assert world.told(decode, c.Harden) == []


def test_no_turn_waits_for_a_return_that_is_being_stopped() -> None:
    world = World()
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    world.do(world.registry.revoke(world.now, grant.lease_id, "OPERATOR"))
    assert world.lease(grant.lease_id).open
    turn = world.begin()
    assert turn.plan.return_mode is ReturnMode.LAZY


def test_no_turn_waits_for_a_return_to_another_worker() -> None:
    world = World()
    prefill, decode = world.pair()
    other = world.connect("p2", WorkerRole.PREFILL)
    ended_turn(world, decode, excluded=("p2",))
    grant = granted(world, prefill, decode)
    turn = world.begin(excluded=("p",))
    assert turn.prefill is not None
    assert turn.prefill.worker == other
    assert turn.plan.return_mode is ReturnMode.LAZY
    (expect,) = world.told(other, c.ExpectTurn)
    assert expect.lease_id not in ("", grant.lease_id)
