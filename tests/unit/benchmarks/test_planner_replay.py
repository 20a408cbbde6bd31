"""The offline comparison of placements."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.planner.__main__ import figures
from benchmarks.planner.replay import (
    NS,
    Hardware,
    Request,
    Run,
    greedy,
    load,
    planned,
    replay,
    sticky,
    timetable,
)

HARDWARE = Hardware(2, 2, 1_000.0, 100_000, 1e9, spread=0.0)


def turns(*sizes: tuple[float, int, int, int]) -> list[Request]:
    return [Request(int(t * NS), int(t * NS), p, s, o) for t, p, s, o in sizes]


def test_a_trace_is_read_as_it_is_described(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"id": "a", "turns": [[0.0, 100, 0, 5, 1.5]]}) + "\n")
    assert load(path, 9, 0) == [[Request(0, int(1.5 * NS), 100, 0, 5)]]


def test_a_lone_session_waits_for_computing_and_moving_only() -> None:
    session = turns((0, 1_000, 0, 64), (100, 2_064, 1_000, 64))
    events = [(0, 0, 0), (100 * NS, 0, 1)]
    run, bound = replay([session], events, HARDWARE, sticky, seed=0)
    # 1 s to compute, 100 MB at 1 GB/s, 10 ms overhead; then 1,064 new tokens, as many moved.
    assert run.ttft_ms == pytest.approx([1_000 + 100 + 10, 1_064 + 106.4 + 10], rel=1e-6)
    assert bound.ttft_ms[1] == pytest.approx(1_064)
    assert all(b <= t for b, t in zip(bound.ttft_ms, run.ttft_ms, strict=True))


def crowd() -> tuple[list[list[Request]], list[tuple[int, int, int]]]:
    sessions = [
        turns(*((t * 4.0, 1_000 + 600 * t, 576 * t, 30) for t in range(12))) for _ in range(16)
    ]
    return sessions, timetable(sessions, HARDWARE, 0.9, 3)


def test_no_placement_beats_the_bound_and_the_planner_beats_staying() -> None:
    sessions, events = crowd()
    mean = {}
    for name, policy in (("sticky", sticky), ("planner", planned), ("greedy", greedy)):
        run, bound = replay(sessions, events, HARDWARE, policy, seed=1, direct_tokens=0)
        mean[name] = figures([run])["mean_ms"]
        assert mean[name] >= figures([bound])["mean_ms"]
        assert len(run.ttft_ms) == len(events)
    assert mean["planner"] < mean["sticky"]


def test_a_seed_says_the_same_again() -> None:
    sessions, events = crowd()

    def once() -> Run:
        return replay(sessions, events, HARDWARE, planned, seed=1)[0]

    assert once() == once()
