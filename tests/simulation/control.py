"""One process of the control plane: the real registry, planner, store and conversions.

Modelled after `kvshuttle.controlplane.runtime`, `.store.journal` and `.services.agents`: effects
leave in order and only when their records are durable but for what only asks (the same function
decides it), commits are grouped, a stream has a queue and a writer. It can die between any two of
its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvshuttle.controlplane.clock import Timeline
from kvshuttle.controlplane.model.errors import DomainError
from kvshuttle.controlplane.model.prefixes import interval
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.runtime import ahead
from kvshuttle.controlplane.services.convert import duration
from kvshuttle.controlplane.services.wire import (
    apply_event,
    command_out,
    heartbeat_in,
    hello_in,
    peer_out,
)
from kvshuttle.controlplane.store import Store, StoreError
from kvshuttle.v1 import agent_service_pb2 as pb
from tests.simulation.kernel import CrashNow, Kernel, Machine, Thread, Violation, between

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.commands import Command
    from kvshuttle.controlplane.model.effects import Decision, Disconnect, Effects, Record
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.state import Snapshot
    from kvshuttle.controlplane.model.terms import WorkerRef
    from kvshuttle.controlplane.model.worker_events import Welcome
    from tests.simulation.stream import Stream

__all__ = ["ControlPlane"]


@dataclass(eq=False)
class _Connection:
    """The way down to one boot."""

    stream: Stream
    ref: WorkerRef
    boot_id: str
    generation: int
    welcome: pb.AgentWelcome
    queue: list[Command] = field(default_factory=list)
    end_reason: str = ""
    writing: bool = False
    silent: bool = False
    attached: bool = False


Entry = tuple["Sequence[Record]", Callable[[], None]]


class ControlPlane:
    """Implements `StreamEnd`."""

    def __init__(
        self,
        kernel: Kernel,
        machine: Machine,
        name: str,
        store: Store,
        limits: Limits,
        *,
        lineage: str,
        accept_lineage: bool,
        prepare: Callable[[Snapshot], Snapshot],
        sync: bool,
        observe: Callable[[ControlPlane, Effects], None],
        committed: Callable[[Sequence[Record]], None],
        died: Callable[[ControlPlane], None],
        registered: Callable[[str, int], None],
        commit_ms: float = 3.0,
    ) -> None:
        self.kernel = kernel
        self.machine = machine
        self.name = name
        self.thread = Thread(machine, name)
        self.thread.on_crash = lambda: self._die("crash point")
        self.limits = limits
        self.commit_ms = commit_ms
        # Set by faults: dies after so many of its own steps; has lost its store to a successor.
        self.crash_in: int | None = None
        self.fenced_off = False
        self._store = store
        self._sync = sync
        self._observe = observe
        self._committed = committed
        self._died = died
        self._registered = registered
        self._queue: deque[Entry] = deque()
        self._unreleased = 0
        self._committing = False
        self._connections: dict[str, _Connection] = {}
        self._by_stream: dict[Stream, _Connection] = {}
        # Every stream that an agent has opened to this process, welcomed or not.
        self.dialled: list[Stream] = []
        self.serving = False
        with kernel.on(self.thread):
            self.clock = Timeline()
            snapshot = store.load()
            self.clock.not_before(snapshot.latest_ns())
            snapshot = prepare(snapshot)
            self.registry = Registry(
                limits,
                Planner(limits.min_tokens, limits.direct_tokens),
                accept_lineage_change=accept_lineage,
            )
            decision = self.registry.start(self.clock.now_ns(), snapshot, lineage)
            observe(self, decision.effects)
            store.commit(decision.effects.records)
            committed(decision.effects.records)
        # The newest epoch that is durable.
        self.epoch = self.registry.state.epoch
        self.serving = True
        kernel.log(name, "started", epoch=self.registry.state.epoch)
        kernel.at(limits.tick_ns, self.thread, self._tick)

    @property
    def alive(self) -> bool:
        """Whether its process runs (or is paused)."""
        return self.thread.alive

    @property
    def settled(self) -> bool:
        """Whether everything applied is durable and out."""
        return not self._unreleased

    def crash(self, why: str) -> None:
        """SIGKILL."""
        self._die(why)

    def _die(self, why: str) -> None:
        if not self.thread.alive:
            return
        self.kernel.log(self.name, "dies", why=why)
        self.thread.die()
        self.serving = False
        self._store.close()
        for stream in self.dialled:
            stream.cut("control plane died", server_knows=True)
        self._died(self)

    def _step(self) -> None:
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                raise CrashNow

    # Events.

    def post(
        self,
        event: Callable[[int], Decision[Any]],
        attach: Callable[[Any], None] | None = None,
        done: Callable[[Any], None] | None = None,
    ) -> None:
        """As `Runtime.post`."""
        self._step()
        decision = event(self.clock.now_ns())
        effects = decision.effects
        self._observe(self, effects)
        commands: Sequence[tuple[WorkerRef, Command]] = effects.commands
        epoch = self.registry.state.epoch
        if epoch == self.epoch:
            now, commands = ahead(commands, self._reaches)
            for ref, command in now:
                self._step()
                self._deliver(ref, command)

        def release() -> None:
            self.epoch = epoch
            if attach is not None:
                attach(decision.result)
            for ref, command in commands:
                self._step()
                self._deliver(ref, command)
            for order in effects.disconnects:
                self._disconnect(order)
            if done is not None:
                done(decision.result)

        if self._sync:
            self._commit(effects.records)
            self._step()
            release()
        elif not effects.records and not self._unreleased:
            release()
        else:
            self._unreleased += 1
            self._queue.append((effects.records, release))
            self._begin_commit()

    def _reaches(self, ref: WorkerRef) -> bool:
        connection = self._connections.get(ref.worker_id)
        worker = self.registry.state.workers.get(ref.worker_id)
        return (
            connection is not None
            and worker is not None
            and connection.ref == ref
            and connection.generation == worker.stream_generation
        )

    def _begin_commit(self) -> None:
        if self._committing or not self._queue:
            return
        self._committing = True
        batch = list(self._queue)
        self._queue.clear()
        self.kernel.at(
            between(self.kernel.rng, 0.05, self.commit_ms), self.thread, self._durable, batch
        )

    def _durable(self, batch: list[Entry]) -> None:
        self._step()
        self._commit([record for records, _ in batch for record in records])
        self._step()
        self._committing = False
        for _, release in batch:
            self._unreleased -= 1
            release()
        self._begin_commit()

    def _commit(self, records: Sequence[Record]) -> None:
        if self.fenced_off:
            if records:
                self.kernel.log(self.name, "store_refuses")
                raise CrashNow
            return
        try:
            self._store.commit(records)
        except StoreError as error:
            raise Violation("store", str(error)) from error
        self._committed(records)

    def _tick(self) -> None:
        self.post(self.registry.tick)
        self.kernel.at(self.limits.tick_ns, self.thread, self._tick)

    def call(
        self,
        event: Callable[[Registry, int], Decision[Any]],
        done: Callable[[Any], None],
        failed: Callable[[str], None],
    ) -> None:
        """A client's call; `done` and `failed` run in here, when the answer may leave."""
        try:
            self.post(lambda now: event(self.registry, now), done=done)
        except DomainError as error:
            failed(type(error).__name__)

    # Streams.

    def request(self, stream: Stream, message: pb.ConnectRequest) -> None:
        """A message of an agent's."""
        connection = self._by_stream.get(stream)
        if connection is None:
            if message.HasField("hello"):
                self._hello(stream, message.hello)
            return
        if connection.end_reason:
            return
        kind = message.WhichOneof("message")

        def event(now: int) -> Decision[None]:
            batch = self.registry.agent(now, connection.ref)
            if kind == "heartbeat":
                batch.heartbeat(heartbeat_in(message.heartbeat))
            elif kind == "events":
                for item in message.events.events:
                    apply_event(batch, item)
            return batch.finish()

        self.post(event)

    def _hello(self, stream: Stream, hello: pb.AgentHello) -> None:
        says = hello_in(hello)
        made: list[_Connection] = []

        def event(now: int) -> Decision[Welcome]:
            decision = self.registry.hello(now, says)
            worker = decision.result.worker
            connection = _Connection(
                stream,
                worker.ref,
                worker.boot_id,
                worker.stream_generation,
                self._welcome(decision.result),
            )
            made.append(connection)
            self._by_stream[stream] = connection
            return decision

        try:
            self.post(event, attach=lambda _: self._attach(made[0]))
        except DomainError as error:
            self.kernel.log(self.name, "refuses", boot=hello.boot_id, why=type(error).__name__)
            stream.cut(f"refused: {type(error).__name__}", agent_knows=False, server_knows=True)

    def _welcome(self, welcome: Welcome) -> pb.AgentWelcome:
        limits = self.limits
        return pb.AgentWelcome(
            incarnation=welcome.worker.ref.incarnation,
            lineage_id=welcome.lineage_id,
            heartbeat_interval=duration(limits.heartbeat_ns),
            silence_limit=duration(limits.silence_ns),
            clock_drift_ppm=limits.clock_drift_ppm,
            peers=[peer_out(peer) for peer in welcome.peers],
            default_retention=duration(limits.retention_ns),
            checkpoint_interval=interval(limits, welcome.worker.block_size),
        )

    def _attach(self, connection: _Connection) -> None:
        self._registered(connection.boot_id, connection.ref.incarnation)
        if connection.end_reason:
            return
        worker_id = connection.ref.worker_id
        older = self._connections.get(worker_id)
        if older is not None:
            older.queue.clear()
            self._end(older, "REPLACED")
        self._connections[worker_id] = connection
        connection.attached = True
        connection.stream.down(self._message(connection, welcome=connection.welcome))
        self.kernel.at(self.limits.heartbeat_ns, self.thread, self._keep_alive, connection)

    def _message(self, connection: _Connection, **what: Any) -> pb.ConnectResponse:
        return pb.ConnectResponse(
            epoch=self.registry.state.epoch,
            boot_id=connection.boot_id,
            stream_generation=connection.generation,
            **what,
        )

    def _keep_alive(self, connection: _Connection) -> None:
        if connection.end_reason:
            return
        if connection.silent:
            connection.stream.down(self._message(connection, commands=pb.AgentCommands()))
        connection.silent = True
        self.kernel.at(self.limits.heartbeat_ns, self.thread, self._keep_alive, connection)

    def _deliver(self, ref: WorkerRef, command: Command) -> None:
        connection = self._connections.get(ref.worker_id)
        if connection is None or connection.ref != ref or connection.end_reason:
            return
        connection.queue.append(command)
        if not connection.writing:
            connection.writing = True
            delay = between(self.kernel.rng, 0.02, 1)
            self.kernel.at(delay, self.thread, self._write, connection)

    def _write(self, connection: _Connection) -> None:
        connection.writing = False
        if not connection.queue:
            return
        batch, connection.queue = connection.queue, []
        connection.silent = False
        if self.kernel.trace is not None:
            for command in batch:
                self.kernel.log(self.name, f"to {connection.ref.worker_id}", says=_short(command))
        commands = pb.AgentCommands(commands=[command_out(c) for c in batch])
        connection.stream.down(self._message(connection, commands=commands))

    def _disconnect(self, order: Disconnect) -> None:
        connection = self._connections.get(order.ref.worker_id)
        if connection is not None and connection.generation == order.generation:
            self._end(connection, order.reason)

    def _end(self, connection: _Connection, reason: str) -> None:
        """Sends what is queued, then closes."""
        if connection.end_reason:
            return
        self._write(connection)
        connection.end_reason = reason
        self.kernel.at(between(self.kernel.rng, 1, 20), self.thread, self._close, connection)

    def _close(self, connection: _Connection) -> None:
        connection.stream.cut(connection.end_reason, server_knows=True)
        self._gone(connection)

    def lost(self, stream: Stream, why: str) -> None:
        """A stream has ended."""
        connection = self._by_stream.get(stream)
        if connection is not None and not connection.end_reason:
            connection.end_reason = why
            self._gone(connection)

    def _gone(self, connection: _Connection) -> None:
        self._by_stream.pop(connection.stream, None)
        if self._connections.get(connection.ref.worker_id) is connection:
            del self._connections[connection.ref.worker_id]
        reason = connection.end_reason
        self.post(
            lambda now: self.registry.stream_lost(
                now, connection.ref, connection.generation, reason
            )
        )


def _short(command: Command) -> str:
    lease = getattr(command, "lease_id", "")
    version = getattr(command, "version", "")
    reason = getattr(command, "reason", "")
    extra = f"v{version}" if version != "" else ""
    return " ".join(x for x in (type(command).__name__, lease, extra, reason) if x)
