"""Prefill writes into decode's memory while it computes, on real engines, and nobody can tell.

As in the main job, every answer is compared with one plain engine's, and after every test nothing
is held. The engines take 2,048 tokens a step, so that longer prompts are computed in chunks. What
is computed faster than decode can offer its landing zone is read instead, so where a test is about
a push its prompt takes prefill much longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from kvshuttle.localstack import Answer, Message, local_http, user
from kvshuttle.localstack.metrics import EXTERNAL_HITS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from tests.e2e.conftest import DECODE, PREFILL, Cluster
from tests.e2e.steps import BLOCK, tries, turn, wait_for_leases, wait_until
from tests.e2e.test_going_away import Request
from tests.support.conversation import (
    Conversation,
    Oracle,
    differences,
    text,
)

LONG = 1_000
"""Words, and about as many tokens: most of a second of prefill's time; decode's offer takes some
hundredths."""

DELAY_S = 3.0
"""For which a write waits where a test is to see it: also on a machine that has much else to do."""

pytestmark = pytest.mark.usefixtures("pushing", "nothing_leaked")


@pytest.fixture(scope="module")
def pushing(cluster: Cluster) -> Iterator[None]:
    """The control plane with pushes; the engines go on."""
    with cluster.control_plane_with("--no-eager", "--forward", "push"):
        yield


def pushes(cluster: Cluster, session: str) -> list[lease_pb2.Lease]:
    """The session's pushes, newest first."""
    return [x for x in cluster.view.leases(session) if x.push]


def whole(push: lease_pb2.Lease) -> bool:
    """Whether it has brought its blocks."""
    return push.state == lease_pb2.LEASE_STATE_COMPLETED and push.stats.blocks > 0


def pushed_tokens(cluster: Cluster) -> int:
    """Tokens that decode got by a push, as of its last heartbeat."""
    return int(cluster.view.workers()[DECODE].counters.pushed_tokens)


def loaded_tokens(cluster: Cluster) -> int:
    """vLLM's own count of what decode did not compute because it was moved."""
    return int(cluster.decode.metrics().total(EXTERNAL_HITS))


def completed(cluster: Cluster, session: str, count: int) -> list[lease_pb2.Lease]:
    """The session's completed pushes, when there are so many."""

    def found() -> list[lease_pb2.Lease]:
        return [x for x in pushes(cluster, session) if whole(x)]

    try:
        wait_until(lambda: len(found()) >= count, f"{count} pushes have completed")
    except AssertionError:
        ends = [(x.turn, x.push, x.end_reason) for x in cluster.view.leases(session)]
        raise AssertionError(f"not {count} pushes have completed: {ends}") from None
    return found()


def being_written(cluster: Cluster, session: str) -> bool:
    """Whether a push of the session is under way."""
    return any(x.state == lease_pb2.LEASE_STATE_ACTIVE for x in pushes(cluster, session))


def begun(cluster: Cluster, session: str) -> bool:
    """Whether a push of the session is under way, or it was given up for a read."""
    return any(x.state > lease_pb2.LEASE_STATE_GRANTED for x in pushes(cluster, session))


@contextmanager
def under_way(
    cluster: Cluster, name: str, seed: int
) -> Iterator[tuple[Conversation, list[Message], Future[Answer]]]:
    """A conversation whose first turn's prompt is being written, and its answer to come. Writes
    wait, so that it goes on for a while. Where decode's offer of a landing zone comes after prefill
    has computed, the prompt is read instead: then another conversation."""
    with cluster.faults(PREFILL, delay_layer_s=DELAY_S), ThreadPoolExecutor(1) as pool:
        for number in tries("a prompt is being written"):
            talk = Conversation(f"{name}-{number}", seed=seed * 10 + number)
            messages = talk.say(LONG)
            asked = pool.submit(cluster.client.ask, messages, session=talk.session, max_tokens=16)
            wait_until(partial(written_or_done, cluster, talk.session, asked), "it is written")
            if not asked.done():
                break
        yield talk, messages, asked


def written_or_done(cluster: Cluster, session: str, asked: Future[Answer]) -> bool:
    return being_written(cluster, session) or asked.done()


def test_turns_are_pushed_and_only_what_decode_lacks(cluster: Cluster, oracle: Oracle) -> None:
    for number in tries("decode's offers come in time for three turns"):
        talk = Conversation(f"push-{number}", seed=800 + number)
        if three_turns(cluster, oracle, talk):
            break
    ended = cluster.view.session(talk.session).turns[-1]
    assert (ended.plan.forward_mode, ended.plan.forward_reason) == (2, "CONFIGURED")


def three_turns(cluster: Cluster, oracle: Oracle, talk: Conversation) -> bool:
    """Checks what three turns push; False where one was read instead, because decode's offer of a
    landing zone came after prefill had computed."""
    whole = 0
    for number in range(1, 4):
        before = loaded_tokens(cluster)
        turn(cluster, oracle, talk, words=LONG)
        wait_until(partial(begun, cluster, talk.session), "its KV is on its way")
        if any(x.end_reason == "PULLED_INSTEAD" for x in pushes(cluster, talk.session)):
            return False
        lease = completed(cluster, talk.session, number)[0]
        prompt = oracle.answer(talk.messages[:-1]).prompt_tokens
        # Up to the last token, which is computed, so in the last block, which is not full, too;
        # from what decode had of the turn before.
        assert lease.range.end == prompt // BLOCK
        assert lease.range.start >= whole
        assert loaded_tokens(cluster) - before == prompt - 1 - lease.range.start * BLOCK
        assert lease.stats.tokens == prompt - 1 - lease.range.start * BLOCK
        bytes_a_block = cluster.view.workers()[DECODE].bytes_per_block
        assert lease.stats.bytes == lease.stats.blocks * bytes_a_block
        whole = prompt // BLOCK
    return True


def test_a_prompt_in_chunks(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("push-chunks", seed=81)
    turn(cluster, oracle, talk, words=2_400)
    (lease,) = completed(cluster, talk.session, 1)
    assert lease.range.end * BLOCK > 2_048
    turn(cluster, oracle, talk, words=100)


def test_with_a_return_in_the_same_turn(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("push-return", seed=82)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    assert turn(cluster, oracle, talk, words=LONG) > 0
    assert completed(cluster, talk.session, 1)[0].turn == 2


def test_what_prefill_has_cached_is_written_too(cluster: Cluster, oracle: Oracle) -> None:
    """Another session's prompt is the same, so prefill computes its last block only."""
    messages = [user("The same start. " + text(300, 83))]
    for session in ("push-hit-a", "push-hit-b"):
        cluster.decode.wait_prefix_cache_reset()
        answer = cluster.client.ask(messages, session=session, max_tokens=16)
        oracle.check(answer, messages)
        cluster.wait_offered(session)
        cluster.view.end_session(session)
        wait_until(lambda: not cluster.held(DECODE), "decode has let go")


def test_many_at_once(cluster: Cluster, oracle: Oracle) -> None:
    prompts = [[user(f"Number {i}. " + text(200 + 30 * i, 200 + i))] for i in range(8)]
    for prompt in prompts:
        oracle.answer(prompt)
    before = loaded_tokens(cluster)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda x: cluster.client.ask(x[1], session=f"push-many-{x[0]}", max_tokens=16),
                enumerate(prompts),
            )
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(answer, prompt)
    assert loaded_tokens(cluster) > before


def test_an_answer_of_one_token(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("push-one", seed=84)
    messages = talk.say()
    answer = cluster.client.ask(messages, session=talk.session, max_tokens=1)
    oracle.check(answer, messages, max_tokens=1)


def test_many_choices_of_one_request(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("push-choices", seed=85)
    body = cluster.client.body(talk.say(), max_tokens=16) | {"n": 3, "temperature": 1.0}
    response = local_http.post(
        f"{cluster.gateway.url}/v1/chat/completions",
        json=body,
        headers={"X-Session-ID": talk.session},
        timeout=120,
    )
    assert response.status_code == 200, response.text
    assert [c["index"] for c in response.json()["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.4])
def test_a_client_that_goes_away_strands_nothing(
    cluster: Cluster, oracle: Oracle, after_s: float
) -> None:
    talk = Conversation(f"push-cancel-{after_s}", seed=86)
    request = Request(cluster, talk, [user(text(1_500, 860 + int(after_s * 10)))])
    time.sleep(after_s)
    request.hang_up()
    turn(cluster, oracle, talk)


def test_a_client_that_goes_away_while_it_is_written(cluster: Cluster, oracle: Oracle) -> None:
    with cluster.faults(PREFILL, delay_layer_s=DELAY_S):
        for number in tries("a prompt is being written"):
            talk = Conversation(f"push-cancel-midst-{number}", seed=870 + number)
            request = Request(cluster, talk, [user(text(LONG, 8_700 + number))])
            try:
                wait_until(partial(begun, cluster, talk.session), "its KV is on its way")
                found = being_written(cluster, talk.session)
            finally:
                request.hang_up()
            if found:
                break
        wait_until(lambda: not cluster.view.open_leases(), "the lease has ended")
    turn(cluster, oracle, talk)


def test_a_corrupted_block_is_seen_by_the_oracle(cluster: Cluster, oracle: Oracle) -> None:
    for number in tries("a push is over in time"):
        session, messages = f"push-corrupt-{number}", [user(text(LONG, 8_800 + number))]
        with cluster.faults(DECODE, corrupt_pushed_block=True):
            answer = cluster.client.ask(messages, session=session, max_tokens=16)
        wait_for_leases(cluster, session)
        # Where it was pulled instead, nothing was corrupted.
        pushed = [x for x in pushes(cluster, session) if whole(x)]
        cluster.view.end_session(session)
        if pushed:
            break
    assert differences(answer, oracle.answer(messages)) != []
    wait_until(lambda: not cluster.held(DECODE), "decode has let go")
    cluster.decode.wait_prefix_cache_reset()


def test_a_push_that_stands_still_and_prefill_killed_in_the_midst_of_another(
    cluster: Cluster, oracle: Oracle
) -> None:
    """Both are recomputed; both landing zones stay in quarantine, until their writer is attested
    dead. One test, for an engine takes its time to start again."""

    def quarantined() -> int:
        return cluster.view.workers()[DECODE].pool.quarantined_blocks

    messages = [user(text(LONG, 890))]
    with cluster.faults(PREFILL, stall_pushes=True):
        answer = cluster.client.ask(messages, session="push-stalled", max_tokens=16)
    oracle.check(answer, messages)
    wait_until(lambda: quarantined() > 0, "the landing blocks are in quarantine")
    stalled = quarantined()

    with under_way(cluster, "push-prefill-killed", 90) as (talk, messages, asked):
        cluster.prefill.kill()
        answer = asked.result()
    oracle.check(answer, messages)
    wait_until(lambda: quarantined() > stalled, "these landing blocks are in quarantine too")
    # Nothing but an attestation lets them go.
    cluster.fence(PREFILL)
    wait_until(lambda: not quarantined(), "the landing blocks are free")
    cluster.restart_worker(cluster.prefill)
    talk.heard(answer)
    turn(cluster, oracle, talk)


def test_decode_killed_in_the_midst(cluster: Cluster, oracle: Oracle) -> None:
    with under_way(cluster, "push-decode-killed", 91) as (talk, messages, asked):
        cluster.decode.kill()
        answer = asked.result()
    oracle.check(answer, messages)
    cluster.fence(DECODE)
    cluster.restart_worker(cluster.decode)
    turn(cluster, oracle, talk)


def test_the_control_plane_killed_in_the_midst(cluster: Cluster, oracle: Oracle) -> None:
    with under_way(cluster, "push-cp-killed", 92) as (_, messages, asked):
        cluster.control_plane.kill()
        answer = asked.result()
    oracle.check(answer, messages)
    cluster.start_control_plane()


def test_auto_pushes_where_there_is_something_to_hide_behind(
    cluster: Cluster, oracle: Oracle
) -> None:
    talk = Conversation("push-auto", seed=93)
    with cluster.control_plane_with("--no-eager", "--forward", "auto"):
        for words, reason in ((60, "TOO_SHORT_TO_OVERLAP"), (2_400, "OVERLAP_PAYS")):
            turn(cluster, oracle, talk, words=words)
            plan = cluster.view.session(talk.session).turns[-1].plan
            assert plan.forward_reason == reason
            assert bool(pushes(cluster, talk.session)) == (reason == "OVERLAP_PAYS")
        assert completed(cluster, talk.session, 1)[0].turn == 2
