"""Clients that go away, in each phase of a turn, and sessions that never come back.

The gateway's own count of client cancels names the phase in which it noticed, so a test that hits
another phase than it means to fails.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvshuttle.localstack import user
from kvshuttle.localstack.chat import RETURN_HEADER
from kvshuttle.localstack.metrics import scrape
from kvshuttle.v1 import types_pb2
from tests.e2e.conftest import DECODE, PREFILL, Cluster
from tests.e2e.steps import BLOCK, begun, transferring, turn, wait_until
from tests.support.conversation import Conversation, Oracle, text
from tests.support.leaks import assert_nothing_leaked, leaks

if TYPE_CHECKING:
    from kvshuttle.localstack import Message
    from kvshuttle.localstack.process import ManagedProcess

PHASES = ("begin", "prefill", "decode", "stream")

pytestmark = pytest.mark.usefixtures("nothing_leaked")


def cancels(cluster: Cluster) -> dict[str, float]:
    """How many clients went away in each phase, by the gateway's count."""
    metrics = scrape(cluster.gateway.url)
    return {
        phase: metrics.total("kvshuttle_gateway_client_cancels_total", phase=phase)
        for phase in PHASES
    }


def prefill_legs(cluster: Cluster) -> float:
    """How many prefill legs the gateway has seen the end of."""
    return scrape(cluster.gateway.url).total(
        "kvshuttle_gateway_leg_duration_seconds_count", leg="prefill"
    )


class Request:
    """A request whose client can hang up; nothing reads the answer unless `lines` does."""

    def __init__(self, cluster: Cluster, talk: Conversation, messages: list[Message]) -> None:
        # Whoever counts later may count with the answer's end.
        self.counted_before = cancels(cluster)
        body = cluster.client.body(messages, max_tokens=3_000, ignore_eos=True, stream=True)
        self._connection = begun(
            cluster.gateway.url,
            body,
            {
                "X-Session-ID": talk.session,
                # As in conftest.py: a transfer is tested, not whether it pays.
                RETURN_HEADER: "always",
            },
        )

    def lines(self, count: int) -> None:
        """Reads so many lines of the answer."""
        response = self._connection.getresponse()
        assert response.status == 200, response.read()
        for _ in range(count):
            assert response.readline()

    def hang_up(self) -> None:
        """Closes the socket."""
        self._connection.close()


def prepared(cluster: Cluster, oracle: Oracle, name: str, seed: int) -> Conversation:
    """A conversation with one turn behind it, whose KV only decode has."""
    talk = Conversation(name, seed=seed)
    turn(cluster, oracle, talk)
    cluster.forget_prefill()
    return talk


def next_prompt(talk: Conversation) -> list[Message]:
    return [*talk.messages, user(text(300, 94))]


def gone_in(cluster: Cluster, request: Request, phase: str) -> None:
    """Hangs up, and waits until the gateway has noticed, in this phase and no other."""
    request.hang_up()
    expected = request.counted_before | {phase: request.counted_before[phase] + 1}
    wait_until(lambda: cancels(cluster) == expected, f"a client is gone in phase {phase}")


@pytest.mark.parametrize("phase", ["begin", "prefill", "decode"])
def test_a_client_goes_away_while_a_program_does_not_answer(
    cluster: Cluster, oracle: Oracle, phase: str
) -> None:
    """BeginTurn, the prefill leg, decode's queue: whoever is asked stands still meanwhile."""
    programs: dict[str, ManagedProcess] = {
        "begin": cluster.control_plane,
        "prefill": cluster.prefill,
        "decode": cluster.decode,
    }
    talk = prepared(cluster, oracle, f"gone-{phase}", 60)
    legs = prefill_legs(cluster)
    with ExitStack() as stack:
        programs[phase].pause()
        stack.callback(programs[phase].resume)
        request = Request(cluster, talk, next_prompt(talk))
        if phase == "begin":
            wait_until(
                lambda: (
                    scrape(cluster.gateway.url).total("kvshuttle_gateway_requests_in_flight") == 1
                ),
                "the gateway waits for BeginTurn",
            )
        elif phase == "prefill":
            wait_until(
                lambda: any(
                    x.direction == types_pb2.DIRECTION_RETURN
                    for x in cluster.view.leases(talk.session)
                ),
                "the turn has begun",
            )
        else:
            wait_until(lambda: prefill_legs(cluster) > legs, "prefill has computed")
        gone_in(cluster, request, phase)
    cluster.stack.wait_registered(cluster.control_plane.target, [PREFILL, DECODE])
    turn(cluster, oracle, talk)


@pytest.mark.parametrize(
    ("direction", "reader", "phase"),
    [
        (types_pb2.DIRECTION_RETURN, PREFILL, "prefill"),
        (types_pb2.DIRECTION_FORWARD, DECODE, "decode"),
    ],
)
def test_a_client_goes_away_during_a_transfer(
    cluster: Cluster,
    oracle: Oracle,
    direction: types_pb2.Direction.ValueType,
    reader: str,
    phase: str,
) -> None:
    talk = prepared(cluster, oracle, f"gone-transfer-{phase}", 61)
    with cluster.faults(reader, delay_read_s=2.0):
        request = Request(cluster, talk, next_prompt(talk))
        wait_until(
            lambda: transferring(cluster, talk.session, direction), "a transfer is under way"
        )
        gone_in(cluster, request, phase)
    turn(cluster, oracle, talk)


def test_a_client_goes_away_while_the_answer_streams(cluster: Cluster, oracle: Oracle) -> None:
    talk = prepared(cluster, oracle, "gone-stream", 62)
    request = Request(cluster, talk, next_prompt(talk))
    request.lines(10)
    gone_in(cluster, request, "stream")
    turn(cluster, oracle, talk)


@pytest.mark.timeout(400)
def test_a_session_that_never_comes_back_is_let_go_by_itself(
    cluster: Cluster, oracle: Oracle
) -> None:
    """No EndSession: only time passes."""
    talk = Conversation("gone", seed=14)
    with cluster.control_plane_with("--no-eager", "--retention", "20"):
        turn(cluster, oracle, talk)
        replica = cluster.view.session(talk.session).replicas[0]
        assert replica.num_tokens >= BLOCK
        wait_until(lambda: cluster.held(DECODE) > 0, "decode holds the session's KV")
        assert leaks(cluster.view, cluster.baseline), "what is held is not seen as held"
        with pytest.raises(AssertionError, match="held blocks"):
            assert_nothing_leaked(cluster.view, cluster.baseline, timeout_s=1, end_sessions=False)
        assert_nothing_leaked(cluster.view, cluster.baseline, timeout_s=120, end_sessions=False)
        # It may come back all the same; by then its KV is vLLM's to keep or to reuse.
        turn(cluster, oracle, talk)
