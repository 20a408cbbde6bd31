"""What counts, ratios, groups of arms, and the last line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ttft import plots
from benchmarks.ttft.arms import ARMS
from benchmarks.ttft.counters import Legs
from benchmarks.ttft.groups import plan_groups
from benchmarks.ttft.oracles import failures
from benchmarks.ttft.report import gbps, last_line, summary
from benchmarks.ttft.session import QuietReturn, Results
from benchmarks.ttft.stats import counted, median_or_none, prefill_throughput, ratio
from benchmarks.ttft.turns import Moved, Sample

LEGS = Legs(
    prefill_queue_ms=20.0,
    prefill_compute_ms=600.0,
    decode_queue_ms=30.0,
    decode_first_step_ms=50.0,
    begin_turn_ms=2.0,
    prefill_leg_ms=640.0,
    local_tokens=0,
    returned_tokens=1_500,
    computed_tokens=500,
    return_ms=None,
    return_bytes=None,
    return_descriptors=None,
    forward_ms=None,
    forward_bytes=None,
)


def sample(arm: str, turn: int, ttft: float, conversation: str = "fixed-0") -> Sample:
    """One turn of 1,500, 2,000, … tokens."""
    return Sample(
        arm=arm,
        scenario="lost",
        group=1,
        conversation=conversation,
        turn=turn,
        wanted_tokens=1_000 + 500 * turn,
        prompt_tokens=1_000 + 500 * turn,
        output_tokens=64,
        cached_tokens=0,
        ttft_ms=ttft,
        total_ms=ttft + 1_000,
        legs=LEGS,
        prefill_leg_ms=640.0,
        plan_reason=None,
        moved=[],
        cache_dropped=None,
    )


RUN = [
    *(sample("a", turn, 500.0 + turn) for turn in (1, 2, 3)),
    *(sample("b", turn, 2_000.0 + turn) for turn in (1, 2, 3)),
    *(sample("c", turn, 1_000.0 + turn) for turn in (1, 2, 3)),
    *(sample("f", turn, 600.0 + turn) for turn in (1, 2, 3)),
]


def test_the_first_turn_and_one_whose_cache_was_not_dropped_do_not_count() -> None:
    late = replace(sample("f", 4, 1.0), cache_dropped=False)
    assert [s.turn for s in counted([*RUN, late]) if s.arm == "f"] == [2, 3]


def test_a_ratio_is_over_the_turns_that_both_have() -> None:
    found = ratio([*RUN, sample("f", 4, 9_999.0)], "f", "c")
    assert found.value == pytest.approx(602.5 / 1_002.5)
    assert found.record()["turns"] == 2
    assert found.interval is not None
    assert found.value is not None
    assert found.interval[0] <= found.value <= found.interval[1]


def test_the_plain_engine_counts_beside_whom_it_is_compared_with() -> None:
    """It is in every group, and the machine is another one in each."""
    later = [replace(sample("a", turn, 5_000.0), group=2) for turn in (1, 2, 3)]
    other = [replace(sample("d", turn, 5_000.0), group=2) for turn in (1, 2, 3)]
    found = [*RUN, *later, *other]
    assert ratio(found, "f", "a").value == pytest.approx(602.5 / 502.5)
    assert ratio(found, "d", "a").value == pytest.approx(1.0)
    # Those that were never side by side are compared all the same.
    assert ratio(found, "f", "d").value == pytest.approx(602.5 / 5_000.0)


def test_nothing_in_common_is_no_ratio() -> None:
    assert ratio(RUN, "f", "d").record() == {"value": None, "interval_95": None, "turns": 0}
    assert median_or_none([None, None]) is None


def test_held_blocks_are_summed_over_the_gap() -> None:
    one = replace(RUN[0], held=[(0.0, 100.0), (2.0, 50.0), (4.0, 50.0)])
    assert one.held_block_seconds == 150.0 + 100.0


def test_arms_share_a_group_while_memory_allows() -> None:
    kinds = [kind for kind in ARMS if kind.key != "a"]
    keys = [[k.key for k in group] for group in plan_groups(kinds, 3, available=14, reserve=1)]
    assert keys == [["g", "f"], ["c", "b"], ["e", "d"]]
    assert len(plan_groups(kinds, 3, available=100, reserve=1)) == 1
    alone = plan_groups(kinds, 3, available=2, reserve=1)
    assert [len(group) for group in alone] == [1] * 6


def test_what_push_costs_prefill_is_a_lower_bound_over_pairs() -> None:
    def timed(arm: str, turn: int, ms: float) -> Sample:
        return replace(sample(arm, turn, 600.0), legs=replace(LEGS, prefill_compute_ms=ms))

    samples = [timed("f", turn, 100.0 * turn) for turn in range(1, 21)]
    samples += [timed("g", turn, 100.0 * turn / (0.9 + 0.01 * turn)) for turn in range(1, 21)]
    found = prefill_throughput(samples, "g", "f").record()
    assert found["turns"] == 20
    assert found["value"] == pytest.approx(1.005, abs=1e-3)
    line, _ = last_line(summary(Results(samples=samples), {}, {}))
    assert line["prefill_throughput_ratio"] == found["interval_95"][0]  # type: ignore[index]
    assert 0.9 < found["interval_95"][0] < 1.005  # type: ignore[index]
    # Another group's turn is no pair.
    apart = [replace(s, group=2) if s.arm == "g" else s for s in samples]
    assert prefill_throughput(apart, "g", "f").record()["turns"] == 0


def test_push_and_eager_is_ours_where_it_was_run() -> None:
    assert summary(Results(samples=list(RUN)), {}, {})["arm_of_ours"] == "f"
    with_push = [*RUN, *(sample("g", turn, 550.0 + turn) for turn in (1, 2, 3))]
    found = summary(Results(samples=with_push), {}, {})
    assert found["arm_of_ours"] == "g"
    assert found["scenarios"]["lost"]["fixed"]["ratios"]["c"]["value"] == pytest.approx(
        552.5 / 1_002.5, abs=1e-4
    )


def moved(direction: str, *, state: str = "COMPLETED", ms: float = 20.0) -> Moved:
    """A transfer of 50 MB."""
    return Moved(direction, True, 70, 50_000_000, 30, ms, 1.0, state)


def test_gb_per_s_is_of_completed_returns_only() -> None:
    one = replace(
        RUN[-1], moved=[moved("RETURN"), moved("FORWARD", ms=1.0), moved("RETURN", state="FAILED")]
    )
    assert gbps([one], "f") == [pytest.approx(2.5)]
    upstream = replace(RUN[-4], legs=replace(LEGS, return_ms=50.0, return_bytes=50_000_000))
    assert gbps([upstream], "c") == [pytest.approx(1.0)]


def test_the_last_line_has_every_key_and_says_why_one_is_null() -> None:
    results = Results(samples=list(RUN), left_out={"lost": {"d": "no time"}})
    line, reasons = last_line(summary(results, {}, {"model": "m", "dtype": "float32"}))
    assert list(line) == [
        "ttft_ratio_to_upstream_bidirectional",
        "ttft_ratio_to_upstream_one_way",
        "ttft_ratio_to_ideal",
        "gbps_ratio_to_upstream",
        "gbps_ratio_to_raw",
        "idle_cpu_percent",
        "prefill_throughput_ratio",
    ]
    assert line["ttft_ratio_to_upstream_one_way"] == pytest.approx(602.5 / 2_002.5, abs=1e-4)
    assert set(reasons) == {key for key, value in line.items() if value is None}
    assert "side by side" in reasons["prefill_throughput_ratio"]


def test_an_arm_that_was_left_out_gives_its_reason() -> None:
    results = Results(
        samples=[s for s in RUN if s.arm != "b"], left_out={"lost": {"b": "no time left"}}
    )
    _, reasons = last_line(summary(results, {}, {}))
    assert reasons["ttft_ratio_to_upstream_one_way"] == "no time left"


def test_a_wrong_answer_or_a_leak_of_ours_fails_the_run() -> None:
    off = [replace(sample(arm, 2, 1.0), differences=["tokens differ"]) for arm in ("b", "g")]
    assert failures(off, {}, exact=False) == []
    (wrong,) = failures(off, {"lost": {"g": None}}, exact=True)
    assert wrong == "lost, g, fixed-0 turn 2: tokens differ"
    (leak,) = failures(
        RUN, {"lost": {"g": None}, "kept": {"e": "e-decode has 3 holds"}}, exact=True
    )
    assert leak == "kept, e: e-decode has 3 holds"


def test_the_last_line_is_of_a_lost_cache_and_the_fixed_conversations() -> None:
    """The published case; recorded ones and a kept cache are in the tables."""
    ours = [sample("g", turn, 550.0) for turn in (1, 2, 3)]
    others = [
        replace(s, scenario=scenario, conversation=conversation, ttft_ms=s.ttft_ms * factor)
        for scenario, conversation, factor in (
            ("kept", "fixed-0", 3.0),
            ("lost", "trace-0", 5.0),
            ("kept", "trace-0", 7.0),
        )
        for s in ours
    ]
    ideal = [
        replace(s, arm="a", ttft_ms=500.0, scenario=x.scenario, conversation=x.conversation)
        for x in (*ours, *others)
        for s in (x,)
    ]
    line, _ = last_line(summary(Results(samples=[*ours, *others, *ideal]), {}, {}))
    assert line["ttft_ratio_to_ideal"] == pytest.approx(1.1)


def test_twice_as_long_as_raw_is_half_its_speed() -> None:
    found = [QuietReturn(moved("RETURN", ms=ms), 10.0) for ms in (20.0, 20.0, 40.0)]
    results = Results(samples=[sample("g", 2, 1.0)], quiet={"g": found})
    assert found[0].ratio_to_raw == 0.5
    line, _ = last_line(summary(results, {}, {}))
    assert line["gbps_ratio_to_raw"] == 0.5


def test_every_scenario_is_drawn_and_a_transfer_on_the_turns_way_apart(tmp_path: Path) -> None:
    arms = {
        "a": LEGS,
        "c": replace(LEGS, prefill_queue_ms=90.0, return_ms=70.0),
        "g": replace(LEGS, prefill_queue_ms=5.0),
    }
    samples = [
        replace(sample(arm, turn, 700.0), legs=legs, scenario=scenario, conversation=conversation)
        for arm, legs in arms.items()
        for turn in (1, 2, 3)
        for scenario in ("lost", "kept")
        for conversation in ("fixed-0", "trace-0")
    ]
    idle = {"g": {"percent": 1.0, "sessions": 100}}
    settings = {"model": "m", "dtype": "float32"}
    found = summary(Results(samples=samples, idle=idle), {}, settings)
    paths = plots.plot(found, tmp_path)
    assert {x.name for x in paths} == {
        *(f"ttft-{s}-{k}.png" for s in ("lost", "kept") for k in ("fixed", "trace")),
        "ttft-idle.png",
    }
    assert all(x.read_bytes().startswith(b"\x89PNG") for x in paths)
    split = {
        arm: plots._split(row) for arm, row in found["scenarios"]["lost"]["fixed"]["arms"].items()
    }
    assert (split["c"]["prefill_queue_rest_ms"], split["c"]["return_in_queue_ms"]) == (20.0, 70.0)
    assert (split["g"]["prefill_queue_rest_ms"], split["g"]["return_in_queue_ms"]) == (5.0, 0.0)
