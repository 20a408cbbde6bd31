"""Events about workers: hello, heartbeats, loss, drain, fence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvshuttle.controlplane.model import (
    lease_events,
    push_events,
    recovery,
    replica_events,
    retention_events,
    splits,
    turn_events,
)
from kvshuttle.controlplane.model.agenda import Due
from kvshuttle.controlplane.model.commands import (
    AnnouncePeer,
    Drain,
    Fenced,
    PeerFenced,
)
from kvshuttle.controlplane.model.errors import (
    BootConflictError,
    FingerprintMismatchError,
    IncarnationMismatchError,
    LineageChangedError,
    NotFoundError,
    WorkerFencedError,
)
from kvshuttle.controlplane.model.requests import repeated
from kvshuttle.controlplane.model.terms import LeaseState, WorkerRef, WorkerState
from kvshuttle.controlplane.model.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.controlplane.model.reports import Heartbeat, Hello
    from kvshuttle.controlplane.model.work import Work

__all__ = ["Welcome", "drain", "fence", "heard", "heartbeat", "hello", "lost", "silent", "stale"]


class Welcome(Struct, frozen=True):
    """The answer to a hello: the worker as it stands now, and whom it may exchange KV with."""

    worker: Worker
    epoch: int
    lineage_id: str
    peers: tuple[AnnouncePeer, ...]


def hello(w: Work, says: Hello, *, accept_lineage: bool) -> Welcome:
    """A boot connects, for the first time or again."""
    state = w.state
    if says.lineage_id and says.lineage_id != state.lineage_id and not accept_lineage:
        raise LineageChangedError(
            f"worker {says.worker_id} belongs to the store {says.lineage_id}, this is "
            f"{state.lineage_id}: was the store replaced or lost? If that was meant, start the "
            "control plane with --accept-lineage-change, or restart the worker",
            ours=state.lineage_id,
            theirs=says.lineage_id,
            worker_id=says.worker_id,
        )
    before = state.workers.get(says.worker_id)
    same_boot = before is not None and before.boot_id == says.boot_id
    if before is not None and says.boot_id in before.fenced_boots:
        raise WorkerFencedError(
            f"this boot of worker {says.worker_id} was fenced: restart its engine",
            worker_id=says.worker_id,
        )
    if before is not None and not same_boot and before.connected:
        raise BootConflictError(
            f"another boot of worker {says.worker_id} is connected: give this engine a worker_id "
            f"of its own, stop the other, or attest that it is dead with FenceWorker "
            f"(incarnation {before.ref.incarnation})",
            worker_id=says.worker_id,
            incarnation=before.ref.incarnation,
            boot_id=before.boot_id,
        )
    splits.check(says)
    _compare(says, (x for x in state.workers.values() if x.connected and x is not before))
    recovery.check_term(w, says, before)
    if before is not None and same_boot:
        worker = before.connected_as(says, w.now_ns)
        # Stored for its stream generation, which must grow over restarts of this side too.
        w.put_worker(worker)
    else:
        if before is not None:
            _replaced(w, before)
        state.last_incarnation += 1
        w.put_term()
        worker = Worker(
            ref=WorkerRef(says.worker_id, state.last_incarnation),
            boot_id=says.boot_id,
            role=says.role,
            url=says.url,
            state=WorkerState.LOST,
            register_ns=w.now_ns,
            heard_ns=w.now_ns,
            fenced_boots=before.fenced_boots if before is not None else (),
            requests=before.requests if before is not None else (),
        ).connected_as(says, w.now_ns)
        w.put_worker(worker)
    others = [x for x in state.workers.values() if x.connected and x.ref != worker.ref]
    replica_events.inventory(w, worker.ref, says.replicas)
    recovery.reconcile(w, worker, says.leases)
    peer = AnnouncePeer(worker.ref, worker.ranks, worker.num_blocks)
    for other in others:
        w.command(other.ref, peer)
    # Said while its stream was down.
    if worker.draining or same_boot:
        w.command(worker.ref, Drain(undo=not worker.draining))
    for other in state.workers.values():
        if other.state is WorkerState.FENCED:
            for number in other.numbers():
                w.command(worker.ref, PeerFenced(number))
    if same_boot:
        turn_events.expect_again(w, worker.ref.worker_id)
    w.fact(
        "worker_connected",
        worker_id=worker.ref.worker_id,
        incarnation=worker.ref.incarnation,
        role=worker.role.name,
        url=worker.url,
        stream_generation=worker.stream_generation,
        replicas=len(says.replicas),
        leases=len(says.leases),
    )
    return Welcome(
        worker,
        state.epoch,
        state.lineage_id,
        tuple(AnnouncePeer(other.ref, other.ranks, other.num_blocks) for other in others),
    )


def _compare(says: Hello, live: Iterable[Worker]) -> None:
    """KV of two workers is exchangeable only if every field is equal."""
    other = next(iter(live), None)
    if other is None:
        return
    theirs = dict(says.fingerprint) | {"block_size": str(says.block_size)}
    ours = dict(other.fingerprint) | {"block_size": str(other.block_size)}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise FingerprintMismatchError(
                f"worker {says.worker_id} has {name} = {theirs.get(name, '(nothing)')}, the "
                f"cluster (worker {other.ref.worker_id}) has {ours.get(name, '(nothing)')}: "
                "their KV caches are not the same bytes. Start the engine with the same setting, "
                "or in a cluster of its own",
                field=name,
                ours=ours.get(name, ""),
                theirs=theirs.get(name, ""),
                worker_id=says.worker_id,
                other_worker_id=other.ref.worker_id,
            )
    splits.check_pair(says, other)


def _replaced(w: Work, before: Worker) -> None:
    """A new boot takes the place of another."""
    recovery.superseded(w, before)
    replica_events.forget_worker(w, before.ref.worker_id)
    w.fact(
        "worker_superseded",
        worker_id=before.ref.worker_id,
        incarnation=before.ref.incarnation,
    )


def heartbeat(w: Work, ref: WorkerRef, beat: Heartbeat) -> None:
    """A sign of life with the pool's state."""
    worker = w.worker(ref)
    if worker is not None and worker.connected:
        w.put_worker(worker.beat(beat, w.now_ns), durable=False)
        retention_events.relieve(w, ref)


def heard(w: Work, ref: WorkerRef) -> None:
    """Any message is a sign of life."""
    worker = w.worker(ref)
    if worker is not None and worker.connected:
        w.put_worker(worker.heard(w.now_ns), durable=False)


def lost(w: Work, ref: WorkerRef, generation: int, reason: str) -> None:
    """A stream is gone. The worker may still run and still read: what it reads is kept by its
    sources until their deadlines; what others were to get from it is given up."""
    worker = w.worker(ref)
    if worker is None or worker.stream_generation != generation or not worker.connected:
        return  # a newer stream has taken over
    worker = worker.lost(w.now_ns)
    w.put_worker(worker, durable=False)
    w.state.agenda.add(w.now_ns + w.limits.lost_worker_kept_ns, Due.WORKER_FORGET, ref.worker_id)
    for lease in w.leases_of(ref.worker_id):
        if not lease.open:
            continue
        if lease.source == ref and lease.push and lease.state is not LeaseState.PENDING:
            push_events.source_lost(w, lease, lease_events.SOURCE_LOST)
        elif lease.source == ref:
            lease_events.fail(w, lease, lease_events.SOURCE_LOST)
        elif lease.push:
            # Its landing zone stays until its writer has stopped, which is asked now.
            lease_events.fail(w, lease, lease_events.DESTINATION_LOST)
        elif lease.state is LeaseState.PENDING:
            lease_events.fail(w, lease, lease_events.DESTINATION_LOST)
        else:
            # For the books only: whether it still reads cannot be known, so the source is not
            # told anything and keeps the range to its own deadline.
            reason = lease.stop.reason if lease.stop else lease_events.DESTINATION_LOST
            w.put_lease(lease.ended(LeaseState.FAILED, reason, w.now_ns))
    w.fact("worker_lost", worker_id=ref.worker_id, incarnation=ref.incarnation, reason=reason)


def silent(w: Work) -> None:
    """Workers that have said nothing for too long are lost, and their streams ended."""
    for worker in list(w.state.workers.values()):
        if worker.connected and w.now_ns - worker.heard_ns > w.limits.silence_ns:
            w.disconnect(worker, "SILENT")
            lost(w, worker.ref, worker.stream_generation, "SILENT")


def stale(w: Work, worker_id: str) -> None:
    """A lost or fenced worker was listed for long enough."""
    worker = w.state.workers.get(worker_id)
    if worker is None or worker.connected:
        return
    due_ns = worker.end_ns + w.limits.lost_worker_kept_ns
    if due_ns > w.now_ns:
        w.state.agenda.add(due_ns, Due.WORKER_FORGET, worker_id)
        return
    replica_events.forget_worker(w, worker_id)
    w.planner.rates.forget_worker(worker_id)
    w.drop_worker(worker)


def drain(w: Work, worker_id: str, undo: bool, request: str = "") -> Worker:
    """No new turns and no new leases; what is open goes on, and the agent lets go of the rest. A
    request that was made before changes nothing: the opposite may have been asked since."""
    worker = w.state.workers.get(worker_id)
    if worker is not None and repeated(worker.requests, request):
        return worker
    if worker is None or worker.state is WorkerState.FENCED:
        raise NotFoundError("worker", worker_id)
    if request and worker.draining != undo:
        worker = worker.asked(request)
        w.put_worker(worker)
    if worker.draining == undo:
        worker = worker.drained(undo).asked(request)
        w.put_worker(worker)
        w.command(worker.ref, Drain(undo))
        w.fact("worker_drain", worker_id=worker_id, undo=undo)
    return worker


def fence(w: Work, ref: WorkerRef, attestation: str, request: str = "") -> Worker:
    """A boot is attested dead: it reads nothing and writes nothing any more. A request that was
    made before changes nothing, even if another boot has the name now."""
    worker = w.state.workers.get(ref.worker_id)
    if worker is None:
        raise NotFoundError("worker", ref.worker_id)
    if repeated(worker.requests, request):
        return worker
    # A number that the process of today had before it lost its place for a while is no dead boot.
    lives = worker.was(ref) and worker.state is not WorkerState.FENCED
    if worker.ref != ref and not lives and (_waited_for(w, ref) or push_events.writer_gone(w, ref)):
        _dead(w, ref, attestation)
        if request:
            worker = worker.asked(request)
            w.put_worker(worker)
        return worker
    if worker.ref != ref:
        raise IncarnationMismatchError(
            f"worker {ref.worker_id} is registered as incarnation {worker.ref.incarnation}, not "
            f"{ref.incarnation}: nothing was fenced",
            worker_id=ref.worker_id,
            registered=worker.ref.incarnation,
            named=ref.incarnation,
        )
    if worker.state is WorkerState.FENCED:
        return worker
    if worker.connected:
        w.command(ref, Fenced(attestation))
        w.disconnect(worker, "FENCED")
    worker = worker.fenced(w.now_ns).asked(request)
    w.put_worker(worker)
    w.state.agenda.add(w.now_ns + w.limits.lost_worker_kept_ns, Due.WORKER_FORGET, ref.worker_id)
    replica_events.forget_worker(w, ref.worker_id)
    for number in worker.numbers():
        _dead(w, number, attestation)
    return worker


def _waited_for(w: Work, ref: WorkerRef) -> bool:
    """Whether sources still hold for a boot whose place another has taken, or others read of it."""
    return any(ref in (lease.source, lease.destination) for lease in w.leases_of(ref.worker_id))


def _dead(w: Work, ref: WorkerRef, attestation: str) -> None:
    """Whoever waits for a boot need not any more."""
    for lease in w.leases_of(ref.worker_id):
        if lease.mover == ref:
            reason = lease_events.SOURCE_FENCED if lease.push else "FENCED"
            lease_events.reader_gone(w, lease, LeaseState.REVOKED, reason)
        elif lease.push:
            if lease.open:
                lease_events.fail(w, lease, "DESTINATION_FENCED")
        elif lease.source == ref and lease.open:
            lease_events.fail(w, lease, lease_events.SOURCE_FENCED)
        elif lease.source == ref and lease.end_reason == lease_events.DESTINATION_LOST:
            # Its reader may come back, and must not read on.
            w.put_lease(lease.ended_because(lease_events.SOURCE_FENCED))
    for other in w.state.workers.values():
        if other.connected:
            w.command(other.ref, PeerFenced(ref))
    w.fact(
        "worker_fenced",
        worker_id=ref.worker_id,
        incarnation=ref.incarnation,
        attestation=attestation,
    )
