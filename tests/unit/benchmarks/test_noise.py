"""Others on the machine are seen, and waited for, but not for ever."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.ttft.noise import Noise, wait_for_quiet

BURN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"


def test_what_a_known_process_uses_is_not_noise() -> None:
    # The machine may be busy all the same: the two counts differ by what the child has used.
    with subprocess.Popen([sys.executable, "-c", BURN]) as child:
        foreign, known = Noise([]), Noise([child.pid])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with_child, without = foreign.cores(), known.cores()
    assert with_child > without


def test_a_quiet_machine_is_not_waited_for_longer_than_it_takes() -> None:
    looks = iter([1.5, 1.2, 0.1, 9.0])
    wait_for_quiet([], 60.0, look=lambda _: next(looks))
    assert next(looks) == 9.0


def test_a_machine_that_never_gets_quiet_is_given_up() -> None:
    seen = []

    def look(_: list[int]) -> float:
        seen.append(1)
        return 2.0

    wait_for_quiet([], 0.05, look=look)
    assert seen
    wait_for_quiet([], 0.0, look=lambda _: 1 / 0)
