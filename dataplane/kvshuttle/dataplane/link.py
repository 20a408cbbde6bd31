"""The control link: one asyncio loop in its own thread, the engine's only voice to the outside.

It keeps the stream to the control plane (reconnecting with backoff and jitter), listens to the
movers, and wakes the engine when something waits for its scheduler thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import zmq
import zmq.asyncio

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, boottime_ns
from kvshuttle.dataplane.config import AgentConfig
from kvshuttle.dataplane.limits import (
    MAX_EVENTS_A_MESSAGE,
    MAX_MESSAGE_BYTES,
    MAX_PENDING_EVENTS,
    RECONNECT_MAX_S,
    RECONNECT_MIN_S,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.mover import MoverEndpoint
from kvshuttle.dataplane.scheduler import (
    CommandBatch,
    SchedulerAgent,
    StreamDown,
    StreamUp,
    Tick,
)
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import agent_service_pb2_grpc as agent_grpc

__all__ = ["ControlLink"]

_log = get_logger("link")

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a FIN is noticed within 15 s even where nothing is sent.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Our own backoff decides; gRPC's would grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class _RefusedError(Exception):
    """The control plane will not have this boot; trying again soon is of no use."""


class ControlLink:
    """Implements :class:`kvshuttle.dataplane.outbox.Outbox`."""

    def __init__(
        self,
        config: AgentConfig,
        movers: Sequence[MoverEndpoint],
        make_hello: Callable[[], agent_pb2.AgentHello],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._movers = list(movers)
        self._make_hello = make_hello
        self._wake = wake
        self._boot_id = ""
        self._agent: SchedulerAgent | None = None
        self._connected = False
        self._pending: deque[agent_pb2.AgentEvent] = deque()
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._deadline_moved = asyncio.Event()
        self._deadline_ns: int | None = None
        self._stopping = False
        self._context = zmq.Context()
        self._orders = [self._connect_orders(x.command_address) for x in self._movers]
        self._thread = threading.Thread(target=self._run, name="kvshuttle-link", daemon=True)

    def start(self, agent: SchedulerAgent) -> None:
        """Begins to connect; returns at once."""
        self._agent = agent
        self._thread.start()

    # Outbox; scheduler thread.

    def emit(self, event: agent_pb2.AgentEvent) -> None:
        """Queues an event for the control plane."""
        self._pending.append(event)
        while len(self._pending) > MAX_PENDING_EVENTS:
            self._pending.popleft()
        self._signal(self._news)

    def order(self, message: m.ToMover, rank: int | None = None) -> None:
        """Sends an order to one mover or all of them; the sockets belong to this thread."""
        data = m.encode(message)
        for endpoint, socket in zip(self._movers, self._orders, strict=True):
            if rank is None or endpoint.rank == rank:
                with contextlib.suppress(zmq.Again):
                    socket.send(data, zmq.NOBLOCK)

    @property
    def num_ranks(self) -> int:
        """Number of movers."""
        return len(self._movers)

    @property
    def connected(self) -> bool:
        """Whether a stream is up and welcomed."""
        return self._connected

    def set_deadline(self, deadline_ns: int | None) -> None:
        """The scheduler side's next deadline; it gets a Tick then."""
        if deadline_ns != self._deadline_ns:
            self._deadline_ns = deadline_ns
            self._signal(self._deadline_moved)

    def shutdown(self) -> None:
        """Ends the stream, so that the control plane hears of it at once, and the movers."""
        self.order(m.Stop())
        self._stopping = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=2)

    # The thread.

    def _connect_orders(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 100)
        socket.connect(address)
        return socket

    def _signal(self, event: asyncio.Event) -> None:
        if not self._stopping:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(event.set)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        tasks = [self._loop.create_task(self._keep_connected())]
        tasks.append(self._loop.create_task(self._tick()))
        tasks += [self._loop.create_task(self._listen(x.event_address)) for x in self._movers]
        try:
            self._loop.run_forever()
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    def _post(self, item: StreamUp | StreamDown | CommandBatch | Tick | m.FromMover) -> None:
        assert self._agent is not None
        self._agent.post(item)
        self._wake()

    async def _listen(self, address: str) -> None:
        """Passes on what a mover reports."""
        socket = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        try:
            while True:
                self._post(m.decode_from_mover(await socket.recv()))
        finally:
            socket.close(0)

    async def _tick(self) -> None:
        """Wakes the scheduler side at its deadlines; sleeps while there are none."""
        while True:
            self._deadline_moved.clear()
            wait: float | None = None
            if self._deadline_ns is not None:
                wait = max(0.0, (self._deadline_ns - boottime_ns()) / NS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._deadline_moved.wait()
                continue
            self._deadline_ns = None
            self._post(Tick())

    async def _keep_connected(self) -> None:
        pause = RECONNECT_MIN_S
        while True:
            welcomed = False
            try:
                async with self._channel() as channel:
                    welcomed = await self._converse(channel)
            except _RefusedError as error:
                _log.error("refused", worker=self._config.worker_id, reason=str(error))
                pause = RECONNECT_MAX_S
            except Exception as error:
                _log.warning("link_error", worker=self._config.worker_id, error=repr(error))
            assert self._agent is not None
            if self._agent.fenced:
                _log.error("link_closed_for_good", worker=self._config.worker_id)
                return
            if welcomed:
                pause = RECONNECT_MIN_S
            # Jitter: after a restart of the control plane not all agents come in one instant.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, RECONNECT_MAX_S)

    def _channel(self) -> grpc.aio.Channel:
        config = self._config
        if config.insecure:
            return grpc.aio.insecure_channel(config.control_plane, _CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=Path(config.tls_ca).read_bytes(),
            private_key=Path(config.tls_key).read_bytes(),
            certificate_chain=Path(config.tls_cert).read_bytes(),
        )
        return grpc.aio.secure_channel(config.control_plane, credentials, _CHANNEL_OPTIONS)

    async def _converse(self, channel: grpc.aio.Channel) -> bool:
        """One stream, to its end. True if it was welcomed."""
        stub = agent_grpc.AgentServiceStub(channel)
        welcome_seen = asyncio.Event()
        ended = asyncio.Event()
        self._heartbeat_s = 1.0
        call = stub.Connect(self._requests(welcome_seen, ended))
        generation = 0
        silence_s = 10.0
        try:
            while True:
                async with asyncio.timeout(silence_s):
                    response = await call.read()
                if not isinstance(response, agent_pb2.ConnectResponse):
                    break  # the end of the stream
                if response.boot_id != self._boot_id:
                    continue
                if response.HasField("welcome"):
                    welcome = response.welcome
                    generation = response.stream_generation
                    self._heartbeat_s = welcome.heartbeat_interval.ToTimedelta().total_seconds()
                    # The control plane answers every heartbeat, so silence means that it is gone.
                    silence_s = max(welcome.silence_limit.ToTimedelta().total_seconds(), 1.0)
                    self._post(StreamUp(generation, response.epoch, welcome))
                    self._connected = True
                    welcome_seen.set()
                    _log.info(
                        "connected",
                        worker=self._config.worker_id,
                        incarnation=welcome.incarnation,
                        epoch=response.epoch,
                    )
                elif response.HasField("commands") and response.stream_generation == generation:
                    self._post(CommandBatch(generation, response.epoch, response.commands.commands))
        except TimeoutError:
            _log.warning("control_plane_silent", worker=self._config.worker_id)
        except grpc.aio.AioRpcError as error:
            if error.code() in (
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.INVALID_ARGUMENT,
            ):
                raise _RefusedError(f"{error.code().name}: {error.details()}") from None
            _log.warning(
                "stream_lost",
                worker=self._config.worker_id,
                code=error.code().name,
                details=error.details(),
            )
        finally:
            ended.set()
            self._news.set()
            self._connected = False
            call.cancel()
            if generation:
                self._post(StreamDown(generation))
        return bool(generation)

    async def _requests(
        self, welcome_seen: asyncio.Event, ended: asyncio.Event
    ) -> AsyncIterator[agent_pb2.ConnectRequest]:
        """What this side says: the hello, then heartbeats and events as they come."""
        assert self._agent is not None
        hello = self._make_hello()
        self._boot_id = hello.boot_id
        yield agent_pb2.ConnectRequest(hello=hello)
        await welcome_seen.wait()
        next_beat = 0
        while not ended.is_set():
            now = boottime_ns()
            if now >= next_beat:
                next_beat = now + int(self._heartbeat_s * NS)
                yield agent_pb2.ConnectRequest(
                    heartbeat=agent_pb2.AgentHeartbeat(
                        clock=boottime_ns(),
                        pool=self._agent.pool_stats(),
                        counters=self._agent.counters.snapshot(),
                    )
                )
            while self._pending:
                batch: list[agent_pb2.AgentEvent] = []
                while self._pending and len(batch) < MAX_EVENTS_A_MESSAGE:
                    batch.append(self._pending.popleft())
                yield agent_pb2.ConnectRequest(events=agent_pb2.AgentEvents(events=batch))
            self._news.clear()
            if self._pending:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, (next_beat - boottime_ns()) / NS)):
                    await self._news.wait()
