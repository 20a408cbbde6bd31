"""One event at work: reads the state, changes it, and notes the effects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvshuttle.controlplane.model.agenda import Due
from kvshuttle.controlplane.model.effects import (
    Disconnect,
    DropLease,
    DropSession,
    DropWorker,
    Effects,
    Fact,
    LeaseChange,
    LeaseDropped,
    PutLease,
    PutSession,
    PutTerm,
    PutWorker,
    Record,
    SessionChange,
    SessionDropped,
)
from kvshuttle.controlplane.model.prefixes import interval
from kvshuttle.controlplane.model.terms import TransferOutcome

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.commands import Command
    from kvshuttle.controlplane.model.effects import Change
    from kvshuttle.controlplane.model.gaps import Population
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.reports import StopReport
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.state import State
    from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef
    from kvshuttle.controlplane.model.worker import Worker
    from kvshuttle.controlplane.planner import Planner

__all__ = ["Work"]


class Work:
    """The one way to change the state. `finish` gives every object that changed one revision,
    one after-image for watchers and, where it must survive, one record."""

    __slots__ = (
        "_dropped",
        "_gone",
        "_leases",
        "_sessions",
        "_term",
        "_workers",
        "commands",
        "disconnects",
        "facts",
        "gaps",
        "limits",
        "now_ns",
        "planner",
        "state",
    )

    def __init__(
        self, state: State, limits: Limits, planner: Planner, gaps: Population, now_ns: int
    ) -> None:
        self.state = state
        self.limits = limits
        self.planner = planner
        self.gaps = gaps
        self.now_ns = now_ns
        self.commands: list[tuple[WorkerRef, Command]] = []
        self.facts: list[Fact] = []
        self.disconnects: list[Disconnect] = []
        # Insertion order is the order of changes; the value is whether it must be stored.
        self._sessions: dict[SessionKey, bool] = {}
        self._leases: dict[str, bool] = {}
        self._workers: dict[str, Worker] = {}
        self._dropped: list[Record] = []
        # What watchers are told of them; their revisions come at the end.
        self._gone: list[SessionDropped | LeaseDropped] = []
        self._term = False

    def command(self, ref: WorkerRef, command: Command) -> None:
        """An order for a boot; dropped on the way if it is not connected then."""
        self.commands.append((ref, command))

    def fact(self, name: str, **values: object) -> None:
        """Something for logs and metrics."""
        self.facts.append(Fact(name, values))

    def transferred(self, lease: Lease, report: StopReport) -> None:
        """A destination's word on what was moved to it: told, and the way's speed learned."""
        self.fact(
            "transfer",
            lease_id=lease.lease_id,
            direction=lease.direction.name,
            outcome=report.outcome.name,
            reason=report.reason,
            stats=report.stats,
        )
        if report.outcome is TransferOutcome.PUBLISHED:
            self.planner.rates.observe_transfer(
                lease.source.worker_id,
                lease.destination.worker_id,
                report.stats.bytes,
                report.stats.transfer_ns,
            )

    def disconnect(self, worker: Worker, reason: str) -> None:
        """End a worker's stream."""
        self.disconnects.append(Disconnect(worker.ref, worker.stream_generation, reason))

    # -- workers -------------------------------------------------------------------------------
    def worker(self, ref: WorkerRef) -> Worker | None:
        """A boot, if it is the current one of its worker."""
        worker = self.state.workers.get(ref.worker_id)
        return worker if worker is not None and worker.ref == ref else None

    def put_worker(self, worker: Worker, *, durable: bool = True) -> None:
        """A worker as it stands now."""
        self.state.workers[worker.ref.worker_id] = worker
        if durable:
            self._workers[worker.ref.worker_id] = worker

    def drop_worker(self, worker: Worker) -> None:
        """A boot is forgotten."""
        if self.state.workers.get(worker.ref.worker_id) is worker:
            del self.state.workers[worker.ref.worker_id]
        self._dropped.append(DropWorker(worker.ref))

    def put_term(self) -> None:
        """Epoch or last incarnation changed."""
        self._term = True

    # -- sessions ------------------------------------------------------------------------------
    def put_session(self, session: Session) -> None:
        """A session as it stands now."""
        before = self.state.sessions.get(session.key)
        self.state.active_sessions += session.active - (before is not None and before.active)
        self.state.ledger.session(before, session)
        self.state.sessions[session.key] = session
        self._sessions[session.key] = True
        if before is None:
            self.state.agenda.add(
                self.now_ns + self.limits.session_idle_ns, Due.SESSION, session.key
            )

    def touch_session(self, key: SessionKey) -> None:
        """A session's replicas changed; they are not stored."""
        self._sessions.setdefault(key, False)

    def drop_session(self, key: SessionKey) -> None:
        """A session is forgotten."""
        self.state.ledger.session(self.state.sessions.pop(key), None)
        self._sessions.pop(key, None)
        self._dropped.append(DropSession(key))
        self._gone.append(SessionDropped(0, key))

    def put_replica(self, key: SessionKey, replica: Replica) -> None:
        """A replica as it stands now."""
        before = self.state.replicas.put(key, replica)
        self.state.ledger.replica(key, before, replica)
        if before is not None and replica.num_blocks < before.num_blocks:
            self._shorten_prefix(key, replica)
        self.touch_session(key)

    def _shorten_prefix(self, key: SessionKey, replica: Replica) -> None:
        worker = self.worker(replica.worker)
        if worker is not None and (step := interval(self.limits, worker.block_size)):
            left = self.state.replicas_of_session(key)
            self.state.prefixes.shorten(key, replica, step, left)

    def drop_replica(self, key: SessionKey, replica: Replica) -> None:
        """A replica is gone."""
        gone = self.state.replicas.drop(key, replica.name)
        self.state.ledger.replica(key, gone, None)
        self.state.prefixes.drop(key, gone, self.state.replicas_of_session(key))
        self.touch_session(key)

    # -- leases --------------------------------------------------------------------------------
    def put_lease(self, lease: Lease, *, durable: bool = True) -> None:
        """A lease as it stands now; keeps the indexes."""
        state = self.state
        before = state.leases.get(lease.lease_id)
        state.leases[lease.lease_id] = lease
        state.ledger.lease(before, lease)
        self._leases[lease.lease_id] = self._leases.get(lease.lease_id, False) or durable
        self.index_lease(before, lease)
        if before is not None and before.open and not lease.open:
            state.agenda.add(
                self.now_ns + self.limits.ended_lease_kept_ns, Due.LEASE_FORGET, lease.lease_id
            )
            self.fact(
                "lease_ended",
                lease_id=lease.lease_id,
                direction=lease.direction.name,
                state=lease.state.name,
                reason=lease.end_reason,
                tenant=lease.key.tenant,
                session_id=lease.key.session_id,
                turn=lease.turn,
            )

    def index_lease(self, before: Lease | None, lease: Lease) -> None:
        """Keeps what finds a lease by its turn or session and, once it has ended, by its workers;
        the table itself finds open ones."""
        state = self.state
        is_open = lease.open
        was_open = before is not None and before.open
        if lease.eager:
            self._index_eager(lease, was_open=was_open)
        elif is_open != was_open:
            self._index_turn(lease, is_open=is_open)
        if is_open:
            return
        for ref in (lease.source, lease.destination):
            if not lease.reader_stopped:
                state.unstopped[ref.worker_id].add(lease.lease_id)
            elif (unstopped := state.unstopped.get(ref.worker_id)) is not None:
                unstopped.discard(lease.lease_id)

    def _index_eager(self, lease: Lease, *, was_open: bool) -> None:
        state = self.state
        state.eager_on[lease.destination.worker_id] += lease.open - was_open
        if lease.open:
            state.eager_of[lease.key] = lease.lease_id
        elif state.eager_of.get(lease.key) == lease.lease_id:
            del state.eager_of[lease.key]

    def _index_turn(self, lease: Lease, *, is_open: bool) -> None:
        token, of_turn = lease.turn_token, self.state.leases_of_turn
        known = self.state.turn_leases(token)
        if is_open:
            of_turn[token] = (*known, lease.lease_id) if known else lease.lease_id
        elif lease.lease_id in known:
            left = tuple(x for x in known if x != lease.lease_id)
            if left:
                of_turn[token] = left
            else:
                del of_turn[token]

    def drop_lease(self, lease: Lease) -> None:
        """A lease is forgotten."""
        self.state.ledger.dropped(self.state.leases.take(lease.lease_id))
        for ref in (lease.source, lease.destination):
            if ref.worker_id in self.state.unstopped:
                self.state.unstopped[ref.worker_id].discard(lease.lease_id)
        self._leases.pop(lease.lease_id, None)
        self._dropped.append(DropLease(lease.lease_id))
        self._gone.append(LeaseDropped(0, lease.key, lease.lease_id))

    def leases_of(self, worker_id: str) -> list[Lease]:
        """Leases from or to a worker (any boot) under which somebody may still read, oldest
        first."""
        leases = self.state.leases
        names = set(leases.open_of(leases.boots_of(worker_id)))
        names |= self.state.unstopped.get(worker_id, set())
        found = [leases[lease_id] for lease_id in names]
        return sorted(found, key=lambda lease: lease.order)

    # -- the end -------------------------------------------------------------------------------
    def finish(self) -> Effects:
        """The effects, with after-images."""
        state = self.state
        records: list[Record] = []
        changes: list[Change] = []
        if self._term:
            records.append(
                PutTerm(state.epoch, state.lineage_id, state.last_incarnation, self.now_ns)
            )
        records += [PutWorker(worker) for worker in self._workers.values()]
        for key, durable in self._sessions.items():
            session = state.sessions.get(key)
            if session is None:
                continue
            revision = state.next_revision()
            session = replace(session, version=revision)
            state.sessions[key] = session
            changes.append(SessionChange(revision, session, state.replicas_of_session(key)))
            if durable:
                records.append(PutSession(session))
        for lease_id, durable in self._leases.items():
            lease = state.leases[lease_id]
            changes.append(LeaseChange(state.next_revision(), lease))
            if durable:
                records.append(PutLease(lease))
        records += self._dropped
        changes += [replace(gone, revision=state.next_revision()) for gone in self._gone]
        return Effects(records, self.commands, changes, self.facts, self.disconnects)
