"""Facts become log lines and Prometheus metrics. Neither ever has a prompt or a turn token."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kvshuttle.controlplane import __version__
from kvshuttle.controlplane.model.session import Usage
from kvshuttle.controlplane.model.terms import TransferStats

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.effects import Fact

__all__ = ["Metrics"]

log = structlog.get_logger("kvshuttle.controlplane")

QUIET = frozenset(
    {
        "eager_return_begun",
        "eager_return_skipped",
        "prefix_wanted",
        "leg_computed",
        "lease_denied",
        "lease_granted",
        "lease_made",
        "leases_extended",
        "replica_changed",
        "transfer",
        "turn_begun",
        "turn_ended",
    }
)
"""Facts of every turn: at level debug, so that a busy control plane's log stays readable."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
RPC_SECONDS = (0.00025, 0.0005, *SECONDS)
SIZES = tuple(float(1 << power) for power in range(16, 38, 2))
"""From 64 KiB, a block of a small model, to 64 GiB, a pool."""


LINES_A_SECOND = 100
"""Lines in the log of one kind of fact: a line costs as much as ending a lease, and when twenty
thousand leases expire at once the log would be what grants wait for. The next line of the kind says
how many were left out (`left_out`); metrics count all. At level debug all are said."""


class _Lines:
    """How many lines of a kind the last second had."""

    __slots__ = ("_began_s", "_left_out", "_said")

    def __init__(self) -> None:
        self._began_s = -1.0
        self._said = self._left_out = 0

    def one_more(self, now_s: float) -> int | None:
        """None: leave it out. Else how many were left out since the last one."""
        if now_s - self._began_s >= 1:
            self._began_s, self._said = now_s, 0
        if self._said >= LINES_A_SECOND:
            self._left_out += 1
            return None
        self._said += 1
        left_out, self._left_out = self._left_out, 0
        return left_out


LOST = ("BROKEN", "CLOSED", "MALFORMED", "SILENT", "STALLED")
"""Why streams of agents are lost."""


class Metrics:
    """An `Observer` with a registry of its own, so that two servers in one process do not mix.

    Counters of what should never happen begin at 0, for all labels: of a series that comes to be
    with its first event, Prometheus sees no increase.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[object, ...], Any] = {}
        self._talkative = log.is_enabled_for(logging.DEBUG)
        self._lines: defaultdict[str, _Lines] = defaultdict(_Lines)
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        self.build = Gauge(
            "kvshuttle_build_info", "Always 1; says what runs", ["version"], registry=r
        )
        self.build.labels(__version__).set(1)
        self.begun = Counter(
            "kvshuttle_turns_begun",
            "Turns begun, by how KV of earlier turns reaches prefill and why",
            ["return_mode", "reason"],
            registry=r,
        )
        self.forward = Counter(
            "kvshuttle_turns_forward",
            "Turns begun, by which side is to move KV from prefill to decode, and why",
            ["forward_mode", "reason"],
            registry=r,
        )
        self.ended = Counter(
            "kvshuttle_turns",
            "Turns ended",
            ["outcome", "return_mode"],
            registry=r,
        )
        self.tokens = Counter(
            "kvshuttle_prompt_tokens",
            "Prompt tokens of legs, by where their KV came from: returned (from decode), "
            "forwarded (from prefill), reused (own cache), recomputed",
            ["leg", "source"],
            registry=r,
        )
        self.output_tokens = Counter(
            "kvshuttle_output_tokens", "Tokens generated, as gateways report", registry=r
        )
        self.ttft = Histogram(
            "kvshuttle_time_to_first_token_seconds",
            "As gateways report",
            ["return_mode"],
            buckets=SECONDS,
            registry=r,
        )
        self.transfers = Counter(
            "kvshuttle_transfers", "Transfers by outcome", ["direction", "outcome"], registry=r
        )
        self.bytes = Counter(
            "kvshuttle_transfer_bytes", "Bytes moved, counted by NIXL", ["direction"], registry=r
        )
        self.size = Histogram(
            "kvshuttle_transfer_size_bytes",
            "Bytes of one transfer",
            ["direction"],
            buckets=SIZES,
            registry=r,
        )
        self.seconds = Histogram(
            "kvshuttle_transfer_seconds",
            "From posting a transfer to its completion",
            ["direction"],
            buckets=SECONDS,
            registry=r,
        )
        self.wait = Histogram(
            "kvshuttle_transfer_wait_seconds",
            "From a request's first look for its lease until it could run",
            ["direction"],
            buckets=SECONDS,
            registry=r,
        )
        self.grant = Histogram(
            "kvshuttle_grant_seconds",
            "From asking a source to harden until the grant",
            ["direction"],
            buckets=SECONDS,
            registry=r,
        )
        self.leases_made = Counter(
            "kvshuttle_leases_made",
            "Leases made: their source was asked to hold",
            ["direction"],
            registry=r,
        )
        self.leases_granted = Counter(
            "kvshuttle_leases_granted",
            "Leases granted: their destination may read",
            ["direction"],
            registry=r,
        )
        self.leases_ended = Counter(
            "kvshuttle_leases_ended",
            "Leases ended, by state and reason",
            ["direction", "state", "reason"],
            registry=r,
        )
        self.denied = Counter(
            "kvshuttle_leases_denied",
            "Leases that were not made, so that a turn recomputes, by reason",
            ["direction", "reason"],
            registry=r,
        )
        self.eager_begun = Counter(
            "kvshuttle_eager_returns_begun",
            "Returns begun as soon as a turn had ended, before anybody asked",
            registry=r,
        )
        self.prefixes = Counter(
            "kvshuttle_prefixes_wanted",
            "Requests that looked for KV of other sessions of their tenant, by what came of it",
            ["reason"],
            registry=r,
        )
        self.placed = Counter(
            "kvshuttle_turns_placed",
            "Turns begun, by why they run where they do",
            ["placement"],
            registry=r,
        )
        self.eager_skipped = Counter(
            "kvshuttle_eager_returns_skipped",
            "Turns whose KV was not returned before anybody asked, by reason",
            ["reason"],
            registry=r,
        )
        self.workers_lost = Counter(
            "kvshuttle_workers_lost",
            "Agents' streams lost, by reason",
            ["worker_id", "reason"],
            registry=r,
        )
        self.relieved = Counter(
            "kvshuttle_relieved_blocks",
            "Blocks that were held for sessions that were away, and turned soft because their "
            "worker held too many or had hardly one free",
            ["worker_id"],
            registry=r,
        )
        self.extended = Counter(
            "kvshuttle_leases_extended",
            "Leases extended because their destination needs them",
            ["worker_id"],
            registry=r,
        )
        self.refused = Counter(
            "kvshuttle_rpc_errors", "Calls that failed", ["method", "reason"], registry=r
        )
        self.calls = Histogram(
            "kvshuttle_rpc_seconds",
            "Unary calls, and operations on a stream of turns, from their arrival to their answer",
            ["method"],
            buckets=RPC_SECONDS,
            registry=r,
        )
        self.lag = Histogram(
            "kvshuttle_loop_lag_seconds",
            "How much later than asked the event loop woke up: above some ms it is too busy",
            buckets=RPC_SECONDS,
            registry=r,
        )
        self.events_dropped = Counter(
            "kvshuttle_agent_events_dropped",
            "Events of agents that were dropped: MALFORMED, or INTERNAL for a defect here",
            ["reason"],
            registry=r,
        )
        for reason in ("MALFORMED", "INTERNAL"):
            self.events_dropped.labels(reason)
        self.commit = Histogram(
            "kvshuttle_store_commit_seconds",
            "One commit, synced to the device",
            buckets=SECONDS,
            registry=r,
        )
        self.records = Counter("kvshuttle_store_records", "Records committed", registry=r)

    def committed(self, records: int, seconds: float) -> None:
        """A commit to a durable store."""
        self.commit.observe(seconds)
        self.records.inc(records)

    def serve(self, method: str) -> None:
        """A method may be called from now on."""
        for reason in ("INTERNAL", "STORE_FAILED"):
            self.refused.labels(method, reason)

    def late(self, seconds: float) -> None:
        """The event loop woke up so much later than asked."""
        self.lag.observe(seconds)

    def _child(self, metric: Any, *labels: object) -> Any:
        """`metric.labels(*labels)`, which costs more than all else that a fact does."""
        found = self._children.get((metric, *labels))
        if found is None:
            found = self._children[(metric, *labels)] = metric.labels(*labels)
        return found

    def fact(self, fact: Fact) -> None:
        """Something happened, and is durable."""
        v = fact.values
        match fact.name:
            case "turn_begun":
                self._child(self.begun, v["return_mode"], v["reason"]).inc()
                self._child(self.placed, v["placement"]).inc()
                self._child(self.forward, v["forward_mode"], v["forward_reason"]).inc()
            case "turn_ended":
                self._child(self.ended, v["outcome"], v["return_mode"]).inc()
                usage = v.pop("usage", None)
                if isinstance(usage, Usage):
                    self.output_tokens.inc(usage.output_tokens)
                    if usage.ttft_ns:
                        self._child(self.ttft, v["return_mode"]).observe(usage.ttft_ns / 1e9)
                    v |= {
                        "prompt_tokens": usage.prompt_tokens,
                        "cached_tokens": usage.cached_tokens,
                        "output_tokens": usage.output_tokens,
                    }
            case "lease_made":
                self._child(self.leases_made, v["direction"]).inc()
            case "lease_granted":
                self._child(self.leases_granted, v["direction"]).inc()
                self._child(self.grant, v["direction"]).observe(_number(v["wait_ns"]) / 1e9)
            case "eager_return_begun":
                self.eager_begun.inc()
            case "prefix_wanted":
                self._child(self.prefixes, v["reason"]).inc()
            case "eager_return_skipped":
                self._child(self.eager_skipped, v["reason"]).inc()
            case "worker_connected":
                for reason in LOST:
                    self._child(self.workers_lost, v["worker_id"], reason)
            case "worker_lost":
                self._child(self.workers_lost, v["worker_id"], _word(v["reason"])).inc()
            case "worker_relieved":
                self._child(self.relieved, v["worker_id"]).inc(_number(v["blocks"]))
            case "lease_denied":
                self._child(self.denied, v["direction"], v["reason"]).inc()
            case "lease_ended":
                self._child(self.leases_ended, v["direction"], v["state"], _word(v["reason"])).inc()
            case "leases_extended":
                self._child(self.extended, v["worker_id"]).inc(_number(v["leases"]))
            case "transfer":
                self._transfer(v)
            case "leg_computed":
                moved = "returned" if v["leg"] == "PREFILL" else "forwarded"
                for source, name in (
                    (moved, "external_tokens"),
                    ("reused", "local_hit_tokens"),
                    ("recomputed", "computed_tokens"),
                ):
                    self._child(self.tokens, v["leg"], source).inc(_number(v[name]))
        if fact.name in QUIET or v.get("state") == "COMPLETED":
            if self._talkative:
                log.debug(fact.name, **v)
        elif fact.name in ("worker_lost", "worker_fenced", "epoch_raised"):
            log.warning(fact.name, **v)
        elif self._talkative:
            log.info(fact.name, **v)
        elif (left_out := self._lines[fact.name].one_more(time.monotonic())) is not None:
            if left_out:
                v["left_out"] = left_out
            log.info(fact.name, **v)

    def _transfer(self, v: dict[str, object]) -> None:
        stats = v.pop("stats")
        assert isinstance(stats, TransferStats)
        direction = v["direction"]
        self._child(self.transfers, direction, v["outcome"]).inc()
        if stats.bytes:
            self._child(self.bytes, direction).inc(stats.bytes)
            self._child(self.size, direction).observe(stats.bytes)
            self._child(self.seconds, direction).observe(stats.transfer_ns / 1e9)
        if stats.wait_ns:
            self._child(self.wait, direction).observe(stats.wait_ns / 1e9)
        v |= {
            "blocks": stats.blocks,
            "tokens": stats.tokens,
            "bytes": stats.bytes,
            "transfer_ns": stats.transfer_ns,
        }


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return value


def _word(reason: object) -> str:
    """An operator's free text must not become a label of its own."""
    text = str(reason)
    plain = text.replace("_", "")
    return text if not text or (plain.isalnum() and text.isupper()) else "OTHER"
