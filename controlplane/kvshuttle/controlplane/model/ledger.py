"""Who has how much of what: counted as it changes, so that `admission` need not count.

Everything here is O(1), and at any time equal to what a fresh count would give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.terms import LeaseState, ReplicaState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.state import State
    from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef

__all__ = ["NOTHING", "Division", "Leased", "Ledger"]


@dataclass(slots=True)
class Division:
    """How much of one thing each tenant has. `of` names only tenants that have some."""

    total: int = 0
    of: dict[str, int] = field(default_factory=dict)

    def add(self, tenant: str, amount: int) -> None:
        """More, or less."""
        if not amount:
            return
        self.total += amount
        has = self.of.get(tenant, 0) + amount
        if has:
            self.of[tenant] = has
        else:
            del self.of[tenant]

    def fair(self, tenant: str, capacity: int) -> int:
        """An equal part, with room for one tenant more."""
        return capacity // (len(self.of) + (tenant not in self.of) + 1)


@dataclass(slots=True)
class Leased:
    """Blocks of one boot's pool that leases hold."""

    blocks: Division = field(default_factory=Division)
    # Of those, blocks whose reader was told to stop or whose lease ended in the books: they come
    # free when the reader answers, at the latest at the source's deadline.
    leaving: Division = field(default_factory=Division)
    # Granted and not read yet, by tenant; in the order in which the deadlines were set.
    unread: dict[str, dict[str, None]] = field(default_factory=dict)


NOTHING = Leased()
"""Of a worker that no lease is from. Never changed."""


@dataclass(slots=True)
class Ledger:
    """Who has what. Kept by `work.Work`; equal at any time to `Ledger.of(state)`."""

    sessions: Division = field(default_factory=Division)
    turns: Division = field(default_factory=Division)
    leased: dict[WorkerRef, Leased] = field(default_factory=dict)
    held: dict[WorkerRef, Division] = field(default_factory=dict)
    # Ended leases whose source has said that it let go: nothing is held for them, though nobody
    # knows whether their reader has stopped.
    released: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, state: State, released: Iterable[str] = ()) -> Ledger:
        """Counted afresh: at a start, and in tests."""
        ledger = cls(released=set(released))
        for session in state.sessions.values():
            ledger.session(None, session)
        for key in state.turns.values():
            ledger.turns.add(key.tenant, 1)
        for lease in state.leases.values():
            ledger.lease(None, lease)
        for session_key, replicas in state.replicas.items():
            for replica in replicas.values():
                ledger.replica(session_key, None, replica)
        return ledger

    def session(self, before: Session | None, after: Session | None) -> None:
        """A session changed."""
        was = before is not None and before.active
        now = after is not None and after.active
        if was != now:
            known = after or before
            assert known is not None
            self.sessions.add(known.key.tenant, now - was)

    def replica(self, key: SessionKey, before: Replica | None, after: Replica | None) -> None:
        """A replica changed; only hard ones hold anything."""
        for replica, sign in ((before, -1), (after, 1)):
            if replica is not None and replica.state is ReplicaState.HARD:
                division = self.held.setdefault(replica.worker, Division())
                division.add(key.tenant, sign * replica.num_blocks)
                if not division.total:
                    del self.held[replica.worker]

    def lease(self, before: Lease | None, after: Lease | None) -> None:
        """A lease changed."""
        lease = after or before
        assert lease is not None
        was, was_leaving, was_unread = self._weight(before)
        now, now_leaving, now_unread = self._weight(after)
        if (was, was_leaving, was_unread) == (now, now_leaving, now_unread):
            return
        tenant = lease.key.tenant
        leased = self.leased.get(lease.source)
        if leased is None:
            leased = self.leased[lease.source] = Leased()
        leased.blocks.add(tenant, now - was)
        leased.leaving.add(tenant, now_leaving - was_leaving)
        if was_unread != now_unread:
            index = leased.unread.setdefault(tenant, {})
            index.pop(lease.lease_id, None)
            if now_unread:
                index[lease.lease_id] = None
            if not index:
                del leased.unread[tenant]
        if not leased.blocks.total:
            del self.leased[lease.source]

    def take_up(self, source: WorkerRef, tenant: str, held: int, unread: Iterable[str]) -> None:
        """Leases that are granted and not asked to stop, of one source and tenant, at a start:
        blocks in all, and those that nobody reads yet."""
        leased = self.leased.setdefault(source, Leased())
        leased.blocks.add(tenant, held)
        if index := dict.fromkeys(unread):
            leased.unread[tenant] = index
        if not leased.blocks.total:
            del self.leased[source]

    def source_released(self, lease: Lease) -> None:
        """The source of an ended lease holds nothing for it any more."""
        if lease.open or lease.reader_stopped or lease.lease_id in self.released:
            return
        self.lease(lease, None)
        self.released.add(lease.lease_id)

    def dropped(self, lease: Lease) -> None:
        """A lease is forgotten."""
        self.lease(lease, None)
        self.released.discard(lease.lease_id)

    def _weight(self, lease: Lease | None) -> tuple[int, int, int]:
        """Blocks held; of them, those about to come free; and the deadline of one that is granted
        and not read, else 0."""
        if lease is None or lease.push or lease.lease_id in self.released:
            # A push holds nothing at its source but what its request has anyway.
            return 0, 0, 0
        if not lease.open and lease.reader_stopped:
            return 0, 0, 0
        held = (lease.range if lease.range is not None else lease.ask_range).length
        if not lease.open or lease.stop is not None:
            return held, held, 0
        return held, 0, lease.deadline_ns if lease.state is LeaseState.GRANTED else 0
