"""Rules of the lease's life that are about more than one of its steps."""

from __future__ import annotations

from collections import Counter

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.errors import LeaseEndedError
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import Descriptors
from kvshuttle.controlplane.model.terms import (
    LeaseState,
    ReturnPolicy,
    SessionKey,
    TransferOutcome,
    TurnOutcome,
    WorkerRef,
)
from tests.unit.controlplane.test_admission import Town
from tests.unit.controlplane.world import KEY, World


def cancel(world: World, number: int) -> None:
    world.do(world.registry.end_turn(world.now, KEY, number, TurnOutcome.CANCELLED))


def granted(world: World) -> tuple[WorkerRef, WorkerRef, int, str]:
    prefill, decode, turn, order = world.returning()
    world.harden(order, decode)
    assert world.told(prefill, c.Grant)
    return prefill, decode, turn.number, order.lease_id


# -- a cancelled turn strands nothing -------------------------------------------------------------


def test_a_turn_cancelled_before_the_grant_lets_go_at_once() -> None:
    world = World()
    prefill, decode, turn, order = world.returning()
    cancel(world, turn.number)
    lease = world.lease(order.lease_id)
    assert (lease.state, lease.reader_stopped) == (LeaseState.REVOKED, True)
    assert [x.lease_id for x in world.told(decode, c.ReaderStopped)] == [order.lease_id]
    # The source's answer to the Harden comes after all: nothing is granted.
    world.harden(order, decode)
    assert not world.told(prefill, c.Grant)
    assert not world.state.leases_of_turn
    assert not world.state.ledger.leased


def test_a_turn_cancelled_after_the_grant_waits_for_its_reader_and_no_longer() -> None:
    world = World()
    prefill, decode, number, lease_id = granted(world)
    cancel(world, number)
    assert [x.lease_id for x in world.told(prefill, c.Revoke)] == [lease_id]
    assert not world.told(decode, c.ReaderStopped)
    world.stop(prefill, lease_id, TransferOutcome.REVOKED)
    assert [x.lease_id for x in world.told(decode, c.ReaderStopped)] == [lease_id]
    assert world.lease(lease_id).end_reason == "TURN_ENDED"
    assert not world.state.ledger.leased


def test_a_turn_cancelled_while_its_reader_is_paused_ends_by_the_deadline() -> None:
    world = World()
    _, decode, number, lease_id = granted(world)
    cancel(world, number)
    world.keep_alive(31)
    lease = world.lease(lease_id)
    # For the books; what the reader does is not known, so the source is told nothing.
    assert (lease.state, lease.end_reason) == (LeaseState.REVOKED, "TURN_ENDED")
    assert not lease.reader_stopped
    assert not world.told(decode, c.ReaderStopped)
    world.agent(decode, "source_released", lease_id, "DEADLINE")
    assert not world.state.ledger.leased


def test_an_answer_to_something_else_grants_nothing() -> None:
    world = World()
    prefill, decode, _, order = world.returning()
    blocks = Descriptors(order.range, order.head_hash, "ids")
    for version in (order.version - 1, order.version + 1):
        world.agent(decode, "hardened", order.lease_id, version, blocks)
        assert not world.told(prefill, c.Grant)
    world.harden(order, decode)
    assert len(world.told(prefill, c.Grant)) == 1


# -- renewal -------------------------------------------------------------------------------------


def test_a_renewal_under_way_is_not_asked_for_again() -> None:
    world = World()
    _, decode, _, lease_id = granted(world)
    for _ in range(3):
        world.do(world.registry.renew(world.now, lease_id, 60 * SECOND))
    assert len(world.told(decode, c.Extend)) == 1


def test_a_renewal_that_nobody_answered_may_be_asked_for_again_after_the_guard() -> None:
    world = World()
    prefill, decode, _, lease_id = granted(world)
    world.do(world.registry.renew(world.now, lease_id, 60 * SECOND))
    (first,) = world.told(decode, c.Extend)
    world.keep_alive(6)
    world.do(world.registry.renew(world.now, lease_id, 60 * SECOND))
    (second,) = world.told(decode, c.Extend)
    # The first answer comes late, and is that of an order that was given up.
    world.agent(decode, "extended", lease_id, first.version, True)
    assert not world.told(prefill, c.Extend)
    world.agent(decode, "extended", lease_id, second.version, True)
    (extend,) = world.told(prefill, c.Extend)
    assert world.lease(lease_id).deadline_ns == world.now + extend.ttl_ns


def test_renewals_end_with_the_longest_life_of_a_lease() -> None:
    world = World(Limits(lease_lifetime_max_ns=100 * SECOND))
    prefill, decode, _, lease_id = granted(world)
    end = world.lease(lease_id).create_ns + 100 * SECOND
    while world.lease(lease_id).deadline_ns < end:
        world.keep_alive(20)
        world.do(world.registry.renew(world.now, lease_id, 30 * SECOND))
        (extend,) = world.told(decode, c.Extend)
        assert extend.ttl_ns == min(30 * SECOND, end - world.now)
        world.agent(decode, "extended", lease_id, extend.version, True)
        (extend,) = world.told(prefill, c.Extend)
        world.agent(prefill, "extended", lease_id, extend.version, False)
    assert world.lease(lease_id).deadline_ns == end


@pytest.mark.parametrize("how", ["turn ends", "revoked"])
def test_what_stops_a_lease_stops_its_renewal(how: str) -> None:
    world = World()
    prefill, decode, number, lease_id = granted(world)
    before = world.lease(lease_id).deadline_ns
    world.do(world.registry.renew(world.now, lease_id, 600 * SECOND))
    (extend,) = world.told(decode, c.Extend)
    if how == "revoked":
        world.do(world.registry.revoke(world.now, lease_id, "X"))
        # Again, with another reason: the first stands.
        world.do(world.registry.revoke(world.now, lease_id, "Y"))
        stop = world.lease(lease_id).stop
        assert stop is not None
        assert stop.reason == "X"
    else:
        cancel(world, number)
    world.agent(decode, "extended", lease_id, extend.version, True)
    assert not world.told(prefill, c.Extend)
    assert len(world.told(prefill, c.Revoke)) == 1
    assert world.lease(lease_id).deadline_ns == before
    with pytest.raises(LeaseEndedError):
        world.registry.renew(world.now, lease_id, 60 * SECOND)


# -- a burst of deadlines ------------------------------------------------------------------------


def test_a_burst_of_deadlines_holds_up_no_grant_and_misses_none() -> None:
    count, at_once = 2_000, 100
    town = Town(
        leased_share_worker=0.0,
        leased_share_tenant=0.0,
        due_per_tick=at_once,
        turns_per_worker=99_999,
        sessions_max=99_999,
        turn_timeout_ns=10_000 * SECOND,
    )
    for number in range(count):
        town.turn("a", f"s{number}", 3)
    for order in town.told(town.d, c.Harden):
        town.harden(order, town.d)
    states = Counter(x.state for x in town.state.leases.values())
    assert states == {LeaseState.GRANTED: count}
    town.told(town.p, c.Grant)
    town.now += 30 * SECOND
    for ref in (town.p, town.d):
        town.beat(ref)
    ticks = 0
    while town.registry.behind(town.now):
        town.do(town.registry.tick(town.now))
        ended = [f for f in town.effects.facts if f.name == "lease_ended"]
        assert 0 < len(ended) <= at_once
        ticks += 1
        if ticks in (1, count // at_once // 2):
            # Between two steps, a turn is begun and its lease granted, as ever.
            name = f"new{ticks}"
            turn = town.begin(key=SessionKey("b", name), policy=ReturnPolicy.ALWAYS)
            town.do(
                town.registry.end_turn(
                    town.now, SessionKey("b", name), turn.number, TurnOutcome.COMPLETED
                )
            )
            assert town.granted("b", name, 3)
            assert len(town.told(town.p, c.Grant)) == 1
    assert ticks == count // at_once
    left = [x for x in town.state.leases.values() if x.open]
    assert {x.key.tenant for x in left} == {"b"}
    assert all(x.deadline_ns > town.now for x in left)
    town.check()


def test_the_defaults_keep_up_with_twenty_thousand_deadlines_a_second() -> None:
    limits = Limits()
    a_second = SECOND / limits.tick_behind_ns * limits.due_per_tick
    assert a_second >= 20_000
