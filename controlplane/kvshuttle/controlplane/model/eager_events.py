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
    WorkerRole,
)

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Turn
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.model.work import Work
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["arriving", "awaited", "consider", "end_session", "ended"]


def consider(w: Work, key: SessionKey, turn: Turn, replica: Replica) -> None:
    """Decode has offered what a turn left: bring it to the prefill worker that will probably get
    the next turn."""
    if not w.limits.eager:
        return
    if turn.plan.reason == "SAME_WORKER":
        _skip(w, key, turn.number, "NO_PREFILL_LEG")
        return
    last = w.state.sessions[key].last_prefill
    target = w.planner.next_prefill(w.state.workers, last, w.now_ns)
    open_lease = _open_lease(w, key)
    before = w.state.workers.get(last)
    why_not = "NO_PREFILL_WORKER"
    if before is not None and before.role is WorkerRole.PREFILL:
        why_not = "WORKER_NOT_READY"
    if target is not None:
        why_not = _why_not(w, key, turn, replica, target)
    if why_not or target is None:
        _skip(w, key, turn.number, why_not)
        return
    if open_lease is not None:
        lease_events.stop(w, open_lease, LeaseState.REVOKED, "SUPERSEDED")
    if w.state.eager_on[target.ref.worker_id] >= w.limits.eager_leases_per_worker:
        waiting = w.state.eager_waiting[target.ref.worker_id]
        waiting.pop(key, None)
        waiting[key] = (turn.number, replica.head_hash)
        while len(waiting) > w.limits.eager_waiting_per_worker:
            # The oldest: its next turn is nearest, and lazy serves it as well.
            oldest = next(iter(waiting))
            _skip(w, oldest, waiting.pop(oldest)[0], "QUEUE_FULL")
        return
    _begin(w, key, turn.number, replica, target)


def arriving(w: Work, key: SessionKey) -> str:
    """The worker to which a session's KV is on its way; empty for none."""
    lease = _open_lease(w, key)
    if lease is None or lease.stop is not None or w.worker(lease.destination) is None:
        return ""
    return lease.destination.worker_id


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


def _open_lease(w: Work, key: SessionKey) -> Lease | None:
    lease_id = w.state.eager_of.get(key)
    return w.state.leases.get(lease_id) if lease_id is not None else None


def _why_not(w: Work, key: SessionKey, turn: Turn, replica: Replica, target: Worker) -> str:
    if turn.plan.reason == "POLICY_NEVER":
        return "POLICY_NEVER"
    if w.state.sessions[key].turn_count > turn.number:
        return "NEXT_TURN_BEGAN"  # it reads what it wants itself
    if why_not := _unsuited(w, target, replica):
        return why_not
    lease = _open_lease(w, key)
    if lease is not None and lease.ask_range.length >= replica.num_blocks:
        return "ALREADY_UNDER_WAY"  # a sibling of n > 1, or a shorter branch
    return ""


def _unsuited(w: Work, target: Worker, replica: Replica) -> str:
    """Why a replica is not returned to a worker before anybody asks, in one word, or nothing."""
    source = w.worker(replica.worker)
    if source is None or replica.state is ReplicaState.GONE:
        return "REPLICA_GONE"
    if source.ref == target.ref:
        return "SAME_WORKER"
    if not (target.ready and source.ready):
        return "WORKER_NOT_READY"
    if not target.prefix_caching:
        return "NO_PREFIX_CACHE"
    if replica.num_tokens < w.limits.min_tokens:
        return "TOO_SHORT"
    if not w.planner.cheaper_to_move(replica.num_tokens, replica.num_blocks, source, target):
        return "CHEAPER_TO_RECOMPUTE"
    return ""


def _skip(w: Work, key: SessionKey, turn: int, reason: str) -> None:
    w.fact(
        "eager_return_skipped",
        tenant=key.tenant,
        session_id=key.session_id,
        turn=turn,
        reason=reason,
    )


def _begin(w: Work, key: SessionKey, turn: int, replica: Replica, target: Worker) -> None:
    source = w.worker(replica.worker)
    assert source is not None  # see _unsuited
    why_not, victims = admission.lease_room(w, key.tenant, replica.num_blocks, source, target)
    if why_not or victims:
        # A guess takes no other turn's place.
        _skip(w, key, turn, why_not or "WOULD_EVICT")
        return
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
            _skip(
                w, key, turn, "NEXT_TURN_BEGAN" if session and session.active else "SESSION_ENDED"
            )
            continue
        replica = next(
            (
                r
                for r in w.state.replicas_of_session(key)
                if r.head_hash == head_hash and r.worker.worker_id != worker_id
            ),
            None,
        )
        why_not = "REPLICA_GONE" if replica is None else _unsuited(w, target, replica)
        if replica is None or why_not:
            _skip(w, key, turn, why_not)
        elif _open_lease(w, key) is not None:
            _skip(w, key, turn, "ALREADY_UNDER_WAY")
        else:
            _begin(w, key, turn, replica, target)
