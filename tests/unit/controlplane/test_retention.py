"""What the retention policy promises, whatever the gaps are."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshuttle.controlplane.model import gaps
from kvshuttle.controlplane.model.gaps import AGE_EDGES, NO_GAPS, Absence, Population, noted
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.retention import Candidate, Outlook, hold_ns, surplus
from kvshuttle.controlplane.model.terms import SessionValue

LIMITS = Limits()
GAP_NS = st.integers(min_value=0, max_value=2 * 86_400 * SECOND)
ABSENCES = st.builds(
    Absence,
    since_ns=st.just(0),
    busy_ns=st.integers(0, 100 * SECOND),
    sketch=st.lists(GAP_NS, max_size=40).map(lambda found: functools.reduce(noted, found, NO_GAPS)),
    hinted=st.booleans(),
    expected_ns=st.none() | GAP_NS,
)


def learned(lengths: list[int], limits: Limits = LIMITS, busy_ns: int = SECOND) -> Population:
    """A population in which gaps of these lengths were seen, one after the other."""
    population = Population(limits)
    now = 0
    for number, length in enumerate(lengths):
        population.away(number, Absence(now, busy_ns))
        now += length
        population.back(number, now)
    population.look(now + limits.gaps_look_ns)
    return population


@settings(deadline=None)
@given(st.lists(GAP_NS, max_size=300))
def test_a_sketch_stays_small(lengths: list[int]) -> None:
    sketch = NO_GAPS
    for length in lengths:
        sketch = noted(sketch, length)
    assert len(sketch) == (len(AGE_EDGES) if lengths else 0)
    assert all(count < 64 for count in sketch)


def test_a_sketch_follows_a_session_that_changes() -> None:
    sketch = NO_GAPS
    for _ in range(1_000):
        sketch = noted(sketch, 3 * SECOND)
    for _ in range(100):
        sketch = noted(sketch, 3_000 * SECOND)
    assert sketch[gaps._bin(AGE_EDGES, 3_000)] > sketch[gaps._bin(AGE_EDGES, 3)]


@settings(deadline=None)
@given(ABSENCES, st.lists(GAP_NS, max_size=50), st.lists(GAP_NS, min_size=1, max_size=6))
def test_worth_is_a_rate(absence: Absence, seen: list[int], ages: list[int]) -> None:
    outlook = Outlook.of(absence, learned(seen))
    for age in ages:
        assert 0 < outlook.worth(age) < 1e3
        assert all(0 <= hazard <= 1 for hazard in outlook.hazards)


@settings(deadline=None)
@given(ABSENCES, st.lists(GAP_NS, max_size=50), st.none() | st.sampled_from(SessionValue))
def test_holds_are_bounded(absence: Absence, seen: list[int], value: SessionValue | None) -> None:
    held = hold_ns(absence, Outlook.of(absence, learned(seen)), value, LIMITS)
    assert LIMITS.retention_ns / 2 <= held <= LIMITS.retention_max_ns


@pytest.mark.parametrize(
    ("expected", "value", "seconds"),
    [
        (None, None, 1_800),
        (60, None, 1_800),
        (600, None, 2_400),
        (0, None, 1_800),
        (10**6, None, 3_600),
        (None, SessionValue.LOW, 900),
        (None, SessionValue.HIGH, 3_600),
        (600, SessionValue.LOW, 1_200),
    ],
)
def test_the_hold_of_a_session_without_a_past(
    expected: int | None, value: SessionValue | None, seconds: int
) -> None:
    expected_ns = None if expected is None else expected * SECOND
    absence = Absence(0, expected_ns=expected_ns)
    outlook = Outlook.of(absence, Population(LIMITS))
    assert hold_ns(absence, outlook, value, LIMITS) == seconds * SECOND


def test_a_hold_follows_the_sessions_own_gaps() -> None:
    def held(gap_s: int) -> int:
        sketch = NO_GAPS
        for _ in range(60):
            sketch = noted(sketch, gap_s * SECOND)
        limits = dataclasses.replace(LIMITS, retention_max_ns=86_400 * SECOND)
        absence = Absence(0, sketch=sketch)
        return hold_ns(absence, Outlook.of(absence, Population(limits)), None, limits)

    assert LIMITS.retention_ns == held(3) < held(2_000) < held(3_000)
    assert held(2_000) >= 2_000 * SECOND


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 86_400), min_size=2, max_size=20, unique=True),
    st.integers(0, 86_400),
)
def test_without_anything_known_the_order_is_lru(since_s: list[int], later_s: int) -> None:
    now = (max(since_s) + later_s) * SECOND
    population = Population(LIMITS)
    held = [Candidate(s, 10, Outlook.of(Absence(s * SECOND), population)) for s in since_s]
    going = surplus(held, 10 * len(held), now)
    assert [candidate.name for candidate, _ in going] == sorted(since_s)


@settings(deadline=None)
@given(
    st.lists(st.tuples(ABSENCES, st.integers(1, 5_000)), max_size=12),
    st.integers(-5, 30_000),
    GAP_NS,
)
def test_as_many_blocks_go_as_are_asked_for(
    held: list[tuple[Absence, int]], wanted: int, now: int
) -> None:
    population = Population(LIMITS)
    candidates = [
        Candidate(number, blocks, Outlook.of(absence, population))
        for number, (absence, blocks) in enumerate(held)
    ]
    going = surplus(candidates, wanted, now)
    total = sum(blocks for _, blocks in held)
    assert sum(blocks for _, blocks in going) == max(0, min(wanted, total))
    names = [candidate.name for candidate, _ in going]
    assert len(set(names)) == len(names)
    # Only the last is cut.
    assert all(blocks == candidate.blocks for candidate, blocks in going[:-1])
    ranks = [candidate.rank(now) for candidate, _ in going]
    assert ranks == sorted(ranks)
    stay = [c.rank(now) for c in candidates if c.name not in names]
    assert not ranks or all(rank >= ranks[-1] for rank in stay)


def test_who_has_overstayed_its_own_gaps_goes_before_who_is_older_and_slower() -> None:
    quick = slow = NO_GAPS
    for _ in range(40):
        quick, slow = noted(quick, 3 * SECOND), noted(slow, 900 * SECOND)
    population = Population(LIMITS)
    held = [
        Candidate("quick", 1, Outlook.of(Absence(300 * SECOND, sketch=quick), population)),
        Candidate("slow", 1, Outlook.of(Absence(0, sketch=slow), population)),
    ]
    ((going, _),) = surplus(held, 1, 600 * SECOND)
    assert going.name == "quick"


def test_value_breaks_what_is_otherwise_equal() -> None:
    population = Population(LIMITS)
    held = [
        Candidate(value, 1, Outlook.of(Absence(0), population), value)
        for value in (SessionValue.HIGH, SessionValue.LOW, SessionValue.NORMAL)
    ]
    going = [candidate.name for candidate, _ in surplus(held, 3, 60 * SECOND)]
    assert going == [SessionValue.LOW, SessionValue.NORMAL, SessionValue.HIGH]


def test_a_hint_is_believed_as_far_as_hints_came_true() -> None:
    """A client that says five seconds and comes back after an hour teaches what that means."""
    population = Population(LIMITS)
    now = 0
    fresh = Outlook.of(Absence(0, expected_ns=5 * SECOND), population).worth(5 * SECOND)
    for number in range(200):
        population.away(number, Absence(now, expected_ns=5 * SECOND))
        now += 300 * SECOND
        population.back(number, now)
    population.look(now)
    absence = Absence(now, expected_ns=5 * SECOND)
    outlook = Outlook.of(absence, population)
    assert outlook.worth(now + 5 * SECOND) < fresh / 10
    # It is due in a minute now: worth more than after the five seconds that it had announced.
    assert outlook.worth(now + 240 * SECOND) > outlook.worth(now + 5 * SECOND)


def test_those_who_never_come_back_are_counted() -> None:
    """Of all gaps half end after a second, half never: after a minute nobody comes any more."""
    population = Population(LIMITS)
    now = 0
    for number in range(400):
        population.away(number, Absence(now))
        if number % 2:
            population.back(number, now + SECOND)
        now += SECOND
    population.look(now + 4_000 * SECOND)
    hazards = population.hazards(Absence(0).kind)
    assert hazards[gaps._bin(AGE_EDGES, 1)] == pytest.approx(0.5, abs=0.05)
    assert hazards[gaps._bin(AGE_EDGES, 60)] < 0.1


def test_what_is_watched_is_bounded_and_old_counts_fade() -> None:
    limits = dataclasses.replace(LIMITS, gaps_watched=10, gaps_remembered=100.0)
    population = Population(limits)
    for number in range(1_000):
        population.away(number, Absence(0))
    assert len(population._watched) == 10
    for number in range(1_000):
        population.over(number, SECOND)
    assert not population._watched
    population = learned([SECOND] * 500 + [1_000 * SECOND] * 200, limits)
    assert population._all.reached[0] <= 101
    assert population.hazards(0)[gaps._bin(AGE_EDGES, 1_000)] > 0.5


EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4_000 * SECOND), st.none() | st.just(9 * SECOND)),
    min_size=2,
    max_size=40,
)


@settings(deadline=None)
@given(EVENTS, EVENTS, EVENTS)
def test_decisions_depend_on_the_past_only(
    past: list[tuple[int, int, int | None]],
    future: list[tuple[int, int, int | None]],
    other_future: list[tuple[int, int, int | None]],
) -> None:
    """Whatever comes later, what was decided before it is the same."""

    def decisions(events: list[tuple[int, int, int | None]]) -> list[list[tuple[int, int]]]:
        population = Population(LIMITS)
        sketches: dict[int, bytes] = {}
        away: dict[int, Absence] = {}
        decided = []
        now = 0
        for session, step, hint in events:
            now += step
            population.look(now)
            if session in away:
                absence = away.pop(session)
                sketches[session] = noted(sketches.get(session, NO_GAPS), now - absence.since_ns)
                population.back(session, now)
            else:
                away[session] = absence = Absence(
                    now, SECOND, sketches.get(session, NO_GAPS), False, hint
                )
                population.away(session, absence)
            held = [Candidate(s, 7, Outlook.of(a, population)) for s, a in away.items()]
            decided.append([(c.name, blocks) for c, blocks in surplus(held, 10, now)])
        return decided

    first, second = decisions(past + future), decisions(past + other_future)
    assert list(itertools.islice(first, len(past))) == second[: len(past)]
