"""Holds: extra references on vLLM blocks, the one mechanism that keeps memory in place.

A replica, a lease's source range, a landing zone and a quarantine are all holds. vLLM may finish,
abort or preempt any request at any time; a block under a hold is not handed out again until the
last hold on it has ended.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["BlockStore", "Hold", "HoldKind", "HoldTable"]


class BlockStore(Protocol):
    """The engine's pool of KV blocks, as far as holds need it. Scheduler thread only."""

    def touch(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each block."""

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes one reference from each block; the last ones of the sequence are reused first."""

    def free_watched(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        """Like `free`; `on_reuse` hears of each block that is handed out again, in the midst of
        that, so it must only take a note. A block has one watcher."""

    def allocate(self, count: int) -> list[int]:
        """Free blocks, one reference each, whatever they had cached gone. At most `free_blocks`."""

    def insert(self, block_hash: bytes, block_id: int, num_tokens: int) -> None:
        """Enters a block into the prefix cache; `num_tokens` end with it, from the first one on."""

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that the engine's prefix cache has under this hash, if any."""

    @property
    def free_blocks(self) -> int:
        """Blocks without a reference."""

    @property
    def total_blocks(self) -> int:
        """Blocks that can be used at all."""

    @property
    def caching(self) -> bool:
        """Whether the engine's prefix cache is on."""


class HoldKind(enum.Enum):
    """What a hold is for."""

    REPLICA = "replica"
    SOURCE = "source"
    LANDING = "landing"
    QUARANTINE = "quarantine"


@dataclass(eq=False)
class Hold:
    """One set of references. Ends exactly once, through :meth:`HoldTable.release`."""

    kind: HoldKind
    block_ids: tuple[int, ...]
    number: int
    ended: bool = field(default=False)


class HoldTable:
    """Every hold of one engine."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._numbers = itertools.count(1)
        self._holds: set[Hold] = set()
        self._references: Counter[int] = Counter()
        self._quarantined: Counter[int] = Counter()
        self._moving = 0

    def take(self, kind: HoldKind, block_ids: Sequence[int]) -> Hold:
        """References the blocks, which must be referenced or cached at this moment."""
        self._store.touch(block_ids)
        return self.adopt(kind, block_ids)

    def adopt(self, kind: HoldKind, block_ids: Sequence[int]) -> Hold:
        """Makes a hold of references that the caller has, one a block."""
        hold = Hold(kind, tuple(block_ids), next(self._numbers))
        self._holds.add(hold)
        self._references.update(hold.block_ids)
        self._moving += kind is not HoldKind.REPLICA
        if kind is HoldKind.QUARANTINE:
            self._quarantined.update(hold.block_ids)
        return hold

    def quarantine(self, hold: Hold) -> None:
        """Turns a landing hold into a quarantine: its writer has not been seen to stop."""
        if hold.ended or hold.kind is HoldKind.QUARANTINE:
            return
        hold.kind = HoldKind.QUARANTINE
        self._quarantined.update(hold.block_ids)

    def release(self, hold: Hold, on_reuse: Callable[[int], None] | None = None) -> None:
        """Ends a hold; ending it again does nothing. `on_reuse`: see `BlockStore.free_watched`."""
        if hold.ended:
            return
        hold.ended = True
        self._holds.discard(hold)
        self._moving -= hold.kind is not HoldKind.REPLICA
        _subtract(self._references, hold.block_ids)
        if hold.kind is HoldKind.QUARANTINE:
            _subtract(self._quarantined, hold.block_ids)
        # Reversed by the store: the tail of a chain is worth least.
        if on_reuse is None:
            self._store.free(hold.block_ids)
        else:
            self._store.free_watched(hold.block_ids, on_reuse)

    @property
    def count(self) -> int:
        """Number of holds."""
        return len(self._holds)

    @property
    def moving(self) -> bool:
        """Whether any hold is more than a replica: blocks that are, or may be, read or written."""
        return self._moving > 0

    @property
    def held_blocks(self) -> int:
        """Blocks under at least one hold."""
        return len(self._references)

    @property
    def quarantined_blocks(self) -> int:
        """Blocks under at least one quarantine."""
        return len(self._quarantined)


def _subtract(counter: Counter[int], block_ids: Sequence[int]) -> None:
    for block_id in block_ids:
        left = counter[block_id] - 1
        if left:
            counter[block_id] = left
        else:
            del counter[block_id]
