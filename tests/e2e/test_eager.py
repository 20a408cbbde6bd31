"""Eager returns on real engines: the next turn finds a plain local hit, and nobody can tell."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvshuttle.localstack import Answer
from kvshuttle.localstack.metrics import EXTERNAL_HITS, LOCAL_HITS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from kvshuttle.v1 import types_pb2
from tests.e2e.conftest import DECODE, POOL_BLOCKS, PREFILL, Cluster
from tests.e2e.steps import BLOCK, tries, turn, wait_until
from tests.support.conversation import (
    Conversation,
    Oracle,
    differences,
)

pytestmark = pytest.mark.usefixtures("eager", "nothing_leaked")
# Tokens of an answer that lasts longer than it takes to see prefill idle and to reset its cache.
LONG = 1_500


@pytest.fixture(scope="module")
def eager(cluster: Cluster) -> Iterator[None]:
    """The control plane with eager returns; the engines go on."""
    with cluster.control_plane_with("--eager"):
        yield


def leases(cluster: Cluster, session: str, number: int = 0) -> list[lease_pb2.Lease]:
    """The session's eager leases, newest first; of one turn, if said."""
    return [x for x in cluster.view.leases(session) if x.eager and (not number or x.turn == number)]


def first_turn(cluster: Cluster, oracle: Oracle, talk: Conversation) -> Answer:
    """A turn during whose answer prefill loses its cache, so that all of it has to come back."""
    messages = talk.say(200)

    def computed() -> bool:
        return any(
            x.direction == types_pb2.DIRECTION_FORWARD
            and x.state == lease_pb2.LEASE_STATE_COMPLETED
            for x in cluster.view.leases(talk.session)
        )

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            cluster.client.ask,
            messages,
            session=talk.session,
            max_tokens=LONG,
            ignore_eos=True,
        )
        wait_until(computed, "decode has the prompt")
        cluster.forget_prefill()
        assert not asked.done(), "the answer was over before prefill had lost its cache"
        answer = asked.result()
    talk.heard(answer)
    return answer


def wait_until_read(cluster: Cluster, session: str) -> None:
    """Until an eager return of the session is under way."""
    wait_until(
        lambda: any(x.state == lease_pb2.LEASE_STATE_ACTIVE for x in leases(cluster, session)),
        "it is being read",
    )


def settled(cluster: Cluster, session: str, number: int) -> lease_pb2.Lease:
    """The eager lease of this turn, when it has ended."""

    def ended() -> bool:
        return any(
            x.state not in (lease_pb2.LEASE_STATE_GRANTED, lease_pb2.LEASE_STATE_ACTIVE)
            and x.state != lease_pb2.LEASE_STATE_PENDING
            for x in leases(cluster, session, number)
        )

    wait_until(ended, "the eager return has ended")
    return leases(cluster, session, number)[0]


def test_the_next_turn_finds_all_of_it_in_prefills_own_cache(
    cluster: Cluster, oracle: Oracle
) -> None:
    talk = Conversation("eager", seed=70)
    first = first_turn(cluster, oracle, talk)
    lease = settled(cluster, talk.session, 1)
    assert lease.state == lease_pb2.LEASE_STATE_COMPLETED
    held = (first.prompt_tokens + first.completion_tokens - 1) // BLOCK
    assert lease.stats.blocks == held
    bytes_a_block = cluster.view.workers()[DECODE].bytes_per_block
    assert lease.stats.bytes == held * bytes_a_block
    # Nothing is pinned for it any more, on either side.
    wait_until(lambda: not cluster.held(DECODE) and not cluster.held(PREFILL), "holds are gone")
    before = cluster.prefill.metrics()
    turn(cluster, oracle, talk)
    after = cluster.prefill.metrics()
    assert after.total(EXTERNAL_HITS) == before.total(EXTERNAL_HITS), "a request had to wait"
    hits = after.total(LOCAL_HITS) - before.total(LOCAL_HITS)
    # Random words may split into other tokens when they come back as text; the prompt does not.
    assert hits >= first.prompt_tokens // BLOCK * BLOCK
    ended = cluster.view.session(talk.session).turns[-1]
    assert ended.plan.reason == "EAGER_HIT"


def test_a_turn_that_comes_in_the_midst_of_it(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("eager-midst", seed=71)
    with cluster.faults(PREFILL, delay_read_s=1.0):
        first_turn(cluster, oracle, talk)
        wait_until_read(cluster, talk.session)
        messages = talk.say()
        answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
    talk.heard(answer)
    oracle.check(answer, messages)
    assert cluster.view.session(talk.session).turns[-1].plan.reason == "EAGER_IN_FLIGHT"


def test_the_oracle_sees_a_corrupted_one(cluster: Cluster, oracle: Oracle) -> None:
    for number in tries("an eager return is over in time"):
        talk = Conversation(f"eager-corrupt-{number}", seed=7_200 + number)
        with cluster.faults(PREFILL, corrupt_returned_block=True):
            first_turn(cluster, oracle, talk)
            lease = settled(cluster, talk.session, 1)
        if lease.state == lease_pb2.LEASE_STATE_COMPLETED:
            break
    messages = talk.say()
    answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
    assert differences(answer, oracle.answer(messages)) != []
    # Both engines have cached what was computed from it.
    cluster.view.end_session(talk.session)
    cluster.forget_prefill()
    cluster.decode.wait_prefix_cache_reset()


def test_prefill_is_paused_in_the_midst_of_it(cluster: Cluster, oracle: Oracle) -> None:
    """As before new weights: none of it may be in the cache when the engine goes on."""
    talk = Conversation("eager-paused", seed=75)
    with cluster.faults(PREFILL, delay_read_s=2.0):
        first_turn(cluster, oracle, talk)
        wait_until_read(cluster, talk.session)
        said = cluster.prefill.pause_vllm()
    lease = settled(cluster, talk.session, 1)
    cluster.prefill.resume_vllm()
    assert said.status_code == 200, said.text
    assert lease.end_reason == "ENGINE_PAUSED"
    before = cluster.prefill.metrics().total(LOCAL_HITS)
    turn(cluster, oracle, talk)
    assert cluster.prefill.metrics().total(LOCAL_HITS) == before


def test_a_session_that_ends_in_the_midst_of_it(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("eager-ended", seed=73)
    with cluster.faults(PREFILL, delay_read_s=1.0):
        first_turn(cluster, oracle, talk)
        wait_until(lambda: bool(leases(cluster, talk.session)), "it has begun")
        cluster.view.end_session(talk.session)
        cluster.assert_nothing_leaked()


def test_decode_dies_in_the_midst_of_it(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("eager-killed", seed=74)
    with cluster.faults(PREFILL, delay_read_s=2.0):
        first_turn(cluster, oracle, talk)
        wait_until_read(cluster, talk.session)
        cluster.decode.kill()
        messages = talk.say()
        answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
    oracle.check(answer, messages)
    cluster.fence(DECODE)
    cluster.restart_worker(cluster.decode)


def test_more_of_them_than_memory(cluster: Cluster, oracle: Oracle) -> None:
    talks = [Conversation(f"eager-crowd-{i}", seed=80 + i) for i in range(18)]
    for talk in talks:
        turn(cluster, oracle, talk, words=700)
    total = sum(oracle.answer(t.messages[:1]).prompt_tokens for t in talks)
    assert total > POOL_BLOCKS * BLOCK, "the test does not fill the pool"
    for talk in talks[:2] + talks[-2:]:
        turn(cluster, oracle, talk, words=40)
