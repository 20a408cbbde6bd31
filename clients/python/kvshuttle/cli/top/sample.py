"""What is read at one time, and what changed since: rates, shares, failures. No drawing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.cli import human
from kvshuttle.cli.commands.cluster import all_workers, prompt_tokens
from kvshuttle.cli.commands.leases import ENDED, OPEN
from kvshuttle.cli.run import gather
from kvshuttle.cli.shape import word

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence

    from kvshuttle.client import AsyncClient
    from kvshuttle.v1 import cluster_service_pb2 as cluster_pb
    from kvshuttle.v1 import lease_service_pb2 as lease_pb

# Counters come with heartbeats, a second apart: rates over less than a few of them would jump.
RATE_WINDOW_S = 5.0
TOKEN_WINDOW_S = 30.0
SERIES = 240
# Open leases that are counted by state; beyond, only their number is known.
LEASES_MOST = 2_000
# More than any screen shows.
ENDED_MOST = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one time; `at_s` is this machine's monotonic clock."""

    at_s: float
    time: datetime.datetime
    status: cluster_pb.GetStatusResponse
    workers: Sequence[cluster_pb.Worker]
    open_leases: Sequence[lease_pb.Lease]
    more_leases: bool
    ended: Sequence[lease_pb.Lease]
    """The newest of those that ended, by when they ended."""


async def take(client: AsyncClient) -> Sample:
    """Reads once. Raises what the client raises."""
    status, workers, (leases, more), (ended, _) = await asyncio.gather(
        client.get_status(),
        all_workers(client),
        gather(client.list_leases(states=OPEN), LEASES_MOST),
        gather(client.list_leases(states=ENDED, page_size=ENDED_MOST), ENDED_MOST),
    )
    ended.sort(key=lambda one: (one.end_time.seconds, one.end_time.nanos), reverse=True)
    return Sample(time.monotonic(), human.now(), status, workers, leases, more, ended)


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker with its rates: transfers that it read, bytes that it read."""

    worker: cluster_pb.Worker
    heard_s: float
    transfers_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Frame:
    """All that is shown. Rates are per second; `*_series` have one value a sample, oldest first."""

    sample: Sample
    workers: Sequence[WorkerLine]
    transfers_per_s: float
    return_bytes_per_s: float
    forward_bytes_per_s: float
    return_series: Sequence[float]
    forward_series: Sequence[float]
    tokens: dict[str, int]
    """Prompt tokens of the last `TOKEN_WINDOW_S` by where they came from."""
    tokens_ever: dict[str, int]
    """The same since the workers' boots."""
    return_bytes: int
    forward_bytes: int
    leases: dict[tuple[str, str], int]
    """Open leases by direction and state."""
    failures: Sequence[tuple[str, int, int]]
    """Reason, number since the boots, number in the last `TOKEN_WINDOW_S`; the newest and most
    frequent first."""


@dataclass(slots=True)
class History:
    """The samples of the last while."""

    samples: deque[Sample] = field(default_factory=deque)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=SERIES))
    forwards: deque[float] = field(default_factory=lambda: deque(maxlen=SERIES))

    def add(self, sample: Sample) -> Frame:
        """Takes a sample in."""
        if self.samples:
            last = self.samples[-1]
            self.returns.append(_rate(last, sample, "return_bytes"))
            self.forwards.append(_rate(last, sample, "forward_bytes"))
        self.samples.append(sample)
        while len(self.samples) > 2 and sample.at_s - self.samples[1].at_s >= TOKEN_WINDOW_S:
            self.samples.popleft()
        return self.frame()

    def _before(self, window_s: float) -> Sample:
        """The newest sample that is so old, or else the oldest."""
        newest = self.samples[-1]
        found = self.samples[0]
        for one in self.samples:
            if newest.at_s - one.at_s < window_s:
                break
            found = one
        return found

    def frame(self) -> Frame:
        """What there is to show."""
        now, before = self.samples[-1], self._before(RATE_WINDOW_S)
        long_before = self._before(TOKEN_WINDOW_S)
        ever = prompt_tokens(now.workers)
        then = prompt_tokens(_same_boots(long_before, now))
        leases = Counter((word(one, "direction"), word(one, "state")) for one in now.open_leases)
        return Frame(
            sample=now,
            workers=[_line(one, now, before) for one in now.workers],
            transfers_per_s=_rate(before, now, "transfers_completed"),
            return_bytes_per_s=_rate(before, now, "return_bytes"),
            forward_bytes_per_s=_rate(before, now, "forward_bytes"),
            return_series=list(self.returns),
            forward_series=list(self.forwards),
            tokens={name: max(0, number - then[name]) for name, number in ever.items()},
            tokens_ever=ever,
            return_bytes=sum(one.counters.return_bytes for one in now.workers),
            forward_bytes=sum(one.counters.forward_bytes for one in now.workers),
            leases=dict(leases),
            failures=_failures(long_before, now),
        )


def _boot(worker: cluster_pb.Worker) -> tuple[str, int]:
    return (worker.ref.worker_id, worker.ref.incarnation)


def _same_boots(before: Sample, now: Sample) -> list[cluster_pb.Worker]:
    """The earlier state of those boots that are still there: another's counters begin anew."""
    boots = {_boot(one) for one in now.workers}
    return [one for one in before.workers if _boot(one) in boots]


def _rate(before: Sample, now: Sample, counter: str) -> float:
    elapsed = now.at_s - before.at_s
    if elapsed <= 0:
        return 0.0
    old = {_boot(one): getattr(one.counters, counter) for one in before.workers}
    grown = sum(
        max(0, getattr(one.counters, counter) - old[_boot(one)])
        for one in now.workers
        if _boot(one) in old
    )
    return float(grown) / elapsed


def _line(worker: cluster_pb.Worker, now: Sample, before: Sample) -> WorkerLine:
    old = next((one for one in before.workers if _boot(one) == _boot(worker)), None)
    elapsed = now.at_s - before.at_s
    transfers = moved = 0.0
    if old is not None and elapsed > 0:
        new = worker.counters
        was = old.counters
        transfers = max(0, new.transfers_completed - was.transfers_completed) / elapsed
        grown = new.return_bytes + new.forward_bytes - was.return_bytes - was.forward_bytes
        moved = max(0, grown) / elapsed
    return WorkerLine(worker, human.age_s(worker.heartbeat_time, now.time), transfers, moved)


def _failures(before: Sample, now: Sample) -> list[tuple[str, int, int]]:
    ever: Counter[str] = Counter()
    then: Counter[str] = Counter()
    for one in now.workers:
        ever.update(dict(one.counters.fallbacks))
    for one in _same_boots(before, now):
        then.update(dict(one.counters.fallbacks))
    found = [(name, number, max(0, number - then[name])) for name, number in ever.items()]
    return sorted(found, key=lambda one: (-one[2], -one[1], one[0]))
