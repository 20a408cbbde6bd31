"""Which replica begins with which prefix: how a session finds what others of its tenant have.

A replica's chain is known here by checkpoints, hashes of some of its blocks. A hash of vLLM's
covers everything before it (tokens, LoRA, images, cache salt), so one that is equal means a prefix
that is equal; how much of the rest is, the reader finds out by comparing all hashes. Nothing in
here is the truth: the source says what it still has when it is asked to hold it.

Tenants have nothing in common, not even the room: where it is short, the tenant that has most gives
up what it has used least recently.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.terms import SessionKey

__all__ = ["Holder", "PrefixIndex", "checkpoint_blocks", "interval"]

_Name = tuple[str, str, bytes]


def checkpoint_blocks(index: int, interval: int) -> int:
    """How many blocks checkpoint `index` ends: `interval` times 1, 2, 3, 4, 6, 8, 12, 16 and so on,
    two an octave. In the API's text."""
    if index == 0:
        return interval
    half, odd = divmod(index, 2)
    return interval * (2 << half if odd else 3 << (half - 1))


def interval(limits: Limits, block_size: int) -> int:
    """Blocks of the first checkpoint; 0 where nobody wants checkpoints."""
    if not limits.prefix_index_hashes:
        return 0
    return max(1, limits.checkpoint_tokens // max(1, block_size))


@dataclass(slots=True, eq=False)
class Holder:
    """A replica, and the hashes at its checkpoints from the start on."""

    key: SessionKey
    worker_id: str
    head_hash: bytes
    hashes: tuple[bytes, ...]


@dataclass(slots=True)
class _Tenant:
    """`holders` lie in the order of their last use. `by_hash` has the newest holder of each."""

    holders: dict[_Name, Holder] = field(default_factory=dict)
    by_hash: dict[bytes, Holder] = field(default_factory=dict)
    size: int = 0


class PrefixIndex:
    """At most `most` hashes of all tenants; 0: none."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[str, _Tenant] = {}
        self.size = 0

    # -- changing ------------------------------------------------------------------------------
    def put(
        self, key: SessionKey, replica: Replica, hashes: Sequence[bytes], *, copy: bool = False
    ) -> None:
        """A worker has offered a replica, or offers it again. A copy does not take the place of
        what its session has elsewhere."""
        name = (key.session_id, replica.worker.worker_id, replica.head_hash)
        tenant = self._tenants.get(key.tenant)
        if tenant is not None and name in tenant.holders:
            self._forget(key.tenant, tenant, name)
        if not hashes or not self._most:
            return
        if tenant is None or not tenant.holders:
            tenant = self._tenants[key.tenant] = _Tenant()
        holder = Holder(key, name[1], name[2], tuple(hashes[: self._most]))
        tenant.holders[name] = holder
        if copy:
            for one in holder.hashes:
                other = tenant.by_hash.get(one)
                if other is None or other.key != key:
                    tenant.by_hash[one] = holder
        else:
            tenant.by_hash.update(dict.fromkeys(holder.hashes, holder))
        tenant.size += len(holder.hashes)
        self.size += len(holder.hashes)
        if self.size > self._most:
            self._make_room()

    def drop(self, key: SessionKey, replica: Replica, left: Sequence[Replica]) -> None:
        """A replica is gone; `left` are the session's others, which may have the same."""
        tenant = self._tenants.get(key.tenant)
        if tenant is None:
            return
        name = (key.session_id, replica.worker.worker_id, replica.head_hash)
        holder = tenant.holders.get(name)
        if holder is not None:
            if left:
                self._cut(tenant, holder, 0, left)
            self._forget(key.tenant, tenant, name)

    def shorten(
        self, key: SessionKey, replica: Replica, interval: int, left: Iterable[Replica]
    ) -> None:
        """A replica has become shorter."""
        tenant = self._tenants.get(key.tenant)
        name = (key.session_id, replica.worker.worker_id, replica.head_hash)
        holder = tenant.holders.get(name) if tenant is not None else None
        if tenant is None or holder is None:
            return
        keep = len(holder.hashes)
        while keep and checkpoint_blocks(keep - 1, interval) > replica.num_blocks:
            keep -= 1
        self._cut(tenant, holder, keep, left)
        if not keep:
            self._forget(key.tenant, tenant, name)

    def _cut(self, tenant: _Tenant, holder: Holder, keep: int, left: Iterable[Replica]) -> None:
        """Takes out a holder's hashes beyond the first `keep`; other replicas of its session that
        have them take its place."""
        gone, holder.hashes = holder.hashes[keep:], holder.hashes[:keep]
        tenant.size -= len(gone)
        self.size -= len(gone)
        others: list[Holder] | None = None
        for one in gone:
            if tenant.by_hash.get(one) is not holder:
                continue
            del tenant.by_hash[one]
            if others is None:
                names = ((holder.key.session_id, *replica.name) for replica in left)
                others = [tenant.holders[name] for name in names if name in tenant.holders]
            for other in others:
                if other is not holder and one in other.hashes:
                    tenant.by_hash[one] = other
                    break

    def _forget(self, tenant_name: str, tenant: _Tenant, name: _Name) -> None:
        holder = tenant.holders.pop(name)
        by_hash, hashes = tenant.by_hash, holder.hashes
        tenant.size -= len(hashes)
        self.size -= len(hashes)
        for one in hashes:
            if by_hash.get(one) is holder:
                del by_hash[one]
        if not tenant.holders:
            del self._tenants[tenant_name]

    def _make_room(self) -> None:
        """Some at once, so that finding the largest tenant and its oldest costs little each."""
        while self.size > self._most - self._most // 64:
            largest = max(self._tenants, key=lambda one: self._tenants[one].size)
            tenant = self._tenants[largest]
            # Never the newest: it has just come.
            oldest = list(islice(tenant.holders, min(64, len(tenant.holders) - 1)))
            if not oldest:
                return
            for name in oldest:
                self._forget(largest, tenant, name)
                if self.size <= self._most - self._most // 64:
                    return

    # -- asking --------------------------------------------------------------------------------
    def knows(self, tenant: str) -> bool:
        """Whether there is anything of a tenant."""
        return tenant in self._tenants

    def find(self, tenant: str, hashes: Sequence[bytes]) -> Iterator[tuple[int, Holder]]:
        """Who has the prefix that ends with one of these hashes, and with which, longest first."""
        known = self._tenants.get(tenant)
        if known is None:
            return
        for index in range(len(hashes) - 1, -1, -1):
            holder = known.by_hash.get(hashes[index])
            if holder is not None:
                yield index, holder

    def used(self, holder: Holder) -> None:
        """It was of use."""
        tenant = self._tenants.get(holder.key.tenant)
        name = (holder.key.session_id, holder.worker_id, holder.head_hash)
        if tenant is not None and tenant.holders.get(name) is holder:
            tenant.holders[name] = tenant.holders.pop(name)
