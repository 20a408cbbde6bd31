"""What operators do, through the Python client against a real control plane."""

from __future__ import annotations

import pytest

from kvshuttle.client import AsyncClient, FailedPreconditionError, NotFoundError
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import hashes
from tests.integration.controlplane.conftest import Cluster


async def test_a_worker_says_what_is_in_it(cluster: Cluster) -> None:
    hello = {"nixl_backend": "UCX", "agent_version": "0.1.0"}
    await cluster.agent("p", types.WORKER_ROLE_PREFILL, **hello).connect()
    async with AsyncClient(cluster.server.addresses.api) as client:
        worker = await client.get_worker("p")
    assert (worker.nixl_backend, worker.agent_version) == ("UCX", "0.1.0")
    assert (worker.prefix_caching, worker.num_ranks) == (True, 1)


async def test_drain_and_back(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    async with AsyncClient(cluster.server.addresses.api) as client:
        drained = await client.drain_worker("p", request_id="once")
        assert drained.state == workers.WORKER_STATE_DRAINING
        assert not (await prefill.told("drain")).undo
        back = await client.drain_worker("p", undo=True)
        assert back.state == workers.WORKER_STATE_READY
        with pytest.raises(NotFoundError, match="nobody"):
            await client.drain_worker("nobody")


async def test_fence_names_the_boot(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    other = types.WorkerRef(worker_id="p", incarnation=prefill.ref.incarnation + 1)
    async with AsyncClient(cluster.server.addresses.api) as client:
        with pytest.raises(FailedPreconditionError) as caught:
            await client.fence_worker(other, "seen dead")
        assert caught.value.reason == "INCARNATION_MISMATCH"
        fenced = await client.fence_worker(prefill.ref, "seen dead")
    assert fenced.state == workers.WORKER_STATE_FENCED


async def test_revoke_stops_a_lease(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    begun = await cluster.begin()
    chain = hashes("c", 4)
    await prefill.offer(chain, "s", begun.turn_token, types.LEG_PREFILL)
    await prefill.harden(await prefill.told("harden"), chain)
    grant = await decode.told("grant")
    async with AsyncClient(cluster.server.addresses.api) as client:
        found = await client.revoke_lease(grant.lease_id, "by hand")
        assert found.lease_id == grant.lease_id
        assert (await decode.told("revoke", lease_id=grant.lease_id)).reason == "by hand"
        listed = [one.lease_id async for one in client.list_leases(page_size=1)]
        assert listed == [grant.lease_id]
        with pytest.raises(NotFoundError):
            await client.revoke_lease("none")
        open_states = [leases.LEASE_STATE_GRANTED, leases.LEASE_STATE_ACTIVE]
        assert found.state in open_states
