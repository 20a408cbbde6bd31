"""Whole turns, driven from both ends: what a gateway asks and what two agents do."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.controlplane.fleet import Held
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from benchmarks.controlplane.fleet import Fleet
    from benchmarks.controlplane.gateway import Gateway
    from benchmarks.controlplane.process import ControlPlane

__all__ = ["Load", "Measured", "quantile"]

TRANSFER_S = 0.002
"""A read of some MB: what lies between a lease's LeaseActive and its LeaseStopped."""
PREFILL, DECODE = types.WORKER_ROLE_PREFILL, types.WORKER_ROLE_DECODE


def _computed(token: str, leg: int) -> pb.LegComputed:
    """What an agent says of a leg's prompt: the planner learns from it, and knows that the worker
    has done it. 500 new tokens at 20,000 a second; no time passes here."""
    said = pb.LegComputed(
        turn_token=token,
        leg=types.Leg.ValueType(leg),
        prompt_tokens=2_548,
        external_tokens=2_048,
        computed_tokens=500,
    )
    said.compute_time.FromMilliseconds(25)
    return said


def quantile(values: Sequence[float], q: float) -> float:
    """Of a sample that need not be sorted; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else 0.0


@dataclass
class Measured:
    """One run after everything was drained."""

    turns: int
    seconds: float
    cpu_s: float
    grant_ms: list[float] = field(default_factory=list)
    messages: tuple[int, int] = (0, 0)
    load_cpu_s: float = 0.0

    @property
    def load_share(self) -> float:
        """Of a core, that this side took: above 0.7 or so it measures itself."""
        return self.load_cpu_s / self.seconds

    @property
    def messages_a_turn(self) -> tuple[float, float]:
        """To the server and from it, on all streams."""
        up, down = self.messages
        return up / max(1, self.turns), down / max(1, self.turns)

    @property
    def turns_per_s(self) -> float:
        """Completed ones."""
        return self.turns / self.seconds

    @property
    def cpu_us(self) -> float:
        """The server's CPU time a turn."""
        return self.cpu_s / max(1, self.turns) * 1e6


class Load:
    """Drives turns; every count is of what agents and the gateway received."""

    def __init__(self, server: ControlPlane, fleet: Fleet, gateway: Gateway) -> None:
        self.server = server
        self.fleet = fleet
        self.gateway = gateway
        self.forward = False
        self.done = 0
        self.grant_ms: list[float] = []
        self._grants = 0

    async def turn(self, held: Held, since: float = 0) -> None:
        """One whole turn. The first of a session has nothing to return. The time to the grant
        counts from when BeginTurn is sent, or from `since`."""
        began = since or time.perf_counter()
        begun = await self.gateway.begin(held.name, f"{held.name}-{held.turn + 1}")
        turn, token = begun.turn, begun.turn_token
        held.turn = turn.turn
        if held.head:
            await self._read(token, PREFILL, began)
        if begun.turn.HasField("prefill"):
            prefill = self.fleet.agents[begun.turn.prefill.worker.worker_id]
            prefill.emit(leg_computed=_computed(token, types.LEG_PREFILL))
        if self.forward:
            prefill = self.fleet.agents[turn.prefill.worker.worker_id]
            computed = Held(held.name, held.blocks)
            computed.head = held.head_after(1_000_000 + held.turn)
            offered = prefill.replica(computed, turn_token=token, leg=types.LEG_PREFILL)
            prefill.emit(offered=offered)
            await self._read(token, DECODE, 0)
        decode = self.fleet.agents[turn.decode.worker.worker_id]
        held.decode = decode.worker_id
        decode.offer(held, token, held.turn)
        await self.gateway.end(held.name, held.turn)
        self.done += 1

    async def _read(self, token: str, role: int, began: float) -> None:
        agent, grant, at = await self.fleet.grant(token, role)
        self._grants += 1
        if began:
            self.grant_ms.append((at - began) * 1e3)
        blocks = len(grant.blocks.block_ids)
        agent.emit(active=pb.LeaseActive(lease_id=grant.lease_id, blocks=blocks))
        await asyncio.sleep(TRANSFER_S)
        stopped = pb.LeaseStopped(lease_id=grant.lease_id, outcome=pb.TRANSFER_OUTCOME_PUBLISHED)
        stopped.stats.blocks = blocks
        stopped.stats.tokens = blocks * 32
        stopped.stats.bytes = blocks * 736_000
        stopped.stats.transfer_time.FromMilliseconds(2)
        agent.emit(stopped=stopped)

    async def settle(self) -> None:
        """Waits until every source has been told that its reader stopped: nothing is under way."""
        async with asyncio.timeout(60):
            while self.fleet.told("reader_stopped") < self._grants:
                if self.fleet.broken:
                    raise RuntimeError(self.fleet.broken)
                await asyncio.sleep(0.01)

    async def closed(self, held: Sequence[Held], seconds: float, at_once: int) -> Measured:
        """As many turns as go, `at_once` of them running; counted after the last has drained."""
        slots = [held[i::at_once] for i in range(at_once)]
        until = time.perf_counter() + seconds

        async def run(mine: Sequence[Held]) -> None:
            while True:
                for one in mine:
                    if time.perf_counter() >= until:
                        return
                    await self.turn(one)

        return await self._measure([run(mine) for mine in slots if mine])

    async def open(self, held: Sequence[Held], seconds: float, rate: float) -> Measured:
        """Turns that begin at random moments, `rate` a second on average, whether or not those
        before have ended. A session has one turn at a time."""
        free = list(held)
        rng = random.Random(7)
        running: set[asyncio.Task[None]] = set()

        async def one(mine: Held, since: float = 0) -> None:
            await self.turn(mine, since)
            free.append(mine)

        async def run() -> None:
            due = time.perf_counter()
            until = due + seconds
            while due < until:
                due += rng.expovariate(rate)
                delay = due - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                since = 0.0
                while not free:
                    # The control plane does not keep up. The turn counts from when it was due.
                    since = due
                    await asyncio.sleep(0.001)
                task = asyncio.create_task(one(free.pop(0), since))
                running.add(task)
                task.add_done_callback(running.discard)
            while running:
                await asyncio.gather(*running)

        return await self._measure([run()])

    async def once(self, held: Sequence[Held], at_once: int) -> Measured:
        """One turn of each session."""
        slots = [held[i::at_once] for i in range(at_once)]

        async def run(mine: Sequence[Held]) -> None:
            for one in mine:
                await self.turn(one)

        return await self._measure([run(mine) for mine in slots if mine])

    async def _measure(self, work: list[Coroutine[Any, Any, None]]) -> Measured:
        self.done, self.grant_ms = 0, []
        before = self.fleet.told("grant")
        grants = self._grants
        messages, own = self._messages(), time.process_time()
        cpu, began = self.server.cpu_s(), time.perf_counter()
        await asyncio.gather(*work)
        await self.settle()
        seconds = time.perf_counter() - began
        cpu, own = self.server.cpu_s() - cpu, time.process_time() - own
        up, down = (now - then for now, then in zip(self._messages(), messages, strict=True))
        if self.fleet.told("grant") - before != self._grants - grants:
            raise RuntimeError("agents have received other grants than turns have used")
        return Measured(self.done, seconds, cpu, self.grant_ms, (up, down), own)

    def _messages(self) -> tuple[int, int]:
        fleet, gateway = self.fleet, self.gateway
        return (
            fleet.sent_messages + gateway.sent_messages,
            fleet.heard_messages + gateway.heard_messages,
        )
