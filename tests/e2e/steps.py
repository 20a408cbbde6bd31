"""What tests of the main job do again and again, checked at every step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.support.conversation import LOGPROB_TOLERANCE, RECOMPUTED_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.localstack import Message
    from tests.e2e.conftest import Cluster
    from tests.support.conversation import Conversation, Oracle

BLOCK = 32


def turn(
    cluster: Cluster,
    oracle: Oracle,
    conversation: Conversation,
    *,
    words: int = 120,
    tolerance: float = LOGPROB_TOLERANCE,
) -> int:
    """One turn, checked; returns the tokens that prefill got by a return."""
    before = cluster.returned_tokens()
    messages = conversation.say(words)
    answer = cluster.client.ask(messages, session=conversation.session, max_tokens=16)
    conversation.heard(answer)
    oracle.check(answer, messages, tolerance=tolerance)
    # An answer of one token is prefill's own: decode has seen nothing of the turn.
    if answer.completion_tokens > 1:
        cluster.wait_offered(conversation.session, answer.prompt_tokens // BLOCK * BLOCK)
    return cluster.returned_tokens() - before


def ask(cluster: Cluster, oracle: Oracle, session: str, messages: list[Message]) -> int:
    """One request with this history, checked; returns the tokens that prefill got by a return."""
    before = cluster.returned_tokens()
    answer = cluster.client.ask(messages, session=session, max_tokens=16)
    oracle.check(answer, messages, tolerance=RECOMPUTED_TOLERANCE)
    return cluster.returned_tokens() - before


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Raises AssertionError when `what` has not come about in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.02)
