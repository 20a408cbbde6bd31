"""Deadlines go on while a machine sleeps, and a clock that is set moves none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvshuttle.controlplane.clock import Timeline
from kvshuttle.dataplane.clock import boottime_ns
from tests.support.clocks import NS, MachineClocks


@pytest.fixture(params=["agent", "control plane"])
def machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[MachineClocks, Callable[[], int]]:
    clocks = MachineClocks()
    clocks.install(monkeypatch)
    return clocks, boottime_ns if request.param == "agent" else Timeline().now_ns


def test_a_suspended_machine_wakes_up_after_its_deadlines(
    machine: tuple[MachineClocks, Callable[[], int]],
) -> None:
    clocks, now = machine
    before = now()
    clocks.suspend(100)
    assert now() - before == 100 * NS


@pytest.mark.parametrize("seconds", [-3_600, 3_600])
def test_a_clock_that_is_set_moves_no_deadline(
    machine: tuple[MachineClocks, Callable[[], int]], seconds: float
) -> None:
    clocks, now = machine
    before = now()
    clocks.set(seconds)
    assert now() == before
