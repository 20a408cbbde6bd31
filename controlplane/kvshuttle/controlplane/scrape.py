"""What is true at the moment of a scrape, as Prometheus is told it."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import structlog
from cryptography import x509
from prometheus_client import make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvshuttle.controlplane.model.admission import quarantine_full
from kvshuttle.controlplane.model.terms import LeaseState, WorkerState
from kvshuttle.controlplane.scrape_http import ScrapeServer
from kvshuttle.controlplane.store.files import log_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from kvshuttle.controlplane.model.registry import Registry
    from kvshuttle.controlplane.observer import Metrics

__all__ = ["Files", "MetricsServer", "Now"]

log = structlog.get_logger("kvshuttle.controlplane")

NS = 1e9

STATE_S = 5.0
"""For the event loop to read the state, which takes milliseconds: half of what a scrape may take,
so that the scraper is told."""


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvshuttle_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvshuttle_{name}", text, labels=labels)


class Now:
    """Reads the state, on the event loop. `streams` counts what clients hold open, by kind."""

    def __init__(
        self, registry: Registry, streams: Mapping[str, Callable[[], int]] | None = None
    ) -> None:
        self._registry = registry
        self._streams = streams or {}

    def read(self) -> list[Metric]:
        """Every gauge, and the counters that agents report."""
        return [*self._cluster(), *self._workers()]

    def _cluster(self) -> list[Metric]:
        state = self._registry.state
        epoch = _gauge("epoch", "The control plane's term")
        epoch.add_metric([], state.epoch)
        sessions = _gauge("sessions", "Sessions", "state")
        sessions.add_metric(["active"], state.active_sessions)
        sessions.add_metric(["ended"], len(state.sessions) - state.active_sessions)
        running = _gauge("turns_running", "Turns that run")
        running.add_metric([], len(state.turns))
        leases = _gauge(
            "leases", "Open leases; pending: their source has not said yet that it holds", "state"
        )
        counts = state.leases.count_by_state()
        for lease_state in (LeaseState.PENDING, LeaseState.GRANTED, LeaseState.ACTIVE):
            leases.add_metric([lease_state.name.lower()], counts.get(lease_state, 0))
        workers = _gauge("workers", "Workers", "state")
        for worker_state in WorkerState:
            count = sum(w.state is worker_state for w in state.workers.values())
            workers.add_metric([worker_state.name.lower()], count)
        streams = _gauge("streams", "Streams that clients hold open", "kind")
        for kind, count_of in self._streams.items():
            streams.add_metric([kind], count_of())
        prefixes = _gauge("prefix_hashes", "Hashes by which sessions find each other's prefixes")
        prefixes.add_metric([], state.prefixes.size)
        return [epoch, sessions, running, leases, workers, streams, prefixes]

    def _workers(self) -> list[Metric]:
        state = self._registry.state
        info = _gauge(
            "worker_info",
            "Always 1; says what a worker is",
            *("worker_id", "role", "vllm_version", "agent_version", "nixl_backend"),
        )
        stands = _gauge(
            "worker_state", "1 for the state in which a worker is, else 0", "worker_id", "state"
        )
        heard = _gauge(
            "worker_heard_timestamp_seconds",
            "When a worker was last heard, Unix time",
            "worker_id",
        )
        turns = _gauge("worker_turns", "Turns that run on a worker", "worker_id")
        requests = _gauge(
            "worker_requests",
            "Requests of the engine, as its last heartbeat said",
            *("worker_id", "state"),
        )
        block_bytes = _gauge("block_bytes", "Bytes of KV in one block", "worker_id")
        replicas = _gauge("replicas", "Replicas", "worker_id")
        pool = _gauge("pool_blocks", "Blocks of a worker's pool", "worker_id", "kind")
        holds = _gauge("holds", "Holds on blocks", "worker_id")
        leased = _gauge("leased_blocks", "Blocks of a worker that leases hold", "worker_id")
        unstopped = _gauge(
            "unstopped_leases",
            "Ended leases whose reader has not said that it stopped, so that it may still read; "
            "counted at their source and at their reader",
            "worker_id",
        )
        quarantine = _gauge(
            "quarantine_full",
            "1 where so much is in quarantine that nothing is granted to the worker: alert on it",
            "worker_id",
        )
        rate = _gauge(
            "prefill_tokens_per_second", "Prompt tokens a second, learned; 0: not yet", "worker_id"
        )
        eager_open = _gauge("eager_returns_open", "Eager returns under way", "worker_id")
        eager_waiting = _gauge(
            "eager_returns_waiting", "Eager returns that wait for a place", "worker_id"
        )
        transfers = _counter(
            "worker_transfers", "Transfers that a worker read and published", "worker_id"
        )
        moved = _counter(
            "worker_transfer_bytes",
            "Bytes that a worker read, counted by NIXL",
            *("worker_id", "direction"),
        )
        tokens = _counter(
            "worker_prompt_tokens",
            "Prompt tokens of a worker's legs by where their KV came from: forwarded, returned, "
            "local_hit, computed; parts of these: eager (returned before any request), pushed",
            *("worker_id", "source"),
        )
        fallbacks = _counter(
            "fallbacks",
            "Legs that recomputed although a transfer was hoped for",
            *("worker_id", "reason"),
        )
        for name, worker in state.workers.items():
            info.add_metric(
                [
                    name,
                    worker.role.name.lower(),
                    worker.vllm_version,
                    worker.agent_version,
                    worker.nixl_backend,
                ],
                1,
            )
            for worker_state in WorkerState:
                stands.add_metric([name, worker_state.name.lower()], worker.state is worker_state)
            heard.add_metric([name], worker.heard_ns / NS)
            turns.add_metric([name], state.turns_on[name])
            for kind in ("running", "waiting"):
                requests.add_metric([name, kind], getattr(worker.pool, f"{kind}_requests"))
            block_bytes.add_metric([name], worker.bytes_per_block)
            replicas.add_metric([name], state.replicas.count_of[name])
            for kind in ("total", "free", "held", "quarantined"):
                pool.add_metric([name, kind], getattr(worker.pool, f"{kind}_blocks"))
            holds.add_metric([name], worker.pool.holds)
            held = state.ledger.leased.get(worker.ref)
            leased.add_metric([name], held.blocks.total if held is not None else 0)
            unstopped.add_metric([name], len(state.unstopped.get(name, ())))
            quarantine.add_metric([name], quarantine_full(self._registry.limits, worker))
            rate.add_metric([name], self._registry.planner.rates.prefill_rate(name))
            eager_open.add_metric([name], state.eager_on[name])
            eager_waiting.add_metric([name], len(state.eager_waiting.get(name, ())))
            counters = worker.counters
            transfers.add_metric([name], counters.transfers_completed)
            moved.add_metric([name, "forward"], counters.forward_bytes)
            moved.add_metric([name, "return"], counters.return_bytes)
            for source, value in (
                ("forwarded", counters.forward_tokens),
                ("pushed", counters.pushed_tokens),
                ("returned", counters.returned_tokens),
                ("eager", counters.eager_tokens),
                ("local_hit", counters.local_hit_tokens),
                ("computed", counters.computed_tokens),
            ):
                tokens.add_metric([name, source], value)
            for reason, value in counters.fallbacks:
                fallbacks.add_metric([name, reason], value)
        return [
            *(info, stands, heard, turns, requests, block_bytes, replicas, pool, holds, leased),
            *(unstopped, quarantine, rate, eager_open, eager_waiting),
            *(transfers, moved, tokens, fallbacks),
        ]


class Files:
    """The store's size and the certificates' ends, read from the disk: not on the event loop.
    `moved` tells whether the store's file is no longer there, which is logged once."""

    def __init__(
        self,
        store: Path | None,
        certificates: Mapping[str, Path | None],
        moved: Callable[[], bool] | None = None,
    ) -> None:
        self._store = store
        self._certificates = certificates
        self._moved = moved
        self._told = False

    def _look_for_store(self) -> None:
        if self._moved is None:
            return
        try:
            moved = self._moved()
        except OSError:
            return
        if moved and not self._told:
            log.critical(
                "store_moved",
                path=str(self._store),
                remedy="move the file back to this path, beside its log, before the control plane "
                "stops: it would start without what it has acknowledged; if the file is deleted, "
                "that is lost",
            )
        self._told = moved

    def read(self) -> list[Metric]:
        """A file that is not there or cannot be read has no series."""
        self._look_for_store()
        size = _gauge("store_size_bytes", "Size of the store's file and of its log", "file")
        room = _gauge("store_free_bytes", "Bytes free on the store's device")
        if self._store is not None:
            for kind, path in (
                ("database", self._store),
                ("log", log_path(self._store)),
            ):
                try:
                    size.add_metric([kind], path.stat().st_size)
                except OSError:
                    continue
            try:
                device = os.statvfs(self._store.parent)
                room.add_metric([], device.f_bavail * device.f_frsize)
            except OSError:
                pass
        ends = _gauge(
            "certificate_not_after_timestamp_seconds",
            "End of a certificate's validity, Unix time: the earliest of the file",
            "certificate",
        )
        for name, file in self._certificates.items():
            if file is None:
                continue
            try:
                found = x509.load_pem_x509_certificates(file.read_bytes())
            except (OSError, ValueError):
                continue
            ends.add_metric([name], min(one.not_valid_after_utc.timestamp() for one in found))
        return [size, room, ends]


class MetricsServer:
    """`/metrics` over HTTP, from a thread of its own; the state is read on the event loop."""

    def __init__(self, metrics: Metrics, now: Now, files: Files, host: str, port: int) -> None:
        self._now = now
        self._files = files
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._closed = False
        metrics.registry.register(self)
        self._page: WSGIApplication = make_wsgi_app(metrics.registry)
        self._server = ScrapeServer(host, port)
        self._server.set_app(self._answer)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return self._page(environ, start_response)
        except TimeoutError:
            log.warning("scrape_too_late", seconds=STATE_S)
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the control plane did not read its state in time: it is busy; try again\n"]

    def describe(self) -> Iterable[Metric]:
        """Nothing: asked at registration, on the loop, where `collect` would wait for itself."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Called on a thread of the HTTP server's. TimeoutError when the event loop is too busy."""
        if self._closed:
            return []
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        try:
            state = reading.result(timeout=STATE_S)
        except TimeoutError:
            reading.cancel()
            raise
        return [*state, *self._files.read()]

    async def _read(self) -> list[Metric]:
        return self._now.read()

    async def close(self) -> None:
        """Ends the HTTP server."""
        self._closed = True
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)
        self._metrics.registry.unregister(self)
