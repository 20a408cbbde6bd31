"""The process's time line: like Unix time in ns, but it never steps.

It starts at the wall clock, or where the store's last record left off if that is later, and runs
with CLOCK_BOOTTIME, which counts a suspended machine's sleep. So deadlines on it survive clock
steps and suspends, and the times that are stored stay in order over restarts and reboots (after
which CLOCK_BOOTTIME begins at 0 again: no reading of it is stored).
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "Timeline"]


class Clock(Protocol):
    """What the control plane needs of time."""

    def now_ns(self) -> int:
        """Nanoseconds on the time line."""
        ...


def _boot_ns() -> int:
    # Absent on systems other than Linux, where a suspended control plane is not a case.
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return time.monotonic_ns()


class Timeline:
    """The real one."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - _boot_ns()

    def not_before(self, time_ns: int) -> int:
        """Goes on from `time_ns` if the wall clock was set back since that was stored; returns by
        how much it is behind, else 0."""
        behind_ns = max(0, time_ns + 1 - self.now_ns())
        self._offset_ns += behind_ns
        return behind_ns

    def now_ns(self) -> int:
        """Nanoseconds on the time line."""
        return _boot_ns() + self._offset_ns
