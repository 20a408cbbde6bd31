"""Events about pushes: prefill writes into decode's landing zone while it computes.

What differs from a lease that is read (`lease_events`): the destination's blocks are what is held,
and the source is what must be known to have stopped before they are reused. So the destination's
word ends the lease, and the source's word, its inventory or a fence lets the landing zone go; no
deadline does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.commands import (
    Grant,
    LandingGranted,
    PushPlan,
    Revoke,
    WriterStopped,
)
from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    LeaseState,
    TransferOutcome,
    WorkerRef,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvshuttle.controlplane.model.reports import Descriptors, LeaseReport, StopReport
    from kvshuttle.controlplane.model.session import Turn
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.model.work import Work

__all__ = [
    "PULLED",
    "declined",
    "grant",
    "landing_known",
    "make",
    "offered_in_vain",
    "open_of_turn",
    "orphan_answered",
    "plan_for",
    "pull_instead",
    "refused",
    "replica_offered",
    "same_process",
    "source_lost",
    "stop_writer",
    "stopped",
    "tell_landing",
    "writer_gone",
    "writer_lacks",
]

PULLED = "PULLED_INSTEAD"
"""Why a push ended whose landing zone was not offered before prefill's leg had ended."""


def make(w: Work, key: SessionKey, turn: Turn) -> Lease:
    """A new lease, PENDING until decode offers its landing zone. Nobody is told here: both agents
    hear of it with their ExpectTurn."""
    assert turn.prefill is not None
    w.state.lease_seq += 1
    lease = Lease(
        lease_id=f"{w.state.lineage_id}-{w.state.epoch}-{w.state.lease_seq}",
        seq=w.state.lease_seq,
        key=key,
        turn=turn.number,
        turn_token=turn.token,
        direction=Direction.FORWARD,
        source=turn.prefill.worker,
        destination=turn.decode.worker,
        epoch=w.state.epoch,
        ttl_ns=w.limits.lease_ttl_ns,
        create_ns=w.now_ns,
        ask_head=b"",
        ask_range=BlockRange(0, 0),
        push=True,
    )
    w.put_lease(lease)
    w.fact(
        "lease_made",
        lease_id=lease.lease_id,
        direction=lease.direction.name,
        tenant=key.tenant,
        session_id=key.session_id,
        turn=turn.number,
        source=lease.source.worker_id,
        destination=lease.destination.worker_id,
        blocks=0,
    )
    return lease


def plan_for(lease: Lease | None, worker: WorkerRef) -> PushPlan | None:
    """What a leg's agent is told of a push."""
    if lease is None:
        return None
    peer = lease.destination if worker == lease.source else lease.source
    return PushPlan(lease.lease_id, lease.version, peer, lease.ttl_ns, lease.epoch, lease.seq)


def open_of_turn(w: Work, token: str) -> Lease | None:
    """The turn's push, while it is open."""
    for lease_id in w.state.turn_leases(token):
        lease = w.state.leases[lease_id]
        if lease.push:
            return lease
    return None


def grant(w: Work, lease: Lease, blocks: Descriptors, landing_version: int) -> None:
    """Decode holds its landing zone: prefill may write there."""
    source = w.worker(lease.source)
    assert source is not None  # its caller has looked
    lease = lease.granted(blocks.range, blocks.head_hash, w.now_ns)
    w.put_lease(lease)
    w.command(lease.destination, LandingGranted(lease.lease_id, lease.version))
    w.command(
        lease.source,
        Grant(
            lease.lease_id,
            lease.version,
            lease.turn_token,
            lease.direction,
            lease.source,
            blocks,
            lease.ttl_ns,
            source.clock,
            None,
            lease.epoch,
            lease.seq,
            lease.destination,
            landing_version,
        ),
    )


def tell_landing(w: Work, lease: Lease, *, pull_follows: bool = False) -> None:
    """The landing zone may be let go: nobody writes there."""
    # Its process may have another number by now.
    _, holder = w.state.orphans.pop(lease.lease_id, (None, lease.destination))
    w.command(holder, WriterStopped(lease.lease_id, lease.version, lease.end_reason, pull_follows))


def offered_in_vain(w: Work, ref: WorkerRef, lease_id: str, lease: Lease | None) -> None:
    """A landing zone for a lease that is over, or not in the books. An offer is made once, to one
    control plane: if this one does not grant it, nobody was granted it. Not so for what an
    inventory names, which may have been offered to another. (To a source that has hardened a range
    for an unknown lease it says nothing.)"""
    pulled = lease is not None and lease.end_reason == PULLED and lease.keeper == ref
    reason = lease.end_reason if lease is not None else "UNKNOWN_LEASE"
    version = lease.version if lease is not None else 0
    w.command(ref, WriterStopped(lease_id, version, reason, pulled))


def stop_writer(w: Work, lease: Lease, reason: str, to: WorkerRef | None = None) -> None:
    """Tells the source to write no more, and to say when nothing is in flight."""
    w.command(
        to or lease.source,
        Revoke(lease.lease_id, lease.version, reason, lease.turn_token, is_source=True),
    )


def same_process(w: Work, ref: WorkerRef, named: WorkerRef) -> bool:
    """Whether a boot that speaks is the process that a lease names, under whatever number."""
    worker = w.worker(ref)
    return worker is not None and worker.was(named)


def declined(w: Work, lease: Lease) -> None:
    """Decode takes no (more) push for this turn, nor would it read: it has what it needs, cannot,
    or computes."""
    if lease.turn_token in w.state.turns:
        w.state.push_declined.add(lease.turn_token)


def pull_instead(w: Work, lease: Lease) -> None:
    """Prefill's leg ended before decode had offered: nothing was granted, and decode reads."""
    lease = lease.ended(LeaseState.REVOKED, PULLED, w.now_ns).with_reader_stopped()
    w.put_lease(lease)
    tell_landing(w, lease, pull_follows=True)


def replica_offered(w: Work, lease: Lease, head_hash: bytes) -> None:
    """Prefill's leg ended as its grant was on its way: it writes from what it holds, which goes
    with the lease."""
    w.put_lease(lease.with_replica(head_hash), durable=False)


def source_lost(w: Work, lease: Lease, reason: str) -> None:
    """A writer's stream is gone, or another boot has its place: decode computes. Whether it still
    writes cannot be known, so the landing zone stays held."""
    lease = lease.ended(LeaseState.FAILED, reason, w.now_ns)
    w.put_lease(lease)
    w.command(lease.destination, Revoke(lease.lease_id, lease.version, reason, lease.turn_token))


def refused(w: Work, ref: WorkerRef, lease: Lease, reason: str) -> bool:
    """Decode offers no landing zone. False where it is another thing that is refused."""
    if ref != lease.destination or lease.state is not LeaseState.PENDING:
        return False
    declined(w, lease)
    w.put_lease(lease.ended(LeaseState.REVOKED, reason, w.now_ns).with_reader_stopped())
    return True


def _final(lease: Lease, report: StopReport) -> tuple[LeaseState, str]:
    asked = lease.stop
    match report.outcome:
        case TransferOutcome.PUBLISHED:
            return LeaseState.COMPLETED, report.reason
        case TransferOutcome.UNUSED | TransferOutcome.REVOKED:
            if asked is not None:
                return asked.final, asked.reason
            return LeaseState.REVOKED, report.reason or "REVOKED"
        case _:
            if asked is not None:
                return asked.final, asked.reason
            return LeaseState.FAILED, report.reason or "TRANSFER_FAILED"


def stopped(w: Work, ref: WorkerRef, lease: Lease, report: StopReport) -> None:
    """One side has stopped. Decode's word says what came of it; prefill's lets the landing go."""
    if report.is_source and same_process(w, ref, lease.source):
        _writer_stopped(w, lease, report)
    elif not report.is_source and ref == lease.destination:
        _landing_stopped(w, lease, report)


def _writer_stopped(w: Work, lease: Lease, report: StopReport) -> None:
    if lease.reader_stopped:
        return
    if lease.open and report.outcome is TransferOutcome.WRITTEN:
        # Decode has been told over NIXL, and says what it made of it.
        w.put_lease(lease.with_reader_stopped())
        return
    if lease.open:
        state, reason = _final(lease, report)
        if lease.state is LeaseState.PENDING and state is LeaseState.COMPLETED:
            state = LeaseState.FAILED
        lease = lease.ended(state, reason, w.now_ns)
    lease = lease.with_reader_stopped()
    w.put_lease(lease)
    tell_landing(w, lease)


def _landing_stopped(w: Work, lease: Lease, report: StopReport) -> None:
    published = report.outcome is TransferOutcome.PUBLISHED
    if lease.end_reason != PULLED:
        declined(w, lease)
    if lease.open:
        state, reason = _final(lease, report)
        if lease.state is LeaseState.PENDING:
            # Never granted, so nobody writes; and nothing can have been published.
            state = LeaseState.REVOKED if state is not LeaseState.FAILED else state
            reason = reason or "STOPPED_BEFORE_GRANT"
            lease = lease.ended(state, reason, w.now_ns, report.stats).with_reader_stopped()
            w.put_lease(lease)
            tell_landing(w, lease)
            return
        lease = lease.ended(state, reason, w.now_ns, report.stats)
    elif lease.stats is None:
        lease = lease.with_stats(report.stats)
    else:
        return
    if published and not lease.reader_stopped:
        # Its notice of having written all came before.
        lease = lease.with_reader_stopped()
    w.put_lease(lease)
    w.transferred(lease, report)
    if lease.reader_stopped:
        if not published:
            tell_landing(w, lease)
    else:
        stop_writer(w, lease, lease.end_reason)


# -- inventories ---------------------------------------------------------------------------------


def writer_lacks(w: Work, ref: WorkerRef, writes: Collection[str]) -> None:
    """A writer's inventory names what it may still write under: who holds a landing zone for
    another lease of it may let go, books or no books."""
    for lease_id, (writer, holder) in list(w.state.orphans.items()):
        known = w.state.leases.get(lease_id)
        if lease_id in writes or not same_process(w, ref, writer):
            continue
        if known is None:
            del w.state.orphans[lease_id]
            w.command(holder, WriterStopped(lease_id, 0, "RECONNECTED"))


def writer_gone(w: Work, ref: WorkerRef) -> bool:
    """A boot that is in no books, but was named as a landing zone's writer, is attested dead: it
    need not be asked. True if there was one."""
    named = [lease_id for lease_id, (writer, _) in w.state.orphans.items() if writer == ref]
    for lease_id in named:
        del w.state.orphans[lease_id]
    return bool(named)


def landing_known(w: Work, ref: WorkerRef, report: LeaseReport) -> bool:
    """A boot holds a landing zone under a lease that is over, or not in the books. True where that
    was all that there is to say of it."""
    lease = w.state.leases.get(report.lease_id)
    if lease is not None and not lease.push:
        return False
    if lease is not None and lease.reader_stopped:
        w.command(ref, WriterStopped(lease.lease_id, lease.version, lease.end_reason))
        return True
    mine = lease is not None and lease.destination == ref
    if lease is not None and mine and lease.open and lease.state is not LeaseState.PENDING:
        return lease.stop is None
    # It is not published any more; who was to write is asked whether it has stopped. The books may
    # be behind, so what they say of a grant proves nothing.
    reason = lease.end_reason if lease is not None else "UNKNOWN_LEASE"
    version = max(lease.version if lease is not None else 0, report.version) + 1
    writer = lease.source if lease is not None else report.writer
    w.command(ref, Revoke(report.lease_id, version, reason or "REVOKED", ""))
    if writer is None:
        return True
    if not mine:
        w.state.orphans[report.lease_id] = (writer, ref)
        w.fact(
            "landing_waits_for_its_writer",
            lease_id=report.lease_id,
            worker_id=ref.worker_id,
            writer=writer.worker_id,
            writer_incarnation=writer.incarnation,
        )
    worker = w.state.workers.get(writer.worker_id)
    if worker is not None and worker.connected and worker.was(writer):
        w.command(
            worker.ref,
            Revoke(report.lease_id, version, reason or "REVOKED", "", is_source=True),
        )
    return True


def orphan_answered(w: Work, ref: WorkerRef, lease_id: str) -> None:
    """A writer says of a lease that is not in the books that it does not write under it."""
    writer, holder = w.state.orphans.get(lease_id, (None, None))
    if writer is not None and holder is not None and same_process(w, ref, writer):
        del w.state.orphans[lease_id]
        w.command(holder, WriterStopped(lease_id, 0, "UNKNOWN_LEASE"))
