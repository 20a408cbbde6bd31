"""Breaks one rule at a time in a copy of the tree, and runs what should see it.

    python -m tests.mutation                     all mutants
    python -m tests.mutation no_confirm …        these
    python -m tests.mutation --schedules 2000    a longer look by the simulation

For each mutant: the unit tests, then the simulation, then the exploration of all orders of events;
the first that fails has caught it. Ends with one JSON line; exit status 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SOURCES = ("controlplane", "dataplane", "clients", "tests", "proto", "docs", "deploy", "benchmarks")
FILES = ("pyproject.toml", "README.md")
UNITS = ("tests/unit/dataplane", "tests/unit/controlplane", "tests/unit/test_prevented.py")
STEP_TIMEOUT_S = 900


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("names", nargs="*", help="mutants; none means all")
    parser.add_argument("--schedules", type=int, default=600, help="of the simulation, a mutant")
    parser.add_argument("--steps", type=int, default=4_000, help="of the exploration, a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    known = {mutant.name for mutant in MUTANTS}
    if unknown := set(options.names) - known:
        parser.error(f"unknown mutants: {', '.join(sorted(unknown))}")
    chosen = [x for x in MUTANTS if not options.names or x.name in options.names]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(lambda x: _judge(x, options.schedules, options.steps), chosen)
        survivors = []
        for mutant, caught_by in zip(chosen, found, strict=True):
            print(f"{caught_by or 'SURVIVES':12} {mutant.name:36} {mutant.rule}", flush=True)
            if not caught_by:
                survivors.append(mutant.name)
    print(json.dumps({"mutants": len(chosen), "survivors": survivors}))
    return 1 if survivors else 0


def _judge(mutant: Mutant, schedules: int, steps: int) -> str:
    """By what it was caught; empty if by nothing."""
    with tempfile.TemporaryDirectory(prefix="kvshuttle-mutant-") as directory:
        tree = Path(directory)
        for name in SOURCES:
            shutil.copytree(
                ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
            )
        for name in FILES:
            shutil.copy(ROOT / name, tree / name)
        target = tree / mutant.path
        target.write_text(target.read_text().replace(mutant.before, mutant.after))
        looks: tuple[tuple[str, list[str]], ...] = (
            ("unit tests", ["pytest", "-q", "-x", "-p", "no:cacheprovider", *UNITS]),
            (
                "simulation",
                ["tests.simulation", "--schedules", str(schedules), "--fail-fast", "--jobs", "1"],
            ),
            (
                "exploration",
                ["tests.simulation.exhaustive", "--faults", "1", "--steps", str(steps)],
            ),
        )
        return next((name for name, command in looks if _fails(tree, command)), "")


def _fails(tree: Path, command: list[str]) -> bool:
    roots = [tree / "controlplane", tree / "dataplane", tree / "clients/python", tree]
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))},
            capture_output=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # it hangs, which no user would miss
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
