"""A gateway between stand-ins: engines over real HTTP, a control plane over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshuttle.gateway import GatewayServer, GatewaySettings
from kvshuttle.tracing import Tracing
from tests.integration.gateway.fake_control_plane import FakeControlPlane
from tests.integration.gateway.fake_engine import FakeEngine
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    RunGateway = Callable[..., AbstractAsyncContextManager["RunningGateway"]]


@dataclass
class RunningGateway:
    """A gateway that serves, and a client of it."""

    server: GatewayServer
    task: asyncio.Task[None]
    http: httpx.AsyncClient

    async def chat(self, **changes: Any) -> httpx.Response:
        headers = changes.pop("headers", {})
        return await self.http.post(
            "/v1/chat/completions", json={**CHAT, **changes}, headers=headers
        )

    async def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 if there is none."""
        gateway = self.server.config.app.state.gateway  # type: ignore[union-attr]
        return gateway.metrics.registry.get_sample_value(name, labels) or 0.0


CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
    "max_tokens": 5,
}


@contextlib.asynccontextmanager
async def running_gateway(**settings: Any) -> AsyncIterator[RunningGateway]:
    """Starts a gateway in this loop, and stops it as SIGTERM would. `tracing`: its traces."""
    tracing: Tracing | None = settings.pop("tracing", None)
    defaults: dict[str, Any] = {
        "port": 0,
        "begin_turn_timeout_s": 5.0,
        "refresh_interval_s": 0.1,
        "drain_timeout_s": 1.0,
    }
    server = GatewayServer(GatewaySettings(**{**defaults, **settings}), tracing)
    task = asyncio.create_task(server.run_until_stopped())
    await eventually(lambda: server.started or task.done(), "gateway up")
    try:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=20) as http:
            yield RunningGateway(server, task, http)
    finally:
        server.should_exit = True
        await task


@pytest.fixture
async def control() -> AsyncIterator[FakeControlPlane]:
    async with FakeControlPlane() as fake:
        yield fake


@pytest.fixture
async def prefill() -> AsyncIterator[FakeEngine]:
    async with FakeEngine("prefill") as engine:
        yield engine


@pytest.fixture
async def decode() -> AsyncIterator[FakeEngine]:
    async with FakeEngine("decode") as engine:
        yield engine


@pytest.fixture
async def gateway(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> AsyncIterator[RunningGateway]:
    """One prefill and one decode engine, placed so by the control plane."""
    control.placements = [(("p", prefill.url), ("d", decode.url))]
    async with running_gateway(control_plane=control.target) as running:
        yield running
