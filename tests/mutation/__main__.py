"""Breaks one rule at a time in a copy of the tree, and runs what should see it.

    python -m tests.mutation                     all mutants
    python -m tests.mutation no_confirm …        these
    python -m tests.mutation --thorough          by everything, whatever the table says
    python -m tests.mutation --schedules 2000    a longer look by the simulation

For each mutant: the tests that its table names; if none of them fails, the unit tests, the
simulation, and the exploration of all orders of events, until one has caught it. Ends with one JSON
line; exit status 1 if a mutant survives, or is caught by other tests than those that are named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutant import EXPLORATION, PUSH_EXPLORATION, SIMULATION, Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
SOURCES = ("controlplane", "dataplane", "clients", "tests", "proto", "docs", "deploy", "benchmarks")
FILES = ("pyproject.toml", "README.md")
UNITS = ("tests/unit/dataplane", "tests/unit/controlplane", "tests/unit/test_prevented.py")
STEP_TIMEOUT_S = 900


@dataclass(frozen=True)
class Verdict:
    """How a mutant fared: `caught_by` is a test, or one of the explorers; empty: it survives."""

    mutant: Mutant
    caught_by: str
    named: bool
    seconds: float


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("names", nargs="*", help="mutants; none means all")
    parser.add_argument("--thorough", action="store_true", help="not only by the tests named")
    parser.add_argument("--named-only", action="store_true", help="by nothing else")
    parser.add_argument("--schedules", type=int, default=600, help="of the simulation, a mutant")
    parser.add_argument("--steps", type=int, default=6_000, help="of the exploration, a mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    known = {mutant.name for mutant in MUTANTS}
    if unknown := set(options.names) - known:
        parser.error(f"unknown mutants: {', '.join(sorted(unknown))}")
    chosen = [x for x in MUTANTS if not options.names or x.name in options.names]
    began = time.monotonic()
    verdicts = []
    with (
        tempfile.TemporaryDirectory(prefix="kvshuttle-mutants-") as directory,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        trees = _Trees(options.jobs, Path(directory))
        for verdict in pool.map(lambda x: _judge(x, trees, options), chosen):
            verdicts.append(verdict)
            by = verdict.caught_by or "SURVIVES"
            note = "" if verdict.named or not verdict.caught_by else "  (not named)"
            mutant = verdict.mutant
            print(
                f"{mutant.name:34} {verdict.seconds:5.0f} s  {mutant.rule:58} {by}{note}",
                flush=True,
            )
    survivors = [x.mutant.name for x in verdicts if not x.caught_by]
    elsewhere = [x.mutant.name for x in verdicts if x.caught_by and not x.named]
    print(
        json.dumps(
            {
                "mutants": len(chosen),
                "caught": len(chosen) - len(survivors),
                "survived": len(survivors),
                "survivors": survivors,
                "caught_by_others_than_named": elsewhere,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )
    return 1 if survivors or (elsewhere and not options.thorough) else 0


class _Trees:
    """Copies of the tree, one a job, each mended after every mutant: what did not change stays
    compiled."""

    def __init__(self, count: int, directory: Path) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            tree = directory / str(number)
            for name in SOURCES:
                # Without what `make sdk` leaves there.
                ignore = shutil.ignore_patterns(".*", "build", "dist", "gen", "node_modules")
                shutil.copytree(ROOT / name, tree / name, ignore=ignore)
            for name in FILES:
                shutil.copy(ROOT / name, tree / name)
            self._free.put(tree)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[Path]:
        """A copy with a rule broken."""
        tree = self._free.get()
        target = tree / mutant.path
        source = target.read_text()
        if source.count(mutant.before) != 1:
            raise LookupError(f"{mutant.name}: {mutant.path} does not have its piece exactly once")
        try:
            target.write_text(source.replace(mutant.before, mutant.after))
            yield tree
        finally:
            target.write_text(source)
            self._free.put(tree)


def _judge(mutant: Mutant, trees: _Trees, options: argparse.Namespace) -> Verdict:
    with trees.mutated(mutant) as tree:
        began = time.monotonic()
        caught_by, named = "", False
        if not options.thorough:
            caught_by, named = _look(tree, mutant.seen_by, options), True
        if not caught_by and not options.named_only:
            # What should see it does not: is there anything else that does?
            caught_by, named = _look(tree, (*UNITS, SIMULATION, EXPLORATION), options), False
        return Verdict(mutant, caught_by, named, time.monotonic() - began)


def _look(tree: Path, looks: tuple[str, ...], options: argparse.Namespace) -> str:
    """What fails first; empty: nothing does."""
    for name, command in _commands(looks, options):
        try:
            done = _run(tree, command)
        except subprocess.TimeoutExpired:
            return f"{name} (hangs)"  # which no user would miss
        if done.returncode:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return failed[1].partition("[")[0] if failed else name
    return ""


def _commands(
    looks: tuple[str, ...], options: argparse.Namespace
) -> Iterator[tuple[str, list[str]]]:
    tests = [x for x in looks if x not in (SIMULATION, EXPLORATION, PUSH_EXPLORATION)]
    if tests:
        yield "tests", ["pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    if SIMULATION in looks:
        schedules = ["--schedules", str(options.schedules)]
        yield SIMULATION, ["tests.simulation", *schedules, "--fail-fast", "--jobs", "1"]
    explore = ["tests.simulation.exhaustive", "--faults", "1", "--steps", str(options.steps)]
    if EXPLORATION in looks:
        yield EXPLORATION, explore
    if PUSH_EXPLORATION in looks:
        yield PUSH_EXPLORATION, [*explore, "--world", "push"]


def _run(tree: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    roots = [tree / "controlplane", tree / "dataplane", tree / "clients/python", tree]
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))},
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
