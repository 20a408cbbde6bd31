"""What the planner learns from the events of turns."""

from __future__ import annotations

import pytest

from kvshuttle.controlplane.model.limits import MS, SECOND, Limits
from kvshuttle.controlplane.model.reports import LegReport
from kvshuttle.controlplane.model.session import Usage
from kvshuttle.controlplane.model.terms import Leg, ReturnMode, TurnOutcome
from tests.unit.controlplane.world import KEY, World


def test_a_prefill_worker_has_work_until_it_says_that_it_is_done() -> None:
    world = World()
    prefill, _ = world.pair()
    rates = world.registry.planner.rates
    first, second = world.begin(prompt_tokens=1_000), world.begin(prompt_tokens=500)
    assert rates.backlogs["p"].tokens == 1_500
    world.agent(
        prefill, "computed", LegReport(first.token, Leg.PREFILL, 1_000, 0, 0, 1_000, SECOND)
    )
    assert (rates.backlogs["p"].tokens, rates.prefill_rate("p")) == (500, 1_000)
    world.do(world.registry.end_turn(world.now, KEY, second.number, TurnOutcome.CANCELLED))
    assert (rates.backlogs["p"].tokens, rates.given) == (0, {})


def test_a_wait_for_a_grant_and_a_turns_length_are_learned() -> None:
    world = World(Limits(eager=False))
    _, decode, turn, order = world.returning()
    world.now += 110 * MS
    world.harden(order, decode)
    rates = world.registry.planner.rates
    assert rates.grants["d"].value == pytest.approx(35 * MS)
    world.now += 20 * SECOND
    world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.COMPLETED))
    assert rates.turns["d"].value == pytest.approx(5 * SECOND + 0.25 * 15.11 * SECOND)


def test_decode_learns_by_turns_that_it_ran_alone() -> None:
    world = World(Limits(eager=False))
    _, decode = world.pair()
    first = world.begin(prompt_tokens=640)
    world.offer(decode, 20, first)
    world.do(world.registry.end_turn(world.now, KEY, 1, TurnOutcome.COMPLETED, Usage(640)))
    second = world.begin(prompt_tokens=740)
    assert second.plan.return_mode is ReturnMode.DIRECT
    assert not world.registry.planner.rates.given.get(second.token)
    usage = Usage(740, 640, 8, 50 * MS)
    world.do(world.registry.end_turn(world.now, KEY, 2, TurnOutcome.COMPLETED, usage))
    assert world.registry.planner.rates.prefill_rate("d") == pytest.approx(2_000)
    world.offer(decode, 24, second)
    # What was not streamed has no first token: a whole answer's time is none.
    third = world.begin(prompt_tokens=880)
    assert third.plan.return_mode is ReturnMode.DIRECT
    usage = Usage(880, 740, 8, 0)
    world.do(world.registry.end_turn(world.now, KEY, 3, TurnOutcome.COMPLETED, usage))
    assert world.registry.planner.rates.prefill_rate("d") == pytest.approx(2_000)


def test_how_far_predictions_were_off_is_learned_from_what_was_returned() -> None:
    world = World(Limits(eager=False))
    prefill, decode = world.pair()
    first = world.begin(prompt_tokens=640)
    report = LegReport(first.token, Leg.PREFILL, 640, 0, 0, 640, SECOND)
    world.agent(prefill, "computed", report)
    rates = world.registry.planner.rates
    assert rates.missed == 0  # there was nothing to reuse
    world.offer(decode, 20, first)
    second = world.begin(prompt_tokens=1_200)
    assert second.plan.candidates[0].compute_tokens == 560
    report = LegReport(second.token, Leg.DECODE, 1_200, 0, 0, 0, 0)
    world.agent(decode, "computed", report)
    assert rates.missed == 0
    report = LegReport(second.token, Leg.PREFILL, 1_200, 0, 440, 760, SECOND)
    world.agent(prefill, "computed", report)
    assert rates.missed > 0


def test_a_prompt_of_any_length_can_be_planned_and_stored() -> None:
    world = World(Limits(eager=False))
    _, decode = world.pair()
    for asked in (2**64 - 1, 1, 2**64 - 1):
        turn = world.begin(prompt_tokens=asked)
        world.store.load()
        world.offer(decode, 20, turn)
        usage = Usage(2**64 - 1, 0, 0, 0)
        world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.COMPLETED, usage))
        assert turn.plan.predicted_ttft_us < 2**63
