"""The policy of `retention` at work: how long agents are told to hold, and which replicas turn
soft when a worker holds more than it should."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from msgspec import structs

from kvshuttle.controlplane.model import retention
from kvshuttle.controlplane.model.commands import RetainReplica
from kvshuttle.controlplane.model.retention import Candidate, Outlook, surplus
from kvshuttle.controlplane.model.terms import ReplicaState, WorkerRole

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvshuttle.controlplane.model.ledger import Division
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef
    from kvshuttle.controlplane.model.work import Work
    from kvshuttle.controlplane.model.worker import Worker

    Named = Candidate[tuple[SessionKey, Replica]]

__all__ = ["correct", "hold_ns", "relieve", "retain"]


def hold_ns(w: Work, session: Session) -> int:
    """How long a session's replica is held from now on."""
    absence = session.absence(w.now_ns)
    outlook = Outlook.of(absence, w.gaps)
    return retention.hold_ns(absence, outlook, session.hints.value, w.limits)


def correct(w: Work, session: Session, replica: Replica, announced_ns: int) -> None:
    """A turn has left a replica: more is known of what follows than when the turn was
    announced."""
    wanted_ns = hold_ns(w, session)
    if abs(wanted_ns - announced_ns) > w.limits.retention_slack * announced_ns:
        _tell(w, session.key, replica, wanted_ns)


def retain(w: Work, session: Session) -> None:
    """A client has said something new: decode holds what it has for as long as that suggests."""
    wanted_ns = hold_ns(w, session)
    for replica in w.state.replicas_of_session(session.key):
        worker = w.worker(replica.worker)
        if worker is None or worker.role is WorkerRole.PREFILL:
            continue
        if replica.state is ReplicaState.HARD:
            _tell(w, session.key, replica, wanted_ns)


def relieve(w: Work, ref: WorkerRef) -> None:
    """A worker holds more than its share, or has hardly a free block, or one tenant holds more
    than its share there: the replicas that are worth least turn soft. What a turn or a lease is
    using is left alone."""
    worker = w.worker(ref)
    held = w.state.ledger.held.get(ref)
    if worker is None or held is None or not worker.pool.total_blocks:
        return
    excess = _excess(w, worker)
    over = _tenants_over(w, worker, held)
    if (excess <= 0 and not over) or w.now_ns < w.state.relieved_ns.get(ref.worker_id, 0):
        return
    going = _choose(_candidates(w, ref), excess, over, held, w.now_ns)
    for candidate, blocks in going:
        key, replica = candidate.name
        keep = replica.num_blocks - blocks
        _tell(w, key, replica, replica.expire_ns - w.now_ns if keep else 0, keep)
    if going:
        w.state.relieved_ns[ref.worker_id] = w.now_ns + w.limits.relief_settle_ns
        w.fact(
            "worker_relieved",
            worker_id=ref.worker_id,
            excess_blocks=max(0, excess),
            tenants_over=len(over),
            replicas=len(going),
            blocks=sum(blocks for _, blocks in going),
        )


def _excess(w: Work, worker: Worker) -> int:
    pool, limits = worker.pool, w.limits
    return max(
        pool.held_blocks - int(limits.held_share_worker * pool.total_blocks),
        int(limits.free_share_relief * pool.total_blocks) - pool.free_blocks,
    )


def _tenants_over(w: Work, worker: Worker, held: Division) -> dict[str, int]:
    """By how many blocks tenants exceed what each may hold on a worker."""
    over = {}
    for tenant, blocks in held.of.items():
        share = w.limits.tenant(tenant).held_share
        excess = blocks - int(share * worker.pool.total_blocks)
        if share and excess > 0:
            over[tenant] = excess
    return over


def _choose(
    candidates: list[Named], excess: int, over: dict[str, int], held: Division, now_ns: int
) -> list[tuple[Named, int]]:
    """Tenants that exceed their share pay for themselves. What else must go is paid by those who
    hold more than an equal part, and by all only if that is not enough: so no tenant's sessions,
    however busy, push out those of another that holds little."""
    left = {candidate.name: candidate.blocks for candidate in candidates}
    has = dict(held.of)

    def go(tenants: Collection[str], blocks: int) -> int:
        mine = [
            dataclasses.replace(candidate, blocks=left[candidate.name])
            for candidate in candidates
            if candidate.name[0].tenant in tenants and left[candidate.name] > 0
        ]
        gone = 0
        for candidate, count in surplus(mine, blocks, now_ns):
            left[candidate.name] -= count
            has[candidate.name[0].tenant] -= count
            gone += count
        return gone

    for tenant, blocks in sorted(over.items()):
        excess -= go((tenant,), blocks)
    fair = held.fair("", held.total) if len(held.of) > 1 else 0
    beyond = {tenant: blocks - fair for tenant, blocks in has.items() if blocks > fair}
    excess -= go(beyond, min(excess, sum(beyond.values())))
    go(has, excess)
    return [
        (candidate, candidate.blocks - left[candidate.name])
        for candidate in candidates
        if left[candidate.name] < candidate.blocks
    ]


def _candidates(w: Work, ref: WorkerRef) -> list[Named]:
    found = []
    for key in _some(w, list(w.state.replicas.of_worker.get(ref.worker_id, ()))):
        held = [
            replica
            for replica in w.state.replicas_of_session(key)
            if replica.worker == ref
            and replica.state is ReplicaState.HARD
            # Else it was told to go, or goes by itself, and the report is under way.
            and replica.expire_ns > w.now_ns
        ]
        session = w.state.sessions.get(key) if held else None
        if session is None or session.running():
            continue
        outlook = Outlook.of(session.absence(w.now_ns), w.gaps)
        for replica in held:
            name = (key, replica)
            found.append(Candidate(name, replica.num_blocks, outlook, session.hints.value))
    return found


def _some(w: Work, keys: list[SessionKey]) -> list[SessionKey]:
    """All of the keys, or so many that ranking them does not hold up a grant: then others every
    time, so that all get their turn."""
    most = w.limits.relief_candidates
    if len(keys) <= most:
        return keys
    start = (w.now_ns // w.limits.relief_settle_ns) * most % len(keys)
    return (keys[start:] + keys[:start])[:most]


def _tell(
    w: Work, key: SessionKey, replica: Replica, retention_ns: int, keep_blocks: int = 0
) -> None:
    w.command(replica.worker, RetainReplica(key, replica.head_hash, retention_ns, keep_blocks))
    w.put_replica(key, structs.replace(replica, expire_ns=w.now_ns + retention_ns))
