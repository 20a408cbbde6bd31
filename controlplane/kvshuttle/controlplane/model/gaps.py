"""How long sessions stay away between two turns: what one session's past says, what the gaps of
all sessions say, and how the two are weighed.

Time away is counted in bins that double in width, because gaps spread over five orders of
magnitude (a tool's second to a night's sleep) and only their order of magnitude can be foretold.
Where the client has said how long it will be away, time is counted in multiples of that instead:
the table of hinted gaps then learns how far such words are to be believed.

Nothing here looks ahead: tables change with what has ended or is still being waited for, and with
nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvshuttle.controlplane.model.limits import Limits

__all__ = [
    "AGE_EDGES",
    "HINT_MIN_NS",
    "NO_GAPS",
    "RATIO_EDGES",
    "Absence",
    "Population",
    "noted",
    "own_hazards",
]

SECOND = 1_000_000_000

AGE_EDGES: tuple[float, ...] = (0.0, *(float(2**k) for k in range(17)))
"""Lower edges of the bins of time away, in seconds: 0, 1, 2, 4 … 65,536 (18 h; a session is ended
after a day)."""

RATIO_EDGES: tuple[float, ...] = (0.0, *(2.0 ** (k / 2) for k in range(-8, 13)))
"""Lower edges of the bins of time away over what the client expected: 0, 1/16 … 64, each √2 times
the one before, since a hint is sharper than an order of magnitude."""

HINT_MIN_NS = SECOND
"""Hints below a second are taken for one: what is back that soon needs no better order."""

NO_GAPS = b""
"""The sketch of a session that has not come back yet."""

_NEVER = 1 << 63

_FULL = 64
"""A count of a sketch; when one gets there all are halved, so that a session that changes its ways
is believed after some dozens of turns."""


def noted(sketch: bytes, gap_ns: int) -> bytes:
    """A session's sketch with one more gap: one small count a bin, 18 bytes."""
    counts = bytearray(sketch or bytes(len(AGE_EDGES)))
    counts[_bin(AGE_EDGES, gap_ns / SECOND)] += 1
    if max(counts) >= _FULL:
        counts = bytearray(count // 2 for count in counts)
    return bytes(counts)


def own_hazards(sketch: bytes, prior: Sequence[float], weight: float) -> Sequence[float]:
    """For each bin the chance that a session that is still away at its start comes back within
    it: the session's own counts, with the prior counting as much as `weight` gaps."""
    if not sketch:
        return prior
    hazards = list(prior)
    still_away = 0
    for b in range(len(sketch) - 1, -1, -1):
        still_away += sketch[b]
        hazards[b] = (sketch[b] + weight * prior[b]) / (still_away + weight)
    return hazards


def _bin(edges: Sequence[float], value: float) -> int:
    return max(0, bisect_right(edges, value) - 1)


@dataclass(frozen=True, slots=True)
class Absence:
    """What is known of a session at the end of a turn, as far as it foretells the next one.

    `busy_ns` is how long the turn took. `hinted`: whether the client has ever said how long it
    would be away; one that does and is silent now waits for something that it cannot foresee.
    """

    since_ns: int
    busy_ns: int = 0
    sketch: bytes = NO_GAPS
    hinted: bool = False
    expected_ns: int | None = None

    @property
    def kind(self) -> int:
        """Which table of the population it belongs to: by the turn's length in four steps (a long
        answer is often the last before a person reads it), and by `hinted`."""
        busy = self.busy_ns
        step = (busy >= 4 * SECOND) + (busy >= 8 * SECOND) + (busy >= 16 * SECOND)
        return step + 4 * self.hinted


_KINDS = 8


@dataclass(slots=True)
class _Table:
    """Of the gaps that reached a bin, how many ended in it."""

    ended: list[float]
    reached: list[float]

    @classmethod
    def empty(cls, size: int) -> _Table:
        return cls([0.0] * size, [0.0] * size)

    def hazards(self, prior: Sequence[float], weight: float) -> tuple[float, ...]:
        return tuple(
            (ended + weight * p) / (reached + weight)
            for ended, reached, p in zip(self.ended, self.reached, prior, strict=True)
        )

    def halve(self) -> None:
        self.ended = [x / 2 for x in self.ended]
        self.reached = [x / 2 for x in self.reached]


@dataclass(slots=True)
class _Watched:
    """A gap that has not ended; `bin` is the last that it is counted to have reached, and the
    next begins at `next_ns`."""

    absence: Absence
    bin: int = -1
    next_ns: int = 0


def _hint_prior() -> tuple[float, ...]:
    """Before anything is known of clients' hints: most come back between a half and four times
    what they said."""
    return tuple(
        0.03 if edge < 0.25 else 0.15 if edge < 0.5 else 0.3 if edge < 4 else 0.1
        for edge in RATIO_EDGES
    )


@dataclass(slots=True)
class Population:
    """The gaps of all sessions: learned while they happen, kept in memory only, so that a new
    process starts from the priors and has learned within some hundred turns.

    At most `limits.gaps_watched` open gaps are watched at once, whoever comes first; whether a gap
    is watched does not depend on how it ends, so what is learned is not biased.
    """

    limits: Limits
    _watched: dict[Hashable, _Watched] = field(default_factory=dict)
    _all: _Table = field(default_factory=lambda: _Table.empty(len(AGE_EDGES)))
    _kinds: list[_Table] = field(
        default_factory=lambda: [_Table.empty(len(AGE_EDGES)) for _ in range(_KINDS)]
    )
    _hints: _Table = field(default_factory=lambda: _Table.empty(len(RATIO_EDGES)))
    _looked_ns: int = 0
    _memo: dict[int, tuple[float, ...]] = field(default_factory=dict)
    version: int = 0
    """Grows whenever the tables are read anew."""

    def away(self, key: Hashable, absence: Absence) -> None:
        """A session's turn has ended and no other of it runs; or its hint has changed."""
        if key in self._watched or len(self._watched) < self.limits.gaps_watched:
            self._watched[key] = _Watched(absence)

    def back(self, key: Hashable, now_ns: int) -> None:
        """A session's next turn begins."""
        watched = self._watched.pop(key, None)
        if watched is None:
            return
        last = self._reach(watched, now_ns)
        for table in self._tables(watched.absence):
            table.ended[last] += 1
        # Counts at most double in a day of steady traffic; halving keeps them current.
        if self._all.reached[0] + self._hints.reached[0] > self.limits.gaps_remembered:
            for table in (self._all, self._hints, *self._kinds):
                table.halve()

    def over(self, key: Hashable, now_ns: int) -> None:
        """A session has ended: how long it stayed away counts, that it ended tells nothing more.
        Told so by the client, it is no gap at all."""
        watched = self._watched.pop(key, None)
        if watched is not None:
            self._reach(watched, now_ns)

    def look(self, now_ns: int) -> None:
        """Counts those that are still away, at most once in `limits.gaps_look_ns`."""
        if now_ns - self._looked_ns < self.limits.gaps_look_ns:
            return
        self._looked_ns = now_ns
        for watched in self._watched.values():
            if watched.next_ns <= now_ns:
                self._reach(watched, now_ns)
        self._memo.clear()
        self.version += 1

    def hazards(self, kind: int) -> tuple[float, ...]:
        """Chance, bin by bin, that a gap of this kind which reaches a bin ends in it. Kinds
        borrow from all gaps, all gaps from a prior under which every doubling of the time away
        is worth the same: then whoever has been away for longest is the least likely to come."""
        known = self._memo.get(kind)
        if known is None:
            limits = self.limits
            every = self._all.hazards([limits.gap_prior] * len(AGE_EDGES), limits.gap_prior_weight)
            known = self._kinds[kind].hazards(every, limits.gap_kind_weight)
            self._memo[kind] = known
        return known

    def hint_hazards(self) -> tuple[float, ...]:
        """The same for hinted gaps, in multiples of the hint."""
        known = self._memo.get(-1)
        if known is None:
            known = self._hints.hazards(_hint_prior(), self.limits.gap_prior_weight)
            self._memo[-1] = known
        return known

    def _tables(self, absence: Absence) -> tuple[_Table, ...]:
        if absence.expected_ns is not None:
            return (self._hints,)
        return (self._all, self._kinds[absence.kind])

    def _reach(self, watched: _Watched, now_ns: int) -> int:
        absence = watched.absence
        if absence.expected_ns is not None:
            edges, unit_ns = RATIO_EDGES, max(absence.expected_ns, HINT_MIN_NS)
        else:
            edges, unit_ns = AGE_EDGES, SECOND
        last = _bin(edges, (now_ns - absence.since_ns) / unit_ns)
        if last > watched.bin:
            for table in self._tables(absence):
                for b in range(watched.bin + 1, last + 1):
                    table.reached[b] += 1
            watched.bin = last
        if watched.bin + 1 < len(edges):
            watched.next_ns = absence.since_ns + int(edges[watched.bin + 1] * unit_ns)
        else:
            watched.next_ns = _NEVER
        return watched.bin
