"""Pushes: who is told what, and what lets a landing zone go."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.errors import IncarnationMismatchError
from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.reports import Descriptors, LeaseReport, StopReport
from kvshuttle.controlplane.model.session import Turn
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    ForwardMode,
    LeaseState,
    Leg,
    TransferOutcome,
    TransferStats,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
)
from tests.unit.controlplane.world import KEY, World, split

PUBLISHED, FAILED = TransferOutcome.PUBLISHED, TransferOutcome.FAILED
LANDING = Descriptors(BlockRange(2, 20), b"head", "landing")


class Pair(World):
    """A prefill and a decode worker that can push, and one turn that is to be pushed."""

    def __init__(self, limits: Limits | None = None, **more: Any) -> None:
        super().__init__(limits or Limits(forward="push"))
        self.p = self.connect("p", WorkerRole.PREFILL, push=True)
        self.d = self.connect("d", WorkerRole.DECODE, push=True)
        self.sent.clear()
        self.turn: Turn = self.begin(prompt_tokens=1_000, **more)

    @property
    def push(self) -> Lease:
        found: list[Lease] = [x for x in self.state.leases.values() if x.push]
        assert len(found) == 1
        return found[0]

    @property
    def at(self) -> tuple[LeaseState, str]:
        """Where it stands, and why."""
        return self.push.state, self.push.end_reason

    def land(self, version: int | None = None) -> None:
        lease = self.push
        self.agent(self.d, "hardened", lease.lease_id, version or lease.version, LANDING)

    def ends(
        self, ref: WorkerRef, outcome: TransferOutcome, reason: str = "", *, is_source: bool
    ) -> None:
        stats = TransferStats(blocks=18, tokens=576, bytes=1_000, transfer_ns=1)
        report = StopReport(outcome, reason, stats, is_source)
        self.agent(ref, "stopped", self.push.lease_id, report)

    def let_go(self) -> list[c.WriterStopped]:
        return self.told(self.d, c.WriterStopped)


def test_both_legs_hear_of_the_push_and_the_grant_goes_to_the_writer() -> None:
    world = Pair()
    assert world.turn.plan.forward_mode is ForwardMode.PUSH
    lease = world.push
    assert lease.state is LeaseState.PENDING
    (at_prefill,) = world.told(world.p, c.ExpectTurn)
    (at_decode,) = world.told(world.d, c.ExpectTurn)
    assert at_prefill.push == c.PushPlan(
        lease.lease_id, 1, world.d, world.limits.lease_ttl_ns, lease.epoch, lease.seq
    )
    assert at_decode.push.peer == world.p
    assert not world.told(world.d, c.Harden)
    assert not world.told(world.p, c.Harden)
    world.land()
    (granted,) = world.told(world.p, c.Grant)
    assert granted.push_to == world.d
    assert granted.landing_version == 1
    assert granted.blocks is LANDING
    assert [x.lease_id for x in world.told(world.d, c.LandingGranted)] == [lease.lease_id]
    world.agent(world.p, "active", lease.lease_id)
    assert world.push.state is LeaseState.ACTIVE


def test_what_is_written_and_published_ends_well_and_nobody_is_asked_to_stop() -> None:
    world = Pair()
    world.land()
    world.ends(world.p, TransferOutcome.WRITTEN, is_source=True)
    assert world.at == (LeaseState.GRANTED, "")
    assert world.push.reader_stopped
    world.ends(world.d, PUBLISHED, is_source=False)
    assert world.at == (LeaseState.COMPLETED, "")
    assert not world.let_go()
    assert not world.told(world.p, c.Revoke)
    assert not world.state.unstopped["p"]
    assert not world.state.unstopped["d"]
    # Decode's word may come first: what it published was told to it by the writer.
    other = Pair()
    other.land()
    other.ends(other.d, PUBLISHED, is_source=False)
    assert other.push.state is LeaseState.COMPLETED
    assert other.push.reader_stopped
    other.ends(other.p, TransferOutcome.WRITTEN, is_source=True)
    assert not other.let_go()


def test_a_landing_zone_that_is_given_up_goes_only_with_the_writers_word() -> None:
    world = Pair()
    world.land()
    world.ends(world.d, FAILED, "LATE", is_source=False)
    assert world.push.state is LeaseState.FAILED
    assert not world.push.reader_stopped
    (order,) = world.told(world.p, c.Revoke)
    assert order.is_source
    # Time alone lets nothing go, and what is waited for stays known.
    for _ in range(8):
        world.keep_alive(100)
    assert not world.let_go()
    assert world.push.lease_id in world.state.leases
    world.ends(world.p, FAILED, is_source=True)
    assert [x.lease_id for x in world.let_go()] == [world.push.lease_id]


def test_a_writer_that_fails_ends_the_lease_and_lets_the_landing_zone_go() -> None:
    world = Pair()
    world.land()
    world.ends(world.p, FAILED, "PREEMPTED", is_source=True)
    assert (world.push.state, world.push.end_reason) == (LeaseState.FAILED, "PREEMPTED")
    (told,) = world.let_go()
    assert told.reason == "PREEMPTED"
    assert not told.pull_follows
    # Said again, or by the side that it is not: nothing happens.
    world.ends(world.p, FAILED, is_source=True)
    world.ends(world.p, PUBLISHED, is_source=False)
    world.ends(world.d, FAILED, is_source=True)
    assert not world.let_go()
    assert world.push.state is LeaseState.FAILED


def test_the_deadline_ends_the_lease_and_lets_nothing_go() -> None:
    world = Pair()
    world.land()
    world.keep_alive(40)
    assert (world.push.state, world.push.end_reason) == (LeaseState.EXPIRED, "DEADLINE")
    assert not world.let_go()
    assert [x.is_source for x in world.told(world.p, c.Revoke)] == [True]


def test_a_pending_push_waits_as_long_as_its_turn() -> None:
    world = Pair()
    world.keep_alive(30)
    assert world.at == (LeaseState.PENDING, "")
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.CANCELLED))
    assert world.at == (LeaseState.REVOKED, "TURN_ENDED")
    # It was never granted, so it may go at once; an offer that comes too late is told so too.
    assert len(world.let_go()) == 1
    world.land(1)
    assert len(world.let_go()) == 1
    assert not world.told(world.p, c.Grant)


def test_the_end_of_a_turn_stops_the_writer() -> None:
    world = Pair()
    world.land()
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.CANCELLED))
    assert world.push.stop is not None
    (order,) = world.told(world.p, c.Revoke)
    assert order.is_source
    assert not world.told(world.d, c.Revoke)
    world.ends(world.p, TransferOutcome.REVOKED, is_source=True)
    assert world.push.state is LeaseState.REVOKED
    assert len(world.let_go()) == 1


def test_prefill_ends_before_decode_offers_and_decode_reads_instead() -> None:
    world = Pair()
    world.offer(world.p, 20, world.turn, Leg.PREFILL)
    push = world.push
    assert (push.state, push.end_reason) == (LeaseState.REVOKED, "PULLED_INSTEAD")
    (told,) = world.let_go()
    assert told.pull_follows
    (order,) = world.told(world.p, c.Harden)
    # The offer crossed it: it is told again, and never granted.
    world.land(1)
    assert [x.pull_follows for x in world.let_go()] == [True]
    world.harden(order, world.p)
    (grant,) = world.told(world.d, c.Grant)
    assert grant.push_to is None


def test_prefill_ends_as_its_grant_is_on_the_way_and_what_it_holds_goes_with_the_lease() -> None:
    world = Pair()
    world.land()
    world.offer(world.p, 20, world.turn, Leg.PREFILL)
    assert not world.told(world.p, c.Harden)
    world.ends(world.p, TransferOutcome.WRITTEN, is_source=True)
    assert not world.told(world.p, c.ReleaseReplica)
    world.ends(world.d, PUBLISHED, is_source=False)
    assert [x.head_hash for x in world.told(world.p, c.ReleaseReplica)] == [bytes([20])]


@pytest.mark.parametrize("outcome", [PUBLISHED, FAILED])
def test_what_prefill_leaves_after_the_push_has_ended_is_read_by_nobody(
    outcome: TransferOutcome,
) -> None:
    world = Pair()
    world.land()
    world.ends(world.p, TransferOutcome.WRITTEN, is_source=True)
    world.ends(world.d, outcome, is_source=False)
    world.offer(world.p, 20, world.turn, Leg.PREFILL)
    assert not world.told(world.p, c.Harden)
    assert [x.head_hash for x in world.told(world.p, c.ReleaseReplica)] == [bytes([20])]
    assert [x.lease_id for x in world.state.leases.values()] == [world.push.lease_id]


def test_decode_that_wants_no_push_gets_no_read_either() -> None:
    world = Pair()
    world.agent(world.d, "refused", world.push.lease_id, "LOCAL_HIT")
    assert (world.push.state, world.push.end_reason) == (LeaseState.REVOKED, "LOCAL_HIT")
    world.offer(world.p, 20, world.turn, Leg.PREFILL)
    assert not world.told(world.p, c.Harden)
    assert len(world.told(world.p, c.ReleaseReplica)) == 1
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED))
    assert not world.state.push_declined


def test_a_writer_whose_stream_is_lost_fails_decode_but_frees_nothing() -> None:
    world = Pair()
    world.land()
    world.lose(world.p)
    assert (world.push.state, world.push.end_reason) == (LeaseState.FAILED, "SOURCE_LOST")
    assert [x.is_source for x in world.told(world.d, c.Revoke)] == [False]
    assert not world.let_go()
    # It comes back and still has it: it is to stop, and to say so.
    report = LeaseReport(world.push.lease_id, 2, True)
    world.connect("p", WorkerRole.PREFILL, push=True, leases=(report,))
    assert not world.let_go()
    assert [x.is_source for x in world.told(world.p, c.Revoke)] == [True]
    world.ends(world.p, FAILED, is_source=True)
    assert len(world.let_go()) == 1


def test_a_writer_that_comes_back_without_the_lease_writes_nothing() -> None:
    world = Pair()
    world.land()
    world.lose(world.p)
    world.connect("p", WorkerRole.PREFILL, push=True)
    assert len(world.let_go()) == 1


def test_another_boot_in_the_writers_place_proves_nothing_and_a_fence_does() -> None:
    world = Pair()
    world.land()
    world.lose(world.p)
    world.connect("p", WorkerRole.PREFILL, push=True, boot_id="another")
    assert not world.let_go()
    for _ in range(8):
        world.keep_alive(100)
    world.do(world.registry.fence(world.now, world.p, "host is off"))
    assert len(world.let_go()) == 1
    assert [x.worker for x in world.told(world.d, c.PeerFenced)] == [world.p]


@pytest.mark.parametrize("granted", [False, True])
def test_decode_that_is_lost_stops_the_writer(granted: bool) -> None:
    world = Pair()
    if granted:
        world.land()
    world.lose(world.d)
    assert len(world.told(world.p, c.Revoke)) == granted
    if granted:
        assert world.push.open  # until the writer has said so
        world.ends(world.p, FAILED, is_source=True)
    assert not world.push.open
    assert world.push.reader_stopped
    world.sent.clear()
    # Back, with the landing zone: it may let go.
    report = LeaseReport(world.push.lease_id, 1, False, writer=world.p)
    world.connect("d", WorkerRole.DECODE, push=True, leases=(report,))
    assert len(world.let_go()) == 1


def test_another_boot_in_decodes_place_stops_the_writer() -> None:
    world = Pair()
    world.land()
    lease_id = world.push.lease_id
    world.start()  # which has lost neither stream, so no lease has ended by that
    world.connect("p", WorkerRole.PREFILL, push=True, leases=(LeaseReport(lease_id, 2, True),))
    assert world.push.open
    world.sent.clear()
    world.connect("d", WorkerRole.DECODE, push=True, boot_id="another")
    stopped = world.told(world.p, c.Revoke)
    assert [(x.is_source, x.reason) for x in stopped] == [(True, "DESTINATION_RESTARTED")]
    world.ends(world.p, FAILED, is_source=True)
    assert world.at == (LeaseState.FAILED, "DESTINATION_RESTARTED")


def test_a_fenced_decode_stops_the_writer() -> None:
    world = Pair()
    world.land()
    world.do(world.registry.fence(world.now, world.d, "host is off"))
    assert [x.is_source for x in world.told(world.p, c.Revoke)] == [True]


def test_after_a_restart_nothing_but_the_writer_is_believed() -> None:
    """The store may be a copy from before the grant."""
    world = Pair()
    lease_id = world.push.lease_id
    world.start()  # the lease is in the store as PENDING
    assert (world.push.state, world.push.reader_stopped) == (LeaseState.REVOKED, False)
    report = LeaseReport(lease_id, 1, False, writer=world.p)
    world.connect("d", WorkerRole.DECODE, push=True, leases=(report,))
    assert not world.let_go()
    assert len(world.told(world.d, c.Revoke)) == 1
    world.connect("p", WorkerRole.PREFILL, push=True, leases=(LeaseReport(lease_id, 2, True),))
    assert not world.let_go()
    assert [x.is_source for x in world.told(world.p, c.Revoke)] == [True]
    world.ends(world.p, FAILED, is_source=True)
    assert len(world.let_go()) == 1


def test_an_offer_that_comes_too_late_is_let_go_at_once() -> None:
    """Its request was admitted while the stream was down, or under an older term."""
    for case in ("lost", "renumbered", "restarted", "another lineage"):
        world = Pair()
        lease_id, version = world.push.lease_id, world.push.version
        match case:
            case "lost":
                world.lose(world.d)
                world.connect("d", WorkerRole.DECODE, push=True)
            case "renumbered":
                first = world.state.workers["d"]
                world.lose(world.d)
                second = world.connect("d", WorkerRole.DECODE, push=True, boot_id="second")
                world.lose(second)
                world.connect(
                    "d",
                    WorkerRole.DECODE,
                    push=True,
                    boot_id=first.boot_id,
                    past=(first.ref.incarnation,),
                )
            case "restarted":
                world.start()
                world.connect("d", WorkerRole.DECODE, push=True)
            case _:
                world = Pair()
                lease_id = "of-another-history"
        world.sent.clear()
        ref = world.state.workers["d"].ref
        world.agent(ref, "hardened", lease_id, version, LANDING)
        assert [x.lease_id for x in world.told(ref, c.WriterStopped)] == [lease_id], case


def test_a_landing_zone_that_is_not_in_the_books_is_asked_about() -> None:
    world = World(Limits(forward="push"))
    prefill = world.connect("p", WorkerRole.PREFILL, push=True)
    report = LeaseReport("lineage-7-7", 1, False, writer=prefill)
    decode = world.connect("d", WorkerRole.DECODE, push=True, leases=(report,))
    (order,) = world.told(prefill, c.Revoke)
    assert (order.lease_id, order.is_source) == ("lineage-7-7", True)
    # Another's word counts for nothing.
    stopped = StopReport(TransferOutcome.REVOKED, "", TransferStats(), True)
    world.agent(decode, "stopped", "lineage-7-7", stopped)
    assert not world.told(decode, c.WriterStopped)
    world.agent(prefill, "stopped", "lineage-7-7", stopped)
    assert [x.lease_id for x in world.told(decode, c.WriterStopped)] == ["lineage-7-7"]
    assert not world.state.orphans


def test_its_writer_can_be_fenced_though_no_books_have_it() -> None:
    """The store was lost with the writer's boot in it; another boot has the name now."""
    world = Pair()
    old = WorkerRef("p", world.p.incarnation - 100)
    report = LeaseReport("of-another-history", 3, False, writer=old)
    world.connect("d", WorkerRole.DECODE, push=True, leases=(report,))
    world.sent.clear()
    with pytest.raises(IncarnationMismatchError):
        world.do(world.registry.fence(world.now, WorkerRef("p", 7), "not that one"))
    world.do(world.registry.fence(world.now, old, "host is off"))
    assert [x.worker for x in world.told(world.d, c.PeerFenced)] == [old]
    assert world.state.workers["p"].connected
    assert not world.state.orphans


def test_such_a_landing_zone_goes_too_when_its_writers_inventory_lacks_it() -> None:
    world = World(Limits(forward="push"))
    prefill = world.connect("p", WorkerRole.PREFILL, push=True)
    world.lose(prefill)
    report = LeaseReport("lineage-7-7", 1, False, writer=prefill)
    decode = world.connect("d", WorkerRole.DECODE, push=True, leases=(report,))
    assert not world.told(decode, c.WriterStopped)
    world.connect("p", WorkerRole.PREFILL, push=True)
    assert len(world.told(decode, c.WriterStopped)) == 1


def test_an_extension_goes_to_the_writer_first_and_a_push_weighs_nothing() -> None:
    world = Pair()
    world.land()
    lease = world.push
    assert not world.state.ledger.leased
    import numpy as np

    world.now += 10 * SECOND
    world.agent(world.d, "leases_needed", lease.epoch, np.array([lease.seq], np.uint64))
    (order,) = world.told(world.p, c.ExtendLeases)
    world.agent(world.p, "leases_extended", order.extension, np.array([], np.uint64))
    assert len(world.told(world.d, c.ExtendLeases)) == 1
    assert world.push.deadline_ns == world.now + world.limits.lease_ttl_ns


def test_a_worker_that_reconnects_hears_of_the_push_again() -> None:
    world = Pair()
    world.sent.clear()
    world.lose(world.p)  # ends the pending push
    world.connect("p", WorkerRole.PREFILL, push=True)
    (again,) = world.told(world.p, c.ExpectTurn)
    assert again.push is None
    assert again.lease_id == ""
    other = Pair()
    other.do(other.registry.hello(other.now, _hello_again(other)))
    (again,) = other.told(other.d, c.ExpectTurn)[-1:]
    assert again.push is not None
    assert again.push.lease_id == other.push.lease_id


def _hello_again(world: Pair) -> Any:
    from tests.unit.controlplane.world import hello

    return hello("d", WorkerRole.DECODE, push=True)


def test_each_step_survives_the_store() -> None:
    world = Pair()
    world.land()
    world.ends(world.p, TransferOutcome.WRITTEN, is_source=True)
    before = world.push
    world.start()
    assert world.push.push
    assert world.push.reader_stopped
    assert world.push.range == before.range


# -- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "tokens", "able", "mode", "reason"),
    [
        ("pull", 4_000, True, ForwardMode.PULL, "CONFIGURED"),
        ("push", 4_000, True, ForwardMode.PUSH, "CONFIGURED"),
        ("push", 0, True, ForwardMode.PUSH, "CONFIGURED"),
        ("push", 40, True, ForwardMode.PULL, "TOO_SHORT_TO_OVERLAP"),
        ("push", 4_000, False, ForwardMode.PULL, "NOT_ABLE"),
        ("auto", 4_000, False, ForwardMode.PULL, "NOT_ABLE"),
        ("auto", 4_000, True, ForwardMode.PUSH, "OVERLAP_PAYS"),
        ("auto", 0, True, ForwardMode.PULL, "PROMPT_UNKNOWN"),
        # 100 ms at the 2,000 tokens a second that are assumed before anything was measured.
        ("auto", 199, True, ForwardMode.PULL, "TOO_SHORT_TO_OVERLAP"),
        ("auto", 200, True, ForwardMode.PUSH, "OVERLAP_PAYS"),
    ],
)
def test_the_way_forward(
    setting: Any, tokens: int, able: bool, mode: ForwardMode, reason: str
) -> None:
    world = World(Limits(forward=setting))
    world.connect("p", WorkerRole.PREFILL, push=True)
    world.connect("d", WorkerRole.DECODE, push=able)
    plan = world.begin(prompt_tokens=tokens).plan
    assert (plan.forward_mode, plan.forward_reason) == (mode, reason)
    assert len(world.state.leases) == (mode is ForwardMode.PUSH)


@pytest.mark.parametrize("setting", ["push", "auto"])
def test_workers_that_are_split_otherwise_pull(setting: Any) -> None:
    world = World(Limits(forward=setting))
    world.connect("p", WorkerRole.PREFILL, push=True, **split(1))
    world.connect("d", WorkerRole.DECODE, push=True, **split(2))
    plan = world.begin(prompt_tokens=4_000).plan
    assert (plan.forward_mode, plan.forward_reason) == (ForwardMode.PULL, "SPLIT_DIFFERS")
    assert not world.state.leases


def test_what_comes_back_is_not_computed_and_hides_nothing() -> None:
    world = Pair(Limits(forward="auto", direct_tokens=0))
    world.land()
    world.offer(world.d, 30, world.turn)
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED))
    plan = world.begin(prompt_tokens=1_100).plan
    assert plan.reusable_tokens == 960
    assert plan.forward_reason == "TOO_SHORT_TO_OVERLAP"
    plan = world.begin(prompt_tokens=1_300).plan
    assert plan.forward_reason == "OVERLAP_PAYS"


def test_one_worker_alone_pushes_to_nobody() -> None:
    world = World(Limits(forward="push"))
    world.connect("b", WorkerRole.BOTH, push=True)
    plan = world.begin(prompt_tokens=4_000).plan
    assert (plan.forward_mode, plan.forward_reason) == (ForwardMode.PULL, "SAME_WORKER")


# -- processes that lose their place and come back under another number --------------------------


def test_a_writers_word_counts_under_its_new_number() -> None:
    """Found by the simulation: another boot took its place for a while."""
    world = Pair()
    world.land()
    old = world.p
    world.lose(world.p)
    other = world.connect("p", WorkerRole.PREFILL, push=True, boot_id="another")
    world.lose(other)
    report = LeaseReport(world.push.lease_id, 2, True)
    new = world.connect(
        "p", WorkerRole.PREFILL, push=True, leases=(report,), past=(old.incarnation,)
    )
    assert not world.let_go()
    assert [x.is_source for x in world.told(new, c.Revoke)] == [True]
    # Not another's.
    world.ends(world.d, FAILED, is_source=True)
    assert not world.let_go()
    world.ends(new, FAILED, is_source=True)
    assert len(world.let_go()) == 1


def test_a_fence_counts_for_every_number_that_the_process_had() -> None:
    """Found by the simulation: decode had another number when prefill began to write to it."""
    world = Pair()
    world.land()
    old = world.d
    world.lose(world.d)
    other = world.connect("d", WorkerRole.DECODE, push=True, boot_id="another")
    world.lose(other)
    new = world.connect("d", WorkerRole.DECODE, push=True, past=(old.incarnation,))
    world.sent.clear()
    world.do(world.registry.fence(world.now, new, "host is off"))
    assert [x.worker for x in world.told(world.p, c.PeerFenced)] == [old, new]
    # Whoever comes back later hears of both too.
    world.lose(world.p)
    world.sent.clear()
    again = world.connect("p", WorkerRole.PREFILL, push=True)
    assert [x.worker for x in world.told(again, c.PeerFenced)] == [old, new]


def test_a_writer_back_under_a_new_number_without_the_lease_writes_nothing() -> None:
    world = Pair()
    world.land()
    old = world.p
    world.lose(world.p)
    world.connect("p", WorkerRole.PREFILL, push=True, boot_id="x", past=(old.incarnation,))
    assert len(world.let_go()) == 1


def test_a_landing_zone_back_under_a_new_number_hears_of_its_writer() -> None:
    world = Pair()
    world.land()
    old = world.d
    world.lose(world.d)
    world.lose(world.connect("d", WorkerRole.DECODE, push=True, boot_id="another"))
    report = LeaseReport(world.push.lease_id, 1, False, writer=world.p)
    new = world.connect(
        "d", WorkerRole.DECODE, push=True, leases=(report,), past=(old.incarnation,)
    )
    assert not world.told(new, c.WriterStopped)
    world.ends(world.p, FAILED, is_source=True)
    assert len(world.told(new, c.WriterStopped)) == 1
    assert not world.state.orphans


def test_a_number_of_a_process_that_lives_is_not_attested_dead() -> None:
    """It lost its place to another boot and came back: whoever reads of its first number beside the
    present one would think that one gone, and it still writes."""
    world = Pair()
    world.land()
    first = world.p
    world.lose(first)
    world.lose(world.connect("p", WorkerRole.PREFILL, push=True, boot_id="another"))
    writes = LeaseReport(world.push.lease_id, 2, is_source=True)
    now = world.connect(
        "p", WorkerRole.PREFILL, push=True, leases=(writes,), past=(first.incarnation,)
    )
    world.sent.clear()
    with pytest.raises(IncarnationMismatchError, match=f"incarnation {now.incarnation}, not"):
        world.do(world.registry.fence(world.now, first, "that pod is gone"))
    assert not world.told(world.d, c.PeerFenced)
    assert not world.let_go()
    # Attested under its own number it is dead under each.
    world.do(world.registry.fence(world.now, now, "killed"))
    assert first in [x.worker for x in world.told(world.d, c.PeerFenced)]


def test_what_was_moved_teaches_how_fast_the_way_is_pushed_or_pulled() -> None:
    second = TransferStats(blocks=18, tokens=576, bytes=5_000_000_000, transfer_ns=SECOND)
    pushed = Pair()
    pushed.land()
    prior = pushed.registry.planner.rates.link_rate("p", "d")
    report = StopReport(PUBLISHED, "", second, is_source=False)
    pushed.agent(pushed.d, "stopped", pushed.push.lease_id, report)
    assert pushed.registry.planner.rates.link_rate("p", "d") == pytest.approx(5e9) != prior
    # What failed says nothing, however it was.
    failed = Pair()
    failed.land()
    failed.agent(
        failed.d, "stopped", failed.push.lease_id, StopReport(FAILED, "LATE", second, False)
    )
    assert failed.registry.planner.rates.link_rate("p", "d") == prior
    pulled = World()
    _, decode, _, order = pulled.returning()
    pulled.harden(order, decode)
    (reader,) = {x.destination for x in pulled.state.leases.values()}
    pulled.agent(reader, "stopped", order.lease_id, StopReport(PUBLISHED, "", second))
    rates = pulled.registry.planner.rates
    assert rates.link_rate(decode.worker_id, reader.worker_id) == pytest.approx(5e9)
