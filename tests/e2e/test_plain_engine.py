"""The oracle itself: a plain engine agrees with itself, and its answers depend on the history."""

from __future__ import annotations

from kvshuttle.localstack import ChatClient, Engine
from tests.support.conversation import Conversation, Oracle, differences


def test_a_warm_plain_engine_repeats_itself(plain: Engine, oracle: Oracle) -> None:
    talk = Conversation("plain", seed=1)
    with ChatClient(plain.url) as client:
        for turn in range(3):
            messages = talk.say()
            expected = oracle.answer(messages)
            again = client.ask(messages, max_tokens=16, stream=turn % 2 == 0)
            assert differences(again, expected) == []
            assert again.cached_tokens >= again.prompt_tokens - 32
            talk.heard(expected)


def test_other_history_gives_other_logprobs(oracle: Oracle) -> None:
    """Else wrong KV would pass unseen."""
    one, other = Conversation("a", seed=2), Conversation("b", seed=3)
    first, second = one.say(200), other.say(200)
    question = {"role": "user", "content": "What was that?"}
    assert differences(oracle.answer([*first, question]), oracle.answer([*second, question]))
    # The difference is far above what is tolerated.
    a = oracle.answer([*first, question]).logprobs[0]
    b = oracle.answer([*second, question]).logprobs[0]
    assert abs(a - b) > 0.01
