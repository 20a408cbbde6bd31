"""Budgets: who may have how much of what, so that neither a burst nor a tenant takes it all.

Four things are divided among tenants: sessions, running turns, leased blocks of each worker, and
blocks that replicas hold (decided in `retention_events`). What each tenant has is counted as it
changes (`ledger`), so a decision costs the same with one lease as with a million.

A budget never fails a turn because of its KV: a lease that is refused is a turn that recomputes,
and its plan says why. Only sessions, turns and renewals, which a caller asks for, are refused with
an error.

The rule of the first three is the same. Up to `Limits.contended_share` of the whole, a tenant may
have as much as its own cap allows. Beyond that it may have no more than an equal part, counted with
one tenant more than there are: so one that comes new finds room, whatever the others have.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.errors import BudgetExceededError
from kvshuttle.controlplane.model.ledger import NOTHING
from kvshuttle.controlplane.model.terms import WorkerRole

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.ledger import Division, Leased
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.model.work import Work
    from kvshuttle.controlplane.model.worker import Worker

__all__ = [
    "EVICTED",
    "full_workers",
    "lease_room",
    "may_extend",
    "no_worker_has_room",
    "quarantine_full",
    "renewal",
    "turn",
]

SECOND = 1_000_000_000
TURN_RETRY_NS = 1 * SECOND
"""Turns end within seconds."""
SESSION_RETRY_NS = 60 * SECOND
"""Sessions end by their clients, or after hours of idleness."""
LEASE_RETRY_NS = 5 * SECOND
"""A pool's state changes with the next requests that end."""
EVICTIONS = 8
"""Leases that one decision may stop: keeps it short; one lease is mostly as large as another."""
LOOKED_AT = 64
"""Unread leases that one decision compares: they lie in the order in which their deadlines were
set, and only renewals of different lengths make that another order than the deadlines'."""

EVICTED = "EVICTED"
"""Why a lease was stopped that had not been read for long while its tenant wanted room."""


def _refuse(
    reason: str, scope: str, used: int, most: int, remedy: str, retry_ns: int
) -> BudgetExceededError:
    return BudgetExceededError(
        reason,
        f"{scope} has {used}, and {most} is the most now: {remedy}",
        retry_ns,
        scope=scope,
        used=used,
        most=most,
        remedy=remedy,
    )


# -- sessions and turns --------------------------------------------------------------------------


def turn(w: Work, key: SessionKey, *, new_session: bool) -> None:
    """Whether a tenant may begin another turn, and for it a session. BudgetExceededError."""
    limits, tenant = w.limits, key.tenant
    own = limits.tenant(tenant)
    if new_session:
        _within(
            w.state.ledger.sessions,
            tenant,
            "SESSIONS",
            own.sessions,
            limits.sessions_max,
            limits.contended_share,
            "end sessions that are over (EndSession)",
            SESSION_RETRY_NS,
        )
    turns = w.state.ledger.turns
    capacity = 0
    if turns.total + 1 > limits.turns_per_worker * limits.contended_share:
        # Only now can it be that the workers are nearly full. Each turn decodes on one of them.
        capacity = limits.turns_per_worker * sum(
            x.connected and x.role is not WorkerRole.PREFILL for x in w.state.workers.values()
        )
    _within(
        turns,
        tenant,
        "TURNS",
        own.running_turns,
        capacity,
        limits.contended_share,
        "end turns whose requests have ended (EndTurn), or send fewer at once",
        TURN_RETRY_NS,
    )


def _within(
    division: Division,
    tenant: str,
    what: str,
    own: int,
    capacity: int,
    contended_share: float,
    remedy: str,
    retry_ns: int,
) -> None:
    """One more for the tenant; a capacity of 0 is none that matters now."""
    has = division.of.get(tenant, 0)
    scope = f"tenant {tenant}"
    if has >= own:
        raise _refuse(f"TENANT_{what}", scope, has, own, remedy, retry_ns)
    if not capacity:
        return
    if division.total >= capacity:
        raise _refuse(f"ALL_{what}", "the cluster", division.total, capacity, remedy, retry_ns)
    fair = division.fair(tenant, capacity)
    if division.total >= capacity * contended_share and has >= fair:
        raise _refuse(f"FAIR_{what}", scope, has, fair, remedy, retry_ns)


def full_workers(w: Work) -> tuple[str, ...]:
    """Workers that run as many turns as they may."""
    most = w.limits.turns_per_worker
    if w.state.ledger.turns.total < most:
        return ()
    return tuple(name for name, count in w.state.turns_on.items() if count >= most)


def no_worker_has_room(w: Work, full: tuple[str, ...]) -> BudgetExceededError:
    """What to say when only full workers are left."""
    return _refuse(
        "WORKER_TURNS",
        "every worker that could take the turn",
        w.limits.turns_per_worker,
        w.limits.turns_per_worker,
        "try again, or start another worker",
        TURN_RETRY_NS,
    )


# -- leases --------------------------------------------------------------------------------------


def quarantine_full(limits: Limits, destination: Worker) -> bool:
    """Whether a worker has so many blocks in quarantine that it takes no landing zone."""
    pool = destination.pool
    return pool.quarantined_blocks > limits.quarantine_share * pool.total_blocks


def _under_watermark(limits: Limits, source: Worker) -> bool:
    pool = source.pool  # all zero until the first heartbeat
    return pool.free_blocks < limits.free_share_min * pool.total_blocks


def lease_room(
    w: Work, tenant: str, blocks: int, source: Worker, destination: Worker
) -> tuple[str, list[Lease]]:
    """Whether a lease of so many blocks may be made: one word that says why not, or none; and
    leases that are to be stopped in any case. Changes nothing."""
    limits = w.limits
    if quarantine_full(limits, destination):
        return "DESTINATION_QUARANTINE", []
    if _under_watermark(limits, source):
        return "WORKER_WATERMARK", []
    leased = w.state.ledger.leased.get(source.ref, NOTHING)
    if not leased.blocks.of.get(tenant) and (
        leased.blocks.total + blocks <= source.num_blocks or not limits.leased_share_worker
    ):
        # A first lease is never too large: else a long conversation would never move at all.
        return "", []
    reason, over = _over(w, leased, tenant, blocks, source)
    if not reason:
        return "", []
    payer = tenant
    if reason == "WORKER_BUDGET":
        # It is within its part, so another may be beyond its own.
        most = max(leased.blocks.of, key=leased.blocks.of.__getitem__)
        capacity = int(limits.leased_share_worker * source.num_blocks)
        if leased.blocks.of[most] > leased.blocks.fair(tenant, capacity):
            payer = most
    victims = _unread(w, leased, payer, over)
    soon = int(limits.leaving_share * source.num_blocks) - leased.leaving.total
    if victims and over <= soon:
        return "", victims
    # A tenant's own go only for one that comes; what another has too much goes for the next.
    return reason, victims if payer != tenant else []


def _over(w: Work, leased: Leased, tenant: str, blocks: int, source: Worker) -> tuple[str, int]:
    """Why so many blocks more do not fit, and how many would have to go."""
    limits = w.limits
    size = source.num_blocks
    # Blocks that are about to come free count as free, up to a point: a reader that never answers
    # must not make more and more of them.
    soon = int(limits.leaving_share * size)
    has = leased.blocks.of.get(tenant, 0) - min(leased.leaving.of.get(tenant, 0), soon) + blocks
    total = leased.blocks.total - min(leased.leaving.total, soon) + blocks
    own_share = limits.tenant(tenant).leased_share
    reason, over = "", 0
    if own_share and has > (own := int(own_share * size)):
        reason, over = "TENANT_BUDGET", has - own
    if not limits.leased_share_worker:
        return reason, over
    capacity = int(limits.leased_share_worker * size)
    calm = int(capacity * limits.contended_share)
    fair = leased.blocks.fair(tenant, capacity)
    if total > calm and has > fair:
        reason, over = reason or "FAIR_SHARE", max(over, min(total - calm, has - fair))
    if total > capacity:
        reason, over = reason or "WORKER_BUDGET", max(over, total - capacity)
    return reason, over


def _unread(w: Work, leased: Leased, tenant: str, enough: int) -> list[Lease]:
    """Granted leases of a tenant that nobody has read yet, soonest-expiring first, so many that
    they free enough; none at all when they cannot."""
    old_ns = w.now_ns - w.limits.lease_unread_ns
    found = [w.state.leases[x] for x in islice(leased.unread.get(tenant, ()), LOOKED_AT)]
    found = [x for x in found if x.grant_ns <= old_ns]
    victims: list[Lease] = []
    for lease in sorted(found, key=lambda lease: lease.deadline_ns)[:EVICTIONS]:
        if enough <= 0:
            break
        victims.append(lease)
        enough -= lease.range.length if lease.range is not None else 0
    return victims if enough <= 0 else []


def may_extend(w: Work, source: Worker, tenant: str) -> bool:
    """As `renewal`, for all of a tenant's leases from a worker at once."""
    if _under_watermark(w.limits, source):
        return False
    leased = w.state.ledger.leased.get(source.ref, NOTHING)
    return not _over(w, leased, tenant, 0, source)[0]


def renewal(w: Work, lease: Lease) -> None:
    """Whether a lease may be made to last longer. BudgetExceededError: its source is short of
    blocks, or its tenant has more of them than it may."""
    source = w.worker(lease.source)
    if source is None:
        return
    limits, tenant = w.limits, lease.key.tenant
    name = source.ref.worker_id
    pool = source.pool
    if _under_watermark(limits, source):
        raise BudgetExceededError(
            "WORKER_WATERMARK",
            f"worker {name} has {pool.free_blocks} free blocks of {pool.total_blocks}: no lease "
            "is renewed there until its requests have ended",
            LEASE_RETRY_NS,
            scope=f"worker {name}",
            used=pool.total_blocks - pool.free_blocks,
            most=int(pool.total_blocks * (1 - limits.free_share_min)),
            remedy="try again, or let the lease end: the request computes",
        )
    leased = w.state.ledger.leased.get(lease.source, NOTHING)
    has = leased.blocks.of.get(tenant, 0)
    if lease.range is not None and has == lease.range.length:
        return  # its only one there: see `lease_room`
    reason, over = _over(w, leased, tenant, 0, source)
    if reason:
        raise _refuse(
            reason,
            f"tenant {tenant} on worker {name}",
            has,
            max(0, has - over),
            "let leases end that nobody reads, or have the tenant's budget raised",
            LEASE_RETRY_NS,
        )
