"""What a refusal for a budget looks like to a caller, and what an operator can set."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import grpc
import pytest
from prometheus_client import generate_latest

from kvshuttle.controlplane import settings
from kvshuttle.controlplane.model.limits import Limits, TenantLimits
from kvshuttle.controlplane.scrape import Files, MetricsServer, Now
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from tests.integration.controlplane.agent import hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually
from tests.integration.controlplane.status import details
from tests.integration.controlplane.test_turns import first_turn

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_tenant_at_its_cap_is_told_why_and_when_to_try_again(
    tmp_path: Path, limits: Limits
) -> None:
    own = dataclasses.replace(limits, tenants={"small": TenantLimits(running_turns=1)})
    cluster = Cluster(tmp_path, own)
    await cluster.start()
    try:
        await cluster.pair()
        small = (("kvshuttle-tenant", "small"),)
        begin = cluster.sessions.BeginTurn
        await begin(sessions.BeginTurnRequest(session_id="a"), timeout=T, metadata=small)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin(sessions.BeginTurnRequest(session_id="b"), timeout=T, metadata=small)
        assert caught.value.code() is EXHAUSTED
        found = details(caught.value)
        assert found["ErrorInfo"].reason == "TENANT_TURNS"
        metadata = found["ErrorInfo"].metadata
        assert (metadata["scope"], metadata["used"], metadata["most"]) == ("tenant small", "1", "1")
        assert "EndTurn" in metadata["remedy"]
        assert found["RetryInfo"].retry_delay.seconds == 1
        # Another tenant is not concerned.
        await cluster.begin("c")
        await cluster.begin("d")
    finally:
        await cluster.stop()


async def test_a_greedy_tenant_does_not_starve_another(tmp_path: Path, limits: Limits) -> None:
    """It begins turns as fast as it can and ends none; the other begins and ends one at a time."""
    own = dataclasses.replace(limits, turns_per_worker=20, turns_per_tenant=1_000)
    cluster = Cluster(tmp_path, own)
    await cluster.start()
    try:
        await cluster.pair()
        codes: Counter[grpc.StatusCode] = Counter()
        going = True

        async def greedy(number: int) -> None:
            while going:
                request = sessions.BeginTurnRequest(session_id=f"g{number}")
                tenant = (("kvshuttle-tenant", "greedy"),)
                call = cluster.sessions.BeginTurn(request, timeout=T, metadata=tenant)
                codes[await call.code()] += 1
                await asyncio.sleep(0.01)

        crowd = [asyncio.create_task(greedy(number)) for number in range(10)]

        async def refused() -> int:
            return codes[EXHAUSTED]

        await eventually(refused, lambda count: count > 20)
        for number in range(20):
            turn = await cluster.begin(f"m{number}")
            await cluster.end(turn.turn.turn, f"m{number}")
        going = False
        await asyncio.gather(*crowd)
        assert codes.keys() == {grpc.StatusCode.OK, EXHAUSTED}
        assert codes[grpc.StatusCode.OK] == 15  # three quarters of what decode takes
    finally:
        await cluster.stop()


async def test_a_renewal_on_a_full_worker_is_refused_and_the_turn_recomputes(
    cluster: Cluster,
) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    turn = await cluster.begin(return_policy=sessions.RETURN_POLICY_ALWAYS)
    order = await decode.told("harden")
    await decode.harden(order, hashes("s", 64))
    await prefill.told("grant")
    await decode.beat(2_000, pool=workers.PoolStats(total_blocks=1_000, free_blocks=1))

    async def free() -> int:
        request = workers.GetWorkerRequest(worker_id="d")
        answer = await cluster.cluster.GetWorker(request, timeout=T)
        return int(answer.worker.pool.free_blocks)

    await eventually(free, lambda blocks: blocks == 1)
    renew = leases.RenewLeaseRequest(lease_id=order.lease_id)
    renew.ttl.FromSeconds(60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.leases.RenewLease(renew, timeout=T)
    assert caught.value.code() is EXHAUSTED
    found = details(caught.value)
    assert found["ErrorInfo"].reason == "WORKER_WATERMARK"
    assert found["ErrorInfo"].metadata["scope"] == "worker d"
    assert found["RetryInfo"].retry_delay.seconds == 5
    # A turn is never refused for it.
    await cluster.end(turn.turn.turn)
    again = await cluster.begin(return_policy=sessions.RETURN_POLICY_ALWAYS)
    assert again.turn.plan.return_mode == sessions.RETURN_MODE_NONE
    assert again.turn.plan.reason == "WORKER_WATERMARK"


async def test_a_full_quarantine_can_be_alerted_on(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await prefill.beat(2_000, pool=workers.PoolStats(total_blocks=100, quarantined_blocks=11))
    server = MetricsServer(
        cluster.server.metrics, Now(cluster.server.registry), Files(None, {}), "127.0.0.1", 0
    )
    try:

        async def begun() -> str:
            turn = await cluster.begin(return_policy=sessions.RETURN_POLICY_ALWAYS)
            return turn.turn.plan.reason

        await eventually(begun, lambda reason: reason == "DESTINATION_QUARANTINE")
        page = await asyncio.to_thread(generate_latest, cluster.server.metrics.registry)
    finally:
        await server.close()
    text = page.decode()
    assert 'kvshuttle_quarantine_full{worker_id="p"} 1.0' in text
    assert 'kvshuttle_quarantine_full{worker_id="d"} 0.0' in text
    assert (
        'kvshuttle_leases_denied_total{direction="RETURN",reason="DESTINATION_QUARANTINE"}' in text
    )
    assert 'kvshuttle_leased_blocks{worker_id="d"}' in text


def test_an_operator_sets_budgets_for_all_and_for_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "insecure: true\n"
        "tenant_turns: 9\n"
        "leased_share: 0.25\n"
        "tenants:\n"
        "  acme: {running_turns: 3, leased_share: 0.1}\n"
    )
    found = settings.load([f"--config={path}", "--tenant-sessions=77"]).limits()
    everybody, acme = found.tenant("other"), found.tenant("acme")
    assert (everybody.running_turns, everybody.sessions) == (9, 77)
    assert everybody.leased_share == Limits().leased_share_tenant
    assert (acme.running_turns, acme.sessions, acme.leased_share) == (3, 77, 0.1)
    assert found.leased_share_worker == 0.25
    path.write_text("insecure: true\ntenants: {acme: {turns: 3}}\n")
    with pytest.raises(settings.SettingsError, match=r"tenants\.acme\.turns"):
        settings.load([f"--config={path}"])
