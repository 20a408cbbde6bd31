"""Events about leases: what makes, grants, stops and ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model import admission, push_events
from kvshuttle.controlplane.model.agenda import Due
from kvshuttle.controlplane.model.commands import (
    Extend,
    Grant,
    Harden,
    ReaderStopped,
    Revoke,
)
from kvshuttle.controlplane.model.errors import (
    LeaseEndedError,
    LeaseNotGrantedError,
    NotFoundError,
)
from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.requests import repeated
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    LeaseState,
    TransferOutcome,
    WorkerRef,
)

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.reports import Descriptors, StopReport
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.model.work import Work
    from kvshuttle.controlplane.model.worker import Worker

__all__ = [
    "DESTINATION_LOST",
    "SOURCE_FENCED",
    "SOURCE_LOST",
    "active",
    "admit",
    "due",
    "extended",
    "fail",
    "forget",
    "hardened",
    "make",
    "reader_gone",
    "reader_is_stopped",
    "refused",
    "renew",
    "revoke",
    "source_released",
    "stop",
    "stopped",
]


SOURCE_FENCED = "SOURCE_FENCED"
"""Why a lease was stopped whose source was attested dead."""

SOURCE_LOST = "SOURCE_LOST"
"""Why a lease ended whose source's stream is gone."""

DESTINATION_LOST = "DESTINATION_LOST"
"""Why a lease ended in the books whose destination's stream is gone: it may read on."""


def admit(
    w: Work,
    key: SessionKey,
    direction: Direction,
    replica: Replica,
    source: Worker,
    destination: Worker,
    blocks: int = 0,
) -> str:
    """Whether a lease over a replica, or its first blocks, may be made: why not, in one word, or
    nothing. Leases that must give way are stopped."""
    blocks = blocks or replica.num_blocks
    reason, victims = admission.lease_room(w, key.tenant, blocks, source, destination)
    for victim in victims:
        stop(w, victim, LeaseState.REVOKED, admission.EVICTED)
    if reason:
        w.fact(
            "lease_denied",
            direction=direction.name,
            reason=reason,
            tenant=key.tenant,
            session_id=key.session_id,
            source=source.ref.worker_id,
            destination=destination.ref.worker_id,
            blocks=blocks,
        )
    return reason


def make(
    w: Work,
    key: SessionKey,
    turn: int,
    turn_token: str,
    direction: Direction,
    replica: Replica,
    destination: Worker,
    source_key: SessionKey | None = None,
    blocks: int = 0,
) -> Lease:
    """A new lease, PENDING, over the whole replica or its first blocks; its source is asked to hold
    it. `source_key` is whose replica it is, if not the session's own."""
    blocks = blocks or replica.num_blocks
    w.state.lease_seq += 1
    lease = Lease(
        # No store has two of an epoch, and no two stores one lineage: the id is unique for ever.
        lease_id=f"{w.state.lineage_id}-{w.state.epoch}-{w.state.lease_seq}",
        seq=w.state.lease_seq,
        key=key,
        turn=turn,
        turn_token=turn_token,
        direction=direction,
        source=replica.worker,
        destination=destination.ref,
        epoch=w.state.epoch,
        ttl_ns=w.limits.lease_ttl_ns,
        create_ns=w.now_ns,
        ask_head=replica.head_hash,
        ask_range=BlockRange(0, blocks),
        source_key=source_key,
    )
    w.put_lease(lease)
    w.state.agenda.add(w.now_ns + w.limits.guard_ns, Due.LEASE, lease.lease_id)
    w.command(
        lease.source,
        Harden(
            lease.lease_id,
            lease.version,
            source_key or key,
            lease.ask_head,
            lease.ask_range,
            lease.ttl_ns,
            w.limits.guard_ns,
            lease.destination,
            lease.epoch,
            lease.seq,
        ),
    )
    w.fact(
        "lease_made",
        lease_id=lease.lease_id,
        direction=direction.name,
        tenant=key.tenant,
        session_id=key.session_id,
        turn=turn,
        source=lease.source.worker_id,
        destination=lease.destination.worker_id,
        blocks=blocks,
        source_session_id=source_key.session_id if source_key else "",
    )
    return lease


def hardened(w: Work, ref: WorkerRef, lease_id: str, version: int, blocks: Descriptors) -> None:
    """The source holds the range: grant, but only within the guard of having asked (its hold may
    end sooner than the destination would believe), and to a live boot. That it is still the epoch
    of the asking needs no look: no lease is pending when an epoch begins (`recovery`). Of a push,
    the destination holds its landing zone, for as long as it takes: no guard."""
    lease = w.state.leases.get(lease_id)
    if lease is None or (lease.push and not lease.open):
        push_events.offered_in_vain(w, ref, lease_id, lease)
        return
    if lease.keeper != ref or lease.state is not LeaseState.PENDING:
        return  # ended meanwhile: its end has released the source, or a deadline will
    if version != lease.version:
        return  # no answer to what was asked
    if not lease.push and w.now_ns - lease.create_ns > w.limits.guard_ns:
        fail(w, lease, "HARDENED_TOO_LATE")
        return
    destination, mover = w.worker(lease.destination), w.worker(lease.mover)
    if destination is None or mover is None or not mover.connected:
        fail(w, lease, SOURCE_LOST if lease.push else DESTINATION_LOST)
        return
    if blocks.range.length <= 0:
        fail(w, lease, "REPLICA_GONE")
        return
    if not lease.push and not (
        lease.ask_range.start <= blocks.range.start and blocks.range.end <= lease.ask_range.end
    ):
        fail(w, lease, "WRONG_RANGE")
        return
    if admission.quarantine_full(w.limits, destination):
        fail(w, lease, "DESTINATION_QUARANTINE")
        return
    if lease.push:
        push_events.grant(w, lease, blocks, version)
    else:
        lease = lease.granted(blocks.range, blocks.head_hash, w.now_ns)
        w.planner.rates.observe_grant(lease.source.worker_id, w.now_ns - lease.create_ns)
        w.put_lease(lease)
        w.command(
            lease.destination,
            Grant(
                lease_id,
                lease.version,
                lease.turn_token,
                lease.direction,
                lease.source,
                blocks,
                lease.ttl_ns,
                destination.clock,
                lease.key if lease.eager else None,
                lease.epoch,
                lease.seq,
            ),
        )
    w.fact(
        "lease_granted",
        lease_id=lease_id,
        version=w.state.leases[lease_id].version,
        epoch=w.state.epoch,
        direction=lease.direction.name,
        source=lease.source.worker_id,
        source_incarnation=lease.source.incarnation,
        destination=lease.destination.worker_id,
        destination_incarnation=lease.destination.incarnation,
        blocks=blocks.range.length,
        wait_ns=w.now_ns - lease.create_ns,
    )


def reader_is_stopped(w: Work, lease: Lease) -> None:
    """Nobody reads (or writes) under this lease any more, and who holds memory for it may know.
    Only for a lease that has ended in the books."""
    if lease.reader_stopped:
        return
    lease = lease.with_reader_stopped()
    w.put_lease(lease)
    if lease.push:
        push_events.tell_landing(w, lease)
    else:
        w.command(lease.source, ReaderStopped(lease.lease_id, lease.version))


def reader_gone(w: Work, lease: Lease, state: LeaseState, reason: str) -> None:
    """The mover is known not to move: fenced, or back without knowing of the lease."""
    if lease.open:
        lease = lease.ended(state, reason, w.now_ns)
        w.put_lease(lease)
    reader_is_stopped(w, lease)


def _end(w: Work, lease: Lease, state: LeaseState, reason: str) -> Lease:
    never_granted = lease.state is LeaseState.PENDING
    lease = lease.ended(state, reason, w.now_ns)
    w.put_lease(lease)
    if never_granted:
        # No grant was written for it and none will be, so no reader exists to wait for; the
        # source reads this after the Harden, on the same stream.
        reader_is_stopped(w, lease)
    return w.state.leases[lease.lease_id]


def _revoke(lease: Lease, reason: str) -> Revoke:
    return Revoke(lease.lease_id, lease.version, reason, lease.turn_token)


def stop(w: Work, lease: Lease, final: LeaseState, reason: str) -> None:
    """Stops an open lease. A pending one ends at once. A granted one ends when its mover has said
    so, or at its deadline: asking proves nothing about a reader, or a writer."""
    if lease.state is LeaseState.PENDING:
        lease = _end(w, lease, final, reason)
        if not lease.push:  # its destination was told with the end
            w.command(lease.destination, _revoke(lease, reason))
    elif lease.stop is None:
        lease = lease.stopping(final, reason)
        w.put_lease(lease)
        if lease.push:
            push_events.stop_writer(w, lease, reason)
        else:
            w.command(lease.destination, _revoke(lease, reason))


def fail(w: Work, lease: Lease, reason: str) -> None:
    """A side cannot: the destination's lookup stops waiting and its request computes."""
    stop(w, lease, LeaseState.FAILED, reason)


def refused(w: Work, ref: WorkerRef, lease_id: str, reason: str) -> None:
    """The source refuses to harden, or the destination to read."""
    lease = w.state.leases.get(lease_id)
    if lease is None or not lease.open:
        return
    if lease.push and push_events.refused(w, ref, lease, reason):
        return
    if lease.push and push_events.same_process(w, ref, lease.source):
        # It says that it has not written and will not.
        reader_is_stopped(w, _end(w, lease, LeaseState.FAILED, reason))
    elif lease.push or ref == lease.source:
        fail(w, lease, reason)
    elif ref == lease.destination:
        # It says that it has not read and will not.
        lease = _end(w, lease, LeaseState.FAILED, reason)
        reader_is_stopped(w, lease)


def active(w: Work, ref: WorkerRef, lease_id: str) -> None:
    """The destination posted its transfer. Not stored: it changes nothing that a restart would
    have to know."""
    lease = w.state.leases.get(lease_id)
    if lease is not None and lease.mover == ref and lease.state is LeaseState.GRANTED:
        w.put_lease(lease.active(), durable=False)


def _final(lease: Lease, report: StopReport) -> tuple[LeaseState, str]:
    asked = lease.stop
    match report.outcome:
        case TransferOutcome.PUBLISHED:
            return LeaseState.COMPLETED, report.reason
        case TransferOutcome.UNUSED if lease.state is LeaseState.PENDING:
            return LeaseState.REVOKED, report.reason or "NOT_NEEDED"
        case TransferOutcome.UNUSED if asked is None:
            return LeaseState.COMPLETED, report.reason or "NOT_NEEDED"
        case TransferOutcome.UNUSED | TransferOutcome.REVOKED:
            if asked is not None:
                return asked.final, asked.reason
            return LeaseState.REVOKED, report.reason or "REVOKED"
        case TransferOutcome.DISCARDED:
            return LeaseState.FAILED, report.reason or "DISCARDED"
        case _:
            return LeaseState.FAILED, report.reason or "TRANSFER_FAILED"


def stopped(w: Work, ref: WorkerRef, lease_id: str, report: StopReport) -> None:
    """The destination will not touch the source's memory under this lease any more: the one
    ordinary way for the source's hold to end before its deadline."""
    lease = w.state.leases.get(lease_id)
    if lease is None:
        if report.is_source:
            push_events.orphan_answered(w, ref, lease_id)
        return
    if lease.push:
        push_events.stopped(w, ref, lease, report)
        return
    if lease.destination != ref:
        return
    if lease.open:
        state, reason = _final(lease, report)
        if state is LeaseState.COMPLETED and lease.state is LeaseState.PENDING:
            # It cannot have read what was never granted.
            state, reason = LeaseState.FAILED, "STOPPED_BEFORE_GRANT"
        lease = lease.ended(state, reason, w.now_ns, report.stats)
    elif lease.stats is None:
        # It had ended in the books, by a deadline or a restart; what was moved still counts.
        lease = lease.with_stats(report.stats)
    else:
        return
    w.put_lease(lease)
    w.transferred(lease, report)
    reader_is_stopped(w, lease)


def source_released(w: Work, ref: WorkerRef, lease_id: str, reason: str) -> None:
    """The source let the range go. By READER_STOPPED that is expected; by its deadline the
    destination's has passed before."""
    lease = w.state.leases.get(lease_id)
    if lease is None or lease.source != ref or lease.push:
        return
    if not lease.open:
        w.state.ledger.source_released(lease)
        return
    if reason != "DEADLINE":
        return
    if lease.state is LeaseState.PENDING:
        stop(w, lease, LeaseState.FAILED, "SOURCE_RELEASED")
    else:
        _end(w, lease, LeaseState.EXPIRED, "DEADLINE")
        w.state.ledger.source_released(w.state.leases[lease_id])


def renew(w: Work, lease_id: str, ttl_ns: int, request: str = "") -> Lease:
    """Starts an extension: the source first, so that it never lets go before the destination's
    new deadline. A request that was made before changes nothing, even if the lease has ended."""
    lease = w.state.leases.get(lease_id)
    if lease is None:
        raise NotFoundError("lease", lease_id)
    if repeated(lease.requests, request):
        return lease
    if not lease.open or lease.stop is not None:
        raise LeaseEndedError(
            f"lease {lease_id} is {lease.state.name} and cannot be renewed",
            lease_id=lease_id,
            state=lease.state.name,
        )
    if lease.state is LeaseState.PENDING:
        raise LeaseNotGrantedError(f"lease {lease_id} is not granted yet", lease_id=lease_id)
    under_way = lease.renewal
    if under_way is not None and w.now_ns - under_way.asked_ns <= w.limits.guard_ns:
        if request:
            lease = lease.asked(request)
            w.put_lease(lease)
        return lease
    ttl_ns = min(ttl_ns, w.limits.lease_ttl_max_ns)
    left = lease.create_ns + w.limits.lease_lifetime_max_ns - w.now_ns
    if left <= 0:
        raise LeaseEndedError(f"lease {lease_id} has reached its longest life", lease_id=lease_id)
    admission.renewal(w, lease)
    lease = lease.renewing(min(ttl_ns, left), w.now_ns).asked(request)
    w.put_lease(lease, durable=bool(request))
    assert lease.renewal is not None
    w.command(
        lease.source,
        Extend(lease_id, lease.version, lease.renewal.ttl_ns, w.limits.guard_ns, 0, True),
    )
    return lease


def extended(w: Work, ref: WorkerRef, lease_id: str, version: int, is_source: bool) -> None:
    """A side obeyed an Extend: after the source comes the destination, within the guard and with
    a fresh `as_of`."""
    lease = w.state.leases.get(lease_id)
    if lease is None or lease.renewal is None or lease.renewal.version != version:
        return
    if is_source and ref == lease.source and not lease.renewal.source_done:
        destination = w.worker(lease.destination)
        late = w.now_ns - lease.renewal.asked_ns > w.limits.guard_ns
        if late or destination is None or not destination.connected:
            w.put_lease(lease.renewal_over(), durable=False)
            return
        ttl_ns = lease.renewal.ttl_ns
        lease = lease.renewed_at_source(w.now_ns)
        w.put_lease(lease)
        w.command(
            lease.destination,
            Extend(lease_id, lease.version, ttl_ns, w.limits.guard_ns, destination.clock, False),
        )
    elif (
        not is_source
        and ref == lease.destination
        and lease.renewal is not None
        and lease.renewal.source_done
    ):
        w.put_lease(lease.renewal_over())


def revoke(w: Work, lease_id: str, reason: str) -> Lease:
    """An operator stops a lease. Revoking an ended one changes nothing."""
    lease = w.state.leases.get(lease_id)
    if lease is None:
        raise NotFoundError("lease", lease_id)
    if lease.open:
        stop(w, lease, LeaseState.REVOKED, reason or "OPERATOR")
    return w.state.leases[lease_id]


def due(w: Work, lease_id: str) -> None:
    """A lease's moment has come: its guard, or its deadline."""
    lease = w.state.leases.get(lease_id)
    if lease is None or not lease.open:
        return
    if lease.state is LeaseState.PENDING:
        # A push waits for its landing zone for as long as its turn runs.
        if not lease.push and w.now_ns - lease.create_ns >= w.limits.guard_ns:
            fail(w, lease, "HARDEN_TIMEOUT")
    elif w.now_ns >= lease.deadline_ns:
        # The destination counts from an earlier reading, so its own deadline has passed; but it
        # may be paused inside a read, so the source keeps the range to its own.
        if lease.stop is not None:
            _end(w, lease, lease.stop.final, lease.stop.reason)
        else:
            _end(w, lease, LeaseState.EXPIRED, "DEADLINE")
        lease = w.state.leases[lease_id]
        if lease.push and not lease.reader_stopped:
            # No deadline lets its landing zone go: only its writer's word does.
            push_events.stop_writer(w, lease, lease.end_reason)


def forget(w: Work, lease_id: str) -> None:
    """An ended lease was listed for long enough."""
    lease = w.state.leases.get(lease_id)
    if lease is None or lease.open:
        return
    if lease.push and not lease.reader_stopped:
        # Somebody holds a landing zone for it: its writer stays known, so that it can be fenced.
        w.state.agenda.add(
            w.now_ns + w.limits.ended_lease_kept_ns, Due.LEASE_FORGET, lease.lease_id
        )
        return
    w.drop_lease(lease)
