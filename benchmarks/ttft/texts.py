"""Messages of an exact length in tokens, counted by the engine that will read them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.ttft.schedule import Plan, TurnPlan
from kvshuttle.localstack import Message, user

__all__ = ["History", "fit"]

Count = Callable[[Sequence[Message]], int]

# fmt: off
_SUBJECTS = (
    "the harbour master", "a gardener", "our neighbour", "the night train", "an old clock",
    "the librarian", "a grey heron", "the baker", "her brother", "the lighthouse", "a young mason",
    "the ferry", "the schoolteacher", "a fox", "the orchestra", "the mill", "a cartographer",
)
_VERBS = (
    "remembers", "follows", "measures", "repairs", "leaves behind", "describes", "watches",
    "carries", "forgets", "paints", "counts", "crosses", "hears", "builds", "sells", "waits for",
)
_OBJECTS = (
    "the frozen river", "seven letters", "a broken bridge", "the morning tide", "a copper lantern",
    "the last harvest", "an empty house", "the mountain road", "a map of the coast", "the winter",
    "a flock of geese", "the market square", "two silver keys", "the sound of rain", "a long wall",
)
# fmt: on
_QUESTION = " Tell me in detail what happens next."
# Sentences are added or taken away until the prompt is this near to what is wanted.
CLOSE_ENOUGH = 8
_TOKENS_A_SENTENCE = 11
_TRIES = 12


def _sentences(count: int, seed: str) -> str:
    chooser = random.Random(seed)
    return " ".join(
        f"{chooser.choice(_SUBJECTS).capitalize()} {chooser.choice(_VERBS)} "
        f"{chooser.choice(_OBJECTS)} and {chooser.choice(_OBJECTS)}."
        for _ in range(count)
    )


def fit(history: Sequence[Message], tokens: int, seed: str, count: Count) -> Message:
    """A user's message that makes the prompt `tokens` long, within a sentence.

    Raises ValueError where the history alone is longer.
    """
    empty = count([*history, user(_QUESTION.strip())])
    if empty > tokens + CLOSE_ENOUGH:
        raise ValueError(f"the history has {empty} tokens already, {tokens} are wanted")
    low, high = 0, max(1, tokens - empty)
    sentences = round((tokens - empty) / _TOKENS_A_SENTENCE)
    best, best_off = user(_QUESTION.strip()), abs(tokens - empty)
    for _ in range(_TRIES):
        sentences = min(max(sentences, low), high)
        message = user((_sentences(sentences, seed) + _QUESTION).strip())
        found = count([*history, message])
        if abs(found - tokens) < best_off:
            best, best_off = message, abs(found - tokens)
        if best_off <= CLOSE_ENOUGH or low >= high:
            break
        if found < tokens:
            low = sentences + 1
        else:
            high = sentences - 1
        step = round((tokens - found) / _TOKENS_A_SENTENCE)
        sentences += step or (1 if found < tokens else -1)
    return best


class History:
    """A conversation as its client keeps it: what every arm is asked is made here, once."""

    def __init__(self, plan: Plan, count: Count) -> None:
        self.plan = plan
        self._count = count
        self._messages: list[Message] = []

    def ask(self, turn: int) -> list[Message]:
        """The messages of turn `turn`, counted from 1; history is cut first where the plan says so.

        It is cut at a message: what a client rewrites, it rewrites whole.
        """
        wanted: TurnPlan = self.plan.turns[turn - 1]
        while self._messages and (
            self._cut(turn, wanted)
            or self._count(self._messages) > wanted.prompt_tokens - CLOSE_ENOUGH
        ):
            # A question without its answer is not left standing.
            del self._messages[-2:]
        seed = f"{self.plan.seed}-{turn}"
        self._messages.append(fit(self._messages, wanted.prompt_tokens, seed, self._count))
        return list(self._messages)

    def heard(self, message: Message) -> None:
        """The answer that all go on with."""
        self._messages.append(message)

    def _cut(self, turn: int, wanted: TurnPlan) -> bool:
        if turn == 1 or wanted.shared_tokens >= self.plan.turns[turn - 2].prompt_tokens:
            return False
        return self._count(self._messages) > wanted.shared_tokens + CLOSE_ENOUGH
