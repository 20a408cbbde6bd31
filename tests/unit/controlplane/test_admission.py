"""Budgets: what is refused, to whom, what goes first, and that the counts are right."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.admission import EVICTED
from kvshuttle.controlplane.model.errors import BudgetExceededError
from kvshuttle.controlplane.model.ledger import Ledger
from kvshuttle.controlplane.model.limits import SECOND, Limits, TenantLimits
from kvshuttle.controlplane.model.reports import Heartbeat, PoolStats, ReplicaReport
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
from kvshuttle.controlplane.store import SqliteStore
from tests.unit.controlplane.world import World, hello

BLOCKS = 1_000
"""Of every worker's pool in these tests (see `world.hello`)."""


def limits(**more: Any) -> Limits:
    return dataclasses.replace(Limits(), **more)


class Town(World):
    """A pair of workers and any number of tenants' sessions."""

    def __init__(self, store: Any = None, **more: Any) -> None:
        super().__init__(limits(**more), store)
        self.p, self.d = self.pair()

    def beat(self, ref: WorkerRef, **pool: int) -> None:
        stats = PoolStats(**({"total_blocks": BLOCKS, "free_blocks": BLOCKS} | pool))
        self.agent(ref, "heartbeat", Heartbeat(1, stats))

    def offered(
        self, ref: WorkerRef, key: SessionKey, blocks: int, turn: Turn | None = None, **more: Any
    ) -> None:
        fields: dict[str, Any] = {
            "key": key,
            "head_hash": f"{key.session_id}-{blocks}".encode(),
            "num_blocks": blocks,
            "num_tokens": blocks * 32,
            "state": ReplicaState.HARD,
            "hold_remaining_ns": 300 * SECOND,
            "turn_token": turn.token if turn else "",
            "leg": Leg.DECODE,
        }
        self.agent(ref, "offered", ReplicaReport(**(fields | more)))

    def turn(self, tenant: str, session: str, blocks: int = 0) -> Turn:
        """A turn of a session whose blocks lie on decode."""
        key = SessionKey(tenant, session)
        if blocks and key not in self.state.replicas:
            first = self.begin(key=key)
            self.do(self.registry.end_turn(self.now, key, first.number, TurnOutcome.COMPLETED))
            self.offered(self.d, key, blocks)
        return self.begin(key=key, policy=ReturnPolicy.ALWAYS)

    def lease_of(self, turn: Turn, tenant: str, session: str) -> str:
        (lease_id,) = self.state.turn_leases(turn.token)
        return str(lease_id)

    def granted(self, tenant: str, session: str, blocks: int) -> str:
        """A lease that waits for its reader; its id."""
        turn = self.turn(tenant, session, blocks)
        assert turn.plan.return_mode is ReturnMode.LAZY, turn.plan
        lease_id = self.lease_of(turn, tenant, session)
        (order,) = [x for x in self.told(self.d, c.Harden) if x.lease_id == lease_id]
        self.harden(order, self.d)
        assert self.lease(lease_id).state is LeaseState.GRANTED
        return lease_id

    def leased(self, tenant: str) -> int:
        found = self.state.ledger.leased.get(self.d)
        return int(found.blocks.of.get(tenant, 0)) if found is not None else 0

    def check(self) -> None:
        """What was counted is what is there."""
        counted, afresh = self.state.ledger, Ledger.of(self.state, self.state.ledger.released)
        assert counted.sessions == afresh.sessions
        assert counted.turns == afresh.turns
        assert counted.held == afresh.held
        assert counted.leased.keys() == afresh.leased.keys()
        for ref, leased in counted.leased.items():
            assert leased.blocks == afresh.leased[ref].blocks
            assert leased.leaving == afresh.leased[ref].leaving
            assert {t: set(x) for t, x in leased.unread.items()} == {
                t: set(x) for t, x in afresh.leased[ref].unread.items()
            }


# -- leases --------------------------------------------------------------------------------------


def test_over_its_budget_a_tenants_turn_recomputes() -> None:
    town = Town(leased_share_tenant=0.3)
    town.turn("a", "s1", 200)
    turn = town.turn("a", "s2", 101)
    assert (turn.plan.return_mode, turn.plan.reason) == (ReturnMode.NONE, "TENANT_BUDGET")
    assert town.turn("a", "s3", 100).plan.return_mode is ReturnMode.LAZY
    # Another tenant has a budget of its own.
    assert town.turn("b", "s4", 150).plan.return_mode is ReturnMode.LAZY
    assert (town.leased("a"), town.leased("b")) == (300, 150)
    assert any(f.name == "lease_denied" for f in town.effects.facts) is False
    town.turn("a", "s5", 50)
    (fact,) = [f for f in town.effects.facts if f.name == "lease_denied"]
    assert fact.values["reason"] == "TENANT_BUDGET"
    assert fact.values["tenant"] == "a"


def test_a_tenant_has_the_limits_that_the_operator_gave_it() -> None:
    town = Town(tenants={"small": TenantLimits(leased_share=0.1)})
    town.turn("small", "s1", 60)
    assert town.turn("small", "s2", 60).plan.reason == "TENANT_BUDGET"
    town.turn("other", "s3", 60)
    assert town.turn("other", "s4", 60).plan.return_mode is ReturnMode.LAZY


def test_a_share_of_nothing_is_no_limit() -> None:
    town = Town(leased_share_tenant=0.0, leased_share_worker=0.0)
    for number in range(5):
        turn = town.turn("a", f"s{number}", 400)
        assert turn.plan.return_mode is ReturnMode.LAZY


def test_soonest_expiring_goes_first_and_only_what_nobody_reads() -> None:
    town = Town(leased_share_tenant=0.3)
    old, reading, young = (town.granted("a", s, 90) for s in ("s1", "s2", "s3"))
    town.agent(town.p, "active", reading)
    town.now += 2 * SECOND
    assert town.turn("a", "s4", 90).plan.return_mode is ReturnMode.LAZY
    stop = town.lease(old).stop
    assert stop is not None
    assert stop.reason == EVICTED
    assert [x.lease_id for x in town.told(town.p, c.Revoke)] == [old]
    # The right still stands until its reader has answered, and so it is counted.
    assert town.leased("a") == 360
    town.stop(town.p, old, TransferOutcome.REVOKED)
    assert town.lease(old).state is LeaseState.REVOKED
    assert town.leased("a") == 270
    assert town.lease(reading).stop is None
    assert town.lease(young).stop is None


def test_a_lease_whose_request_is_on_its_way_is_not_stopped_for_another() -> None:
    town = Town(leased_share_tenant=0.3)
    fresh = town.granted("a", "s1", 200)
    town.now += SECOND // 2
    assert town.turn("a", "s2", 150).plan.reason == "TENANT_BUDGET"
    assert town.lease(fresh).stop is None


def test_nothing_is_stopped_for_a_lease_that_does_not_fit_anyway() -> None:
    town = Town(leased_share_tenant=0.3)
    old = town.granted("a", "s1", 100)
    town.now += 2 * SECOND
    town.granted("a", "s2", 190)  # too young to go
    assert town.turn("a", "s3", 295).plan.reason == "TENANT_BUDGET"
    assert town.lease(old).stop is None


def test_half_of_the_room_is_no_room() -> None:
    town = Town(leased_share_tenant=0.3)
    old = town.granted("a", "s1", 20)
    town.now += 2 * SECOND
    town.granted("a", "s2", 270)
    assert town.turn("a", "s3", 80).plan.reason == "TENANT_BUDGET"  # 70 too many, 20 could go
    assert town.lease(old).stop is None
    # Nor is another's taken when it is not enough.
    greedy = Town(leased_share_tenant=0.0, contended_share=1.0)
    first = greedy.granted("greedy", "g0", 20)
    greedy.now += 2 * SECOND
    greedy.granted("greedy", "g1", 460)
    greedy.granted("modest", "m0", 20)
    assert greedy.turn("modest", "m1", 80).plan.reason == "WORKER_BUDGET"
    assert greedy.lease(first).stop is None


def test_readers_that_do_not_answer_make_no_room_without_end() -> None:
    town = Town(leased_share_tenant=0.3, leaving_share=0.1)
    for number in range(6):
        town.granted("a", f"s{number}", 50)
    town.now += 2 * SECOND
    made = 0
    for number in range(6, 12):
        made += town.turn("a", f"s{number}", 50).plan.return_mode is ReturnMode.LAZY
    # Two stops of fifty blocks were believed, no more.
    assert made == 2
    assert town.leased("a") == 400
    assert sum(lease.stop is not None for lease in town.state.leases.values()) == 2
    assert town.state.ledger.leased[town.d].leaving.of == {"a": 100}


def test_a_renewed_lease_is_in_its_new_place() -> None:
    town = Town(leased_share_tenant=0.3)
    first = town.granted("a", "s1", 100)
    town.now += SECOND
    second = town.granted("a", "s2", 100)
    town.do(town.registry.renew(town.now, first, 60 * SECOND))
    (extend,) = town.told(town.d, c.Extend)
    town.agent(town.d, "extended", first, extend.version, True)
    assert town.lease(first).deadline_ns > town.lease(second).deadline_ns
    town.now += 2 * SECOND
    assert town.turn("a", "s3", 100).plan.return_mode is ReturnMode.LAZY
    assert town.turn("a", "s4", 100).plan.return_mode is ReturnMode.LAZY
    assert town.lease(second).stop is not None
    assert town.lease(first).stop is None


def test_a_long_conversation_moves_although_it_is_larger_than_the_budget() -> None:
    town = Town()
    assert town.turn("a", "s1", 900).plan.return_mode is ReturnMode.LAZY
    # But not so that the pool would be leased twice.
    assert town.turn("b", "s2", 200).plan.return_mode is ReturnMode.NONE


def test_a_greedy_tenant_leaves_room_for_another() -> None:
    """The greedy one asks first, and without end; the other asks little, and always gets it."""
    town = Town(leased_share_tenant=0.0)  # no cap of its own: the division alone
    refused = [town.turn("greedy", f"g{n}", 20).plan.reason for n in range(30)]
    assert "FAIR_SHARE" in refused
    assert town.leased("greedy") <= 0.75 * 0.5 * BLOCKS
    for number in range(7):
        assert town.turn("modest", f"m{number}", 20).plan.return_mode is ReturnMode.LAZY, number
        assert town.turn("greedy", f"h{number}", 20).plan.return_mode is ReturnMode.NONE
    town.check()


def test_a_tenant_without_room_takes_its_own_when_nobody_has_too_much() -> None:
    town = Town(leased_share_tenant=0.0, leaving_share=0.2)
    first = town.granted("a", "a0", 160)
    town.granted("b", "b0", 160)
    town.granted("c", "c0", 160)
    town.now += 2 * SECOND
    assert town.turn("a", "a1", 100).plan.return_mode is ReturnMode.LAZY
    assert town.lease(first).stop is not None


def test_room_is_taken_back_from_who_has_too_much() -> None:
    """A lease that a tenant within its part needs is paid for by the one beyond its own."""
    town = Town(leased_share_tenant=0.0, contended_share=1.0)  # nothing is kept for newcomers
    greedy = [town.granted("greedy", f"g{n}", 20) for n in range(24)]
    town.granted("modest", "m0", 20)
    town.now += 2 * SECOND
    assert town.turn("modest", "m1", 20).plan.return_mode is ReturnMode.LAZY
    assert town.lease(greedy[0]).stop is not None
    assert town.lease(greedy[1]).stop is None


def test_under_the_watermark_nothing_is_hardened() -> None:
    town = Town()
    town.beat(town.d, free_blocks=49)
    assert town.turn("a", "s", 20).plan.reason == "WORKER_WATERMARK"
    town.beat(town.d, free_blocks=50)
    assert town.turn("a", "s", 20).plan.return_mode is ReturnMode.LAZY


def test_a_renewal_that_the_pool_cannot_bear_is_refused_and_says_when_to_try_again() -> None:
    town = Town()
    lease_id = town.granted("a", "s", 20)
    town.beat(town.d, free_blocks=10)
    with pytest.raises(BudgetExceededError, match="10 free blocks of 1000") as caught:
        town.registry.renew(town.now, lease_id, 60 * SECOND)
    assert caught.value.reason == "WORKER_WATERMARK"
    assert caught.value.metadata["scope"] == "worker d"
    assert caught.value.metadata["remedy"]
    assert caught.value.retry_ns == 5 * SECOND
    assert town.lease(lease_id).renewal is None
    town.beat(town.d)
    town.do(town.registry.renew(town.now, lease_id, 60 * SECOND))
    assert town.lease(lease_id).renewal is not None


def test_a_tenant_beyond_its_budget_renews_nothing() -> None:
    town = Town()
    lease_id = town.granted("a", "s1", 200)
    town.granted("a", "s2", 100)
    town.registry.limits = town.limits = limits(leased_share_tenant=0.2)  # as after a restart
    with pytest.raises(BudgetExceededError) as caught:
        town.registry.renew(town.now, lease_id, 60 * SECOND)
    assert caught.value.reason == "TENANT_BUDGET"
    assert (caught.value.metadata["used"], caught.value.metadata["most"]) == ("300", "200")


def test_a_destination_full_of_quarantine_is_granted_nothing() -> None:
    town = Town()
    turn = town.turn("a", "s1", 20)
    (order,) = town.told(town.d, c.Harden)
    town.beat(town.p, quarantined_blocks=101)
    assert town.turn("a", "s2", 20).plan.reason == "DESTINATION_QUARANTINE"
    # Nor under a lease that was asked for before.
    town.harden(order, town.d)
    lease = town.lease(order.lease_id)
    assert (lease.state, lease.end_reason) == (LeaseState.FAILED, "DESTINATION_QUARANTINE")
    assert not town.told(town.p, c.Grant)
    assert [x.turn_token for x in town.told(town.p, c.Revoke)] == [turn.token]
    town.beat(town.p, quarantined_blocks=100)
    assert town.turn("a", "s3", 20).plan.return_mode is ReturnMode.LAZY


def test_decode_does_not_wait_for_a_forward_lease_that_was_denied() -> None:
    town = Town()
    town.beat(town.p, free_blocks=0)
    turn = town.turn("a", "s")
    town.offered(town.p, SessionKey("a", "s"), 20, turn, leg=Leg.PREFILL)
    assert not town.told(town.p, c.Harden)
    (revoke,) = town.told(town.d, c.Revoke)
    assert (revoke.lease_id, revoke.turn_token) == ("", turn.token)
    assert revoke.reason == "WORKER_WATERMARK"
    assert town.told(town.p, c.ReleaseReplica)


def test_an_ended_lease_counts_until_its_source_lets_go() -> None:
    town = Town()
    lease_id = town.granted("a", "s", 50)
    town.keep_alive(31)
    lease = town.lease(lease_id)
    assert (lease.state, lease.reader_stopped) == (LeaseState.EXPIRED, False)
    assert town.leased("a") == 50
    town.agent(town.d, "source_released", lease_id, "DEADLINE")
    assert town.leased("a") == 0
    # Whatever comes after changes nothing more.
    town.agent(town.d, "source_released", lease_id, "DEADLINE")
    town.stop(town.p, lease_id, TransferOutcome.DISCARDED)
    assert town.leased("a") == 0
    town.check()
    town.keep_alive(700)
    assert lease_id not in town.state.leases
    assert not town.state.ledger.released


def test_what_a_source_no_longer_lists_when_it_is_back_holds_nothing() -> None:
    town = Town()
    lease_id = town.granted("a", "s", 50)
    town.lose(town.p)
    town.lose(town.d)
    assert town.leased("a") == 50
    town.do(town.registry.hello(town.now, hello("d", WorkerRole.DECODE)))
    assert lease_id in town.state.leases
    assert town.leased("a") == 0
    town.check()


# -- turns and sessions --------------------------------------------------------------------------


def test_turns_of_a_tenant_are_capped() -> None:
    town = Town(turns_per_tenant=2, tenants={"big": TenantLimits(running_turns=3)})
    first = town.begin(key=SessionKey("a", "s1"), request_id="r1")
    town.begin(key=SessionKey("a", "s2"))
    with pytest.raises(BudgetExceededError, match="tenant a has 2") as caught:
        town.begin(key=SessionKey("a", "s3"))
    assert caught.value.reason == "TENANT_TURNS"
    assert caught.value.metadata["scope"] == "tenant a"
    assert caught.value.retry_ns == SECOND
    assert SessionKey("a", "s3") not in town.state.sessions
    # A retry is no new turn, and other tenants are not concerned.
    assert town.begin(key=SessionKey("a", "s1"), request_id="r1").number == first.number
    for number in range(3):
        town.begin(key=SessionKey("big", f"s{number}"))
    town.do(town.registry.end_turn(town.now, SessionKey("a", "s2"), 1, TurnOutcome.COMPLETED))
    town.begin(key=SessionKey("a", "s3"))
    town.check()


def test_a_full_worker_takes_no_more_turns() -> None:
    town = Town(turns_per_worker=2, contended_share=1.0)
    town.connect("d2", WorkerRole.DECODE)
    decodes = [town.begin(key=SessionKey(f"t{n}", "s")).decode.worker.worker_id for n in range(2)]
    assert sorted(decodes) == ["d", "d2"]
    # Prefill is full with two, so the next runs without one.
    third = town.begin(key=SessionKey("t2", "s"))
    assert third.prefill is None
    decode = third.decode.worker.worker_id
    other = "d2" if decode == "d" else "d"
    with pytest.raises(BudgetExceededError, match="start another worker") as caught:
        town.begin(key=SessionKey("t3", "s"), excluded=(other,))
    assert caught.value.reason == "WORKER_TURNS"
    assert town.begin(key=SessionKey("t3", "s")).decode.worker.worker_id == other
    with pytest.raises(BudgetExceededError) as caught:
        town.begin(key=SessionKey("t4", "s"))
    assert caught.value.reason == "ALL_TURNS"


def test_a_greedy_tenants_turns_leave_room_for_another() -> None:
    town = Town(turns_per_worker=20)
    begun, reasons = 0, set()
    for number in range(60):
        try:
            town.begin(key=SessionKey("greedy", f"g{number}"))
            begun += 1
        except BudgetExceededError as error:
            reasons.add(error.reason)
    assert (begun, reasons) == (15, {"FAIR_TURNS"})
    for number in range(5):
        town.begin(key=SessionKey("modest", f"m{number}"))
        # What the greedy one ends, the other may have, up to its part.
        town.do(
            town.registry.end_turn(
                town.now, SessionKey("greedy", f"g{number}"), 1, TurnOutcome.COMPLETED
            )
        )
        with pytest.raises(BudgetExceededError):
            town.begin(key=SessionKey("greedy", "more"))
    town.check()


def test_sessions_of_a_tenant_are_capped() -> None:
    town = Town(sessions_per_tenant=2)
    for name in ("s1", "s2"):
        town.begin(key=SessionKey("a", name))
    with pytest.raises(BudgetExceededError) as caught:
        town.begin(key=SessionKey("a", "s3"))
    assert caught.value.reason == "TENANT_SESSIONS"
    assert caught.value.retry_ns == 60 * SECOND
    town.begin(key=SessionKey("a", "s1"))  # another turn of a session that is there
    town.begin(key=SessionKey("b", "s3"))
    town.do(town.registry.end_session(town.now, SessionKey("a", "s2")))
    town.begin(key=SessionKey("a", "s3"))
    # An ended session that starts afresh is a session more.
    with pytest.raises(BudgetExceededError):
        town.begin(key=SessionKey("a", "s2"))
    town.check()


def test_a_greedy_tenants_sessions_leave_room_for_another() -> None:
    town = Town(sessions_max=40, turns_per_worker=10_000)
    reasons = set()
    for number in range(60):
        try:
            town.begin(key=SessionKey("greedy", f"g{number}"))
        except BudgetExceededError as error:
            reasons.add(error.reason)
    assert reasons == {"FAIR_SESSIONS"}
    assert town.state.ledger.sessions.of["greedy"] == 30
    for number in range(10):
        town.begin(key=SessionKey("modest", f"m{number}"))
    with pytest.raises(BudgetExceededError) as caught:
        town.begin(key=SessionKey("modest", "m10"))
    assert caught.value.reason == "ALL_SESSIONS"


# -- held blocks ---------------------------------------------------------------------------------


def test_a_greedy_tenants_replicas_leave_room_for_another() -> None:
    town = Town(held_share_worker=0.3)
    for number in range(12):
        town.turn("greedy", f"g{number}", 25)
    town.turn("modest", "m0", 25)
    for key in list(town.state.sessions):
        for turn in town.state.sessions[key].running():
            town.do(town.registry.end_turn(town.now, key, turn.number, TurnOutcome.COMPLETED))
    town.told(town.d, c.RetainReplica)
    town.now += 10 * SECOND
    town.beat(town.d, held_blocks=325, free_blocks=600)
    going = {x.key.tenant for x in town.told(town.d, c.RetainReplica) if x.retention_ns <= 0}
    assert going == {"greedy"}


def test_a_tenant_holds_no_more_than_its_own_share() -> None:
    town = Town(tenants={"small": TenantLimits(held_share=0.05)})
    for number in range(4):
        town.turn("small", f"s{number}", 25)
        town.turn("other", f"o{number}", 25)
    for key in list(town.state.sessions):
        for turn in town.state.sessions[key].running():
            town.do(town.registry.end_turn(town.now, key, turn.number, TurnOutcome.COMPLETED))
    town.told(town.d, c.RetainReplica)
    town.now += 10 * SECOND
    town.beat(town.d, held_blocks=200, free_blocks=700)  # the worker as such has plenty
    told = town.told(town.d, c.RetainReplica)
    assert {x.key.tenant for x in told} == {"small"}
    assert sum(25 - x.keep_blocks for x in told) == 50


# -- the counts ----------------------------------------------------------------------------------


def test_counts_are_right_after_a_restart_from_disk(tmp_path: Path) -> None:
    """Where what is idle is taken up without being unpacked."""
    store = SqliteStore(tmp_path / "store.db")
    try:
        town = Town(store=store)
        granted = town.granted("a", "s1", 40)
        reading = town.granted("b", "s2", 30)
        town.agent(town.p, "active", reading)
        town.turn("b", "s3", 20)
        town.stop(town.p, granted, TransferOutcome.FAILED)
        town.begin(key=SessionKey("c", "s4"))
        town.do(town.registry.end_session(town.now, SessionKey("a", "s1")))
        town.start()
        town.check()
        ledger = town.state.ledger
        assert ledger.sessions.of == {"b": 2, "c": 1}
        assert ledger.turns.of == {"b": 2, "c": 1}
        # The one that was read goes on; the one that was only asked for was not granted.
        assert town.leased("b") >= 30
        assert town.leased("a") == 0
    finally:
        store.close()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "begin",
                "end",
                "end_session",
                "offer",
                "soften",
                "gone",
                "harden",
                "active",
                "stop",
                "released",
                "revoke",
                "renew",
                "extended",
                "lose",
                "reboot",
                "restart",
                "wait",
                "fence",
            ]
        ),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_counts_are_right_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    town = Town(lease_unread_ns=0, ended_lease_kept_ns=60 * SECOND)
    boot = {"d": "boot-of-d", "p": "boot-of-p"}
    for what, n, m in steps:
        key = SessionKey(f"t{m % 2}", f"s{n}")
        leases = sorted(town.state.leases)
        lease_id = leases[n % len(leases)] if leases else ""
        lease = town.state.leases.get(lease_id)
        session = town.state.sessions.get(key)
        replicas = town.state.replicas_of_session(key)
        town.now += SECOND // 10
        if what == "begin":
            town.begin(key=key, policy=ReturnPolicy.ALWAYS)
        elif what == "end" and session is not None and session.turn_count:
            town.do(
                town.registry.end_turn(town.now, key, session.turn_count, TurnOutcome.COMPLETED)
            )
        elif what == "end_session" and session is not None:
            town.do(town.registry.end_session(town.now, key))
        elif what == "offer":
            turn = session.turns[-1] if session is not None and session.turns else None
            leg = Leg.PREFILL if m == 3 else Leg.DECODE
            ref = town.p if m == 3 else town.d
            town.offered(ref, key, 40 * (1 + m), turn, leg=leg)
        elif what in ("soften", "gone") and replicas:
            replica = replicas[n % len(replicas)]
            state = ReplicaState.SOFT if what == "soften" else ReplicaState.GONE
            town.agent(
                replica.worker, "replica_changed", key, replica.head_hash, state,
                replica.num_blocks, "EXPIRED",
            )  # fmt: skip
        elif what == "harden":
            for ref in (town.d, town.p):
                for order in town.told(ref, c.Harden):
                    town.harden(order, ref)
        elif what == "active" and lease is not None:
            town.agent(lease.destination, "active", lease_id)
        elif what == "stop" and lease is not None:
            town.stop(lease.destination, lease_id, TransferOutcome(1 + n % 5))
        elif what == "released" and lease is not None:
            town.agent(lease.source, "source_released", lease_id, "DEADLINE")
        elif what == "revoke" and lease is not None:
            town.do(town.registry.revoke(town.now, lease_id, ""))
        elif what == "renew" and lease is not None:
            try:
                town.do(town.registry.renew(town.now, lease_id, 20 * SECOND))
            except Exception as error:
                assert "lease" in str(error) or "worker" in str(error)  # noqa: PT017
        elif what == "extended":
            for ref in (town.d, town.p):
                for extend in town.told(ref, c.Extend):
                    side = extend.is_source
                    town.agent(ref, "extended", extend.lease_id, extend.version, side)
        elif what == "lose":
            ref = town.d if m % 2 else town.p
            if town.state.workers[ref.worker_id].connected:
                town.lose(ref)
                role = WorkerRole.DECODE if m % 2 else WorkerRole.PREFILL
                town.connect(ref.worker_id, role, boot_id=boot[ref.worker_id])
        elif what in ("reboot", "fence"):
            boot["d"] += "+"
            if what == "fence":
                town.do(town.registry.fence(town.now, town.d, "test"))
            else:
                town.lose(town.d)
            town.d = town.connect("d", WorkerRole.DECODE, boot_id=boot["d"])
        elif what == "restart":
            town.start()
            town.p, town.d = (
                town.connect("p", WorkerRole.PREFILL),
                town.connect("d", WorkerRole.DECODE, boot_id=boot["d"]),
            )
        elif what == "wait":
            town.keep_alive(35 * (1 + n))
        town.check()
