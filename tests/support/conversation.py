"""Conversations for tests, and their comparison with one plain engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvshuttle.localstack import Answer, ChatClient, Message, user

if TYPE_CHECKING:
    from collections.abc import Sequence

# In float32 it is about 1e-5 between any two ways to compute the same prompt (in bfloat16 0.1).
LOGPROB_TOLERANCE = 1e-3
MAX_TOKENS = 16

# fmt: off
_WORDS = (
    "river", "mountain", "lantern", "copper", "violet", "anchor", "thunder", "meadow", "harvest",
    "signal", "compass", "marble", "winter", "orchard", "bridge", "falcon", "canyon", "ember",
    "harbor", "velvet", "granite", "willow", "beacon", "prairie", "summit", "cedar", "island",
)
# fmt: on


def text(words: int, seed: int) -> str:
    """Reproducible words; about 1.5 tokens each."""
    chooser = random.Random(seed)
    return " ".join(chooser.choice(_WORDS) for _ in range(words))


@dataclass
class Conversation:
    """A client's copy of one conversation, resent whole with every turn."""

    session: str
    seed: int = 0
    messages: list[Message] = field(default_factory=list)
    turns: int = 0

    def say(self, words: int = 120) -> list[Message]:
        """Adds a new user message and returns the whole history, to be sent."""
        self.turns += 1
        self.messages.append(user(text(words, self.seed * 1_000 + self.turns)))
        return list(self.messages)

    def heard(self, answer: Answer) -> None:
        """Adds the answer to the history."""
        self.messages.append(answer.message())

    def turn(
        self,
        client: ChatClient,
        *,
        words: int = 120,
        max_tokens: int = MAX_TOKENS,
        **parameters: Any,
    ) -> Answer:
        """One whole turn."""
        answer = client.ask(
            self.say(words), max_tokens=max_tokens, session=self.session, **parameters
        )
        self.heard(answer)
        return answer


class Oracle:
    """What one plain engine answers. Remembers, so that a prompt is computed once a test run."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._known: dict[tuple[tuple[tuple[str, str], ...], int], Answer] = {}

    def answer(self, messages: Sequence[Message], *, max_tokens: int = MAX_TOKENS) -> Answer:
        """The answer with the cache warm.

        The prompt is computed first, as prefill does it, then the answer with the prompt's full
        blocks cached, as decode does it: the same tokens in the same steps round to the same bits.
        """
        key = (tuple((m["role"], m["content"]) for m in messages), max_tokens)
        if key not in self._known:
            self._client.ask(messages, max_tokens=1)
            self._known[key] = self._client.ask(messages, max_tokens=max_tokens)
        return self._known[key]

    def check(
        self,
        answer: Answer,
        messages: Sequence[Message],
        *,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """Raises AssertionError unless `answer` to `messages` is the plain engine's."""
        expected = self.answer(messages, max_tokens=max_tokens)
        found = differences(answer, expected)
        assert not found, "; ".join(found)


def differences(answer: Answer, expected: Answer) -> list[str]:
    """In what the two differ, in words; empty when they are the same."""
    found = []
    if answer.token_ids != expected.token_ids:
        at = next(
            (
                i
                for i, (a, b) in enumerate(zip(answer.token_ids, expected.token_ids, strict=False))
                if a != b
            ),
            min(len(answer.token_ids), len(expected.token_ids)),
        )
        found.append(
            f"tokens differ from number {at}: {answer.token_ids} is not {expected.token_ids}"
        )
    elif not answer.token_ids or len(answer.logprobs) != len(answer.token_ids):
        found.append("there are no token ids, or not a logprob for each")
    else:
        off = [abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)]
        if max(off) > LOGPROB_TOLERANCE:
            at = off.index(max(off))
            found.append(f"logprob of token {at} is off by {off[at]:.6f}")
    for name in ("text", "finish_reason", "prompt_tokens", "completion_tokens"):
        ours, theirs = getattr(answer, name), getattr(expected, name)
        if ours != theirs:
            found.append(f"{name} differs: {ours!r} is not {theirs!r}")
    return found
