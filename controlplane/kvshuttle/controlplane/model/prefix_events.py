"""A request looks for KV of other sessions of its tenant: a forked agent, or the same beginning.

The control plane does not know a new request's hashes when its turn begins; the agent does, when
vLLM's scheduler asks it. It asks here with the checkpoints of the request's own chain, and is
answered with a lease on the replica that shares the longest prefix, or told that there is none. The
request waits for that as for any other lease, and no longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model import lease_events
from kvshuttle.controlplane.model.commands import Revoke
from kvshuttle.controlplane.model.prefixes import checkpoint_blocks, interval
from kvshuttle.controlplane.model.terms import Direction, Leg, ReplicaState

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.reports import PrefixReport
    from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef
    from kvshuttle.controlplane.model.work import Work
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["wanted"]

NO_PREFIX = "NO_PREFIX"
"""Why a request that asked is not given a lease: nobody has what it could use."""


def wanted(w: Work, ref: WorkerRef, report: PrefixReport) -> None:
    """A leg's request has more to compute than its engine's own cache spares."""
    key = w.state.turns.get(report.turn_token)
    reader = w.worker(ref)
    if key is None or reader is None:
        return  # the turn is over
    turn = w.state.sessions[key].find_token(report.turn_token)
    if turn is None or not turn.running:
        return
    placement = turn.prefill if report.leg is Leg.PREFILL else turn.decode
    if placement is None or placement.worker != ref:
        return
    alone = turn.prefill is None
    if report.leg is Leg.DECODE and not alone:
        return  # what it lacks comes from prefill
    if any(
        w.state.leases[lease_id].destination == ref for lease_id in w.state.turn_leases(turn.token)
    ):
        return  # asked again
    direction = Direction.FORWARD if alone else Direction.RETURN
    found = _longest(w, key, reader, report, always=turn.always)
    if found is None:
        why_not = NO_PREFIX
    else:
        owner, replica, blocks = found
        # Its own, if that was offered only after the turn had begun.
        source_key = owner if owner != key else None
        source = w.worker(replica.worker)
        assert source is not None  # see _longest
        why_not = lease_events.admit(w, key, direction, replica, source, reader, blocks)
        if not why_not:
            lease_events.make(
                w, key, turn.number, turn.token, direction, replica, reader, source_key, blocks
            )
    if why_not:
        w.command(ref, Revoke("", 0, why_not, turn.token))
    w.fact(
        "prefix_wanted",
        tenant=key.tenant,
        session_id=key.session_id,
        turn=turn.number,
        worker_id=ref.worker_id,
        reason=why_not or "PREFIX_FOUND",
    )


def _longest(
    w: Work, key: SessionKey, reader: Worker, report: PrefixReport, *, always: bool
) -> tuple[SessionKey, Replica, int] | None:
    """The session and the replica that share the longest prefix with a request, and so many blocks
    of it as it can use at most."""
    index = w.state.prefixes
    step = interval(w.limits, reader.block_size)
    size = max(1, reader.block_size)
    for at, holder in index.find(key.tenant, report.checkpoints):
        shared = checkpoint_blocks(at, step)
        if (shared - report.have_blocks) * size < w.limits.min_tokens:
            return None  # and what is shorter spares less
        replica = w.state.replicas.find(holder.key, holder.worker_id, holder.head_hash)
        if replica is None or replica.state is ReplicaState.GONE or replica.num_blocks < shared:
            continue
        source = w.worker(replica.worker)
        if source is None or not source.ready or source.ref == reader.ref:
            continue
        missing = shared - report.have_blocks
        if not always and not w.planner.cheaper_to_move(missing * size, missing, source, reader):
            continue
        index.used(holder)
        # Up to the next checkpoint, which is not equal any more, they may still be.
        most = min(replica.num_blocks, report.usable_blocks, checkpoint_blocks(at + 1, step))
        return holder.key, replica, max(most, shared)
    return None
