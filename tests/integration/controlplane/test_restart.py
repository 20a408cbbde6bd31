"""What survives a restart from disk."""

from __future__ import annotations

from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from tests.integration.controlplane.conftest import Cluster, T
from tests.integration.controlplane.test_turns import CHAIN, ended, first_turn


async def status(cluster: Cluster) -> workers.GetStatusResponse:
    return await cluster.cluster.GetStatus(workers.GetStatusRequest(), timeout=T)


async def test_sessions_turns_and_boots_survive(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    running = await cluster.begin(return_policy=sessions.RETURN_POLICY_NEVER)
    before, was = await cluster.session(), await status(cluster)
    await cluster.restart()
    now = await status(cluster)
    assert now.epoch == was.epoch + 1
    assert now.lineage_id == was.lineage_id
    after = await cluster.session()
    assert after.turns == before.turns
    # It has changed: what its workers hold is not known yet.
    assert after.version > before.version
    assert not after.replicas  # they come with the agents' inventories
    listed = await cluster.cluster.ListWorkers(workers.ListWorkersRequest(), timeout=T)
    assert [w.state for w in listed.workers] == [workers.WORKER_STATE_LOST] * 2

    decode.hello.replicas.append(decode.replica(CHAIN[:12], "s"))
    incarnation = decode.welcome.incarnation
    for agent in (decode, prefill):
        agent.hello.highest_epoch = was.epoch
        agent.hello.lineage_id = was.lineage_id
        await agent.connect()
    assert decode.welcome.incarnation == incarnation
    assert decode.generation == 2
    await cluster.restart()
    for agent in (decode, prefill):
        await agent.connect()
    # A command that an older stream had queued is told from a newer one's by this number.
    assert decode.generation == 3
    now = await status(cluster)
    assert decode.epoch == now.epoch
    await prefill.told("expect_turn", turn_token=running.turn_token)
    assert (await cluster.end(2)).state == sessions.TURN_STATE_ENDED
    third = await cluster.begin()
    assert third.turn.turn == 3
    assert third.turn.plan.reason == "CHEAPER_TO_MOVE"
    assert (await cluster.session()).version > after.version


async def test_leases_go_on_and_their_sources_wait_for_the_reader(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await cluster.begin()
    harden = await decode.told("harden")
    await decode.harden(harden, CHAIN)
    grant = await prefill.told("grant")
    await cluster.begin()
    pending = await decode.told("harden")
    await cluster.restart()
    never = await ended(cluster, pending.lease_id)
    assert (never.state, never.end_reason) == (leases.LEASE_STATE_REVOKED, "EPOCH_CHANGED")

    decode.hello.leases.extend(
        agents.AgentLease(lease_id=i, version=1, is_source=True)
        for i in (harden.lease_id, pending.lease_id)
    )
    prefill.hello.leases.append(
        agents.AgentLease(lease_id=harden.lease_id, version=grant.version, transferring=True)
    )
    await decode.connect()
    await decode.told("expect_turn")
    assert "reader_stopped" not in decode.kinds()
    await prefill.connect()
    # Its reader does not know it, so nobody reads under the second.
    await decode.told("reader_stopped", lease_id=pending.lease_id)
    # A restart takes nothing from the first's right, which lasts until its deadline.
    await prefill.told("expect_turn")
    assert "revoke" not in prefill.kinds()
    assert "reader_stopped" not in decode.kinds()
    await prefill.publish(harden.lease_id, 12)
    await decode.told("reader_stopped", lease_id=harden.lease_id)
    over = await ended(cluster, harden.lease_id)
    assert (over.state, over.stats.blocks) == (leases.LEASE_STATE_COMPLETED, 12)


async def test_a_fence_survives(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    await cluster.cluster.FenceWorker(
        workers.FenceWorkerRequest(worker=prefill.ref, attestation="x"), timeout=T
    )
    await cluster.restart()
    request = workers.GetWorkerRequest(worker_id="p")
    found = await cluster.cluster.GetWorker(request, timeout=T)
    assert found.worker.state == workers.WORKER_STATE_FENCED
