"""The retention policy at work in the registry."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model import packing
from kvshuttle.controlplane.model.gaps import NO_GAPS
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import Heartbeat, PoolStats, ReplicaReport
from kvshuttle.controlplane.model.session import Turn
from kvshuttle.controlplane.model.terms import (
    Hints,
    Leg,
    ReplicaState,
    SessionKey,
    SessionValue,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
)
from tests.unit.controlplane.world import KEY, World


def key(name: str) -> SessionKey:
    """`tenant/session`, or a session of the tenant `t`."""
    tenant, _, session = name.rpartition("/")
    return SessionKey(tenant or "t", session)


def offer(world: World, ref: WorkerRef, name: str, blocks: int, turn: Turn | None = None) -> None:
    report = ReplicaReport(
        key=key(name),
        head_hash=f"{name}-{blocks}".encode(),
        num_blocks=blocks,
        num_tokens=blocks * 32,
        state=ReplicaState.HARD,
        hold_remaining_ns=300 * SECOND,
        turn_token=turn.token if turn is not None else "",
        leg=Leg.DECODE,
    )
    world.agent(ref, "offered", report)


def whole_turn(
    world: World,
    ref: WorkerRef,
    name: str,
    blocks: int = 10,
    seconds: float = 1,
    hints: Hints | None = None,
) -> None:
    turn = world.begin(key=key(name))
    world.keep_alive(seconds)
    offer(world, ref, name, blocks, turn)
    world.do(
        world.registry.end_turn(
            world.now, key(name), turn.number, TurnOutcome.COMPLETED, None, hints
        )
    )


def beat(world: World, ref: WorkerRef, held: int, free: int = 500, total: int = 1_000) -> None:
    pool = PoolStats(total_blocks=total, free_blocks=free, held_blocks=held)
    world.agent(ref, "heartbeat", Heartbeat(clock=1, pool=pool))


def told(world: World, ref: WorkerRef) -> list[tuple[str, int]]:
    """What a worker was told to let go: of which session, and how many blocks it keeps."""
    return [
        (x.key.session_id, x.keep_blocks)
        for x in world.told(ref, c.RetainReplica)
        if x.retention_ns == 0 or x.keep_blocks
    ]


def softened(world: World, ref: WorkerRef) -> list[str]:
    return [name for name, _ in told(world, ref)]


ONE_TENANT = dataclasses.replace(Limits(), held_share_tenant=0.0)


def lone(limits: Limits = ONE_TENANT) -> tuple[World, WorkerRef]:
    world = World(limits)
    return world, world.connect("d", WorkerRole.BOTH)


def test_a_hold_follows_the_gaps_of_the_session() -> None:
    world, decode = lone()
    whole_turn(world, decode, "s")
    for _ in range(30):
        world.keep_alive(2_000)
        whole_turn(world, decode, "s")
    world.told(decode, c.ExpectTurn)
    world.begin()
    (expect,) = world.told(decode, c.ExpectTurn)
    assert 1_800 * SECOND < expect.retention_ns <= 3_600 * SECOND


def test_gaps_survive_a_restart() -> None:
    world, decode = lone()
    whole_turn(world, decode, "s")
    world.keep_alive(40)
    whole_turn(world, decode, "s", hints=Hints(5 * SECOND))
    before = world.state.sessions[KEY]
    assert before.gaps != NO_GAPS
    assert before.hint_ns == world.now
    world.start()
    after = world.state.sessions[KEY]
    assert (after.gaps, after.hint_ns) == (before.gaps, before.hint_ns)


def test_rows_from_before_the_gaps_were_kept_are_read() -> None:
    world, decode = lone()
    whole_turn(world, decode, "s")
    row = msgspec.msgpack.decode(packing.session_to_bytes(world.state.sessions[KEY]))
    old = packing.session_from_bytes(KEY, msgspec.msgpack.encode(row[:10]))
    assert (old.gaps, old.hint_ns) == (NO_GAPS, 0)
    assert old.turn_count == 1


def test_time_within_a_turn_is_not_time_away() -> None:
    """Nor is the time from one turn's end to another's begin while a third runs."""
    world, _ = lone()
    first = world.begin()
    world.keep_alive(100)
    second = world.begin()
    world.do(world.registry.end_turn(world.now, KEY, first.number, TurnOutcome.COMPLETED))
    world.keep_alive(100)
    third = world.begin()
    for turn in (second, third):
        world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.COMPLETED))
    assert world.state.sessions[KEY].gaps == NO_GAPS
    world.keep_alive(20)
    world.begin()
    assert sum(world.state.sessions[KEY].gaps) == 1


def test_what_a_client_expects_is_over_with_the_next_turn() -> None:
    world, decode = lone()
    whole_turn(world, decode, "s", hints=Hints(1_000 * SECOND, SessionValue.HIGH))
    world.begin()
    assert world.state.sessions[KEY].hints == Hints(None, SessionValue.HIGH)


def test_a_hint_counts_from_when_it_was_given() -> None:
    world, decode = lone()
    whole_turn(world, decode, "s")
    end_ns = world.now
    world.keep_alive(60)
    world.do(world.registry.update_session(world.now, KEY, Hints(30 * SECOND)))
    assert world.state.sessions[KEY].absence(world.now).since_ns == end_ns + 60 * SECOND
    # The same again is news; a new value is not.
    world.keep_alive(60)
    world.do(world.registry.update_session(world.now, KEY, Hints(30 * SECOND)))
    again_ns = world.now
    world.keep_alive(60)
    world.do(world.registry.update_session(world.now, KEY, Hints(30 * SECOND, SessionValue.LOW)))
    assert world.state.sessions[KEY].absence(world.now).since_ns == again_ns


def test_within_its_budget_a_worker_is_left_alone() -> None:
    world, decode = lone()
    for name in "abc":
        whole_turn(world, decode, name, 200)
    beat(world, decode, held=600)
    assert softened(world, decode) == []


def test_over_its_budget_the_longest_away_goes_first_and_no_more_than_needed() -> None:
    world, decode = lone()
    for name in "abc":
        whole_turn(world, decode, name, 300)
        world.keep_alive(50)
    beat(world, decode, held=900, free=100)
    assert told(world, decode) == [("a", 150)]
    # The next heartbeat may be older than that order.
    beat(world, decode, held=900, free=100)
    assert told(world, decode) == []
    world.agent(decode, "replica_changed", key("a"), b"a-300", ReplicaState.HARD, 150, "TRIMMED")
    assert world.state.replicas_of_session(key("a"))[0].num_blocks == 150
    world.keep_alive(2)
    beat(world, decode, held=950, free=100)
    assert told(world, decode) == [("a", 0), ("b", 250)]


def test_a_trim_does_not_prolong_a_hold() -> None:
    world, decode = lone()
    for name in "ab":
        whole_turn(world, decode, name, 450)
        world.keep_alive(50)
    world.told(decode, c.RetainReplica)
    before = world.state.replicas_of_session(key("a"))[0].expire_ns
    beat(world, decode, held=900, free=100)
    (order,) = world.told(decode, c.RetainReplica)
    assert order.retention_ns == before - world.now
    assert world.state.replicas_of_session(key("a"))[0].expire_ns == before


def test_without_a_free_block_holds_go_even_within_the_budget() -> None:
    world, decode = lone()
    for name in "ab":
        whole_turn(world, decode, name, 100)
    beat(world, decode, held=200, free=3)
    assert softened(world, decode) == ["a"]


def test_a_session_at_work_keeps_its_replica() -> None:
    world, decode = lone()
    for name in "ab":
        whole_turn(world, decode, name, 450)
        world.keep_alive(20)
    world.begin(key=key("a"))
    beat(world, decode, held=900, free=100)
    assert softened(world, decode) == ["b"]


def test_a_session_that_is_due_outlasts_one_that_is_overdue() -> None:
    world, decode = lone()
    for _ in range(20):
        whole_turn(world, decode, "slow", 450)
        for _ in range(10):
            world.keep_alive(3)
            whole_turn(world, decode, "quick", 450)
    whole_turn(world, decode, "slow", 450)
    whole_turn(world, decode, "quick", 450)
    world.keep_alive(20)
    # `slow` has been away for longer, but that is its way.
    beat(world, decode, held=900, free=100)
    assert softened(world, decode) == ["quick"]


@pytest.mark.parametrize("value", [SessionValue.LOW, SessionValue.HIGH])
def test_the_value_of_a_session_counts(value: SessionValue) -> None:
    world, decode = lone()
    whole_turn(world, decode, "a", 450)
    whole_turn(world, decode, "b", 450, hints=Hints(None, value))
    world.keep_alive(60)
    beat(world, decode, held=900, free=100)
    assert softened(world, decode) == (["b"] if value is SessionValue.LOW else ["a"])


def test_replicas_that_are_soft_already_are_not_asked_again() -> None:
    world, decode = lone()
    for name in "ab":
        whole_turn(world, decode, name, 450)
    world.agent(decode, "replica_changed", key("a"), b"a-450", ReplicaState.SOFT, 450, "EXPIRED")
    beat(world, decode, held=900, free=100)
    assert softened(world, decode) == ["b"]


def test_a_worker_that_reports_no_pool_is_left_alone() -> None:
    world, decode = lone()
    whole_turn(world, decode, "a", 450)
    world.agent(decode, "heartbeat", Heartbeat(clock=1))
    assert softened(world, decode) == []


def test_a_hold_that_is_about_right_is_left_as_it_is() -> None:
    limits = dataclasses.replace(ONE_TENANT, retention_slack=1e9)
    world, decode = lone(limits)
    for _ in range(5):
        whole_turn(world, decode, "s")
        world.keep_alive(1_000)
    assert world.told(decode, c.RetainReplica) == []


def test_with_too_many_sessions_to_compare_all_get_their_turn() -> None:
    world, decode = lone(dataclasses.replace(ONE_TENANT, relief_candidates=2))
    names = [f"s{number}" for number in range(9)]
    for name in names:
        whole_turn(world, decode, name, 100)
    gone = set()
    for _ in range(60):
        world.keep_alive(3)
        beat(world, decode, held=900)
        for name in softened(world, decode):
            gone.add(name)
            report = (key(name), f"{name}-100".encode(), ReplicaState.SOFT, 100, "RELEASED")
            world.agent(decode, "replica_changed", *report)
    assert gone == set(names)


def test_a_tenant_over_its_share_pays_for_itself() -> None:
    limits = dataclasses.replace(Limits(), held_share_tenant=0.3)
    world, decode = lone(limits)
    for name in ("other/x", "t/a", "t/b"):
        whole_turn(world, decode, name, 200)
        world.keep_alive(20)
    beat(world, decode, held=600)
    # 300 may be held; `x`, which has been away for longest, is somebody else's.
    assert told(world, decode) == [("a", 100)]


def test_who_holds_little_is_not_pushed_out_by_who_holds_much() -> None:
    world, decode = lone()
    whole_turn(world, decode, "small/x", 100)
    world.keep_alive(200)
    for name in "abcd":
        whole_turn(world, decode, f"big/{name}", 200)
    beat(world, decode, held=900, free=100)
    assert told(world, decode) == [("a", 50)]
    # Only when nothing else is left.
    world.keep_alive(3)
    beat(world, decode, held=900, free=0)
    beat(world, decode, held=1_700, free=0)
    assert ("x", 0) not in told(world, decode)
    world.keep_alive(3)
    beat(world, decode, held=1_700, free=0)
    assert ("x", 0) in told(world, decode)
