"""A real gateway before a real control plane, and scripted agents beside stand-ins for engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.dataplane.tracing import AgentTraces
from kvshuttle.tracing import Tracing
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent, hashes
from tests.integration.controlplane.conftest import Cluster
from tests.integration.gateway.conftest import RunningGateway, running_gateway
from tests.integration.gateway.fake_engine import FakeEngine

BLOCKS_OF_A_TURN = 8


class ObedientAgent(Agent):
    """Does what it is told, as an agent in an engine does: computes, offers, holds, reads.

    A conversation's chain grows by some blocks a turn. `outcome_of` decides how a read goes.
    """

    def __init__(self, channel: Any, worker_id: str, role: int, **hello: Any) -> None:
        super().__init__(channel, worker_id, types.WorkerRole.ValueType(role), **hello)
        self.outcome_of: Callable[[pb.Grant], pb.TransferOutcome.ValueType] = lambda _: (
            pb.TRANSFER_OUTCOME_PUBLISHED
        )
        self.grants: list[pb.Grant] = []
        self.hardens: list[pb.Harden] = []
        self.expected: list[pb.ExpectTurn] = []
        self.counters = workers.WorkerCounters()
        self.held = 0
        self.traces: AgentTraces | None = None
        self._clock = 1_000

    async def _read(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (response := await call.read()) is not grpc.aio.EOF:
                if self.traces is not None:
                    self.traces.told(response.commands.commands)
                for command in response.commands.commands:
                    await self._obey(command)
                    async with self._more:
                        self._more.notify_all()

    async def say(self, **event: Any) -> None:
        if self.traces is not None:
            self.traces.said(pb.AgentEvent(**event))
        await super().say(**event)

    async def _obey(self, command: pb.AgentCommand) -> None:
        match command.WhichOneof("command"):
            case "expect_turn":
                turn = command.expect_turn
                self.expected.append(turn)
                if turn.HasField("push"):
                    await self._push(turn)
                elif not (turn.lease_id or turn.lease_follows):
                    await self._compute(turn)
            case "harden":
                self.hardens.append(command.harden)
                self.held += command.harden.range.end
                blocks = command.harden.range.end
                await self.harden(command.harden, hashes(command.harden.session_id, blocks))
            case "grant":
                self.grants.append(command.grant)
                await self._take(command.grant)
            case "reader_stopped":
                self.held = max(0, self.held - BLOCKS_OF_A_TURN)
                lease_id = command.reader_stopped.lease_id
                await self.say(
                    source_released=pb.SourceReleased(lease_id=lease_id, reason="READER_STOPPED")
                )
            case "revoke":
                await self.stop(command.revoke.lease_id, pb.TRANSFER_OUTCOME_REVOKED)
                await self._come(command.revoke.turn_token, 0)

    async def _compute(self, turn: pb.ExpectTurn, moved: int = 0) -> None:
        blocks = BLOCKS_OF_A_TURN * turn.turn
        tokens = blocks * 32
        known = max(moved, (turn.replica_blocks if not turn.lease_id else 0) * 32)
        computed = pb.LegComputed(
            turn_token=turn.turn_token,
            leg=turn.leg,
            prompt_tokens=tokens,
            external_tokens=moved,
            local_hit_tokens=known - moved,
            computed_tokens=max(0, tokens - known),
        )
        computed.compute_time.FromMilliseconds(max(1, (tokens - known) // 8))
        self.counters.computed_tokens += computed.computed_tokens
        self.counters.local_hit_tokens += computed.local_hit_tokens
        await self.say(leg_computed=computed)
        await self.offer(
            hashes(turn.session_id, blocks), turn.session_id, turn.turn_token, turn.leg
        )

    async def _push(self, turn: pb.ExpectTurn) -> None:
        """Decode offers where prefill is to write. Prefill computes when it may write there, or it
        would be done before."""
        if turn.leg == types.LEG_PREFILL:
            return
        chain = hashes(turn.session_id, BLOCKS_OF_A_TURN * turn.turn)
        await self.say(
            hardened=pb.LeaseHardened(
                lease_id=turn.push.lease_id,
                version=turn.push.version,
                blocks=types.BlockDescriptors(
                    range=types.BlockRange(end=len(chain)),
                    block_ids=range(1, len(chain) + 1),
                    hashes=b"".join(chain),
                    hash_size=32,
                ),
            )
        )

    async def _written(self, grant: pb.Grant, blocks: int) -> None:
        """All of a landing zone is written."""
        stopped = pb.LeaseStopped(
            lease_id=grant.lease_id, outcome=pb.TRANSFER_OUTCOME_PUBLISHED, is_source=True
        )
        stopped.stats.blocks = blocks
        stopped.stats.bytes = blocks * self.hello.bytes_per_block
        stopped.stats.transfer_time.FromMilliseconds(5)
        await self.say(stopped=stopped)

    async def _take(self, grant: pb.Grant) -> None:
        outcome = self.outcome_of(grant)
        blocks = grant.blocks.range.end
        if grant.push:
            for turn in self.expected:
                if turn.push.lease_id == grant.lease_id:
                    await self._compute(turn)
            await self._written(grant, blocks)
            return
        if outcome == pb.TRANSFER_OUTCOME_PUBLISHED:
            await self.publish(grant.lease_id, blocks)
            self.counters.transfers_completed += 1
            moved = blocks * self.hello.bytes_per_block
            if grant.direction == types.DIRECTION_RETURN:
                self.counters.return_bytes += moved
                self.counters.returned_tokens += blocks * 32
                self.counters.eager_tokens += blocks * 32 if grant.eager else 0
            else:
                self.counters.forward_bytes += moved
                self.counters.forward_tokens += blocks * 32
        else:
            await self.stop(grant.lease_id, outcome)
            self.counters.fallbacks["TRANSFER_FAILED"] += 1
        if grant.eager:
            chain = hashes(grant.session_id, blocks)
            replica = self.replica(chain, grant.session_id)
            replica.state = sessions.REPLICA_STATE_SOFT
            await self.say(offered=replica)
        moved = blocks * 32 if outcome == pb.TRANSFER_OUTCOME_PUBLISHED else 0
        await self._come(grant.turn_token, moved, grant.lease_id)

    async def _come(self, token: str, moved: int, lease_id: str = "") -> None:
        """What a leg waited for has come, or will not."""
        for turn in self.expected:
            if (token and turn.turn_token == token) or (lease_id and turn.lease_id == lease_id):
                await self._compute(turn, moved)

    async def forget(self, session_id: str, turn: int) -> None:
        """The engine has reused the blocks of what a turn had left."""
        await self.say(
            replica_changed=pb.ReplicaChanged(
                tenant="default",
                session_id=session_id,
                head_hash=hashes(session_id, BLOCKS_OF_A_TURN * turn)[-1],
                state=sessions.REPLICA_STATE_GONE,
                reason="REUSED",
            )
        )

    async def beat_on(self) -> None:
        """Heartbeats until the stream ends."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self.sign()
                await asyncio.sleep(0.5)

    async def sign(self) -> None:
        """A heartbeat with what it counts."""
        self._clock += 1_000
        pool = workers.PoolStats(
            total_blocks=1_000,
            free_blocks=max(0, 1_000 - self.held),
            held_blocks=min(1_000, self.held),
            holds=len(self.hardens),
        )
        await self.beat(self._clock, pool=pool, counters=self.counters)


@dataclass
class Stack:
    """All of it; `agents` by worker id."""

    cluster: Cluster
    gateway: RunningGateway
    prefill: FakeEngine
    decode: FakeEngine
    agents: dict[str, ObedientAgent] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def running_stack(
    path: Path,
    limits: Limits,
    settings: dict[str, Any] | None = None,
    tracing: Callable[[str], Tracing] | None = None,
    **gateway: Any,
) -> AsyncIterator[Stack]:
    """Starts everything on free ports in this process, and stops it. `tracing` makes a service's
    traces."""
    traces: Callable[[str], Tracing | None] = tracing or (lambda _: None)
    async with FakeEngine("prefill") as prefill, FakeEngine("decode") as decode:
        cluster = Cluster(path, limits, traces("controlplane"), **(settings or {}))
        await cluster.start()
        agents: dict[str, ObedientAgent] = {}
        beats: list[asyncio.Task[None]] = []
        try:
            for engine, name, role in (
                (prefill, "p", types.WORKER_ROLE_PREFILL),
                (decode, "d", types.WORKER_ROLE_DECODE),
            ):
                agent = ObedientAgent(cluster.agents_channel, name, role, url=engine.url, push=True)
                agents[name] = agent
                if tracing is not None:
                    agent.traces = AgentTraces(tracing(name), name)
                await agent.connect()
                beats.append(asyncio.create_task(agent.beat_on()))
            target = cluster.server.addresses.api
            async with running_gateway(
                tracing=traces("gateway"), control_plane=target, **gateway
            ) as running:
                yield Stack(cluster, running, prefill, decode, agents)
        finally:
            for beat in beats:
                beat.cancel()
            await asyncio.gather(*beats, return_exceptions=True)
            for agent in agents.values():
                await agent.close()
                if agent.traces is not None:
                    agent.traces.close()
            await cluster.stop()
