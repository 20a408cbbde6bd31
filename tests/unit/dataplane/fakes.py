"""A pool, an outbox and a clock for the scheduler side: what stands in for vLLM, gRPC and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.v1 import agent_service_pb2 as agent_pb2


class FakePool:
    """Reference counts and a prefix cache, with vLLM's rules: what is referenced is not reused."""

    def __init__(self, total: int = 100, *, caching: bool = True) -> None:
        self.total_blocks = total
        self.caching = caching
        self.references: Counter[int] = Counter()
        self.cache: dict[bytes, int] = {}

    def touch(self, block_ids: Sequence[int]) -> None:
        self.references.update(block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.references[block_id] > 0, f"block {block_id} was not referenced"
            self.references[block_id] -= 1

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
