"""The worker side: one thread a rank that owns NIXL, reads under leases and answers readers.

It polls NIXL only while a lease of its own is open; otherwise it sleeps on its command socket, so
an idle engine costs nothing. The three rules that it keeps:

* it posts nothing after a lease's deadline less a margin;
* what completed is published only if the clock, looked at *after* completion, is before the
  deadline, and the source says that it still held then;
* the landing blocks of a read that it gave up are reported free only when NIXL has let go of it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, Clock, boottime_ns
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.limits import (
    CONFIRM_TIMEOUT_NS,
    CONNECT_LINGER_NS,
    DEADLINE_MARGIN_NS,
    POLL_MAX_READING_NS,
    POLL_MAX_SERVING_NS,
    POLL_MIN_NS,
    READ_STALL_NS,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.transport import LocalRegion, NixlTransport, ReadHandle, TransportError

__all__ = ["Mover", "MoverEndpoint"]

_log = get_logger("mover")

# From the reader after a READ: done, I read no more; ask, I go on. Both are answered yes or no:
# whether the source still held the range.
_DONE, _ASK, _YES, _NO, _HELLO = b"done", b"ask", b"yes", b"no", b"hello"


@dataclass(frozen=True)
class MoverEndpoint:
    """What the scheduler side needs to know of a rank."""

    rank: int
    agent_name: str
    agent_metadata: bytes
    regions: tuple[LocalRegion, ...]
    command_address: str
    event_address: str


class _Phase(enum.Enum):
    POSTED = "posted"
    CONFIRMING = "confirming"


@dataclass(eq=False)
class _ReadState:
    order: m.Read
    peer: str
    handle: ReadHandle
    posted_ns: int
    deadline_ns: int
    faults: Faults
    phase: _Phase = _Phase.POSTED
    completed_ns: int = 0
    bytes_moved: int = 0
    # The source's answer; it may come before this side has noticed that its READ is complete.
    held: bool | None = None
    # Reason for which vLLM was told that the load failed, while NIXL has not let go.
    given_up: str = ""


@dataclass
class _Results:
    """What vLLM is told at its next step; filled by the mover's thread."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


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
        self._results = _Results()
        self._reads: dict[str, _ReadState] = {}
        self._serving: dict[str, int] = {}
        self._peers: dict[tuple[str, int], str] = {}
        self._linger_until = 0
        self._interval_ns = POLL_MIN_NS
        # Private to this user: whoever can write here can make the engine move memory.
        self._directory = tempfile.mkdtemp(prefix="kvshuttle-")
        self._started: queue.SimpleQueue[MoverEndpoint | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvshuttle-mover", daemon=True)

    def start(self) -> MoverEndpoint:
        """Creates the NIXL agent, registers the memory and starts to listen.

        Raises :class:`TransportError` where NIXL cannot be set up.
        """
        self._thread.start()
        started = self._started.get()
        if isinstance(started, Exception):
            shutil.rmtree(self._directory, ignore_errors=True)
            raise started
        return started

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them that failed."""
        with self._results.lock:
            finished, failed = self._results.finished, self._results.failed
            self._results.finished, self._results.failed = set(), set()
        return finished, failed

    def shutdown(self) -> None:
        """Removes the sockets; the thread is a daemon and ends with the process."""
        shutil.rmtree(self._directory, ignore_errors=True)

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
            commands = f"ipc://{os.path.join(self._directory, 'commands')}"
            events = f"ipc://{os.path.join(self._directory, 'events')}"
            self._commands.bind(commands)
            self._events.bind(events)
        except Exception as error:
            self._started.put(error)
            return
        self._started.put(
            MoverEndpoint(self._rank, self._name, metadata, tuple(self._regions), commands, events)
        )
        try:
            self._loop()
        except Exception as error:
            _log.exception("mover_failed", rank=self._rank)
            self._fail_everything()
            self._send(m.MoverFailed(repr(error)))

    def _loop(self) -> None:
        while True:
            if not self._wait():
                self._transport.close()
                return
            now = self._clock()
            moved = self._handle_notices()
            for request_id in list(self._reads):
                moved |= self._progress(self._reads[request_id], now)
            for lease_id, deadline in list(self._serving.items()):
                # The scheduler side closes the lease at the same deadline; this only bounds the
                # polling should its message be late.
                if now > deadline + NS:
                    del self._serving[lease_id]
            if moved:
                self._interval_ns = POLL_MIN_NS

    def _wait(self) -> bool:
        """Sleeps until a command or the next poll is due, and obeys commands. False: stop."""
        busy = bool(self._reads or self._serving) or self._clock() < self._linger_until
        if not busy:
            self._commands.poll()
        elif self._interval_ns >= 1_000_000:
            self._commands.poll(self._interval_ns // 1_000_000)
        else:
            time.sleep(self._interval_ns / NS)
        waited_for = any(not state.given_up for state in self._reads.values())
        limit = POLL_MAX_READING_NS if waited_for else POLL_MAX_SERVING_NS
        self._interval_ns = min(self._interval_ns * 3 // 2, limit)
        while True:
            try:
                data = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._interval_ns = POLL_MIN_NS
            message = m.decode_to_mover(data)
            if isinstance(message, m.Stop):
                return False
            self._obey(message)

    def _obey(self, message: m.ToMover) -> None:
        match message:
            case m.Read():
                self._start_read(message)
            case m.Serve():
                self._serving[message.lease_id] = message.deadline_ns
            case m.Unserve():
                self._serving.pop(message.lease_id, None)
                self._send(m.Unserved(message.lease_id))
            case m.Abandon():
                state = self._reads.get(message.request_id)
                if state is not None:
                    self._give_up(state, message.reason)
            case m.ExtendRead():
                state = self._reads.get(message.request_id)
                if state is not None:
                    state.deadline_ns = max(state.deadline_ns, message.deadline_ns)
            case m.Refuse():
                self._report(message.request_id, failed=True)
            case m.AddPeer():
                self._add_peer(message)
            case m.DropPeer():
                self._drop_peer(message)

    # Peers.

    def _add_peer(self, message: m.AddPeer) -> None:
        error = ""
        try:
            self._transport.add_peer(message.agent_name, message.agent_metadata, message.regions)
            self._transport.notify(message.agent_name, _HELLO)
            self._peers[message.worker_id, message.incarnation] = message.agent_name
            # Both ends have to call in for the connection to come up: do it now, in the
            # background, so that the first transfer does not pay for it.
            self._linger_until = self._clock() + CONNECT_LINGER_NS
        except TransportError as failure:
            error = str(failure)
            _log.warning("peer_unreachable", worker=message.worker_id, error=error)
        self._send(m.PeerReady(message.worker_id, message.incarnation, error))

    def _drop_peer(self, message: m.DropPeer) -> None:
        name = self._peers.pop((message.worker_id, message.incarnation), None)
        if name is None:
            return
        for state in [s for s in self._reads.values() if s.peer == name]:
            # Its process is attested dead, so nothing can write any more, whatever NIXL says.
            self._give_up(state, "PEER_FENCED")
            if state.order.request_id in self._reads:
                self._transport.release(state.handle)
                self._end(state, published=False, reason=state.given_up)
        with contextlib.suppress(TransportError):
            self._transport.drop_peer(name)

    # Reading.

    def _start_read(self, order: m.Read) -> None:
        faults = self._faults.now()
        faults.before_read(order)
        now = self._clock()
        reason = ""
        peer = self._peers.get((order.worker_id, order.incarnation))
        if peer is None:
            reason = "PEER_UNKNOWN"
        elif now > order.deadline_ns - DEADLINE_MARGIN_NS:
            reason = "LEASE_EXPIRED"
        else:
            try:
                handle = self._transport.post_read(
                    peer,
                    order.local_block_ids,
                    order.remote_block_ids,
                    b"|".join((_DONE if order.last else _ASK, order.lease_id.encode())),
                )
            except TransportError as error:
                _log.warning("read_refused", lease=order.lease_id, error=str(error))
                reason = "TRANSFER_FAILED"
        if reason or peer is None:
            self._tell_engine(order, failed=True)
            self._send(m.ReadEnded(order.request_id, order.lease_id, False, reason, 0, 0))
            return
        self._reads[order.request_id] = _ReadState(
            order, peer, handle, now, order.deadline_ns, faults
        )

    def _progress(self, state: _ReadState, now: int) -> bool:
        """Moves one read on. True: something happened."""
        if state.given_up:
            return self._try_to_let_go(state)
        if state.phase is _Phase.CONFIRMING:
            if state.held is not None:
                late = self._clock() > state.deadline_ns
                self._finish(state, "LATE" if late else "" if state.held else "SOURCE_LET_GO")
                return True
            if now > min(state.deadline_ns, state.completed_ns + CONFIRM_TIMEOUT_NS):
                self._finish(state, "SOURCE_SILENT")
                return True
            return False
        status = self._transport.state(state.handle)
        if state.faults.stall_reads:
            status = "PROC"
        if status == "DONE":
            # After completion, not before: a process that was paused must see its own lateness.
            state.completed_ns = self._clock()
            state.bytes_moved = self._transport.bytes_moved(state.handle)
            if state.completed_ns > state.deadline_ns:
                self._finish(state, "LATE")
                return True
            state.phase = _Phase.CONFIRMING
            return True
        if status == "ERR":
            self._finish(state, "TRANSFER_FAILED")
            return True
        if now > state.deadline_ns - DEADLINE_MARGIN_NS:
            self._give_up(state, "LEASE_EXPIRED")
            return True
        if now > state.posted_ns + READ_STALL_NS:
            self._give_up(state, "TRANSFER_STALLED")
            return True
        return False

    def _answered(self, lease_id: str, peer: str, held: bool) -> None:
        for state in self._reads.values():
            if state.order.lease_id == lease_id and state.peer == peer:
                state.held = held

    def _finish(self, state: _ReadState, reason: str) -> None:
        """The read is over, well or not: tell vLLM, let NIXL go, tell the scheduler side."""
        if not reason:
            state.faults.after_read(state.order, self._regions)
        self._tell_engine(state.order, failed=bool(reason))
        if self._transport.release(state.handle):
            self._end(state, published=not reason, reason=reason)
        else:
            state.given_up = reason or "RELEASE_FAILED"

    def _give_up(self, state: _ReadState, reason: str) -> None:
        """The request recomputes now; the landing blocks wait until NIXL has let go."""
        if state.given_up:
            return
        state.given_up = reason
        self._tell_engine(state.order, failed=True)
        if not self._try_to_let_go(state) and not state.order.attended:
            self._send(m.ReadGivenUp(state.order.request_id, reason))

    def _try_to_let_go(self, state: _ReadState) -> bool:
        """Ends a given-up read once NIXL says that it has completed or failed.

        Releasing the handle of a READ in flight asks NIXL to cancel it, which proves nothing: the
        landing blocks stay in quarantine until it has ended, or its source is attested dead.
        """
        if state.faults.stall_reads or self._transport.state(state.handle) == "PROC":
            return False
        if not self._transport.release(state.handle):
            return False
        self._end(state, published=False, reason=state.given_up)
        return True

    def _end(self, state: _ReadState, *, published: bool, reason: str) -> None:
        self._reads.pop(state.order.request_id, None)
        elapsed = (state.completed_ns or self._clock()) - state.posted_ns
        self._send(
            m.ReadEnded(
                state.order.request_id,
                state.order.lease_id,
                published,
                reason,
                state.bytes_moved,
                elapsed,
            )
        )

    def _tell_engine(self, order: m.Read, *, failed: bool) -> None:
        if order.attended:
            self._report(order.request_id, failed=failed)

    def _report(self, request_id: str, *, failed: bool) -> None:
        with self._results.lock:
            self._results.finished.add(request_id)
            if failed:
                self._results.failed.add(request_id)

    # Serving.

    def _handle_notices(self) -> bool:
        received = self._transport.notices()
        for peer, message in received:
            kind, _, rest = message.partition(b"|")
            lease_id = rest.decode(errors="replace")
            if kind in (_DONE, _ASK):
                # The lease leaves this table before the scheduler side frees its blocks, so a yes
                # proves that they were held after the read had completed.
                deadline = self._serving.get(lease_id)
                held = deadline is not None and self._clock() <= deadline
                try:
                    self._transport.notify(
                        peer, b"|".join((_YES if held else _NO, lease_id.encode()))
                    )
                except TransportError as error:
                    _log.warning("answer_lost", lease=lease_id, error=str(error))
                if held and kind == _DONE:
                    self._send(m.ReaderDone(lease_id))
                # The answer needs a few more calls into NIXL to leave this process.
                self._linger_until = max(self._linger_until, self._clock() + NS // 5)
            elif kind in (_YES, _NO):
                self._answered(lease_id, peer, kind == _YES)
        return bool(received)

    # Reporting.

    def _send(self, message: m.FromMover) -> None:
        with contextlib.suppress(zmq.Again):
            self._events.send(m.encode(message), zmq.NOBLOCK)

    def _fail_everything(self) -> None:
        """No request may hang because this thread died."""
        for state in list(self._reads.values()):
            if not state.given_up:
                self._tell_engine(state.order, failed=True)
