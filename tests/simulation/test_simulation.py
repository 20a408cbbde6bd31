"""The simulation, in processes of its own: it replaces clocks and loggers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def simulate(
    *options: str, module: str = "tests.simulation", hash_seed: str = "random"
) -> tuple[str, dict[str, Any]]:
    """Its output and the JSON line at the end; fails with the output if a check fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_some_schedules_violate_nothing() -> None:
    _, result = simulate("--schedules", "300", "--jobs", "1")
    assert result["schedules"] == 300
    assert result["reads"] > 300
    # Loads whose last block is not full.
    assert result["partial_loads"] > 30
    assert result["of_other_sessions"] > 5
    # Of engines that schedule ahead: blocks that come back when a step is over.
    assert result["deferred_frees"] > 300


@pytest.mark.parametrize("seed", [7, 8])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, _ = simulate("--seed", str(seed), "--trace", hash_seed="1")
    second, _ = simulate("--seed", str(seed), "--trace", hash_seed="2")
    assert "trace hash" in first
    assert first == second


EXHAUSTIVE = "tests.simulation.exhaustive"


@pytest.mark.parametrize(
    ("world", "steps", "depth"),
    [("turn", 2_000, 4), ("eager", 2_000, 3), ("push", 600, 2), ("overlap", 600, 2)],
)
def test_the_first_orders_of_events_around_one_lease_violate_nothing(
    world: str, steps: int, depth: int
) -> None:
    _, result = simulate("--steps", str(steps), "--world", world, module=EXHAUSTIVE)
    assert result["steps"] >= steps
    assert result["depth"] >= depth


@pytest.mark.simulation
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    ("world", "states", "faults"),
    [
        *[(world, 5_000, faults) for world in ("turn", "eager") for faults in ("1", "2")],
        *[("push", 3_000, faults) for faults in ("1", "2")],
        ("overlap", 3_000, "1"),
    ],
)
def test_every_order_of_events_around_one_lease_violates_nothing(
    world: str, states: int, faults: str
) -> None:
    # Half of what `make sim-exhaustive` does.
    steps = ("--steps", "13000") if world in ("turn", "eager") else ()
    _, result = simulate("--faults", faults, "--world", world, *steps, module=EXHAUSTIVE)
    assert result["complete"] or result["states"] > states


@pytest.mark.simulation
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("of_decode", ["stall d", "pause d", "hold d^"])
def test_whatever_follows_an_offer_that_is_on_its_way_violates_nothing(of_decode: str) -> None:
    after = f"hold d> | request | {of_decode}"
    _, result = simulate("--faults", "2", "--world", "push", "--after", after, module=EXHAUSTIVE)
    assert result["complete"]
    assert result["states"] > 500


@pytest.mark.simulation
@pytest.mark.timeout(3_600)
def test_ten_thousand_schedules_violate_nothing_and_cover_everything() -> None:
    _, result = simulate("--schedules", "10000")
    assert result["schedules"] == 10_000
    assert result["uncovered"] == 0
