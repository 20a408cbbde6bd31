"""A store that remembers for as long as the process lives: for tests and trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvshuttle.controlplane.model.effects import (
    DropLease,
    DropSession,
    DropWorker,
    PutLease,
    PutSession,
    PutTerm,
    PutWorker,
)
from kvshuttle.controlplane.model.reports import Counters, PoolStats
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.controlplane.model.effects import Record
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["MemoryStore", "at_rest"]


def at_rest(worker: Worker) -> Worker:
    """A boot as it is remembered: nobody is connected to a control plane that starts. What an
    agent says at its hello is not stored."""
    fenced = worker.state is WorkerState.FENCED
    return replace(
        worker,
        state=WorkerState.FENCED if fenced else WorkerState.LOST,
        end_ns=worker.end_ns or worker.heard_ns,
        fingerprint=(),
        ranks=None,
        num_ranks=0,
        nixl_backend="",
        push=False,
        past=(),
        heads=(),
        clock=0,
        pool_clock=0,
        pool=PoolStats(),
        counters=Counters(),
    )


@dataclass(slots=True)
class MemoryStore:
    """Two of them never share anything."""

    kind: str = "memory"
    durable: bool = False
    _term: PutTerm | None = None
    _sessions: dict[SessionKey, Session] = field(default_factory=dict)
    _leases: dict[str, Lease] = field(default_factory=dict)
    _workers: dict[str, Worker] = field(default_factory=dict)

    def load(self) -> Snapshot:
        """Everything that was committed."""
        term = self._term or PutTerm(0, "", 0, 0)
        return Snapshot(
            epoch=term.epoch,
            lineage_id=term.lineage_id,
            last_incarnation=term.last_incarnation,
            time_ns=term.time_ns,
            sessions=list(self._sessions.values()),
            leases=list(self._leases.values()),
            workers=list(self._workers.values()),
        )

    def commit(self, records: Iterable[Record]) -> None:
        """Keeps the records."""
        for record in records:
            match record:
                case PutSession(session):
                    self._sessions[session.key] = session
                case DropSession(key):
                    self._sessions.pop(key, None)
                case PutLease(lease):
                    self._leases[lease.lease_id] = replace(lease, renewal=None)
                case DropLease(lease_id):
                    self._leases.pop(lease_id, None)
                case PutWorker(worker):
                    self._workers[worker.ref.worker_id] = at_rest(worker)
                case DropWorker(ref):
                    known = self._workers.get(ref.worker_id)
                    if known is not None and known.ref == ref:
                        del self._workers[ref.worker_id]
                case PutTerm():
                    self._term = record

    def close(self) -> None:
        """Nothing to let go of."""
