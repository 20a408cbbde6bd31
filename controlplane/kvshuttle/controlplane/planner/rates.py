"""What agents' reports teach: how fast a worker computes, how fast a link moves, who waits.

A prediction is only as good as its rates, so a rate is learned from samples that are large enough
to show it (a small transfer is mostly latency and would make a fast link look slow), and one sample
that is far off moves it no farther than a factor of eight would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.worker import Worker

__all__ = [
    "LINK_BYTES_PER_S",
    "OVERHEAD_NS",
    "PREFILL_TOKENS_PER_S",
    "SECOND",
    "Backlog",
    "Rate",
    "Rates",
    "Wait",
]

SECOND = 1_000_000_000
PREFILL_TOKENS_PER_S = 2_000.0
"""Before anything was reported: a small model on a CPU core. A fast engine corrects it with its
first prompt; too low a guess only returns what might have been computed as fast."""
PREFILL_BOUNDS = (1.0, 1e7)
"""Slower than a token a second is no engine, and faster than ten million a broken clock."""
LINK_BYTES_PER_S = 1e9
"""Before anything was reported: shared memory or a 10 GbE link."""
LINK_BOUNDS = (1e5, 1e13)
"""A modem, and ten times eight 400 Gb NICs."""
OVERHEAD_NS = 10_000_000
"""Harden, grant and the read's set-up before anything was reported; mostly hidden behind the HTTP
request."""
WAIT_MOST_NS = 5 * SECOND
"""The guard: a grant that takes longer is none."""
TURN_NS = 5 * SECOND
"""How long a place at decode is taken by one turn, before one has ended."""
TURN_MOST_NS = 600 * SECOND
"""A turn that nobody ends is abandoned then."""
NEW_TOKENS = 512.0
"""What a turn adds to its conversation where its caller says nothing, before legs were seen."""
PREFILL_SAMPLE_TOKENS = 64
LINK_SAMPLE_BYTES = 8 << 20
MISS_STEP = 4.0
"""So far a leg moves the median of what is missed: a hundred legs are enough to find it."""
MISS_MOST = 4_096.0
SMOOTHING = 0.25
"""Weight of a new sample: follows a change within about eight samples."""
OUTLIER = 8.0
"""A sample counts as this many times the rate at most, and as no less than this part of it."""
FAR_NS = 86_400 * SECOND
"""A day: what is predicted to take longer is not told apart, whatever was asked or reported."""
IDLE_NS = 3 * SECOND
"""Three heartbeats. A leg that was given longer ago, to a worker that says that it has nothing to
do, never came there or has ended without a word: its gateway has died."""
LEGS_MOST = 1_024
"""Legs of a worker that are told apart: as many as it runs at once (`Limits.turns_per_worker`). Of
more, the oldest will not be heard of."""
LOADING = 2
"""Requests that an engine calls waiting while their KV is moved in; so many, and a quarter of those
that run, are no queue for a place."""


def _idle(worker: Worker) -> bool:
    """Whether a worker's heartbeat says that it has no request at all."""
    pool = worker.pool  # all zero until the first heartbeat
    return bool(pool.total_blocks) and not pool.running_requests and not pool.waiting_requests


@dataclass(slots=True)
class Rate:
    """An exponentially weighted mean of amount per second, between a floor and a ceiling. 0 until
    the first sample that is large enough; then whoever asks uses the prior."""

    enough: float
    least: float = 0.0
    most: float = float("inf")
    value: float = 0.0

    def observe(self, amount: float, elapsed_ns: int) -> None:
        """One sample. Too small a sample counts only where it shows that the rate is higher."""
        if amount <= 0 or elapsed_ns <= 0:
            return
        sample = min(max(amount * SECOND / elapsed_ns, self.least), self.most)
        known = self.value
        if amount < self.enough:
            if known and sample > known:
                self.value = min(sample, known * OUTLIER)
            return
        if known:
            sample = min(max(sample, known / OUTLIER), known * OUTLIER)
            sample = known + SMOOTHING * (sample - known)
        self.value = sample


@dataclass(slots=True)
class Wait:
    """An exponentially weighted mean of times, in ns, none longer than `most`, from a prior that
    counts as a sample."""

    value: float
    most: int

    def observe(self, ns: int) -> None:
        """One sample."""
        if ns >= 0:
            self.value += SMOOTHING * (min(ns, self.most) - self.value)


@dataclass(slots=True)
class Backlog:
    """What a worker has been given and has not said that it computed: known at once, where a
    heartbeat is up to a second old. `legs` are tokens and the time of giving by turn token, in
    order; `since_ns` is when it last said that one was done."""

    tokens: float = 0.0
    legs: dict[str, tuple[float, int]] = field(default_factory=dict)
    since_ns: int = 0

    def head(self) -> tuple[float, int]:
        """The leg that is probably being computed: its tokens, and since when."""
        tokens, given_ns = next(iter(self.legs.values()))
        return tokens, max(given_ns, self.since_ns)


@dataclass(slots=True)
class Rates:
    """All that is learned. Sources: `prefill` of LegComputed (and, for a turn that decode computed
    alone, of the gateway's time to first token); `links` of LeaseStopped; `grants` of the time from
    Harden to LeaseHardened; `turns` of BeginTurn to EndTurn; queues of what was given and not yet
    reported as computed, and of heartbeats."""

    prefill: dict[str, Rate] = field(default_factory=dict)
    links: dict[tuple[str, str], Rate] = field(default_factory=dict)
    grants: dict[str, Wait] = field(default_factory=dict)
    turns: dict[str, Wait] = field(default_factory=dict)
    backlogs: dict[str, Backlog] = field(default_factory=dict)
    # Legs that were given and not reported, by turn token.
    given: dict[str, str] = field(default_factory=dict)
    typical: float = 0.0
    """Prompt tokens a second of the workers that reported, in the mean; 0 while none did. What is
    expected of the others: they run the same model, and decode reports none as long as prefill
    computes every prompt."""
    leg_tokens: float = NEW_TOKENS
    """Tokens that a leg computes, in the mean."""
    missed: float = 0.0
    """Tokens that a leg with a known prompt and something to reuse computes beyond what was
    predicted, in the median: clients render answers otherwise than they were generated, and the
    last block is never reused. The median, since some legs miss everything."""

    # -- reports -------------------------------------------------------------------------------
    def observe_prefill(self, worker_id: str, tokens: int, elapsed_ns: int) -> None:
        """A worker computed so many prompt tokens."""
        rate = self.prefill.get(worker_id)
        if rate is None:
            rate = self.prefill[worker_id] = Rate(PREFILL_SAMPLE_TOKENS, *PREFILL_BOUNDS)
        rate.observe(tokens, elapsed_ns)
        if tokens > 0 and elapsed_ns > 0:
            self.leg_tokens += SMOOTHING * (tokens - self.leg_tokens)
            self.typical = self.typical or rate.value
            self.typical += SMOOTHING * (rate.value - self.typical)

    def observe_transfer(self, source: str, destination: str, size: int, elapsed_ns: int) -> None:
        """So many bytes were moved."""
        rate = self.links.get((source, destination))
        if rate is None:
            rate = self.links[source, destination] = Rate(LINK_SAMPLE_BYTES, *LINK_BOUNDS)
        rate.observe(size, elapsed_ns)

    def observe_grant(self, source: str, wait_ns: int) -> None:
        """A source took so long to hold a range."""
        wait = self.grants.get(source)
        if wait is None:
            wait = self.grants[source] = Wait(OVERHEAD_NS, WAIT_MOST_NS)
        wait.observe(wait_ns)

    def observe_turn(self, decode: str, elapsed_ns: int) -> None:
        """A turn had a place at decode for so long."""
        wait = self.turns.get(decode)
        if wait is None:
            wait = self.turns[decode] = Wait(TURN_NS, TURN_MOST_NS)
        wait.observe(elapsed_ns)

    def give(self, token: str, worker_id: str, tokens: float, now_ns: int) -> None:
        """A leg with so many tokens to compute is on its way to a worker."""
        backlog = self.backlogs.get(worker_id)
        if backlog is None:
            backlog = self.backlogs[worker_id] = Backlog()
        backlog.tokens += tokens
        backlog.legs[token] = (tokens, now_ns)
        self.given[token] = worker_id
        if len(backlog.legs) > LEGS_MOST:
            oldest = next(iter(backlog.legs))
            backlog.tokens -= backlog.legs.pop(oldest)[0]
            self.given.pop(oldest, None)

    def observe_miss(self, tokens: float) -> None:
        """A leg computed so many tokens more than was predicted (or fewer)."""
        if tokens:
            step = MISS_STEP if tokens > 0 else -MISS_STEP
            self.missed = min(max(self.missed + step, -MISS_MOST), MISS_MOST)

    def done(self, token: str, now_ns: int) -> float:
        """It was computed, or will not be. How many tokens were predicted; 0 where it is not
        known."""
        backlog = self.backlogs.get(self.given.pop(token, ""))
        leg = backlog.legs.pop(token, None) if backlog is not None else None
        if backlog is None or leg is None:
            return 0.0
        # Sums of floats do not come back to 0 by themselves.
        backlog.tokens = max(0.0, backlog.tokens - leg[0]) if backlog.legs else 0.0
        backlog.since_ns = now_ns
        return leg[0]

    def forget_worker(self, worker_id: str) -> None:
        """A worker is no longer listed."""
        for table in (self.prefill, self.grants, self.turns, self.backlogs):
            table.pop(worker_id, None)
        for pair in [pair for pair in self.links if worker_id in pair]:
            del self.links[pair]

    # -- what is known -------------------------------------------------------------------------
    def prefill_rate(self, worker_id: str) -> float:
        """Prompt tokens a second; 0 while nothing was measured."""
        rate = self.prefill.get(worker_id)
        return rate.value if rate is not None else 0.0

    def link_rate(self, source: str, destination: str) -> float:
        """Bytes a second; 0 while nothing was measured."""
        rate = self.links.get((source, destination))
        return rate.value if rate is not None else 0.0

    def computes_ns(self, worker_id: str, tokens: float) -> int:
        """How long a worker takes to compute so many prompt tokens."""
        rate = self.prefill_rate(worker_id) or self.typical or PREFILL_TOKENS_PER_S
        ns = tokens * SECOND / rate
        return int(min(ns, FAR_NS))

    def moves_ns(self, source: Worker, destination: str, num_blocks: float) -> int:
        """How long it takes to move so many blocks, with the wait for the grant."""
        name = source.ref.worker_id
        link = self.link_rate(name, destination) or LINK_BYTES_PER_S
        wait = self.grants.get(name)
        overhead = wait.value if wait is not None else OVERHEAD_NS
        return int(min(overhead + num_blocks * source.bytes_per_block * SECOND / link, FAR_NS))

    def queue_ns(self, worker: Worker, now_ns: int) -> int:
        """How long a prompt that comes now waits for what a worker has to compute before it. One
        that takes longer than was predicted (its history was rewritten) is expected to go on for as
        long as it is late already: nothing better is known of it."""
        name = worker.ref.worker_id
        backlog = self.backlogs.get(name)
        # Requests that wait there and are no turns of ours, by the last heartbeat.
        others = worker.pool.waiting_requests
        queue_ns = 0
        if backlog is not None and backlog.legs:
            others -= len(backlog.legs)
            tokens, since_ns = backlog.head()
            since_ns = max(0, now_ns - since_ns)
            if since_ns < IDLE_NS or not _idle(worker):
                takes_ns = self.computes_ns(name, tokens)
                queue_ns = self.computes_ns(name, backlog.tokens) - takes_ns
                queue_ns += abs(takes_ns - since_ns)
        if others > LOADING:
            queue_ns += self.computes_ns(name, others * self.leg_tokens)
        return queue_ns

    def decode_queue_ns(self, worker: Worker) -> int:
        """How long a request waits for a place at decode: those before it, by the last heartbeat,
        and a place comes free as often as the running ones end."""
        pool = worker.pool
        waiting = pool.waiting_requests - LOADING - pool.running_requests // 4
        if waiting <= 0:
            return 0
        wait = self.turns.get(worker.ref.worker_id)
        turn_ns = wait.value if wait is not None else TURN_NS
        return int(waiting * turn_ns / max(1, pool.running_requests))
