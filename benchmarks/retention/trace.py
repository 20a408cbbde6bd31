"""Recorded sessions, and a timetable in which they overlap."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["BLOCK_TOKENS", "NS", "Event", "Session", "Turn", "load", "timetable"]

NS = 1_000_000_000
BLOCK_TOKENS = 64
"""The traces count shared tokens in multiples of it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Times in ns from the session's start; sizes in full blocks. `reusable` is what
    an unlimited cache would have of the prompt; `left` is what the turn leaves behind."""

    begin_ns: int
    end_ns: int
    reusable: int
    left: int


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation."""

    name: str
    turns: tuple[Turn, ...]


class Event(NamedTuple):
    """A turn begins or ends. Of one instant the ends come first: their blocks are free by then."""

    time_ns: int
    begins: bool
    session: int
    turn: int


def load(path: Path) -> list[Session]:
    """The sessions of a file as `traces/README.md` describes it, gzipped or not. ValueError names
    the line that is not as described."""
    sessions = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                sessions.append(Session(str(row["id"]), _turns(row["turns"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not a session: {error!r}") from error
    if not sessions:
        raise ValueError(f"{path} has no session")
    return sessions


def _turns(rows: list[list[float]]) -> tuple[Turn, ...]:
    turns = []
    for number, (start, prompt, shared, output, busy) in enumerate(rows):
        begin_ns = int(start * NS)
        # A turn takes a moment even where its length was not recorded, and ends before the next.
        end_ns = begin_ns + max(1, int(busy * NS))
        if number + 1 < len(rows):
            end_ns = max(begin_ns + 1, min(end_ns, int(rows[number + 1][0] * NS) - 1))
        turns.append(
            Turn(
                begin_ns,
                end_ns,
                int(shared) // BLOCK_TOKENS,
                int(prompt + output) // BLOCK_TOKENS,
            )
        )
    return tuple(turns)


def timetable(sessions: list[Session], per_hour: float, seed: int) -> list[Event]:
    """Every session once, in random order, starting at the instants of a Poisson process."""
    dice = random.Random(seed)
    order = list(range(len(sessions)))
    dice.shuffle(order)
    events = []
    start_ns = 0
    for session in order:
        start_ns += int(dice.expovariate(per_hour / 3_600) * NS)
        for number, turn in enumerate(sessions[session].turns):
            events.append(Event(start_ns + turn.begin_ns, True, session, number))
            events.append(Event(start_ns + turn.end_ns, False, session, number))
    events.sort()
    return events
