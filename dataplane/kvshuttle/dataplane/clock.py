"""The agent's clock and the arithmetic of deadlines.

All instants are nanoseconds of CLOCK_BOOTTIME: monotonic, unmoved by clock steps, and running
while the machine is suspended, so that a suspended reader wakes up after its deadline and knows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["NS", "Clock", "boottime_ns", "destination_deadline", "source_deadline"]

Clock = Callable[[], int]
"""Returns the present instant in ns."""

NS = 1_000_000_000
"""Nanoseconds in a second."""


def boottime_ns() -> int:
    """The present instant, in ns since boot, time in suspend counted."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def destination_deadline(as_of: int, ttl_ns: int) -> int:
    """When a destination's right ends.

    ``as_of`` is the reading of this very clock in a heartbeat that had reached the control plane
    when it granted; it lies in the grant's past, so the result is at or before grant + TTL.
    """
    return as_of + ttl_ns


def source_deadline(read_at: int, ttl_ns: int, guard_ns: int, drift_ppm: int) -> int:
    """When a source may let go of a range without having heard of its reader.

    Counted from reading the Harden, which is after it was sent. The control plane grants within
    ``guard_ns`` of sending, so the reader's deadline is at most TTL + guard after that; the drift
    allowance covers a source clock that runs fast against the other two.
    """
    # Two clocks differ from true time by at most drift_ppm each, so their ratio by twice that.
    return read_at + (ttl_ns + guard_ns) * (1_000_000 + 2 * drift_ppm) // 1_000_000
