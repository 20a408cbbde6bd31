"""What stands in for vLLM, gRPC and time, and what is built of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.transfers import Results, Transfers
from kvshuttle.dataplane.transport import LocalRegion
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2

_Wire = TypeVar("_Wire")


class FakePool:
    """Reference counts and a prefix cache, with vLLM's rules: what is referenced is not reused."""

    def __init__(self, total: int = 100, *, caching: bool = True) -> None:
        self.total_blocks = total
        self.caching = caching
        self.references: Counter[int] = Counter()
        self.cache: dict[bytes, int] = {}
        self.watchers: dict[int, Callable[[int], None]] = {}

    def touch(self, block_ids: Sequence[int]) -> None:
        self.references.update(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.references[block_id] > 0, f"block {block_id} was not referenced"
            self.references[block_id] -= 1

    def free_watched(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        self.free(block_ids)
        self.watchers.update(dict.fromkeys(block_ids, on_reuse))

    def allocate(self, count: int) -> list[int]:
        """Blocks that nothing has cached first, from the highest number down; then the others."""
        cached = set(self.cache.values())
        free = [i for i in range(self.total_blocks, 0, -1) if not self.references[i]]
        chosen = sorted(free, key=lambda i: i in cached)[:count]
        assert len(chosen) == count, "more blocks than are free"
        for block_id in chosen:
            self.reuse(block_id)
        self.touch(chosen)
        return chosen

    def reuse(self, block_id: int) -> None:
        """vLLM hands a block out: what it had cached is gone, and its watcher hears of it."""
        assert not self.references[block_id], f"block {block_id} is referenced"
        self.cache = {h: i for h, i in self.cache.items() if i != block_id}
        watcher = self.watchers.pop(block_id, None)
        if watcher is not None:
            watcher(block_id)

    def insert(self, block_hash: bytes, block_id: int, num_tokens: int) -> None:
        assert self.references[block_id], f"block {block_id} is not referenced"
        self.cache[block_hash] = block_id

    def lookup(self, block_hash: bytes) -> int | None:
        return self.cache.get(block_hash)

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - sum(1 for n in self.references.values() if n)


class FakeOutbox:
    """Keeps what is said."""

    def __init__(self, ranks: int = 1) -> None:
        self.num_ranks = ranks
        self.connected = True
        self.events: list[agent_pb2.AgentEvent] = []
        self.orders: list[m.ToMover] = []

    def emit(self, event: agent_pb2.AgentEvent) -> None:
        self.events.append(event)

    def order(self, message: m.ToMover, rank: int | None = None) -> None:
        self.orders.append(message)

    def take(self, kind: str) -> list[Any]:
        """Events of this kind so far; forgets them."""
        found = [getattr(e, kind) for e in self.events if e.WhichOneof("event") == kind]
        self.events = [e for e in self.events if e.WhichOneof("event") != kind]
        return found


class FakeClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1_000 * NS

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * NS)


class FakeMover(Generic[_Wire]):
    """Transfers with everything around them played by hand; `wire` is their transport."""

    def __init__(self, wire: _Wire, regions: Sequence[LocalRegion] = ()) -> None:
        self.wire, self.clock, self.results = wire, FakeClock(), Results()
        self.told: list[m.FromMover] = []
        self.transfers = Transfers(
            self.wire,  # type: ignore[arg-type]
            list(regions),
            self.results,
            self.told.append,
            Faults(),
            self.clock,
        )


def grant_of(
    hashes: Sequence[bytes], as_of: int, *, lease: str = "l1", ttl: float = 30, **more: Any
) -> agent_pb2.Grant:
    """The right to read these blocks of another worker's, for `ttl` seconds."""
    fields: dict[str, Any] = {
        "lease_id": lease,
        "version": 2,
        "turn_token": "t",
        "direction": types_pb2.DIRECTION_RETURN,
        "source": types_pb2.WorkerRef(worker_id="other", incarnation=1),
        "blocks": types_pb2.BlockDescriptors(
            range=types_pb2.BlockRange(start=0, end=len(hashes)),
            block_ids=range(500, 500 + len(hashes)),
            hashes=b"".join(hashes),
            hash_size=32,
        ),
        "as_of": as_of,
    }
    grant = agent_pb2.Grant(**(fields | more))
    grant.ttl.FromNanoseconds(int(ttl * NS))
    return grant
