"""Where a turn runs, and whether decode's KV is returned."""

from __future__ import annotations

import pytest

from kvshuttle.controlplane.model.errors import NoWorkerError
from kvshuttle.controlplane.model.replica import Replica
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.model.terms import (
    ReplicaState,
    ReturnMode,
    ReturnPolicy,
    SessionKey,
    WorkerRef,
    WorkerRole,
    WorkerState,
)
from kvshuttle.controlplane.model.worker import Worker
from kvshuttle.controlplane.planner import Choice, Planner, Rate

MS = 1_000_000


def worker(
    name: str, role: WorkerRole, state: WorkerState = WorkerState.READY, incarnation: int = 1
) -> Worker:
    return Worker(
        ref=WorkerRef(name, incarnation),
        boot_id=name,
        role=role,
        url="",
        state=state,
        register_ns=0,
        heard_ns=0,
        bytes_per_block=736_000,
        ranks=([name],),  # as in life, nothing that could be hashed
    )


def replica(name: str, blocks: int, incarnation: int = 1) -> Replica:
    return Replica(
        WorkerRef(name, incarnation), bytes([blocks]), blocks, blocks * 32, ReplicaState.HARD, 0
    )


P, D, B = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH


def place(
    workers: list[Worker],
    *,
    replicas: tuple[Replica, ...] = (),
    on: dict[str, int] | None = None,
    excluded: tuple[str, ...] = (),
    last_prefill: str = "",
) -> Choice:
    session = Session(SessionKey("t", "s"), 0, 0, last_prefill=last_prefill)
    choice, _ = Planner().decide(
        now_ns=0,
        workers={x.ref.worker_id: x for x in workers},
        session=session,
        replicas=replicas,
        turns_on=on or {},
        excluded=excluded,
    )
    return choice


def names(choice: Choice) -> tuple[str, str]:
    prefill = choice.prefill.ref.worker_id if choice.prefill else ""
    return (prefill, choice.decode.ref.worker_id)


def test_decode_stays_with_the_longest_replica_and_prefill_where_it_was() -> None:
    fleet = [worker("p1", P), worker("p2", P), worker("d1", D), worker("d2", D)]
    choice = place(
        fleet,
        replicas=(replica("d1", 3), replica("d2", 9)),
        on={"d2": 5, "p2": 5},
        last_prefill="p2",
    )
    assert names(choice) == ("p2", "d2")


def test_new_sessions_go_to_the_least_loaded() -> None:
    fleet = [worker("p1", P), worker("p2", P), worker("d1", D), worker("d2", D)]
    assert names(place(fleet, on={"p1": 1, "d1": 2})) == ("p2", "d2")


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        ([worker("b", B)], ("", "b")),
        ([worker("b1", B), worker("b2", B)], ("", "b1")),
        ([worker("d", D)], ("", "d")),
        ([worker("p", P)], ("", "p")),
        ([worker("p", P), worker("b", B)], ("p", "b")),
        ([worker("d", D), worker("b", B)], ("", "b")),
    ],
)
def test_small_clusters(fleet: list[Worker], expected: tuple[str, str]) -> None:
    assert names(place(fleet)) == expected


@pytest.mark.parametrize(
    ("fleet", "excluded", "why"),
    [
        ([worker("d", D, WorkerState.LOST), worker("d2", D)], (), "WORKER_LOST"),
        ([worker("d", D, WorkerState.DRAINING), worker("d2", D)], (), "DRAINING"),
        ([worker("d", D), worker("d2", D)], ("d",), "WORKER_EXCLUDED"),
        ([worker("d", D, incarnation=2)], (), "WORKER_LOST"),
        ([worker("d2", D)], (), "WORKER_LOST"),
    ],
)
def test_why_a_replica_cannot_be_used(
    fleet: list[Worker], excluded: tuple[str, ...], why: str
) -> None:
    choice = place([*fleet, worker("p", P)], replicas=(replica("d", 9),), excluded=excluded)
    plan = Planner().plan(choice, ReturnPolicy.AUTO, 0)
    assert (plan.return_mode, plan.reason) == (ReturnMode.NONE, why)


def test_nobody_left() -> None:
    with pytest.raises(NoWorkerError):
        place([worker("d", D, WorkerState.LOST)])
    with pytest.raises(NoWorkerError):
        place([worker("d", D)], excluded=("d",))


CHOICE = Choice(worker("d", D), worker("p", P), replica("d", 2), "")


@pytest.mark.parametrize("rate", [0, 1_000, 2_000])
def test_64_tokens_are_returned_to_a_slow_engine(rate: int) -> None:
    """The smallest return that an agent takes, on a CPU engine with shared memory."""
    planner = Planner()
    if rate:
        planner.rates.observe_prefill("p", rate, 1_000 * MS)
        planner.rates.observe_transfer("d", "p", 500_000_000, 1_000 * MS)
    plan = planner.plan(CHOICE, ReturnPolicy.AUTO, 0)
    assert (plan.return_mode, plan.reason) == (ReturnMode.LAZY, "CHEAPER_TO_MOVE")
    assert plan.reusable_tokens == 64


def test_a_fast_engine_on_a_slow_link_computes() -> None:
    planner = Planner()
    planner.rates.observe_prefill("p", 50_000, 1_000 * MS)
    planner.rates.observe_transfer("d", "p", 10_000_000, 1_000 * MS)
    plan = planner.plan(CHOICE, ReturnPolicy.AUTO, 0)
    assert (plan.return_mode, plan.reason) == (ReturnMode.NONE, "CHEAPER_TO_RECOMPUTE")
    assert plan.predicted_recompute_ns < plan.predicted_transfer_ns
    always = planner.plan(CHOICE, ReturnPolicy.ALWAYS, 0)
    assert (always.return_mode, always.reason) == (ReturnMode.LAZY, "POLICY_ALWAYS")


def test_policies() -> None:
    never = Planner().plan(CHOICE, ReturnPolicy.NEVER, 0)
    assert (never.return_mode, never.reason) == (ReturnMode.NONE, "POLICY_NEVER")
    alone = Choice(worker("b", B), None, replica("b", 2), "")
    direct = Planner().plan(alone, ReturnPolicy.NEVER, 0)
    assert (direct.return_mode, direct.reason) == (ReturnMode.DIRECT, "SAME_WORKER")


def test_a_short_prompt_returns_no_more_than_itself() -> None:
    long = Choice(worker("d", D), worker("p", P), replica("d", 100), "")
    plan = Planner().plan(long, ReturnPolicy.AUTO, 40)
    assert plan.reason == "CHEAPER_TO_RECOMPUTE"


def test_small_samples_do_not_make_a_link_look_slow() -> None:
    planner = Planner()
    planner.rates.observe_transfer("d", "p", 1_500_000, 21 * MS)  # mostly NIXL's wire-up
    assert planner.rates.link_rate("d", "p") == 0
    planner.rates.observe_transfer("d", "p", 20_000_000, 10 * MS)
    assert planner.rates.link_rate("d", "p") == pytest.approx(2e9)
    planner.rates.observe_transfer("d", "p", 1_500_000, 21 * MS)
    assert planner.rates.link_rate("d", "p") == pytest.approx(2e9)


def test_a_rate_follows_a_change() -> None:
    rate = Rate(enough=1)
    for _ in range(3):
        rate.observe(100, 1_000 * MS)
    for _ in range(20):
        rate.observe(500, 1_000 * MS)
    assert rate.value == pytest.approx(500, rel=0.01)
    rate.observe(0, 5)
    rate.observe(5, 0)
    assert rate.value == pytest.approx(500, rel=0.01)
