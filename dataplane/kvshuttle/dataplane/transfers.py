"""Reads under leases and answers readers, on one rank: everything that the mover decides.

Nothing here waits or knows of threads and sockets: :mod:`kvshuttle.dataplane.mover` calls it from
the thread that owns NIXL, and the simulation of the tests from virtual time. The rules:

* nothing is posted after a lease's deadline less a margin;
* what completed is published only if the clock, looked at *after* completion, is before the
  deadline, and the source says that it still held then;
* the landing blocks of a read that was given up are reported free only when NIXL has let go of it.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvshuttle.dataplane import journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, Clock
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.landing_zones import LandingZones
from kvshuttle.dataplane.limits import (
    CONFIRM_TIMEOUT_NS,
    CONNECT_LINGER_NS,
    DEADLINE_MARGIN_NS,
    READ_STALL_NS,
    SLOWEST_BYTES_A_SECOND,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.push_steps import PushStep
from kvshuttle.dataplane.push_writer import GONE, PUSHED, STOPPING, PushWriter
from kvshuttle.dataplane.transport import (
    BlockList,
    LocalRegion,
    ReadHandle,
    TransportError,
    counted_bytes,
)

__all__ = ["Results", "Transfers", "Transport"]

_log = get_logger("transfers")

# From the reader after a READ: done, I read no more; ask, I go on. Both are answered yes or no:
# whether the source still held the range.
_DONE, _ASK, _YES, _NO, _HELLO = b"done", b"ask", b"yes", b"no", b"hello"
# The reason of everything that a broken mover refuses.
_FAILED = "MOVER_FAILED"


class Transport(Protocol):
    """What is used of :class:`kvshuttle.dataplane.transport.NixlTransport`; see there."""

    def add_peer(
        self,
        agent_name: str,
        metadata: bytes,
        regions: list[m.PeerRegion],
        heads: m.HeadSlice | None,
    ) -> None:
        """Loads a peer and starts to connect."""

    def drop_peer(self, agent_name: str) -> None:
        """Forgets a peer."""

    def post_read(
        self, agent_name: str, local: Sequence[int], remote: Sequence[int], notice: bytes
    ) -> ReadHandle:
        """Posts a READ of what is read of the peer's blocks, with a notice to it at completion."""

    def prepare(self, agent_name: str, blocks: Sequence[int]) -> BlockList:
        """Prepares descriptors of a peer's blocks, or of our own, for `post_write`."""

    def post_write(
        self, local: BlockList, remote: BlockList, offset: int, regions: range
    ) -> ReadHandle:
        """Posts a WRITE of whole blocks of some regions."""

    def drop_list(self, blocks: BlockList) -> None:
        """Lets prepared descriptors go."""

    def state(self, handle: ReadHandle) -> str:
        """``PROC``, ``DONE`` or ``ERR``."""

    def bytes_moved(self, handle: ReadHandle) -> int:
        """Bytes of a completed READ or WRITE."""

    def release(self, handle: ReadHandle) -> bool:
        """Lets go of a READ or WRITE; False: it may still write."""

    def notify(self, agent_name: str, message: bytes) -> None:
        """Sends a notice."""

    def notices(self) -> list[tuple[str, bytes]]:
        """New notices as (peer, message)."""


class _Phase(enum.Enum):
    POSTED = "posted"
    CONFIRMING = "confirming"


@dataclass(eq=False)
class _Part:
    """The READ from one rank of the source. `handle` is None once NIXL has let go."""

    peer: str
    handle: ReadHandle | None
    done: bool = False
    # The source's answer; it may come before this side has noticed that its READ is complete.
    held: bool | None = None


@dataclass(eq=False)
class _ReadState:
    order: m.Read
    parts: list[_Part]
    posted_ns: int
    deadline_ns: int
    faults: Faults
    phase: _Phase = _Phase.POSTED
    completed_ns: int = 0
    bytes_moved: int = 0
    descriptors: int = 0
    # Reason for which vLLM was told that the load failed, while NIXL has not let go.
    given_up: str = ""

    @property
    def held(self) -> bool | None:
        """Whether all ranks of the source still held; None until it is known."""
        answers = [part.held for part in self.parts]
        if False in answers:
            return False
        return None if None in answers else True


@dataclass
class Results:
    """What vLLM is told at its next step; filled by the mover's thread, taken by vLLM's."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def add(self, request_id: str, *, failed: bool) -> None:
        """A load has ended."""
        with self.lock:
            self.finished.add(request_id)
            if failed:
                self.failed.add(request_id)

    def take(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them that failed."""
        with self.lock:
            finished, failed = self.finished, self.failed
            self.finished, self.failed = set(), set()
        return finished, failed


class Transfers:
    """One rank's reads and the leases that it serves. One thread calls it."""

    def __init__(
        self,
        transport: Transport,
        regions: list[LocalRegion],
        results: Results,
        send: Callable[[m.FromMover], None],
        faults: Faults,
        clock: Clock,
    ) -> None:
        self._transport = transport
        self._regions = regions
        self._results = results
        self._send = send
        self._faults = faults
        self._clock = clock
        self._reads: dict[str, _ReadState] = {}
        self._serving: dict[str, int] = {}
        # The rank of a boot that keeps the heads that this one keeps, if there is one.
        self._peers: dict[tuple[str, int], str] = {}
        # What is read of each rank of a boot, by the rank's name.
        self._sources: dict[tuple[str, int], dict[str, m.HeadSlice]] = {}
        # All ranks of a boot that this one reaches.
        self._names: dict[tuple[str, int], set[str]] = {}
        self._linger_until = 0
        self.pushes = PushWriter(transport, regions, send, faults, clock, self._peers)
        self.zones = LandingZones(regions, results, send, faults, clock, self._peers)

    @property
    def busy(self) -> bool:
        """Whether NIXL has to be polled."""
        if self._reads or self._serving or self.pushes.busy or self.zones.busy:
            return True
        return self._clock() < self._linger_until

    @property
    def unsettled(self) -> bool:
        """Whether a WRITE is in flight, or may be that comes here, be it that nobody waits for it
        any more. It ends only if both of its ends look."""
        return self.pushes.writing or self.zones.open

    @property
    def waited_for(self) -> bool:
        """Whether a request waits for one of the reads, or a WRITE is in flight or about to be."""
        return (
            self.pushes.writing
            or self.pushes.filling
            or any(not state.given_up for state in self._reads.values())
        )

    @property
    def written_to(self) -> bool:
        """Whether a request waits for a landing zone."""
        return self.zones.written_to

    def reading(self, request_id: str) -> bool:
        """Whether this read's bytes are still awaited: posted, not complete, not given up."""
        state = self._reads.get(request_id)
        return state is not None and state.phase is _Phase.POSTED and not state.given_up

    def poll(self) -> bool:
        """Moves everything on. True: something happened."""
        now = self._clock()
        moved = self._handle_notices()
        for request_id in list(self._reads):
            moved |= self._progress(self._reads[request_id], now)
        for lease_id, deadline in list(self._serving.items()):
            # The scheduler side closes the lease at the same deadline; this only bounds the
            # polling should its message be late.
            if now > deadline + NS:
                del self._serving[lease_id]
        moved |= self.pushes.poll()
        return self.zones.poll() or moved

    def begin_step(self, step: PushStep) -> None:
        """A step of the engine that computes chunks of pushes."""
        self.pushes.step(step)

    def obey(self, message: m.ToMover) -> None:
        """One order of the scheduler side."""
        match message:
            case m.Read():
                self._start_read(message)
            case m.Serve():
                self._serving[message.lease_id] = message.deadline_ns
            case m.Unserve():
                self._serving.pop(message.lease_id, None)
                self._send(m.Unserved(message.lease_id))
            case m.Abandon():
                if self.zones.abandon(message.request_id, message.reason):
                    return
                state = self._reads.get(message.request_id)
                if state is not None:
                    self._give_up(state, message.reason)
            case m.ExtendRead():
                if self.zones.extend(message.request_id, message.deadline_ns):
                    return
                state = self._reads.get(message.request_id)
                if state is not None:
                    state.deadline_ns = max(state.deadline_ns, message.deadline_ns)
            case m.Refuse():
                self._refuse_load(message)
            case m.AddPeer():
                self._add_peer(message)
            case m.DropPeer():
                self._drop_peer(message)
            case _:
                self._obey_push(message)

    def _obey_push(self, message: m.ToMover) -> None:
        match message:
            case m.Await():
                self.zones.wait_for(message)
            case m.Unawait():
                self.zones.unawait(message)
            case m.Push():
                self.pushes.push(message)
            case m.PushBlocks():
                self.pushes.blocks(message.chunk)
            case m.PushFinish():
                self.pushes.finish(message)
            case m.ExtendPush():
                self.pushes.extend(message)
            case m.PushStop():
                self.pushes.stop(message)
            case _:
                pass

    def fail_everything(self) -> None:
        """NIXL cannot be used any more, and no request may hang for that.

        What is in flight may still be written to, so its landing blocks stay in quarantine. No
        reader is told yes any more, and no peer counts as reachable.
        """
        self._serving.clear()
        for state in list(self._reads.values()):
            if state.given_up:
                continue
            state.given_up = _FAILED
            self._tell_engine(state.order, failed=True)
            if not state.order.attended:
                self._send(m.ReadGivenUp(state.order.request_id, _FAILED))
        self.pushes.fail_everything(_FAILED)
        self.zones.fail_everything(_FAILED)
        for worker_id, incarnation in self._names:
            self._send(m.PeerReady(worker_id, incarnation, _FAILED))

    def refuse(self, message: m.ToMover) -> None:
        """One order of the scheduler side, after :meth:`fail_everything`."""
        self.pushes.refuse(message, _FAILED)
        self.zones.refuse(message, _FAILED)
        match message:
            case m.Read():
                if not self.zones.told_already(message.request_id):
                    self._tell_engine(message, failed=True)
                self._send(m.ReadEnded(message.request_id, message.lease_id, False, _FAILED, 0, 0))
            case m.Refuse():
                self._refuse_load(message)
            case m.Unserve():
                self._send(m.Unserved(message.lease_id))
            case m.AddPeer():
                self._send(m.PeerReady(message.worker_id, message.incarnation, _FAILED))
            case m.DropPeer():
                # Attested dead: nothing of it writes any more, so what was in flight has ended.
                self._forget_peer(message)
                for state in self._reads_from(message):
                    self._end(state, published=False, reason=state.given_up)
            case _:
                pass

    # Peers.

    def _add_peer(self, message: m.AddPeer) -> None:
        error = ""
        key = (message.worker_id, message.incarnation)
        name, heads = message.agent_name, message.heads
        try:
            self._transport.add_peer(name, message.agent_metadata, message.regions, heads)
            self._transport.notify(name, _HELLO)
            self._names.setdefault(key, set()).add(name)
            if heads is not None:
                self._sources.setdefault(key, {})[name] = heads
                if heads.whole:
                    self._peers[key] = name
            # Both ends have to call in for the connection to come up: do it now, in the
            # background, so that the first transfer does not pay for it.
            self._linger_until = self._clock() + CONNECT_LINGER_NS
        except TransportError as failure:
            error = str(failure)
            _log.warning("peer_unreachable", worker=message.worker_id, error=error)
        self._send(m.PeerReady(message.worker_id, message.incarnation, error))

    def _drop_peer(self, message: m.DropPeer) -> None:
        names = self._forget_peer(message)
        for state in self._reads_from(message):
            # Its process is attested dead, so nothing can write any more, whatever NIXL says.
            self._give_up(state, "PEER_FENCED")
            if state.order.request_id in self._reads:
                for part in state.parts:
                    if part.handle is not None:
                        self._transport.release(part.handle)
                self._end(state, published=False, reason=state.given_up)
        self.pushes.drop_peer(message.worker_id, message.incarnation)
        self.zones.drop_peer(message.worker_id, message.incarnation)
        # A process that has, or had, more than one number is the same agent under each.
        for name in names.difference(*self._names.values()):
            with contextlib.suppress(TransportError):
                self._transport.drop_peer(name)

    def _forget_peer(self, message: m.DropPeer) -> set[str]:
        key = (message.worker_id, message.incarnation)
        self._peers.pop(key, None)
        self._sources.pop(key, None)
        return self._names.pop(key, set())

    def _reads_from(self, message: m.DropPeer) -> list[_ReadState]:
        key = (message.worker_id, message.incarnation)
        return [
            state
            for state in self._reads.values()
            if (state.order.worker_id, state.order.incarnation) == key
        ]

    def _whole_source(self, order: m.Read) -> list[str]:
        """The ranks to read from, if together they have every head of this one; else none."""
        sources = self._sources.get((order.worker_id, order.incarnation), {})
        heads = sum(x.count for x in sources.values())
        return list(sources) if all(heads == x.my_heads for x in sources.values()) else []

    # Reading.

    def _start_read(self, order: m.Read) -> None:
        if self.zones.told_already(order.request_id):
            # Its landing was given up here, so its request may run: nothing lands there any more.
            self._send(m.ReadEnded(order.request_id, order.lease_id, False, "LATE", 0, 0))
            return
        faults = self._faults.now()
        faults.before_read(order)
        now = self._clock()
        reason = ""
        peers = self._whole_source(order)
        parts: list[_Part] = []
        if not peers:
            reason = "PEER_UNKNOWN"
        elif now > order.deadline_ns - DEADLINE_MARGIN_NS:
            reason = "LEASE_EXPIRED"
        else:
            notice = b"|".join((_DONE if order.last else _ASK, order.lease_id.encode()))
            try:
                for peer in peers:
                    handle = self._transport.post_read(
                        peer, order.local_block_ids, order.remote_block_ids, notice
                    )
                    parts.append(_Part(peer, handle))
            except TransportError as error:
                _log.warning("read_refused", lease=order.lease_id, error=str(error))
                reason = "TRANSFER_FAILED"
        if not parts:
            self._tell_engine(order, failed=True)
            self._send(m.ReadEnded(order.request_id, order.lease_id, False, reason, 0, 0))
            return
        state = _ReadState(order, parts, now, order.deadline_ns, faults)
        self._reads[order.request_id] = state
        journal.note("read_posted", lease=order.lease_id, read=order.request_id)
        if reason:
            # Some of it is in flight.
            self._give_up(state, reason)

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
        status = self._look(state)
        if status == "DONE":
            # After completion, not before: a process that was paused must see its own lateness.
            state.completed_ns = self._clock()
            journal.note("read_completed", lease=state.order.lease_id, read=state.order.request_id)
            if state.completed_ns > state.deadline_ns:
                self._finish(state, "LATE")
                return True
            state.phase = _Phase.CONFIRMING
            return True
        if status == "ERR":
            self._give_up(state, "TRANSFER_FAILED")
            return True
        if now > state.deadline_ns - DEADLINE_MARGIN_NS:
            self._give_up(state, "LEASE_EXPIRED")
            return True
        if now > state.posted_ns + self._patience_ns(state.order):
            self._give_up(state, "TRANSFER_STALLED")
            return True
        return False

    def _patience_ns(self, order: m.Read) -> int:
        size = len(order.local_block_ids) * sum(region.block_bytes for region in self._regions)
        return READ_STALL_NS + size * NS // SLOWEST_BYTES_A_SECOND

    def _look(self, state: _ReadState) -> str:
        """How the READs of all ranks stand, taken together; asking drives progress."""
        if state.faults.stall_reads:
            return "PROC"
        together = "DONE"
        for part in state.parts:
            if part.done or part.handle is None:
                continue
            status = self._transport.state(part.handle)
            if status == "DONE":
                part.done = True
                state.descriptors += part.handle.descriptors
                state.bytes_moved += counted_bytes(
                    self._transport, part.handle, state.order.lease_id
                )
            elif status == "ERR" or together == "DONE":
                together = status
        return together

    def _answered(self, lease_id: str, peer: str, held: bool) -> None:
        for state in self._reads.values():
            if state.order.lease_id == lease_id:
                for part in state.parts:
                    if part.peer == peer:
                        part.held = held

    def _finish(self, state: _ReadState, reason: str) -> None:
        """The read is over, well or not: tell vLLM, let NIXL go, tell the scheduler side."""
        if not reason:
            state.faults.after_read(state.order, self._regions)
        self._tell_engine(state.order, failed=bool(reason))
        if self._released(state):
            self._end(state, published=not reason, reason=reason)
        else:
            state.given_up = reason or "RELEASE_FAILED"
            self._send(m.ReadGivenUp(state.order.request_id, state.given_up))

    def _give_up(self, state: _ReadState, reason: str) -> None:
        """The request recomputes now; the landing blocks wait until NIXL has let go."""
        if state.given_up:
            return
        state.given_up = reason
        self._tell_engine(state.order, failed=True)
        if not self._try_to_let_go(state):
            self._send(m.ReadGivenUp(state.order.request_id, reason))

    def _try_to_let_go(self, state: _ReadState) -> bool:
        """Ends a given-up read once NIXL says that it has completed or failed.

        Releasing the handle of a READ in flight asks NIXL to cancel it, which proves nothing: the
        landing blocks stay in quarantine until it has ended, or its source is attested dead.
        """
        if state.faults.stall_reads or not self._released(state):
            return False
        self._end(state, published=False, reason=state.given_up)
        return True

    def _released(self, state: _ReadState) -> bool:
        """Lets go of the READs that have ended; whether all have."""
        for part in state.parts:
            if part.handle is None:
                continue
            if not part.done and self._transport.state(part.handle) == "PROC":
                continue
            if self._transport.release(part.handle):
                part.handle = None
        return all(part.handle is None for part in state.parts)

    def _end(self, state: _ReadState, *, published: bool, reason: str) -> None:
        self._reads.pop(state.order.request_id, None)
        journal.note(
            "read_over",
            lease=state.order.lease_id,
            read=state.order.request_id,
            published=published,
            reason=reason,
        )
        elapsed = (state.completed_ns or self._clock()) - state.posted_ns
        self._send(
            m.ReadEnded(
                state.order.request_id,
                state.order.lease_id,
                published,
                reason,
                state.bytes_moved,
                elapsed,
                state.descriptors,
            )
        )

    def _refuse_load(self, order: m.Refuse) -> None:
        if not self.zones.told_already(order.request_id):
            self._report(order.request_id, failed=True)
            # Nothing waits for it, but an engine that rests looks.
            self._send(m.ReadGivenUp(order.request_id, "REFUSED"))

    def _tell_engine(self, order: m.Read, *, failed: bool) -> None:
        if order.attended:
            self._report(order.request_id, failed=failed)

    def _report(self, request_id: str, *, failed: bool) -> None:
        self._results.add(request_id, failed=failed)

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
            elif kind in (PUSHED, STOPPING, GONE):
                self.zones.notice(peer, kind, rest)
        return bool(received)
