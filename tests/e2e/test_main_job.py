"""The main job on real engines: KV goes back from decode to prefill, and nobody can tell.

Every answer is compared with one plain engine's, tokens and logprobs; after every test nothing is
held, no lease is open and the pools are as they were.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvshuttle.localstack import local_http, user
from kvshuttle.localstack.metrics import PREEMPTIONS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from kvshuttle.v1 import session_service_pb2 as session_pb
from kvshuttle.v1 import types_pb2
from tests.e2e.conftest import DECODE, POOL_BLOCKS, PREFILL, Cluster
from tests.e2e.steps import BLOCK, ask, has_moved, transferring, tries, turn, wait_until
from tests.support.conversation import (
    Conversation,
    Oracle,
    differences,
    text,
)

pytestmark = pytest.mark.usefixtures("nothing_leaked")


@pytest.mark.parametrize("stream", [True, False])
def test_with_prefills_cache_cold_all_comes_back(
    cluster: Cluster, oracle: Oracle, stream: bool
) -> None:
    talk = Conversation(f"cold-{stream}", seed=1 + stream)
    least = held = 0
    for number in range(3):
        cluster.forget_prefill()
        before = cluster.returned_tokens()
        messages = talk.say()
        answer = cluster.client.ask(messages, session=talk.session, max_tokens=16, stream=stream)
        talk.heard(answer)
        oracle.check(answer, messages)
        returned = cluster.returned_tokens() - before
        # The whole prompt of the turn before, and as much of its answer as reads the same when it
        # comes back as text: random words do not always split into the same tokens again.
        assert least <= returned <= held, number
        # What decode holds: all that was computed; the last token has no KV yet.
        least = answer.prompt_tokens // BLOCK * BLOCK
        held = answer.prompt_tokens + answer.completion_tokens - 1
        cluster.wait_offered(talk.session, held // BLOCK * BLOCK)
    completed = [
        x
        for x in cluster.view.leases(talk.session)
        if x.direction == 2 and x.state == lease_pb2.LEASE_STATE_COMPLETED and x.stats.bytes
    ]
    assert len(completed) == 2
    bytes_a_block = cluster.view.workers()[DECODE].bytes_per_block
    for lease in completed:
        # A last block that is not full is moved whole.
        assert lease.stats.bytes == lease.stats.blocks * bytes_a_block
        assert lease.stats.blocks == -(-lease.stats.tokens // BLOCK)
        assert lease.stats.descriptors


def test_the_last_block_moves_too_though_it_is_not_full(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("partial-block", seed=47)
    prefill_had = 0
    for number in range(3):
        cluster.forget_prefill()
        returned, forward = cluster.returned_tokens(), cluster.forward_tokens()
        messages = talk.say(70 + number)
        # One token, which is never computed on: what decode holds is the prompt, and the next
        # turn's begins with it.
        answer = cluster.client.ask(messages, session=talk.session, max_tokens=1)
        talk.heard(answer)
        oracle.check(answer, messages, max_tokens=1)
        assert answer.prompt_tokens % BLOCK, "the test shows nothing"
        assert cluster.returned_tokens() - returned == prefill_had
        # Decode has full blocks of its own, and computes the last token.
        missing = answer.prompt_tokens - 1 - (cluster.forward_tokens() - forward)
        assert missing % BLOCK == 0
        cluster.wait_offered(talk.session, answer.prompt_tokens // BLOCK * BLOCK)
        prefill_had = answer.prompt_tokens
    # What was computed from such blocks is cached now: it is right, too.
    turn(cluster, oracle, talk)
    turn(cluster, oracle, talk)


def test_an_answer_of_one_token_is_offered_too(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("one-token", seed=38)
    messages = talk.say()
    answer = cluster.client.ask(messages, session=talk.session, max_tokens=1)
    talk.heard(answer)
    oracle.check(answer, messages, max_tokens=1)
    cluster.wait_offered(talk.session, answer.prompt_tokens // BLOCK * BLOCK)
    cluster.forget_prefill()
    assert turn(cluster, oracle, talk) > 0


def test_a_cache_salt_keeps_kv_apart(cluster: Cluster, oracle: Oracle) -> None:
    """It is part of every block's hash, so equal text under another salt is other KV."""
    talk = Conversation("salt", seed=37)
    returned = []
    for salt in ("one", "one", "two"):
        cluster.forget_prefill()
        before = cluster.returned_tokens()
        messages = talk.say()
        answer = cluster.client.ask(messages, session=talk.session, max_tokens=16, cache_salt=salt)
        talk.heard(answer)
        oracle.check(answer, messages)
        cluster.wait_offered(talk.session, answer.prompt_tokens // BLOCK * BLOCK)
        returned.append(cluster.returned_tokens() - before)
    assert returned[0] == returned[2] == 0
    assert returned[1] > 0


def test_what_prefill_has_itself_is_not_moved(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("partial", seed=3)
    for _ in range(2):
        turn(cluster, oracle, talk)
    whole = oracle.answer(talk.messages[:3]).prompt_tokens // BLOCK * BLOCK
    cluster.forget_prefill()
    # Somebody else's request puts the first message, and no more, into prefill's own cache.
    ask(cluster, oracle, "partial-other", talk.messages[:1])
    own = oracle.answer(talk.messages[:1]).prompt_tokens // BLOCK * BLOCK
    returned = turn(cluster, oracle, talk)
    assert whole - own - BLOCK <= returned <= whole - own + 2 * BLOCK


def test_a_rewritten_history_returns_the_common_prefix_only(
    cluster: Cluster, oracle: Oracle
) -> None:
    talk = Conversation("rewritten", seed=4)
    turn(cluster, oracle, talk, words=150)
    turn(cluster, oracle, talk, words=150)
    cluster.forget_prefill()
    history = [*talk.messages]
    history[2] = user("Something else entirely. " + text(150, 99))
    kept = oracle.answer(history[:1]).prompt_tokens
    returned = ask(cluster, oracle, talk.session, [*history, user(text(40, 98))])
    assert 0 < returned <= kept + 64


def test_a_shortened_history_returns_what_is_left_of_it(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("shortened", seed=5)
    for _ in range(3):
        turn(cluster, oracle, talk)
    cluster.forget_prefill()
    shorter = [*talk.messages[:2], user(text(60, 97))]
    returned = ask(cluster, oracle, talk.session, shorter)
    assert 0 < returned <= oracle.answer(shorter).prompt_tokens


def test_another_conversation_under_the_same_name_gets_nothing_of_it(
    cluster: Cluster, oracle: Oracle
) -> None:
    turn(cluster, oracle, Conversation("same-name", seed=6))
    cluster.forget_prefill()
    other = [user("A different start. " + text(150, 96))]
    # The chat template's first words are all that they share.
    assert ask(cluster, oracle, "same-name", other) <= BLOCK


def test_two_sessions_interleaved(cluster: Cluster, oracle: Oracle) -> None:
    talks = [Conversation("interleaved-a", seed=7), Conversation("interleaved-b", seed=8)]
    for number in range(3):
        for talk in talks:
            cluster.forget_prefill()
            returned = turn(cluster, oracle, talk)
            assert (returned > 0) == (number > 0)


def test_the_same_session_twice_at_once(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("at-once", seed=9)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    prompts = [[*talk.messages, user(text(80, seed))] for seed in (90, 91, 92)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(
            pool.map(lambda p: cluster.client.ask(p, session=talk.session, max_tokens=16), prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(answer, prompt)


def test_many_choices_of_one_request(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("choices", seed=10)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    body = cluster.client.body(talk.say(), max_tokens=16) | {"n": 3, "temperature": 1.0}
    response = local_http.post(
        f"{cluster.gateway.url}/v1/chat/completions",
        json=body,
        headers={"X-Session-ID": talk.session},
        timeout=120,
    )
    # A lease serves one of the children, the others compute: all of them answer.
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert all(c["token_ids"] for c in choices)


def test_never_returns_when_told_so(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("never", seed=11)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    before = cluster.returned_tokens()
    messages = talk.say()
    answer = cluster.client.ask(messages, session=talk.session, max_tokens=16, returns="never")
    oracle.check(answer, messages)
    assert cluster.returned_tokens() == before


def test_params_from_outside_open_nothing(cluster: Cluster, oracle: Oracle) -> None:
    messages = [user(text(60, 95))]
    answer = cluster.client.ask(
        messages,
        session="outside",
        max_tokens=16,
        kv_transfer_params={"kvshuttle": {"turn_token": "guess", "leg": "decode"}},
    )
    oracle.check(answer, messages)


# Clients that go away.


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3, 1.0])
def test_a_client_that_goes_away_strands_nothing(
    cluster: Cluster, oracle: Oracle, after_s: float
) -> None:
    talk = Conversation(f"cancel-{after_s}", seed=12)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    messages = [*talk.messages, user(text(600, 94))]
    with pytest.raises(httpx.TimeoutException):
        local_http.post(
            f"{cluster.gateway.url}/v1/chat/completions",
            json=cluster.client.body(messages, max_tokens=400, ignore_eos=True),
            headers={"X-Session-ID": talk.session},
            timeout=httpx.Timeout(30, read=max(after_s, 0.001)),
        )
    # The session goes on as if nothing had been.
    turn(cluster, oracle, talk)


# Memory.


def test_more_held_sessions_than_memory(cluster: Cluster, oracle: Oracle) -> None:
    talks = [Conversation(f"crowd-{i}", seed=20 + i) for i in range(18)]
    preempted = cluster.decode.metrics().total(PREEMPTIONS)
    for talk in talks:
        turn(cluster, oracle, talk, words=700)
    total = sum(oracle.answer(t.messages[:1]).prompt_tokens for t in talks)
    assert total > POOL_BLOCKS * BLOCK, "the test does not fill the pool"
    # The first ones lost their holds to the later ones, and no running request lost anything.
    replicas = [x for t in talks for x in cluster.view.session(t.session).replicas]
    assert [x for x in replicas if x.state == session_pb.REPLICA_STATE_SOFT]
    assert cluster.decode.metrics().total(PREEMPTIONS) == preempted
    for talk in talks[:2] + talks[-2:]:
        turn(cluster, oracle, talk, words=40)


def test_a_reset_of_the_cache_lets_go_first(cluster: Cluster, oracle: Oracle) -> None:
    """As before new weights: what was computed with the old ones must not be returned."""
    talk = Conversation("reset", seed=39)
    turn(cluster, oracle, talk)
    wait_until(lambda: cluster.held(DECODE) > 0, "decode holds the session's KV")
    assert cluster.decode.reset_prefix_cache(), "vLLM found the pool not free at the first asking"
    wait_until(lambda: not cluster.view.session(talk.session).replicas, "the replica is gone")
    cluster.forget_prefill()
    assert turn(cluster, oracle, talk) == 0


def test_a_drained_worker_holds_nothing(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("drained", seed=483)
    turn(cluster, oracle, talk)
    wait_until(lambda: cluster.held(DECODE) > 0, "decode holds the session's KV")
    cluster.view.drain(DECODE)
    wait_until(lambda: cluster.held(DECODE) == 0, "decode has let go of it")
    cluster.view.drain(DECODE, undo=True)
    # What nobody has reused is found again.
    cluster.forget_prefill()
    assert turn(cluster, oracle, talk) > 0


@pytest.mark.parametrize(
    ("phase", "mode", "seed"),
    [("prefill", "abort", 480), ("prefill", "keep", 481), ("decode", "abort", 482)],
)
def test_a_pause_waits_for_what_is_moving(
    cluster: Cluster, oracle: Oracle, phase: str, mode: str, seed: int
) -> None:
    """As before new weights: vLLM resets the cache of an engine that it pauses, and says 500 if it
    cannot. Prefill has nothing to do but to be read from; decode's request is the one that reads,
    and is aborted, or not there yet."""
    engine = {"prefill": cluster.prefill, "decode": cluster.decode}[phase]
    talk = Conversation(f"pause-{phase}-{mode}", seed=seed)
    turn(cluster, oracle, talk)
    messages = talk.say()
    with cluster.faults(DECODE, delay_read_s=2.0), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.client.ask, messages, session=talk.session, max_tokens=16)
        wait_until(
            lambda: transferring(cluster, talk.session, types_pb2.DIRECTION_FORWARD),
            "prefill is being read from",
        )
        said = engine.pause_vllm(mode)
        engine.resume_vllm()
        assert said.status_code == 200, said.text
        if phase == "prefill":
            oracle.check(asked.result(), messages)
        else:
            asked.exception()  # over, one way or another
    turn(cluster, oracle, talk)


# Faults.


def test_a_corrupted_block_is_seen_by_the_oracle(cluster: Cluster, oracle: Oracle) -> None:
    for number in tries("a return is over in time"):
        talk = Conversation(f"corrupt-{number}", seed=4_000 + number)
        turn(cluster, oracle, talk)
        cluster.forget_prefill()
        messages = talk.say()
        with cluster.faults(PREFILL, corrupt_returned_block=True):
            answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
        if has_moved(cluster, talk.session, types_pb2.DIRECTION_RETURN):
            break
    assert differences(answer, oracle.answer(messages)) != []
    # Both engines have cached what was computed from it.
    cluster.view.end_session(talk.session)
    cluster.forget_prefill()
    cluster.decode.wait_prefix_cache_reset()


def test_a_transfer_that_stands_still_and_decode_killed_during_another(
    cluster: Cluster, oracle: Oracle
) -> None:
    """Both are recomputed. One test, for an engine takes its time to start again."""
    talk, other = Conversation("stalled", seed=41), Conversation("killed-during", seed=45)
    turn(cluster, oracle, talk)
    turn(cluster, oracle, other)
    cluster.forget_prefill()
    start = time.monotonic()
    with cluster.faults(PREFILL, stall_reads=True):
        messages = talk.say()
        answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
    oracle.check(answer, messages)
    assert time.monotonic() - start < 60
    # The landing blocks stay in quarantine: nothing shows that the READ has stopped, until its
    # source is attested dead.
    wait_until(
        lambda: cluster.view.workers()[PREFILL].pool.quarantined_blocks > 0,
        "the landing blocks are in quarantine",
    )

    messages = other.say()
    with cluster.faults(PREFILL, delay_read_s=2.0), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.client.ask, messages, session=other.session, max_tokens=16)
        wait_until(
            lambda: transferring(cluster, other.session, types_pb2.DIRECTION_RETURN),
            "a transfer is under way",
        )
        cluster.decode.kill()
        answer = asked.result()
    oracle.check(answer, messages)
    cluster.fence(DECODE)
    cluster.restart_worker(cluster.decode)


def test_the_control_plane_stopped_and_started_between_turns(
    cluster: Cluster, oracle: Oracle
) -> None:
    talk = Conversation("restart", seed=42)
    turn(cluster, oracle, talk)
    cluster.control_plane.stop()
    messages = talk.say()
    answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
    talk.heard(answer)
    oracle.check(answer, messages)
    cluster.start_control_plane()
    # Decode's hold has outlived the control plane, and its inventory is the source of a return.
    cluster.wait_offered(talk.session)
    cluster.forget_prefill()
    assert turn(cluster, oracle, talk) > 0


def test_the_control_plane_killed_during_turns(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("cp-killed", seed=43)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    killer = threading.Timer(0.05, cluster.control_plane.kill)
    killer.start()
    messages = talk.say(400)
    answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
    killer.join()
    oracle.check(answer, messages)
    cluster.start_control_plane()


def test_decode_stands_still_for_longer_than_anybody_waits(
    cluster: Cluster, oracle: Oracle
) -> None:
    """Neither dead nor alive: its connections are open, and nothing comes."""
    talk = Conversation("decode-hangs", seed=46)
    turn(cluster, oracle, talk)
    messages = talk.say()
    cluster.decode.pause()
    start = time.monotonic()
    try:
        answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
        took = time.monotonic() - start
    finally:
        cluster.decode.resume()
    talk.heard(answer)
    oracle.check(answer, messages)
    # As long as a hung engine is borne, twice: far from any timeout of a leg.
    assert took < 40
    cluster.stack.wait_registered(cluster.control_plane.target, [PREFILL, DECODE])
    turn(cluster, oracle, talk)


def test_decode_killed_between_turns(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("decode-killed", seed=44)
    turn(cluster, oracle, talk)
    cluster.decode.kill()
    messages = talk.say()
    answer = cluster.client.ask(messages, session=talk.session, max_tokens=16)
    talk.heard(answer)
    oracle.check(answer, messages)
    cluster.restart_worker(cluster.decode)
    turn(cluster, oracle, talk)
