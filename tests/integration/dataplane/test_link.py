"""The control link over a real gRPC stream: introduction, reconnection, refusal, wake-ups."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest
import structlog
import trustme
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvshuttle.dataplane import link
from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.dataplane.config import AgentConfig
from kvshuttle.dataplane.limits import EVENTS_BYTES
from kvshuttle.dataplane.link import ControlLink
from kvshuttle.dataplane.scheduler import FinishedRequest, SchedulerAgent
from kvshuttle.dataplane.tracing import AgentTraces
from kvshuttle.tracing import Tracing
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.integration.dataplane.scripted_control_plane import ScriptedControlPlane, Stream
from tests.support.certificates import issue_for_uri
from tests.unit.dataplane.fakes import FakePool


class Engine:
    """A scheduler thread that sleeps until it is woken, as an idle engine does."""

    def __init__(self, port: int, tls: Mapping[str, str] | None = None) -> None:
        config = AgentConfig.parse(
            {
                "control_plane": f"127.0.0.1:{port}",
                "worker_id": "w",
                "role": "decode",
                "url": "http://127.0.0.1:1",
                **(tls or {"insecure": True}),
            }
        )
        self._woken = threading.Event()
        self._calls: list[Callable[[], None]] = []
        self._stopping = False
        self.wakes = 0
        self.pool = FakePool()
        self.link = ControlLink(config, [], self._hello, self._wake)
        self.agent = SchedulerAgent(
            self.pool,
            self.link,
            boottime_ns,
            block_size=32,
            worker_id="w",
            counts=lambda: (0, 0),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.link.start(self.agent)

    def _hello(self) -> agent_pb2.AgentHello:
        return agent_pb2.AgentHello(
            worker_id="w",
            boot_id="boot-1",
            role=types_pb2.WORKER_ROLE_DECODE,
            url="http://127.0.0.1:1",
            block_size=32,
            num_blocks=100,
            bytes_per_block=1,
            clock=boottime_ns(),
            highest_epoch=self.agent.highest_epoch,
            lineage_id=self.agent.lineage,
            replicas=self.agent.source.inventory(),
            leases=self.agent.lease_inventory(),
        )

    def _wake(self) -> None:
        self.wakes += 1
        self._woken.set()

    def _run(self) -> None:
        while not self._stopping:
            self._woken.wait()
            self._woken.clear()
            while self._calls:
                self._calls.pop(0)()
            self.agent.drain()
            self.link.set_deadline(self.agent.next_deadline())

    def on_scheduler_thread(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._woken.set()

    def close(self) -> None:
        self.link.shutdown()
        self._stopping = True
        self._woken.set()
        self._thread.join(5)


@pytest.fixture
def control_plane() -> Iterator[ScriptedControlPlane]:
    server = ScriptedControlPlane()
    yield server
    server.stop()


@pytest.fixture
def engine(control_plane: ScriptedControlPlane) -> Iterator[Engine]:
    engine = Engine(control_plane.port)
    yield engine
    engine.close()


def opened(control_plane: ScriptedControlPlane) -> Stream:
    return control_plane.streams.get(timeout=20)


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def offer(engine: Engine, retention_s: float = 60) -> None:
    expect = agent_pb2.ExpectTurn(
        turn_token="t", tenant="a", session_id="s", leg=types_pb2.LEG_DECODE
    )
    expect.retention.FromMilliseconds(int(retention_s * 1000))

    def call() -> None:
        engine.agent._expect(expect)
        ids = (1, 2, 3)
        engine.pool.touch(ids)
        hashes = (b"a" * 32, b"b" * 32, b"c" * 32)
        engine.agent.finished(
            ("t", types_pb2.LEG_DECODE), FinishedRequest("r", hashes, ids, 100, False)
        )
        engine.pool.free(ids)

    engine.on_scheduler_thread(call)


def test_an_idle_engine_obeys_at_once(control_plane: ScriptedControlPlane, engine: Engine) -> None:
    stream = opened(control_plane)
    stream.welcome()
    offer(engine)
    offered = stream.next_event("offered")
    assert offered.num_blocks == 3
    stream.command(harden=harden_order(offered, "l1"))
    assert list(stream.next_event("hardened").blocks.block_ids) == [1, 2, 3]


def test_what_comes_and_goes_is_traced(
    control_plane: ScriptedControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(link, "traces_of", lambda _: AgentTraces(Tracing(provider), "w"))
    engine = Engine(control_plane.port)
    try:
        stream = opened(control_plane)
        stream.welcome()
        offer(engine)
        harden = agent_pb2.Harden(
            lease_id="l1",
            version=1,
            tenant="a",
            session_id="s",
            head_hash=stream.next_event("offered").head_hash,
            range=types_pb2.BlockRange(end=3),
            traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        )
        harden.ttl.FromSeconds(30)
        stream.command(harden=harden)
        stream.next_event("hardened")
    finally:
        engine.close()  # which ends what is open
    (span,) = exporter.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}") == ("kvshuttle.hold", "a" * 32)


def test_what_nobody_waits_for_goes_with_what_somebody_does(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    stream = opened(control_plane)
    stream.welcome()
    stream.next("heartbeat")
    active = agent_pb2.AgentEvent(active=agent_pb2.LeaseActive(lease_id="l"))
    stopped = agent_pb2.AgentEvent(stopped=agent_pb2.LeaseStopped(lease_id="l"))

    def call() -> None:
        engine.link.emit(active)
        engine.link.emit(stopped)

    engine.on_scheduler_thread(call)
    kinds = [x.WhichOneof("event") for x in stream.next("events").events]
    assert kinds == ["active", "stopped"]
    # Alone it goes too, a moment later.
    engine.on_scheduler_thread(lambda: engine.link.emit(active))
    assert [x.WhichOneof("event") for x in stream.next("events").events] == ["active"]


def test_heartbeats_carry_the_pool_and_a_moving_clock(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    stream = opened(control_plane)
    stream.welcome()
    first, second = stream.next("heartbeat"), stream.next("heartbeat")
    assert second.clock > first.clock
    assert first.pool.total_blocks == 100


def test_a_new_stream_starts_with_the_whole_inventory(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    stream = opened(control_plane)
    stream.welcome(epoch=7)
    offer(engine)
    stream.next_event("offered")
    stream.close()
    again = opened(control_plane)
    hello = again.welcome(epoch=8)
    assert [r.num_blocks for r in hello.replicas] == [3]
    assert (hello.highest_epoch, hello.lineage_id) == (7, "L")
    assert hello.boot_id == "boot-1"


def harden_order(offered: agent_pb2.ReplicaOffered, lease_id: str) -> agent_pb2.Harden:
    order = agent_pb2.Harden(
        lease_id=lease_id,
        version=1,
        tenant="a",
        session_id="s",
        head_hash=offered.head_hash,
        range=types_pb2.BlockRange(end=3),
    )
    order.ttl.FromSeconds(30)
    return order


def test_what_an_ended_stream_had_queued_is_not_obeyed_after_the_next_hello(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    """The engine computes one long step, and a command waits for its end. The next hello says that
    there is no such lease, so there must not come to be one."""
    stream = opened(control_plane)
    stream.welcome()
    offer(engine)
    offered = stream.next_event("offered")
    step_over = threading.Event()

    def compute() -> None:
        step_over.wait(20)

    engine.on_scheduler_thread(compute)
    wakes = engine.wakes
    stream.command(harden=harden_order(offered, "queued"))
    until(lambda: engine.wakes > wakes)
    stream.close()
    again = opened(control_plane)
    assert not again.welcome(epoch=2).leases
    again.command(harden=harden_order(offered, "asked anew"), epoch=2)
    step_over.set()
    assert again.next_event("hardened").lease_id == "asked anew"
    assert [x.lease_id for x in engine.agent.lease_inventory()] == ["asked anew"]


def test_many_large_answers_do_not_make_a_message_too_large(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    """40 MB at once, of which a message may have 32."""
    stream = opened(control_plane)
    for number in range(40):
        blocks = types_pb2.BlockDescriptors(hashes=bytes(1 << 20))
        hardened = agent_pb2.LeaseHardened(lease_id=str(number), blocks=blocks)
        engine.link.emit(agent_pb2.AgentEvent(hardened=hardened))
    stream.welcome()
    seen: list[str] = []
    while len(seen) < 40:
        events = stream.next("events")
        assert events.ByteSize() <= EVENTS_BYTES
        seen += [event.hardened.lease_id for event in events.events]
    assert seen == [str(number) for number in range(40)]


def test_it_comes_back_when_the_control_plane_does() -> None:
    server = ScriptedControlPlane()
    port = server.port
    mine = Engine(port)
    try:
        opened(server).welcome()
        server.stop()
        server = ScriptedControlPlane(port)
        opened(server).welcome()
    finally:
        mine.close()
        server.stop()


def test_what_happened_while_the_stream_was_down_is_told_later() -> None:
    server = ScriptedControlPlane()
    mine = Engine(server.port)
    try:
        opened(server).welcome()
        server.stop()
        offer(mine)
        server = ScriptedControlPlane(server.port)
        stream = opened(server)
        stream.welcome()
        assert stream.next_event("offered").num_blocks == 3
    finally:
        mine.close()
        server.stop()


def test_a_hold_ends_at_its_deadline_without_a_control_plane(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    stream = opened(control_plane)
    stream.welcome()
    offer(engine, retention_s=0.3)
    assert stream.next_event("replica_changed").reason == "EXPIRED"
    assert engine.agent.pool_stats().holds == 0


def test_an_idle_engine_is_not_woken(control_plane: ScriptedControlPlane, engine: Engine) -> None:
    stream = opened(control_plane)
    stream.welcome(heartbeat_s=0.05)
    offer(engine)
    stream.next_event("offered")
    before = engine.wakes
    for _ in range(10):
        stream.next("heartbeat")
    assert engine.wakes == before


def test_a_control_plane_that_was_overtaken_is_not_obeyed(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    """The hello tells it of the higher epoch; if it welcomes the agent all the same, that goes."""
    stream = opened(control_plane)
    stream.welcome(epoch=7)
    stream.next("heartbeat")
    stream.say(epoch=9, commands=agent_pb2.AgentCommands())  # raised while the stream is up
    offer(engine)
    stream.next_event("offered")
    stream.close()
    old = opened(control_plane)
    assert old.welcome(epoch=8).highest_epoch == 9
    again = opened(control_plane)
    assert old.incoming.get(timeout=20) is None
    assert not engine.link.connected
    assert again.welcome(epoch=10).highest_epoch == 9
    again.next("heartbeat")
    assert engine.link.connected


def test_a_refused_agent_keeps_trying_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = structlog.testing.LogCapture()
    monkeypatch.setattr(link, "_log", structlog.wrap_logger(None, processors=[captured]))
    server = ScriptedControlPlane()
    server.refuse = (grpc.StatusCode.FAILED_PRECONDITION, "block_size: ours 32, theirs 16")
    mine = Engine(server.port)
    try:
        for _ in range(3):
            assert server.refused.wait(20)
            server.refused.clear()
            assert not mine.link.connected
        server.refuse = None
        opened(server).welcome()
    finally:
        mine.close()
        server.stop()
    told = [e for e in captured.entries if "theirs 16" in e.get("reason", "")]
    assert [(e["event"], e["log_level"]) for e in told] == [("refused", "error")]


def test_after_a_fence_it_does_not_come_back(
    control_plane: ScriptedControlPlane, engine: Engine
) -> None:
    stream = opened(control_plane)
    stream.welcome()
    stream.command(fenced=agent_pb2.Fenced(reason="OPERATOR"))
    while not engine.agent.fenced:
        stream.next("heartbeat")
    stream.close()
    engine.link._threads[0].join(10)
    assert not engine.link._threads[0].is_alive()
    assert control_plane.streams.empty()


def test_it_shows_its_certificate_and_takes_only_servers_that_its_authority_signed(
    tmp_path: Path,
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    key, chain = issue_for_uri(authority, "kvshuttle://worker/w")
    tls = {name: str(tmp_path / name) for name in ("tls_ca", "tls_cert", "tls_key")}
    authority.cert_pem.write_to_path(tls["tls_ca"])
    Path(tls["tls_cert"]).write_bytes(chain)
    Path(tls["tls_key"]).write_bytes(key)

    def served_by(ca: trustme.CA) -> ScriptedControlPlane:
        server = ca.issue_cert("127.0.0.1")
        pair = (server.private_key_pem.bytes(), server.cert_chain_pems[0].bytes())
        return ScriptedControlPlane(
            credentials=grpc.ssl_server_credentials(
                [pair], authority.cert_pem.bytes(), require_client_auth=True
            )
        )

    control_plane, impostor = served_by(authority), served_by(stranger)
    engines = [Engine(control_plane.port, tls), Engine(impostor.port, tls)]
    try:
        stream = opened(control_plane)
        stream.welcome()
        stream.next("heartbeat")
        assert stream.identities == [b"kvshuttle://worker/w"]
        with pytest.raises(queue.Empty):
            impostor.streams.get(timeout=1)
    finally:
        for engine in engines:
            engine.close()
        control_plane.stop()
        impostor.stop()
