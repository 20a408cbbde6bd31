"""Eager returns: what a turn left goes back to prefill at once, while the agent runs its tools.

The next turn then finds it in prefill's own cache. A wrong guess (the session never comes back, or
is placed elsewhere) costs bandwidth and nothing else, so it is bounded by a number of such leases
open at once a reader; what finds no place waits in a short queue, and what is too late there comes
back lazily, if it comes back at all. An eager lease belongs to its session, not to a turn: the end
of the turn does not stop it, the end of the session does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model import admission, lease_events
from kvshuttle.controlplane.model.commands import RetainReplica
from kvshuttle.controlplane.model.session import Plan
from kvshuttle.controlplane.model.terms import (
    Direction,
    LeaseState,
    ReplicaState,
    ReturnMode,
    WorkerRole,
)

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Turn
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.model.work import Work
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["awaited", "consider", "end_session", "ended", "plan_with"]


def consider(w: Work, key: SessionKey, turn: Turn, replica: Replica) -> None:
    """Decode has offered what a turn left: bring it to the prefill worker that will probably get
    the next turn, which is the one that had this one (placement is sticky)."""
    if not w.limits.eager or turn.prefill is None or turn.plan.reason == "POLICY_NEVER":
        return
    if w.state.sessions[key].turn_count > turn.number:
        return  # the next one is here already, and reads what it wants itself
    target = w.state.workers.get(turn.prefill.worker.worker_id)
    if target is None or not _suits(w, target, replica):
        return
    open_lease = _open_lease(w, key)
    if open_lease is not None:
        if open_lease.ask_range.length >= replica.num_blocks:
            return  # a sibling of n > 1, or a shorter branch
        lease_events.stop(w, open_lease, LeaseState.REVOKED, "SUPERSEDED")
    if w.state.eager_on[target.ref.worker_id] >= w.limits.eager_leases_per_worker:
        waiting = w.state.eager_waiting[target.ref.worker_id]
        waiting.pop(key, None)
        waiting[key] = (turn.number, replica.head_hash)
        while len(waiting) > w.limits.eager_waiting_per_worker:
            # The oldest: its next turn is nearest, and lazy serves it as well.
            del waiting[next(iter(waiting))]
        return
    _begin(w, key, turn.number, replica, target)


def plan_with(w: Work, key: SessionKey, plan: Plan, replica: Replica, prefill: Worker) -> Plan:
    """A lazy plan turns eager where the replica lies in prefill's cache, or is on its way there."""
    here = w.state.replicas.find(key, prefill.ref.worker_id, replica.head_hash)
    if (
        here is not None
        and here.worker == prefill.ref
        and here.state is not ReplicaState.GONE
        and here.num_blocks >= replica.num_blocks
    ):
        return _eager(plan, "EAGER_HIT")
    lease = _open_lease(w, key)
    if lease is not None and lease.destination == prefill.ref and lease.stop is None:
        return _eager(plan, "EAGER_IN_FLIGHT")
    return plan


def awaited(w: Work, key: SessionKey, plan: Plan) -> str:
    """The lease that a turn with this plan waits for; empty for none."""
    return w.state.eager_of.get(key, "") if plan.reason == "EAGER_IN_FLIGHT" else ""


def ended(w: Work, lease: Lease) -> None:
    """A lease has ended: if it was an eager one, decode need not hold what now lies in prefill's
    cache too, and the next that waits may begin."""
    if not lease.eager:
        return
    if lease.state is LeaseState.COMPLETED:
        find = w.state.replicas.find
        there = find(lease.key, lease.destination.worker_id, lease.ask_head)
        here = find(lease.key, lease.source.worker_id, lease.ask_head)
        if (
            there is not None
            and here is not None
            and here.worker == lease.source
            and here.state is ReplicaState.HARD
            and there.num_blocks >= here.num_blocks
        ):
            w.command(lease.source, RetainReplica(lease.key, lease.ask_head, 0))
    _next(w, lease.destination.worker_id)


def end_session(w: Work, key: SessionKey) -> None:
    """A session has ended: nobody will use what is on its way."""
    lease = _open_lease(w, key)
    if lease is not None:
        lease_events.stop(w, lease, LeaseState.REVOKED, "SESSION_ENDED")


def _eager(plan: Plan, reason: str) -> Plan:
    return Plan(
        ReturnMode.EAGER,
        reason,
        plan.reusable_tokens,
        plan.predicted_recompute_ns,
        plan.predicted_transfer_ns,
    )


def _open_lease(w: Work, key: SessionKey) -> Lease | None:
    lease_id = w.state.eager_of.get(key)
    return w.state.leases.get(lease_id) if lease_id is not None else None


def _suits(w: Work, target: Worker, replica: Replica) -> bool:
    source = w.worker(replica.worker)
    return (
        target.ready
        and target.role is WorkerRole.PREFILL
        and target.prefix_caching
        and source is not None
        and source.ready
        and source.ref != target.ref
        and replica.state is not ReplicaState.GONE
        and replica.num_tokens >= w.limits.min_tokens
        and w.planner.cheaper_to_move(replica, source, target)
    )


def _begin(w: Work, key: SessionKey, turn: int, replica: Replica, target: Worker) -> None:
    source = w.worker(replica.worker)
    assert source is not None  # see _suits
    why_not, victims = admission.lease_room(w, key.tenant, replica.num_blocks, source, target)
    if why_not or victims:
        return  # a guess takes no other turn's place
    lease = lease_events.make(w, key, turn, "", Direction.RETURN, replica, target)
    w.fact(
        "eager_return_begun",
        tenant=key.tenant,
        session_id=key.session_id,
        turn=turn,
        lease_id=lease.lease_id,
    )


def _next(w: Work, worker_id: str) -> None:
    waiting = w.state.eager_waiting.get(worker_id)
    target = w.state.workers.get(worker_id)
    while (
        waiting
        and target is not None
        and w.state.eager_on[worker_id] < w.limits.eager_leases_per_worker
    ):
        # The newest: the one whose next turn is farthest has the most time to be brought.
        key, (turn, head_hash) = waiting.popitem()
        session = w.state.sessions.get(key)
        if session is None or not session.active or session.turn_count > turn:
            continue  # over, or the next turn has begun already
        replica = next(
            (
                r
                for r in w.state.replicas_of_session(key)
                if r.head_hash == head_hash and r.worker.worker_id != worker_id
            ),
            None,
        )
        if replica is not None and _suits(w, target, replica) and _open_lease(w, key) is None:
            _begin(w, key, turn, replica, target)
