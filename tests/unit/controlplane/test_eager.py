"""Eager returns: what a turn left goes back at once, within a budget."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.limits import MS, SECOND, Limits
from kvshuttle.controlplane.model.reports import ReplicaReport
from kvshuttle.controlplane.model.session import Turn
from kvshuttle.controlplane.model.terms import (
    LeaseState,
    Leg,
    ReplicaState,
    ReturnMode,
    ReturnPolicy,
    SessionKey,
    TransferOutcome,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
)
from tests.unit.controlplane.world import KEY, World


def landed(world: World, prefill: WorkerRef, blocks: int, key: SessionKey = KEY) -> None:
    """Prefill's agent says that it has cached so much."""
    report = ReplicaReport(
        key=key,
        head_hash=bytes([blocks]),
        num_blocks=blocks,
        num_tokens=blocks * 32,
        state=ReplicaState.SOFT,
        hold_remaining_ns=0,
        turn_token="",
        leg=None,
    )
    world.agent(prefill, "offered", report)


def ended_turn(world: World, decode: WorkerRef, blocks: int = 20, **more: Any) -> Turn:
    """A turn whose decode leg has left so many blocks."""
    turn = world.begin(**more)
    world.told(decode, c.Harden)
    world.offer(decode, blocks, turn)
    key = more.get("key", KEY)
    world.do(world.registry.end_turn(world.now, key, turn.number, TurnOutcome.COMPLETED))
    return turn


def granted(world: World, prefill: WorkerRef, decode: WorkerRef) -> c.Grant:
    """The eager lease that decode was asked for, granted."""
    (order,) = world.told(decode, c.Harden)
    world.harden(order, decode)
    (grant,) = world.told(prefill, c.Grant)
    assert isinstance(grant, c.Grant)
    return grant


def skipped(world: World) -> list[object]:
    """Why the last event returned nothing at once."""
    facts = world.effects.facts
    return [fact.values["reason"] for fact in facts if fact.name == "eager_return_skipped"]


@pytest.fixture
def world() -> World:
    return World()


def test_what_a_turn_left_is_returned_at_once_and_outlives_it(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    assert grant.eager_for == KEY
    assert grant.turn_token == ""
    assert world.lease(grant.lease_id).eager
    assert world.lease(grant.lease_id).state is LeaseState.GRANTED, "the turn's end stopped it"


def test_a_turn_that_ended_before_its_offer_came_is_returned_too(world: World) -> None:
    prefill, decode = world.pair()
    turn = world.begin()
    world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.COMPLETED))
    world.offer(decode, 20, turn)
    assert granted(world, prefill, decode).eager_for == KEY


def test_what_the_next_turn_has_overtaken_is_left_to_it(world: World) -> None:
    _, decode = world.pair()
    turn = world.begin()
    world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.COMPLETED))
    world.begin()
    world.offer(decode, 20, turn)
    assert world.told(decode, c.Harden) == []


def test_the_next_turn_finds_it_and_waits_for_nothing(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    landed(world, prefill, 20)
    world.stop(prefill, grant.lease_id)
    # Decode need not hold what prefill has too.
    (retain,) = world.told(decode, c.RetainReplica)
    assert retain.retention_ns == 0
    world.told(prefill, c.ExpectTurn)
    turn = world.begin()
    assert (turn.plan.return_mode, turn.plan.reason) == (ReturnMode.EAGER, "EAGER_HIT")
    assert world.told(decode, c.Harden) == []
    (expect,) = world.told(prefill, c.ExpectTurn)
    assert (expect.lease_id, expect.replica_blocks) == ("", 20)


def test_a_turn_in_the_midst_waits_for_it_no_longer_than_computing_takes(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    world.told(prefill, c.ExpectTurn)
    turn = world.begin()
    assert (turn.plan.return_mode, turn.plan.reason) == (ReturnMode.EAGER, "EAGER_IN_FLIGHT")
    (expect,) = world.told(prefill, c.ExpectTurn)
    assert expect.lease_id == grant.lease_id
    assert expect.lookup_wait_ns == max(turn.plan.predicted_recompute_ns, 300 * MS)
    block = world.state.workers["p"].block_size
    assert expect.block_compute_ns == world.registry.planner.rates.computes_ns("p", block) > 0
    assert world.told(decode, c.Harden) == [], "one lease moves it"


def test_a_copy_that_prefill_has_lost_comes_back_lazily(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    landed(world, prefill, 20)
    world.stop(prefill, grant.lease_id)
    world.agent(prefill, "replica_changed", KEY, bytes([20]), ReplicaState.SOFT, 7, "REUSED")
    turn = world.begin()
    assert turn.plan.return_mode is ReturnMode.LAZY
    (order,) = world.told(decode, c.Harden)
    assert not world.lease(order.lease_id).eager


def test_a_partly_landed_copy_leaves_decode_holding(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    landed(world, prefill, 5)
    world.stop(prefill, grant.lease_id)
    assert world.told(decode, c.RetainReplica) == []


def test_the_end_of_the_session_stops_it(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    world.do(world.registry.end_session(world.now, KEY))
    (revoke,) = world.told(prefill, c.Revoke)
    assert revoke.lease_id == grant.lease_id
    world.stop(prefill, grant.lease_id, TransferOutcome.REVOKED)
    assert world.lease(grant.lease_id).state is LeaseState.REVOKED
    assert world.state.eager_of == {}
    assert not +world.state.eager_on


def test_the_next_turns_return_replaces_it(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode, 20)
    first = granted(world, prefill, decode)
    ended_turn(world, decode, 30)
    (revoke,) = world.told(prefill, c.Revoke)
    assert (revoke.lease_id, revoke.reason) == (first.lease_id, "SUPERSEDED")
    assert granted(world, prefill, decode).lease_id != first.lease_id


def test_a_sibling_of_the_same_turn_brings_no_second_one(world: World) -> None:
    _, decode = world.pair()
    turn = world.begin()
    world.offer(decode, 20, turn)
    world.offer(decode, 19, turn)
    assert len(world.told(decode, c.Harden)) == 1


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("off", None),
        ("caching", "NO_PREFIX_CACHE"),
        ("policy", "POLICY_NEVER"),
        ("small", "TOO_SHORT"),
        ("drain", "WORKER_NOT_READY"),
        ("lost", "WORKER_NOT_READY"),
        ("both", "NO_PREFILL_WORKER"),
    ],
)
def test_it_is_left_to_the_next_turn(why: str, reason: str | None) -> None:
    world = World(Limits(eager=why != "off"))
    role = WorkerRole.BOTH if why == "both" else WorkerRole.PREFILL
    prefill = world.connect("p", role, prefix_caching=why != "caching")
    decode = world.connect("d", WorkerRole.DECODE)
    policy = ReturnPolicy.NEVER if why == "policy" else ReturnPolicy.AUTO
    if why == "policy":
        # The policy shows in a plan only where there was something to return.
        world.begin()
        world.offer(decode, 10)
        world.told(decode, c.Harden)
    turn = world.begin(policy=policy)
    if why == "drain":
        world.do(world.registry.drain(world.now, "p", undo=False))
    if why == "lost":
        world.lose(prefill)
    world.offer(decode, 1 if why == "small" else 20, turn)
    assert world.told(decode, c.Harden) == []
    assert skipped(world) == ([reason] if reason else [])


def test_no_more_than_so_many_at_once_and_the_rest_wait() -> None:
    world = World(Limits(eager_leases_per_worker=2, eager_waiting_per_worker=2))
    prefill, decode = world.pair()
    keys = [SessionKey("t", f"s{i}") for i in range(5)]
    for key in keys:
        turn = world.begin(key=key)
        report = ReplicaReport(
            key=key,
            head_hash=b"h" + key.session_id.encode(),
            num_blocks=20,
            num_tokens=640,
            state=ReplicaState.HARD,
            hold_remaining_ns=300 * SECOND,
            turn_token=turn.token,
            leg=Leg.DECODE,
        )
        world.agent(decode, "offered", report)
        world.do(world.registry.end_turn(world.now, key, turn.number, TurnOutcome.COMPLETED))
    orders = world.told(decode, c.Harden)
    assert [o.key for o in orders] == keys[:2]
    assert list(world.state.eager_waiting["p"]) == keys[3:], "the oldest waiting one went"
    for order in orders:
        world.harden(order, decode)
    for grant in world.told(prefill, c.Grant):
        world.stop(prefill, grant.lease_id, TransferOutcome.FAILED)
    assert [o.key for o in world.told(decode, c.Harden)] == [keys[4], keys[3]]
    assert world.state.eager_on["p"] == 2


def test_what_waits_is_dropped_when_its_next_turn_has_begun() -> None:
    world = World(Limits(eager_leases_per_worker=0))
    _, decode = world.pair()
    ended_turn(world, decode)
    assert KEY in world.state.eager_waiting["p"]
    turn = world.begin()
    assert turn.plan.return_mode is ReturnMode.LAZY


def test_a_restart_keeps_the_count_until_the_inventories_say_otherwise(world: World) -> None:
    prefill, decode = world.pair()
    ended_turn(world, decode)
    granted(world, prefill, decode)
    assert world.state.eager_on["p"] == 1
    world.start()
    assert world.state.eager_on["p"] == 1
    assert list(world.state.eager_of) == [KEY]
    world.pair()
    assert not +world.state.eager_on
    assert world.state.eager_of == {}


def why_not(world: World) -> list[object]:
    """Reasons told for what was not begun, by the last event."""
    return [x.values["reason"] for x in world.effects.facts if x.name == "eager_return_skipped"]


def test_a_reason_is_told_where_nothing_is_begun() -> None:
    world = World(Limits(eager_leases_per_worker=1, eager_waiting_per_worker=1))
    _, decode = world.pair()
    world.begin()
    world.offer(decode, 19)
    ended = world.begin(policy=ReturnPolicy.NEVER)
    world.offer(decode, 20, ended)
    assert why_not(world) == ["POLICY_NEVER"]
    overtaken = world.begin()
    world.begin()
    world.offer(decode, 21, overtaken)
    assert why_not(world) == ["NEXT_TURN_BEGAN"]
    short = world.begin()
    world.offer(decode, 1, short)
    assert why_not(world) == ["TOO_SHORT"]
    world.offer(decode, 30, world.begin())
    assert why_not(world) == []
    reasons = []
    for name in ("a", "b"):
        key = SessionKey("t", name)
        turn = world.begin(key=key)
        report = ReplicaReport(
            key, name.encode(), 20, 640, ReplicaState.HARD, 300 * SECOND, turn.token, Leg.DECODE
        )
        world.agent(decode, "offered", report)
        reasons += why_not(world)
    assert reasons == ["QUEUE_FULL"]
    world.connect("p", WorkerRole.PREFILL, prefix_caching=False)
    world.offer(decode, 40, world.begin())
    assert why_not(world) == ["NO_PREFIX_CACHE"]


def test_the_target_is_the_prefill_worker_that_will_get_the_next_turn() -> None:
    world = World()
    prefill, decode = world.pair()
    other = world.connect("p2", WorkerRole.PREFILL)
    turn = world.begin()
    assert turn.prefill is not None
    assert turn.prefill.worker == prefill
    for number in range(3):
        world.registry.planner.rates.give(f"busy-{number}", "p", 2_000, world.now)
    world.offer(decode, 20, turn)
    (order,) = world.told(decode, c.Harden)
    assert order.destination == other


def test_a_turn_at_decode_alone_goes_back_to_where_prompts_were_computed() -> None:
    world = World()
    prefill, decode = world.pair()
    first = world.begin(prompt_tokens=600)
    world.offer(decode, 20, first)
    world.told(decode, c.Harden)
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED))
    second = world.begin(prompt_tokens=680)
    assert (second.prefill, second.plan.return_mode) == (None, ReturnMode.DIRECT)
    (expected,) = world.told(decode, c.ExpectTurn)[-1:]
    assert (expected.leg, expected.lease_id, expected.lease_follows) == (Leg.DECODE, "", False)
    world.offer(decode, 22, second)
    (order,) = world.told(decode, c.Harden)
    assert order.destination == prefill


def test_no_turn_waits_for_a_lease_that_is_being_stopped() -> None:
    world = World()
    prefill, decode = world.pair()
    ended_turn(world, decode)
    grant = granted(world, prefill, decode)
    world.do(world.registry.revoke(world.now, grant.lease_id, "OPERATOR"))
    assert world.lease(grant.lease_id).open
    assert world.begin().plan.reason == "CHEAPER_TO_MOVE"
