"""Events about replicas: offered, changed, gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model import (
    eager_events,
    lease_events,
    push_events,
    retention_events,
)
from kvshuttle.controlplane.model.commands import ReleaseReplica, Revoke
from kvshuttle.controlplane.model.replica import Replica
from kvshuttle.controlplane.model.terms import (
    Direction,
    LeaseState,
    Leg,
    ReplicaState,
    WorkerRef,
)

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.reports import ReplicaReport
    from kvshuttle.controlplane.model.session import Turn
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.model.work import Work

__all__ = ["changed", "forget_worker", "inventory", "offered", "release_after_forward"]


def _note(w: Work, ref: WorkerRef, report: ReplicaReport) -> Replica | None:
    """Enters a replica into the books, or tells the worker to let it go."""
    session = w.state.sessions.get(report.key)
    if session is None or not session.active:
        # The session is over, or this control plane never knew it: nobody will ask for it.
        w.command(ref, ReleaseReplica(report.key, report.head_hash))
        return None
    replica = Replica(
        worker=ref,
        head_hash=report.head_hash,
        num_blocks=report.num_blocks,
        num_tokens=report.num_tokens,
        state=report.state,
        expire_ns=w.now_ns + report.hold_remaining_ns,
    )
    w.put_replica(report.key, replica)
    if report.leg is not Leg.PREFILL:
        # What prefill leaves is let go of as soon as decode has it.
        # What was brought to prefill is a copy of what decode has.
        key = w.state.sessions.own(report.key)
        w.state.prefixes.put(key, replica, report.checkpoints, copy=report.leg is None)
    here = [
        r for r in w.state.replicas_of_session(report.key) if r.worker.worker_id == ref.worker_id
    ]
    if len(here) > w.limits.replicas_per_session:
        shortest = min((r for r in here if r is not replica), key=lambda r: r.num_blocks)
        w.drop_replica(report.key, shortest)
        w.command(ref, ReleaseReplica(report.key, shortest.head_hash))
    return replica


def offered(w: Work, ref: WorkerRef, report: ReplicaReport) -> None:
    """A request of a turn ended and its blocks are held. After a prefill leg that is the source
    of the forward lease; after a decode leg, of the next turn's return."""
    if report.num_blocks <= 0 or report.state is ReplicaState.GONE:
        return
    replica = _note(w, ref, report)
    if replica is None:
        return
    session = w.state.sessions[report.key]
    # It may have ended already: a gateway can be faster than an agent.
    turn = session.find_token(report.turn_token)
    if report.leg is Leg.PREFILL:
        if turn is not None and turn.running:
            _forward(w, report.key, turn, replica)
        else:
            w.command(ref, ReleaseReplica(report.key, report.head_hash))
    elif report.leg is Leg.DECODE:
        announced = turn.retention_ns if turn is not None else report.hold_remaining_ns
        retention_events.correct(w, session, replica, announced)
        if turn is not None:
            eager_events.consider(w, report.key, turn, replica)


def _forward(w: Work, key: SessionKey, turn: Turn, replica: Replica) -> None:
    if turn.prefill is None or turn.prefill.worker != replica.worker:
        return
    destination = w.worker(turn.decode.worker)
    if destination is None or not destination.connected:
        w.command(replica.worker, ReleaseReplica(key, replica.head_hash))
        return
    if turn.token in w.state.push_declined:
        w.command(replica.worker, ReleaseReplica(key, replica.head_hash))
        return
    for lease_id in w.state.turn_leases(turn.token):
        lease = w.state.leases[lease_id]
        if lease.push and lease.state is LeaseState.PENDING:
            push_events.pull_instead(w, lease)
        elif lease.push:
            push_events.replica_offered(w, lease, replica.head_hash)
            return
        elif lease.direction is Direction.FORWARD:
            return  # one a turn: the children of n > 1 compute
    source = w.worker(replica.worker)
    assert source is not None  # it has just offered the replica
    why_not = lease_events.admit(w, key, Direction.FORWARD, replica, source, destination)
    if why_not:
        # Decode's lookup stops waiting for the lease, and its request computes.
        w.command(destination.ref, Revoke("", 0, why_not, turn.token))
        w.command(replica.worker, ReleaseReplica(key, replica.head_hash))
        return
    lease_events.make(w, key, turn.number, turn.token, Direction.FORWARD, replica, destination)


def _from_prefill(w: Work, lease: Lease) -> bool:
    """Whether a lease moved what its turn's prefill leg left. A turn on one worker alone reads what
    another one holds for its session, or for another session: that stays."""
    session = w.state.sessions.peek(lease.key)
    turn = session.find(lease.turn) if session is not None else None
    return turn is None or (turn.prefill is not None and turn.prefill.worker == lease.source)


def release_after_forward(w: Work, lease: Lease) -> None:
    """Decode has what it needs of prefill's replica, or never will: prefill need not hold it.
    Its blocks stay readable in its cache until they are reused."""
    if lease.direction is not Direction.FORWARD or not lease.ask_head:
        return  # a push as a rule leaves no replica at its source
    if not _from_prefill(w, lease):
        return
    replica = w.state.replicas.find(lease.key, lease.source.worker_id, lease.ask_head)
    if replica is not None and replica.worker == lease.source:
        w.command(lease.source, ReleaseReplica(lease.key, lease.ask_head))


def changed(
    w: Work,
    ref: WorkerRef,
    key: SessionKey,
    head_hash: bytes,
    state: ReplicaState,
    num_blocks: int,
    reason: str,
) -> None:
    """A replica turned soft, got shorter or went away."""
    replica = w.state.replicas.find(key, ref.worker_id, head_hash)
    if replica is None or replica.worker != ref:
        return
    session = w.state.sessions.get(key)
    over = session is None or not session.active
    if state is ReplicaState.GONE or num_blocks == 0 or (over and state is ReplicaState.SOFT):
        w.drop_replica(key, replica)
    else:
        w.put_replica(key, replica.changed(state, min(num_blocks, replica.num_blocks)))
    w.fact("replica_changed", worker_id=ref.worker_id, state=state.name, reason=reason)


def forget_worker(w: Work, worker_id: str) -> None:
    """All replicas of a worker are gone: its boot is dead, or another has taken its place."""
    for key in list(w.state.replicas.of_worker.get(worker_id, ())):
        for replica in w.state.replicas_of_session(key):
            if replica.worker.worker_id == worker_id:
                w.drop_replica(key, replica)
    w.state.eager_waiting.pop(worker_id, None)


def inventory(w: Work, ref: WorkerRef, reports: tuple[ReplicaReport, ...]) -> None:
    """What a worker says at hello replaces what was known of it."""
    forget_worker(w, ref.worker_id)
    for report in reports:
        if report.num_blocks > 0 and report.state is not ReplicaState.GONE:
            _note(w, ref, report)
