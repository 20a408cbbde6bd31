"""What is said when: prompt lengths, turn by turn, fixed or after recorded sessions."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Plan", "TurnPlan", "alone", "fixed", "from_traces", "read_traces"]

# The published benchmark's step; turn 1 is cold in every arm, so the lengths that are compared
# begin with turn 2.
FIRST_PROMPT = 1_500
STEP = 500
# The recorded sessions' gaps have a median of 15 s; what the gap is for (the return) takes less.
MAX_GAP_S = 3.0
# A turn of a trace adds at least so much, or the chat template's own tokens do not fit.
MIN_NEW_TOKENS = 24
# Long enough for prefill to lose its cache while decode answers.
MIN_OUTPUT_TOKENS = 32
# Other texts than any fixed conversation's.
PAIR_SEED = 10_000


@dataclass(frozen=True)
class TurnPlan:
    """One turn: tokens of its prompt, of the prefix it shares with the turn before, of its answer.

    `shared_tokens` below what the turn before left means that history is rewritten.
    `gap_s` is the least time since the turn before had ended.
    """

    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    gap_s: float


@dataclass(frozen=True)
class Plan:
    """One conversation."""

    name: str
    kind: str
    seed: int
    turns: tuple[TurnPlan, ...]

    @property
    def tokens(self) -> int:
        """What it needs of a KV pool at most."""
        return max(turn.prompt_tokens + turn.output_tokens for turn in self.turns)


def fixed(
    number: int, turns: int, output_tokens: int, gap_s: float, first: int = FIRST_PROMPT
) -> Plan:
    """Conversation `number`: `first` tokens, then 500 more a turn."""
    return Plan(
        name=f"fixed-{number}",
        kind="fixed",
        seed=number,
        turns=tuple(
            TurnPlan(
                prompt_tokens=first + STEP * turn,
                shared_tokens=first + STEP * (turn - 1) if turn else 0,
                output_tokens=output_tokens,
                gap_s=gap_s,
            )
            for turn in range(turns)
        ),
    )


def alone(number: int, prompt_tokens: int) -> Plan:
    """One question, with the shortest answer that decode has a part in."""
    turn = TurnPlan(prompt_tokens, shared_tokens=0, output_tokens=2, gap_s=0.0)
    return Plan(name=f"pair-{number}", kind="pair", seed=PAIR_SEED + number, turns=(turn,))


def read_traces(path: Path) -> list[dict[str, Any]]:
    """Recorded sessions: one JSON object a line, gzipped if the name ends in .gz."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def from_traces(
    sessions: Iterable[dict[str, Any]],
    *,
    count: int,
    turns: int,
    window: int,
    max_output: int,
    seed: int = 0,
) -> list[Plan]:
    """`count` conversations of `turns` turns cut from recorded sessions.

    A piece of consecutive turns is taken from the later half of a session, where agents spend their
    time, and all its counts are divided by the same number, so that its longest prompt is `window`
    tokens. Only sessions that are long enough and longer than the window count.
    """
    fitting = [
        s
        for s in sessions
        if len(s["turns"]) >= 2 * turns and max(t[1] for t in s["turns"]) > window
    ]
    chooser = random.Random(seed)
    chooser.shuffle(fitting)
    plans = []
    for session in fitting[:count]:
        recorded: list[Sequence[float]] = session["turns"]
        start = chooser.randrange(len(recorded) // 2, len(recorded) - turns + 1)
        piece = recorded[start : start + turns]
        plans.append(
            Plan(
                name=f"trace-{session['id']}-{start}",
                kind="trace",
                seed=chooser.randrange(1 << 30),
                turns=_scaled(piece, window, max_output),
            )
        )
    return plans


def _scaled(piece: Sequence[Sequence[float]], window: int, max_output: int) -> tuple[TurnPlan, ...]:
    factor = window / max(turn[1] for turn in piece)
    made: list[TurnPlan] = []
    for at, (t, prompt, shared, output, _busy) in enumerate(piece):
        gap = 0.0
        if at:
            before = piece[at - 1]
            gap = max(0.0, t - before[0] - before[4])
        outputs = max(MIN_OUTPUT_TOKENS, min(max_output, round(output * factor)))
        wanted = round(prompt * factor)
        kept = round(shared * factor) if at else 0
        if made:
            last = made[-1]
            rewritten = shared < before[1] - 64
            if not rewritten:
                # The answer is part of the next prompt, and answers are scaled with a floor.
                kept = last.prompt_tokens
                wanted = max(wanted, kept + last.output_tokens + MIN_NEW_TOKENS)
            wanted = max(wanted, kept + MIN_NEW_TOKENS)
        made.append(TurnPlan(wanted, kept, outputs, min(gap, MAX_GAP_S)))
    return tuple(made)
