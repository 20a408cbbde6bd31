"""Sessions and leases as a store gives them: by column, each unpacked only when it is looked at.

A start takes up a million of each. What it must know of all of them lies in columns, the rest in
bundles, and the tables take both over as they are.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from kvshuttle.controlplane.model.bundles import Bundles
from kvshuttle.controlplane.model.packing import (
    lease_from_bytes,
    lease_to_bytes,
    leases_without_ids,
    session_from_bytes,
    session_to_bytes,
    turn_heads,
)
from kvshuttle.controlplane.model.terms import LeaseState, TurnState

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvshuttle.controlplane.model.bundles import Bundle
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef

__all__ = ["TABLE_COLUMNS", "PackedLeases", "PackedSessions"]

_T = TypeVar("_T")

TABLE_COLUMNS = (
    "state",
    "stopping",
    "source",
    "destination",
    "tenant",
    "create_ns",
    "deadline_ns",
    "seq",
)
"""What the table of leases keeps by column too."""
_COLUMNS = (*TABLE_COLUMNS, "epoch", "held", "plain")
"""`held`: blocks of its source. `plain`: granted, to be read by its turn, and nobody has asked it
to stop: as all but a few are."""


class _Packed(Sequence[_T]):
    """A sequence whose items are made of their rows as they are looked at. Those lie in `bundles`,
    each where `places` says."""

    bundles: Bundles[Any]
    places: list[Bundle[Any]]

    def __init__(self, items: Iterable[_T] = ()) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls, items: Iterable[_T]) -> Self:
        """These as columns, if they are not."""
        return items if isinstance(items, cls) else cls(items)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[_T]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class PackedSessions(_Packed["Session"]):
    """Sessions, and what must be known of them without unpacking them. Of those with turns that
    run their places, once a turn, with the turns' tokens and begins, and how many legs each worker
    has."""

    def __init__(self, sessions: Iterable[Session] = ()) -> None:
        self.keys: list[SessionKey] = []
        self.bundles: Bundles[SessionKey] = Bundles()
        self.places: list[Bundle[SessionKey]] = []
        self.update_ns: array[int] = array("q")
        self.active = bytearray()
        self.running: list[int] = []
        self.tokens: list[str] = []
        self.begin_ns: array[int] = array("q")
        self.turns_on: Counter[str] = Counter()
        known = list(sessions)
        self.extend(
            [one.key for one in known],
            [session_to_bytes(one) for one in known],
            np.array([one.update_ns for one in known], np.int64),
            np.array([one.active for one in known], np.uint8),
            np.array([len(one.running()) for one in known], np.uint16),
        )

    def extend(
        self,
        keys: list[SessionKey],
        rows: list[bytes],
        update_ns: npt.NDArray[np.int64],
        active: npt.NDArray[np.uint8],
        running: npt.NDArray[np.uint16],
    ) -> None:
        """Adds as many of each; `running` counts turns. msgspec.DecodeError, a ValueError, when one
        is none."""
        first = len(self.keys)
        self.keys += keys
        self.update_ns.frombytes(update_ns.tobytes())
        self.active += active.tobytes()
        places = np.flatnonzero(running).tolist()
        heads = [turn_heads(rows[at]) for at in places]
        # One list after the other: half the time of one loop, and there are a million.
        runs = int(TurnState.RUNNING)
        turns = [turn for several in heads for turn in several if turn.state == runs]
        self.running += [
            first + at
            for at, several in zip(places, heads, strict=True)
            for turn in several
            if turn.state == runs
        ]
        self.tokens += [turn.token for turn in turns]
        self.begin_ns.extend([turn.begin_ns for turn in turns])
        self.turns_on.update([turn.decode.worker.worker_id for turn in turns])
        self.turns_on.update([x.prefill.worker.worker_id for x in turns if x.prefill is not None])
        self.places += self.bundles.put_all(keys, rows)

    def latest_ns(self) -> int:
        """When one was changed last; 0: there are none."""
        return max(self.update_ns, default=0)

    def __getitem__(self, at: Any) -> Any:
        return session_from_bytes(*self.bundles.get(self.places[at], self.keys[at]))


class PackedLeases(_Packed["Lease"]):
    """Leases, with what a start must know of each: a million objects at once would be as much
    memory as all the rest. Boots and tenants stand in columns as their places in `named`."""

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self.ids: list[str] = []
        self.bundles: Bundles[str] = Bundles()
        self.places: list[Bundle[str]] = []
        self.tokens: list[str] = []
        self.columns: dict[str, array[int]] = {name: array("q") for name in _COLUMNS}
        self.names: dict[WorkerRef | str, int] = {}
        # Nothing has the number 0: see `extend`.
        self.named: list[WorkerRef | str] = [""]
        self._latest_ns = 0
        known = list(leases)
        self.extend([one.lease_id for one in known], [lease_to_bytes(one) for one in known])

    def _number(self, name: WorkerRef | str) -> int:
        number = self.names[name] = len(self.named)
        self.named.append(name)
        return number

    def extend(self, ids: Sequence[str], rows: Sequence[bytes]) -> None:
        """Adds packed leases. msgspec.DecodeError, a ValueError, when one is none."""
        leases = leases_without_ids(rows)
        self.ids += ids
        self.places += self.bundles.put_all(ids, rows)
        self.tokens += [x.turn_token for x in leases]
        names, number = self.names.get, self._number
        granted, active = int(LeaseState.GRANTED), int(LeaseState.ACTIVE)
        columns: dict[str, list[int]] = {
            "state": [x.state for x in leases],
            "stopping": [x.stop is not None for x in leases],
            "source": [names(x.source) or number(x.source) for x in leases],
            "destination": [names(x.destination) or number(x.destination) for x in leases],
            "tenant": [names(x.key.tenant) or number(x.key.tenant) for x in leases],
            "create_ns": [x.create_ns for x in leases],
            "deadline_ns": [x.deadline_ns for x in leases],
            "seq": [x.seq for x in leases],
            "epoch": [x.epoch for x in leases],
            "held": [(x.range or x.ask_range).length for x in leases],
            "plain": [
                granted <= x.state <= active and x.stop is None and not x.push and not x.eager
                for x in leases
            ],
        }
        for name, column in columns.items():
            self.columns[name].fromlist(column)
        times = (columns["create_ns"], [x.grant_ns for x in leases], [x.end_ns for x in leases])
        self._latest_ns = max(self._latest_ns, *(max(ns, default=0) for ns in times))

    def latest_ns(self) -> int:
        """The newest time in them; 0: there are none."""
        return self._latest_ns

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """One of `_COLUMNS`."""
        return np.array(self.columns[name], np.int64)

    def sort(self) -> None:
        """Oldest first."""
        order = np.lexsort((self.column("seq"), self.column("epoch")))
        for name, column in self.columns.items():
            self.columns[name] = array("q")
            self.columns[name].frombytes(np.array(column, np.int64)[order].tobytes())
        at = order.tolist()
        self.ids = [self.ids[i] for i in at]
        self.places = [self.places[i] for i in at]
        self.tokens = [self.tokens[i] for i in at]

    def __getitem__(self, at: Any) -> Any:
        return lease_from_bytes(*self.bundles.get(self.places[at], self.ids[at]))
