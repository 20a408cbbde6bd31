"""How the books and agents' inventories are squared.

The table of what is done in each case is in docs/recovery.md; its rows are named here as there.

The books of a control plane that starts may be behind: the file may be a copy. So they never prove
that nobody reads. An inventory does: a destination that does not have a lease does not read under
it, and nothing that would let it is under way, since what its old stream had queued was dropped on
both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model import lease_events, push_events
from kvshuttle.controlplane.model.commands import PeerFenced, ReaderStopped, Revoke
from kvshuttle.controlplane.model.errors import SupersededError
from kvshuttle.controlplane.model.terms import LeaseState

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.reports import Hello, LeaseReport
    from kvshuttle.controlplane.model.terms import WorkerRef
    from kvshuttle.controlplane.model.work import Work
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["check_term", "reconcile", "superseded"]


# -- terms ---------------------------------------------------------------------------------------


def check_term(w: Work, says: Hello, before: Worker | None) -> None:
    """An agent says which term it has obeyed at most.

    SupersededError: it was with this process before, and has since obeyed a higher term: another
    control plane of this lineage has taken over. Of a boot that this process does not know, a term
    that the store has not lived means that the store is an older copy: this term goes above it.
    """
    state, highest = w.state, says.highest_epoch
    ours = says.lineage_id in ("", state.lineage_id)
    welcomed = before is not None and before.boot_id == says.boot_id and before.ranks is not None
    if welcomed and highest > state.epoch and ours:
        raise SupersededError(
            f"worker {says.worker_id} was with this control plane, whose epoch is {state.epoch}, "
            f"and has obeyed epoch {highest} of {state.lineage_id} since: another control plane "
            "has taken over, with a copy of this store. This one stops; start only one of them",
            worker_id=says.worker_id,
            epoch=state.epoch,
            highest_epoch=highest,
        )
    if highest >= state.epoch and highest > (state.epoch if welcomed else state.past_epoch):
        _raise_epoch(w, highest + 1)


def _raise_epoch(w: Work, epoch: int) -> None:
    """Goes above a term that an agent has obeyed. What was asked under the old term must not be
    granted under the new one."""
    w.fact("epoch_raised", before=w.state.epoch, epoch=epoch)
    w.state.epoch = epoch
    w.put_term()
    for lease_id in sorted(w.state.open_leases):
        lease = w.state.leases[lease_id]
        if lease.state is LeaseState.PENDING:
            lease_events.fail(w, lease, "STALE_EPOCH")


# -- boots ---------------------------------------------------------------------------------------


def superseded(w: Work, before: Worker) -> None:
    """A new boot takes the place of one whose stream was lost. That its process is dead is
    likely, not proven: sources keep to their deadlines; what it was the source of is lost."""
    for lease in w.leases_of(before.ref.worker_id):
        if not lease.open:
            continue
        if lease.source == before.ref and lease.push and lease.state is not LeaseState.PENDING:
            # writer-restarted
            push_events.source_lost(w, lease, "SOURCE_RESTARTED")
        elif lease.source == before.ref:
            # source-restarted
            lease_events.fail(w, lease, "SOURCE_RESTARTED")
        elif lease.push:
            # destination-restarted, and the writer is asked to stop. What was PENDING has ended
            # with the old boot's stream, or with the term that it was made in.
            lease_events.fail(w, lease, "DESTINATION_RESTARTED")
        else:
            # destination-restarted
            w.put_lease(lease.ended(LeaseState.FAILED, "DESTINATION_RESTARTED", w.now_ns))


# -- inventories ---------------------------------------------------------------------------------


def reconcile(w: Work, worker: Worker, reports: tuple[LeaseReport, ...]) -> None:
    """A boot's inventory of leases against the books, in both roles."""
    ref = worker.ref
    holds = {report.lease_id: report for report in reports if report.is_source}
    reads = {report.lease_id: report for report in reports if not report.is_source}
    push_events.writer_lacks(w, ref, holds)
    for lease in w.leases_of(ref.worker_id):
        if lease.renewal is not None:
            # Its Extend, or the answer, may have been lost with the old stream.
            lease = lease.renewal_over()  # noqa: PLW2901
            w.put_lease(lease, durable=False)
        if lease.push:
            _push_lacks(w, lease, ref, holds, reads)
            continue
        if lease.source == ref and lease.lease_id not in holds:
            _source_lacks(w, w.state.leases[lease.lease_id])
        if lease.destination == ref and lease.lease_id not in reads:
            _destination_lacks(w, w.state.leases[lease.lease_id])
    for report in holds.values():
        _source_has(w, worker, report)
    for report in reads.values():
        if report.writer is not None or _is_push(w, report):
            _landing_has(w, worker, report)
        else:
            _destination_has(w, worker, report)


def _is_push(w: Work, report: LeaseReport) -> bool:
    lease = w.state.leases.get(report.lease_id)
    return lease is not None and lease.push


def _push_lacks(
    w: Work,
    lease: Lease,
    ref: WorkerRef,
    writes: Collection[str],
    lands: Collection[str],
) -> None:
    if lease.state is LeaseState.PENDING:
        # push-pending: its offer, or its grant, may still come on the new stream.
        return
    if push_events.same_process(w, ref, lease.source) and lease.lease_id not in writes:
        # writer-lacks, ended-writer-lacks: it does not write, and what would let it was dropped.
        lease_events.reader_gone(w, lease, LeaseState.FAILED, "RECONNECTED")
    elif lease.destination == ref and lease.lease_id not in lands and lease.open:
        # landing-gone: published or given up, and its word on that was lost.
        lease_events.fail(w, lease, "DESTINATION_RECONNECTED")


def _landing_has(w: Work, worker: Worker, report: LeaseReport) -> None:
    lease = w.state.leases.get(report.lease_id)
    mine = lease is not None and lease.push and lease.destination == worker.ref
    if lease is not None and mine and lease.state is LeaseState.PENDING:
        # landing-pending: its offer may have been lost with the old stream, and nothing was
        # granted in this term; what an older term granted, its writer's inventory or word says.
        lease_events.fail(w, lease, "DESTINATION_RECONNECTED")
    elif push_events.landing_known(w, worker.ref, report):
        # landing-goes-on, landing-over, landing-unknown
        if lease is not None:
            _known(w, w.state.leases[report.lease_id], report)
    else:
        # landing-stopping
        version = max(lease.version if lease else 0, report.version) + 1
        w.command(worker.ref, Revoke(report.lease_id, version, "REVOKED", ""))


def _source_lacks(w: Work, lease: Lease) -> None:
    if lease.state is LeaseState.PENDING:
        # source-pending: the Harden or its answer may have been lost.
        lease_events.fail(w, lease, "SOURCE_RECONNECTED")
    elif lease.open:
        # source-let-go: its deadline has passed, or its reader has said over NIXL that it is done.
        lease_events.fail(w, lease, "SOURCE_RELEASED")
    else:
        # ended-source-let-go
        w.state.ledger.source_released(lease)


def _source_has(w: Work, worker: Worker, report: LeaseReport) -> None:
    lease = w.state.leases.get(report.lease_id)
    if lease is not None and lease.push and worker.was(lease.source):
        if not lease.open or lease.stop is not None:
            # writer-over: it is to stop, and to say so.
            reason = lease.stop.reason if lease.stop else lease.end_reason
            named = lease.at_version(report.version + 1)
            push_events.stop_writer(w, named, reason, worker.ref)
        else:
            _known(w, lease, report)
        return
    if lease is None or lease.source != worker.ref:
        # source-unknown: it keeps the range to its own deadline, or writes to it at most
        return
    if lease.state is LeaseState.PENDING:
        # source-pending
        lease_events.fail(w, lease, "SOURCE_RECONNECTED")
    elif lease.reader_stopped:
        # reader-stopped-source-holds: ReaderStopped was lost with the old stream.
        version = max(lease.version, report.version + 1)
        w.command(worker.ref, ReaderStopped(report.lease_id, version))
    else:
        # source-holds, ended-source-holds: it goes on, to its own deadline.
        _known(w, lease, report)


def _destination_lacks(w: Work, lease: Lease) -> None:
    # destination-lacks-pending: its grant may still come, on the new stream.
    if lease.state is not LeaseState.PENDING:
        # destination-lacks, ended-destination-lacks
        lease_events.reader_gone(w, lease, LeaseState.FAILED, "RECONNECTED")


def _destination_has(w: Work, worker: Worker, report: LeaseReport) -> None:
    lease = w.state.leases.get(report.lease_id)
    if lease is not None and lease.destination == worker.ref and _runs_on(w, lease):
        # destination-has, lost-destination-has
        _known(w, lease, report)
        return
    # stopping-destination-has, ended-destination-has, destination-unknown
    version = max(lease.version if lease else 0, report.version) + 1
    reason = "UNKNOWN_LEASE"
    if lease is not None:
        reason = lease.stop.reason if lease.stop else lease.end_reason or reason
    w.command(worker.ref, Revoke(report.lease_id, version, reason, ""))
    if lease is not None and reason == lease_events.SOURCE_FENCED:
        # fenced-source-destination-has: what it reads from will not end its read.
        w.command(worker.ref, PeerFenced(lease.source))


def _known(w: Work, lease: Lease, report: LeaseReport) -> None:
    """A side has obeyed more of a lease than the books remember (an Extend is not stored): what it
    is told from now on must count as newer."""
    if report.version > lease.version:
        w.put_lease(lease.at_version(report.version), durable=False)


def _runs_on(w: Work, lease: Lease) -> bool:
    """Whether a destination may go on with a lease: it is granted and nobody has stopped it, or
    only the loss of the stream has ended it in the books, which takes nothing from the right."""
    if lease.open:
        return lease.state is not LeaseState.PENDING and lease.stop is None
    return lease.end_reason == lease_events.DESTINATION_LOST and w.now_ns < lease.deadline_ns
