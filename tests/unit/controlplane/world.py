"""A registry with a clock that a test sets, and agents that a test plays by hand."""

from __future__ import annotations

import itertools
from typing import Any

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.effects import Decision, Effects
from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.reports import (
    Descriptors,
    Hello,
    ReplicaReport,
    StopReport,
)
from kvshuttle.controlplane.model.session import Turn
from kvshuttle.controlplane.model.terms import (
    Leg,
    ReplicaState,
    SessionKey,
    TransferOutcome,
    TransferStats,
    WorkerRef,
    WorkerRole,
)
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.store import MemoryStore

KEY = SessionKey("t", "s")


def hello(worker_id: str, role: WorkerRole, **more: Any) -> Hello:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "boot_id": f"boot-of-{worker_id}",
        "role": role,
        "url": f"http://{worker_id}",
        "fingerprint": (("model", "m"),),
        "block_size": 32,
        "num_blocks": 1_000,
        "bytes_per_block": 736_000,
        "prefix_caching": True,
        "num_ranks": 1,
        "ranks": ("rank",),
        "highest_epoch": 0,
        "lineage_id": "",
        "clock": 5,
    }
    return Hello(**(fields | more))


class World:
    """Every event goes through `do`, which keeps the store and the commands."""

    def __init__(self, limits: Limits | None = None, store: MemoryStore | None = None) -> None:
        self.limits = limits or Limits()
        self.store = store or MemoryStore()
        self.now = 1_000 * SECOND
        self.sent: list[tuple[WorkerRef, c.Command]] = []
        self.effects = Effects([], [], [], [], [])
        self._tokens = itertools.count(1)
        self.start()

    def start(self) -> None:
        """As after a crash: only the store remembers."""
        snapshot = self.store.load()
        self.registry = Registry(
            self.limits, Planner(self.limits.min_tokens, self.limits.direct_tokens)
        )
        self.do(self.registry.start(self.now, snapshot, "lineage"))

    @property
    def state(self) -> Any:
        return self.registry.state

    def do(self, decision: Decision[Any]) -> Any:
        self.effects = decision.effects
        self.store.commit(decision.effects.records)
        self.sent += decision.effects.commands
        return decision.result

    def told(self, ref: WorkerRef, kind: type[Any]) -> list[Any]:
        """Commands of a kind that a boot was sent, oldest first; taken out."""
        found = [command for to, command in self.sent if to == ref and isinstance(command, kind)]
        self.sent = [(to, x) for to, x in self.sent if not (to == ref and isinstance(x, kind))]
        return found

    def connect(self, worker_id: str, role: WorkerRole, **more: Any) -> WorkerRef:
        welcome = self.do(self.registry.hello(self.now, hello(worker_id, role, **more)))
        ref: WorkerRef = welcome.worker.ref
        return ref

    def pair(self) -> tuple[WorkerRef, WorkerRef]:
        return (
            self.connect("p", WorkerRole.PREFILL),
            self.connect("d", WorkerRole.DECODE),
        )

    def lose(self, ref: WorkerRef) -> None:
        generation = self.state.workers[ref.worker_id].stream_generation
        self.do(self.registry.stream_lost(self.now, ref, generation, "CLOSED"))

    def begin(self, **more: Any) -> Turn:
        ask = BeginTurn(**({"key": KEY, "token": f"token-{next(self._tokens)}"} | more))
        turn: Turn = self.do(self.registry.begin_turn(self.now, ask))
        return turn

    def agent(self, ref: WorkerRef, event: str, *args: Any) -> None:
        batch = self.registry.agent(self.now, ref)
        getattr(batch, event)(*args)
        self.do(batch.finish())

    def offer(
        self, ref: WorkerRef, blocks: int, turn: Turn | None = None, leg: Leg = Leg.DECODE
    ) -> None:
        report = ReplicaReport(
            key=KEY,
            head_hash=bytes([blocks]),
            num_blocks=blocks,
            num_tokens=blocks * 32,
            state=ReplicaState.HARD,
            hold_remaining_ns=300 * SECOND,
            turn_token=turn.token if turn else "",
            leg=leg,
        )
        self.agent(ref, "offered", report)

    def harden(self, order: c.Harden, ref: WorkerRef) -> None:
        blocks = Descriptors(order.range, order.head_hash, "ids")
        self.agent(ref, "hardened", order.lease_id, order.version, blocks)

    def stop(
        self, ref: WorkerRef, lease_id: str, outcome: TransferOutcome = TransferOutcome.PUBLISHED
    ) -> None:
        stats = TransferStats(blocks=1, tokens=32, bytes=736_000, transfer_ns=1)
        self.agent(ref, "stopped", lease_id, StopReport(outcome, "", stats))

    def lease(self, lease_id: str) -> Lease:
        lease: Lease = self.state.leases[lease_id]
        return lease

    def tick(self, seconds: float = 0) -> None:
        self.now += int(seconds * SECOND)
        self.do(self.registry.tick(self.now))

    def keep_alive(self, seconds: float) -> None:
        """Time passes, and every connected worker is heard."""
        until = self.now + int(seconds * SECOND)
        while self.now < until:
            self.now = min(until, self.now + 2 * SECOND)
            for worker in list(self.state.workers.values()):
                if worker.connected:
                    self.do(self.registry.agent(self.now, worker.ref).finish())
            self.tick()

    def returning(self) -> tuple[WorkerRef, WorkerRef, Turn, c.Harden]:
        """A pair, and a turn whose return lease waits for its source."""
        prefill, decode = self.pair()
        self.begin()
        self.offer(decode, 20)
        turn = self.begin()
        (order,) = self.told(decode, c.Harden)
        return prefill, decode, turn, order


def split(ranks: int, total: int = 4) -> dict[str, Any]:
    """What a hello says of so many KV heads over so many ranks."""
    share = max(1, total // ranks)
    return {
        "num_ranks": ranks,
        "ranks": ("rank",) * ranks,
        "heads": tuple((i * total // ranks, share) for i in range(ranks)),
        "fingerprint": (("kv_heads", str(total)), ("model", "m")),
    }
