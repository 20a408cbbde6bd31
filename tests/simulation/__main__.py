"""The simulation from the command line.

    python -m tests.simulation                       10,000 schedules on all cores
    python -m tests.simulation --minutes 60          for so long
    python -m tests.simulation --fail-fast           to the first violation
    python -m tests.simulation --seed 17 --trace     one schedule again, line by line

It ends with one JSON line. Exit status 1: an invariant was violated, or the run did not cover what
it has to (each kind of fault in a tenth of all schedules, each step of a lease).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from tests.simulation.campaign import REQUIRED_SHARE, Tally, campaign
from tests.simulation.faults import KINDS
from tests.simulation.schedule import run

COVERAGE_FROM = 1_000
"""Fewer schedules than this need not cover everything."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="run for so long instead")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="one schedule")
    parser.add_argument("--trace", action="store_true", help="with --seed: every step")
    parser.add_argument("--fail-fast", action="store_true", help="end at the first violation")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed, trace=options.trace)
    began = time.monotonic()
    tally = campaign(
        first=options.first_seed,
        schedules=options.schedules,
        minutes=options.minutes,
        jobs=options.jobs,
        fail_fast=options.fail_fast,
        progress=_progress if sys.stdout.isatty() else lambda _: None,
    )
    lacking = tally.lacking() if tally.schedules >= COVERAGE_FROM else []
    _report(tally, lacking)
    print(
        json.dumps(
            {
                "schedules": tally.schedules,
                "violations": len(tally.violations),
                "uncovered": len(lacking),
                "faults": sum(tally.injected.values()),
                "reads": tally.numbers["reads"],
                "partial_loads": tally.numbers["partial_loads"],
                "of_other_sessions": tally.numbers["shared_grants"],
                "deferred_frees": tally.numbers["deferred_frees"],
                "waits_for_step": tally.numbers["waits_for_step"],
                "steps": tally.numbers["steps"],
                "virtual_hours": round(tally.numbers["virtual_s"] / 3_600, 1),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )
    return 1 if tally.violations or lacking else 0


def _one(seed: int, *, trace: bool) -> int:
    outcome = run(seed, trace=trace)
    for line in outcome.trace:
        print(line)
    if trace:
        print(f"trace hash {outcome.trace_hash}")
    if outcome.violation:
        print(f"seed {seed}: {outcome.detail}")
    print(json.dumps({"schedules": 1, "violations": int(bool(outcome.violation)), "seed": seed}))
    return 1 if outcome.violation else 0


def _progress(tally: Tally) -> None:
    print(f"\r{tally.schedules:>8} schedules, {len(tally.violations)} violations", end="")


def _report(tally: Tally, lacking: list[str]) -> None:
    count = max(1, tally.schedules)
    print(f"\nFaults injected by kind, and the share of {tally.schedules} schedules with any:")
    for kind in sorted(tally.injected, key=lambda k: (k not in KINDS, k)):
        share = tally.with_fault[kind] / count
        needed = "" if kind not in KINDS else f"  (at least {REQUIRED_SHARE:.0%})"
        print(f"  {kind:<20} {tally.injected[kind]:>9} {share:>7.1%}{needed}")
    print("Steps of leases:")
    for (before, after), times in sorted(tally.transitions.items()):
        print(f"  {before:>8} to {after:<10} {times:>9}")
    numbers = tally.numbers
    print(
        f"Requests: {numbers['finished']} finished, {numbers['aborted']} aborted, "
        f"{numbers['errors']} lost with their engine; {numbers['reads']} READs, "
        f"{numbers['eager_grants']} eager returns, {numbers['shared_grants']} of other sessions; "
        f"{numbers['steps']} steps over "
        f"{numbers['virtual_s'] / 3600:.1f} virtual hours"
    )
    for seed, detail in sorted(tally.violations.items())[:10]:
        print(f"seed {seed}: {detail}")
        print(f"  again: python -m tests.simulation --seed {seed} --trace")
    if tally.violations:
        seed = min(tally.violations)
        print(f"\nThe end of seed {seed}'s trace:")
        for line in run(seed, trace=True).trace[-60:]:
            print(f"  {line}")
    for what in lacking:
        print(f"not covered: {what}")


if __name__ == "__main__":
    sys.exit(main())
