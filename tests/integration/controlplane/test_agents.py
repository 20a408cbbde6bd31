"""The agents' stream: who may come, what is lost and what is kept."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvshuttle.controlplane.model.limits import MS, Limits
from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.localstack import ControlPlaneView
from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually
from tests.integration.controlplane.status import details, reason
from tests.integration.controlplane.test_turns import CHAIN, ended, first_turn
from tests.support.leaks import assert_nothing_leaked, free_blocks

DECODE = types.WORKER_ROLE_DECODE


async def worker(cluster: Cluster, worker_id: str) -> workers.Worker:
    request = workers.GetWorkerRequest(worker_id=worker_id)
    return (await cluster.cluster.GetWorker(request, timeout=T)).worker


async def refused(cluster: Cluster, worker_id: str, **hello: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.agent(worker_id, DECODE, **hello).connect()
    return caught.value


async def test_a_fingerprint_mismatch_names_the_field(cluster: Cluster) -> None:
    await cluster.pair()
    other = cluster.agent("x", DECODE)
    other.hello.fingerprint[1].value = "float16"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await other.connect()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    info = details(caught.value)["ErrorInfo"]
    assert info.reason == "FINGERPRINT_MISMATCH"
    assert info.metadata["field"] == "dtype"
    assert (info.metadata["ours"], info.metadata["theirs"]) == ("bfloat16", "float16")
    assert "float16" in (caught.value.details() or "")


async def test_a_second_live_boot_is_refused_until_the_first_is_fenced(cluster: Cluster) -> None:
    first = await cluster.agent("d", DECODE).connect()
    error = await refused(cluster, "d")
    assert reason(error) == "BOOT_CONFLICT"
    fence = workers.FenceWorkerRequest(worker=first.ref, attestation="killed by the test")
    fenced = await cluster.cluster.FenceWorker(fence, timeout=T)
    assert fenced.worker.state == workers.WORKER_STATE_FENCED
    assert (await first.told("fenced")).reason == "killed by the test"
    await first.until_ended()
    second = await cluster.agent("d", DECODE).connect()
    assert second.welcome.incarnation > first.welcome.incarnation
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.cluster.FenceWorker(fence, timeout=T)
    assert reason(caught.value) == "INCARNATION_MISMATCH"


async def test_many_large_grants_do_not_make_a_message_too_large(cluster: Cluster) -> None:
    """Twenty at once, of 1 MB each; this agent's channel takes 4 MiB a message, gRPC's default."""
    blocks = 31_000
    pool = {"num_blocks": 1_000 * blocks}
    prefill = await cluster.agent("p", types.WORKER_ROLE_PREFILL, **pool).connect()
    decode = await cluster.agent("d", DECODE, **pool).connect()
    always = sessions.RETURN_POLICY_ALWAYS
    names = [f"s{number}" for number in range(20)]
    firsts = await asyncio.gather(*(cluster.begin(x, return_policy=always) for x in names))
    for name, first in zip(names, firsts, strict=True):
        await decode.offer([name.encode()] * blocks, name, first.turn_token, types.LEG_DECODE)
    await eventually(lambda: cluster.session(names[-1]), lambda got: got.replicas)
    await asyncio.gather(*(cluster.begin(x, return_policy=always) for x in names))
    orders = [await decode.told("harden") for _ in names]
    await decode.say_all(
        {
            "hardened": agents.LeaseHardened(
                lease_id=order.lease_id,
                version=order.version,
                blocks=types.BlockDescriptors(
                    range=order.range,
                    block_ids=range(blocks),
                    hashes=bytes(32 * blocks),
                    hash_size=32,
                ),
            )
        }
        for order in orders
    )
    seen = [await prefill.told("grant") for _ in names]
    assert [grant.lease_id for grant in seen] == [order.lease_id for order in orders]
    assert all(len(grant.blocks.hashes) == 32 * blocks for grant in seen)


async def test_a_fenced_boot_does_not_come_back(cluster: Cluster) -> None:
    agent = await cluster.agent("d", DECODE).connect()
    await cluster.cluster.FenceWorker(
        workers.FenceWorkerRequest(worker=agent.ref, attestation="x"), timeout=T
    )
    await agent.until_ended()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await agent.connect()
    assert reason(caught.value) == "WORKER_FENCED"


async def test_a_fence_tells_sources_and_peers(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await cluster.begin()
    harden = await decode.told("harden")
    await decode.harden(harden, CHAIN)
    await prefill.told("grant")
    await prefill.close()  # it may still read: the source is told nothing
    await ended(cluster, harden.lease_id)
    assert "reader_stopped" not in decode.kinds()
    await cluster.cluster.FenceWorker(
        workers.FenceWorkerRequest(worker=prefill.ref, attestation="its host is off"), timeout=T
    )
    await decode.told("reader_stopped", lease_id=harden.lease_id)
    await decode.told("peer_fenced", worker=prefill.ref)


@pytest.mark.timeout(60)
async def test_an_agent_that_goes_away_is_missed_at_once_however_often(cluster: Cluster) -> None:
    """Now and then gRPC does not end a read that is cancelled in the moment when it begins."""
    prefill, decode = await cluster.pair()
    for _ in range(40):
        await decode.beat(2_000)
        await prefill.close()
        await eventually(
            lambda: worker(cluster, "p"), lambda w: w.state == workers.WORKER_STATE_LOST
        )
        await prefill.connect()


async def test_a_new_boot_after_a_lost_stream_is_a_new_incarnation(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await decode.close()
    await eventually(lambda: worker(cluster, "d"), lambda w: w.state == workers.WORKER_STATE_LOST)
    again = await cluster.agent("d", DECODE).connect()
    assert again.welcome.incarnation > decode.welcome.incarnation
    peer = await prefill.told("peer")
    assert peer.worker == again.ref
    assert peer.ranks[0].agent_name == "d-0"
    assert [p.worker for p in again.welcome.peers] == [prefill.ref]
    # What the dead boot held is gone.
    begun = await cluster.begin()
    assert begun.turn.plan.reason == "NO_REPLICA"


async def test_a_reconnect_keeps_the_incarnation_and_its_replicas(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await decode.close()
    decode.hello.replicas.append(decode.replica(CHAIN[:12], "s"))
    decode.hello.replicas.append(decode.replica(hashes("unknown", 3), "never heard of"))
    before = decode.welcome.incarnation
    await decode.connect()
    assert (decode.welcome.incarnation, decode.generation) == (before, 2)
    released = await decode.told("release_replica")
    assert released.session_id == "never heard of"
    begun = await cluster.begin()
    assert begun.turn.plan.reason == "CHEAPER_TO_MOVE"
    await decode.told("harden")


async def test_a_newer_stream_replaces_the_older(cluster: Cluster) -> None:
    agent = await cluster.agent("d", DECODE).connect()
    twin = cluster.agent("d", DECODE)
    twin.hello.boot_id = agent.hello.boot_id
    await twin.connect()
    await agent.until_ended()
    assert twin.generation == agent.generation + 1
    assert (await worker(cluster, "d")).state == workers.WORKER_STATE_READY


async def test_a_destination_that_lost_its_grant_frees_the_source(cluster: Cluster) -> None:
    """The grant went down with the old stream, and the inventory does not know it."""
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    begun = await cluster.begin()
    harden = await decode.told("harden")
    await decode.harden(harden, CHAIN)
    await prefill.told("grant")
    await prefill.close()
    await prefill.connect()
    await decode.told("reader_stopped", lease_id=harden.lease_id)
    # Its running turns are named again, for what the old stream had queued was dropped.
    expect = await prefill.told("expect_turn", turn_token=begun.turn_token)
    assert expect.lease_id == ""


async def test_a_lease_that_nobody_knows_is_revoked(cluster: Cluster) -> None:
    lease = agents.AgentLease(lease_id="from another life", version=7)
    held = agents.AgentLease(lease_id="held for another", version=7, is_source=True)
    agent = await cluster.agent("d", DECODE, leases=[lease, held]).connect()
    revoke = await agent.told("revoke")
    assert (revoke.lease_id, revoke.version) == ("from another life", 8)
    assert agent.kinds() == []


async def test_the_epoch_rises_above_what_any_agent_has_seen(cluster: Cluster) -> None:
    agent = await cluster.agent("d", DECODE, highest_epoch=41).connect()
    assert agent.epoch == 42
    status = await cluster.cluster.GetStatus(workers.GetStatusRequest(), timeout=T)
    assert status.epoch == 42
    await cluster.restart()
    status = await cluster.cluster.GetStatus(workers.GetStatusRequest(), timeout=T)
    assert status.epoch == 43


async def test_another_stores_agent_is_refused(cluster: Cluster) -> None:
    error = await refused(cluster, "d", lineage_id="lineage-of-another")
    assert reason(error) == "LINEAGE_CHANGED"
    assert "--accept-lineage-change" in (error.details() or "")


async def test_a_drained_worker_gets_no_new_turn(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    request = workers.DrainWorkerRequest(worker_id="d")
    drained = await cluster.cluster.DrainWorker(request, timeout=T)
    assert drained.worker.state == workers.WORKER_STATE_DRAINING
    assert not (await decode.told("drain")).undo
    begun = await cluster.begin()
    assert begun.turn.decode.worker == prefill.ref
    await cluster.end(2)
    other = await cluster.agent("d2", DECODE).connect()
    begun = await cluster.begin()
    assert begun.turn.decode.worker == other.ref
    assert begun.turn.plan.reason == "DRAINING"
    await cluster.cluster.DrainWorker(
        workers.DrainWorkerRequest(worker_id="d", undo=True), timeout=T
    )
    assert (await cluster.begin()).turn.decode.worker == decode.ref


async def test_silence_ends_a_stream(tmp_path: Path) -> None:
    limits = dataclasses.replace(
        Limits(), tick_ns=10 * MS, heartbeat_ns=30 * MS, silence_ns=300 * MS
    )
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    try:
        agent = await cluster.agent("d", DECODE).connect()
        await agent.until_ended()
        assert (await worker(cluster, "d")).state == workers.WORKER_STATE_LOST
    finally:
        await cluster.stop()


async def test_the_control_plane_is_not_silent_either(tmp_path: Path) -> None:
    """An agent takes a long silence for a dead control plane."""
    cluster = Cluster(tmp_path, dataclasses.replace(Limits(), heartbeat_ns=30 * MS))
    await cluster.start()
    try:
        agent = cluster.agent("d", DECODE)
        call = agent.stub.Connect()
        await call.write(agents.ConnectRequest(hello=agent.hello))
        async with asyncio.timeout(5):
            welcome = await call.read()
            beat = await call.read()
        assert isinstance(welcome, agents.ConnectResponse)
        assert isinstance(beat, agents.ConnectResponse)
        assert len(beat.commands.commands) == 0
        call.cancel()
    finally:
        await cluster.stop()


async def test_the_first_message_must_be_a_hello(cluster: Cluster) -> None:
    call = cluster.agent("d", DECODE).stub.Connect()
    await call.write(agents.ConnectRequest(heartbeat=agents.AgentHeartbeat()))
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "value"),
    [("worker_id", ""), ("boot_id", ""), ("url", ""), ("block_size", 0), ("role", 9)],
)
async def test_a_malformed_hello_is_refused(cluster: Cluster, field: str, value: Any) -> None:
    agent = cluster.agent("d", DECODE)
    setattr(agent.hello, field, value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await agent.connect()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_one_bad_event_does_not_lose_the_others(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    begun = await cluster.begin()
    bad = agents.AgentEvent(stopped=agents.LeaseStopped(lease_id="x"))  # no outcome
    unknown = agents.AgentEvent(active=agents.LeaseActive(lease_id="never made"))
    good = agents.AgentEvent(
        offered=prefill.replica(CHAIN[:4], "s", turn_token=begun.turn_token, leg=types.LEG_PREFILL)
    )
    await prefill._call.write(
        agents.ConnectRequest(
            events=agents.AgentEvents(events=[bad, unknown, agents.AgentEvent(), good])
        )
    )
    await prefill.told("harden")


async def test_what_is_said_at_once_is_all_heard(cluster: Cluster) -> None:
    """The scripted agent's own: an agent that reports while it obeys loses neither."""
    decode = await cluster.agent("d", DECODE).connect()
    pool = workers.PoolStats(total_blocks=100, free_blocks=60)
    await asyncio.gather(*(decode.beat(clock, pool=pool) for clock in range(1, 31)))
    await eventually(lambda: worker(cluster, "d"), lambda found: found.pool_clock == 30)
    assert decode.ended is None


async def test_a_late_hardening_is_not_granted(tmp_path: Path) -> None:
    """The source's hold would end before the destination's deadline."""
    cluster = Cluster(tmp_path, dataclasses.replace(Limits(), tick_ns=10 * MS, guard_ns=50 * MS))
    await cluster.start()
    try:
        prefill, decode = await cluster.pair()
        begun = await cluster.begin()
        await prefill.offer(CHAIN[:4], "s", begun.turn_token, types.LEG_PREFILL)
        harden = await prefill.told("harden")
        over = await ended(cluster, harden.lease_id)
        assert over.state == leases.LEASE_STATE_FAILED
        await prefill.harden(harden, CHAIN)
        await decode.told("revoke", turn_token=begun.turn_token)
        await prefill.told("reader_stopped", lease_id=harden.lease_id)
        assert "grant" not in decode.kinds()
    finally:
        await cluster.stop()


async def test_a_destination_has_its_leases_extended_many_at_once(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    made: list[int] = []
    for number in range(3):
        name = f"s{number}"
        chain = hashes(name, 20)
        begun = await cluster.begin(name)
        await decode.offer(chain, name, begun.turn_token, types.LEG_DECODE)
        await cluster.end(1, name)
        await cluster.begin(name, return_policy=sessions.RETURN_POLICY_ALWAYS)
        order = await decode.told("harden")
        await decode.harden(order, chain)
        grant = await prefill.told("grant")
        assert (grant.lease_epoch, grant.lease_seq) == (order.lease_epoch, order.lease_seq)
        made.append(grant.lease_seq)
    await prefill.say(
        leases_needed=agents.LeasesNeeded(lease_epoch=prefill.epoch, lease_seqs=[*made, 10_000])
    )
    extend = await decode.told("extend_leases", is_source=True)
    assert sorted(extend.lease_seqs) == made
    await decode.say(
        leases_extended=agents.LeasesExtended(extension=extend.extension, missing_seqs=[made[1]])
    )
    told = await prefill.told("extend_leases", is_source=False)
    assert sorted(told.lease_seqs) == [made[0], made[2]]
    assert told.as_of == prefill.hello.clock
    assert told.ttl == extend.ttl


async def test_only_a_heartbeat_renews_what_the_pool_is_known_to_be(cluster: Cluster) -> None:
    """Any message is a sign of life, and a reconnect too; neither tells of the pool."""
    _, decode = await cluster.pair()
    pool = workers.PoolStats(total_blocks=100, free_blocks=60)
    await decode.beat(7_000, pool=pool)
    before = await eventually(lambda: worker(cluster, "d"), lambda got: got.pool_clock)
    assert (before.pool, before.pool_clock) == (pool, 7_000)
    await decode.say(replica_changed=agents.ReplicaChanged(session_id="nobody's"))
    heard = before.heartbeat_time.ToNanoseconds()
    after = await eventually(
        lambda: worker(cluster, "d"), lambda got: got.heartbeat_time.ToNanoseconds() > heard
    )
    assert (after.pool, after.pool_clock) == (pool, 7_000)
    decode.hello.clock = 8_000
    await decode.connect()
    again = await worker(cluster, "d")
    assert (again.pool, again.pool_clock) == (pool, 7_000)


async def test_the_leak_oracle_is_not_content_with_what_was_counted_before(
    cluster: Cluster,
) -> None:
    """A turn may begin and leak between two heartbeats, and say things meanwhile."""
    decode = await cluster.agent("d", DECODE).connect()
    clean = workers.PoolStats(total_blocks=100, free_blocks=100)
    leaky = workers.PoolStats(total_blocks=100, free_blocks=95, holds=1, held_blocks=5)

    async def checked() -> None:
        with ControlPlaneView(cluster.server.addresses.api) as view:
            await asyncio.to_thread(assert_nothing_leaked, view, {"d": 100}, timeout_s=5)

    await decode.beat(boottime_ns(), pool=clean)
    await eventually(lambda: worker(cluster, "d"), lambda got: got.pool.total_blocks)
    looks = asyncio.create_task(checked())
    for _ in range(20):
        await decode.say(replica_changed=agents.ReplicaChanged(session_id="nobody's"))
        await asyncio.sleep(0.01)
    # One that was under way: newer for the control plane, and older than the question.
    await decode.beat(1, pool=clean)
    await decode.beat(boottime_ns(), pool=leaky)
    with pytest.raises(AssertionError, match="d has 5 held blocks; d has 1 holds; d has 95 free"):
        await looks
    await decode.beat(boottime_ns() + 60 * 10**9, pool=clean)
    await checked()


async def test_a_baseline_is_counted_when_it_is_asked_for_and_leaves_nobody_out(
    cluster: Cluster,
) -> None:
    prefill, decode = await cluster.pair()
    await prefill.beat(boottime_ns(), pool=workers.PoolStats(total_blocks=9, free_blocks=1))
    with ControlPlaneView(cluster.server.addresses.api) as view:
        asked = asyncio.create_task(asyncio.to_thread(free_blocks, view))
        await eventually(lambda: worker(cluster, "p"), lambda got: got.pool.total_blocks)
        later = boottime_ns() + 60 * 10**9
        await prefill.beat(later, pool=workers.PoolStats(total_blocks=9, free_blocks=8))
        await eventually(lambda: worker(cluster, "p"), lambda got: got.pool_clock == later)
        assert not asked.done()
        await decode.beat(later, pool=workers.PoolStats(total_blocks=9, free_blocks=7))
        assert await asked == {"p": 8, "d": 7}
