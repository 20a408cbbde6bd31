"""Leases. What is asked of many of them at once lies in columns; those that were touched lately
are objects, the others rows in bundles.

A renewal of a hundred thousand leases is then a few operations on arrays, and a lease costs as
much memory as its row and 53 bytes more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from kvshuttle.controlplane.model.bundles import Bundle, Bundles
from kvshuttle.controlplane.model.packed import TABLE_COLUMNS
from kvshuttle.controlplane.model.packing import lease_from_bytes, lease_to_bytes
from kvshuttle.controlplane.model.terms import LeaseState

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.packed import PackedLeases
    from kvshuttle.controlplane.model.terms import WorkerRef

    Slots = npt.NDArray[np.int64]

__all__ = ["LeaseTable"]

NEVER = int(np.iinfo(np.int64).max)
FIRST = 1_024
COLUMNS = (*TABLE_COLUMNS, "told_ns")


class _Numbers:
    """From a lease's number in its epoch to its slot: a window over the numbers in use."""

    def __init__(self) -> None:
        self.base = 0
        self.slots: npt.NDArray[np.int32] = np.full(FIRST, -1, np.int32)

    def get(self, seq: int) -> int:
        at = seq - self.base
        return int(self.slots[at]) if 0 <= at < len(self.slots) else -1

    def many(self, seqs: npt.NDArray[np.uint64]) -> Slots:
        at = seqs.astype(np.int64) - self.base
        known = (at >= 0) & (at < len(self.slots))
        found = np.full(len(at), -1, np.int64)
        found[known] = self.slots[at[known]]
        return found

    def set(self, seq: int, slot: int) -> None:
        at = seq - self.base
        if at < 0 or at >= len(self.slots):
            at = self._move(seq)
        self.slots[at] = slot

    def fill(self, seqs: npt.NDArray[np.int64], slots: Slots) -> None:
        """The first that are in use."""
        self.base = int(seqs.min())
        size = FIRST
        while size < 2 * (int(seqs.max()) - self.base + 1):
            size *= 2
        self.slots = np.full(size, -1, np.int32)
        self.slots[seqs - self.base] = slots

    def _move(self, seq: int) -> int:
        """Lets go of the numbers before the oldest in use, and makes room."""
        used = np.flatnonzero(self.slots >= 0)
        low = self.base + int(used[0]) if len(used) else seq
        high = self.base + int(used[-1]) if len(used) else seq
        base, top = min(low, seq), max(high, seq)
        size = FIRST
        while size < 2 * (top - base + 1):
            size *= 2
        fresh = np.full(size, -1, np.int32)
        if len(used):
            fresh[used + (self.base - base)] = self.slots[used]
        self.base, self.slots = base, fresh
        return seq - base


class LeaseTable(MutableMapping[str, "Lease"]):
    """By id, in the order of making."""

    def __init__(self, hot: int = 20_000) -> None:
        self._hot = hot
        # Each itself, or the bundle in which its row is.
        self._rows: dict[str, Lease | Bundle[str]] = {}
        self._warm: deque[str] = deque()
        self._cold: Bundles[str] = Bundles()
        # In the order in which they ended.
        self.ended: dict[str, None] = {}
        # Open leases only, by slot.
        self._ids: list[str] = []
        self._free: list[int] = []
        self._numbers: dict[int, _Numbers] = {}
        self.state: npt.NDArray[np.uint8] = np.zeros(FIRST, np.uint8)
        self.stopping: npt.NDArray[np.bool_] = np.zeros(FIRST, np.bool_)
        self.source: npt.NDArray[np.int32] = np.zeros(FIRST, np.int32)
        self.destination: npt.NDArray[np.int32] = np.zeros(FIRST, np.int32)
        self.tenant: npt.NDArray[np.int32] = np.zeros(FIRST, np.int32)
        self.create_ns: npt.NDArray[np.int64] = np.zeros(FIRST, np.int64)
        self.deadline_ns: npt.NDArray[np.int64] = np.full(FIRST, NEVER, np.int64)
        # As it was last told to watchers: an extension among many is not.
        self.told_ns: npt.NDArray[np.int64] = np.full(FIRST, NEVER, np.int64)
        self.seq: npt.NDArray[np.uint64] = np.zeros(FIRST, np.uint64)
        self._names: dict[Any, int] = {}
        self._named: list[Any] = []
        # No deadline is before this, and none that was told.
        self._soonest_ns: int = int(NEVER)
        self._soonest_told_ns: int = int(NEVER)
        # Slots of leases that were due at the last scan and have not been taken.
        self._burst: deque[int] = deque()
        # No lease was extended, among many, beyond this.
        self._extended_ns = 0

    # -- names in columns ----------------------------------------------------------------------
    def number_of(self, name: WorkerRef | str) -> int:
        """The number that stands for a boot or a tenant in columns."""
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._named)
            self._named.append(name)
        return number

    def name_of(self, number: int) -> Any:
        """The inverse."""
        return self._named[number]

    # -- as a mapping --------------------------------------------------------------------------
    def __getitem__(self, lease_id: str) -> Lease:
        row = self._rows[lease_id]
        if isinstance(row, Bundle):
            lease = self._unpack(lease_id, row)
            self._drop(lease_id, row)
            self._rows[lease_id] = row = lease
            self._warm.append(lease.lease_id)
            self._cool()
        return self._current(row)

    def get(self, lease_id: str, default: Lease | None = None) -> Lease | None:  # type: ignore[override]
        """The lease, if it is there."""
        row = self._rows.get(lease_id)
        if row is None:
            return default
        return self[lease_id] if isinstance(row, Bundle) else self._current(row)

    def _current(self, lease: Lease) -> Lease:
        """With the deadline of its column, which may have been extended among many."""
        if (
            lease.deadline_ns < self._extended_ns
            and lease.grant_ns
            and lease.state <= LeaseState.ACTIVE
        ):
            slot = self.slot(lease)
            if slot >= 0 and (deadline := int(self.deadline_ns[slot])) > lease.deadline_ns:
                lease = replace(lease, deadline_ns=deadline, ttl_ns=deadline - lease.grant_ns)
        return lease

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._rows)

    def peek(self, lease_id: str) -> Lease:
        """The lease, without keeping what had to be unpacked."""
        row = self._rows[lease_id]
        if isinstance(row, Bundle):
            row = self._unpack(lease_id, row)
        return self._current(row)

    def values(self) -> Iterator[Lease]:  # type: ignore[override]
        """All of them, oldest first, without keeping what had to be unpacked."""
        return (self.peek(lease_id) for lease_id in self._rows)

    def items(self) -> Iterator[tuple[str, Lease]]:  # type: ignore[override]
        """As `values`."""
        return ((lease_id, self.peek(lease_id)) for lease_id in self._rows)

    def newest(self) -> Iterator[Lease]:
        """As `values`, newest first."""
        return (self.peek(lease_id) for lease_id in reversed(self._rows))

    def __setitem__(self, lease_id: str, lease: Lease) -> None:
        before = self._rows.get(lease_id)
        if isinstance(before, Bundle):
            self._drop(lease_id, before)
        self._rows[lease_id] = lease
        if before is None or isinstance(before, Bundle):
            self._warm.append(lease_id)
            self._cool()
        if lease.state <= LeaseState.ACTIVE:
            self._enter(lease)
        else:
            self.ended.setdefault(lease_id)
            if before is not None:
                self._leave(lease)

    def load(self, packed: PackedLeases) -> None:
        """Takes up what a store gives, oldest first, into a table that is empty; the bundles are
        the table's from then on."""
        assert not self._rows
        self._rows = dict(zip(packed.ids, packed.places, strict=True))
        self._cold = packed.bundles
        state = packed.column("state")
        is_open = state <= LeaseState.ACTIVE
        self.ended = dict.fromkeys(compress(packed.ids, (~is_open).tolist()))
        self._ids = list(compress(packed.ids, is_open.tolist()))
        self._names, self._named = dict(packed.names), list(packed.named)
        size, count = FIRST, len(self._ids)
        while size < count:
            size *= 2
        for name in TABLE_COLUMNS:
            column = np.zeros(size, getattr(self, name).dtype)
            column[:count] = packed.column(name)[is_open]
            setattr(self, name, column)
        self.deadline_ns[self.state <= LeaseState.PENDING] = NEVER
        self.told_ns = self.deadline_ns.copy()
        self._soonest_ns = self._soonest_told_ns = int(self.deadline_ns.min())
        epochs, seqs = packed.column("epoch")[is_open], packed.column("seq")[is_open]
        slots = np.arange(count)
        for epoch in np.unique(epochs).tolist():
            numbers = self._numbers[epoch] = _Numbers()
            of_epoch = epochs == epoch
            numbers.fill(seqs[of_epoch], slots[of_epoch])

    def __delitem__(self, lease_id: str) -> None:
        self.take(lease_id)

    def take(self, lease_id: str) -> Lease:
        """Takes a lease out. KeyError when it is not there."""
        row = self._rows[lease_id]
        if isinstance(row, Bundle):
            lease = self._unpack(lease_id, row)
            self._drop(lease_id, row)
        else:
            lease = row
        del self._rows[lease_id]
        self.ended.pop(lease_id, None)
        self._leave(lease)
        return lease

    def _cool(self) -> None:
        while len(self._warm) > self._hot:
            lease_id = self._warm.popleft()
            row = self._rows.get(lease_id)
            if row is not None and not isinstance(row, Bundle):
                self._rows[lease_id] = self._cold.put(lease_id, lease_to_bytes(row))

    def _unpack(self, lease_id: str, bundle: Bundle[str]) -> Lease:
        return lease_from_bytes(*self._cold.get(bundle, lease_id))

    def _drop(self, lease_id: str, bundle: Bundle[str]) -> None:
        """Whoever calls says what is in its place."""
        for one, row in self._cold.drop(bundle, lease_id):
            self._rows[one] = self._cold.put(one, row)

    # -- columns -------------------------------------------------------------------------------
    def slot(self, lease: Lease) -> int:
        """Where an open lease lies in the columns; else -1."""
        numbers = self._numbers.get(lease.epoch)
        return numbers.get(lease.seq) if numbers is not None else -1

    def _enter(self, lease: Lease) -> None:
        numbers = self._numbers.get(lease.epoch)
        if numbers is None:
            numbers = self._numbers[lease.epoch] = _Numbers()
        slot = numbers.get(lease.seq)
        if slot < 0:
            slot = self._take(lease)
            numbers.set(lease.seq, slot)
        self.state[slot] = lease.state
        self.stopping[slot] = lease.stop is not None
        if lease.state is not LeaseState.PENDING:
            self.deadline_ns[slot] = lease.deadline_ns
            self.told_ns[slot] = lease.deadline_ns
            self._soonest_ns = min(self._soonest_ns, lease.deadline_ns)
            self._soonest_told_ns = min(self._soonest_told_ns, lease.deadline_ns)

    def _take(self, lease: Lease) -> int:
        if self._free:
            slot = self._free.pop()
            self._ids[slot] = lease.lease_id
        else:
            slot = len(self._ids)
            self._ids.append(lease.lease_id)
            if slot == len(self.state):
                self._grow()
        self.source[slot] = self.number_of(lease.source)
        self.destination[slot] = self.number_of(lease.destination)
        self.tenant[slot] = self.number_of(lease.key.tenant)
        self.create_ns[slot] = lease.create_ns
        self.seq[slot] = lease.seq
        self.deadline_ns[slot] = self.told_ns[slot] = NEVER
        return slot

    def _grow(self) -> None:
        size = 2 * len(self.state)
        for name in COLUMNS:
            column = getattr(self, name)
            fresh = np.zeros(size, column.dtype)
            fresh[: len(column)] = column
            setattr(self, name, fresh)
        self.deadline_ns[size // 2 :] = self.told_ns[size // 2 :] = NEVER

    def _leave(self, lease: Lease) -> None:
        numbers = self._numbers.get(lease.epoch)
        slot = numbers.get(lease.seq) if numbers is not None else -1
        if numbers is None or slot < 0:
            return
        numbers.set(lease.seq, -1)
        self.state[slot] = 0
        self.deadline_ns[slot] = self.told_ns[slot] = NEVER
        self._ids[slot] = ""
        self._free.append(slot)

    # -- many at once --------------------------------------------------------------------------
    @property
    def open_count(self) -> int:
        """How many are open."""
        return len(self._ids) - len(self._free)

    def open_ids(self) -> list[str]:
        """Those that are open, in no order."""
        return [lease_id for lease_id in self._ids if lease_id]

    def is_open(self, lease_id: object) -> bool:
        """Whether a lease is there and open."""
        return lease_id in self._rows and self.peek(str(lease_id)).open

    def count_by_state(self) -> dict[LeaseState, int]:
        """Open leases."""
        counts = np.bincount(self.state[: len(self._ids)], minlength=LeaseState.ACTIVE + 1)
        return {state: int(counts[state]) for state in LeaseState if state.open}

    def open_of(self, refs: set[WorkerRef]) -> list[str]:
        """Open leases from or to one of these boots."""
        numbers = [self._names[ref] for ref in refs if ref in self._names]
        top = len(self._ids)
        mask = np.isin(self.source[:top], numbers) | np.isin(self.destination[:top], numbers)
        mask &= self.state[:top] > 0
        return [self._ids[slot] for slot in np.flatnonzero(mask)]

    def boots_of(self, worker_id: str) -> set[WorkerRef]:
        """Boots of a worker that columns have named."""
        return {x for x in self._named if not isinstance(x, str) and x.worker_id == worker_id}

    def due(self, now_ns: int, at_most: int) -> list[str]:
        """Granted leases whose deadline has come, soonest first, at most so many; whoever takes
        them ends them. Instead of a heap: extending a lease is then one store into a column,
        however many are extended, and looking is a scan of half a millisecond at a million, made
        only when one may be due, and once for a burst."""
        deadlines = self.deadline_ns[: len(self._ids)]
        if not self._burst:
            if now_ns < self._soonest_ns:
                return []
            found = np.flatnonzero(deadlines <= now_ns)
            self._burst.extend(found[np.argsort(deadlines[found], kind="stable")].tolist())
        taken: list[int] = []
        while self._burst and len(taken) < at_most:
            slot = self._burst.popleft()
            # It may have ended or been extended since the scan, and another have its slot.
            if deadlines[slot] <= now_ns:
                taken.append(slot)
        if not self._burst:
            others = deadlines.copy()
            others[taken] = NEVER
            self._soonest_ns = int(others.min(initial=NEVER))
        return [self._ids[slot] for slot in taken]

    def outdated(self, now_ns: int, at_most: int) -> list[str]:
        """Leases that go on though the deadline which was last told has passed, in the order of
        those deadlines, at most so many."""
        if now_ns < self._soonest_told_ns:
            return []
        told = self.told_ns[: len(self._ids)]
        found = np.flatnonzero(told <= now_ns)
        # What is due itself is about to end, and told then.
        found = found[self.deadline_ns[found] > now_ns]
        found = found[np.argsort(told[found], kind="stable")]
        if len(found) > at_most:
            found = found[:at_most]
        else:
            later = told[told > now_ns]
            self._soonest_told_ns = int(later.min()) if len(later) else NEVER
        return [self._ids[slot] for slot in found]

    def behind(self, now_ns: int) -> bool:
        """Whether a lease may be due now."""
        return bool(self._burst) or now_ns >= self._soonest_ns

    def extend(self, slots: Slots, deadline_ns: int) -> None:
        """Granted leases count until then at least. They have that deadline from now on, wherever
        else an older one is written."""
        self.deadline_ns[slots] = np.maximum(self.deadline_ns[slots], deadline_ns)
        self._extended_ns = max(self._extended_ns, deadline_ns)

    def extend_all(self, deadline_ns: int) -> None:
        """As `extend`, for all that are granted."""
        state = self.state
        slots = np.flatnonzero((state == LeaseState.GRANTED) | (state == LeaseState.ACTIVE))
        self.extend(slots, deadline_ns)
        # Nobody watches yet, and a snapshot shows what is so now.
        self.told_ns[slots] = self.deadline_ns[slots]

    def slots(self, epoch: int, seqs: npt.NDArray[np.uint64]) -> Slots:
        """Where these open leases of an epoch lie; those that are not there are left out."""
        numbers = self._numbers.get(epoch)
        if numbers is None:
            return np.zeros(0, np.int64)
        found = numbers.many(seqs)
        return found[found >= 0]
