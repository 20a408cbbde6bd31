"""A real control plane in this process, on free ports, with a real SQLite file."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvshuttle.controlplane.model.limits import MS, SECOND, Limits
from kvshuttle.controlplane.server import Server
from kvshuttle.controlplane.settings import Settings
from kvshuttle.tracing import Tracing
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import lease_service_pb2_grpc as lease_grpc
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent

T = 10.0
"""Deadline of every call."""


class Cluster:
    """A control plane, its clients, and the agents that a test made."""

    def __init__(
        self, path: Path, limits: Limits, tracing: Tracing | None = None, **settings: Any
    ) -> None:
        self._tracing = tracing
        self._settings: dict[str, Any] = {
            "insecure": True,
            "api_address": "127.0.0.1:0",
            "agent_address": "127.0.0.1:0",
            "metrics_address": "",
            "store": str(path / "store.db"),
            "stop_grace": 0.2,
        } | settings
        self._limits = limits
        self._agents: list[Agent] = []
        self._channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        self.server = Server(Settings(**self._settings), self._limits, self._tracing)
        await self.server.start()
        self.api = grpc.aio.insecure_channel(self.server.addresses.api)
        self.agents_channel = grpc.aio.insecure_channel(self.server.addresses.agent)
        self._channels = [self.api, self.agents_channel]
        self.sessions = session_grpc.SessionServiceStub(self.api)
        self.leases = lease_grpc.LeaseServiceStub(self.api)
        self.cluster = cluster_grpc.ClusterServiceStub(self.api)

    async def stop(self) -> None:
        await self.server.stop()
        for agent in self._agents:
            await agent.close()
        for channel in self._channels:
            await channel.close()

    async def restart(self) -> None:
        """Another process would see the same: everything but the store is new."""
        await self.stop()
        await self.start()
        for agent in self._agents:
            agent.stub = type(agent.stub)(self.agents_channel)

    def agent(self, worker_id: str, role: int, **hello: Any) -> Agent:
        agent = Agent(self.agents_channel, worker_id, types.WorkerRole.ValueType(role), **hello)
        self._agents.append(agent)
        return agent

    async def pair(self) -> tuple[Agent, Agent]:
        """A prefill and a decode worker."""
        prefill = await self.agent("p", types.WORKER_ROLE_PREFILL).connect()
        decode = await self.agent("d", types.WORKER_ROLE_DECODE).connect()
        await prefill.told("peer")
        return prefill, decode

    async def begin(self, session_id: str = "s", **more: Any) -> sessions.BeginTurnResponse:
        request = sessions.BeginTurnRequest(session_id=session_id, **more)
        return await self.sessions.BeginTurn(request, timeout=T)

    async def end(self, turn: int, session_id: str = "s", **more: Any) -> sessions.Turn:
        more.setdefault("outcome", sessions.TURN_OUTCOME_COMPLETED)
        request = sessions.EndTurnRequest(session_id=session_id, turn=turn, **more)
        return (await self.sessions.EndTurn(request, timeout=T)).turn

    async def session(self, session_id: str = "s") -> sessions.Session:
        request = sessions.GetSessionRequest(session_id=session_id)
        return (await self.sessions.GetSession(request, timeout=T)).session


async def eventually(
    read: Callable[[], Awaitable[Any]], true: Callable[[Any], bool], seconds: float = 10
) -> Any:
    """Reads until it is true."""
    until = time.monotonic() + seconds
    while True:
        found = await read()
        if true(found):
            return found
        assert time.monotonic() < until, f"still not so: {found}"
        await asyncio.sleep(0.01)


@pytest.fixture
def limits() -> Limits:
    """The real ones, but short where a test would wait for them, and lazy."""
    # Scripted agents send no heartbeats.
    return dataclasses.replace(
        Limits(), tick_ns=20 * MS, watch_progress_ns=200 * MS, silence_ns=60 * SECOND, eager=False
    )


@pytest.fixture
async def cluster(tmp_path: Path, limits: Limits) -> AsyncIterator[Cluster]:
    """Running."""
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    yield cluster
    await cluster.stop()
