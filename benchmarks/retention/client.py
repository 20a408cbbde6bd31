"""What a client might say: hints as an agent framework could give them, with its errors.

After a turn the client knows whether it runs a tool or waits for a person. Of the gaps up to ten
minutes it announces most, with a guess of the tool's time that is wrong by a factor of two as
often as not; of the longer ones (a person) it says nothing, but sometimes takes one for a tool's.
When a conversation is over most clients say so, and some just go.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.retention.trace import NS

if TYPE_CHECKING:
    from benchmarks.retention.trace import Session

__all__ = ["Client", "Say"]


@dataclass(frozen=True, slots=True)
class Say:
    """What is said at the end of a turn."""

    expected_ns: int | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class Client:
    """`spread` is the standard deviation of the logarithm of guess over truth: 0.7 is a factor of
    two either way. `told` of the tools' gaps are announced, `mistaken` of the longer ones are
    taken for a tool's; `closes` of the sessions are ended by their client."""

    spread: float = 0.7
    told: float = 0.8
    tool_max_s: float = 600.0
    mistaken: float = 0.1
    closes: float = 0.7

    def says(self, sessions: list[Session], seed: int) -> list[list[Say]]:
        """By session and turn."""
        return [self._session(session, seed) for session in sessions]

    def _session(self, session: Session, seed: int) -> list[Say]:
        dice = random.Random(f"{seed} {session.name}")
        said = []
        for turn, after in zip(session.turns, session.turns[1:], strict=False):
            gap_s = max(0.5, (after.begin_ns - turn.end_ns) / NS)
            guess_s = gap_s * math.exp(dice.gauss(0, self.spread))
            error_s = math.exp(dice.gauss(math.log(10), 1))  # a tool of about ten seconds
            if gap_s <= self.tool_max_s:
                expected_s = guess_s if dice.random() < self.told else None
            else:
                expected_s = error_s if dice.random() < self.mistaken else None
            said.append(Say(None if expected_s is None else int(expected_s * NS)))
        said.append(Say(over=dice.random() < self.closes))
        return said
