"""Data-parallel engines, each a worker of its own: a model with experts whose decode has two ranks
that step together and exchange what goes into their experts in every step, on real engines.

Of a dense model vLLM has no such engines: each is one for itself (`test_two_of_each.py`), and
several of them behind one address are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvshuttle.localstack import (
    ChatClient,
    ControlPlane,
    ControlPlaneView,
    Engine,
    Gateway,
    ProcessError,
    Stack,
    engine_cpus,
    kvshuttle_transfer,
)
from kvshuttle.localstack.ports import free_port
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from kvshuttle.v1 import types_pb2
from tests.e2e.conftest import PREFILL, ROOT, engine_spec, hooks_failed
from tests.e2e.steps import BLOCK, wait_until
from tests.support.conversation import MAX_TOKENS, Conversation, Oracle
from tests.support.leaks import assert_nothing_leaked, free_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.long

EXPERTS = ROOT / ".models" / "tiny-experts"
RANKS = ("decode-0", "decode-1")


@dataclass
class Ranks:
    """A prefill worker and two decode workers that are ranks of one deployment."""

    engines: Mapping[str, Engine]
    view: ControlPlaneView
    client: ChatClient
    plain: Oracle

    def ran(self, talk: Conversation) -> str:
        """Where the last turn was decoded."""
        return self.view.session(talk.session).turns[-1].decode.worker.worker_id


def _engine(
    name: str, logs: Path, control_plane: ControlPlane | None, *extra_args: str, cpu: int = 0
) -> Engine:
    parallel = "--data-parallel-size" in extra_args
    return Engine(
        engine_spec(
            name,
            engine_cpus()[cpu],
            model=EXPERTS,
            num_blocks=400,
            server=f"tests.support.{'data_parallel' if parallel else 'patient'}_server",
            extra_args=extra_args,
            kv_transfer=control_plane
            and kvshuttle_transfer(
                control_plane=control_plane.target,
                worker_id=name,
                role=name.partition("-")[0],
            ),
        ),
        log_dir=logs,
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    assert (EXPERTS / "config.json").exists(), "no model: run `make test-long`"
    logs = tmp_path_factory.mktemp("data-parallel")
    port = str(free_port())
    with Stack() as stack:
        control_plane = ControlPlane(
            directory=logs, extra_args=["--direct-tokens", "0", "--lookup-wait-ms", "3000"]
        )
        stack.start(control_plane)
        decode = [
            _engine(
                name,
                logs,
                control_plane,
                *("--data-parallel-size", "2", "--data-parallel-rank", str(rank)),
                *("--data-parallel-external-lb", "--data-parallel-address", "127.0.0.1"),
                *("--data-parallel-rpc-port", port),
                cpu=rank,
            )
            for rank, name in enumerate(RANKS)
        ]
        # Neither is ready before both are.
        stack.start(*decode)
        prefill = _engine(PREFILL, logs, control_plane)
        plain = _engine("plain", logs, None, cpu=1)
        stack.start(prefill, plain)
        engines = {x.name: x for x in (prefill, *decode)}
        stack.wait_registered(control_plane.target, list(engines))
        gateway = Gateway(
            directory=logs,
            control_plane=control_plane.target,
            prefill_urls=[prefill.url],
            decode_urls=[x.url for x in decode],
            extra_args=["--begin-turn-timeout-s", "5"],
        )
        stack.start(gateway)
        with (
            ControlPlaneView(control_plane.target) as view,
            ChatClient(gateway.url, returns="always") as client,
            ChatClient(plain.url) as alone,
        ):
            baseline = free_blocks(view)
            yield Ranks(engines, view, client, Oracle(alone))
            assert_nothing_leaked(view, baseline)
            for engine in engines.values():
                assert not hooks_failed(engine)


@pytest.mark.parametrize("rank", RANKS)
def test_each_rank_is_a_worker_whose_kv_goes_both_ways(ranks: Ranks, rank: str) -> None:
    """While it computes, the other steps along without a request, or with KV that it waits for."""
    (other,) = set(RANKS) - {rank}
    talk = Conversation(f"on-{rank}", seed=80 + RANKS.index(rank))
    ranks.view.drain(other)
    try:
        for turn in range(1, 4):
            messages = talk.say()
            answer = ranks.client.ask(messages, session=talk.session, max_tokens=MAX_TOKENS)
            ranks.plain.check(answer, messages)
            talk.heard(answer)
            written = (answer.prompt_tokens + answer.completion_tokens - 1) // BLOCK * BLOCK

            def returned(turn: int = turn) -> bool:
                return any(
                    x.eager and x.turn == turn and x.state == lease_pb2.LEASE_STATE_COMPLETED
                    for x in ranks.view.leases(talk.session)
                )

            def offered(tokens: int = written) -> bool:
                return any(
                    x.worker.worker_id == rank and x.num_tokens >= tokens
                    for x in ranks.view.session(talk.session).replicas
                )

            assert ranks.ran(talk) == rank
            wait_until(offered, "decode has offered it")
            wait_until(returned, "what it generated is back")
    finally:
        ranks.view.drain(other, undo=True)
    moved = [x for x in ranks.view.leases(talk.session) if x.stats.tokens]
    assert {x.state for x in moved} == {lease_pb2.LEASE_STATE_COMPLETED}
    assert {x.direction for x in moved} == {
        types_pb2.DIRECTION_FORWARD,
        types_pb2.DIRECTION_RETURN,
    }


def test_kv_follows_a_session_from_one_rank_to_the_other(ranks: Ranks) -> None:
    talk = Conversation("across", seed=83)
    first, second = RANKS
    ran = []
    for away in (second, first):
        ranks.view.drain(away)
        try:
            messages = talk.say(200)
            answer = ranks.client.ask(messages, session=talk.session, max_tokens=MAX_TOKENS)
            ranks.plain.check(answer, messages)
            talk.heard(answer)
        finally:
            ranks.view.drain(away, undo=True)
        ran.append(ranks.ran(talk))
    assert ran == [first, second]


def test_several_dense_engines_behind_one_address_are_refused(tmp_path: Path) -> None:
    """vLLM tells each of them that it is alone."""
    engine = Engine(
        engine_spec(
            "several",
            engine_cpus()[0],
            extra_args=("--data-parallel-size", "2"),
            env={"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, engine_cpus()[:2]))},
            kv_transfer=kvshuttle_transfer(
                control_plane="127.0.0.1:1", worker_id=PREFILL, role="prefill"
            ),
        ),
        log_dir=tmp_path,
    )
    with Stack() as stack, pytest.raises(ProcessError):
        stack.start(engine)
    said = engine.log_path.read_text(errors="replace")
    assert "UnsupportedError: data_parallel_size: 2 behind one address" in said
