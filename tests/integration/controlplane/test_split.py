"""Two control planes on copies of one store: agents follow the higher epoch, the other one ends."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent, hashes
from tests.integration.controlplane.status import reason
from tests.integration.controlplane.test_process import Process
from tests.integration.dataplane.test_link import Engine
from tests.support.history import History

CHAIN = hashes("split", 12)
OVERTAKEN = 3


def copied(path: Path, to: Path) -> Path:
    """A folder with a copy of a store that may be in use: the file, and its log as it is now."""
    to.mkdir()
    for name in ("store.db", "store.db-wal"):
        if (path / name).exists():
            shutil.copy(path / name, to / name)
    return to


class Two:
    """An old control plane and a new one, each with channels of its own."""

    def __init__(self, old: Process, path: Path) -> None:
        self.old = old
        self.path = path
        self.run = History()
        self._channels: list[grpc.aio.Channel] = []
        self._agents: list[Agent] = []

    async def take_over(self) -> Process:
        """Starts another one on a copy of what the old one has written by now."""
        self.new = await asyncio.to_thread(Process, copied(self.path / "old", self.path / "new"))
        return self.new

    def channel(self, process: Process) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(process.ready["api"])
        self._channels.append(channel)
        return channel

    async def agent(self, process: Process, worker_id: str, role: int) -> Agent:
        agent = Agent(self.channel(process), worker_id, types.WorkerRole.ValueType(role))
        agent.record = self.run
        self._agents.append(agent)
        return await agent.connect()

    async def move(self, agent: Agent, process: Process, *leases: agents.AgentLease) -> None:
        """The agent's stream ends, and its next one is to another process."""
        await agent.close()
        agent.hello.highest_epoch = max(agent.hello.highest_epoch, agent.epoch)
        agent.hello.lineage_id = agent.welcome.lineage_id
        del agent.hello.leases[:]
        agent.hello.leases.extend(leases)
        agent.stub = type(agent.stub)(self.channel(process))
        await agent.connect()

    def check(self) -> None:
        """Nothing was granted twice, or in a stale term, and no source was let go too soon."""
        for log in sorted(self.path.glob("*/log")):
            self.run.read_control_plane(log)
        assert not self.run.problems()

    async def close(self) -> None:
        for agent in self._agents:
            await agent.close()
        for channel in self._channels:
            await channel.close()
        for process in (self.old, getattr(self, "new", None)):
            if process is not None and process.child.poll() is None:
                process.stop(signal.SIGKILL)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    (tmp_path / "old").mkdir()
    two = Two(await asyncio.to_thread(Process, tmp_path / "old", "--no-eager"), tmp_path)
    yield two
    await two.close()
    two.check()


async def turn(process: Process, two: Two, **more: Any) -> sessions.BeginTurnResponse:
    stub = session_grpc.SessionServiceStub(two.channel(process))
    return await stub.BeginTurn(sessions.BeginTurnRequest(session_id="s", **more), timeout=10)


async def granted(two: Two, prefill: Agent, decode: Agent) -> tuple[agents.Harden, agents.Grant]:
    """A lease of the old control plane, from decode to prefill."""
    first = await turn(two.old, two)
    await decode.offer(CHAIN, "s", first.turn_token, types.LEG_DECODE)
    await turn(two.old, two, return_policy=sessions.RETURN_POLICY_ALWAYS)
    harden = await decode.told("harden")
    await decode.harden(harden, CHAIN)
    return harden, await prefill.told("grant")


async def ended(process: Process) -> int:
    return await asyncio.to_thread(process.child.wait, 20)


async def test_the_old_one_ends_when_an_agent_comes_back_with_a_higher_epoch(two: Two) -> None:
    prefill = await two.agent(two.old, "p", types.WORKER_ROLE_PREFILL)
    decode = await two.agent(two.old, "d", types.WORKER_ROLE_DECODE)
    other = await two.agent(two.old, "x", types.WORKER_ROLE_DECODE)
    harden, grant = await granted(two, prefill, decode)
    new = await two.take_over()
    # The new one has the lease in its books; its source moves, and holds on.
    held = agents.AgentLease(lease_id=harden.lease_id, version=1, is_source=True)
    await two.move(decode, new, held)
    await two.move(other, new)
    assert decode.epoch > two.old.ready["epoch"]
    assert "reader_stopped" not in decode.kinds()
    # One of them is sent to the old one again, which learns, and ends.
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await two.move(other, two.old)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason(refusal.value) == "SUPERSEDED"
    assert await ended(two.old) == OVERTAKEN
    (event,) = [x for x in two.old.log() if x["event"] == "superseded"]
    assert event["worker_id"] == "x"
    assert int(event["highest_epoch"]) > int(event["epoch"])
    await prefill.until_ended()
    # The reader goes on under the new one.
    read = agents.AgentLease(lease_id=harden.lease_id, version=grant.version, transferring=True)
    await two.move(prefill, new, read)
    await prefill.told("expect_turn")
    assert "revoke" not in prefill.kinds()
    assert "reader_stopped" not in decode.kinds()
    await prefill.publish(harden.lease_id, 12)
    await decode.told("reader_stopped", lease_id=harden.lease_id)


async def test_nothing_is_granted_by_the_old_one_once_it_knows(two: Two) -> None:
    prefill = await two.agent(two.old, "p", types.WORKER_ROLE_PREFILL)
    decode = await two.agent(two.old, "d", types.WORKER_ROLE_DECODE)
    first = await turn(two.old, two)
    await decode.offer(CHAIN, "s", first.turn_token, types.LEG_DECODE)
    await turn(two.old, two, return_policy=sessions.RETURN_POLICY_ALWAYS)
    harden = await decode.told("harden")
    other = await two.agent(two.old, "x", types.WORKER_ROLE_DECODE)
    new = await two.take_over()
    await two.move(other, new)
    with pytest.raises(grpc.aio.AioRpcError):
        await two.move(other, two.old)
    # The answer to its Harden comes too late, or not at all any more.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await decode.harden(harden, CHAIN)
    await prefill.until_ended()
    assert "grant" not in prefill.kinds()
    assert await ended(two.old) == OVERTAKEN


async def test_what_was_pending_in_the_copy_is_not_let_go_on_its_word(two: Two) -> None:
    """The copy is from before the grant: its books do not know that somebody reads."""
    prefill = await two.agent(two.old, "p", types.WORKER_ROLE_PREFILL)
    decode = await two.agent(two.old, "d", types.WORKER_ROLE_DECODE)
    first = await turn(two.old, two)
    await decode.offer(CHAIN, "s", first.turn_token, types.LEG_DECODE)
    await turn(two.old, two, return_policy=sessions.RETURN_POLICY_ALWAYS)
    harden = await decode.told("harden")
    copied(two.path / "old", two.path / "new")
    await decode.harden(harden, CHAIN)
    grant = await prefill.told("grant")
    two.new = new = await asyncio.to_thread(Process, two.path / "new")
    held = agents.AgentLease(lease_id=harden.lease_id, version=1, is_source=True)
    await two.move(decode, new, held)
    await decode.told("expect_turn")
    assert "reader_stopped" not in decode.kinds()
    read = agents.AgentLease(lease_id=harden.lease_id, version=grant.version, transferring=True)
    await two.move(prefill, new, read)
    # These books had ended it: the reader is told, and only its answer lets the source go.
    await prefill.told("revoke", lease_id=harden.lease_id)
    assert "reader_stopped" not in decode.kinds()
    await prefill.stop(harden.lease_id, agents.TRANSFER_OUTCOME_REVOKED)
    await decode.told("reader_stopped", lease_id=harden.lease_id)


async def test_a_restored_backup_takes_its_agents_back(two: Two) -> None:
    prefill = await two.agent(two.old, "p", types.WORKER_ROLE_PREFILL)
    decode = await two.agent(two.old, "d", types.WORKER_ROLE_DECODE)
    copied(two.path / "old", two.path / "new")
    numbers = {prefill.welcome.incarnation, decode.welcome.incarnation}
    # Life goes on after the copy: restarts, and a boot that the copy does not know.
    for _ in range(3):
        await asyncio.to_thread(two.old.stop, signal.SIGKILL)
        two.old.ready_path.unlink()
        two.old = await asyncio.to_thread(Process, two.path / "old")
        for agent in (prefill, decode):
            await two.move(agent, two.old)
    late = await two.agent(two.old, "late", types.WORKER_ROLE_DECODE)
    numbers.add(late.welcome.incarnation)
    highest = late.epoch
    await asyncio.to_thread(two.old.stop, signal.SIGKILL)

    two.new = await asyncio.to_thread(Process, two.path / "new")
    assert two.new.ready["epoch"] <= highest
    for agent in (late, prefill, decode):
        await two.move(agent, two.new)
        assert agent.epoch > highest
    assert prefill.welcome.incarnation in numbers
    fresh = await two.agent(two.new, "fresh", types.WORKER_ROLE_DECODE)
    assert not numbers & {late.welcome.incarnation, fresh.welcome.incarnation}
    assert two.new.child.poll() is None


class Relay:
    """One address in front of whichever control plane a test says."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._pairs += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    @staticmethod
    def _pump(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def to(self, port: int) -> None:
        """From now on; what was open is cut."""
        self._target = port
        pairs, self._pairs = self._pairs, []
        for end in pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.to(0)


def until(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_real_agents_link_follows_the_higher_epoch(tmp_path: Path) -> None:
    """Behind one address: the old one, the new one, and the old one again."""
    (tmp_path / "old").mkdir()
    old = Process(tmp_path / "old")
    relay = Relay(int(old.ready["agent"].rpartition(":")[2]))
    engine = Engine(relay.port)
    new = None
    try:
        until(lambda: engine.link.connected)
        first = engine.agent.highest_epoch
        assert first == old.ready["epoch"]
        new = Process(copied(tmp_path / "old", tmp_path / "new"))
        relay.to(int(new.ready["agent"].rpartition(":")[2]))
        until(lambda: engine.link.connected and engine.agent.highest_epoch > first)
        second = engine.agent.highest_epoch
        relay.to(int(old.ready["agent"].rpartition(":")[2]))
        assert old.child.wait(30) == OVERTAKEN
        relay.to(int(new.ready["agent"].rpartition(":")[2]))
        until(lambda: engine.link.connected)
        assert engine.agent.highest_epoch == second
        assert new.child.poll() is None
    finally:
        engine.close()
        relay.close()
        for process in (old, new):
            if process is not None and process.child.poll() is None:
                process.stop(signal.SIGKILL)
