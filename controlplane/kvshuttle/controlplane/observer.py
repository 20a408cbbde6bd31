"""Facts become log lines and Prometheus metrics. Neither ever has a prompt or a turn token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvshuttle.controlplane.model.admission import quarantine_full
from kvshuttle.controlplane.model.session import Usage
from kvshuttle.controlplane.model.terms import TransferStats, WorkerState

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable
    from wsgiref.simple_server import WSGIServer

    from kvshuttle.controlplane.model.effects import Fact
    from kvshuttle.controlplane.model.registry import Registry

__all__ = ["Metrics", "MetricsServer"]

log = structlog.get_logger("kvshuttle.controlplane")

QUIET = frozenset(
    {
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


class Metrics:
    """An `Observer` with a registry of its own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.begun = Counter(
            "kvshuttle_turns_begun",
            "Turns begun, by how KV of earlier turns reaches prefill and why",
            ["return_mode", "reason"],
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
        self.events_dropped = Counter(
            "kvshuttle_agent_events_dropped",
            "Events of agents that were dropped: MALFORMED, or INTERNAL for a defect here",
            ["reason"],
            registry=r,
        )
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

    def fact(self, fact: Fact) -> None:
        """Something happened, and is durable."""
        v = fact.values
        match fact.name:
            case "turn_begun":
                self.begun.labels(v["return_mode"], v["reason"]).inc()
            case "turn_ended":
                self.ended.labels(v["outcome"], v["return_mode"]).inc()
                usage = v.pop("usage", None)
                if isinstance(usage, Usage):
                    self.output_tokens.inc(usage.output_tokens)
                    if usage.ttft_ns:
                        self.ttft.labels(v["return_mode"]).observe(usage.ttft_ns / 1e9)
                    v |= {
                        "prompt_tokens": usage.prompt_tokens,
                        "cached_tokens": usage.cached_tokens,
                        "output_tokens": usage.output_tokens,
                    }
            case "lease_granted":
                self.grant.labels(v["direction"]).observe(_number(v["wait_ns"]) / 1e9)
            case "worker_relieved":
                self.relieved.labels(_word(v["worker_id"])).inc(_number(v["blocks"]))
            case "lease_denied":
                self.denied.labels(v["direction"], v["reason"]).inc()
            case "lease_ended":
                self.leases_ended.labels(v["direction"], v["state"], _word(v["reason"])).inc()
            case "leases_extended":
                self.extended.labels(v["worker_id"]).inc(_number(v["leases"]))
            case "transfer":
                self._transfer(v)
            case "leg_computed":
                moved = "returned" if v["leg"] == "PREFILL" else "forwarded"
                for source, name in (
                    (moved, "external_tokens"),
                    ("reused", "local_hit_tokens"),
                    ("recomputed", "computed_tokens"),
                ):
                    self.tokens.labels(v["leg"], source).inc(_number(v[name]))
        if fact.name in QUIET or v.get("state") == "COMPLETED":
            log.debug(fact.name, **v)
        elif fact.name in ("worker_lost", "worker_fenced", "epoch_raised"):
            log.warning(fact.name, **v)
        else:
            log.info(fact.name, **v)

    def _transfer(self, v: dict[str, object]) -> None:
        stats = v.pop("stats")
        assert isinstance(stats, TransferStats)
        direction = v["direction"]
        self.transfers.labels(direction, v["outcome"]).inc()
        if stats.bytes:
            self.bytes.labels(direction).inc(stats.bytes)
            self.seconds.labels(direction).observe(stats.transfer_ns / 1e9)
        if stats.wait_ns:
            self.wait.labels(direction).observe(stats.wait_ns / 1e9)
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


class _Now:
    """What is true at the moment of a scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def read(self) -> list[Metric]:
        """On the event loop."""
        state = self._registry.state
        epoch = GaugeMetricFamily("kvshuttle_epoch", "The control plane's term", state.epoch)
        sessions = GaugeMetricFamily("kvshuttle_sessions", "Sessions", labels=["state"])
        sessions.add_metric(["active"], state.active_sessions)
        sessions.add_metric(["ended"], len(state.sessions) - state.active_sessions)
        running = GaugeMetricFamily("kvshuttle_turns_running", "Turns that run", len(state.turns))
        leases = GaugeMetricFamily("kvshuttle_leases", "Open leases", labels=["state"])
        for lease_state, count in state.leases.count_by_state().items():
            leases.add_metric([lease_state.name.lower()], count)
        workers = GaugeMetricFamily("kvshuttle_workers", "Workers", labels=["state"])
        replicas = GaugeMetricFamily("kvshuttle_replicas", "Replicas", labels=["worker_id"])
        pool = GaugeMetricFamily(
            "kvshuttle_pool_blocks", "Blocks of a worker's pool", labels=["worker_id", "kind"]
        )
        holds = GaugeMetricFamily("kvshuttle_holds", "Holds on blocks", labels=["worker_id"])
        leased = GaugeMetricFamily(
            "kvshuttle_leased_blocks", "Blocks of a worker that leases hold", labels=["worker_id"]
        )
        quarantine = GaugeMetricFamily(
            "kvshuttle_quarantine_full",
            "1 where so much is in quarantine that nothing is granted to the worker: alert on it",
            labels=["worker_id"],
        )
        rate = GaugeMetricFamily(
            "kvshuttle_prefill_tokens_per_second", "Learned", labels=["worker_id"]
        )
        fallbacks = CounterMetricFamily(
            "kvshuttle_fallbacks",
            "Legs that recomputed although a transfer was hoped for",
            labels=["worker_id", "reason"],
        )
        for worker_state in WorkerState:
            count = sum(w.state is worker_state for w in state.workers.values())
            workers.add_metric([worker_state.name.lower()], count)
        for name, worker in state.workers.items():
            replicas.add_metric([name], state.replicas.count_of[name])
            for kind in ("total", "free", "held", "quarantined"):
                pool.add_metric([name, kind], getattr(worker.pool, f"{kind}_blocks"))
            holds.add_metric([name], worker.pool.holds)
            held = state.ledger.leased.get(worker.ref)
            leased.add_metric([name], held.blocks.total if held is not None else 0)
            quarantine.add_metric([name], quarantine_full(self._registry.limits, worker))
            rate.add_metric([name], self._registry.planner.prefill_rate(name))
            for reason, value in worker.counters.fallbacks:
                fallbacks.add_metric([name, reason], value)
        return [
            epoch,
            sessions,
            running,
            leases,
            workers,
            replicas,
            pool,
            holds,
            leased,
            quarantine,
            rate,
            fallbacks,
        ]


class MetricsServer:
    """`/metrics` over HTTP, from a thread of its own; the state is read on the event loop."""

    def __init__(self, metrics: Metrics, registry: Registry, host: str, port: int) -> None:
        self._now = _Now(registry)
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._closed = False
        metrics.registry.register(self)
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, addr=host, registry=metrics.registry)
        self.port: int = self._server.server_port

    def describe(self) -> Iterable[Metric]:
        """Nothing: asked at registration, on the loop, where `collect` would wait for itself."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Called on the HTTP server's thread."""
        if self._closed:
            return []
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(timeout=5)

    async def _read(self) -> list[Metric]:
        return self._now.read()

    async def close(self) -> None:
        """Ends the HTTP server."""
        self._closed = True
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)
        self._metrics.registry.unregister(self)
