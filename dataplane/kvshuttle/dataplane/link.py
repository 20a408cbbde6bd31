"""The control link: the engine's only voice to the outside, in threads of its own.

It keeps the stream to the control plane (reconnecting with backoff and jitter), listens to the
movers, and wakes the engine when something waits for its scheduler thread.

gRPC's synchronous API, not asyncio: there is one stream, every message of it is handed to another
thread anyway, and an event loop in the engine's process would be a second one beside vLLM's.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import zmq

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.backoff import Backoff
from kvshuttle.dataplane.batches import take_events
from kvshuttle.dataplane.clock import NS, boottime_ns
from kvshuttle.dataplane.config import AgentConfig
from kvshuttle.dataplane.conversation import Conversation
from kvshuttle.dataplane.limits import (
    COMPANY_S,
    MAX_MESSAGE_BYTES,
    MAX_PENDING_EVENTS,
    UNHURRIED_EVENTS,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.mover import MoverEndpoint
from kvshuttle.dataplane.scheduler import (
    InboxItem,
    SchedulerAgent,
    StreamDown,
    StreamUp,
    Tick,
)
from kvshuttle.dataplane.tracing import traces_of
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import agent_service_pb2_grpc as agent_grpc

__all__ = ["ControlLink"]

_log = get_logger("link")

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a FIN, or is paused, is noticed within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Our own backoff decides; gRPC's would grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One channel a try: a channel shared with the last try would share its backoff.
    ("grpc.use_local_subchannel_pool", 1),
)

_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
"""The control plane will not have this boot: somebody has to change something."""


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
        self._agent: SchedulerAgent | None = None
        self._stopping = threading.Event()
        # Guards what follows; its waiters are the stream's writer and the timer.
        self._changed = threading.Condition()
        self._pending: deque[agent_pb2.AgentEvent] = deque()
        # Whether somebody waits for one of them.
        self._urgent = False
        self._deadline_ns: int | None = None
        self._conversation: _Conversation | None = None
        self._traces = traces_of(config)
        self._context = zmq.Context()
        self._orders = [self._connect_orders(x.command_address) for x in self._movers]
        self._threads = [
            threading.Thread(target=self._keep_connected, name="kvshuttle-link", daemon=True),
            threading.Thread(target=self._tick, name="kvshuttle-timer", daemon=True),
        ]
        self._threads += [
            threading.Thread(
                target=self._listen,
                args=(x.event_address,),
                name=f"kvshuttle-listen-{x.rank}",
                daemon=True,
            )
            for x in self._movers
        ]

    def start(self, agent: SchedulerAgent) -> None:
        """Begins to connect; returns at once."""
        self._agent = agent
        for thread in self._threads:
            thread.start()

    # Outbox; scheduler thread.

    def emit(self, event: agent_pb2.AgentEvent) -> None:
        """Queues an event for the control plane."""
        if self._traces is not None:
            self._traces.said(event)
        with self._changed:
            self._pending.append(event)
            if event.WhichOneof("event") not in UNHURRIED_EVENTS:
                self._urgent = True
            while len(self._pending) > MAX_PENDING_EVENTS:
                self._pending.popleft()
            self._changed.notify_all()

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
        conversation = self._conversation
        return conversation is not None and conversation.generation > 0

    def set_deadline(self, deadline_ns: int | None) -> None:
        """The scheduler side's next deadline; it gets a Tick then."""
        if deadline_ns == self._deadline_ns:
            return
        with self._changed:
            self._deadline_ns = deadline_ns
            self._changed.notify_all()

    def shutdown(self) -> None:
        """Ends the stream, so that the control plane hears of it at once, and the movers."""
        self.order(m.Stop())
        self._stopping.set()
        conversation = self._conversation
        if conversation is not None:
            conversation.cancel()
        with self._changed:
            self._changed.notify_all()
        for socket in self._orders:
            socket.close()
        # Ends the listeners' waiting, and returns when they have closed their sockets.
        self._context.term()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=2)
        if self._traces is not None:
            self._traces.close()

    # The threads.

    def _connect_orders(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 100)
        socket.connect(address)
        return socket

    def _post(self, item: InboxItem) -> None:
        assert self._agent is not None
        self._agent.post(item)
        self._wake()

    def _listen(self, address: str) -> None:
        """Passes on what a mover reports."""
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        try:
            while True:
                self._post(m.decode_from_mover(socket.recv()))
        except zmq.ContextTerminated:
            socket.close()

    def _tick(self) -> None:
        """Wakes the scheduler side at its deadlines; sleeps while there are none."""
        while not self._stopping.is_set():
            with self._changed:
                due = self._deadline_ns
                left = None if due is None else (due - boottime_ns()) / NS
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                self._deadline_ns = None
            self._post(Tick())

    def _keep_connected(self) -> None:
        backoff = Backoff()
        said = ""
        while not self._stopping.is_set():
            began = boottime_ns()
            welcomed, refused, why = self._converse()
            assert self._agent is not None
            if self._agent.fenced:
                _log.error("link_closed_for_good", worker=self._config.worker_id)
                return
            if welcomed:
                backoff.worked((boottime_ns() - began) / NS)
                said = ""
            if why != said and not self._stopping.is_set():
                # Once a reason, not once a try.
                said = why
                if refused:
                    _log.error("refused", worker=self._config.worker_id, reason=why)
                else:
                    _log.warning("not_connected", worker=self._config.worker_id, reason=why)
            self._stopping.wait(backoff.pause())

    def _converse(self) -> tuple[bool, bool, str]:
        """One stream, to its end: whether it was welcomed, or refused, and why it ended."""
        refused = False
        try:
            channel = self._channel()
        except OSError as error:
            return False, False, f"tls files: {error}"
        conversation = _Conversation(self._make_hello(), boottime_ns())
        with channel:
            call = agent_grpc.AgentServiceStub(channel).Connect(self._requests(conversation))
            conversation.call = call
            self._conversation = conversation
            why = "the control plane closed the stream"
            try:
                for response in call:
                    if response.epoch < conversation.hello.highest_epoch:
                        # It does not know yet that another has taken over; this hello tells it.
                        why = f"epoch {response.epoch}: a control plane that was overtaken"
                        conversation.cancel()
                        break
                    self._hear(conversation, response)
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
                why = f"{code.name}: {details}"
                refused = code in _REFUSALS
            finally:
                self._conversation = None
                conversation.over.set()
                with self._changed:
                    self._changed.notify_all()
        assert self._agent is not None
        # Before the next hello is made: what it says of grants must not be overtaken by one that
        # still queues, since the control plane lets the source go of what it does not find there.
        self._agent.end_stream(conversation.life)
        if conversation.generation:
            self._post(StreamDown(conversation.generation))
        return conversation.generation > 0, refused, why

    def _hear(self, conversation: _Conversation, response: agent_pb2.ConnectResponse) -> None:
        assert self._agent is not None
        if response.boot_id == conversation.hello.boot_id:
            self._agent.saw_epoch(response.epoch)
        item = conversation.hear(response, boottime_ns())
        if item is None:
            return
        if self._traces is not None:
            self._traces.told(response.commands.commands)
        self._post(item)
        if isinstance(item, StreamUp):
            conversation.generation = item.generation
            _log.info(
                "connected",
                worker=self._config.worker_id,
                incarnation=item.welcome.incarnation,
                epoch=item.epoch,
            )
            with self._changed:
                self._changed.notify_all()

    def _channel(self) -> grpc.Channel:
        config = self._config
        if config.insecure:
            return grpc.insecure_channel(config.control_plane, _CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=Path(config.tls_ca).read_bytes(),
            private_key=Path(config.tls_key).read_bytes(),
            certificate_chain=Path(config.tls_cert).read_bytes(),
        )
        return grpc.secure_channel(config.control_plane, credentials, _CHANNEL_OPTIONS)

    def _requests(self, conversation: _Conversation) -> Iterator[agent_pb2.ConnectRequest]:
        """What this side says: the hello, then heartbeats and events as they come.

        Runs on a thread of gRPC's, which ends with the stream.
        """
        assert self._agent is not None
        yield agent_pb2.ConnectRequest(hello=conversation.hello)
        next_beat = 0
        while not (conversation.over.is_set() or self._stopping.is_set()):
            now = boottime_ns()
            if not conversation.generation:
                with self._changed:
                    self._changed.wait(0.1)
                continue
            if now >= next_beat:
                next_beat = now + conversation.heartbeat_ns
                if conversation.silent(now):
                    _log.warning("control_plane_silent", worker=self._config.worker_id)
                    conversation.cancel()
                    return
                yield agent_pb2.ConnectRequest(
                    heartbeat=agent_pb2.AgentHeartbeat(
                        clock=boottime_ns(),
                        pool=self._agent.pool_stats(),
                        counters=self._agent.counters.snapshot(),
                    )
                )
            with self._changed:
                if not self._pending:
                    self._changed.wait(max(0.0, (next_beat - boottime_ns()) / NS))
                if self._pending and not self._urgent:
                    self._changed.wait(COMPANY_S)
                if conversation.over.is_set():
                    return  # what is pending belongs to the next stream
                batch = take_events(self._pending)
                self._urgent = self._urgent and bool(self._pending)
            if batch:
                yield agent_pb2.ConnectRequest(events=agent_pb2.AgentEvents(events=batch))


class _Conversation(Conversation):
    """A conversation with its call."""

    def __init__(self, hello: agent_pb2.AgentHello, now: int) -> None:
        super().__init__(hello, now)
        self.call: Any = None
        self.over = threading.Event()

    def cancel(self) -> None:
        """Ends the stream from this side."""
        if self.call is not None:
            self.call.cancel()
