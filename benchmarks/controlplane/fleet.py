"""Agents of a load: the real protocol without an engine behind it.

Like the agent's own link (`kvshuttle.dataplane.link`), an agent sends what waits as soon as its
stream takes another message, all of it in one; only what nobody waits for (`UNHURRIED_EVENTS`)
waits some milliseconds for company. It obeys a Harden at once, where a real one takes an engine's
step to do so: what is measured is the control plane.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc

from benchmarks.controlplane.traces import BLOCK_TOKENS
from kvshuttle.dataplane.limits import COMPANY_S, UNHURRIED_EVENTS
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import agent_service_pb2_grpc as pb_grpc
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TENANT", "Agent", "Fleet", "Held"]

TENANT = "default"
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
EVENTS = 1_000
BYTES_PER_TOKEN = 23_000


class Held:
    """A conversation as decode's agent holds it."""

    __slots__ = ("blocks", "decode", "head", "name", "turn")

    def __init__(self, name: str, blocks: int) -> None:
        self.name = name
        self.blocks = blocks
        self.turn = 0
        self.head = b""
        self.decode = ""

    def head_after(self, turn: int) -> bytes:
        """Differs for every session and turn."""
        return f"{self.name}:{turn}".encode().ljust(32, b".")[-32:]


class Agent:
    """One worker."""

    def __init__(self, fleet: Fleet, channel: grpc.aio.Channel, worker_id: str, role: int) -> None:
        self.fleet = fleet
        self.worker_id = worker_id
        self.role = types.WorkerRole.ValueType(role)
        self._stub = pb_grpc.AgentServiceStub(channel)
        self._pending: list[pb.AgentEvent] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: Any = None
        self._beat_due = False
        self.told: dict[str, int] = {}
        self.leases: list[tuple[int, int]] = []
        self.extended = 0
        self._more = asyncio.Event()

    async def connect(self, replicas: Sequence[pb.ReplicaOffered] = ()) -> None:
        """Says hello with an inventory and waits for the welcome."""
        self._call = self._stub.Connect()
        hello = pb.AgentHello(
            worker_id=self.worker_id,
            boot_id=f"boot-{self.worker_id}-{self.fleet.run}",
            role=self.role,
            url=f"http://10.0.0.{self.worker_id[1:]}:8000",
            fingerprint=[cluster.FingerprintField(name="model", value="m")],
            block_size=BLOCK_TOKENS,
            num_blocks=2**31,
            bytes_per_block=BYTES_PER_TOKEN * BLOCK_TOKENS,
            prefix_caching=True,
            ranks=[pb.RankEndpoint(rank=0, agent_name=self.worker_id, agent_metadata=b"m" * 64)],
            clock=time.monotonic_ns(),
            replicas=replicas,
        )
        await self._call.write(pb.ConnectRequest(hello=hello))
        first = await self._call.read()
        if first is grpc.aio.EOF:
            raise RuntimeError(f"refused: {await self._call.details()}")
        self._tasks = [
            asyncio.create_task(self._read()),
            asyncio.create_task(self._write()),
            asyncio.create_task(self._beat()),
        ]

    async def close(self) -> None:
        """Ends the stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()

    def emit(self, **event: Any) -> None:
        """Goes with the next message."""
        self._pending.append(pb.AgentEvent(**event))
        if not UNHURRIED_EVENTS.issuperset(event):
            self._wake.set()
        elif len(self._pending) == 1:
            asyncio.get_running_loop().call_later(COMPANY_S, self._wake.set)

    async def _write(self) -> None:
        """The one writer: gRPC takes one message of a stream at a time."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._beat_due:
                self._beat_due = False
                pool = cluster.PoolStats(total_blocks=2**31, free_blocks=2**30)
                beat = pb.AgentHeartbeat(clock=time.monotonic_ns(), pool=pool)
                await self._call.write(pb.ConnectRequest(heartbeat=beat))
            while self._pending:
                batch = self._pending[:EVENTS]
                del self._pending[:EVENTS]
                await self._call.write(pb.ConnectRequest(events=pb.AgentEvents(events=batch)))
                self.fleet.sent_messages += 1

    async def _beat(self) -> None:
        while True:
            self._beat_due = True
            self._wake.set()
            await asyncio.sleep(1)

    async def _read(self) -> None:
        told = self.told
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                now = time.perf_counter()
                self.fleet.heard_messages += 1
                for command in response.commands.commands:
                    kind = command.WhichOneof("command") or ""
                    told[kind] = told.get(kind, 0) + 1
                    if kind == "harden":
                        self._harden(command.harden)
                    elif kind == "grant":
                        self.fleet.granted(self, command.grant, now)
                    elif kind == "extend_leases":
                        self._extend(command.extend_leases)
            self.fleet.broken = f"{self.worker_id}: the control plane ended the stream"
        except grpc.aio.AioRpcError as error:
            self.fleet.broken = f"{self.worker_id}: {error.code().name} {error.details()}"

    def _harden(self, order: pb.Harden) -> None:
        count = min(order.range.end, self.fleet.most_blocks)
        held = types.BlockRange(start=0, end=count)
        self.emit(
            hardened=pb.LeaseHardened(
                lease_id=order.lease_id,
                version=order.version,
                blocks=types.BlockDescriptors(
                    range=held,
                    block_ids=range(1_000_000, 1_000_000 + count),
                    hashes=bytes(32 * (count - 1)) + order.head_hash,
                    hash_size=32,
                ),
            )
        )

    def _extend(self, order: pb.ExtendLeases) -> None:
        if order.is_source:
            self.emit(leases_extended=pb.LeasesExtended(extension=order.extension))
        else:
            self.extended += len(order.lease_seqs)
            self._more.set()

    async def until_extended(self, want: int) -> None:
        """Waits until so many leases have been extended in all."""
        async with asyncio.timeout(30):
            while self.extended < want:
                self._more.clear()
                await self._more.wait()

    def offer(self, held: Held, token: str, turn: int) -> None:
        """A decode leg has ended: its replica takes the place of the one before."""
        if held.head:
            self.emit(
                replica_changed=pb.ReplicaChanged(
                    tenant=TENANT,
                    session_id=held.name,
                    head_hash=held.head,
                    state=sessions.REPLICA_STATE_GONE,
                    reason="SUPERSEDED",
                )
            )
        held.head = held.head_after(turn)
        self.emit(offered=self.replica(held, turn_token=token, leg=types.LEG_DECODE))

    @staticmethod
    def replica(held: Held, **more: Any) -> pb.ReplicaOffered:
        """What is held of a conversation."""
        offered = pb.ReplicaOffered(
            tenant=TENANT,
            session_id=held.name,
            head_hash=held.head,
            num_blocks=held.blocks,
            num_tokens=held.blocks * BLOCK_TOKENS,
            state=sessions.REPLICA_STATE_HARD,
            **more,
        )
        offered.hold_remaining.FromSeconds(3_600)
        # As a real agent's: two an octave of 64 tokens. Those of one session stay the same.
        step = offered.num_tokens // 64
        marks = 0 if offered.leg == types.LEG_PREFILL else 2 * step.bit_length() - 1
        stem = held.name.encode().ljust(31, b"~")[-31:]
        offered.checkpoints.extend(stem + bytes((at,)) for at in range(max(0, marks)))
        return offered


class Fleet:
    """All agents, half of them prefill, and what they have been granted."""

    run = 0

    def __init__(self, address: str, agents: int) -> None:
        Fleet.run += 1
        self.sent_messages = self.heard_messages = 0
        self.broken = ""
        # A source may hold less than it was asked for.
        self.most_blocks = 1 << 20
        # A channel an agent, as agents are processes of their own.
        self._channels = [
            grpc.aio.insecure_channel(address, (*OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
            for _ in range(agents)
        ]
        half = agents // 2
        self.agents: dict[str, Agent] = {}
        for number, channel in enumerate(self._channels):
            name = f"p{number}" if number < half else f"d{number - half}"
            role = types.WORKER_ROLE_PREFILL if number < half else types.WORKER_ROLE_DECODE
            self.agents[name] = Agent(self, channel, name, role)
        self._waiting: dict[str, asyncio.Future[tuple[Agent, pb.Grant, float]]] = {}
        self._early: dict[str, tuple[Agent, pb.Grant, float]] = {}

    @property
    def decoders(self) -> list[Agent]:
        """In order of their numbers."""
        return [x for x in self.agents.values() if x.role == types.WORKER_ROLE_DECODE]

    @property
    def prefillers(self) -> list[Agent]:
        """In order of their numbers."""
        return [x for x in self.agents.values() if x.role == types.WORKER_ROLE_PREFILL]

    async def connect(self, held: Sequence[Held] = ()) -> None:
        """All say hello; decode's agents with what they hold."""
        at: dict[str, list[pb.ReplicaOffered]] = {}
        for one in held:
            at.setdefault(one.decode, []).append(Agent.replica(one))
        for agent in self.agents.values():
            await agent.connect(at.pop(agent.worker_id, ()))

    async def close(self) -> None:
        """All streams end."""
        await asyncio.gather(*(agent.close() for agent in self.agents.values()))
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def told(self, kind: str) -> int:
        """How many commands of a kind all agents have received."""
        return sum(agent.told.get(kind, 0) for agent in self.agents.values())

    def granted(self, agent: Agent, grant: pb.Grant, now: float) -> None:
        """A grant has reached its agent."""
        waiting = self._waiting.pop(f"{grant.turn_token}{agent.role}", None)
        if waiting is None:
            self._early[f"{grant.turn_token}{agent.role}"] = (agent, grant, now)
        elif not waiting.done():
            waiting.set_result((agent, grant, now))

    async def grant(self, token: str, role: int) -> tuple[Agent, pb.Grant, float]:
        """Waits for the grant of a turn's leg."""
        key = f"{token}{role}"
        if (early := self._early.pop(key, None)) is not None:
            return early
        future: asyncio.Future[tuple[Agent, pb.Grant, float]]
        future = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            async with asyncio.timeout(60):
                return await future
        except TimeoutError:
            raise RuntimeError(self.broken or f"no grant for {token} within a minute") from None
