"""A request finds what another session of its tenant holds, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import (
    Heartbeat,
    PoolStats,
    PrefixReport,
    ReplicaReport,
)
from kvshuttle.controlplane.model.session import Turn
from kvshuttle.controlplane.model.terms import (
    Direction,
    LeaseState,
    Leg,
    ReplicaState,
    ReturnPolicy,
    SessionKey,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
)
from kvshuttle.controlplane.planner import Planner
from kvshuttle.dataplane.checkpoints import checkpoints
from tests.unit.controlplane.test_prefixes import chain
from tests.unit.controlplane.world import World

A, B, OTHER = SessionKey("t", "a"), SessionKey("t", "b"), SessionKey("u", "a")
STEP = 2  # blocks of 32 tokens: 64 tokens


def left(
    world: World, ref: WorkerRef, key: SessionKey, hashes: list[bytes], turn: Turn | None = None
) -> None:
    """A worker holds a session's chain; its checkpoints are told."""
    report = ReplicaReport(
        key,
        hashes[-1],
        len(hashes),
        len(hashes) * 32,
        ReplicaState.HARD,
        300 * SECOND,
        turn.token if turn else "",
        Leg.DECODE,
        tuple(checkpoints(hashes, len(hashes), STEP)),
    )
    world.agent(ref, "offered", report)


def ask(
    world: World, ref: WorkerRef, turn: Turn, hashes: list[bytes], have: int = 0, **more: Any
) -> None:
    report = PrefixReport(
        turn.token,
        more.get("leg", Leg.PREFILL),
        tuple(checkpoints(hashes, len(hashes), STEP)),
        have,
        len(hashes),
    )
    world.agent(ref, "prefix_wanted", report)


@pytest.fixture
def world() -> World:
    """A pair; session a has left 40 blocks at decode."""
    made = World(Limits(eager=False))
    made.pair()
    turn = made.begin(key=A)
    left(made, made.state.workers["d"].ref, A, chain("x", 40), turn)
    made.do(made.registry.end_turn(made.now, A, turn.number, TurnOutcome.COMPLETED))
    made.sent.clear()
    return made


def refs(world: World) -> tuple[WorkerRef, WorkerRef]:
    return world.state.workers["p"].ref, world.state.workers["d"].ref


def refused(world: World, ref: WorkerRef, turn: Turn) -> str:
    (revoke,) = world.told(ref, c.Revoke)
    assert (revoke.lease_id, revoke.turn_token) == ("", turn.token)
    reason: str = revoke.reason
    return reason


def test_a_forked_session_reads_what_its_parent_left(world: World) -> None:
    prefill, decode = refs(world)
    turn = world.begin(key=B)
    (expect,) = world.told(prefill, c.ExpectTurn)
    assert (expect.may_ask, expect.lease_id) == (True, "")
    own = chain("y", 60, chain("x", 37))
    ask(world, prefill, turn, own)
    (order,) = world.told(decode, c.Harden)
    assert (order.key, order.head_hash) == (A, chain("x", 40)[-1])
    # It shares 32 blocks by checkpoints, and may share up to 40: as many are held.
    assert (order.range.start, order.range.end) == (0, 40)
    world.harden(order, decode)
    (grant,) = world.told(prefill, c.Grant)
    assert (grant.turn_token, grant.direction) == (turn.token, Direction.RETURN)
    lease = world.lease(order.lease_id)
    assert (lease.key, lease.source_key) == (B, A)
    world.stop(prefill, lease.lease_id)
    assert world.lease(lease.lease_id).state is LeaseState.COMPLETED
    assert world.told(decode, c.ReaderStopped)
    assert world.told(decode, c.ReleaseReplica) == []


def test_no_more_is_held_than_can_be_shared(world: World) -> None:
    prefill, decode = refs(world)
    turn = world.begin(key=B)
    ask(world, prefill, turn, chain("y", 60, chain("x", 9)))
    (order,) = world.told(decode, c.Harden)
    assert order.range.end == 12  # 8 are equal, and the 12th is not
    other = world.begin(key=SessionKey("t", "c"))
    ask(world, prefill, other, chain("x", 20))
    (order,) = world.told(decode, c.Harden)
    assert order.range.end == 20


def test_another_tenant_is_told_nothing_and_asks_nobody(world: World) -> None:
    """Not even by time: it is not said that it may ask, and if its agent asks all the same, the
    answer comes without a word to any worker."""
    prefill, decode = refs(world)
    turn = world.begin(key=OTHER)
    (expect,) = world.told(prefill, c.ExpectTurn)
    assert not expect.may_ask
    world.sent.clear()
    ask(world, prefill, turn, chain("x", 60))
    assert refused(world, prefill, turn) == "NO_PREFIX"
    assert world.told(decode, c.Harden) == []
    assert not world.state.leases
    # Nor does it take from the other what it has not.
    left(world, decode, OTHER, chain("z", 40))
    other = world.begin(key=B)
    ask(world, prefill, other, chain("z", 60))
    assert refused(world, prefill, other) == "NO_PREFIX"


def test_a_tenant_that_has_something_is_still_not_given_another_ones(world: World) -> None:
    prefill, decode = refs(world)
    turn = world.begin(key=OTHER)
    left(world, decode, OTHER, chain("z", 40), turn)
    fork = world.begin(key=SessionKey("u", "fork"))
    (*_, expect) = world.told(prefill, c.ExpectTurn)
    assert expect.may_ask
    ask(world, prefill, fork, chain("x", 60))
    assert refused(world, prefill, fork) == "NO_PREFIX"


@pytest.mark.parametrize("why", ["short", "differs", "drains", "lost", "gone", "shorter", "had"])
def test_there_is_nothing_to_be_had(world: World, why: str) -> None:
    prefill, decode = refs(world)
    turn = world.begin(key=B)
    head = chain("x", 40)[-1]
    own, have = chain("x", 60), 0
    match why:
        case "short":
            own = chain("x", 1)
        case "differs":
            own = chain("y", 60)
        case "drains":
            world.do(world.registry.drain(world.now, "d", undo=False))
        case "lost":
            world.lose(decode)
        case "gone":
            world.agent(decode, "replica_changed", A, head, ReplicaState.GONE, 0, "REUSED")
        case "shorter":
            world.agent(decode, "replica_changed", A, head, ReplicaState.SOFT, 1, "REUSED")
        case "had":
            have = 31
    ask(world, prefill, turn, own, have)
    assert refused(world, prefill, turn) == "NO_PREFIX"
    assert world.told(decode, c.Harden) == []


def test_a_shorter_one_will_do(world: World) -> None:
    prefill, decode = refs(world)
    turn = world.begin(key=B)
    head = chain("x", 40)[-1]
    world.agent(decode, "replica_changed", A, head, ReplicaState.SOFT, 13, "REUSED")
    ask(world, prefill, turn, chain("x", 60))
    (order,) = world.told(decode, c.Harden)
    assert (order.head_hash, order.range.end) == (head, 13)


def test_what_the_source_does_not_have_is_not_granted(world: World) -> None:
    prefill, decode = refs(world)
    turn = world.begin(key=B)
    ask(world, prefill, turn, chain("x", 60))
    (order,) = world.told(decode, c.Harden)
    world.agent(decode, "refused", order.lease_id, "REPLICA_GONE")
    assert world.told(prefill, c.Grant) == []
    (revoke,) = world.told(prefill, c.Revoke)
    assert (revoke.reason, revoke.turn_token) == ("REPLICA_GONE", turn.token)


def test_a_question_that_is_none(world: World) -> None:
    prefill, decode = refs(world)
    turn = world.begin(key=B)
    own = chain("x", 60)
    ask(world, decode, turn, own)  # another worker's leg
    ask(world, decode, turn, own, leg=Leg.DECODE)  # that gets it from prefill
    ask(world, prefill, turn, own)
    ask(world, prefill, turn, own)  # once more
    assert len(world.told(decode, c.Harden)) == 1
    assert world.told(prefill, c.Revoke) == []
    world.do(world.registry.end_turn(world.now, B, 1, TurnOutcome.COMPLETED))
    world.sent.clear()
    ask(world, prefill, turn, own)
    assert world.sent == []


def test_who_may_ask(world: World) -> None:
    prefill, _ = refs(world)
    world.begin(key=B, policy=ReturnPolicy.NEVER)
    world.begin(key=A)
    assert [x.may_ask for x in world.told(prefill, c.ExpectTurn)] == [False, False]
    without = World(Limits(prefix_index_hashes=0))
    p, d = without.pair()
    left(without, d, A, chain("x", 40), without.begin(key=A))
    without.begin(key=B)
    assert not any(x.may_ask for x in without.told(p, c.ExpectTurn))


def test_a_worker_for_both_reads_from_another_one_and_leaves_it_there() -> None:
    world = World(Limits(eager=False))
    one, two = world.connect("b1", WorkerRole.BOTH), world.connect("b2", WorkerRole.BOTH)
    left(world, one, A, chain("x", 40), world.begin(key=A))
    turn = world.begin(key=B)
    assert turn.decode.worker == two
    ask(world, two, turn, chain("x", 60), leg=Leg.DECODE)
    (order,) = world.told(one, c.Harden)
    assert order.key == A
    world.harden(order, one)
    (grant,) = world.told(two, c.Grant)
    assert grant.direction is Direction.FORWARD
    world.stop(two, order.lease_id)
    assert world.told(one, c.ReleaseReplica) == []


def test_after_a_restart_it_is_told_again(world: World) -> None:
    world.start()
    report = ReplicaReport(
        A,
        chain("x", 40)[-1],
        40,
        1_280,
        ReplicaState.HARD,
        300 * SECOND,
        checkpoints=tuple(checkpoints(chain("x", 40), 40, STEP)),
    )
    prefill = world.connect("p", WorkerRole.PREFILL)
    decode = world.connect("d", WorkerRole.DECODE, replicas=(report,))
    turn = world.begin(key=B)
    ask(world, prefill, turn, chain("x", 60))
    (order,) = world.told(decode, c.Harden)
    world.start()
    lease = world.lease(order.lease_id)
    assert lease.source_key == A


def test_the_end_of_its_session_takes_it_out(world: World) -> None:
    prefill, decode = refs(world)
    world.do(world.registry.end_session(world.now, A))
    head = chain("x", 40)[-1]
    world.agent(decode, "replica_changed", A, head, ReplicaState.GONE, 0, "RELEASED")
    assert world.state.prefixes.size == 0
    world.begin(key=B)
    assert not world.told(prefill, c.ExpectTurn)[-1].may_ask


def test_what_its_own_session_left_too_late_is_found_too(world: World) -> None:
    prefill, decode = refs(world)
    world.begin(key=B)
    turn = world.begin(key=B)
    assert world.told(prefill, c.ExpectTurn)[-1].may_ask
    left(world, decode, B, chain("x", 50))
    ask(world, prefill, turn, chain("x", 60))
    (order,) = world.told(decode, c.Harden)
    assert (order.key, order.range.end) == (B, 50)
    assert world.lease(order.lease_id).source_key is None


def test_a_session_that_leaves_a_worker_for_both_leaves_its_replica_there() -> None:
    world = World(Limits(eager=False))
    one, two = world.connect("b1", WorkerRole.BOTH), world.connect("b2", WorkerRole.BOTH)
    left(world, one, A, chain("x", 40), world.begin(key=A))
    full = PoolStats(total_blocks=1_000, free_blocks=500, running_requests=4, waiting_requests=40)
    world.agent(one, "heartbeat", Heartbeat(6, full))
    turn = world.begin(key=A)
    assert (turn.decode.worker, turn.plan.placement) == (two, "SHORTER_QUEUE")
    (order,) = world.told(one, c.Harden)
    world.harden(order, one)
    (grant,) = world.told(two, c.Grant)
    assert grant.direction is Direction.FORWARD
    world.stop(two, order.lease_id)
    assert world.lease(order.lease_id).state is LeaseState.COMPLETED
    assert world.told(one, c.ReleaseReplica) == []


@pytest.mark.parametrize("policy", [ReturnPolicy.AUTO, ReturnPolicy.ALWAYS])
def test_what_does_not_pay_is_moved_only_for_who_wants_all_of_it(
    world: World, policy: ReturnPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "cheaper_to_move", lambda *_: False)
    prefill, decode = refs(world)
    turn = world.begin(key=B, policy=policy)
    ask(world, prefill, turn, chain("y", 60, chain("x", 37)))
    assert bool(world.told(decode, c.Harden)) == (policy is ReturnPolicy.ALWAYS)
    if policy is ReturnPolicy.AUTO:
        assert refused(world, prefill, turn) == "NO_PREFIX"
