"""Everything that the control plane knows: tables and indexes. Only `work.Work` changes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kvshuttle.controlplane.model.agenda import Agenda
from kvshuttle.controlplane.model.lease_table import LeaseTable
from kvshuttle.controlplane.model.ledger import Ledger
from kvshuttle.controlplane.model.packed import PackedLeases, PackedSessions
from kvshuttle.controlplane.model.prefixes import PrefixIndex
from kvshuttle.controlplane.model.session_table import ReplicaTable, SessionTable
from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["REVISIONS_PER_EPOCH", "Extension", "Snapshot", "State"]

REVISIONS_PER_EPOCH = 1 << 40


class Extension(Struct, frozen=True):
    """Leases that a source was asked to hold longer, for a destination that needs them."""

    source: WorkerRef
    destination: WorkerRef
    epoch: int
    seqs: npt.NDArray[np.uint64]
    ttl_ns: int
    asked_ns: int


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
            PackedSessions.of(self.sessions).latest_ns(),
            PackedLeases.of(self.leases).latest_ns(),
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
    sessions: SessionTable = field(default_factory=SessionTable)
    active_sessions: int = 0
    leases: LeaseTable = field(default_factory=LeaseTable)
    # The current boot of each worker; an older boot is known by its leases only.
    workers: dict[str, Worker] = field(default_factory=dict)
    replicas: ReplicaTable = field(init=False)
    # The session of each turn that runs, by the turn's token.
    turns: dict[str, SessionKey] = field(default_factory=dict)
    turns_on: Counter[str] = field(default_factory=Counter)
    # Ended leases whose destination has not said that it stopped, by either worker: whoever reads
    # may still read. What is open is found in `leases` itself.
    unstopped: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    # Open ones by the turn's token, where there is one only without a tuple around it; those that
    # are eager belong to their session and are not among them.
    leases_of_turn: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    # Eager returns: the open one of a session, how many a reader has open, and what waits there
    # (turn, head hash), oldest first.
    eager_of: dict[SessionKey, str] = field(default_factory=dict)
    eager_on: Counter[str] = field(default_factory=Counter)
    eager_waiting: dict[str, dict[SessionKey, tuple[int, bytes]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    # Turns whose decode leg takes no (more) push, as it has said: nothing of theirs is read either.
    push_declined: set[str] = field(default_factory=set)
    # Landing zones under leases that are not in the books: (writer, who holds it), by lease.
    orphans: dict[str, tuple[WorkerRef, WorkerRef]] = field(default_factory=dict)
    # Until when a worker that was told to let replicas go is given time to show it.
    relieved_ns: dict[str, int] = field(default_factory=dict)
    # Extensions under way, by number, oldest first.
    extensions: dict[int, Extension] = field(default_factory=dict)
    extension_seq: int = 0
    # When watchers were last told of leases that go on.
    told_ns: int = 0
    agenda: Agenda = field(default_factory=Agenda)
    ledger: Ledger = field(default_factory=Ledger)
    # Rebuilt from what agents say at hello.
    prefixes: PrefixIndex = field(default_factory=lambda: PrefixIndex(0))

    def __post_init__(self) -> None:
        self.replicas = ReplicaTable(self.sessions)

    @property
    def open_leases(self) -> list[str]:
        """Ids of the leases that have not ended, in no order."""
        return self.leases.open_ids()

    def turn_leases(self, token: str) -> tuple[str, ...]:
        """Ids of a turn's open leases, oldest first."""
        found = self.leases_of_turn.get(token, ())
        return (found,) if isinstance(found, str) else found

    def next_revision(self) -> int:
        """Orders all changes of sessions and leases, over restarts too: the epoch is its high
        part, so it need not be stored."""
        self.revision = max(self.revision, self.epoch * REVISIONS_PER_EPOCH) + 1
        return self.revision

    def as_shown(self, session: Session) -> Session:
        """A session as others are shown it. Changes of replicas are not stored, nor the versions
        that they made: after a start every version lies above all that were shown before."""
        least = (self.past_epoch + 1) * REVISIONS_PER_EPOCH
        return session if session.version >= least else replace(session, version=least)

    def replicas_of_session(self, key: SessionKey) -> tuple[Replica, ...]:
        """Where a session's KV lies."""
        return self.sessions.replicas(key)
