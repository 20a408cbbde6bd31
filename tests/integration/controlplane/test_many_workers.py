"""Several prefill and several decode workers: placing, moving, forking, over the real streams."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import BLOCK, Agent, hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually

P, D = types.WORKER_ROLE_PREFILL, types.WORKER_ROLE_DECODE


async def fleet(cluster: Cluster, prefills: int = 2, decodes: int = 2) -> dict[str, Agent]:
    names = [(f"p{i}", P) for i in range(prefills)] + [(f"d{i}", D) for i in range(decodes)]
    return {name: await cluster.agent(name, role).connect() for name, role in names}


def where(turn: sessions.Turn) -> tuple[str, str]:
    return turn.prefill.worker.worker_id, turn.decode.worker.worker_id


async def held(cluster: Cluster, agent: Agent, chain: list[bytes], session_id: str) -> None:
    """A decode worker holds a session's chain, and the control plane knows it."""
    await agent.say(offered=agent.replica(chain, session_id))

    def known(session: sessions.Session) -> bool:
        return any(replica.head_hash == chain[-1] for replica in session.replicas)

    await eventually(lambda: cluster.session(session_id), known)


async def test_new_sessions_spread_by_what_waits(cluster: Cluster) -> None:
    await fleet(cluster, prefills=2, decodes=3)
    placed = [
        where((await cluster.begin(f"s{i}", prompt_tokens_estimate=1_000)).turn) for i in range(12)
    ]
    assert set(Counter(prefill for prefill, _ in placed).values()) == {6}
    assert set(Counter(decode for _, decode in placed).values()) == {4}
    # One that has more to compute gets fewer.
    await cluster.begin("long", prompt_tokens_estimate=20_000)
    longest = (await cluster.session("long")).turns[0].prefill.worker.worker_id
    more = [
        where((await cluster.begin(f"t{i}", prompt_tokens_estimate=1_000)).turn)[0]
        for i in range(6)
    ]
    assert longest not in more


async def test_a_session_moves_when_load_says_so_and_its_kv_follows(cluster: Cluster) -> None:
    agents = await fleet(cluster)
    first = await cluster.begin(prompt_tokens_estimate=1_200)
    prefill, decode = where(first.turn)
    chain = hashes("s", 40)
    await held(cluster, agents[decode], chain, "s")
    await agents[prefill].computed(first.turn_token, 1_200, 600)
    await cluster.end(1, usage=sessions.TurnUsage(prompt_tokens=1_200))
    second = await cluster.begin(prompt_tokens_estimate=1_700)
    assert (where(second.turn), second.turn.plan.placement) == ((prefill, decode), "KV_IS_THERE")
    await cluster.end(2, usage=sessions.TurnUsage(prompt_tokens=1_700))
    for number in range(8):
        # Placed where prefill is by name: the other one is not asked.
        await cluster.begin(
            f"other{number}",
            prompt_tokens_estimate=8_000,
            exclude_worker_ids=["p1" if prefill == "p0" else "p0"],
        )
    third = await cluster.begin(prompt_tokens_estimate=2_200)
    moved, stayed = where(third.turn)
    assert (moved != prefill, stayed == decode) == (True, True)
    plan = third.turn.plan
    assert (plan.placement, plan.return_mode) == ("SHORTER_QUEUE", sessions.RETURN_MODE_LAZY)
    chosen, other = plan.candidates[:2]
    assert (chosen.prefill_worker_id, other.prefill_worker_id) == (moved, prefill)
    assert chosen.ttft_us < other.ttft_us
    assert plan.predicted_ttft.ToMicroseconds() == chosen.ttft_us
    order = await agents[decode].told("harden", session_id="s", destination=agents[moved].ref)
    await agents[decode].harden(order, chain)
    grant = await agents[moved].told("grant", turn_token=third.turn_token)
    await agents[moved].publish(grant.lease_id, 40)
    await cluster.end(3, usage=sessions.TurnUsage(prompt_tokens=2_200))
    # It stays there, also when the other one has nothing to do any more.
    fourth = await cluster.begin(prompt_tokens_estimate=2_700)
    assert where(fourth.turn) == (moved, decode)


async def test_a_decode_worker_with_a_queue_is_left(cluster: Cluster) -> None:
    agents = await fleet(cluster, prefills=1)
    first = await cluster.begin()
    _, decode = where(first.turn)
    chain = hashes("s", 40)
    await held(cluster, agents[decode], chain, "s")
    await cluster.end(1)
    pool = workers.PoolStats(
        total_blocks=1_000, free_blocks=500, running_requests=4, waiting_requests=40
    )
    await agents[decode].beat(2_000, pool=pool)

    async def waiting() -> int:
        request = workers.GetWorkerRequest(worker_id=decode)
        worker = (await cluster.cluster.GetWorker(request, timeout=T)).worker
        return worker.pool.waiting_requests

    await eventually(waiting, lambda count: count == 40)
    second = await cluster.begin()
    assert where(second.turn) == ("p0", "d1" if decode == "d0" else "d0")
    # Prefill reads from where the KV is, and the new decode worker gets all of it from prefill.
    order = await agents[decode].told("harden", session_id="s")
    assert order.destination == agents["p0"].ref
    expect = await agents[where(second.turn)[1]].told("expect_turn", turn_token=second.turn_token)
    assert expect.lease_follows


async def fork(cluster: Cluster, agents: dict[str, Agent], parent: str, chain: list[bytes]) -> Any:
    """A session of a parent whose KV decode holds."""
    first = await cluster.begin(parent)
    await held(cluster, agents[where(first.turn)[1]], chain, parent)
    await cluster.end(1, parent)
    return where(first.turn)


async def test_a_fork_finds_what_its_parent_left(cluster: Cluster) -> None:
    agents = await fleet(cluster)
    chain = hashes("shared", 48)
    _, holder = await fork(cluster, agents, "parent", chain)
    begun = await cluster.begin("child")
    reader = agents[where(begun.turn)[0]]
    expect = await reader.told("expect_turn", turn_token=begun.turn_token)
    assert (expect.may_ask, expect.lease_id) == (True, "")
    own = [*chain[:40], *hashes("child", 20)]
    await reader.ask(own, begun.turn_token)
    order = await agents[holder].told("harden")
    assert (order.session_id, order.head_hash) == ("parent", chain[-1])
    await agents[holder].harden(order, chain)
    grant = await reader.told("grant", turn_token=begun.turn_token)
    assert grant.blocks.hashes == b"".join(chain[: order.range.end])
    assert order.range.end >= 40
    await reader.publish(grant.lease_id, 40)
    await agents[holder].told("reader_stopped", lease_id=grant.lease_id)
    request = leases.GetLeaseRequest(lease_id=grant.lease_id)
    lease = await eventually(
        lambda: cluster.leases.GetLease(request, timeout=T),
        lambda x: x.lease.state == leases.LEASE_STATE_COMPLETED,
    )
    assert (lease.lease.session_id, lease.lease.source_session_id) == ("child", "parent")
    assert lease.lease.stats.tokens == 40 * BLOCK
    assert "release_replica" not in agents[holder].kinds()


async def test_another_tenant_finds_nothing(cluster: Cluster) -> None:
    """The same tokens, so the same hashes. That it may ask is not even said."""
    agents = await fleet(cluster, decodes=1)
    chain = hashes("shared", 48)
    await fork(cluster, agents, "parent", chain)
    stranger = (("kvshuttle-tenant", "stranger"),)
    begun = await cluster.sessions.BeginTurn(
        sessions.BeginTurnRequest(session_id="parent"), timeout=T, metadata=stranger
    )
    reader = agents[where(begun.turn)[0]]
    expect = await reader.told("expect_turn", turn_token=begun.turn_token)
    assert not expect.may_ask
    agents["d0"].seen.clear()
    await reader.ask(chain, begun.turn_token)
    revoke = await reader.told("revoke", turn_token=begun.turn_token)
    assert (revoke.lease_id, revoke.reason) == ("", "NO_PREFIX")
    assert "harden" not in agents["d0"].kinds()
    listed = await cluster.leases.ListLeases(leases.ListLeasesRequest(), timeout=T)
    assert not [x for x in listed.leases if x.tenant == "stranger"]


async def test_after_a_restart_the_agents_say_it_again(cluster: Cluster) -> None:
    agents = await fleet(cluster)
    chain = hashes("shared", 48)
    _, holder = await fork(cluster, agents, "parent", chain)
    await cluster.restart()
    for name, agent in agents.items():
        if name == holder:
            agent.hello.replicas.append(agent.replica(chain, "parent"))
        await agent.connect()
    begun = await cluster.begin("child")
    reader = agents[where(begun.turn)[0]]
    await reader.ask(chain, begun.turn_token)
    order = await agents[holder].told("harden")
    assert order.session_id == "parent"


async def test_a_short_turn_runs_at_decode_alone(cluster: Cluster) -> None:
    agents = await fleet(cluster)
    first = await cluster.begin(prompt_tokens_estimate=1_000)
    prefill, decode = where(first.turn)
    await held(cluster, agents[decode], hashes("s", 40), "s")
    usage = sessions.TurnUsage(prompt_tokens=1_250)
    await cluster.end(1, usage=usage)
    # 1,250 tokens counted where 1,000 were guessed: 1,080 are 1,350, and 70 are new.
    second = await cluster.begin(prompt_tokens_estimate=1_080)
    assert where(second.turn) == ("", decode)
    assert second.turn.plan.reason == "SHORT_PROMPT"
    assert second.turn.plan.candidates[0].compute_tokens == 70
    expect = await agents[decode].told("expect_turn", turn_token=second.turn_token)
    assert (expect.leg, expect.lease_id, expect.lease_follows) == (types.LEG_DECODE, "", False)
    assert not agents[prefill].kinds().count("harden")
    await cluster.end(2, usage=sessions.TurnUsage(prompt_tokens=1_350, cached_tokens=1_280))
    third = await cluster.begin(prompt_tokens_estimate=2_000)
    assert where(third.turn) == (prefill, decode)


async def test_what_was_compared_is_shown_until_the_turn_after(cluster: Cluster) -> None:
    await fleet(cluster)
    begun = await cluster.begin()
    assert begun.turn.plan.candidates
    await cluster.end(1)
    assert (await cluster.session()).turns[0].plan.candidates == begun.turn.plan.candidates
    await cluster.begin()
    await cluster.end(2)
    (last,) = (await cluster.session()).turns
    assert (last.turn, bool(last.plan.candidates)) == (2, True)


async def test_an_answer_to_a_question_of_an_unknown_turn_is_not_made(cluster: Cluster) -> None:
    agents = await fleet(cluster)
    chain = hashes("shared", 48)
    await fork(cluster, agents, "parent", chain)
    await agents["p0"].ask(chain, "nobody's")
    begun = await cluster.begin("child")
    reader = agents[where(begun.turn)[0]]
    await reader.ask(chain, begun.turn_token, have=47)  # hardly a block is missing
    revoke = await reader.told("revoke", turn_token=begun.turn_token)
    assert revoke.reason == "NO_PREFIX"
