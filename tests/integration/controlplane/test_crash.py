"""The real program on a real file, under load, killed again and again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from kvshuttle.controlplane.store import SqliteStore
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import lease_service_pb2_grpc as lease_grpc
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent, hashes
from tests.integration.controlplane.conftest import eventually
from tests.integration.controlplane.live import History, LiveAgent, Load, kill
from tests.integration.controlplane.test_process import Process

ROUNDS = int(os.environ.get("KVSHUTTLE_CRASH_ROUNDS", "5"))
# Scripted agents send no heartbeats.
FLAGS = ("--silence=60",)
SEED = int(os.environ.get("KVSHUTTLE_CRASH_SEED", "1"))


Begin = Callable[..., Awaitable[Process]]


@pytest.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Begin]:
    """Starts a control plane on the test's store; none outlives the test."""
    begun: list[Process] = []

    async def start(*flags: str) -> Process:
        begun.append(await asyncio.to_thread(Process, tmp_path, *FLAGS, *flags))
        return begun[-1]

    yield start
    for process in begun:
        if process.child.poll() is None:
            process.stop(signal.SIGKILL)


@pytest.mark.timeout(60 + 30 * ROUNDS)
async def test_nothing_that_was_told_is_lost_by_sigkill(tmp_path: Path, begin: Begin) -> None:
    luck = random.Random(SEED)
    history = History()
    process = await begin()
    agents: list[LiveAgent] = []
    epochs = []
    for number in range(ROUNDS):
        channel = grpc.aio.insecure_channel(process.ready["agent"])
        assert process.ready["epoch"] > history.epoch
        epochs.append(process.ready["epoch"])
        if not agents:
            roles = (types.WORKER_ROLE_PREFILL, types.WORKER_ROLE_DECODE, types.WORKER_ROLE_DECODE)
            agents = [LiveAgent(history, channel, f"w{n}", role) for n, role in enumerate(roles)]
        before = [agent.welcome.incarnation for agent in agents]
        for agent in agents:
            agent.stub = type(agent.stub)(channel)
            await agent.connect()
        if number:
            assert [agent.welcome.incarnation for agent in agents] == before
        load = Load(process, history, [f"s{n}" for n in range(8)])
        load.start()
        turns = len(history.ended)
        await asyncio.sleep(luck.uniform(0.02, 0.8))
        await kill(process)
        assert not load.failed()
        await load.stop()
        for agent in agents:
            await agent.close()
        await channel.close()
        store = await asyncio.to_thread(SqliteStore, tmp_path / "store.db")
        history.check(store.load())
        store.close()
        print(f"round {number}: {len(history.ended) - turns} turns")
        process = await begin()
    assert epochs == sorted(set(epochs))
    # On a busy machine it is not much, but there must be some of each.
    assert len(history.ended) > 20
    assert history.let_go
    assert history.fenced

    # Once all are back, everything that was begun comes to its end, and every hold is let go.
    channel = grpc.aio.insecure_channel(process.ready["agent"])
    for agent in agents:
        agent.stub = type(agent.stub)(channel)
        agent.forgetful = 0
        await agent.connect()
        for lease_id in list(agent.reads):
            await agent.publish(lease_id, 8)
            agent.reads.pop(lease_id, None)
    stub = lease_grpc.LeaseServiceStub(channel)

    operator = cluster_grpc.ClusterServiceStub(channel)

    async def not_over() -> str:
        """Leases that are open, and those that are held, as the books have them."""
        page = await stub.ListLeases(leases.ListLeasesRequest(page_size=1_000), timeout=10)
        held = {lease_id for agent in agents for lease_id in agent.holds}
        left = [
            lease
            for lease in page.leases
            if lease.state <= leases.LEASE_STATE_ACTIVE or lease.lease_id in held
        ]
        for lease in left:
            # A boot that had not been attested dead when the control plane was killed: its
            # sources would hold to their deadlines.
            if lease.destination.worker_id == "x":
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await operator.FenceWorker(
                        workers.FenceWorkerRequest(worker=lease.destination, attestation="test"),
                        timeout=10,
                    )
        return "".join(map(str, left))

    await eventually(not_over, lambda found: not found, 30)
    for agent in agents:
        assert agent.ended is None, "an agent had not heard all that it was told"
        await agent.close()
    await channel.close()
    process.stop()
    history.run.read_control_plane(process.log_path)
    assert len({x.life for x in history.run.named("started")}) == ROUNDS + 1
    assert sum(1 for _ in history.run.named("lease_granted")) > 20
    assert not history.run.problems()


async def test_a_full_disk_ends_it_and_nothing_that_was_told_is_lost(
    tmp_path: Path, begin: Begin
) -> None:
    process = await begin()
    history = History()
    channel = grpc.aio.insecure_channel(process.ready["agent"])
    agent = LiveAgent(history, channel, "b", types.WORKER_ROLE_BOTH)
    await agent.connect()
    load = Load(process, history, [f"s{n}" for n in range(4)])
    load.start()
    await eventually(lambda: asyncio.sleep(0, len(history.ended)), lambda count: count > 20)
    # From now on no file of that process may be longer than the log is now.
    room = (tmp_path / "store.db-wal").stat().st_size
    resource.prlimit(process.child.pid, resource.RLIMIT_FSIZE, (room, room))
    assert await asyncio.to_thread(process.child.wait, 30) == 1
    await load.stop()
    await agent.close()
    await channel.close()
    assert "store_failed" in [line["event"] for line in process.log()]
    history.run.read_control_plane(process.log_path)
    assert not history.run.problems()
    store = SqliteStore(tmp_path / "store.db")
    history.check(store.load())
    store.close()


async def test_a_paused_control_plane_grants_nothing_late(begin: Begin) -> None:
    """What came while it was stopped is as old as it is: the guard counts the pause."""
    process = await begin("--guard=1", "--no-eager")
    channel = grpc.aio.insecure_channel(process.ready["agent"])
    prefill = await Agent(channel, "p", types.WORKER_ROLE_PREFILL).connect()
    decode = await Agent(channel, "d", types.WORKER_ROLE_DECODE).connect()
    stub = session_grpc.SessionServiceStub(channel)
    chain = hashes("paused", 8)
    request = sessions.BeginTurnRequest(session_id="s", return_policy=sessions.RETURN_POLICY_ALWAYS)
    first = await stub.BeginTurn(request, timeout=10)
    await decode.offer(chain, "s", first.turn_token, types.LEG_DECODE)
    await eventually(
        lambda: stub.GetSession(sessions.GetSessionRequest(session_id="s"), timeout=10),
        lambda got: len(got.session.replicas) == 1,
    )
    await stub.BeginTurn(request, timeout=10)
    order = await decode.told("harden")
    process.child.send_signal(signal.SIGSTOP)
    await decode.harden(order, chain)
    await asyncio.sleep(1.2)
    process.child.send_signal(signal.SIGCONT)
    revoke = await prefill.told("revoke", lease_id=order.lease_id)
    assert revoke.reason in ("HARDENED_TOO_LATE", "HARDEN_TIMEOUT")
    await decode.told("reader_stopped", lease_id=order.lease_id)
    assert "grant" not in prefill.kinds()
    for agent in (prefill, decode):
        await agent.close()
    await channel.close()
    process.stop()
