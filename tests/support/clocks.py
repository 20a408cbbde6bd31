"""The clocks of a machine that is suspended and set."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

__all__ = ["MachineClocks"]

NS = 1_000_000_000


@dataclass
class MachineClocks:
    """What the kernel says: seconds since boot, of which some were slept, and the wall clock."""

    boot_s: float = 1_000.0
    slept_s: float = 0.0
    wall_s: float = 1_700_000_000.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on `time` reads these."""
        awake = {time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW}

        def read(clock: int) -> int:
            if clock == time.CLOCK_REALTIME:
                return int(self.wall_s * NS)
            asleep = self.slept_s if clock in awake else 0.0
            return int((self.boot_s - asleep) * NS)

        monkeypatch.setattr(time, "clock_gettime_ns", read)
        monkeypatch.setattr(time, "monotonic_ns", lambda: read(time.CLOCK_MONOTONIC))
        monkeypatch.setattr(time, "time_ns", lambda: read(time.CLOCK_REALTIME))

    def suspend(self, seconds: float) -> None:
        """The machine sleeps."""
        self.boot_s += seconds
        self.slept_s += seconds
        self.wall_s += seconds

    def set(self, seconds: float) -> None:
        """The wall clock is set."""
        self.wall_s += seconds
