"""Many leases extended at once: the order and the limits of a single renewal hold for each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.effects import LeaseChange, PutLease
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import (
    Descriptors,
    Heartbeat,
    LeaseReport,
    PoolStats,
    ReplicaReport,
)
from kvshuttle.controlplane.model.terms import (
    LeaseState,
    Leg,
    ReplicaState,
    ReturnPolicy,
    SessionKey,
    WorkerRef,
    WorkerRole,
)
from tests.unit.controlplane.world import World

TTL = 30 * SECOND
LIMITS = dataclasses.replace(
    Limits(), eager=False, leased_share_worker=0, leased_share_tenant=0, held_share_tenant=0
)


def granted(world: World, prefill: WorkerRef, decode: WorkerRef, count: int) -> list[str]:
    """So many leases from decode to prefill, each of a session of its own."""
    made = []
    for number in range(count):
        key = SessionKey("t", f"{decode.worker_id}-{world.now}-{number}")
        turn = world.begin(key=key)
        report = ReplicaReport(
            key, b"h" * 32, 20, 640, ReplicaState.HARD, 300 * SECOND, turn.token, Leg.DECODE
        )
        world.agent(decode, "offered", report)
        turn = world.begin(key=key, policy=ReturnPolicy.ALWAYS)
        (order,) = world.told(decode, c.Harden)
        blocks = Descriptors(order.range, order.head_hash, "ids")
        world.agent(decode, "hardened", order.lease_id, order.version, blocks)
        (grant,) = world.told(prefill, c.Grant)
        assert (grant.epoch, grant.seq) == (order.epoch, order.seq)
        made.append(grant.lease_id)
    return made


def seqs(world: World, leases: list[str]) -> np.ndarray:
    return np.array([world.lease(x).seq for x in leases], np.uint64)


def ask(world: World, prefill: WorkerRef, leases: list[str], epoch: int | None = None) -> None:
    epoch = world.state.epoch if epoch is None else epoch
    world.agent(prefill, "leases_needed", epoch, seqs(world, leases))


NONE = np.zeros(0, np.uint64)


@pytest.fixture
def world() -> World:
    return World(LIMITS)


def test_the_source_first_then_the_destination(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 3)
    before = [world.lease(x).deadline_ns for x in leases]
    world.keep_alive(10)
    ask(world, prefill, leases[:2])
    (order,) = world.told(decode, c.ExtendLeases)
    assert order.is_source
    assert order.seqs.tolist() == seqs(world, leases[:2]).tolist()
    assert (order.ttl_ns, order.guard_ns, order.as_of) == (TTL, LIMITS.guard_ns, 0)
    # Nothing reaches the destination, and no deadline moves, before the source has answered.
    assert not world.told(prefill, c.ExtendLeases)
    assert [world.lease(x).deadline_ns for x in leases] == before
    world.now += SECOND
    world.agent(prefill, "heartbeat", Heartbeat(clock=777))
    world.agent(decode, "leases_extended", order.extension, NONE)
    (extend,) = world.told(prefill, c.ExtendLeases)
    assert not extend.is_source
    assert extend.seqs.tolist() == order.seqs.tolist()
    assert (extend.ttl_ns, extend.as_of) == (TTL, 777)
    for lease in leases[:2]:
        assert world.lease(lease).deadline_ns == world.now + TTL
    assert world.lease(leases[2]).deadline_ns == before[2]
    assert not world.effects.records


def test_an_extended_lease_expires_at_its_new_deadline(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 2)
    world.keep_alive(20)
    ask(world, prefill, leases[:1])
    (order,) = world.told(decode, c.ExtendLeases)
    world.agent(decode, "leases_extended", order.extension, NONE)
    world.keep_alive(11)
    assert world.lease(leases[0]).state is LeaseState.GRANTED
    assert world.lease(leases[1]).state is LeaseState.EXPIRED
    world.keep_alive(18)
    assert world.lease(leases[0]).state is LeaseState.GRANTED
    world.keep_alive(2)
    assert world.lease(leases[0]).state is LeaseState.EXPIRED


def test_an_answer_after_the_guard_extends_nothing(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 1)
    before = world.lease(leases[0]).deadline_ns
    ask(world, prefill, leases)
    (order,) = world.told(decode, c.ExtendLeases)
    world.keep_alive(LIMITS.guard_ns / SECOND)
    world.now += 1
    world.agent(decode, "leases_extended", order.extension, NONE)
    assert not world.told(prefill, c.ExtendLeases)
    assert world.lease(leases[0]).deadline_ns == before
    # What will not be answered any more is forgotten with the next.
    ask(world, prefill, leases)
    assert len(world.state.extensions) == 1


def test_what_will_not_be_answered_any_more_is_not_waited_for(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 1)
    for _ in range(4):
        ask(world, prefill, leases)
        assert len(world.state.extensions) == 1
        world.keep_alive(LIMITS.guard_ns / SECOND)
        world.now += 1


def test_what_is_not_granted_is_not_extended(world: World) -> None:
    prefill, decode, _, order = world.returning()
    ask(world, prefill, [order.lease_id])
    assert not world.told(decode, c.ExtendLeases)


def test_what_the_source_does_not_hold_is_not_extended(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 3)
    world.now += SECOND
    ask(world, prefill, leases)
    (order,) = world.told(decode, c.ExtendLeases)
    world.agent(decode, "leases_extended", order.extension, seqs(world, leases[1:2]))
    (extend,) = world.told(prefill, c.ExtendLeases)
    assert extend.seqs.tolist() == seqs(world, [leases[0], leases[2]]).tolist()


def test_what_ends_or_is_stopped_meanwhile_is_not_extended(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 3)
    ask(world, prefill, leases)
    (order,) = world.told(decode, c.ExtendLeases)
    world.stop(prefill, leases[0])
    world.do(world.registry.revoke(world.now, leases[1], "OPERATOR"))
    world.agent(decode, "leases_extended", order.extension, NONE)
    (extend,) = world.told(prefill, c.ExtendLeases)
    assert extend.seqs.tolist() == seqs(world, leases[2:]).tolist()
    # Nor is it when it is asked for again.
    ask(world, prefill, leases[:2])
    assert not world.told(decode, c.ExtendLeases)


def test_only_its_own_leases_are_a_destinations_to_extend(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 1)
    ask(world, decode, leases)
    ask(world, prefill, leases, epoch=world.state.epoch + 1)
    world.agent(prefill, "leases_needed", world.state.epoch, np.array([99, 2**63], np.uint64))
    assert not world.told(decode, c.ExtendLeases)


def test_only_the_source_that_was_asked_answers(world: World) -> None:
    prefill, decode = world.pair()
    other = world.connect("e", WorkerRole.DECODE)
    leases = granted(world, prefill, decode, 1)
    ask(world, prefill, leases)
    (order,) = world.told(decode, c.ExtendLeases)
    world.agent(other, "leases_extended", order.extension, NONE)
    assert not world.told(prefill, c.ExtendLeases)
    world.agent(decode, "leases_extended", order.extension, NONE)
    assert world.told(prefill, c.ExtendLeases)
    world.agent(decode, "leases_extended", order.extension, NONE)
    assert not world.told(prefill, c.ExtendLeases)


def test_no_more_can_be_missing_than_was_asked_for(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 2)
    ask(world, prefill, leases)
    (order,) = world.told(decode, c.ExtendLeases)
    nonsense = np.arange(1_000, 1_003, dtype=np.uint64)
    with pytest.raises(ValueError, match="3 leases are missing, of 2"):
        world.agent(decode, "leases_extended", order.extension, nonsense)
    assert not world.told(prefill, c.ExtendLeases)
    world.agent(decode, "leases_extended", order.extension, seqs(world, leases[:1]))
    (extend,) = world.told(prefill, c.ExtendLeases)
    assert extend.seqs.tolist() == seqs(world, leases[1:]).tolist()


def test_each_source_is_asked_for_its_own(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 2)
    other = world.connect("e", WorkerRole.DECODE)
    world.do(world.registry.drain(world.now, "d", False))
    more = granted(world, prefill, other, 3)
    ask(world, prefill, leases + more)
    (one,) = world.told(decode, c.ExtendLeases)
    (two,) = world.told(other, c.ExtendLeases)
    assert one.seqs.tolist() == seqs(world, leases).tolist()
    assert two.seqs.tolist() == seqs(world, more).tolist()


def test_no_lease_outlives_its_longest_life() -> None:
    world = World(dataclasses.replace(LIMITS, turn_timeout_ns=7_200 * SECOND))
    prefill, decode = world.pair()
    (lease,) = granted(world, prefill, decode, 1)
    born = world.lease(lease).create_ns
    while world.lease(lease).open:
        assert world.lease(lease).deadline_ns <= born + LIMITS.lease_lifetime_max_ns
        ask(world, prefill, [lease])
        for order in world.told(decode, c.ExtendLeases):
            world.agent(decode, "leases_extended", order.extension, NONE)
        world.keep_alive(20)
    assert world.now - born > LIMITS.lease_lifetime_max_ns - 2 * TTL


def test_a_source_short_of_blocks_extends_nothing(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 1)
    pool = PoolStats(total_blocks=1_000, free_blocks=1)
    world.agent(decode, "heartbeat", Heartbeat(clock=9, pool=pool))
    ask(world, prefill, leases)
    assert not world.told(decode, c.ExtendLeases)


def test_a_source_that_is_lost_is_not_asked(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 1)
    ask(world, prefill, leases)
    (order,) = world.told(decode, c.ExtendLeases)
    world.lose(decode)
    ask(world, prefill, leases)
    assert not world.told(decode, c.ExtendLeases)
    world.agent(decode, "leases_extended", order.extension, NONE)
    assert not world.told(prefill, c.ExtendLeases)


def test_a_restart_takes_no_time_from_what_was_extended(world: World) -> None:
    """The books' deadline is older than what the destination was told: it counts on."""
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 1)
    for _ in range(3):
        world.keep_alive(20)
        ask(world, prefill, leases)
        (order,) = world.told(decode, c.ExtendLeases)
        world.agent(decode, "leases_extended", order.extension, NONE)
    believes_until = world.now + TTL
    world.now += 5 * SECOND
    world.start()
    world.tick()
    report = LeaseReport(leases[0], 2, is_source=False)
    world.connect("d", WorkerRole.DECODE, leases=(LeaseReport(leases[0], 2, is_source=True),))
    world.connect("p", WorkerRole.PREFILL, leases=(report,))
    assert not world.told(prefill, c.Revoke)
    assert world.lease(leases[0]).deadline_ns >= believes_until


def test_ten_thousand_at_once(world: World) -> None:
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 50)
    epoch = world.state.epoch
    asked = np.concatenate([seqs(world, leases), np.arange(10_000, 20_000, dtype=np.uint64)])
    world.now += SECOND
    world.agent(prefill, "leases_needed", epoch, np.concatenate([asked, asked]))
    (order,) = world.told(decode, c.ExtendLeases)
    assert sorted(order.seqs.tolist()) == sorted(seqs(world, leases).tolist())
    world.agent(decode, "leases_extended", order.extension, NONE)
    assert {world.lease(x).deadline_ns for x in leases} == {world.now + TTL}


# -- what watchers are told ------------------------------------------------------------------------


def told(world: World) -> list[str]:
    """One tick, and the open leases that watchers are told of."""
    world.do(world.registry.tick(world.now))
    found = [x.lease for x in world.effects.changes if isinstance(x, LeaseChange) and x.lease.open]
    assert all(lease.deadline_ns > world.now for lease in found)
    stored = [x.lease for x in world.effects.records if isinstance(x, PutLease)]
    assert not any(lease.open for lease in stored)
    return [lease.lease_id for lease in found]


def extend(world: World, prefill: WorkerRef, decode: WorkerRef, leases: list[str]) -> None:
    ask(world, prefill, leases)
    assert not world.effects.changes
    (order,) = world.told(decode, c.ExtendLeases)
    world.agent(decode, "leases_extended", order.extension, NONE)
    assert not [x for x in world.effects.changes if isinstance(x, LeaseChange)]


def alive(world: World, seconds: float) -> None:
    """Time passes without a tick, and all workers are heard."""
    world.now += int(seconds * SECOND)
    for worker in list(world.state.workers.values()):
        world.do(world.registry.agent(world.now, worker.ref).finish())


def test_watchers_see_that_a_lease_goes_on_when_the_deadline_they_know_has_passed(
    world: World,
) -> None:
    prefill, decode = world.pair()
    (lease,) = granted(world, prefill, decode, 1)
    version = world.lease(lease).version
    # Watchers know of a deadline at 30 s, then at 50, then at 70.
    for last in (20, 40, 60):
        alive(world, 20 if last == 20 else 8.9)
        extend(world, prefill, decode, [lease])
        assert told(world) == []
        alive(world, 9)
        assert told(world) == []
        alive(world, 2)
        assert told(world) == [lease]
        assert world.lease(lease).version == version
        # Once: the deadline that was told now is a new one.
        alive(world, 0.1)
        assert told(world) == []


def test_of_many_leases_watchers_are_told_little_by_little_and_all_in_the_end() -> None:
    world = World(dataclasses.replace(LIMITS, told_per_tick=10))
    prefill, decode = world.pair()
    leases = granted(world, prefill, decode, 25)
    alive(world, 20)
    extend(world, prefill, decode, leases[:-1])
    alive(world, 10)
    ticks = []
    for _ in range(5):
        ticks.append(told(world))
        # A tick that comes sooner, because much is due, tells nothing.
        assert told(world) == []
        alive(world, 0.1)
    assert [len(x) for x in ticks] == [10, 10, 4, 0, 0]
    assert [x for tick in ticks for x in tick] == leases[:-1]
    assert world.lease(leases[-1]).state is LeaseState.EXPIRED
