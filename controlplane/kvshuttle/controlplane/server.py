"""Puts the parts together: store, registry, services, two listeners."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from google.protobuf import descriptor_pool
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvshuttle.controlplane import __version__
from kvshuttle.controlplane.auth import Tokens
from kvshuttle.controlplane.clock import Timeline
from kvshuttle.controlplane.model.limits import MICROSECOND, MS, SECOND
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.state import REVISIONS_PER_EPOCH
from kvshuttle.controlplane.observer import Metrics
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.runtime import Runtime
from kvshuttle.controlplane.scrape import Files, MetricsServer, Now
from kvshuttle.controlplane.services.agents import AgentService, Streams
from kvshuttle.controlplane.services.checks import Checks
from kvshuttle.controlplane.services.cluster import About, ClusterService
from kvshuttle.controlplane.services.guard import Guard
from kvshuttle.controlplane.services.leases import LeaseService
from kvshuttle.controlplane.services.operations import Operations
from kvshuttle.controlplane.services.sessions import SessionService
from kvshuttle.controlplane.services.turns import TurnStreams
from kvshuttle.controlplane.services.watch import Hubs
from kvshuttle.controlplane.settings import Settings, SettingsError
from kvshuttle.controlplane.store import MemoryStore, SqliteStore
from kvshuttle.controlplane.traces import ControlTraces
from kvshuttle.tracing import Tracing, TracingError
from kvshuttle.v1 import agent_service_pb2_grpc as agent_grpc
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import lease_service_pb2_grpc as lease_grpc
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.store import Store

__all__ = ["Addresses", "Server", "listener_options"]

log = structlog.get_logger("kvshuttle.controlplane")

API_SERVICES = (
    "kvshuttle.v1.SessionService",
    "kvshuttle.v1.LeaseService",
    "kvshuttle.v1.ClusterService",
)
AGENT_SERVICES = ("kvshuttle.v1.AgentService",)
_KEEPALIVE = (
    # A peer that vanished without a word is noticed in half a minute, on idle streams too.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A watch whose reader only listens is pinged for as long as it lasts, not twice.
    ("grpc.http2.max_pings_without_data", 0),
    # Two processes must not share a port by accident.
    ("grpc.so_reuseport", 0),
)


def listener_options(limits: Limits, message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of a gRPC server; `message_bytes` is the largest request."""
    return (
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        ("grpc.server_handshake_timeout_ms", limits.handshake_timeout_ns // MS),
        ("grpc.max_connection_idle_ms", limits.connection_idle_ns // MS),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """Where the server listens; `metrics` is empty when it is off."""

    api: str
    agent: str
    metrics: str


class Server:
    """One control plane. `limits` overrides what the settings give (tests do that).

    StoreError or SettingsError from `start`; after it, `stop` lets go of everything.
    """

    def __init__(
        self,
        settings: Settings,
        limits: Limits | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self._tracing = tracing
        self._traces: ControlTraces | None = None
        self.limits = limits if limits is not None else settings.limits()
        self.metrics = Metrics()
        self.clock = Timeline()
        self.addresses = Addresses("", "", "")
        self.streams = Streams(self.limits)
        self._stores: list[Store] = []
        self._servers: list[grpc.aio.Server] = []
        self._health: list[Any] = []
        self._turns: TurnStreams | None = None
        self._metrics_server: MetricsServer | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the store, begins a new epoch, and serves."""
        settings = self.settings
        path = settings.store_file()
        store: Store = MemoryStore() if path is None else SqliteStore(path)
        self._stores.append(store)
        snapshot = await asyncio.to_thread(store.load)
        behind_ns = self.clock.not_before(await asyncio.to_thread(snapshot.latest_ns))
        if behind_ns:
            log.warning("clock_behind_store", seconds=behind_ns / SECOND)
        # Nobody remembers which numbers a process before this one gave to boots that may still
        # run, if the store is a copy of an earlier one, or memory: they must not be given again.
        # Counted from the microsecond of the start, numbers never run ahead of the clock.
        numbers = max(snapshot.last_incarnation, self.clock.now_ns() // MICROSECOND)
        snapshot = dataclasses.replace(snapshot, last_incarnation=numbers)
        self.registry = Registry(
            self.limits,
            Planner(self.limits.min_tokens, self.limits.direct_tokens),
            accept_lineage_change=settings.accept_lineage_change or path is None,
        )
        self.hubs = Hubs(self.limits, (snapshot.epoch + 1) * REVISIONS_PER_EPOCH)
        self._traces = self._make_traces()
        self.runtime = Runtime(
            self.registry,
            store,
            self.clock,
            self.streams,
            self.hubs,
            self._traces or self.metrics,
        )
        # Nobody is served before the new epoch is durable: it must never be used twice.
        await self.runtime.apply(
            lambda now: self.registry.start(now, snapshot, f"lineage-{secrets.token_hex(8)}")
        )
        tokens = None
        if settings.tokens_file is not None:
            try:
                tokens = Tokens.load(settings.tokens_file)
            except (OSError, ValueError) as error:
                raise SettingsError(f"tokens_file: {error}") from error
        about = About(self.clock.now_ns(), store.kind, settings.insecure)
        checks = Checks(self.limits)
        api_address, *own = settings.listeners()
        limits = self.limits
        # One port for all has to take agents' inventories.
        most = limits.api_message_bytes if own else limits.agent_message_bytes
        api = self._listener(tokens, most)
        # An agent is known by its certificate only, so a listener of its own has no tokens.
        agents = self._listener(None, limits.agent_message_bytes) if own else api
        agent_grpc.add_AgentServiceServicer_to_server(
            AgentService(
                self.runtime, self.streams, checks, self.limits, self.metrics, self._traces
            ),
            agents,
        )
        operations = Operations(self.runtime, checks, _Tokens(), self._traces)
        self._turns = TurnStreams(self.runtime, operations, limits, self.metrics)
        session_grpc.add_SessionServiceServicer_to_server(
            SessionService(self.runtime, checks, self.hubs.sessions, operations, self._turns), api
        )
        lease_grpc.add_LeaseServiceServicer_to_server(
            LeaseService(self.runtime, checks, self.hubs.leases), api
        )
        cluster_grpc.add_ClusterServiceServicer_to_server(
            ClusterService(self.runtime, checks, about), api
        )
        channelz.add_channelz_servicer(api)
        names = (*API_SERVICES, "grpc.channelz.v1.Channelz")
        await self._describe(api, names if own else (*names, *AGENT_SERVICES))
        # Python's gRPC asks for a certificate or does not; it cannot ask for one and do without.
        bound = self._bind(api, api_address, require_certificate=not own or tokens is None)
        bound_agent = bound
        if own:
            await self._describe(agents, AGENT_SERVICES)
            bound_agent = self._bind(agents, own[0], require_certificate=True)
        self.addresses = Addresses(bound, bound_agent, self._serve_metrics())
        for server in self._servers:
            await server.start()
        self._ticker = asyncio.create_task(self.runtime.run_ticks())
        log.info(
            "listening",
            api=self.addresses.api,
            agent=self.addresses.agent,
            metrics=self.addresses.metrics,
            epoch=self.registry.state.epoch,
            store=store.kind,
            insecure=settings.insecure,
            version=__version__,
            pid=os.getpid(),
        )
        if settings.ready_file is not None:
            self._write_ready(settings.ready_file)

    def _make_traces(self) -> ControlTraces | None:
        tracing = self._tracing
        if tracing is None and self.settings.traces:
            try:
                tracing = Tracing.from_environment("kvshuttle-controlplane")
            except TracingError as error:
                raise SettingsError(str(error)) from error
        if tracing is None:
            return None

        def find(lease_id: str) -> Lease | None:
            # Looked up each time: a start makes the state anew.
            return self.registry.state.leases.get(lease_id)

        return ControlTraces(tracing, self.metrics, find)

    def _listener(self, tokens: Tokens | None, message_bytes: int) -> grpc.aio.Server:
        guard = Guard(
            insecure=self.settings.insecure,
            tokens=tokens,
            limits=self.limits,
            metrics=self.metrics,
        )
        server = grpc.aio.server(
            interceptors=(guard,),
            options=listener_options(self.limits, message_bytes),
            maximum_concurrent_rpcs=self.limits.calls_max,
        )
        self._servers.append(server)
        return server

    async def _describe(self, server: grpc.aio.Server, services: tuple[str, ...]) -> None:
        """Health and reflection."""
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        for name in ("", *services):
            await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        for name in services:
            for method in descriptor_pool.Default().FindServiceByName(name).methods:
                self.metrics.serve(method.name)
        self._health.append(servicer)

    def _bind(self, server: grpc.aio.Server, address: str, *, require_certificate: bool) -> str:
        settings = self.settings
        try:
            if settings.insecure:
                port = server.add_insecure_port(address)
            else:
                assert settings.tls_cert is not None
                assert settings.tls_key is not None
                assert settings.client_ca is not None
                port = server.add_secure_port(
                    address,
                    _credentials(
                        settings.tls_cert,
                        settings.tls_key,
                        settings.client_ca,
                        require_certificate=require_certificate,
                    ),
                )
        except RuntimeError as error:
            raise SettingsError(f"{address} cannot be listened on: {error}") from error
        return f"{address.rpartition(':')[0]}:{port}"

    def _now(self) -> Now:
        turns = self._turns
        assert turns is not None
        return Now(
            self.registry,
            {
                "turns": lambda: turns.open,
                "watch_leases": lambda: self.hubs.leases.open,
                "watch_sessions": lambda: self.hubs.sessions.open,
            },
        )

    def _files(self) -> Files:
        settings = self.settings
        certificates = {"client_ca": settings.client_ca, "server": settings.tls_cert}
        store = self._stores[0]
        moved = store.moved if isinstance(store, SqliteStore) else None
        return Files(settings.store_file(), certificates, moved)

    def _serve_metrics(self) -> str:
        address = self.settings.metrics()
        if not address:
            return ""
        host, _, port = address.rpartition(":")
        try:
            self._metrics_server = MetricsServer(
                self.metrics, self._now(), self._files(), host.strip("[]"), int(port)
            )
        except OSError as error:
            raise SettingsError(f"{address} cannot be listened on: {error}") from error
        return f"{host}:{self._metrics_server.port}"

    def _write_ready(self, path: Path) -> None:
        ready = {
            "api": self.addresses.api,
            "agent": self.addresses.agent,
            "metrics": self.addresses.metrics,
            "epoch": self.registry.state.epoch,
            "pid": os.getpid(),
        }
        # Whoever waits for the file must never read half of it.
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(ready) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise SettingsError(f"ready_file: {path} cannot be written: {error}") from error

    async def failed(self) -> BaseException:
        """Waits for the store to fail; returns why. The process must then end."""
        return await asyncio.shield(self.runtime.failed)

    async def stop(self) -> None:
        """Not serving, streams ended, calls finished within the grace, everything durable."""
        if self.settings.ready_file is not None:
            try:
                self.settings.ready_file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("ready_file_stays", error=str(error))
        for servicer in self._health:
            await servicer.enter_graceful_shutdown()
        self.streams.stop()
        if self._turns is not None:
            self._turns.stop()
        await asyncio.gather(*(server.stop(self.settings.stop_grace) for server in self._servers))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._metrics_server is not None:
            await self._metrics_server.close()
        if hasattr(self, "runtime"):
            await self.runtime.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        for store in self._stores:
            store.close()
        log.info("stopped")


class _Tokens:
    """128 unguessable bits each: a token names a turn to the agents. Drawn from the system many at
    a time, because a call of it costs as much as all else that a token does."""

    def __init__(self) -> None:
        self._bits = b""

    def __call__(self) -> str:
        if not self._bits:
            self._bits = secrets.token_bytes(16 * 256)
        drawn, self._bits = self._bits[:16], self._bits[16:]
        return base64.urlsafe_b64encode(drawn)[:-2].decode()


def _credentials(
    cert: Path, key: Path, client_ca: Path, *, require_certificate: bool
) -> grpc.ServerCredentials:
    """SettingsError when a file cannot be read."""
    try:
        return grpc.dynamic_ssl_server_credentials(
            grpc.ssl_server_certificate_configuration(
                [(key.read_bytes(), cert.read_bytes())], client_ca.read_bytes()
            ),
            # Read again for every new connection, so that renewed certificates are taken up.
            lambda: grpc.ssl_server_certificate_configuration(
                [(key.read_bytes(), cert.read_bytes())], client_ca.read_bytes()
            ),
            require_client_authentication=require_certificate,
        )
    except OSError as error:
        raise SettingsError(f"TLS files cannot be read: {error}") from error
