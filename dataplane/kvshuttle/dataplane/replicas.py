"""An engine's copies of sessions' chains, and where to find them.

What looks for one is called in most of an engine's steps, and there may be thousands, nearly all
soft: none of it looks at all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvshuttle.dataplane.holds import Hold
from kvshuttle.dataplane.matching import Tail

__all__ = ["Replica", "ReplicaKey", "ReplicaTable"]

ReplicaKey = tuple[str, str, bytes]
"""(tenant, session, head hash)."""


@dataclass(eq=False)
class Replica:
    """A copy of ``chain[0:available)`` in this engine, found under its whole chain's head. Soft
    when ``hold`` is None. It gets shorter when vLLM reuses soft blocks, and when told to."""

    tenant: str
    session_id: str
    hashes: tuple[bytes, ...]
    hold: Hold | None
    expires_ns: int
    available: int = -1
    # Where its blocks lay when it turned soft, and stay until they are reused, which is told.
    soft_ids: tuple[int, ...] = ()
    # What follows its last full block. Only while it is hard: the engine's cache does not know a
    # partial block, so nothing would find it again, nor tell that it was reused.
    tail: Tail | None = None
    tail_hold: Hold | None = None
    # The step after which all its blocks are filled: vLLM caches a block when it schedules it.
    filled_after: int = 0

    def __post_init__(self) -> None:
        if self.available < 0:
            self.available = len(self.hashes)

    @property
    def key(self) -> ReplicaKey:
        """Its identity."""
        return self.tenant, self.session_id, self.hashes[-1]


class ReplicaTable:
    """Scheduler thread only, but for :meth:`all`. A replica is hard or soft as it was when it was
    added, until :meth:`turned_soft`."""

    def __init__(self) -> None:
        self._all: dict[ReplicaKey, Replica] = {}
        self._by_session: dict[tuple[str, str], dict[ReplicaKey, Replica]] = {}
        self._hard: dict[ReplicaKey, Replica] = {}
        self._soft: OrderedDict[ReplicaKey, Replica] = OrderedDict()

    def add(self, replica: Replica) -> None:
        """In place of what has the same key."""
        key = replica.key
        self.remove(key)
        self._all[key] = replica
        self._by_session.setdefault(key[:2], {})[key] = replica
        (self._soft if replica.hold is None else self._hard)[key] = replica

    def remove(self, key: ReplicaKey) -> None:
        """If it is there."""
        if self._all.pop(key, None) is None:
            return
        self._hard.pop(key, None)
        self._soft.pop(key, None)
        of_session = self._by_session[key[:2]]
        del of_session[key]
        if not of_session:
            del self._by_session[key[:2]]

    def turned_soft(self, replica: Replica) -> None:
        """A hard one's hold has ended."""
        if self._hard.pop(replica.key, None) is not None:
            self._soft[replica.key] = replica

    def get(self, key: ReplicaKey) -> Replica | None:
        """The replica with this key."""
        return self._all.get(key)

    def of_session(self, tenant: str, session_id: str) -> list[Replica]:
        """Those of a session, the oldest first; a list of its own."""
        return list(self._by_session.get((tenant, session_id), {}).values())

    @property
    def hard(self) -> list[Replica]:
        """Those with a hold, the oldest first; a list of its own."""
        return list(self._hard.values())

    def soft_beyond(self, most: int) -> Iterator[Replica]:
        """Those that are soft for longest, until there are `most` others; each must be removed
        before the next one is asked for."""
        while len(self._soft) > most:
            yield next(iter(self._soft.values()))

    def all(self) -> list[Replica]:
        """Every one; any thread."""
        return list(self._all.values())
