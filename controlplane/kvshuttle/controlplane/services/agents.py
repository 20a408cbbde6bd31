"""AgentService: one stream a worker."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from kvshuttle.controlplane.auth import Role
from kvshuttle.controlplane.model.commands import (
    ForgetTurn,
    ReaderStopped,
    ReleaseReplica,
    RetainReplica,
)
from kvshuttle.controlplane.model.errors import (
    DomainError,
    InvalidFieldError,
    SupersededError,
)
from kvshuttle.controlplane.model.prefixes import interval
from kvshuttle.controlplane.services.convert import duration
from kvshuttle.controlplane.services.errors import PermissionDeniedError
from kvshuttle.controlplane.services.guard import caller
from kvshuttle.controlplane.services.wire import (
    apply_event,
    command_out,
    heartbeat_in,
    hello_in,
    peer_out,
)
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import agent_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from typing import Any

    from kvshuttle.controlplane.model.commands import Command
    from kvshuttle.controlplane.model.effects import Decision, Disconnect
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.reports import Hello
    from kvshuttle.controlplane.model.terms import WorkerRef
    from kvshuttle.controlplane.model.worker_events import Welcome
    from kvshuttle.controlplane.observer import Metrics
    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.checks import Checks
    from kvshuttle.controlplane.traces import ControlTraces

__all__ = ["AgentService", "Streams"]

log = structlog.get_logger("kvshuttle.controlplane.agents")

STOPPING = "STOPPING"
LINGER_S = 2.0
"""How long an ended stream may take to send what is queued on it."""
UNHURRIED = (ForgetTurn, ReaderStopped, ReleaseReplica, RetainReplica)
"""What nobody waits for: books to close, blocks to let go of. It goes with the next command that
somebody waits for, or after `COMPANY_S`: half of all messages would carry nothing else, and a
message costs as much as the event that it tells of."""
COMPANY_S = 0.05
"""An engine's step or two, against minutes for which a range may be held."""


class _Stream:
    """The way down to one boot: commands queue here until its writer takes them."""

    def __init__(self, ref: WorkerRef, boot_id: str, generation: int) -> None:
        self.ref = ref
        self.boot_id = boot_id
        self.generation = generation
        self.welcome: pb.AgentWelcome | None = None
        self.queue: list[Command] = []
        self.wake = asyncio.Event()
        # Until when what the queue began with may wait for company, if nobody waits for it.
        self.company_until = 0.0
        self.end_reason = ""
        self.writer: asyncio.Task[Any] | None = None
        # Whether nothing was written since the timer last looked, and whether something must be.
        self.silent = False
        self.beat = False
        # Since when a message waits for the agent to take it; 0 while none does.
        self.writing = 0.0
        self.failure: DomainError | None = None
        # Set when its handler ends: what is still read from it counts for nothing.
        self.over = False
        self.timer: asyncio.TimerHandle | None = None

    def keep_alive(self, interval_s: float, silence_s: float) -> None:
        """Wakes the writer when it has written nothing for an interval, and ends a stream whose
        agent takes nothing for as long as it may say nothing. Looks once an interval, instead of
        setting a timer for each message."""
        loop = asyncio.get_running_loop()
        if self.writing and loop.time() - self.writing > silence_s and not self.end_reason:
            log.warning("agent_stalled", worker_id=self.ref.worker_id, queued=len(self.queue))
            self.queue.clear()
            self.end("STALLED")
        if self.silent:
            self.beat = True
            self.wake.set()
        self.silent = True
        self.timer = loop.call_later(interval_s, self.keep_alive, interval_s, silence_s)

    def end(self, reason: str) -> None:
        """The writer sends what is queued, and ends; one that cannot send is cancelled."""
        if not self.end_reason:
            self.end_reason = reason
            self.wake.set()
            if self.writer is not None:
                asyncio.get_running_loop().call_later(LINGER_S, self.writer.cancel)


class Streams:
    """The `AgentStreams` of a runtime: at most one stream a worker, the newest."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._streams: dict[str, _Stream] = {}
        # Streams whose queue began with something unhurried, and until when it may wait; the oldest
        # first. What went with something else in the meantime is still among them.
        self._unhurried: deque[tuple[float, _Stream]] = deque()

    def attach(self, stream: _Stream) -> None:
        """A newer stream of a boot replaces the older one; what that had queued is dropped, and
        said again as far as it still holds (see `worker_events.hello`)."""
        older = self._streams.get(stream.ref.worker_id)
        if older is not None:
            older.queue.clear()
            older.end("REPLACED")
        self._streams[stream.ref.worker_id] = stream

    def detach(self, stream: _Stream) -> None:
        """A stream has ended."""
        if self._streams.get(stream.ref.worker_id) is stream:
            del self._streams[stream.ref.worker_id]

    def reaches(self, ref: WorkerRef, generation: int) -> bool:
        """Whether this stream of a boot is the one that commands go to."""
        stream = self._streams.get(ref.worker_id)
        return stream is not None and stream.ref == ref and stream.generation == generation

    def deliver(self, commands: Sequence[tuple[WorkerRef, Command]]) -> None:
        """Puts each command on its boot's stream, in order; drops it if there is none."""
        for ref, command in commands:
            stream = self._streams.get(ref.worker_id)
            if stream is None or stream.ref != ref or stream.end_reason:
                continue
            if len(stream.queue) >= self._limits.command_queue_max:
                log.warning("agent_stalled", worker_id=ref.worker_id, queued=len(stream.queue))
                stream.queue.clear()
                stream.end("STALLED")
                continue
            stream.queue.append(command)
            if not isinstance(command, UNHURRIED):
                stream.wake.set()
            elif len(stream.queue) == 1:
                loop = asyncio.get_running_loop()
                if not self._unhurried:
                    loop.call_later(COMPANY_S, self._hurry)
                stream.company_until = loop.time() + COMPANY_S
                self._unhurried.append((stream.company_until, stream))

    def _hurry(self) -> None:
        """Wakes those that have waited for long enough, or will have within a moment."""
        loop, waiting = asyncio.get_running_loop(), self._unhurried
        now = loop.time()
        while waiting and waiting[0][0] <= now + COMPANY_S / 8:
            until, stream = waiting.popleft()
            if stream.queue and stream.company_until == until:
                stream.wake.set()
        if waiting:
            loop.call_later(waiting[0][0] - now, self._hurry)

    def disconnect(self, order: Disconnect) -> None:
        """Ends a stream after what is queued on it."""
        stream = self._streams.get(order.ref.worker_id)
        if stream is not None and stream.generation == order.generation:
            stream.end(order.reason)

    def halt(self) -> None:
        """Another control plane has taken over: what is queued must not be sent any more."""
        for stream in self._streams.values():
            stream.queue.clear()
        self.stop()

    def stop(self) -> None:
        """The control plane stops."""
        for stream in self._streams.values():
            stream.end(STOPPING)


def _take(
    queue: list[Command], limits: Limits, traces: ControlTraces | None = None
) -> list[pb.AgentCommand]:
    """The oldest commands, as many as one message should carry: by number, and by bytes, of which
    the first may have more alone."""
    taken: list[pb.AgentCommand] = []
    size = 0
    for command in islice(queue, limits.commands_per_message):
        message = command_out(command)
        if traces is not None:
            traces.mark(command, message)
        # 8: tag and length in the list, 6 at most.
        size += message.ByteSize() + 8
        if taken and size > limits.commands_bytes:
            break
        taken.append(message)
    del queue[: len(taken)]
    return taken


class AgentService(pb_grpc.AgentServiceServicer):
    """Reads each stream in one task and writes it in another."""

    def __init__(
        self,
        runtime: Runtime,
        streams: Streams,
        checks: Checks,
        limits: Limits,
        metrics: Metrics,
        traces: ControlTraces | None = None,
    ) -> None:
        self._traces = traces
        self._metrics = metrics
        self._runtime = runtime
        self._streams = streams
        self._leaving: set[asyncio.Task[None]] = set()
        self._checks = checks
        self._limits = limits

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: Any
    ) -> AsyncIterator[pb.ConnectResponse]:
        """One agent's stream, from its hello to its end."""
        stream = await self._welcome(request_iterator)
        stream.writer = asyncio.current_task()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            assert stream.welcome is not None
            yield self._message(stream, welcome=stream.welcome)
            loop = asyncio.get_running_loop()
            stream.keep_alive(self._limits.heartbeat_ns / 1e9, self._limits.silence_ns / 1e9)
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                stream.silent = False
                if stream.beat and not stream.queue and not stream.end_reason:
                    # The agent takes a long silence for a dead control plane.
                    stream.writing = loop.time()
                    yield self._message(stream, commands=pb.AgentCommands())
                    stream.writing = 0.0
                stream.beat = False
                while stream.queue:
                    batch = _take(stream.queue, self._limits, self._traces)
                    stream.writing = loop.time()
                    yield self._message(stream, commands=pb.AgentCommands(commands=batch))
                    stream.writing = 0.0
                if stream.failure is not None:
                    raise stream.failure
                if stream.end_reason:
                    return
        finally:
            self._streams.detach(stream)
            if stream.timer is not None:
                stream.timer.cancel()
            # Not waited for: a read that gRPC has begun sometimes outlives its cancellation for as
            # long as the connection, and until then nobody would hear that the worker is lost.
            stream.over = True
            reader.cancel()
            self._leaving.add(reader)
            reader.add_done_callback(self._leaving.discard)
            reason = stream.end_reason or "CLOSED"
            # When it is this side that stops, no worker is lost: all of them come back to the
            # next epoch, and what is written now would be wrong then.
            if reason != STOPPING:
                self._runtime.forget(
                    lambda now: self._runtime.registry.stream_lost(
                        now, stream.ref, stream.generation, reason
                    )
                )

    def _message(self, stream: _Stream, **what: Any) -> pb.ConnectResponse:
        return pb.ConnectResponse(
            # The epoch of the moment: it may have been raised since the stream began. One that is
            # not durable yet must not be heard of: after a crash it would be used twice.
            epoch=self._runtime.epoch,
            boot_id=stream.boot_id,
            stream_generation=stream.generation,
            **what,
        )

    async def _welcome(self, requests: AsyncIterator[pb.ConnectRequest]) -> _Stream:
        says = await self._hello(requests)
        registry = self._runtime.registry
        made: list[_Stream] = []

        def event(now: int) -> Decision[Welcome]:
            decision = registry.hello(now, says)
            worker = decision.result.worker
            stream = _Stream(worker.ref, worker.boot_id, worker.stream_generation)
            stream.welcome = self._welcome_out(decision.result)
            made.append(stream)
            return decision

        try:
            # Attached in the order of effects: what was decided before goes to the older stream,
            # what is decided from now on to this one.
            await self._runtime.apply(event, lambda _: self._streams.attach(made[0]))
        except asyncio.CancelledError:
            # The agent went away while its hello was being stored. The loss comes after the
            # hello, so it finds the stream attached, with nobody to serve it.
            stream = made[0]
            self._runtime.forget(
                lambda now: registry.stream_lost(now, stream.ref, stream.generation, "CLOSED"),
                lambda _: self._streams.detach(stream),
            )
            raise
        except SupersededError as error:
            self._runtime.step_down(error)
            self._streams.halt()
            raise
        return made[0]

    def _welcome_out(self, welcome: Welcome) -> pb.AgentWelcome:
        limits = self._limits
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

    async def _hello(self, requests: AsyncIterator[pb.ConnectRequest]) -> Hello:
        first = None
        try:
            async with asyncio.timeout(self._limits.hello_wait_ns / 1e9):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            pass
        if first is None or first.WhichOneof("message") != "hello":
            what = first.WhichOneof("message") if first is not None else None
            raise InvalidFieldError("message", what, "the first message must be a hello")
        hello = first.hello
        self._checks.hello(hello)
        who = caller()
        if who.role is Role.WORKER and who.name != hello.worker_id:
            raise PermissionDeniedError(
                f"the certificate is of worker {who.name}, the hello of {hello.worker_id}",
                certificate=who.name,
                worker_id=hello.worker_id,
            )
        try:
            return hello_in(hello)
        except ValueError as error:
            raise InvalidFieldError(
                "hello", str(error), "use enum values of kvshuttle.v1"
            ) from error

    async def _read(self, requests: AsyncIterator[pb.ConnectRequest], stream: _Stream) -> None:
        try:
            async for request in requests:
                if stream.over:
                    return
                self._apply(request, stream)
            stream.end("CLOSED")
        except asyncio.CancelledError:
            raise
        except DomainError as error:  # it sent what is no message
            stream.failure = error
            stream.end("MALFORMED")
        except Exception as error:  # the stream broke; its end says so to the registry
            log.info("agent_stream_broken", worker_id=stream.ref.worker_id, error=repr(error))
            stream.end("BROKEN")

    def _apply(self, request: pb.ConnectRequest, stream: _Stream) -> None:
        if stream.end_reason:
            return  # replaced or fenced: nothing of it counts any more
        registry = self._runtime.registry

        def event(now: int) -> Decision[None]:
            batch = registry.agent(now, stream.ref)
            kind = request.WhichOneof("message")
            if kind == "heartbeat":
                batch.heartbeat(heartbeat_in(request.heartbeat))
            elif kind == "events":
                events, most = request.events.events, self._limits.events_per_message
                for item in islice(events, most):
                    try:
                        apply_event(batch, item)
                    except Exception as error:
                        # One bad event must not lose the others of its batch.
                        self._dropped(stream, item, error)
                if len(events) > most:
                    self._metrics.events_dropped.labels("MALFORMED").inc(len(events) - most)
                    log.warning(
                        "agent_events_too_many",
                        worker_id=stream.ref.worker_id,
                        events=len(events),
                        most=most,
                    )
            return batch.finish()

        self._runtime.forget(event)

    def _dropped(self, stream: _Stream, item: pb.AgentEvent, error: Exception) -> None:
        known = {"worker_id": stream.ref.worker_id, "kind": item.WhichOneof("event")}
        if isinstance(error, ValueError):
            self._metrics.events_dropped.labels("MALFORMED").inc()
            log.warning("agent_event_malformed", error=str(error)[:200], **known)
        else:
            self._metrics.events_dropped.labels("INTERNAL").inc()
            log.error("agent_event_failed", exc_info=error, **known)
