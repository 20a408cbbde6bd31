"""Many schedules over several processes, and what they have covered."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from kvshuttle.controlplane.model.lease import TRANSITIONS
from tests.simulation.faults import KINDS
from tests.simulation.schedule import prepare, run, transitions

__all__ = ["REQUIRED_SHARE", "Tally", "campaign", "run_seeds"]

REQUIRED_SHARE = 0.10
CHUNK = 40
"""Seeds that a process runs at once: half a second or so."""


@dataclass
class Tally:
    """Sums over schedules."""

    schedules: int = 0
    violations: dict[int, str] = field(default_factory=dict)
    injected: Counter[str] = field(default_factory=Counter)
    with_fault: Counter[str] = field(default_factory=Counter)
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)
    numbers: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Another process's."""
        self.schedules += other.schedules
        self.violations.update(other.violations)
        self.injected.update(other.injected)
        self.with_fault.update(other.with_fault)
        self.transitions.update(other.transitions)
        self.numbers.update(other.numbers)

    def lacking(self) -> list[str]:
        """What a run of some size must have covered and has not."""
        rare = [
            f"{kind}: in {self.with_fault[kind] / self.schedules:.1%} of the schedules"
            for kind in KINDS
            if self.with_fault[kind] < REQUIRED_SHARE * self.schedules
        ]
        never = [
            f"no lease went from {before.name} to {after.name}"
            for before, afters in TRANSITIONS.items()
            for after in sorted(afters)
            if not self.transitions[before.name, after.name]
        ]
        return rare + never


def run_seeds(seeds: range) -> Tally:
    """Runs some seeds in this process."""
    prepare()
    tally = Tally()
    before = Counter(transitions)
    for seed in seeds:
        outcome = run(seed)
        tally.schedules += 1
        if outcome.violation:
            tally.violations[seed] = outcome.detail
        tally.injected.update(outcome.faults)
        tally.with_fault.update(outcome.faults.keys())
        tally.numbers.update(outcome.numbers)
    for (state, after), times in (Counter(transitions) - before).items():
        tally.transitions[state.name, after.name] = times
    return tally


def _end_with_parent() -> None:
    """A killed campaign leaves no process behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_it, daemon=True).start()


def campaign(
    *,
    first: int,
    schedules: int,
    minutes: float = 0.0,
    jobs: int = 1,
    fail_fast: bool = False,
    progress: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Runs `schedules` seeds from `first`, or as many as `minutes` allow."""
    tally = Tally()
    until = time.monotonic() + minutes * 60 if minutes else None

    def chunks() -> Iterator[range]:
        seed = first
        while until is not None or seed < first + schedules:
            if until is not None and time.monotonic() >= until:
                return
            if fail_fast and tally.violations:
                return
            end = seed + CHUNK if until is not None else min(seed + CHUNK, first + schedules)
            yield range(seed, end)
            seed = end

    # Not forked: a child must not begin with what its parent has imported and counted.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent) as pool:
        running: set[Future[Tally]] = set()
        for chunk in chunks():
            running.add(pool.submit(run_seeds, chunk))
            if len(running) >= 2 * jobs:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    tally.add(future.result())
                progress(tally)
        for future in running:
            tally.add(future.result())
    return tally
