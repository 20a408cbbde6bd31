"""What tests of the main job do again and again, checked at every step."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvshuttle.v1 import lease_service_pb2 as lease_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvshuttle.localstack import Message
    from kvshuttle.v1 import types_pb2
    from tests.e2e.conftest import Cluster
    from tests.support.conversation import Conversation, Oracle

BLOCK = 32


def turn(
    cluster: Cluster,
    oracle: Oracle,
    conversation: Conversation,
    *,
    words: int = 120,
) -> int:
    """One turn, checked; returns the tokens that prefill got by a return."""
    before = cluster.returned_tokens()
    messages = conversation.say(words)
    answer = cluster.client.ask(messages, session=conversation.session, max_tokens=16)
    conversation.heard(answer)
    oracle.check(answer, messages)
    # An answer of one token is prefill's own: decode has seen nothing of the turn.
    if answer.completion_tokens > 1:
        cluster.wait_offered(conversation.session, answer.prompt_tokens // BLOCK * BLOCK)
    return cluster.returned_tokens() - before


def ask(cluster: Cluster, oracle: Oracle, session: str, messages: list[Message]) -> int:
    """One request with this history, checked; returns the tokens that prefill got by a return."""
    before = cluster.returned_tokens()
    answer = cluster.client.ask(messages, session=session, max_tokens=16)
    oracle.check(answer, messages)
    return cluster.returned_tokens() - before


def begun(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> HTTPConnection:
    """A chat completion that is asked for, and that nobody waits for; closing it hangs up."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"Content-Type": "application/json", **(headers or {})},
    )
    return connection


def tries(what: str, times: int = 5) -> Iterator[int]:
    """Numbers of attempts, for what a busy machine may be too slow for; AssertionError when the
    caller has not stopped after so many."""
    yield from range(times)
    raise AssertionError(f"not once in {times} attempts: {what}")


def transferring(cluster: Cluster, session: str, direction: types_pb2.Direction.ValueType) -> bool:
    """Whether a lease of the session is being read under."""
    return any(
        x.session_id == session
        and x.direction == direction
        and x.state == lease_pb2.LEASE_STATE_ACTIVE
        for x in cluster.view.open_leases()
    )


def wait_for_leases(cluster: Cluster, session: str) -> None:
    """Until none of the session's is open."""
    wait_until(
        lambda: all(x.session_id != session for x in cluster.view.open_leases()),
        "the session's leases are over",
    )


def has_moved(cluster: Cluster, session: str, direction: types_pb2.Direction.ValueType) -> bool:
    """Whether the session's newest lease of this direction has moved something, once none of them
    is open."""
    wait_for_leases(cluster, session)
    found = [x for x in cluster.view.leases(session) if x.direction == direction]
    return bool(
        found and found[0].state == lease_pb2.LEASE_STATE_COMPLETED and found[0].stats.tokens
    )


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Raises AssertionError when `what` has not come about in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.02)
