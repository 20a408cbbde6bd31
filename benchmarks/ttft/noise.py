"""How much of the machine others take while something is timed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

import psutil

__all__ = ["Noise", "wait_for_quiet"]

# A look at the machine before a turn, and between two looks.
LOOK_S = 0.5
# A machine is quiet when others take less than so many cores.
QUIET_CORES = 0.5


def _busy_s() -> float:
    times = psutil.cpu_times()
    fields = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in fields))


def _own_s(pids: Iterable[int]) -> float:
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


class Noise:
    """Counts from its making until `cores()`: what ran that is not of `pids` or this process."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = [*pids, os.getpid()]
        self._start = time.monotonic()
        self._busy = _busy_s()
        self._own = _own_s(self._pids)

    def cores(self) -> float:
        """Cores that others used, on average."""
        elapsed = time.monotonic() - self._start
        foreign = (_busy_s() - self._busy) - (_own_s(self._pids) - self._own)
        return max(0.0, foreign / elapsed) if elapsed > 0 else 0.0


def wait_for_quiet(
    pids: Iterable[int],
    patience_s: float,
    *,
    look: Callable[[list[int]], float] | None = None,
) -> float:
    """Returns once others leave the machine alone, or after `patience_s`; how long that took."""
    own = list(pids)

    def cores(known: list[int]) -> float:
        noise = Noise(known)
        time.sleep(LOOK_S)
        return noise.cores()

    measure = look or cores
    start = time.monotonic()
    while patience_s and time.monotonic() - start < patience_s:
        if measure(own) < QUIET_CORES:
            break
    return time.monotonic() - start
