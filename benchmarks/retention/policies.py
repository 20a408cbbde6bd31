"""The policies that are compared. All act on the same pool: see `replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from benchmarks.retention.trace import NS
from kvshuttle.controlplane.model.gaps import NO_GAPS, Absence, Population, noted
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.retention import Candidate, Outlook, hold_ns, surplus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.retention.client import Say
    from benchmarks.retention.trace import Event

__all__ = ["Clairvoyant", "FixedHold", "Lru", "Ours", "Policy"]

FOREVER = 1 << 62


class Policy(Protocol):
    """Sees events as they happen, never those to come."""

    def begins(self, session: int, now_ns: int) -> None:
        """A turn begins."""

    def ends(self, session: int, now_ns: int) -> int:
        """A turn has ended: until when what it leaves is held."""

    def surplus(self, held: Mapping[int, int], blocks: int, now_ns: int) -> list[tuple[int, int]]:
        """Of which held sessions how many blocks are let go, given the blocks that each holds."""


class Lru:
    """Nothing is held: vLLM's own prefix cache, which reuses what was used longest ago."""

    def begins(self, session: int, now_ns: int) -> None:
        pass

    def ends(self, session: int, now_ns: int) -> int:
        return now_ns

    def surplus(self, held: Mapping[int, int], blocks: int, now_ns: int) -> list[tuple[int, int]]:
        return []


class FixedHold(Lru):
    """Upstream's: everything is held for the same time, and nothing is let go before."""

    def __init__(self, seconds: int = 480) -> None:
        self._hold_ns = seconds * NS

    def ends(self, session: int, now_ns: int) -> int:
        return now_ns + self._hold_ns


class Clairvoyant:
    """The bound: whoever comes back last goes first, those who never do before all."""

    def __init__(self, events: list[Event]) -> None:
        self._next: dict[int, list[int]] = {}
        for event in reversed(events):
            if event.begins:
                self._next.setdefault(event.session, []).append(event.time_ns)

    def begins(self, session: int, now_ns: int) -> None:
        self._next[session].pop()

    def ends(self, session: int, now_ns: int) -> int:
        return FOREVER

    def surplus(self, held: Mapping[int, int], blocks: int, now_ns: int) -> list[tuple[int, int]]:
        def returns_ns(session: int) -> int:
            coming = self._next[session]
            return coming[-1] if coming else FOREVER

        going = []
        for session in sorted(held, key=returns_ns, reverse=True):
            if blocks <= 0:
                break
            going.append((session, min(blocks, held[session])))
            blocks -= held[session]
        return going


class Ours:
    """The control plane's policy, by its own functions; `says` is what clients say, if they do.

    It does what the registry does at the same events: notes a session's gap when its next turn
    begins, tells the population of absences and returns, and ranks what is held when room is
    wanted. It starts with an empty population and learns while it runs.
    """

    def __init__(self, limits: Limits, says: list[list[Say]] | None = None) -> None:
        self._limits = limits
        self._says = says
        self._population = Population(limits)
        self._turn: dict[int, int] = {}
        self._begin_ns: dict[int, int] = {}
        self._end_ns: dict[int, int] = {}
        self._gaps: dict[int, bytes] = {}
        self._hinted: set[int] = set()
        self._outlook: dict[int, Outlook] = {}

    def begins(self, session: int, now_ns: int) -> None:
        self._turn[session] = self._turn.get(session, -1) + 1
        if session in self._end_ns:
            gap_ns = now_ns - self._end_ns[session]
            self._gaps[session] = noted(self._gaps.get(session, NO_GAPS), gap_ns)
        self._population.look(now_ns)
        self._population.back(session, now_ns)
        self._begin_ns[session] = now_ns

    def ends(self, session: int, now_ns: int) -> int:
        self._end_ns[session] = now_ns
        self._population.look(now_ns)
        said = self._says[session][self._turn[session]] if self._says else None
        if said is not None and said.over:
            return now_ns  # EndSession: all is released
        expected_ns = said.expected_ns if said is not None else None
        if expected_ns is not None:
            self._hinted.add(session)
        absence = Absence(
            since_ns=now_ns,
            busy_ns=now_ns - self._begin_ns[session],
            sketch=self._gaps.get(session, NO_GAPS),
            hinted=session in self._hinted,
            expected_ns=expected_ns,
        )
        self._population.away(session, absence)
        outlook = self._outlook[session] = Outlook.of(absence, self._population)
        return now_ns + hold_ns(absence, outlook, None, self._limits)

    def surplus(self, held: Mapping[int, int], blocks: int, now_ns: int) -> list[tuple[int, int]]:
        candidates = [
            Candidate(session, count, self._outlook[session]) for session, count in held.items()
        ]
        return [(going.name, count) for going, count in surplus(candidates, blocks, now_ns)]
