"""Runs all tests, each kind as suits it, and ends with one line for all in pytest's manner.

    python scripts/run_tests.py [--fast] [arguments of pytest]

What starts no engine waits most of its time for programs to start and stop, so it runs in half as
many processes again as there are cores; the simulations, most of which use one core each, in as
many. Engines use every core themselves: they have the machine to themselves. `--fast`: only what
needs no engine and little time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter

PROCESSES = str(len(os.sched_getaffinity(0)) * 3 // 2)
KINDS: dict[str, tuple[str, ...]] = {
    "the rest": ("tests", "-m", "not simulation", "--ignore", "tests/e2e", "-n", PROCESSES),
    "simulation": ("tests", "-m", "simulation", "-n", "auto", "--dist", "worksteal"),
    "engines": ("tests/e2e", "-m", "not long"),
}
FAST: dict[str, tuple[str, ...]] = {
    "fast": ("tests", "-m", "not engines and not simulation and not slow", "-n", PROCESSES),
}
NOTHING_CHOSEN = 5  # pytest's exit status when an argument, such as -k, leaves no test
CLOSING = re.compile(r"^=+ (.*\d.*) in [\d.]+s.*=+$")


def main(arguments: list[str]) -> int:
    """See the module; the exit status is the first of a kind that failed."""
    began = time.monotonic()
    kinds = KINDS
    if arguments[:1] == ["--fast"]:
        kinds, arguments = FAST, arguments[1:]
    total: Counter[str] = Counter()
    states = {}
    for kind, chosen in kinds.items():
        print(f"== {kind}", flush=True)
        states[kind], counts = run([*chosen, *arguments])
        total += counts
    failed = [kind for kind, state in states.items() if state not in (0, NOTHING_CHOSEN)]
    nothing = all(state == NOTHING_CHOSEN for state in states.values())
    said = ", ".join(f"{number} {word}" for word, number in total.items()) or "no tests ran"
    where = f" ({', '.join(failed)})" if failed else ""
    print(f"============ {said}{where} in {time.monotonic() - began:.2f}s ============")
    return states[failed[0]] if failed else NOTHING_CHOSEN if nothing else 0


def run(arguments: list[str]) -> tuple[int, Counter[str]]:
    """One run of pytest, shown as it goes: its exit status, and what its closing line counts."""
    closing = ""
    command = [sys.executable, "-m", "pytest", "--durations=15", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if found := CLOSING.match(line.strip()):
                    closing = found[1]
        except KeyboardInterrupt:
            process.wait()  # it has had the same signal, and stops its servers
            raise
    found_counts = re.findall(r"(\d+) (failed|errors?|passed|skipped|xfailed|xpassed)", closing)
    return process.returncode, Counter({word: int(number) for number, word in found_counts})


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "100")
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
