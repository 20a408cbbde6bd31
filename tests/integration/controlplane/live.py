"""Agents that obey by themselves, gateways that never rest, and a history of what they heard."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import SessionKey
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import lease_service_pb2_grpc as lease_grpc
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent, hashes
from tests.integration.controlplane.test_process import Process
from tests.support.history import History as Run

BLOCKS = 8
T = 10.0


@dataclass
class History:
    """What was answered to a client or said to an agent or a watcher."""

    epoch: int = 0
    boots: dict[int, tuple[str, str]] = field(default_factory=dict)
    begun: dict[tuple[str, int], str] = field(default_factory=dict)
    ended: set[tuple[str, int]] = field(default_factory=set)
    hinted: dict[str, int] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    granted: dict[str, pb.Grant] = field(default_factory=dict)
    let_go: set[str] = field(default_factory=set)
    watched_leases: dict[str, leases.Lease] = field(default_factory=dict)
    watched_sessions: dict[str, int] = field(default_factory=dict)
    run: Run = field(default_factory=Run)
    """What agents did, step by step."""

    def welcomed(self, agent: Agent) -> None:
        """A boot got its number: nobody else ever had it."""
        boot = (agent.worker_id, agent.boot_id)
        assert self.boots.setdefault(agent.welcome.incarnation, boot) == boot
        self.epoch = max(self.epoch, agent.epoch)

    def check(self, found: Snapshot) -> None:
        """All of it is in the store."""
        assert found.epoch >= self.epoch
        assert found.last_incarnation >= max(self.boots, default=0)
        by_key = {session.key: session for session in found.sessions}
        for (name, number), token in self.begun.items():
            session = by_key[SessionKey("default", name)]
            assert session.turn_count >= number
            turn = session.find(number)
            if turn is not None:
                assert turn.token == token
            if (name, number) in self.ended:
                assert turn is None or not turn.running
        for name, count in self.watched_sessions.items():
            assert by_key[SessionKey("default", name)].turn_count >= count
        for name, idle in self.hinted.items():
            hints = by_key[SessionKey("default", name)].hints
            assert hints.expected_idle_ns in (None, idle * 10**9)
        by_id = {lease.lease_id: lease for lease in found.leases}
        for lease_id, grant in self.granted.items():
            lease = by_id[lease_id]
            assert lease.grant_ns > 0
            assert lease.version >= grant.version
            assert lease.source == (grant.source.worker_id, grant.source.incarnation)
        for lease_id in self.let_go:
            assert by_id[lease_id].reader_stopped
            assert not by_id[lease_id].open
        for lease_id in self.revoked:
            assert by_id[lease_id].stop or not by_id[lease_id].open
        for lease_id, seen in self.watched_leases.items():
            if seen.state > leases.LEASE_STATE_ACTIVE:
                assert int(by_id[lease_id].state) == int(seen.state)
                assert by_id[lease_id].end_reason == seen.end_reason
        rows = {worker.ref.incarnation: worker for worker in found.workers}
        for worker in rows.values():
            boot = self.boots.get(worker.ref.incarnation)
            assert boot in (None, (worker.ref.worker_id, worker.boot_id))
        for number in self.fenced & rows.keys():
            assert rows[number].fenced_boots


class LiveAgent(Agent):
    """Obeys at once: hardens, reads, publishes, offers."""

    def __init__(self, history: History, channel: Any, worker_id: str, role: int) -> None:
        super().__init__(channel, worker_id, types.WorkerRole.ValueType(role))
        self.history = history
        self.record = history.run
        self.holds: dict[str, int] = {}
        self.reads: dict[str, int] = {}
        self.forgetful = 0.1
        """Share of grants that it leaves unused."""

    async def connect(self) -> LiveAgent:
        del self.hello.leases[:]
        for held, is_source in ((self.holds, True), (self.reads, False)):
            self.hello.leases.extend(
                pb.AgentLease(lease_id=lease_id, version=version, is_source=is_source)
                for lease_id, version in held.items()
            )
        self.hello.highest_epoch = max(self.hello.highest_epoch, self.epoch)
        await super().connect()
        self.hello.lineage_id = self.welcome.lineage_id
        self.history.welcomed(self)
        return self

    async def _read(self, call: Any) -> None:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self.epoch = response.epoch
                self.history.epoch = max(self.history.epoch, response.epoch)
                for command in response.commands.commands:
                    self._told(command, response.epoch)
                    await self._obey(command)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self.ended = error

    async def _obey(self, command: pb.AgentCommand) -> None:
        match command.WhichOneof("command"):
            case "expect_turn":
                turn = command.expect_turn
                if turn.leg == types.LEG_PREFILL or not turn.lease_follows:
                    await self._offer(turn.session_id, turn.turn_token, turn.leg)
            case "harden":
                order = command.harden
                self.holds[order.lease_id] = order.version
                await self.harden(order, hashes(order.session_id, BLOCKS))
            case "grant":
                grant = command.grant
                assert grant.lease_id not in self.history.granted, "granted twice"
                self.history.granted[grant.lease_id] = grant
                self.reads[grant.lease_id] = grant.version
                if random.random() >= self.forgetful:
                    await self.publish(grant.lease_id, BLOCKS)
                    # A test may have published it meanwhile, with all that was left.
                    self.reads.pop(grant.lease_id, None)
            case "extend":
                extend = command.extend
                await self.say(
                    extended=pb.LeaseExtended(
                        lease_id=extend.lease_id,
                        version=extend.version,
                        is_source=extend.is_source,
                    )
                )
            case "revoke":
                self.reads.pop(command.revoke.lease_id, None)
                await self.stop(command.revoke.lease_id, pb.TRANSFER_OUTCOME_REVOKED)
            case "reader_stopped":
                self.history.let_go.add(command.reader_stopped.lease_id)
                self.holds.pop(command.reader_stopped.lease_id, None)

    async def _offer(self, session_id: str, token: str, leg: int) -> None:
        chain = hashes(session_id, BLOCKS)
        await self.offer(chain, session_id, token, types.Leg.ValueType(leg))


class Load:
    """Clients of one control plane, until it is gone."""

    def __init__(self, process: Process, history: History, names: list[str]) -> None:
        self.channel = grpc.aio.insecure_channel(process.ready["api"])
        self.history = history
        self._sessions = session_grpc.SessionServiceStub(self.channel)
        self._leases = lease_grpc.LeaseServiceStub(self.channel)
        self._cluster = cluster_grpc.ClusterServiceStub(self.channel)
        self._names = names
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        works = [self._turns(name) for name in self._names]
        works += [self._boots(), self._watch_leases(), self._watch_sessions(), self._operator()]
        self._tasks = [asyncio.create_task(self._until_gone(work)) for work in works]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.close()

    def failed(self) -> list[BaseException]:
        """What the load itself found wrong."""
        return [e for t in self._tasks if t.done() and not t.cancelled() and (e := t.exception())]

    @staticmethod
    async def _until_gone(work: Any) -> None:
        try:
            await work
        except grpc.aio.AioRpcError as error:
            gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            # What this side's gRPC says when the connection ends in the midst of a message.
            if not gone and "from Core" not in (error.details() or ""):
                raise

    async def _turns(self, name: str) -> None:
        while True:
            begun = await self._sessions.BeginTurn(
                sessions.BeginTurnRequest(
                    session_id=name,
                    return_policy=random.choice(
                        (sessions.RETURN_POLICY_ALWAYS, sessions.RETURN_POLICY_NEVER)
                    ),
                ),
                timeout=T,
            )
            number = begun.turn.turn
            assert (name, number) not in self.history.begun, "a turn's number was used twice"
            self.history.begun[name, number] = begun.turn_token
            await asyncio.sleep(random.random() * 0.01)
            if random.random() < 0.2:
                # Only what was answered last is known.
                self.history.hinted.pop(name, None)
                request = sessions.UpdateSessionRequest(session_id=name)
                request.hints.expected_idle.FromSeconds(number)
                await self._sessions.UpdateSession(request, timeout=T)
                self.history.hinted[name] = number
            await self._sessions.EndTurn(
                sessions.EndTurnRequest(
                    session_id=name, turn=number, outcome=sessions.TURN_OUTCOME_COMPLETED
                ),
                timeout=T,
            )
            self.history.ended.add((name, number))

    async def _boots(self) -> None:
        """A worker that dies and is attested dead, again and again."""
        while True:
            agent = Agent(self.channel, "x", types.WORKER_ROLE_DECODE)
            agent.record = self.history.run
            await agent.connect()
            self.history.welcomed(agent)
            await agent.close()
            await self._cluster.FenceWorker(
                workers.FenceWorkerRequest(worker=agent.ref, attestation="test"), timeout=T
            )
            self.history.fenced.add(agent.welcome.incarnation)
            await asyncio.sleep(0.005)

    async def _operator(self) -> None:
        while True:
            open_now = [i for i in self.history.granted if i not in self.history.let_go][-3:]
            for lease_id in open_now:
                try:
                    if random.random() < 0.5:
                        await self._leases.RevokeLease(
                            leases.RevokeLeaseRequest(lease_id=lease_id), timeout=T
                        )
                        self.history.revoked.add(lease_id)
                    else:
                        renew = leases.RenewLeaseRequest(lease_id=lease_id)
                        renew.ttl.FromSeconds(40)
                        await self._leases.RenewLease(renew, timeout=T)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                        raise
            await asyncio.sleep(0.01)

    async def _watch_leases(self) -> None:
        call = self._leases.WatchLeases(leases.WatchLeasesRequest())
        async for message in call:
            if message.HasField("changed"):
                self.history.watched_leases[message.changed.lease_id] = message.changed

    async def _watch_sessions(self) -> None:
        call = self._sessions.WatchSessions(sessions.WatchSessionsRequest())
        async for message in call:
            if message.HasField("changed"):
                session = message.changed
                self.history.watched_sessions[session.session_id] = session.turn_count


async def kill(process: Process) -> None:
    """SIGKILL, and until it is gone."""
    process.child.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.child.wait)
    process.ready_path.unlink()
