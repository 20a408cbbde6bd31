"""The tables and their indexes. Only `work.Work` changes them."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.admission import Ledger
from kvshuttle.controlplane.model.terms import SessionKey

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["REVISIONS_PER_EPOCH", "Agenda", "Due", "Snapshot", "State", "TurnName"]

TurnName = tuple[SessionKey, int]
REVISIONS_PER_EPOCH = 1 << 40


class Due(IntEnum):
    """What an agenda entry is about."""

    LEASE = 1
    TURN = 2
    SESSION = 3
    LEASE_FORGET = 4
    WORKER_FORGET = 5


@dataclass(slots=True)
class Agenda:
    """Deadlines, soonest first. An entry is a hint to look, not an order: what it names decides
    by its own state, so nothing is ever removed from the middle."""

    _heap: list[tuple[int, int, Due, Hashable]] = field(default_factory=list)
    _count: int = 0

    def add(self, due_ns: int, kind: Due, name: Hashable) -> None:
        """Look at `name` at `due_ns` or later."""
        self._count += 1
        heapq.heappush(self._heap, (due_ns, self._count, kind, name))

    def pop(self, now_ns: int, at_most: int) -> list[tuple[Due, Hashable]]:
        """What is due, at most so much of it."""
        found: list[tuple[Due, Hashable]] = []
        while self._heap and self._heap[0][0] <= now_ns and len(found) < at_most:
            _, _, kind, name = heapq.heappop(self._heap)
            found.append((kind, name))
        return found

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store remembers."""

    epoch: int = 0
    lineage_id: str = ""
    last_incarnation: int = 0
    time_ns: int = 0
    sessions: Iterable[Session] = ()
    leases: Iterable[Lease] = ()
    workers: Iterable[Worker] = ()

    def latest_ns(self) -> int:
        """The newest time in it: time goes on from there, whatever the wall clock says."""
        return max(
            self.time_ns,
            max((x.update_ns for x in self.sessions), default=0),
            max((max(x.create_ns, x.grant_ns, x.end_ns) for x in self.leases), default=0),
            max((max(x.heard_ns, x.end_ns) for x in self.workers), default=0),
        )


@dataclass(slots=True)
class State:
    """Everything that the control plane knows."""

    epoch: int
    lineage_id: str
    # The last term of the process before this one, and when this one began.
    past_epoch: int = 0
    start_ns: int = 0
    last_incarnation: int = 0
    revision: int = 0
    lease_seq: int = 0
    sessions: dict[SessionKey, Session] = field(default_factory=dict)
    active_sessions: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)
    # The current boot of each worker; an older boot is known by its leases only.
    workers: dict[str, Worker] = field(default_factory=dict)
    replicas: dict[SessionKey, dict[tuple[str, bytes], Replica]] = field(default_factory=dict)
    replicas_of: dict[str, set[tuple[SessionKey, bytes]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    turns: dict[str, TurnName] = field(default_factory=dict)
    turns_on: Counter[str] = field(default_factory=Counter)
    open_leases: set[str] = field(default_factory=set)
    # Leases whose reader may still read, by either worker: open ones, and ended ones whose
    # destination has not said that it stopped.
    leases_of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    # Open ones; those that are eager belong to their session and are not among them.
    leases_of_turn: dict[TurnName, set[str]] = field(default_factory=lambda: defaultdict(set))
    # Eager returns: the open one of a session, how many a reader has open, and what waits there
    # (turn, head hash), oldest first.
    eager_of: dict[SessionKey, str] = field(default_factory=dict)
    eager_on: Counter[str] = field(default_factory=Counter)
    eager_waiting: dict[str, dict[SessionKey, tuple[int, bytes]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    agenda: Agenda = field(default_factory=Agenda)
    ledger: Ledger = field(default_factory=Ledger)

    def next_revision(self) -> int:
        """Orders all changes of sessions and leases, over restarts too: the epoch is its high
        part, so it need not be stored."""
        self.revision = max(self.revision, self.epoch * REVISIONS_PER_EPOCH) + 1
        return self.revision

    def replicas_of_session(self, key: SessionKey) -> tuple[Replica, ...]:
        """Where a session's KV lies."""
        return tuple(self.replicas.get(key, {}).values())
