"""What leaves before it is durable, what waits for company, and what is left out of the log."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvshuttle.controlplane import observer
from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.effects import Fact, Record
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.reports import Descriptors, Hello, ReplicaReport
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Leg,
    ReplicaState,
    ReturnPolicy,
    SessionKey,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
)
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.controlplane.observer import Metrics
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.runtime import Runtime, ahead
from kvshuttle.controlplane.services import agents
from kvshuttle.controlplane.services.agents import Streams, _Stream

KEY = SessionKey("t", "s")
HEAD = b"h" * 32


class GatedStore:
    """Durable when the test opens the gate."""

    kind = "gated"
    durable = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def load(self) -> Snapshot:
        return Snapshot()

    def commit(self, records: Iterable[Record]) -> None:
        assert self.gate.wait(10)

    def close(self) -> None:
        pass


class Sink:
    """Streams, watchers, observer and clock of a runtime under test."""

    def __init__(self) -> None:
        self.sent: list[tuple[WorkerRef, c.Command]] = []
        self.generations: dict[str, int] = {}
        self.now = 1_000

    def reaches(self, ref: WorkerRef, generation: int) -> bool:
        return self.generations.get(ref.worker_id) == generation

    def deliver(self, commands: Iterable[tuple[WorkerRef, c.Command]]) -> None:
        self.sent += commands

    def disconnect(self, *_: Any) -> None: ...
    def publish(self, *_: Any) -> None: ...
    def fact(self, *_: Any) -> None: ...
    def committed(self, *_: Any) -> None: ...
    def late(self, *_: Any) -> None: ...
    def now_ns(self) -> int:
        self.now += 1
        return self.now

    def kinds(self) -> list[str]:
        return [type(command).__name__ for _, command in self.sent]


def hello(worker_id: str, role: WorkerRole) -> Hello:
    return Hello(
        worker_id=worker_id,
        boot_id=f"boot-{worker_id}",
        role=role,
        url="http://x",
        fingerprint=(),
        block_size=32,
        num_blocks=1_000,
        bytes_per_block=1,
        prefix_caching=True,
        num_ranks=1,
        ranks=(),
        highest_epoch=0,
        lineage_id="",
        clock=1,
        vllm_version="",
        agent_version="",
        nixl_backend="",
        replicas=(),
        leases=(),
    )


class Bench:
    """A runtime with a prefill and a decode worker, and a session that decode holds."""

    def __init__(self) -> None:
        self.store, self.sink = GatedStore(), Sink()
        limits = dataclasses.replace(Limits(), eager=False)
        self.registry = Registry(limits, Planner())
        sink = self.sink
        self.runtime = Runtime(self.registry, self.store, sink, sink, sink, sink)

    async def _connect(self, name: str, role: WorkerRole) -> WorkerRef:
        says = hello(name, role)
        welcome = await self.runtime.apply(lambda now: self.registry.hello(now, says))
        self.sink.generations[name] = welcome.worker.stream_generation
        return welcome.worker.ref

    async def set_up(self) -> None:
        apply, registry = self.runtime.apply, self.registry
        await apply(lambda now: registry.start(now, Snapshot(), "lineage"))
        self.p = await self._connect("p", WorkerRole.PREFILL)
        self.d = await self._connect("d", WorkerRole.DECODE)
        turn = await apply(lambda now: registry.begin_turn(now, BeginTurn(KEY, "token-1")))

        def offer(now: int) -> Any:
            batch = registry.agent(now, self.d)
            batch.offered(
                ReplicaReport(KEY, HEAD, 10, 320, ReplicaState.HARD, 10**12, "token-1", Leg.DECODE)
            )
            return batch.finish()

        await apply(offer)
        await apply(lambda now: registry.end_turn(now, KEY, turn.number, TurnOutcome.COMPLETED))
        self.sink.sent.clear()

    def begin(self) -> asyncio.Future[Any]:
        ask = BeginTurn(KEY, "token-2", policy=ReturnPolicy.ALWAYS)
        return self.runtime.post(lambda now: self.registry.begin_turn(now, ask))

    def harden(self) -> None:
        (order,) = [x for _, x in self.sink.sent if isinstance(x, c.Harden)]

        def event(now: int) -> Any:
            batch = self.registry.agent(now, self.d)
            blocks = Descriptors(BlockRange(0, 10), HEAD, None)
            batch.hardened(order.lease_id, order.version, blocks)
            return batch.finish()

        self.runtime.forget(event)


async def test_a_source_is_asked_before_the_lease_is_durable_and_nobody_is_granted() -> None:
    bench = Bench()
    await bench.set_up()
    bench.store.gate.clear()
    begun = bench.begin()
    assert sorted(bench.sink.kinds()) == ["ExpectTurn", "ExpectTurn", "Harden"]
    bench.harden()
    await asyncio.sleep(0.05)
    # The source holds, and has said so: still nothing is granted and nobody has a token.
    assert "Grant" not in bench.sink.kinds()
    assert not begun.done()
    bench.store.gate.set()
    await asyncio.wait_for(begun, 10)
    await asyncio.wait_for(bench.runtime.settled(), 10)
    assert bench.sink.kinds().count("Grant") == 1
    assert bench.sink.kinds().count("Harden") == 1
    assert bench.sink.kinds().count("ExpectTurn") == 2
    await bench.runtime.close()


async def test_nothing_overtakes_a_hello() -> None:
    bench = Bench()
    await bench.set_up()
    bench.sink.generations["d"] -= 1  # the newer stream's hello is being written
    bench.store.gate.clear()
    begun = bench.begin()
    assert bench.sink.kinds() == ["ExpectTurn"]  # prefill's
    bench.store.gate.set()
    await asyncio.wait_for(begun, 10)
    assert sorted(bench.sink.kinds()) == ["ExpectTurn", "ExpectTurn", "Harden"]
    await bench.runtime.close()


async def test_a_lease_of_an_epoch_that_is_not_durable_is_not_heard_of() -> None:
    bench = Bench()
    await bench.set_up()
    bench.registry.state.epoch += 1
    bench.store.gate.clear()
    begun = bench.begin()
    assert bench.sink.kinds() == []
    bench.store.gate.set()
    await asyncio.wait_for(begun, 10)
    assert "Harden" in bench.sink.kinds()
    await bench.runtime.close()


def test_a_push_is_not_announced_ahead() -> None:
    d = WorkerRef("d", 1)
    harden = c.Harden("l", 1, KEY, HEAD, BlockRange(0, 1), 1, 1, d)
    expect = c.ExpectTurn("t", KEY, 1, Leg.DECODE, "", False, 1, 1, 1)
    pushed = c.ExpectTurn(
        "t", KEY, 1, Leg.PREFILL, "", False, 1, 1, 1, push=c.PushPlan("l", 1, d, 1, 1, 1)
    )
    stop = c.Revoke("l", 1, "X", "")
    commands: list[tuple[WorkerRef, c.Command]] = [(d, stop), (d, harden), (d, expect), (d, pushed)]
    now, later = ahead(commands, lambda _: True)
    assert (now, later) == ([(d, harden), (d, expect)], [(d, stop), (d, pushed)])
    assert ahead([(d, expect)], lambda _: True) == ([], [(d, expect)])


# -- company ---------------------------------------------------------------------------------------


async def test_what_nobody_waits_for_goes_with_what_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents, "COMPANY_S", 0.2)
    streams, ref = Streams(Limits()), WorkerRef("d", 1)
    stream = _Stream(ref, "boot", 1)
    streams.attach(stream)
    forget, stopped = c.ForgetTurn("t", Leg.DECODE), c.ReaderStopped("l", 1)
    streams.deliver([(ref, forget), (ref, stopped)])
    assert not stream.wake.is_set()
    revoke = c.Revoke("l", 1, "X", "")
    streams.deliver([(ref, revoke)])
    assert stream.wake.is_set()
    assert stream.queue == [forget, stopped, revoke]
    # Taken; what comes then has its own time, whatever is left of the first one's.
    stream.queue.clear()
    stream.wake.clear()
    await asyncio.sleep(0.1)
    streams.deliver([(ref, forget)])
    await asyncio.sleep(0.15)
    assert not stream.wake.is_set()
    async with asyncio.timeout(5):
        await stream.wake.wait()


# -- the log ---------------------------------------------------------------------------------------


class Lines:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def is_enabled_for(self, _: int) -> bool:
        return False

    def info(self, name: str, **values: Any) -> None:
        self.said.append((name, values))


def test_a_burst_of_one_kind_of_fact_does_not_flood_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, now = Lines(), 5.0
    monkeypatch.setattr(observer, "log", lines)
    monkeypatch.setattr(
        "kvshuttle.controlplane.observer.time", SimpleNamespace(monotonic=lambda: now)
    )
    metrics = Metrics()

    def expire() -> None:
        metrics.fact(
            Fact("lease_ended", {"direction": "RETURN", "state": "EXPIRED", "reason": "DEADLINE"})
        )

    for _ in range(1_000):
        expire()
    assert len(lines.said) == observer.LINES_A_SECOND
    now = 6.5
    expire()
    assert lines.said[-1][1]["left_out"] == 1_000 - observer.LINES_A_SECOND
    counted = metrics.registry.get_sample_value(
        "kvshuttle_leases_ended_total",
        {"direction": "RETURN", "state": "EXPIRED", "reason": "DEADLINE"},
    )
    assert counted == 1_001
