"""Workers of several ranks, and adapters: who reads what from whom, on real engines.

Where prefill has one rank and decode two, each has half of the heads: forward, each rank of decode
reads its heads out of prefill's pages; back, prefill puts them together again. Where both have two,
rank i reads from rank i, or writes to it; four ranks on two cores take their time (`make
test-long`). All serve two LoRA adapters, since engines that start anyway are the cheapest place to
test them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.localstack import (
    ChatClient,
    ControlPlane,
    ControlPlaneView,
    Engine,
    Gateway,
    Stack,
    engine_cpus,
    kvshuttle_transfer,
    user,
)
from kvshuttle.localstack.metrics import EXTERNAL_HITS, LOCAL_HITS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from kvshuttle.v1 import types_pb2
from tests.e2e.conftest import DECODE, PREFILL, TINY, engine_spec, hooks_failed
from tests.e2e.steps import BLOCK, wait_until
from tests.support.adapters import make_adapter
from tests.support.conversation import (
    Conversation,
    Oracle,
    differences,
    text,
)
from tests.support.leaks import assert_nothing_leaked, free_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvshuttle.localstack import Answer, Message

ADAPTERS = ("first-adapter", "second-adapter")


@dataclass(frozen=True)
class Shape:
    """The ranks of both, and how KV goes forward."""

    prefill: int
    decode: int
    forward: str = "pull"


SHAPES = [
    pytest.param(Shape(1, 2), id="1-2"),
    pytest.param(Shape(2, 2), id="2-2", marks=pytest.mark.long),
    pytest.param(Shape(2, 2, "push"), id="2-2-push", marks=pytest.mark.long),
]


@dataclass
class Pair:
    """A prefill and a decode worker of these shapes."""

    shape: Shape
    prefill: Engine
    decode: Engine
    view: ControlPlaneView
    client: ChatClient
    baseline: Mapping[str, int]

    def moved(self, session: str) -> list[lease_pb2.Lease]:
        """The session's leases under which something was moved."""
        return [x for x in self.view.leases(session) if x.stats.tokens]

    def offered(self, worker: str, session: str, tokens: int) -> bool:
        """Whether the worker has offered so much of a session."""
        return any(
            x.worker.worker_id == worker and x.num_tokens >= tokens
            for x in self.view.session(session).replicas
        )

    def ask(self, messages: list[Message], session: str, **parameters: Any) -> Answer:
        """One request; returns once decode has offered what it left."""
        answer = self.client.ask(messages, session=session, max_tokens=16, **parameters)
        computed = answer.prompt_tokens + answer.completion_tokens - 1
        tokens = computed // BLOCK * BLOCK
        wait_until(partial(self.offered, DECODE, session, tokens), "decode has offered it")
        return answer


def _engine(
    name: str, role: str, ranks: int, pinned: str, stack: ControlPlane, logs: Path
) -> Engine:
    adapters = [f"{x}={logs / x}" for x in ADAPTERS]
    return Engine(
        engine_spec(
            name,
            0,
            num_blocks=200,
            server="tests.support.patient_server",
            extra_args=(
                "--tensor-parallel-size",
                str(ranks),
                "--enable-lora",
                "--max-loras",
                "2",
                "--max-lora-rank",
                "8",
                "--lora-modules",
                *adapters,
            ),
            env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": pinned},
            kv_transfer=kvshuttle_transfer(control_plane=stack.target, worker_id=name, role=role),
        ),
        log_dir=logs,
    )


@pytest.fixture(scope="module", params=SHAPES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    shape: Shape = request.param
    assert (TINY / "config.json").exists(), "no model: run `make model`"
    logs = tmp_path_factory.mktemp("ranks")
    for seed, name in enumerate(ADAPTERS):
        make_adapter(logs / name, TINY, seed)
    first, second = engine_cpus()[:2]
    with Stack() as stack:
        control_plane = ControlPlane(
            directory=logs,
            # All turns through both workers, and patient: see conftest.py.
            extra_args=[
                *("--direct-tokens", "0", "--lookup-wait-ms", "3000"),
                *("--forward", shape.forward),
            ],
        )
        stack.start(control_plane)
        cores = {1: str(first), 2: f"{first}|{second}"}
        prefill, decode = (
            _engine(name, role, ranks, cores[ranks], control_plane, logs)
            for name, role, ranks in (
                (PREFILL, "prefill", shape.prefill),
                (DECODE, "decode", shape.decode),
            )
        )
        stack.start(prefill, decode)
        stack.wait_registered(control_plane.target, [PREFILL, DECODE])
        gateway = Gateway(
            directory=logs,
            control_plane=control_plane.target,
            prefill_urls=[prefill.url],
            decode_urls=[decode.url],
            extra_args=["--begin-turn-timeout-s", "5"],
        )
        stack.start(gateway)
        with (
            ControlPlaneView(control_plane.target) as view,
            ChatClient(gateway.url, returns="always") as client,
        ):
            yield Pair(shape, prefill, decode, view, client, free_blocks(view))


@pytest.fixture(autouse=True)
def nothing_leaked(pair: Pair) -> Iterator[None]:
    yield
    assert_nothing_leaked(pair.view, pair.baseline)
    for engine in (pair.prefill, pair.decode):
        assert not hooks_failed(engine)


def test_ranks_exchange_heads_both_ways(pair: Pair, oracle: Oracle) -> None:
    assert {x.ref.worker_id: x.num_ranks for x in pair.view.workers().values()} == {
        PREFILL: pair.shape.prefill,
        DECODE: pair.shape.decode,
    }
    talk = Conversation("ranks", seed=60)
    returned = []
    for number in range(3):
        messages = talk.say()
        before = pair.prefill.metrics().total(EXTERNAL_HITS)
        answer = pair.ask(messages, talk.session)
        oracle.check(answer, messages)
        talk.heard(answer)
        returned.append(pair.prefill.metrics().total(EXTERNAL_HITS) - before)

        def returned_eagerly(turn: int = number + 1) -> bool:
            return any(
                x.eager and x.turn == turn and x.state == lease_pb2.LEASE_STATE_COMPLETED
                for x in pair.view.leases(talk.session)
            )

        wait_until(returned_eagerly, "what decode generated is back")
        if number == 1:
            # It is lost again: the third turn gets it while it waits.
            pair.prefill.wait_prefix_cache_reset()
    # What came back eagerly is a local hit, but for a last block that is not full.
    assert returned[1] < BLOCK < returned[2]
    assert pair.decode.metrics().total(EXTERNAL_HITS) > 0
    moved = pair.moved(talk.session)
    kinds = {(x.direction, x.eager) for x in moved}
    assert kinds == {
        (types_pb2.DIRECTION_FORWARD, False),
        (types_pb2.DIRECTION_RETURN, True),
        (types_pb2.DIRECTION_RETURN, False),
    }
    assert {x.state for x in moved} == {lease_pb2.LEASE_STATE_COMPLETED}
    pushed = {x.push for x in moved if x.direction == types_pb2.DIRECTION_FORWARD}
    # What prefill has computed before is pulled in any case.
    assert (True in pushed) == (pair.shape.forward == "push")
    # All heads of each block, whoever moved them.
    workers = pair.view.workers()
    assert workers[PREFILL].bytes_per_block == workers[DECODE].bytes_per_block
    assert all(x.stats.bytes == x.stats.blocks * workers[DECODE].bytes_per_block for x in moved)
    for worker in workers.values():
        assert not worker.counters.fallbacks, worker.ref.worker_id


def test_the_kv_of_an_adapter_is_nobody_elses(pair: Pair) -> None:
    """The same words under the base model and two adapters: each computes its own KV, though
    prefill asks what other sessions have; and a second session finds that of its own adapter."""
    messages = [user(text(300, 4_711))]
    answers: dict[str, Answer] = {}
    for model in ("model", *ADAPTERS):
        local, external = _hits(pair)
        answers[model] = pair.ask(messages, f"of-{model}", model=model)
        assert _hits(pair) == (local, external), f"{model} found KV that is not its own"
        # What an engine computes that has none of it: a salt of its own.
        with ChatClient(pair.prefill.url) as alone:
            expected = alone.ask(messages, max_tokens=16, model=model, cache_salt=f"alone-{model}")
        assert not differences(answers[model], expected)
    assert len({x.token_ids for x in answers.values()}) == len(answers)
    before = _hits(pair)[1]
    for model in ("model", *ADAPTERS):
        # Prefill's own copy is lost; decode has one, of another session.
        pair.prefill.wait_prefix_cache_reset()
        local, external = _hits(pair)
        again = pair.ask(messages, f"again-{model}", model=model)
        assert sum(_hits(pair)) > local + external
        assert again.token_ids == answers[model].token_ids
    assert _hits(pair)[1] > before


def _hits(pair: Pair) -> tuple[int, int]:
    """Prompt tokens that prefill found in its cache, and that it got from others."""
    metrics = pair.prefill.metrics()
    return int(metrics.total(LOCAL_HITS)), int(metrics.total(EXTERNAL_HITS))
