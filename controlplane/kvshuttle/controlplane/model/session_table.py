"""Sessions and their replicas. Those that were touched lately are objects, the others rows in
bundles."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedList

from kvshuttle.controlplane.model.bundles import Bundle, Bundles
from kvshuttle.controlplane.model.packing import (
    replicas_from_bytes,
    replicas_to_bytes,
    session_from_bytes,
    session_to_bytes,
)

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.packed import PackedSessions
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.terms import SessionKey

__all__ = ["ReplicaTable", "SessionTable"]


class SessionTable(MutableMapping["SessionKey", "Session"]):
    """By key; iterates in the order of making. `hot` sessions are kept as objects.

    What is read is never changed by packing: objects are immutable, and equal after it.
    """

    def __init__(self, hot: int = 10_000) -> None:
        self._hot = hot
        # A session's slot, and by slot: its key (the one object that all indexes share), itself
        # and its replicas, or the bundles in which they are, and whether it is active.
        self._slot: dict[SessionKey, int] = {}
        self._keys: list[SessionKey | None] = []
        self._rows: list[Session | Bundle[SessionKey] | None] = []
        self._replicas: list[tuple[Replica, ...] | Bundle[SessionKey]] = []
        self._active = bytearray()
        self._free: list[int] = []
        # Slots in the order in which they became objects.
        self._warm: deque[int] = deque()
        self._cold: Bundles[SessionKey] = Bundles()
        self._cold_replicas: Bundles[SessionKey] = Bundles()
        self._ordered: Any = SortedList()

    # -- reading -------------------------------------------------------------------------------
    def __getitem__(self, key: SessionKey) -> Session:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: SessionKey, default: Session | None = None) -> Session | None:  # type: ignore[override]
        """The session, if it is there."""
        slot = self._slot.get(key)
        if slot is None:
            return default
        row = self._rows[slot]
        return self._warm_up(slot, row) if isinstance(row, Bundle) else row

    def peek(self, key: SessionKey) -> Session | None:
        """The session, if it is there, without keeping what had to be unpacked."""
        slot = self._slot.get(key)
        if slot is None:
            return None
        row = self._rows[slot]
        return self._unpack(slot, row) if isinstance(row, Bundle) else row

    def __contains__(self, key: object) -> bool:
        return key in self._slot

    def __len__(self) -> int:
        return len(self._slot)

    def __iter__(self) -> Iterator[SessionKey]:
        return iter(self._slot)

    def values(self) -> Iterator[Session]:  # type: ignore[override]
        """All of them, without keeping what had to be unpacked."""
        return (session for _, session in self.items())

    def items(self) -> Iterator[tuple[SessionKey, Session]]:  # type: ignore[override]
        """As `values`."""
        for key, slot in self._slot.items():
            row = self._rows[slot]
            session = self._unpack(slot, row) if isinstance(row, Bundle) else row
            assert session is not None
            yield key, session

    def own(self, key: SessionKey) -> SessionKey:
        """The table's own object for a key, so that all indexes share one; else the key."""
        slot = self._slot.get(key)
        own = self._keys[slot] if slot is not None else None
        return own if own is not None else key

    def active(self, key: SessionKey) -> bool:
        """Whether a session is there and active, without unpacking it."""
        slot = self._slot.get(key)
        return slot is not None and bool(self._active[slot])

    def after(self, floor: SessionKey) -> Iterator[SessionKey]:
        """Keys in order, those beyond `floor`."""
        found: Iterator[SessionKey] = self._ordered.irange(floor, inclusive=(False, False))
        return found

    # -- changing ------------------------------------------------------------------------------
    def __setitem__(self, key: SessionKey, session: Session) -> None:
        slot = self._slot.get(key)
        if slot is None:
            slot = self._new(session.key)
            self._ordered.add(session.key)
            self._warm.append(slot)
        elif isinstance(row := self._rows[slot], Bundle):
            self._drop(slot, row)
            self._warm.append(slot)
        self._rows[slot] = session
        self._active[slot] = session.active
        if len(self._warm) > self._hot:
            self._cool()

    def __delitem__(self, key: SessionKey) -> None:
        slot = self._slot[key]
        if isinstance(row := self._rows[slot], Bundle):
            self._drop(slot, row)
        self._drop_replicas(slot)
        del self._slot[key]
        self._ordered.remove(key)
        self._keys[slot] = None
        self._rows[slot] = None
        self._active[slot] = False
        self._free.append(slot)

    def load(self, packed: PackedSessions) -> None:
        """Takes up what a store gives, into a table that is empty; the columns and the bundles are
        the table's from then on."""
        assert not self._keys
        self._slot = dict(zip(packed.keys, range(len(packed)), strict=True))
        self._keys = list(packed.keys)
        self._rows = list(packed.places)
        self._cold = packed.bundles
        self._replicas = [()] * len(packed)
        self._active = packed.active
        self._ordered.update(packed.keys)

    def _new(self, key: SessionKey) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
            self._rows.append(None)
            self._replicas.append(())
            self._active.append(False)
        self._slot[key] = slot
        return slot

    # -- replicas ------------------------------------------------------------------------------
    def replicas(self, key: SessionKey) -> tuple[Replica, ...]:
        """A session's replicas, oldest first."""
        slot = self._slot.get(key)
        if slot is None:
            return ()
        found = self._replicas[slot]
        return self._unpack_replicas(slot, found) if isinstance(found, Bundle) else found

    def put_replicas(self, key: SessionKey, replicas: tuple[Replica, ...]) -> None:
        """Replaces them. KeyError when there is no such session."""
        slot = self._slot[key]
        self._drop_replicas(slot)
        # A session that is packed has its replicas packed: nothing will come by to do it later.
        if replicas and isinstance(self._rows[slot], Bundle):
            self._pack_replicas(slot, replicas)
        else:
            self._replicas[slot] = replicas

    # -- packing -------------------------------------------------------------------------------
    def _own(self, slot: int) -> SessionKey:
        key = self._keys[slot]
        assert key is not None
        return key

    def _unpack(self, slot: int, bundle: Bundle[SessionKey]) -> Session:
        return session_from_bytes(*self._cold.get(bundle, self._own(slot)))

    def _unpack_replicas(self, slot: int, bundle: Bundle[SessionKey]) -> tuple[Replica, ...]:
        _, row = self._cold_replicas.get(bundle, self._own(slot))
        return replicas_from_bytes(row)

    def _pack_replicas(self, slot: int, replicas: tuple[Replica, ...]) -> None:
        row = replicas_to_bytes(replicas)
        self._replicas[slot] = self._cold_replicas.put(self._own(slot), row)

    def _drop(self, slot: int, bundle: Bundle[SessionKey]) -> None:
        """Whoever calls says what is in its place."""
        for key, row in self._cold.drop(bundle, self._own(slot)):
            self._rows[self._slot[key]] = self._cold.put(key, row)

    def _drop_replicas(self, slot: int) -> None:
        bundle = self._replicas[slot]
        self._replicas[slot] = ()
        if isinstance(bundle, Bundle):
            for key, row in self._cold_replicas.drop(bundle, self._own(slot)):
                self._replicas[self._slot[key]] = self._cold_replicas.put(key, row)

    def _warm_up(self, slot: int, bundle: Bundle[SessionKey]) -> Session:
        session = self._unpack(slot, bundle)
        self._drop(slot, bundle)
        self._rows[slot] = session
        replicas = self._replicas[slot]
        if isinstance(replicas, Bundle):
            unpacked = self._unpack_replicas(slot, replicas)
            self._drop_replicas(slot)
            self._replicas[slot] = unpacked
        self._warm.append(slot)
        if len(self._warm) > self._hot:
            self._cool()
        return session

    def _cool(self) -> None:
        slot = self._warm.popleft()
        row = self._rows[slot]
        if row is None or isinstance(row, Bundle):
            return  # it has gone
        self._rows[slot] = self._cold.put(self._own(slot), session_to_bytes(row))
        replicas = self._replicas[slot]
        if replicas and not isinstance(replicas, Bundle):
            self._pack_replicas(slot, replicas)


class ReplicaTable(Mapping["SessionKey", "dict[tuple[str, bytes], Replica]"]):
    """Where sessions' KV lies: by session, and by worker. Replicas live with their session."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        # How many replicas of which session a worker has.
        self.of_worker: defaultdict[str, dict[SessionKey, int]] = defaultdict(dict)
        self.count_of: Counter[str] = Counter()

    def __getitem__(self, key: SessionKey) -> dict[tuple[str, bytes], Replica]:
        if not (found := self._sessions.replicas(key)):
            raise KeyError(key)
        return {replica.name: replica for replica in found}

    def __iter__(self) -> Iterator[SessionKey]:
        return (key for key in self._sessions if self._sessions.replicas(key))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def find(self, key: SessionKey, worker_id: str, head_hash: bytes) -> Replica | None:
        """One replica."""
        for replica in self._sessions.replicas(key):
            if replica.head_hash == head_hash and replica.worker.worker_id == worker_id:
                return replica
        return None

    def put(self, key: SessionKey, replica: Replica) -> Replica | None:
        """Enters a replica in the place of the one of its name, which it returns. KeyError when
        there is no such session."""
        name = replica.name
        before = None
        others = []
        for one in self._sessions.replicas(key):
            if one.name == name:
                before = one
                others.append(replica)
            else:
                others.append(one)
        if before is None:
            others.append(replica)
            key = self._sessions.own(key)
            of_worker = self.of_worker[name[0]]
            of_worker[key] = of_worker.get(key, 0) + 1
            self.count_of[name[0]] += 1
        self._sessions.put_replicas(key, tuple(others))
        return before

    def drop(self, key: SessionKey, name: tuple[str, bytes]) -> Replica:
        """Takes a replica out. KeyError when it is not there."""
        found = self._sessions.replicas(key)
        gone = next((one for one in found if one.name == name), None)
        if gone is None:
            raise KeyError(name)
        self._sessions.put_replicas(key, tuple(one for one in found if one is not gone))
        of_worker = self.of_worker[name[0]]
        of_worker[key] -= 1
        if not of_worker[key]:
            del of_worker[key]
        if not of_worker:
            del self.of_worker[name[0]]
        self.count_of[name[0]] -= 1
        return gone
