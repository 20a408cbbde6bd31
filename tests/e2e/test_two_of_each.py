"""Two prefill and two decode workers with pools of four different sizes: a session that moves, and
its KV that follows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshuttle.localstack import Answer, Engine, Stack, user
from kvshuttle.localstack.metrics import EXTERNAL_HITS, LOCAL_HITS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from kvshuttle.v1 import types_pb2
from tests.e2e.conftest import DECODE, PREFILL, Cluster, hooks_failed, worker
from tests.e2e.steps import BLOCK, begun, tries, wait_for_leases, wait_until
from tests.support.conversation import MAX_TOKENS, Conversation, Oracle
from tests.support.leaks import assert_nothing_leaked, free_blocks

OTHER_PREFILL, OTHER_DECODE = "prefill-1", "decode-1"
# Neither as large as the first two (400), nor as each other.
BLOCKS = {OTHER_PREFILL: 530, OTHER_DECODE: 270}
# Requests that wait for the one place of an engine: what they would take is more than a second, so
# that an eager return goes elsewhere too.
QUEUE = 60
# While decode generates so much, an engine's queue is filled and seen.
LONG_ANSWER = 1_000


@dataclass
class Four:
    """The cluster of the other tests and a worker more of each role, of one place each."""

    cluster: Cluster
    prefill: Engine
    decode: Engine

    @property
    def prefills(self) -> dict[str, Engine]:
        return {PREFILL: self.cluster.prefill, OTHER_PREFILL: self.prefill}

    def ask(self, oracle: Oracle, talk: Conversation, words: int = 120) -> Answer:
        """One turn, checked, once nothing of it is under way any more."""
        messages = talk.say(words)
        answer = self.cluster.client.ask(messages, session=talk.session, max_tokens=MAX_TOKENS)
        talk.heard(answer)
        oracle.check(answer, messages)
        self.settled(talk, answer)
        return answer

    def settled(self, talk: Conversation, answer: Answer) -> None:
        """Until all that it wrote is offered, and no lease of it is open."""
        wait_until(
            lambda: any(
                r.num_tokens >= answer.prompt_tokens // BLOCK * BLOCK
                for r in self.cluster.view.session(talk.session).replicas
            ),
            f"{talk.session} is offered",
        )
        wait_for_leases(self.cluster, talk.session)

    def begun_on_the_others(self, oracle: Oracle, name: str, seed: int) -> Conversation:
        """A session whose first turn ran on the two engines that can be kept busy."""
        talk = Conversation(name, seed=seed)
        view = self.cluster.view
        for first in (PREFILL, DECODE):
            view.drain(first)
        try:
            self.ask(oracle, talk, words=300)
        finally:
            for first in (PREFILL, DECODE):
                view.drain(first, undo=True)
        assert self.ran(talk) == (OTHER_PREFILL, OTHER_DECODE)
        return talk

    def ran(self, talk: Conversation) -> tuple[str, str]:
        """Where the last turn ran."""
        last = self.cluster.view.session(talk.session).turns[-1]
        return last.prefill.worker.worker_id, last.decode.worker.worker_id

    def leases(
        self, talk: Conversation, direction: types_pb2.Direction.ValueType
    ) -> list[lease_pb2.Lease]:
        """Those of the last turn, which all went through."""
        turn = self.cluster.view.session(talk.session).turns[-1].turn
        found = [
            x
            for x in self.cluster.view.leases(talk.session)
            if x.turn == turn and x.direction == direction
        ]
        assert all(x.state == lease_pb2.LEASE_STATE_COMPLETED for x in found), found
        return found

    @contextlib.contextmanager
    def busy(self, engine: Engine) -> Iterator[None]:
        """A request that holds the engine's only place, and many that wait for it, until the end;
        begins when the control plane has heard of them."""
        with contextlib.ExitStack() as stack:
            for _ in range(QUEUE + 1):
                body = self.cluster.client.body(
                    [user("Wait.")], max_tokens=3_000, ignore_eos=True, stream=True
                )
                stack.callback(begun(engine.url, body).close)
            wait_until(lambda: self.waiting(engine) >= QUEUE - 5, f"{engine.name} has a queue")
            yield
        wait_until(lambda: not self.waiting(engine), f"{engine.name} is left alone")

    def waiting(self, engine: Engine) -> int:
        """Requests that wait there, as of the last heartbeat."""
        return self.cluster.view.workers()[engine.name].pool.waiting_requests


@pytest.fixture(scope="module")
def workers(
    cluster: Cluster, logs: Path, more_agents: list[Engine]
) -> Iterator[tuple[Engine, Engine]]:
    """The two more, while this module's tests run."""
    engines = [
        worker(
            logs,
            cluster.control_plane,
            name,
            role,
            num_blocks=BLOCKS[name],
            extra_args=("--max-num-seqs", "1"),
        )
        for name, role in ((OTHER_PREFILL, "prefill"), (OTHER_DECODE, "decode"))
    ]
    more_agents += engines
    with Stack() as stack:
        stack.start(*engines)
        stack.wait_registered(cluster.control_plane.target, BLOCKS)
        yield engines[0], engines[1]
    # Or their place is kept for them.
    for name in BLOCKS:
        cluster.fence(name)


@pytest.fixture
def four(cluster: Cluster, workers: tuple[Engine, Engine]) -> Iterator[Four]:
    """All four, and nothing left behind on any."""
    free = free_blocks(cluster.view)
    assert set(free) == {PREFILL, DECODE, *BLOCKS}
    yield Four(cluster, *workers)
    assert_nothing_leaked(cluster.view, free)
    for engine in (cluster.prefill, cluster.decode, *workers):
        assert not hooks_failed(engine)


def test_a_turn_leaves_a_decode_worker_with_a_queue_and_its_kv_follows(
    four: Four, oracle: Oracle
) -> None:
    talk = four.begun_on_the_others(oracle, "moves-decode", 300)
    first = four.cluster.view.session(talk.session).replicas[0].num_tokens
    four.prefill.wait_prefix_cache_reset()
    with four.busy(four.decode):
        four.ask(oracle, talk)
        prefill, decode = four.ran(talk)
        assert decode == DECODE
        last = four.cluster.view.session(talk.session).turns[-1]
        assert last.plan.placement == "SHORTER_QUEUE"
        assert last.plan.candidates[1].decode_worker_id == OTHER_DECODE, "what it left is not said"
        # Back from the worker that it leaves, busy as that is, and forward to the other: whole.
        (back,) = four.leases(talk, types_pb2.DIRECTION_RETURN)
        assert (back.source.worker_id, back.destination.worker_id) == (OTHER_DECODE, prefill)
        assert back.stats.tokens >= first - BLOCK
        (forth,) = four.leases(talk, types_pb2.DIRECTION_FORWARD)
        assert (forth.source.worker_id, forth.destination.worker_id) == (prefill, DECODE)
        assert forth.stats.tokens >= back.stats.tokens
    # What is left there is no reason to go back, now that nobody waits.
    four.prefills[prefill].wait_prefix_cache_reset()
    four.ask(oracle, talk)
    assert four.ran(talk) == (prefill, DECODE)
    (back,) = four.leases(talk, types_pb2.DIRECTION_RETURN)
    assert (back.source.worker_id, back.destination.worker_id) == (DECODE, prefill)


def test_a_turn_leaves_a_prefill_worker_with_a_queue_and_its_kv_follows(
    four: Four, oracle: Oracle
) -> None:
    talk = four.begun_on_the_others(oracle, "moves-prefill", 301)
    first = four.cluster.view.session(talk.session).replicas[0].num_tokens
    with four.busy(four.prefill):
        before = four.cluster.returned_tokens()
        four.ask(oracle, talk)
        assert four.ran(talk) == (PREFILL, OTHER_DECODE)
        assert four.cluster.view.session(talk.session).turns[-1].plan.placement == "SHORTER_QUEUE"
        (back,) = four.leases(talk, types_pb2.DIRECTION_RETURN)
        assert (back.source.worker_id, back.destination.worker_id) == (OTHER_DECODE, PREFILL)
        # By vLLM's own count too it did not compute what had come.
        assert four.cluster.returned_tokens() - before == back.stats.tokens >= first - BLOCK
    four.ask(oracle, talk)
    assert four.ran(talk) == (PREFILL, OTHER_DECODE)


def test_an_eager_return_goes_where_the_next_turn_will_go(four: Four, oracle: Oracle) -> None:
    with four.cluster.control_plane_with("--eager"):
        four.cluster.stack.wait_registered(four.cluster.control_plane.target, BLOCKS)
        for number in tries("prefill's queue is seen while decode still answers", times=3):
            talk = four.begun_on_the_others(oracle, f"moves-eager-{number}", 310 + number)
            (eager,) = four.leases(talk, types_pb2.DIRECTION_RETURN)
            assert (eager.source.worker_id, eager.destination.worker_id) == (
                OTHER_DECODE,
                OTHER_PREFILL,
            )
            if _answered_beside_a_queue(four, oracle, talk):
                break


def _answered_beside_a_queue(four: Four, oracle: Oracle, talk: Conversation) -> bool:
    """Whether prefill's queue was seen before the turn ended; then its KV is where the next turn
    goes, and that computes its new tokens only."""
    view = four.cluster.view
    with contextlib.ExitStack() as stack:
        in_time = False

        def fill() -> None:
            nonlocal in_time
            stack.enter_context(four.busy(four.prefill))
            in_time = not view.session(talk.session).turns[-1].HasField("end_time")

        messages = talk.say()
        answer = four.cluster.client.ask(
            messages,
            session=talk.session,
            max_tokens=LONG_ANSWER,
            ignore_eos=True,
            on_first_token=fill,
        )
        if not in_time:
            return False
        four.settled(talk, answer)
        (eager,) = [x for x in four.leases(talk, types_pb2.DIRECTION_RETURN) if x.eager]
        assert (eager.source.worker_id, eager.destination.worker_id) == (OTHER_DECODE, PREFILL)
        # The client goes on with a part of that answer.
        talk.messages.append({"role": "assistant", "content": answer.text[:40]})
        before = {
            name: four.cluster.prefill.metrics().total(name) for name in (LOCAL_HITS, EXTERNAL_HITS)
        }
        four.ask(oracle, talk)
        assert four.ran(talk) == (PREFILL, OTHER_DECODE)
        plan = view.session(talk.session).turns[-1].plan
        assert (plan.placement, plan.reason) == ("SHORTER_QUEUE", "EAGER_HIT")
        found = {
            name: four.cluster.prefill.metrics().total(name) - value
            for name, value in before.items()
        }
        assert found[LOCAL_HITS] >= answer.prompt_tokens // BLOCK * BLOCK
        assert found[EXTERNAL_HITS] == 0
    return True
