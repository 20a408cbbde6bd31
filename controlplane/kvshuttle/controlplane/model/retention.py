"""Which of the KV that turns leave behind is worth its memory, and for how long.

A replica is worth what its session is about to save with it. All blocks cost the same memory and,
roughly, the same time to compute again, so replicas compare by one number: the best ratio, over
all horizons, of the chance that the session comes back within the horizon to the time for which
the memory is then taken. Under pressure those with the smallest go first. With one gap
distribution for all that falls with time it is LRU; it departs from LRU as far as a session's own
gaps, its last turn and its client's hints say something, and no further.

The idea is known as hit density (LHD, Beckmann, Chen and Cidon, NSDI 2018) and, as a rule for when
to give up on one of several waiting jobs, as Gittins' index.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvshuttle.controlplane.model.gaps import (
    AGE_EDGES,
    HINT_MIN_NS,
    RATIO_EDGES,
    SECOND,
    Absence,
    Population,
    own_hazards,
)
from kvshuttle.controlplane.model.terms import SessionValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvshuttle.controlplane.model.limits import Limits

__all__ = ["Candidate", "Outlook", "hold_ns", "surplus"]

T = TypeVar("T")

_STEPS = 4
"""Steps an octave in which time away is told apart: finer than any gap can be foretold."""

_TINY = 1e-6

_VALUE = {SessionValue.LOW: 0.25, SessionValue.NORMAL: 1.0, SessionValue.HIGH: 4.0}
"""What a session's claim multiplies its worth by. Worth falls about as fast as time passes, so
HIGH lasts about four times as long as an equal session, and no claim beats a session at work."""


@dataclass(slots=True)
class Outlook:
    """What is expected of one absence, by what was known when it was made: a session's chance of
    coming back, bin by bin. `unit_ns` is what the bins' edges are multiples of."""

    since_ns: int
    edges: Sequence[float]
    hazards: Sequence[float]
    unit_ns: int
    _memo: dict[int, float] = field(default_factory=dict)
    _exponents: tuple[Sequence[float], Sequence[float]] | None = None

    @classmethod
    def of(cls, absence: Absence, population: Population) -> Outlook:
        """By the client's hint where it gave one, else by the session's own gaps and those of
        sessions like it."""
        if absence.expected_ns is not None:
            return cls(
                absence.since_ns,
                RATIO_EDGES,
                population.hint_hazards(),
                max(absence.expected_ns, HINT_MIN_NS),
            )
        hazards = own_hazards(
            absence.sketch, population.hazards(absence.kind), population.limits.gap_own_weight
        )
        return cls(absence.since_ns, AGE_EDGES, hazards, SECOND)

    def worth(self, now_ns: int) -> float:
        """Expected returns per second for which the memory is taken; falls with time as a rule."""
        # What is shorter than half the first bin is not told apart.
        least = self.edges[1] / 2
        age = max(least, (now_ns - self.since_ns) / self.unit_ns)
        step = int(_STEPS * math.log2(age / least))
        known = self._memo.get(step)
        if known is None:
            known = self._best(least * 2.0 ** (step / _STEPS)) * SECOND / self.unit_ns
            self._memo[step] = known
        return known

    def _best(self, age: float) -> float:
        """The largest, over all horizons, of the chance of a return until then over the expected
        time until a return or then. Within a bin the chance of a return in the next moment falls
        with one over the time away, as it does from bin to bin for most sessions."""
        edges, exponents, later = self.edges, *self._slopes()
        away = 1.0  # the chance that it is still away
        taken = 0.0  # the expected time until it is back or the horizon is reached
        last = len(edges) - 1
        b = max(0, bisect_right(edges, age) - 1)
        start = age
        best = exponents[b] / age
        while True:
            exponent = exponents[b]
            end = edges[b + 1] if b < last else 2.0 * start
            stays: float = (end / start) ** -exponent
            if abs(exponent - 1.0) < _TINY:
                mean = start * math.log(end / start)
            else:
                mean = (end * stays - start) / (1.0 - exponent)
            taken += away * mean
            away *= stays
            best = max(best, (1.0 - away) / taken)
            # No horizon beyond can do better than the best moment beyond.
            if b == last or later[b] <= best:
                return best
            b += 1
            start = end

    def _slopes(self) -> tuple[Sequence[float], Sequence[float]]:
        """For each bin: how steeply the chance to be still away falls in it (the exponent of a
        power law), and the best chance of a return per unit of time in any later bin."""
        if self._exponents is None:
            edges = self.edges
            exponents = [-math.log(max(1.0 - hazard, _TINY)) for hazard in self.hazards]
            later = [0.0] * len(edges)
            best = 0.0
            for b in range(len(edges) - 1, -1, -1):
                low = edges[b] if b else edges[1] / 2
                end = edges[b + 1] if b + 1 < len(edges) else 2.0 * low
                exponents[b] /= math.log(end / low)
                later[b] = best
                best = max(best, exponents[b] / low)
            self._exponents = (exponents, later)
        return self._exponents

    def within_ns(self, share: float) -> int:
        """Time away within which that share of the returns that are to be expected has come."""
        away, left = 1.0, []
        for hazard in self.hazards:
            away *= 1.0 - hazard
            left.append(away)
        returning = 1.0 - left[-1]
        before = 1.0
        for b, after in enumerate(left):
            if 1.0 - after >= share * returning:
                start = self.edges[b]
                end = self.edges[b + 1] if b + 1 < len(self.edges) else 2 * start
                wanted = share * returning - (1.0 - before)
                part = wanted / (before - after) if before > after else 1.0
                return int((start + (end - start) * part) * self.unit_ns)
            before = after
        return int(2 * self.edges[-1] * self.unit_ns)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A replica that is held between two turns. `name` is the caller's."""

    name: T
    blocks: int
    outlook: Outlook
    value: SessionValue | None = None

    def rank(self, now_ns: int) -> tuple[float, int]:
        """Smallest goes first; of equal ones, whoever has been away for longest."""
        claim = _VALUE[self.value] if self.value is not None else 1.0
        return (self.outlook.worth(now_ns) * claim, self.outlook.since_ns)


def surplus(
    held: Iterable[Candidate[T]], blocks: int, now_ns: int
) -> list[tuple[Candidate[T], int]]:
    """Of which held replicas how many blocks go soft so that `blocks` do: those whose memory is
    worth least first, and no more of the last one than it takes, from its tail, since what is
    left of a chain's start is as good as before."""
    going: list[tuple[Candidate[T], int]] = []
    if blocks <= 0:
        return going
    ranked = [(candidate.rank(now_ns), n, candidate) for n, candidate in enumerate(held)]
    heapq.heapify(ranked)
    while blocks > 0 and ranked:
        candidate = heapq.heappop(ranked)[2]
        going.append((candidate, min(blocks, candidate.blocks)))
        blocks -= candidate.blocks
    return going


def hold_ns(absence: Absence, outlook: Outlook, value: SessionValue | None, limits: Limits) -> int:
    """How long a replica is held from the end of its turn: the default, or longer. Four times what
    the client expects (a factor of two either way is ordinary); without a hint, until nearly all
    of the returns that the session's own gaps promise have come. Halved or doubled by the
    session's value; capped. What is not held any more stays readable until its memory is
    wanted."""
    wanted = limits.retention_ns
    if absence.expected_ns is not None:
        wanted = max(wanted, 4 * absence.expected_ns)
    elif absence.sketch:
        wanted = max(wanted, outlook.within_ns(limits.retention_share))
    if value is SessionValue.LOW:
        wanted //= 2
    elif value is SessionValue.HIGH:
        wanted *= 2
    return min(wanted, limits.retention_max_ns)
