"""Virtual time: machines with clocks of their own, threads that can be paused, one event queue.

One `random.Random` a schedule decides everything. Nothing here reads a real clock, and the order of
events is that of (instant, number), so a seed replays exactly.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import time as real_time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import kvshuttle.controlplane.clock
import kvshuttle.dataplane.clock

__all__ = ["MS", "SECOND", "CrashNow", "Kernel", "Machine", "Thread", "Violation", "between"]

MS = 1_000_000
SECOND = 1_000 * MS


class Violation(AssertionError):  # noqa: N818
    """An invariant does not hold; `invariant` is its short name."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class CrashNow(BaseException):
    """The thread that is running dies here."""


class Machine:
    """A host: its clocks run at a rate of their own; its wall clock may jump."""

    def __init__(self, kernel: Kernel, name: str, *, ppm: int = 0) -> None:
        self.kernel = kernel
        self.name = name
        self.ppm = ppm
        # Machines were not booted at the same time.
        self._base_ns = kernel.rng.randrange(1, 10_000) * SECOND
        self._wall_ns = 1_700_000_000 * SECOND
        self._suspended_ns = 0
        self._suspended_at: int | None = None

    def boottime(self) -> int:
        """CLOCK_BOOTTIME: never steps, runs on in suspend."""
        now = self.kernel.now
        return self._base_ns + now + now * self.ppm // 1_000_000

    def monotonic(self) -> int:
        """CLOCK_MONOTONIC: stands still in suspend."""
        asleep = self._suspended_ns
        if self._suspended_at is not None:
            asleep += self.kernel.now - self._suspended_at
        return self.boottime() - asleep

    def wall(self) -> int:
        """CLOCK_REALTIME."""
        return self._wall_ns + self.kernel.now

    def jump(self, by_ns: int) -> None:
        """Somebody sets the wall clock."""
        self._wall_ns += by_ns

    def suspend(self) -> None:
        """The machine stops, with all its threads; its owner pauses those."""
        self._suspended_at = self.kernel.now

    def wake(self) -> None:
        """It goes on."""
        if self._suspended_at is not None:
            self._suspended_ns += self.kernel.now - self._suspended_at
            self._suspended_at = None


class Thread:
    """What runs one event at a time, can be paused, and dies with its process."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.alive = True
        self.on_crash: Callable[[], None] | None = None
        self._pauses = 0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def paused(self) -> bool:
        """Whether its events wait."""
        return self._pauses > 0

    def pause(self) -> None:
        """Stops; pauses nest."""
        self._pauses += 1

    def resume(self) -> None:
        """Goes on, first with what has come meanwhile, in order."""
        if self._pauses == 0:
            return
        self._pauses -= 1
        if self._pauses == 0 and self.alive:
            for fn, args in self._backlog:
                self.machine.kernel.at(0, self, fn, *args)
            self._backlog.clear()

    def wait_for_resume(self, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Keeps an event for later."""
        self._backlog.append((fn, args))

    def die(self) -> None:
        """Nothing of it runs any more."""
        self.alive = False
        self._backlog.clear()


class _VirtualTime:
    """Stands in for the `time` module where the project reads clocks."""

    CLOCK_BOOTTIME = real_time.CLOCK_BOOTTIME
    CLOCK_MONOTONIC = real_time.CLOCK_MONOTONIC
    CLOCK_MONOTONIC_RAW = real_time.CLOCK_MONOTONIC_RAW
    CLOCK_REALTIME = real_time.CLOCK_REALTIME

    def __init__(self) -> None:
        self.kernel: Kernel | None = None

    def _machine(self) -> Machine:
        assert self.kernel is not None
        assert self.kernel.running is not None, "a clock was read outside of any thread"
        return self.kernel.running.machine

    def clock_gettime_ns(self, clock: int) -> int:
        machine = self._machine()
        if clock == self.CLOCK_BOOTTIME:
            return machine.boottime()
        if clock in (self.CLOCK_MONOTONIC, self.CLOCK_MONOTONIC_RAW):
            return machine.monotonic()
        assert clock == self.CLOCK_REALTIME, f"clock {clock} is not simulated"
        return machine.wall()

    def monotonic_ns(self) -> int:
        return self._machine().monotonic()

    def time_ns(self) -> int:
        return self._machine().wall()


_TIME = _VirtualTime()


class Kernel:
    """The event queue."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 0
        self.steps = 0
        self.running: Thread | None = None
        self.trace: list[str] | None = [] if trace else None
        self.faults: Counter[str] = Counter()
        # What is to happen when something has happened so many times.
        self._milestones: dict[tuple[str, int], list[Callable[[], None]]] = {}
        self._reached: Counter[str] = Counter()
        self.after_step: Callable[[], None] = lambda: None
        self._queue: list[tuple[int, int, Thread | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    @contextlib.contextmanager
    def virtual_time(self) -> Iterator[None]:
        """The project's clocks read this kernel's machines."""
        _TIME.kernel = self
        modules = (kvshuttle.controlplane.clock, kvshuttle.dataplane.clock)
        before = [vars(module)["time"] for module in modules]
        try:
            for module in modules:
                vars(module)["time"] = _TIME
            yield
        finally:
            for module, was in zip(modules, before, strict=True):
                vars(module)["time"] = was
            _TIME.kernel = None

    @contextlib.contextmanager
    def on(self, thread: Thread) -> Iterator[None]:
        """What runs inside runs on this thread, now."""
        before, self.running = self.running, thread
        try:
            yield
        finally:
            self.running = before

    def at(self, delay_ns: int, thread: Thread | None, fn: Callable[..., None], *args: Any) -> None:
        """Calls `fn` on the thread in `delay_ns`; None: on no machine (hardware, people)."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_ns, self._count, thread, fn, args))

    def log(self, who: str, what: str, **values: Any) -> None:
        """A line of the trace."""
        if self.trace is not None:
            said = " ".join(f"{k}={v}" for k, v in values.items())
            self.trace.append(f"{self.now / SECOND:9.4f} {who:<8} {what} {said}".rstrip())

    def fault(self, kind: str, who: str = "", **values: Any) -> None:
        """A fault has been injected."""
        self.faults[kind] += 1
        self.log(who or "fault", f"! {kind}", **values)

    def when(self, milestone: str, times: int, fn: Callable[[], None]) -> None:
        """Calls `fn` at the milestone's so manieth time."""
        self._milestones.setdefault((milestone, times), []).append(fn)

    def reached(self, milestone: str) -> None:
        """It has happened once more."""
        self._reached[milestone] += 1
        for fn in self._milestones.pop((milestone, self._reached[milestone]), ()):
            fn()

    def times(self, milestone: str) -> int:
        """How often it has happened."""
        return self._reached[milestone]

    def run(self, until_ns: int) -> None:
        """Handles events until then."""
        while self._queue and self._queue[0][0] <= until_ns:
            at, _, thread, fn, args = heapq.heappop(self._queue)
            self.now = at
            if thread is not None:
                if not thread.alive:
                    continue
                if thread.paused:
                    thread.wait_for_resume(fn, args)
                    continue
            self.steps += 1
            self.running = thread
            try:
                fn(*args)
            except CrashNow:
                assert thread is not None
                if thread.on_crash is not None:
                    thread.on_crash()
            finally:
                self.running = None
            self.after_step()
        self.now = max(self.now, until_ns)


def between(rng: random.Random, low_ms: float, high_ms: float) -> int:
    """A duration in ns, mostly near the low end: real delays are."""
    return int((low_ms + (high_ms - low_ms) * rng.random() ** 2) * MS)
