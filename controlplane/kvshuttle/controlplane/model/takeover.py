"""What a start takes over from the store, by column: a million sessions and as many leases in some
seconds. What is done in each case is in docs/recovery.md; its rows are named here as there."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING, cast

import numpy as np

from kvshuttle.controlplane.model import turn_events
from kvshuttle.controlplane.model.agenda import Due
from kvshuttle.controlplane.model.lease_table import LeaseTable
from kvshuttle.controlplane.model.packed import PackedLeases, PackedSessions
from kvshuttle.controlplane.model.prefixes import PrefixIndex
from kvshuttle.controlplane.model.session_table import SessionTable
from kvshuttle.controlplane.model.state import REVISIONS_PER_EPOCH, State
from kvshuttle.controlplane.model.terms import LeaseState

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.state import Snapshot
    from kvshuttle.controlplane.model.terms import WorkerRef
    from kvshuttle.controlplane.model.work import Work

__all__ = ["first_state", "take_over"]


def first_state(now_ns: int, snapshot: Snapshot, lineage_id: str, limits: Limits) -> State:
    """An empty state in the term after the store's last. `lineage_id` names a store that is
    new."""
    return State(
        epoch=snapshot.epoch + 1,
        past_epoch=snapshot.epoch,
        start_ns=now_ns,
        lineage_id=snapshot.lineage_id or lineage_id,
        last_incarnation=snapshot.last_incarnation,
        revision=(snapshot.epoch + 1) * REVISIONS_PER_EPOCH,
        sessions=SessionTable(limits.hot_sessions),
        leases=LeaseTable(limits.hot_leases),
        prefixes=PrefixIndex(limits.prefix_index_hashes),
    )


def take_over(w: Work, snapshot: Snapshot) -> None:
    """Fills the state with what a store remembers, which is the state's from then on. Replicas come
    with the agents' inventories."""
    state, limits = w.state, w.limits
    w.put_term()
    for worker in snapshot.workers:
        state.last_incarnation = max(state.last_incarnation, worker.ref.incarnation)
        state.workers[worker.ref.worker_id] = worker
        state.agenda.add(
            w.now_ns + limits.lost_worker_kept_ns, Due.WORKER_FORGET, worker.ref.worker_id
        )
    _take_over_sessions(w, PackedSessions.of(snapshot.sessions))
    pending = _take_over_leases(w, PackedLeases.of(snapshot.leases))
    # start-granted: it goes on, to its deadline or, if it was extended among many, to one that is
    # not in the books and at most a TTL away.
    state.leases.extend_all(w.now_ns + limits.lease_ttl_ns)
    for lease in pending:
        # start-pending: no lease is granted in another term than it was made in.
        w.put_lease(lease.ended(LeaseState.REVOKED, "EPOCH_CHANGED", w.now_ns))


def _take_over_leases(w: Work, leases: PackedLeases) -> list[Lease]:
    """Most are granted, and are not unpacked; the others are, and those that are pending come
    back."""
    state = w.state
    leases.sort()
    state.leases.load(leases)
    plain = leases.column("plain") > 0
    _take_over_plain(w, leases, plain)
    pending: list[Lease] = []
    for at in np.flatnonzero(~plain).tolist():
        lease = leases[at]
        w.index_lease(None, lease)
        if lease.state is LeaseState.PENDING:
            pending.append(lease)
        elif not lease.open:
            state.agenda.add(
                w.now_ns + w.limits.ended_lease_kept_ns, Due.LEASE_FORGET, lease.lease_id
            )
        state.ledger.lease(None, lease)
    for token, several in state.leases_of_turn.items():
        if not isinstance(several, str):
            in_order = sorted(several, key=lambda lease_id: state.leases.peek(lease_id).order)
            state.leases_of_turn[token] = tuple(in_order)
    return pending


def _take_over_plain(w: Work, leases: PackedLeases, plain: npt.NDArray[np.bool_]) -> None:
    state, of_turn = w.state, w.state.leases_of_turn
    these = plain.tolist()
    # One object for all indexes.
    own = dict(zip(state.turns, state.turns, strict=True))
    for lease_id, token in zip(
        compress(leases.ids, these), compress(leases.tokens, these), strict=True
    ):
        token = own.get(token, token)  # noqa: PLW2901
        known = of_turn.get(token)
        of_turn[token] = lease_id if known is None else (*state.turn_leases(token), lease_id)
    places = np.flatnonzero(plain)
    tenants = leases.column("tenant")[places]
    groups = leases.column("source")[places] * len(leases.named) + tenants
    held = leases.column("held")[places]
    unread = leases.column("state")[places] == LeaseState.GRANTED
    order = np.argsort(groups, kind="stable")
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    for group in np.split(order, edges) if len(order) else ():
        source, tenant = divmod(int(groups[group[0]]), len(leases.named))
        # In the order of their ages, which is that of their deadlines where nobody renewed one.
        mine = places[group[unread[group]]].tolist()
        state.ledger.take_up(
            cast("WorkerRef", leases.named[source]),
            str(leases.named[tenant]),
            int(held[group].sum()),
            [leases.ids[at] for at in mine],
        )


def _take_over_sessions(w: Work, sessions: PackedSessions) -> None:
    """A million of them in a few seconds: only what runs is looked into, and not unpacked."""
    state, limits = w.state, w.limits
    keys = sessions.keys
    for tenant, count in Counter(key.tenant for key in compress(keys, sessions.active)).items():
        state.active_sessions += count
        state.ledger.sessions.add(tenant, count)
    updated_ns = np.array(sessions.update_ns, np.int64)
    idle, over = (
        np.maximum(updated_ns + kept_ns, least_ns)
        for kept_ns, least_ns in (turn_events.session_kept_ns(w, active=x) for x in (True, False))
    )
    due_ns = np.where(np.array(sessions.active, np.uint8), idle, over)
    state.agenda.add_all(due_ns, Due.SESSION, keys)
    names = [keys[at] for at in sessions.running]
    state.turns.update(zip(sessions.tokens, names, strict=True))
    state.turns_on.update(sessions.turns_on)
    for tenant, count in Counter(key.tenant for key in names).items():
        state.ledger.turns.add(tenant, count)
    # As many times anew as there are restarts: a gateway may not have been able to end it.
    begun_ns = np.array(sessions.begin_ns, np.int64)
    due_ns = np.maximum(begun_ns, w.now_ns) + limits.turn_timeout_ns
    state.agenda.add_all(due_ns, Due.TURN, names)
    state.sessions.load(sessions)
