"""Engines of two ranks each: every rank's part of a block goes to the rank that needs it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import httpx
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
)
from kvshuttle.localstack.metrics import EXTERNAL_HITS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from tests.e2e.conftest import DECODE, PREFILL, engine_spec, hooks_failed
from tests.e2e.steps import BLOCK, wait_until
from tests.support.conversation import Conversation, Oracle
from tests.support.leaks import assert_nothing_leaked, free_blocks

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 2


def _engine(name: str, role: str, control_plane: ControlPlane, directory: Path) -> Engine:
    """An engine whose ranks have a core each, as far as there are."""
    cpus = engine_cpus()
    bind = "|".join(str(cpus[rank % len(cpus)]) for rank in range(RANKS))
    return Engine(
        engine_spec(
            name,
            cpus[0],
            num_blocks=200,
            extra_args=("--tensor-parallel-size", str(RANKS)),
            env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind},
            kv_transfer=kvshuttle_transfer(
                control_plane=control_plane.target, worker_id=name, role=role
            ),
        ),
        log_dir=directory,
    )


def _offered(view: ControlPlaneView, session: str, tokens: int) -> bool:
    return any(
        replica.num_tokens >= tokens and replica.worker.worker_id == DECODE
        for replica in view.session(session).replicas
    )


@pytest.mark.timeout(900)
def test_two_ranks_on_both_sides(tmp_path: Path, oracle: Oracle) -> None:
    with Stack() as stack:
        control_plane = ControlPlane(
            directory=tmp_path, extra_args=["--no-eager", "--direct-tokens", "0"]
        )
        stack.start(control_plane)
        prefill = _engine(PREFILL, "prefill", control_plane, tmp_path)
        decode = _engine(DECODE, "decode", control_plane, tmp_path)
        stack.start(prefill, decode)
        stack.wait_registered(control_plane.target, [PREFILL, DECODE])
        gateway = Gateway(
            directory=tmp_path,
            control_plane=control_plane.target,
            prefill_urls=[prefill.url],
            decode_urls=[decode.url],
        )
        stack.start(gateway)
        with ControlPlaneView(control_plane.target) as view, ChatClient(gateway.url) as client:
            before = free_blocks(view)
            talk = Conversation("ranks", seed=60)
            for _ in range(3):
                httpx.post(f"{prefill.url}/reset_prefix_cache", timeout=10).raise_for_status()
                messages = talk.say()
                answer = client.ask(messages, session=talk.session, max_tokens=16)
                talk.heard(answer)
                oracle.check(answer, messages)
                computed = answer.prompt_tokens + answer.completion_tokens - 1
                tokens = computed // BLOCK * BLOCK
                wait_until(partial(_offered, view, talk.session, tokens), "decode has offered it")
            assert prefill.metrics().total(EXTERNAL_HITS) > 0
            assert decode.metrics().total(EXTERNAL_HITS) > 0
            moved = [x for x in view.leases(talk.session) if x.stats.tokens]
            assert {x.state for x in moved} == {lease_pb2.LEASE_STATE_COMPLETED}
            # The bytes of both ranks together.
            per_token = view.workers()[DECODE].bytes_per_block // BLOCK
            assert all(x.stats.bytes == x.stats.tokens * per_token for x in moved)
            assert_nothing_leaked(view, before)
        for engine in (prefill, decode):
            assert not hooks_failed(engine)
