"""What the planner chooses, on real engines: a forked session gets its parent's prefix by a lease,
and no other tenant does; a short turn runs at decode alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshuttle.localstack import ChatClient, Gateway, user
from kvshuttle.localstack.metrics import PROMPT_TOKENS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from kvshuttle.v1 import types_pb2
from tests.e2e.conftest import DECODE, PREFILL, Cluster
from tests.e2e.steps import BLOCK, turn
from tests.support.conversation import (
    MAX_TOKENS,
    Conversation,
    Oracle,
    text,
)

pytestmark = pytest.mark.usefixtures("patient", "nothing_leaked")
PATIENT = ("--lookup-wait-ms", "8000")
KEY = "a-stranger's-key"
STRANGER = "stranger"


@pytest.fixture(scope="module")
def patient(cluster: Cluster) -> Iterator[None]:
    """Lookups that wait for long: what a busy machine is late with is no finding here."""
    with cluster.control_plane_with("--no-eager", "--direct-tokens", "100", *PATIENT):
        yield


def parent(cluster: Cluster, oracle: Oracle, name: str, seed: int) -> Conversation:
    """Two turns, whose KV lies at decode and, in the end, nowhere else."""
    talk = Conversation(name, seed=seed)
    turn(cluster, oracle, talk, words=300)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    return talk


def returns(cluster: Cluster, session: str) -> list[lease_pb2.Lease]:
    return [x for x in cluster.view.leases(session) if x.direction == types_pb2.DIRECTION_RETURN]


def test_a_fork_gets_its_parents_prefix(cluster: Cluster, oracle: Oracle) -> None:
    talk = parent(cluster, oracle, "fork-parent", seed=90)
    held = max(r.num_tokens for r in cluster.view.session(talk.session).replicas)
    forks = []
    for number, name in enumerate(("fork-one", "fork-two")):
        messages = [*talk.messages, user(text(100, seed=9_000 + number))]
        before = cluster.returned_tokens()
        answer = cluster.client.ask(messages, session=name, max_tokens=MAX_TOKENS)
        oracle.check(answer, messages)
        forks.append(cluster.returned_tokens() - before)
        (lease,) = returns(cluster, name)
        assert lease.state == lease_pb2.LEASE_STATE_COMPLETED
        # Of those that have it the newest is asked.
        assert lease.source_session_id == (talk.session if name == "fork-one" else "fork-one")
        assert (lease.source.worker_id, lease.destination.worker_id) == (DECODE, PREFILL)
        assert lease.stats.tokens == forks[-1]
        cluster.forget_prefill()
    # The history's last answer may be split into other tokens when it comes back as text.
    assert min(forks) >= held - 2 * BLOCK
    # The second begins as the first does for some tokens more: what the template puts there.
    assert max(forks) <= held + BLOCK
    # The parent goes on as if nothing had been.
    assert turn(cluster, oracle, talk) >= held - 2 * BLOCK


def test_a_short_turn_runs_at_decode_alone(cluster: Cluster, oracle: Oracle) -> None:
    talk = Conversation("fork-none", seed=92)
    turn(cluster, oracle, talk, words=400)
    computed = cluster.prefill.metrics().total(PROMPT_TOKENS)
    messages = talk.say(20)
    answer = cluster.client.ask(
        messages, session=talk.session, max_tokens=MAX_TOKENS, returns="auto"
    )
    talk.heard(answer)
    oracle.check(answer, messages)
    assert answer.headers["x-kvshuttle-mode"] == "direct"
    assert answer.headers["x-kvshuttle-reason"] == "SHORT_PROMPT"
    assert cluster.prefill.metrics().total(PROMPT_TOKENS) == computed
    last = cluster.view.session(talk.session).turns[-1]
    assert not last.HasField("prefill")
    # The next long one goes by prefill, which gets what decode has.
    assert turn(cluster, oracle, talk, words=300) > 0


@pytest.fixture
def stranger(cluster: Cluster, tmp_path: Path) -> Iterator[ChatClient]:
    """A client of another tenant, at a gateway that knows it by its key."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({hashlib.sha256(KEY.encode()).hexdigest(): STRANGER}))
    gateway = Gateway(
        directory=tmp_path,
        control_plane=cluster.control_plane.target,
        name="stranger-gateway",
        extra_args=["--api-keys-file", str(keys)],
    )
    gateway.start()
    try:
        gateway.wait_ready()
        with ChatClient(gateway.url) as client:
            yield client
    finally:
        gateway.stop()


def test_another_tenant_with_the_same_text_gets_nothing(
    cluster: Cluster, oracle: Oracle, stranger: ChatClient
) -> None:
    talk = parent(cluster, oracle, "fork-strange", seed=91)
    messages = [*talk.messages, user(text(100, seed=9_100))]
    hardened = len(cluster.view.leases())
    before = cluster.returned_tokens()
    answer = stranger.ask(
        messages,
        session="fork-stranger",
        max_tokens=MAX_TOKENS,
        headers={"authorization": f"Bearer {KEY}"},
    )
    oracle.check(answer, messages)
    assert cluster.returned_tokens() == before
    leases = [x for x in cluster.view.leases() if x.tenant == STRANGER]
    assert leases, "the stranger's turn was not placed"
    assert {x.direction for x in leases} == {types_pb2.DIRECTION_FORWARD}
    assert {x.source_session_id for x in leases} == {""}
    assert len(cluster.view.leases()) == hardened + len(leases)
