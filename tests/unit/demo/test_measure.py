"""When the demo has failed, and what its last line says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from kvshuttle.demo import script
from kvshuttle.demo.display import TurnTable, verdict
from kvshuttle.demo.measure import TurnResult, problems, summary

FIRST = TurnResult(
    turn=1,
    question="?",
    text="!",
    prompt_tokens=400,
    returned_tokens=0,
    recomputed_tokens=400,
    returned_bytes=0,
    ttft_with_s=1.0,
    ttft_without_s=1.0,
    differences=(),
)
LATER = [
    replace(
        FIRST,
        turn=turn,
        prompt_tokens=400 * turn,
        returned_tokens=400 * (turn - 1),
        returned_bytes=1_000_000 * turn,
        ttft_with_s=1.0,
        ttft_without_s=float(turn),
    )
    for turn in (2, 3, 4)
]


def test_a_good_run_has_no_problem_and_its_medians_leave_out_the_first_turn() -> None:
    results = [FIRST, *LATER]
    assert problems(results, 4) == []
    assert summary(results) == {
        "turns": 4,
        "identical": True,
        "returned_tokens": 800,
        "recomputed_tokens": 400,
        "ttft_ms_with": 1000.0,
        "ttft_ms_without": 3000.0,
        "ttft_ratio": 0.333,
    }


def test_one_difference_is_a_failure() -> None:
    results = [FIRST, replace(LATER[0], differences=("with the return: off",))]
    assert problems(results, 2) == ["turn 2, with the return: off"]
    assert summary(results)["identical"] is False


def test_nothing_returned_is_a_failure_from_turn_two_on() -> None:
    for change in ({"returned_tokens": 0}, {"returned_bytes": 0}):
        found = problems([FIRST, replace(LATER[0], **change)], 2)  # type: ignore[arg-type]
        assert len(found) == 1
        assert found[0].startswith("turn 2:")


def test_a_run_that_broke_off_is_a_failure() -> None:
    assert problems([FIRST], 3) == ["only 1 of 3 turns were run"]
    assert summary([])["identical"] is False
    assert summary([])["ttft_ratio"] is None, "0 would be the best of all ratios"
    assert summary([FIRST])["returned_tokens"] is None


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_into_a_terminal(width: int) -> None:
    console = Console(width=width)
    big = replace(LATER[0], prompt_tokens=8_192, ttft_without_s=99.9, returned_bytes=999_900_000)
    with console.capture() as captured:
        console.print(TurnTable.table([FIRST, big]))
        verdict(console, summary([FIRST, big]), [])
    lines = captured.get().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert not any("…" in line for line in lines)


def test_every_turn_says_something_new() -> None:
    said = [script.message(turn) for turn in range(1, script.MAX_TURNS + 1)]
    assert len(set(said)) == len(said)
    assert all(script.question(turn) in said[turn - 1] for turn in range(1, len(said) + 1))
