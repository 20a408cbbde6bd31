"""What is measured, one function each. All start a control plane of their own in a fresh folder."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from benchmarks.controlplane.fleet import Fleet, Held
from benchmarks.controlplane.floor import floor
from benchmarks.controlplane.gateway import Gateway
from benchmarks.controlplane.load import Load, Measured, quantile
from benchmarks.controlplane.process import ControlPlane
from benchmarks.controlplane.stored import write_store
from kvshuttle.controlplane.store.sqlite import SqliteStore
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import types_pb2 as types
from kvshuttle.v1.cluster_service_pb2 import GetStatusRequest
from kvshuttle.v1.cluster_service_pb2_grpc import ClusterServiceStub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from benchmarks.controlplane.fleet import Agent
    from benchmarks.controlplane.traces import ChainLengths

__all__ = ["Options", "expiry", "fsync_ms", "million", "restart", "turns"]

AT_ONCE = 128
"""Turns that a closed loop keeps running: two an agent."""
RENEWED = 4_096
"""Leases in one message of a destination."""
SHORT_BLOCKS = 64
"""Blocks that a turn is granted where its cost is measured: 2,048 tokens, three times the new
tokens of a recorded turn in the median. What more of them cost is measured apart."""


LONG = {"lease_ttl": 600, "guard": 60, "turn_timeout": 7_200, "retention": 3_600}
"""Settings with which no lease or turn runs out while a million sessions are made."""


@dataclass
class Options:
    """How much of it, and where."""

    folder: Path
    core: int | None
    agents: int = 64
    sessions: int = 1_000_000
    seconds: float = 10.0
    repeats: int = 3
    rate: float = 750.0
    burst: int = 20_000
    say: Callable[[str], None] = print


@dataclass
class World:
    """A running control plane with its load."""

    server: ControlPlane
    fleet: Fleet
    gateway: Gateway
    load: Load
    start_s: float = 0.0
    held: list[Held] = field(default_factory=list)


@asynccontextmanager
async def running(
    options: Options, folder: Path | None = None, **settings: object
) -> AsyncIterator[World]:
    """A control plane with all agents and a gateway connected."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-") as name:
        server = ControlPlane(folder or Path(name), options.core, **settings)
        try:
            start_s = server.start()
            fleet = Fleet(server.agents, options.agents)
            gateway = Gateway(server.api)
            await fleet.connect()
            try:
                yield World(server, fleet, gateway, Load(server, fleet, gateway), start_s)
            finally:
                await gateway.close()
                await fleet.close()
        finally:
            server.stop()


def fsync_ms(folder: Path) -> tuple[float, float]:
    """Median and 99th percentile of a synced write of 4 KiB where the store will be."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        taken = []
        for number in range(200):
            os.pwrite(file.fileno(), b"x" * 4_096, number % 8 * 4_096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append((time.perf_counter() - began) * 1e3)
    return quantile(taken, 0.5), quantile(taken, 0.99)


def _stored_turns(server: ControlPlane, held: Sequence[Held]) -> None:
    """After a SIGKILL, every turn that was answered must be in the file."""
    store = SqliteStore(server.store)
    try:
        stored = {x.key.session_id: x.turn_count for x in store.load().sessions}
    finally:
        store.close()
    lost = [x.name for x in held if stored.get(x.name, 0) < x.turn]
    if lost:
        raise RuntimeError(f"{len(lost)} sessions have lost turns that were answered: {lost[:3]}")


async def turns(options: Options) -> dict[str, float]:
    """Turns a second from a closed loop, the time to a grant at a fixed rate, and what more blocks
    and the forward lease cost."""
    say, found = options.say, {}
    async with running(options) as world:
        load = world.load
        held = [Held(f"session-{i}", SHORT_BLOCKS) for i in range(1_000)]
        await load.once(held, AT_ONCE)
        runs = [await load.closed(held, options.seconds, AT_ONCE) for _ in range(options.repeats)]
        found["turns_per_s"] = statistics.median(x.turns_per_s for x in runs)
        found["turn_cpu_us"] = statistics.median(x.cpu_us for x in runs)
        say(
            f"  closed loop, {AT_ONCE} turns at once, {SHORT_BLOCKS} blocks granted: "
            f"{_each(runs)} turns/s, {found['turn_cpu_us']:.0f} us of CPU a turn"
        )
        opens = [
            await load.open(held, options.seconds, options.rate) for _ in range(options.repeats)
        ]
        found["grant_p99_ms"] = statistics.median(quantile(x.grant_ms, 0.99) for x in opens)
        found["grant_p50_ms"] = statistics.median(quantile(x.grant_ms, 0.5) for x in opens)
        say(
            f"  {options.rate:.0f} turns/s, random arrivals: grant after "
            f"{found['grant_p50_ms']:.1f} ms in the median, p99 {found['grant_p99_ms']:.1f} ms"
        )
        found |= await _beside_the_floor(options, opens)
        for blocks in (16, 256, 1_024):
            some = [Held(f"long-{blocks}-{i}", blocks) for i in range(AT_ONCE)]
            await load.once(some, AT_ONCE)
            run = await load.closed(some, options.seconds / 2, AT_ONCE)
            found[f"turn_cpu_us_{blocks}_blocks"] = run.cpu_us
            say(f"  {blocks} blocks granted: {run.turns_per_s:.0f} turns/s, {run.cpu_us:.0f} us")
        load.forward = True
        run = await load.closed(held, options.seconds, AT_ONCE)
        found["turns_per_s_with_forward"] = run.turns_per_s
        say(f"  with the forward lease too: {run.turns_per_s:.0f} turns/s, {run.cpu_us:.0f} us")
        world.server.kill()
        _stored_turns(world.server, held)
        say("  killed; every turn that was answered is in the store")
    return found


async def _beside_the_floor(options: Options, runs: Sequence[Measured]) -> dict[str, float]:
    """What of the CPU time of a turn at the fixed rate gRPC and the event loop take alone."""
    up = statistics.median(x.messages_a_turn[0] for x in runs)
    down = statistics.median(x.messages_a_turn[1] for x in runs)
    cpu_us = statistics.median(x.cpu_us for x in runs)
    pairs = (up + down) / 2
    least = await floor(options.core, options.agents + 1, options.rate * pairs, options.seconds)
    options.say(
        f"    {cpu_us:.0f} us of CPU a turn ({cpu_us * options.rate / 1e4:.0f} % of the core; the "
        f"load took {statistics.median(x.load_share for x in runs) * 100:.0f} % of its own), in "
        f"{up:.1f} messages up and {down:.1f} down. As many that are only sent back: "
        f"{least.us * pairs:.0f} us; one goes and comes in {least.p50_ms:.2f} ms, p99 "
        f"{least.p99_ms:.2f} ms"
    )
    return {
        "turn_cpu_us_at_rate": cpu_us,
        "messages_up_a_turn": up,
        "messages_down_a_turn": down,
        "grpc_alone_us_a_turn": least.us * pairs,
        "grpc_alone_p99_ms": least.p99_ms,
    }


def _each(runs: Sequence[Measured]) -> str:
    return "/".join(f"{run.turns_per_s:.0f}" for run in runs)


async def _fill(world: World, held: Sequence[Held], *, leased: bool) -> None:
    """Every session has its first turn, which leaves a replica at decode. With `leased` a second
    one begins, and its return is granted and not read."""
    load, gateway, fleet = world.load, world.gateway, world.fleet

    async def lease(mine: Sequence[Held]) -> None:
        for one in mine:
            begun = await gateway.begin(one.name, f"{one.name}-{one.turn + 1}")
            one.turn = begun.turn.turn
            agent, grant, _ = await fleet.grant(begun.turn_token, types.WORKER_ROLE_PREFILL)
            agent.leases.append((grant.lease_epoch, grant.lease_seq))

    at_once = AT_ONCE
    if leased:
        await asyncio.gather(*(lease(held[i::at_once]) for i in range(at_once)))
    else:
        await load.once(held, at_once)


async def million(options: Options, lengths: ChainLengths) -> dict[str, float]:
    """What a turn costs among 1 k, 100 k and 1 M sessions; the memory of as many with a lease each;
    how fast their leases are renewed; how long a start with them takes."""
    say = options.say
    found: dict[str, float] = {}
    steps = sorted({min(n, options.sessions) for n in (1_000, 100_000, options.sessions)})
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-1m-") as name:
        folder = Path(name)
        async with running(options) as small, running(options, folder, **LONG) as world:
            few = [Held(f"few-{i}", SHORT_BLOCKS) for i in range(1_000)]
            await _fill(small, few, leased=False)
            # Descriptors of a whole conversation are 100 KB in the median, and leave the control
            # plane as they come: a million of them would only keep the agents here busy.
            world.fleet.most_blocks = SHORT_BLOCKS
            held: list[Held] = []
            cost: dict[int, float] = {}
            ratio: dict[int, float] = {}
            for count in steps:
                began = time.perf_counter()
                fresh = [Held(f"s{i:07d}", lengths.draw()) for i in range(len(held), count)]
                # What a turn is granted must not differ between the steps.
                fresh, probes = fresh[: -AT_ONCE * 4], fresh[-AT_ONCE * 4 :]
                for probe in probes:
                    probe.blocks = SHORT_BLOCKS
                await _fill(world, fresh, leased=False)
                await _fill(world, probes, leased=False)
                held += fresh + probes
                # By turns with a server of a thousand sessions, so that what else the machine does
                # meanwhile is in both.
                runs, others = [], []
                for _ in range(2 * options.repeats):
                    others.append(await small.load.closed(few, options.seconds / 4, AT_ONCE))
                    runs.append(await world.load.closed(probes, options.seconds / 4, AT_ONCE))
                cost[count] = statistics.median(run.cpu_us for run in runs)
                ratio[count] = cost[count] / statistics.median(run.cpu_us for run in others)
                say(
                    f"  {count:,} sessions (made in {time.perf_counter() - began:.0f} s): "
                    f"{cost[count]:.0f} us of CPU a turn, {ratio[count]:.2f} times that among "
                    f"1,000; {world.server.rss_gib():.2f} GiB"
                )
            found["turn_cost_ratio_1m_to_1k"] = ratio[steps[-1]]
            found |= {f"turn_cpu_us_at_{count}": cpu for count, cpu in cost.items()}
            found |= {f"turn_cost_ratio_at_{count}": x for count, x in ratio.items()}
            began = time.perf_counter()
            renewing = asyncio.create_task(_renew_until(world, 120))
            await _fill(world, held, leased=True)
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            found["rss_gib_at_1m"] = world.server.rss_gib()
            say(
                f"  {len(held):,} sessions, each with a turn that runs and a granted lease "
                f"(in {time.perf_counter() - began:.0f} s): {found['rss_gib_at_1m']:.2f} GiB"
            )
            found["renewals_per_s"] = await _renewals(world, options)
            world.server.kill()
            world.held = held
        _stored_turns(world.server, held)
        found |= _restarts(options, folder, LONG)
    return found


async def _renewals(world: World, options: Options) -> float:
    """Every destination asks for all its leases again and again, in messages of some thousands;
    what counts is what comes back."""
    rates = []
    readers = [agent for agent in world.fleet.prefillers if agent.leases]
    for _ in range(options.repeats):
        before = sum(agent.extended for agent in readers)
        cpu, began = world.server.cpu_s(), time.perf_counter()
        until = began + options.seconds
        await asyncio.gather(*(_keep_asking(agent, until) for agent in readers))
        seconds = time.perf_counter() - began
        renewed = sum(agent.extended for agent in readers) - before
        cpu = world.server.cpu_s() - cpu
        rates.append(renewed / seconds)
        options.say(
            f"  renewals: {renewed / seconds:,.0f} leases/s, "
            f"{cpu / max(1, renewed) * 1e6:.2f} us of CPU each"
        )
    return statistics.median(rates)


async def _keep_asking(agent: Agent, until: float) -> None:
    epoch = agent.leases[0][0]
    seqs = [seq for _, seq in agent.leases]
    parts = itertools.cycle([seqs[i : i + RENEWED] for i in range(0, len(seqs), RENEWED)])
    while time.perf_counter() < until:
        part = next(parts)
        want = agent.extended + len(part)
        agent.emit(leases_needed=pb.LeasesNeeded(lease_epoch=epoch, lease_seqs=part))
        await agent.until_extended(want)


def _restarts(options: Options, folder: Path, settings: dict[str, int]) -> dict[str, float]:
    """From the command to serving, after a SIGKILL, with the file that the server itself wrote."""
    taken, cpus, sizes = [], [], []
    for _ in range(options.repeats):
        server = ControlPlane(folder, options.core, **settings)
        taken.append(server.start())
        cpus.append(server.cpu_s())
        sizes.append(server.rss_gib())
        server.kill()
    size = (folder / "store.db").stat().st_size / 2**20
    options.say(
        f"  starts with {options.sessions:,} sessions, as many turns that run and open leases "
        f"({size:.0f} MiB): {'/'.join(f'{x:.1f}' for x in taken)} s, "
        f"{statistics.median(cpus):.1f} s of CPU; {statistics.median(sizes):.2f} GiB then"
    )
    return {
        "restart_s_at_1m": statistics.median(taken),
        "restart_cpu_s_at_1m": statistics.median(cpus),
        "rss_gib_after_restart": statistics.median(sizes),
    }


async def restart(options: Options, lengths: ChainLengths) -> dict[str, float]:
    """As the end of `million`, on a store that was made for it."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-restart-") as name:
        folder = Path(name)
        began = time.perf_counter()
        write_store(folder / "store.db", options.sessions, options.agents, lengths)
        options.say(f"  made in {time.perf_counter() - began:.0f} s")
        return _restarts(options, folder, LONG)


async def expiry(options: Options) -> dict[str, float]:
    """Many leases that run out at one moment, and the grants of other turns meanwhile."""
    ttl = 20.0
    async with running(options, lease_ttl=ttl) as world:
        load, say = world.load, options.say
        doomed = [Held(f"doomed-{i}", SHORT_BLOCKS) for i in range(options.burst)]
        held = [Held(f"session-{i}", SHORT_BLOCKS) for i in range(1_000)]
        await _fill(world, held, leased=False)
        await _fill(world, doomed, leased=False)
        renewing = asyncio.create_task(_renew_until(world, 5))
        await _fill(world, doomed, leased=True)
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        # One last renewal of all of them, so that all run out together.
        alive = _ask_all(world)
        count = sum(len(agent.leases) for agent, _ in alive)
        for agent, want in alive:
            await agent.until_extended(want)
        renewed = time.perf_counter()
        await asyncio.sleep(max(0.0, renewed + ttl - 2 - time.perf_counter()))
        worked_off = asyncio.create_task(_until_open(world, count))
        run = await load.open(held, 8.0, options.rate)
        took = await worked_off - (renewed + ttl)
        found = {
            "grant_p99_ms_during_expiry": quantile(run.grant_ms, 0.99),
            "expired_at_once": float(count),
            "expired_within_s": took,
        }
        say(
            f"  {count:,} leases renewed to one deadline; {run.turns} turns at "
            f"{options.rate:.0f}/s over it: grant p50 {quantile(run.grant_ms, 0.5):.1f} ms, "
            f"p99 {found['grant_p99_ms_during_expiry']:.1f} ms; the last has ended {took:.1f} s "
            "after the deadline"
        )
    return found


async def _until_open(world: World, count: int) -> float:
    """When so many leases, of all that are open now but those of running turns, have ended."""
    async with grpc.aio.insecure_channel(world.server.api) as channel:
        stub = ClusterServiceStub(channel)
        while True:
            status = await stub.GetStatus(GetStatusRequest(), timeout=10)
            if status.open_leases < min(count, AT_ONCE):
                return time.perf_counter()
            await asyncio.sleep(0.1)


def _ask_all(world: World) -> list[tuple[Agent, int]]:
    """All leases at once; gives what each agent will have been told when all are extended."""
    asked = []
    for agent in world.fleet.prefillers:
        if agent.leases:
            seqs = [seq for _, seq in agent.leases]
            epoch = agent.leases[0][0]
            agent.emit(leases_needed=pb.LeasesNeeded(lease_epoch=epoch, lease_seqs=seqs))
            asked.append((agent, agent.extended + len(seqs)))
    return asked


async def _renew_until(world: World, pause_s: float) -> None:
    """Keeps all leases alive until it is cancelled."""
    while True:
        await asyncio.sleep(pause_s)
        _ask_all(world)
