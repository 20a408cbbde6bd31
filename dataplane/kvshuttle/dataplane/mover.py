"""The worker side: one thread a rank that owns NIXL, reads and writes under leases, and answers.

It polls NIXL only while a lease of its own is open; otherwise it sleeps on its command socket, so
an idle engine costs nothing. What it decides is in :mod:`kvshuttle.dataplane.transfers`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, Clock, boottime_ns
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.folder import PrivateFolder
from kvshuttle.dataplane.limits import (
    POLL_MAX_LANDING_NS,
    POLL_MAX_READING_NS,
    POLL_MAX_SERVING_NS,
    POLL_MIN_NS,
    STOPPED_LOOK_NS,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.push_steps import Fence, PushStep, region_ends
from kvshuttle.dataplane.transfers import Results, Transfers
from kvshuttle.dataplane.transport import LocalRegion, NixlTransport

__all__ = ["Mover", "MoverEndpoint"]

_log = get_logger("mover")


@dataclass(frozen=True)
class MoverEndpoint:
    """What the scheduler side needs to know of a rank."""

    rank: int
    agent_name: str
    agent_metadata: bytes
    regions: tuple[LocalRegion, ...]
    command_address: str
    event_address: str


class Mover:
    """Owns one rank's NIXL agent. Public methods may be called from any thread."""

    def __init__(
        self,
        rank: int,
        agent_name: str,
        regions: list[LocalRegion],
        *,
        backend: str,
        backend_params: dict[str, str],
        faults: Faults,
        bind_device: Callable[[], None],
        clock: Clock = boottime_ns,
    ) -> None:
        self._rank = rank
        self._name = agent_name
        self._regions = regions
        self._backend = backend
        self._backend_params = backend_params
        self._faults = faults
        self._bind_device = bind_device
        self._clock = clock
        self._results = Results()
        self._interval_ns = POLL_MIN_NS
        # From vLLM's worker thread: the steps that have begun, and a word to look at them.
        self._steps: deque[PushStep] = deque()
        self._step: PushStep | None = None
        self._layers = region_ends(regions)
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Private to this user: whoever can write here can make the engine move memory.
        self._folder = PrivateFolder()
        self._started: queue.SimpleQueue[MoverEndpoint | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvshuttle-mover", daemon=True)

    def start(self) -> MoverEndpoint:
        """Creates the NIXL agent, registers the memory and starts to listen.

        Raises :class:`TransportError` where NIXL cannot be set up.
        """
        self._thread.start()
        started = self._started.get()
        if isinstance(started, Exception):
            self._folder.remove()
            raise started
        return started

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them that failed."""
        return self._results.take()

    # vLLM's worker thread. None of these waits: a system call of a microsecond, no more.

    def begin_step(self, chunks: Sequence[m.PushChunk]) -> None:
        """A step begins that computes these chunks."""
        self._step = PushStep(chunks, len(self._regions))
        self._steps.append(self._step)
        os.eventfd_write(self._nudge, 1)

    @property
    def stepping(self) -> bool:
        """Whether the step that runs computes something to be written."""
        return self._step is not None

    def layer_final(self, layer: str, fence: Fence = None) -> None:
        """A layer of the step that runs is filled."""
        regions = self._layers.get(layer)
        if self._step is not None and regions is not None:
            self._step.layer_final(*regions, fence)
            os.eventfd_write(self._nudge, 1)

    def end_step(self, fence: Fence = None) -> None:
        """All of the step is filled."""
        if self._step is not None:
            self._step.all_final(fence)
            self._step = None
            os.eventfd_write(self._nudge, 1)

    def shutdown(self) -> None:
        """Removes the sockets; the thread is a daemon and ends with the process."""
        self._folder.remove()

    # The thread.

    def _run(self) -> None:
        try:
            self._bind_device()
            self._transport = NixlTransport(self._name, self._backend, self._backend_params)
            metadata = self._transport.register(self._regions)
            context = zmq.Context()
            self._commands = context.socket(zmq.PULL)
            self._events = context.socket(zmq.PUSH)
            # Neither side may block on the other: the scheduler thread is the engine's.
            for socket in (self._commands, self._events):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, 0)
                socket.setsockopt(zmq.RCVHWM, 0)
            commands = f"ipc://{self._folder.path / 'commands'}"
            events = f"ipc://{self._folder.path / 'events'}"
            self._transfers = Transfers(
                self._transport,
                self._regions,
                self._results,
                self._send,
                self._faults,
                self._clock,
            )
            self._commands.bind(commands)
            self._events.bind(events)
        except Exception as error:
            self._started.put(error)
            return
        self._started.put(
            MoverEndpoint(self._rank, self._name, metadata, tuple(self._regions), commands, events)
        )
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._nudge, zmq.POLLIN)
        try:
            self._loop()
        except Exception as error:
            _log.exception("mover_failed", rank=self._rank)
            self._transfers.fail_everything()
            self._send(m.MoverFailed(repr(error)))
            self._refuse_from_now_on()

    def _loop(self) -> None:
        while True:
            if not self._wait():
                self._transport.close()
                return
            if self._transfers.poll():
                self._interval_ns = POLL_MIN_NS

    def _wait(self) -> bool:
        """Sleeps until a command or the next poll is due, and obeys commands. False: stop."""
        if not self._transfers.busy:
            self._poller.poll(STOPPED_LOOK_NS // 1_000_000 if self._transfers.unsettled else None)
        elif self._interval_ns >= 1_000_000:
            self._poller.poll(self._interval_ns // 1_000_000)
        else:
            time.sleep(self._interval_ns / NS)
        self._interval_ns = min(self._interval_ns * 3 // 2, self._slowest())
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._nudge)
        while self._steps:
            self._transfers.begin_step(self._steps.popleft())
        while True:
            try:
                data = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._interval_ns = POLL_MIN_NS
            message = self._decode(data)
            if isinstance(message, m.Stop):
                return False
            if message is not None:
                self._transfers.obey(message)

    def _slowest(self) -> int:
        if self._transfers.waited_for:
            return POLL_MAX_READING_NS
        return POLL_MAX_LANDING_NS if self._transfers.written_to else POLL_MAX_SERVING_NS

    def _refuse_from_now_on(self) -> None:
        """Answers every order with no, without NIXL: the scheduler side must not wait for ever."""
        while True:
            message = self._decode(self._commands.recv())
            if isinstance(message, m.Stop):
                return
            if message is not None:
                self._transfers.refuse(message)

    @staticmethod
    def _decode(data: bytes) -> m.ToMover | None:
        try:
            return m.decode_to_mover(data)
        except msgspec.DecodeError as error:
            # Nothing of ours says such a thing, so nobody waits for an answer.
            _log.error("order_malformed", error=str(error), bytes=len(data))
            return None

    def _send(self, message: m.FromMover) -> None:
        with contextlib.suppress(zmq.Again):
            self._events.send(m.encode(message), zmq.NOBLOCK)
