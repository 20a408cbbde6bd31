"""Each mutating call made twice with one request_id, with something else and a restart between."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.conftest import Cluster, T
from tests.integration.controlplane.status import details, reason
from tests.integration.controlplane.test_turns import CHAIN, first_turn


def hinted(seconds: int) -> types.SessionHints:
    hints = types.SessionHints()
    hints.expected_idle.FromSeconds(seconds)
    return hints


async def back(*boots: Agent) -> None:
    for agent in boots:
        await agent.connect()


async def granted(cluster: Cluster, prefill: Agent, decode: Agent) -> leases.Lease:
    await first_turn(cluster, prefill, decode)
    await cluster.begin(return_policy=sessions.RETURN_POLICY_ALWAYS)
    order = await decode.told("harden")
    await decode.harden(order, CHAIN)
    await prefill.told("grant")
    decode.hello.leases.append(
        agents.AgentLease(lease_id=order.lease_id, version=1, is_source=True)
    )
    prefill.hello.leases.append(agents.AgentLease(lease_id=order.lease_id, version=2))
    request = leases.GetLeaseRequest(lease_id=order.lease_id)
    return (await cluster.leases.GetLease(request, timeout=T)).lease


async def test_begin_turn(cluster: Cluster) -> None:
    await cluster.pair()
    first = await cluster.begin(request_id="r")
    await cluster.end(1)
    await cluster.restart()
    again = await cluster.begin(request_id="r")
    assert (again.turn.turn, again.turn_token) == (1, first.turn_token)
    # Not even a life of the session later.
    await cluster.sessions.EndSession(sessions.EndSessionRequest(session_id="s"), timeout=T)
    await cluster.pair()
    assert (await cluster.begin()).turn.turn == 2
    assert (await cluster.begin(request_id="r")).turn_token == first.turn_token
    assert (await cluster.session()).turn_count == 2


async def test_end_turn(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.begin()
    first = await cluster.end(1, request_id="r", hints=hinted(7))
    await cluster.sessions.UpdateSession(
        sessions.UpdateSessionRequest(session_id="s", hints=hinted(9)), timeout=T
    )
    await cluster.restart()
    again = await cluster.end(
        1, request_id="r", hints=hinted(7), outcome=sessions.TURN_OUTCOME_FAILED
    )
    assert again == first
    assert (await cluster.session()).hints.expected_idle.seconds == 9
    # One that ended long ago, too.
    await cluster.pair()
    for number in range(2, 9):
        await cluster.begin()
        await cluster.end(number)
    assert (await cluster.end(1, request_id="r")).state == sessions.TURN_STATE_ENDED


async def test_update_session(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.begin()
    await cluster.end(1)
    one = sessions.UpdateSessionRequest(session_id="s", hints=hinted(60), request_id="r")
    await cluster.sessions.UpdateSession(one, timeout=T)
    other = sessions.UpdateSessionRequest(session_id="s", hints=hinted(5), request_id="q")
    await cluster.sessions.UpdateSession(other, timeout=T)
    await cluster.restart()
    again = await cluster.sessions.UpdateSession(one, timeout=T)
    assert again.session.hints.expected_idle.seconds == 5
    await cluster.sessions.EndSession(sessions.EndSessionRequest(session_id="s"), timeout=T)
    over = await cluster.sessions.UpdateSession(one, timeout=T)
    assert over.session.state == sessions.SESSION_STATE_ENDED
    one.request_id = "new"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await cluster.sessions.UpdateSession(one, timeout=T)
    assert reason(refusal.value) == "SESSION_ENDED"


async def test_end_session(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.begin()
    request = sessions.EndSessionRequest(session_id="s", request_id="r")
    await cluster.sessions.EndSession(request, timeout=T)
    await cluster.restart()
    await cluster.pair()
    await cluster.begin()
    again = await cluster.sessions.EndSession(request, timeout=T)
    assert again.session.state == sessions.SESSION_STATE_ACTIVE
    request.request_id = "q"
    over = await cluster.sessions.EndSession(request, timeout=T)
    assert over.session.state == sessions.SESSION_STATE_ENDED


async def test_an_id_is_its_calls(cluster: Cluster) -> None:
    """A gateway may use one id for everything about a turn."""
    await cluster.pair()
    await cluster.begin(request_id="r")
    await cluster.end(1, request_id="r")
    await cluster.sessions.UpdateSession(
        sessions.UpdateSessionRequest(session_id="s", hints=hinted(60), request_id="r"), timeout=T
    )
    over = await cluster.sessions.EndSession(
        sessions.EndSessionRequest(session_id="s", request_id="r"), timeout=T
    )
    assert over.session.state == sessions.SESSION_STATE_ENDED
    assert over.session.hints.expected_idle.seconds == 60


async def test_renew_lease(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    lease = await granted(cluster, prefill, decode)
    request = leases.RenewLeaseRequest(lease_id=lease.lease_id, request_id="r")
    request.ttl.FromSeconds(60)
    await cluster.leases.RenewLease(request, timeout=T)
    extend = await decode.told("extend")
    await cluster.restart()
    await back(decode, prefill)
    await cluster.leases.RenewLease(request, timeout=T)
    await prefill.publish(lease.lease_id, 12)
    await decode.told("reader_stopped", lease_id=lease.lease_id)
    assert "extend" not in decode.kinds()
    assert extend.ttl.seconds == 60
    over = await cluster.leases.RenewLease(request, timeout=T)
    assert over.lease.state == leases.LEASE_STATE_COMPLETED
    request.request_id = "q"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await cluster.leases.RenewLease(request, timeout=T)
    assert reason(refusal.value) == "LEASE_ENDED"


async def test_revoke_lease(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    lease = await granted(cluster, prefill, decode)
    request = leases.RevokeLeaseRequest(lease_id=lease.lease_id, request_id="r")
    await cluster.leases.RevokeLease(request, timeout=T)
    await prefill.told("revoke", lease_id=lease.lease_id)
    await cluster.restart()
    again = await cluster.leases.RevokeLease(request, timeout=T)
    assert again.lease.state == leases.LEASE_STATE_GRANTED
    await back(decode, prefill)
    # What was answered is not forgotten: the reader is told again.
    await prefill.told("revoke", lease_id=lease.lease_id)
    await prefill.stop(lease.lease_id, agents.TRANSFER_OUTCOME_REVOKED)
    await decode.told("reader_stopped", lease_id=lease.lease_id)
    over = await cluster.leases.RevokeLease(request, timeout=T)
    assert over.lease.state == leases.LEASE_STATE_REVOKED


async def test_drain_worker(cluster: Cluster) -> None:
    await cluster.pair()
    drain = workers.DrainWorkerRequest(worker_id="d", request_id="r")
    await cluster.cluster.DrainWorker(drain, timeout=T)
    undo = workers.DrainWorkerRequest(worker_id="d", undo=True, request_id="q")
    await cluster.cluster.DrainWorker(undo, timeout=T)
    again = await cluster.cluster.DrainWorker(drain, timeout=T)
    assert again.worker.state == workers.WORKER_STATE_READY
    await cluster.restart()
    # Nor does it drain the boot that came after.
    await cluster.agent("d", types.WORKER_ROLE_DECODE).connect()
    again = await cluster.cluster.DrainWorker(drain, timeout=T)
    assert again.worker.state == workers.WORKER_STATE_READY


async def test_fence_worker(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    request = workers.FenceWorkerRequest(worker=prefill.ref, attestation="x", request_id="r")
    await cluster.cluster.FenceWorker(request, timeout=T)
    await prefill.until_ended()
    await cluster.restart()
    again = await cluster.cluster.FenceWorker(request, timeout=T)
    assert again.worker.state == workers.WORKER_STATE_FENCED
    await cluster.agent("p", types.WORKER_ROLE_PREFILL).connect()
    again = await cluster.cluster.FenceWorker(request, timeout=T)
    assert again.worker.state == workers.WORKER_STATE_READY
    assert again.worker.ref.incarnation > prefill.welcome.incarnation
    request.request_id = "q"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await cluster.cluster.FenceWorker(request, timeout=T)
    assert reason(refusal.value) == "INCARNATION_MISMATCH"


async def test_what_is_remembered_is_bounded(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.begin()
    for number in range(50):
        await cluster.sessions.UpdateSession(
            sessions.UpdateSessionRequest(
                session_id="s", hints=hinted(number), request_id=f"r{number}"
            ),
            timeout=T,
        )
    state = cluster.server.registry.state
    (session,) = state.sessions.values()
    assert [name.partition(":")[2] for name in session.requests] == ["r46", "r47", "r48", "r49"]
    assert all(name.startswith("UpdateSession#") for name in session.requests)


async def test_an_id_given_to_another_call_of_its_kind_is_refused(cluster: Cluster) -> None:
    """Not answered as if what it asks for had been done; and a repetition still is."""
    prefill, decode = await cluster.pair()
    lease = await granted(cluster, prefill, decode)
    other = await cluster.agent("e", types.WORKER_ROLE_DECODE).connect()
    renew = leases.RenewLeaseRequest(lease_id=lease.lease_id, request_id="a:b#c")
    renew.ttl.FromSeconds(60)
    longer = leases.RenewLeaseRequest(lease_id=lease.lease_id, request_id="a:b#c")
    longer.ttl.FromSeconds(61)
    update = sessions.UpdateSessionRequest(session_id="s", hints=hinted(60), request_id="a:b#c")
    high = types.SessionHints(value=types.SESSION_VALUE_HIGH)
    masked = sessions.UpdateSessionRequest(session_id="s", hints=hinted(60), request_id="a:b#c")
    masked.update_mask.paths.append("value")
    drain = workers.DrainWorkerRequest(worker_id="p", request_id="a:b#c")
    undo = workers.DrainWorkerRequest(worker_id="p", undo=True, request_id="a:b#c")
    fence = workers.FenceWorkerRequest(worker=other.ref, attestation="x", request_id="a:b#c")
    later = types.WorkerRef(worker_id="e", incarnation=other.ref.incarnation + 1)
    newer = workers.FenceWorkerRequest(worker=later, attestation="x", request_id="a:b#c")
    calls: list[tuple[str, str, Any, list[Any]]] = [
        ("leases", "RenewLease", renew, [longer]),
        (
            "sessions",
            "UpdateSession",
            update,
            [
                sessions.UpdateSessionRequest(session_id="s", hints=high, request_id="a:b#c"),
                masked,
            ],
        ),
        ("cluster", "DrainWorker", drain, [undo]),
        ("cluster", "FenceWorker", fence, [newer]),
    ]
    for service, method, first, _ in calls:
        await getattr(getattr(cluster, service), method)(first, timeout=T)
    await cluster.sessions.UpdateSession(
        sessions.UpdateSessionRequest(session_id="s", hints=high, request_id="q"), timeout=T
    )
    for restarted in (False, True):
        if restarted:
            await cluster.restart()
        for service, method, first, others in calls:
            call = getattr(getattr(cluster, service), method)
            await call(first, timeout=T)
            for request in others:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(request, timeout=T)
                assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
                assert details(refusal.value)["ErrorInfo"].metadata["field"] == "request_id"
        session = await cluster.session()
        assert session.hints.expected_idle.seconds == 60
        assert session.hints.value == types.SESSION_VALUE_HIGH
    # What was stored before ids had digests is repeated whatever it asks for.
    state = cluster.server.registry.state
    state.workers["p"] = replace(state.workers["p"], requests=("DrainWorker:a:b#c",))
    await cluster.cluster.DrainWorker(undo, timeout=T)
    assert state.workers["p"].draining
