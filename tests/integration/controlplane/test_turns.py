"""Whole turns over the real streams, both agents played by the test."""

from __future__ import annotations

import grpc
import pytest

from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import BLOCK, Agent, hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually

CHAIN = hashes("conversation", 40)


async def lease(cluster: Cluster, lease_id: str) -> leases.Lease:
    request = leases.GetLeaseRequest(lease_id=lease_id)
    return (await cluster.leases.GetLease(request, timeout=T)).lease


async def ended(cluster: Cluster, lease_id: str) -> leases.Lease:
    found = await eventually(
        lambda: lease(cluster, lease_id), lambda x: x.state >= leases.LEASE_STATE_COMPLETED
    )
    assert isinstance(found, leases.Lease)
    return found


async def first_turn(
    cluster: Cluster, prefill: Agent, decode: Agent, blocks: int = 10
) -> sessions.BeginTurnResponse:
    """A turn without a return: forward only."""
    begun = await cluster.begin()
    expect_p = await prefill.told("expect_turn", turn_token=begun.turn_token)
    expect_d = await decode.told("expect_turn", turn_token=begun.turn_token)
    assert (expect_p.leg, expect_p.lease_id, expect_p.lease_follows) == (
        types.LEG_PREFILL,
        "",
        False,
    )
    assert (expect_d.leg, expect_d.lease_id, expect_d.lease_follows) == (types.LEG_DECODE, "", True)
    assert expect_d.retention.seconds == 1_800
    assert expect_p.retention.seconds == 10
    await prefill.offer(CHAIN[:blocks], "s", begun.turn_token, types.LEG_PREFILL)
    harden = await prefill.told("harden")
    assert (harden.range.start, harden.range.end) == (0, blocks)
    assert harden.destination == decode.ref
    await prefill.harden(harden, CHAIN)
    grant = await decode.told("grant")
    assert grant.turn_token == begun.turn_token
    assert grant.direction == types.DIRECTION_FORWARD
    assert grant.source == prefill.ref
    assert list(grant.blocks.block_ids) == list(range(100, 100 + blocks))
    await decode.publish(grant.lease_id, blocks)
    assert (await prefill.told("reader_stopped")).lease_id == grant.lease_id
    assert (await prefill.told("release_replica")).head_hash == CHAIN[blocks - 1]
    await decode.offer(CHAIN[: blocks + 2], "s", begun.turn_token, types.LEG_DECODE)
    await cluster.end(begun.turn.turn)
    await prefill.told("forget_turn", turn_token=begun.turn_token)
    await decode.told("forget_turn", turn_token=begun.turn_token)
    await eventually(cluster.session, lambda s: any(r.worker == decode.ref for r in s.replicas))
    return begun


async def test_two_turns_return_what_decode_holds(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    first = await first_turn(cluster, prefill, decode)
    assert first.turn.plan.return_mode == sessions.RETURN_MODE_NONE
    assert first.turn.plan.reason == "NO_REPLICA"
    await prefill.beat(7_777)
    await eventually(
        lambda: cluster.cluster.GetWorker(workers.GetWorkerRequest(worker_id="p"), timeout=T),
        lambda _: cluster.server.registry.state.workers["p"].clock == 7_777,
    )

    begun = await cluster.begin()
    plan = begun.turn.plan
    assert (plan.return_mode, plan.reason) == (sessions.RETURN_MODE_LAZY, "CHEAPER_TO_MOVE")
    assert plan.reusable_tokens == 12 * BLOCK
    assert plan.predicted_transfer.ToNanoseconds() < plan.predicted_recompute.ToNanoseconds()
    expect = await prefill.told("expect_turn", turn_token=begun.turn_token)
    harden = await decode.told("harden")
    assert expect.lease_id == harden.lease_id
    assert harden.head_hash == CHAIN[11]
    assert harden.destination == prefill.ref
    assert (harden.ttl.seconds, harden.guard.seconds) == (30, 5)
    await decode.harden(harden, CHAIN)
    grant = await prefill.told("grant")
    assert grant.as_of == 7_777
    assert grant.direction == types.DIRECTION_RETURN
    assert grant.blocks.hashes == b"".join(CHAIN[:12])
    granted = await lease(cluster, grant.lease_id)
    assert granted.state == leases.LEASE_STATE_GRANTED
    assert granted.head_hash == CHAIN[11]
    await prefill.publish(grant.lease_id, 12)
    assert (await decode.told("reader_stopped")).lease_id == grant.lease_id
    done = await ended(cluster, grant.lease_id)
    assert done.state == leases.LEASE_STATE_COMPLETED
    assert done.stats.tokens == 12 * BLOCK
    turn = await cluster.end(2)
    assert turn.state == sessions.TURN_STATE_ENDED


async def test_commands_are_sent_before_the_answer(cluster: Cluster) -> None:
    """The gateway's request may reach the engine at once, so its agent must know the turn."""
    prefill, decode = await cluster.pair()
    begun = await cluster.begin()
    for agent in (prefill, decode):
        await agent.told("expect_turn", turn_token=begun.turn_token)


async def test_a_refused_return_tells_prefill_at_once(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    begun = await cluster.begin()
    harden = await decode.told("harden")
    await decode.say(
        refused=agents.LeaseRefused(
            lease_id=harden.lease_id, version=harden.version, reason="REPLICA_GONE"
        )
    )
    revoke = await prefill.told("revoke", lease_id=harden.lease_id)
    assert (revoke.reason, revoke.turn_token) == ("REPLICA_GONE", begun.turn_token)
    failed = await ended(cluster, harden.lease_id)
    assert (failed.state, failed.end_reason) == (leases.LEASE_STATE_FAILED, "REPLICA_GONE")


async def test_the_end_of_a_turn_stops_its_lease_but_not_the_sources_hold(
    cluster: Cluster,
) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await cluster.begin()
    harden = await decode.told("harden")
    await decode.harden(harden, CHAIN)
    await prefill.told("grant")
    await cluster.end(2, outcome=sessions.TURN_OUTCOME_CANCELLED)
    await prefill.told("revoke", lease_id=harden.lease_id)
    await decode.told("forget_turn")
    assert (await lease(cluster, harden.lease_id)).state == leases.LEASE_STATE_GRANTED
    assert "reader_stopped" not in decode.kinds()
    await prefill.stop(harden.lease_id, agents.TRANSFER_OUTCOME_REVOKED)
    await decode.told("reader_stopped", lease_id=harden.lease_id)
    over = await ended(cluster, harden.lease_id)
    assert (over.state, over.end_reason) == (leases.LEASE_STATE_REVOKED, "TURN_ENDED")


async def test_begin_and_end_are_idempotent(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    one = await cluster.begin(request_id="r")
    again = await cluster.begin(request_id="r")
    assert one == again
    first = await cluster.end(1, request_id="e")
    assert await cluster.end(1, outcome=sessions.TURN_OUTCOME_FAILED) == first
    await prefill.told("forget_turn")
    await decode.told("forget_turn")
    assert (await cluster.session()).turn_count == 1


async def test_turns_of_one_session_run_at_once(cluster: Cluster) -> None:
    await cluster.pair()
    one, two = await cluster.begin(), await cluster.begin()
    assert (one.turn.turn, two.turn.turn) == (1, 2)
    assert one.turn_token != two.turn_token
    assert {t.turn for t in (await cluster.session()).turns} == {1, 2}
    await cluster.end(2)
    await cluster.end(1)
    assert [t.turn for t in (await cluster.session()).turns] == [1]


async def test_one_worker_runs_turns_directly(cluster: Cluster) -> None:
    alone = await cluster.agent("b", types.WORKER_ROLE_BOTH).connect()
    begun = await cluster.begin()
    assert not begun.turn.HasField("prefill")
    assert begun.turn.decode.url == "http://b:8000"
    assert begun.turn.plan.return_mode == sessions.RETURN_MODE_DIRECT
    expect = await alone.told("expect_turn")
    assert (expect.leg, expect.lease_id, expect.lease_follows) == (types.LEG_DECODE, "", False)


async def test_without_workers_a_turn_is_refused_with_a_retry(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.begin()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_end_of_a_session_releases_everything(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await cluster.begin()
    harden = await decode.told("harden")
    request = sessions.EndSessionRequest(session_id="s")
    over = (await cluster.sessions.EndSession(request, timeout=T)).session
    assert over.state == sessions.SESSION_STATE_ENDED
    released = await decode.told("release_replica")
    assert released.head_hash == b""
    await prefill.told("revoke", lease_id=harden.lease_id)
    await decode.say(
        replica_changed=agents.ReplicaChanged(
            tenant="default",
            session_id="s",
            head_hash=CHAIN[11],
            state=sessions.REPLICA_STATE_GONE,
            reason="RELEASED",
        )
    )
    await eventually(cluster.session, lambda s: not any(r.worker == decode.ref for r in s.replicas))
    # What comes late is not kept either.
    await decode.offer(CHAIN[:13], "s", "", types.LEG_DECODE)
    assert (await decode.told("release_replica")).head_hash == CHAIN[12]
    # Afresh, and the numbers go on.
    assert (await cluster.begin()).turn.turn == 3


async def test_hints_change_how_long_decode_holds(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    request = sessions.UpdateSessionRequest(session_id="s")
    request.hints.expected_idle.FromSeconds(500)
    await cluster.sessions.UpdateSession(request, timeout=T)
    retain = await decode.told("retain_replica")
    assert (retain.head_hash, retain.retention.seconds) == (CHAIN[11], 2_000)


async def test_a_worker_that_holds_too_much_is_told_to_trim(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    pool = workers.PoolStats(total_blocks=100, free_blocks=50, held_blocks=80)
    await decode.beat(2_000, pool=pool)
    trim = await decode.told("retain_replica")
    assert (trim.head_hash, trim.keep_blocks) == (CHAIN[11], 7)
    assert trim.retention.seconds > 0
    await decode.say(
        replica_changed=agents.ReplicaChanged(
            tenant="default",
            session_id="s",
            head_hash=CHAIN[11],
            state=sessions.REPLICA_STATE_HARD,
            num_blocks=7,
            reason="TRIMMED",
        )
    )
    await eventually(
        cluster.session,
        lambda s: [r.num_blocks for r in s.replicas if r.worker == decode.ref] == [7],
    )


async def test_policy_and_exclusion(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    never = await cluster.begin(return_policy=sessions.RETURN_POLICY_NEVER)
    assert never.turn.plan.reason == "POLICY_NEVER"
    other = await cluster.agent("d2", types.WORKER_ROLE_DECODE).connect()
    moved = await cluster.begin(exclude_worker_ids=["d"])
    assert moved.turn.decode.worker == other.ref
    assert moved.turn.plan.reason == "WORKER_EXCLUDED"


async def test_a_killed_decode_leaves_no_lease_open(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    begun = await cluster.begin()
    harden = await decode.told("harden")
    await decode.close()
    await prefill.told("revoke", lease_id=harden.lease_id, turn_token=begun.turn_token)
    over = await ended(cluster, harden.lease_id)
    assert (over.state, over.end_reason) == (leases.LEASE_STATE_FAILED, "SOURCE_LOST")
    # The next turn runs on what is left.
    direct = await cluster.begin()
    assert direct.turn.decode.worker == prefill.ref


async def test_renewal_goes_source_first(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await first_turn(cluster, prefill, decode)
    await cluster.begin()
    harden = await decode.told("harden")
    await decode.harden(harden, CHAIN)
    await prefill.told("grant")
    request = leases.RenewLeaseRequest(lease_id=harden.lease_id)
    request.ttl.FromSeconds(100)
    await cluster.leases.RenewLease(request, timeout=T)
    order = await decode.told("extend")
    assert order.is_source
    assert "extend" not in prefill.kinds()
    await decode.say(
        extended=agents.LeaseExtended(
            lease_id=harden.lease_id, version=order.version, is_source=True
        )
    )
    order = await prefill.told("extend")
    assert (order.is_source, order.as_of, order.ttl.seconds) == (False, 1_000, 100)


async def test_a_turn_ends_whatever_its_engine_says_was_cached(cluster: Cluster) -> None:
    await cluster.pair()
    for number, (prompt, cached, kept) in enumerate(
        [(100, 101, 100), (100, 100, 100), (0, 1 << 40, 0), (1 << 40, 1, 1)], 1
    ):
        await cluster.begin()
        said = sessions.TurnUsage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=1 << 40)
        over = await cluster.end(number, usage=said)
        assert over.state == sessions.TURN_STATE_ENDED
        assert (over.usage.prompt_tokens, over.usage.cached_tokens) == (prompt, kept)
