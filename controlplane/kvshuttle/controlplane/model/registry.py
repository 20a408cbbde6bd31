"""The one place where events meet state.

Every event (a call, an agent's message, a tick) is a method that takes `now_ns`, changes the state
and returns a `Decision`: an answer and effects. A method that raises a DomainError has changed
nothing. Methods for agents' events do not raise: what does not fit (late, unknown, of another
boot) is dropped, because an agent cannot do anything about it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, cast

from kvshuttle.controlplane.model import (
    eager_events,
    extension_events,
    lease_events,
    prefix_events,
    replica_events,
    takeover,
    turn_events,
    worker_events,
)
from kvshuttle.controlplane.model.agenda import Due
from kvshuttle.controlplane.model.effects import Decision
from kvshuttle.controlplane.model.gaps import Population
from kvshuttle.controlplane.model.requests import request_name
from kvshuttle.controlplane.model.state import Snapshot, State
from kvshuttle.controlplane.model.terms import TurnOutcome, WorkerState
from kvshuttle.controlplane.model.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.reports import (
        Descriptors,
        Heartbeat,
        Hello,
        LegReport,
        PrefixReport,
        ReplicaReport,
        StopReport,
    )
    from kvshuttle.controlplane.model.session import Session, Turn, Usage
    from kvshuttle.controlplane.model.terms import Hints, ReplicaState, SessionKey, WorkerRef
    from kvshuttle.controlplane.model.turn_events import BeginTurn
    from kvshuttle.controlplane.model.worker import Worker
    from kvshuttle.controlplane.model.worker_events import Welcome
    from kvshuttle.controlplane.planner import Planner

__all__ = ["AgentBatch", "Registry"]


class Registry:
    """State and events. Not thread-safe: one thread calls it."""

    def __init__(
        self, limits: Limits, planner: Planner, *, accept_lineage_change: bool = False
    ) -> None:
        self.limits = limits
        self.planner = planner
        self.gaps = Population(limits)
        self.accept_lineage_change = accept_lineage_change
        self.state = State(epoch=0, lineage_id="")

    def _work(self, now_ns: int) -> Work:
        return Work(self.state, self.limits, self.planner, self.gaps, now_ns)

    # -- start ---------------------------------------------------------------------------------
    def start(self, now_ns: int, snapshot: Snapshot, lineage_id: str) -> Decision[None]:
        """Takes up what a store remembers, in a new epoch. `lineage_id` names a store that is
        new."""
        self.state = state = takeover.first_state(now_ns, snapshot, lineage_id, self.limits)
        w = self._work(now_ns)
        takeover.take_over(w, snapshot)
        w.fact(
            "started",
            epoch=state.epoch,
            lineage_id=state.lineage_id,
            sessions=len(state.sessions),
            workers=len(state.workers),
        )
        return Decision(None, w.finish())

    # -- sessions and turns --------------------------------------------------------------------
    def begin_turn(self, now_ns: int, ask: BeginTurn) -> Decision[Turn]:
        """NoWorkerError, BudgetExceededError."""
        w = self._work(now_ns)
        return Decision(turn_events.begin(w, ask), w.finish())

    def end_turn(
        self,
        now_ns: int,
        key: SessionKey,
        number: int,
        outcome: TurnOutcome,
        usage: Usage | None = None,
        hints: Hints | None = None,
        token: str = "",
    ) -> Decision[Turn]:
        """NotFoundError."""
        w = self._work(now_ns)
        return Decision(turn_events.end(w, key, number, outcome, usage, hints, token), w.finish())

    def update_session(
        self, now_ns: int, key: SessionKey, hints: Hints, request_id: str = "", asked: object = None
    ) -> Decision[Session]:
        """InvalidFieldError, NotFoundError, SessionEndedError. `hints` may have come from what the
        session had: `asked` is what its caller gave, and gives again when it repeats the call."""
        w = self._work(now_ns)
        turn_events.update(w, key, hints, request_name("UpdateSession", request_id, asked))
        effects = w.finish()
        return Decision(self.state.sessions[key], effects)

    def end_session(self, now_ns: int, key: SessionKey, request_id: str = "") -> Decision[Session]:
        """NotFoundError."""
        w = self._work(now_ns)
        turn_events.end_session(w, key, request_name("EndSession", request_id))
        effects = w.finish()
        return Decision(self.state.sessions[key], effects)

    # -- leases --------------------------------------------------------------------------------
    def renew(
        self, now_ns: int, lease_id: str, ttl_ns: int, request_id: str = ""
    ) -> Decision[Lease]:
        """InvalidFieldError, NotFoundError, LeaseEndedError, LeaseNotGrantedError,
        BudgetExceededError."""
        w = self._work(now_ns)
        request = request_name("RenewLease", request_id, ttl_ns)
        return Decision(lease_events.renew(w, lease_id, ttl_ns, request), w.finish())

    def revoke(self, now_ns: int, lease_id: str, reason: str) -> Decision[Lease]:
        """NotFoundError."""
        w = self._work(now_ns)
        return Decision(lease_events.revoke(w, lease_id, reason), w.finish())

    # -- workers -------------------------------------------------------------------------------
    def hello(self, now_ns: int, says: Hello) -> Decision[Welcome]:
        """FingerprintMismatchError, BootConflictError, WorkerFencedError, LineageChangedError,
        UnsupportedError; SupersededError, after which nothing may be asked of it any more."""
        w = self._work(now_ns)
        welcome = worker_events.hello(w, says, accept_lineage=self.accept_lineage_change)
        return Decision(welcome, w.finish())

    def stream_lost(
        self, now_ns: int, ref: WorkerRef, generation: int, reason: str
    ) -> Decision[None]:
        """A stream ended, whoever ended it."""
        w = self._work(now_ns)
        worker_events.lost(w, ref, generation, reason)
        return Decision(None, w.finish())

    def drain(
        self, now_ns: int, worker_id: str, undo: bool, request_id: str = ""
    ) -> Decision[Worker]:
        """InvalidFieldError, NotFoundError."""
        w = self._work(now_ns)
        request = request_name("DrainWorker", request_id, undo)
        return Decision(worker_events.drain(w, worker_id, undo, request), w.finish())

    def fence(
        self, now_ns: int, ref: WorkerRef, attestation: str, request_id: str = ""
    ) -> Decision[Worker]:
        """InvalidFieldError, NotFoundError, IncarnationMismatchError."""
        w = self._work(now_ns)
        # The attestation is evidence, not part of what is asked for.
        request = request_name("FenceWorker", request_id, ref.incarnation)
        return Decision(worker_events.fence(w, ref, attestation, request), w.finish())

    # -- agents' events ------------------------------------------------------------------------
    def agent(self, now_ns: int, ref: WorkerRef) -> AgentBatch:
        """A batch of one agent's events: they share one set of effects."""
        return AgentBatch(self._work(now_ns), ref)

    # -- time ----------------------------------------------------------------------------------
    def tick(self, now_ns: int) -> Decision[None]:
        """Whatever is due now, at most so much of it; call it every `tick_ns`."""
        w = self._work(now_ns)
        self.gaps.look(now_ns)
        worker_events.silent(w)
        most = self.limits.due_per_tick
        for lease_id in self.state.leases.due(now_ns, most):
            self._lease_due(w, lease_id)
        extension_events.tell(w)
        for kind, name in self.state.agenda.pop(now_ns, most):
            match kind:
                case Due.LEASE:
                    self._lease_due(w, str(name))
                case Due.TURN:
                    turn_events.abandon(w, cast("SessionKey", name))
                case Due.SESSION:
                    turn_events.session_due(w, cast("SessionKey", name))
                case Due.LEASE_FORGET:
                    lease_events.forget(w, str(name))
                case Due.WORKER_FORGET:
                    worker_events.stale(w, str(name))
        self._bound_ended_leases(w)
        return Decision(None, w.finish())

    def behind(self, now_ns: int) -> bool:
        """Whether a tick has left something that is due: the next one should come soon."""
        return self.state.leases.behind(now_ns) or self.state.agenda.behind(now_ns)

    def _lease_due(self, w: Work, lease_id: str) -> None:
        lease = self.state.leases.get(lease_id)
        lease_events.due(w, lease_id)
        if lease is not None:
            _after_lease(w, lease)

    def _bound_ended_leases(self, w: Work) -> None:
        leases = self.state.leases
        excess = len(leases.ended) - self.limits.ended_leases_max
        if excess <= 0:
            return
        # Those that ended first. One whose reader may still read stays: it would be told to stop,
        # and its source would not be let go.
        over = (
            x
            for x in map(leases.peek, leases.ended)
            if x.reader_stopped or (not x.push and x.deadline_ns <= w.now_ns)
        )
        for lease in list(islice(over, excess)):
            w.drop_lease(lease)


def _after_lease(w: Work, before: Lease) -> None:
    lease = w.state.leases.get(before.lease_id)
    if before.open and lease is not None and not lease.open:
        replica_events.release_after_forward(w, lease)
        eager_events.ended(w, lease)


class AgentBatch:
    """Events of one agent, in order. An event of a boot that is not the registered one is
    dropped."""

    def __init__(self, work: Work, ref: WorkerRef) -> None:
        self._w = work
        self._ref = ref
        worker = work.worker(ref)
        self._current = worker is not None and worker.state is not WorkerState.FENCED
        if self._current:
            worker_events.heard(work, ref)

    def heartbeat(self, beat: Heartbeat) -> None:
        """At the interval that the welcome gave."""
        if self._current:
            worker_events.heartbeat(self._w, self._ref, beat)

    def offered(self, report: ReplicaReport) -> None:
        """A request of a turn ended and its blocks are held."""
        if self._current:
            replica_events.offered(self._w, self._ref, report)

    def replica_changed(
        self,
        key: SessionKey,
        head_hash: bytes,
        state: ReplicaState,
        num_blocks: int,
        reason: str,
    ) -> None:
        """A replica turned soft, got shorter or went away."""
        if self._current:
            replica_events.changed(self._w, self._ref, key, head_hash, state, num_blocks, reason)

    def hardened(self, lease_id: str, version: int, blocks: Descriptors) -> None:
        """The source holds a lease's range."""
        self._lease(
            lease_id,
            lambda: lease_events.hardened(self._w, self._ref, lease_id, version, blocks),
        )

    def refused(self, lease_id: str, reason: str) -> None:
        """A side refuses or cannot."""
        self._lease(lease_id, lambda: lease_events.refused(self._w, self._ref, lease_id, reason))

    def extended(self, lease_id: str, version: int, is_source: bool) -> None:
        """A side obeyed an Extend."""
        self._lease(
            lease_id,
            lambda: lease_events.extended(self._w, self._ref, lease_id, version, is_source),
        )

    def leases_needed(self, epoch: int, seqs: npt.NDArray[np.uint64]) -> None:
        """The destination still needs these leases."""
        if self._current:
            extension_events.needed(self._w, self._ref, epoch, seqs)

    def leases_extended(self, extension: int, missing: npt.NDArray[np.uint64]) -> None:
        """The source obeyed an ExtendLeases, but for some."""
        if self._current:
            extension_events.extended(self._w, self._ref, extension, missing)

    def active(self, lease_id: str) -> None:
        """The destination posted its transfer."""
        self._lease(lease_id, lambda: lease_events.active(self._w, self._ref, lease_id))

    def stopped(self, lease_id: str, report: StopReport) -> None:
        """The destination is done with a lease."""
        self._lease(lease_id, lambda: lease_events.stopped(self._w, self._ref, lease_id, report))

    def source_released(self, lease_id: str, reason: str) -> None:
        """The source has released a lease's range."""
        self._lease(
            lease_id,
            lambda: lease_events.source_released(self._w, self._ref, lease_id, reason),
        )

    def prefix_wanted(self, report: PrefixReport) -> None:
        """A request looks for KV of other sessions of its tenant."""
        if self._current:
            prefix_events.wanted(self._w, self._ref, report)

    def computed(self, report: LegReport) -> None:
        """A leg's prompt was computed."""
        if self._current:
            turn_events.computed(self._w, self._ref.worker_id, report)

    def _lease(self, lease_id: str, event: Callable[[], None]) -> None:
        if not self._current:
            return
        before = self._w.state.leases.get(lease_id)
        event()
        if before is not None:
            _after_lease(self._w, before)

    def finish(self) -> Decision[None]:
        """The batch's effects."""
        return Decision(None, self._w.finish())
