"""A model of vLLM's BlockPool in which every block knows what its bytes really are.

The rules are vLLM 0.32's (`v1/core/block_pool.py`): what is referenced is not handed out; a block
that is handed out loses its hash; uncached blocks are reused first, the last freed soonest; two
blocks may have one hash. A block's *content* is, for each rank, the hash of the chain whose KV its
bytes are, or garbage; a hand-out makes it garbage at once, which is the worst that reuse can do.
Beside it is what vLLM's hashes do not say: the version of the weights that computed it.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tests.simulation.kernel import Violation

__all__ = ["Block", "BlockPool", "Weights", "partial_hash"]


def partial_hash(block_hash: bytes, tokens: int) -> bytes:
    """Names, and is the content of, a block of which so many tokens are written."""
    return hashlib.blake2b(block_hash + tokens.to_bytes(2, "big"), digest_size=8).digest()


class Weights:
    """What an engine computes with, by number."""

    version = 0


class Block:
    """One block of the pool."""

    __slots__ = (
        "block_hash",
        "block_id",
        "content",
        "generation",
        "made_with",
        "partial",
        "pending",
        "refs",
        "watcher",
        "weights",
    )

    def __init__(self, block_id: int, ranks: int, weights: Weights) -> None:
        self.block_id = block_id
        self.weights = weights
        self.refs = 0
        self.block_hash: bytes | None = None
        self.content: list[bytes] = [b""] * ranks
        self.made_with: list[int] = [0] * ranks
        self.generation = 0
        # A step that is not over writes it: cached already, as in vLLM, but not yet filled.
        self.pending = False
        # Of which whole block the engine has computed so many tokens, if not all.
        self.partial: tuple[bytes, int] | None = None
        self.watcher: Callable[[int], None] | None = None

    def holds(self, block_hash: bytes) -> bool:
        """Whether its bytes are the KV of this hash by its engine's weights, on every rank."""
        right = all(content == block_hash for content in self.content)
        return right and all(version == self.weights.version for version in self.made_with)

    def takes(self, rank: int, source: Block, source_rank: int) -> None:
        """Another block's bytes are written over those of a rank."""
        self.content[rank] = source.content[source_rank]
        self.made_with[rank] = source.made_with[source_rank]

    def begins_with(self, tail_hash: bytes, tokens: int) -> bool:
        """Whether its bytes are the KV of these tokens, and perhaps of what follows them."""
        if self.partial is None:
            whole = self.content[0]
            more = self.holds(whole) and partial_hash(whole, tokens) == tail_hash
        else:
            whole, has = self.partial
            more = has >= tokens and self.holds(partial_hash(whole, has))
            more = more and partial_hash(whole, tokens) == tail_hash
        return more or self.holds(tail_hash)


class BlockPool:
    """Implements `kvshuttle.dataplane.holds.BlockStore`; `on_handout`, `on_publish` and
    `on_compute` are where the invariants look."""

    def __init__(
        self,
        name: str,
        total: int,
        rng: random.Random,
        *,
        ranks: int,
        caching: bool,
        adversarial: bool,
    ) -> None:
        self.name = name
        self.caching = caching
        self.weights = Weights()
        self.blocks = [Block(i, ranks, self.weights) for i in range(total)]
        self.on_handout: Callable[[Block], None] = lambda _: None
        self.on_publish: Callable[[Block], None] = lambda _: None
        self.on_compute: Callable[[Block], None] = lambda _: None
        self._rng = rng
        # Any free block may come next, where vLLM's order would hide a mistake.
        self._adversarial = adversarial
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(total))
        self._cache: dict[bytes, dict[int, None]] = {}
        self._handouts = 0

    # BlockStore.

    def touch(self, block_ids: Sequence[int]) -> None:
        """One more reference each."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.refs == 0:
                del self._free[block_id]
            block.refs += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One reference less each; the last of them is reused first."""
        cached = []
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            if block.refs <= 0:
                raise Violation("holds", f"{self.name}: block {block_id} is freed once too often")
            block.refs -= 1
            if block.refs:
                continue
            if block.block_hash is None:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=False)
            else:
                cached.append(block_id)
        for block_id in cached:
            self._free[block_id] = None

    def free_watched(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        """Like `free`, to the end of the queue; a block has one watcher, the newest."""
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            if block.refs <= 0:
                raise Violation("holds", f"{self.name}: block {block_id} is freed once too often")
            block.refs -= 1
            block.watcher = on_reuse
            if block.refs == 0:
                self._free[block_id] = None

    def allocate(self, count: int) -> list[int]:
        """Hands out blocks, one reference each."""
        if count > len(self._free):
            raise ValueError(f"{self.name}: {count} blocks wanted, {len(self._free)} are free")
        return [self._hand_out() for _ in range(count)]

    def insert(self, block_hash: bytes, block_id: int, num_tokens: int) -> None:
        """Enters a block into the prefix cache; its bytes must be right."""
        del num_tokens
        block = self.blocks[block_id]
        if block.refs <= 0:
            raise Violation("publish", f"{self.name}: block {block_id} is published unreferenced")
        if not block.holds(block_hash):
            raise Violation(
                "publish",
                f"{self.name}: block {block_id} is published as {block_hash.hex()} but holds "
                f"{[c.hex() or 'nothing' for c in block.content]}",
            )
        self._enter(block, block_hash)

    def lookup(self, block_hash: bytes) -> int | None:
        """The first block cached under a hash."""
        found = self._cache.get(block_hash)
        return next(iter(found)) if found else None

    @property
    def free_blocks(self) -> int:
        """Blocks without a reference."""
        return len(self._free)

    @property
    def total_blocks(self) -> int:
        """All blocks."""
        return len(self.blocks)

    # The engine's own.

    def insert_pending(self, block_hash: bytes, block_id: int) -> None:
        """vLLM caches a block when it schedules the step that fills it."""
        block = self.blocks[block_id]
        block.pending = True
        if self.caching:
            self._enter(block, block_hash)

    def write(self, block_id: int, content: bytes) -> None:
        """The engine computes a block's KV."""
        block = self.blocks[block_id]
        self.on_compute(block)
        block.pending = False
        block.partial = None
        block.content = [content] * len(block.content)
        block.made_with = [self.weights.version] * len(block.content)

    def write_partial(self, block_id: int, whole: bytes, tokens: int) -> None:
        """The engine computes a block's KV up to so many tokens; what a later step fills stays
        pending."""
        block = self.blocks[block_id]
        pending = block.pending
        self.write(block_id, partial_hash(whole, tokens))
        block.pending, block.partial = pending, (whole, tokens)

    def reset(self) -> bool:
        """Empties the prefix cache, unless anything is referenced."""
        if self.free_blocks < self.total_blocks:
            return False
        self._cache.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    # Inside.

    def _enter(self, block: Block, block_hash: bytes) -> None:
        self.on_publish(block)
        if block.block_hash is not None:
            return
        block.block_hash = block_hash
        self._cache.setdefault(block_hash, {})[block.block_id] = None

    def _hand_out(self) -> int:
        if self._adversarial:
            block_id = self._rng.choice(list(self._free))
            del self._free[block_id]
        else:
            block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        watcher, block.watcher = block.watcher, None
        if watcher is not None:
            watcher(block_id)
        if block.block_hash is not None:
            of_hash = self._cache[block.block_hash]
            del of_hash[block_id]
            if not of_hash:
                del self._cache[block.block_hash]
            block.block_hash = None
        self.on_handout(block)
        self._handouts += 1
        block.refs = 1
        block.generation += 1
        block.pending = False
        block.partial = None
        block.content = [b"\xff%d" % self._handouts] * len(block.content)
        return block_id
