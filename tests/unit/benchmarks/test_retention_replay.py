"""The replay counts what it says, and no policy sees what is still to come."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.retention.__main__ import DEFAULT_TRACES
from benchmarks.retention.client import Client
from benchmarks.retention.policies import Clairvoyant, FixedHold, Lru, Ours, Policy
from benchmarks.retention.replay import replay
from benchmarks.retention.report import Row, draw, summary, table
from benchmarks.retention.trace import NS, Event, Session, Turn, load, timetable
from kvshuttle.controlplane.model.limits import Limits


def turn(begin_s: float, reusable: int, left: int, busy_s: float = 1) -> Turn:
    return Turn(int(begin_s * NS), int((begin_s + busy_s) * NS), reusable, left)


def events_of(sessions: list[Session]) -> list[Event]:
    """All start at zero."""
    found = []
    for number, session in enumerate(sessions):
        for at, one in enumerate(session.turns):
            found.append(Event(one.begin_ns, True, number, at))
            found.append(Event(one.end_ns, False, number, at))
    return sorted(found)


A = Session("a", (turn(0, 0, 10), turn(100, 10, 12)))
B = Session("b", (turn(10, 0, 10), turn(50, 10, 12)))
C = Session("c", (turn(20, 0, 10),))


def test_ample_memory_loses_nothing() -> None:
    events = events_of([A, B, C])
    for policy in (Lru(), FixedHold(), Ours(Limits()), Clairvoyant(events)):
        outcome = replay([A, B, C], events, policy, 1_000)
        assert (outcome.reusable, outcome.recomputed, outcome.refused) == (20, 0, 0)


def test_lru_takes_the_tail_of_whoever_is_away_for_longest() -> None:
    sessions = [A, B, C]
    events = events_of(sessions)
    # C's ten do not fit beside A's and B's: A loses its last five, and two more when B grows.
    assert replay(sessions, events, Lru(), 25).recomputed == 7
    # It knows that C never comes back.
    assert replay(sessions, events, Clairvoyant(events), 25).recomputed == 0


def test_a_fixed_hold_leaves_no_room_for_who_comes_later() -> None:
    late = Session("late", (turn(30, 0, 10), turn(60, 10, 12)))
    sessions = [A, B, late]
    outcome = replay(sessions, events_of(sessions), FixedHold(), 20)
    assert outcome.recomputed == 10
    assert outcome.refused >= 10
    # After the hold it is readable until its blocks are wanted.
    slow = Session("slow", (turn(0, 0, 10), turn(1_000, 10, 12)))
    assert replay([slow], events_of([slow]), FixedHold(), 20).recomputed == 0


def test_held_and_kept_are_blocks_times_seconds() -> None:
    slow = Session("slow", (turn(0, 0, 10), turn(1_001, 10, 12)))
    events = events_of([slow])[:3]
    outcome = replay([slow], events, FixedHold(480), 20)
    assert (outcome.held, outcome.kept) == (4_800, 10_000)
    outcome = replay([slow], events, Lru(), 20)
    assert (outcome.held, outcome.kept) == (0, 10_000)


def test_turns_that_run_can_take_room() -> None:
    busy = Session("busy", (turn(20, 0, 15, busy_s=5),))
    sessions = [B, busy]
    events = events_of(sessions)
    assert replay(sessions, events, Lru(), 20).recomputed == 5
    short = Session("short", (turn(20, 0, 5, busy_s=5),))
    sessions = [B, short]
    assert replay(sessions, events_of(sessions), Lru(), 12).recomputed == 3
    # Six blocks: while the other turn runs B has one left, at its end as well.
    assert replay(sessions, events_of(sessions), Lru(), 6).recomputed == 9
    long = Session("long", (turn(20, 0, 5, busy_s=500),))
    sessions = [B, long]
    assert replay(sessions, events_of(sessions), Lru(), 12).recomputed == 0
    running = replay(sessions, events_of(sessions), Lru(), 12, running_counts=True)
    assert running.recomputed == 3


@pytest.mark.parametrize("running_counts", [False, True])
def test_a_pool_smaller_than_its_turns_is_no_error(running_counts: bool) -> None:
    sessions = load(DEFAULT_TRACES)[:10]
    events = events_of(sessions)
    for policy in (Lru(), FixedHold(), Ours(Limits()), Clairvoyant(events)):
        outcome = replay(sessions, events, policy, 700, running_counts=running_counts)
        assert 0.5 < outcome.share <= 1


class Recorded:
    """A policy that notes every decision with its time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.decided: list[tuple[int, object]] = []

    def begins(self, session: int, now_ns: int) -> None:
        self._policy.begins(session, now_ns)

    def ends(self, session: int, now_ns: int) -> int:
        until_ns = self._policy.ends(session, now_ns)
        self.decided.append((now_ns, until_ns))
        return until_ns

    def surplus(self, held: Mapping[int, int], blocks: int, now_ns: int) -> list[tuple[int, int]]:
        going = self._policy.surplus(held, blocks, now_ns)
        self.decided.append((now_ns, going))
        return going


def changed_after(sessions: list[Session], cut_ns: int, seed: int) -> list[Session]:
    """The same until `cut_ns` (all start at zero), and something else after it."""
    dice = random.Random(seed)
    changed = []
    for session in sessions:
        past = [one for one in session.turns if one.begin_ns <= cut_ns]
        begin_ns = max([cut_ns, *(one.end_ns for one in past)])
        for one in session.turns[len(past) :]:
            begin_ns += dice.randrange(1, 5_000 * NS)
            past.append(Turn(begin_ns, begin_ns + NS, one.reusable, one.left))
            begin_ns += NS
        if dice.random() < 0.3:
            past = past[: max(1, sum(one.begin_ns <= cut_ns for one in past))]
        changed.append(Session(session.name, tuple(past)))
    return changed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("make", "blind"),
    [
        (lambda _: Lru(), True),
        (lambda _: FixedHold(), True),
        (lambda _: Ours(Limits()), True),
        (Clairvoyant, False),
    ],
    ids=["lru", "fixed", "ours", "clairvoyant"],
)
def test_what_is_to_come_changes_no_decision(
    make: Callable[[list[Event]], Policy], blind: bool, seed: int
) -> None:
    """But the clairvoyant's, which shows that the test can tell."""
    sessions = load(DEFAULT_TRACES)[:40]
    cut_ns = 1_800 * NS
    decided = []
    for future in (sessions, changed_after(sessions, cut_ns, seed)):
        events = events_of(future)
        policy = Recorded(make(events))
        replay(future, events, policy, 10_000)
        decided.append([entry for entry in policy.decided if entry[0] <= cut_ns])
    assert len(decided[0]) > 100
    assert (decided[0] == decided[1]) == blind


def test_hints_say_what_the_client_could_know() -> None:
    sessions = load(DEFAULT_TRACES)
    says = Client().says(sessions, 1)
    assert says == Client().says(sessions, 1)
    pairs = [
        (said, after.begin_ns - one.end_ns)
        for session, all_said in zip(sessions, says, strict=True)
        for said, one, after in zip(all_said, session.turns, session.turns[1:], strict=False)
    ]
    short = [said for said, gap_ns in pairs if gap_ns <= 600 * NS]
    long = [said for said, gap_ns in pairs if gap_ns > 600 * NS]
    told = sum(said.expected_ns is not None for said in short) / len(short)
    mistaken = sum(said.expected_ns is not None for said in long) / len(long)
    assert told == pytest.approx(0.8, abs=0.02)
    assert mistaken == pytest.approx(0.1, abs=0.04)
    assert not any(said.over for said, _ in pairs)
    over = sum(all_said[-1].over for all_said in says) / len(says)
    assert over == pytest.approx(0.7, abs=0.08)


def test_a_timetable_has_every_turn_once_and_in_order() -> None:
    sessions = load(DEFAULT_TRACES)
    assert (len(sessions), sum(len(s.turns) for s in sessions)) == (530, 36_348)
    events = timetable(sessions, 40, 0)
    assert events == timetable(sessions, 40, 0)
    assert events != timetable(sessions, 40, 1)
    assert len(events) == 2 * 36_348
    running: set[int] = set()
    for event in events:
        (running.add if event.begins else running.remove)(event.session)
    assert not running


@pytest.mark.parametrize("text", ["nonsense", '{"id": "a"}', '{"id": "a", "turns": [[1]]}', ""])
def test_a_file_that_is_not_a_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.jsonl"):
        load(path)


def test_figures_add_up_and_are_drawn(tmp_path: Path) -> None:
    sessions = load(DEFAULT_TRACES)[:25]
    path = tmp_path / "some.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"id": "a", "turns": [[0, 640, 0, 64, 1], [5, 704, 640, 64, 0]]}))
    assert load(path)[0].turns[1].reusable == 10
    events = timetable(sessions, 60, 0)
    rows = []
    for capacity in (2_000, 10_000, 1_000_000):
        policies: dict[str, Policy] = {
            "fixed": FixedHold(),
            "lru": Lru(),
            "ours": Ours(Limits()),
            "hints": Ours(Limits(), Client().says(sessions, 0)),
            "bound": Clairvoyant(events),
        }
        outcomes = {
            name: [replay(sessions, events, policy, capacity)] for name, policy in policies.items()
        }
        bound, lru = outcomes["bound"][0], outcomes["lru"][0]
        assert bound.recomputed <= lru.recomputed
        assert all(bound.recomputed <= found[0].recomputed for found in outcomes.values())
        rows.append(Row(60, capacity * 64, outcomes))
    pressed = [row for row in rows if row.pressed]
    assert pressed
    assert summary(rows)["pools_under_pressure"] == len(pressed)
    assert table(rows).count("\n") == 4
    draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
