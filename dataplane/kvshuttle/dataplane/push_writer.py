"""Writes under leases, on one rank: what the mover decides about pushes from here.

As in :mod:`kvshuttle.dataplane.transfers`, nothing here waits or knows of threads and sockets. The
rules:

* nothing is posted after the lease's deadline less a margin, or after an order to stop;
* the destination is told that all is written only when every WRITE has completed, before the
  deadline, and that the writer has gone only when none of its WRITEs is in flight;
* a local block is reported free of us only when the WRITEs from it have ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.dataplane import journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, Clock
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.limits import (
    DEADLINE_MARGIN_NS,
    MAX_CLOSED_PUSHES,
    SLOWEST_BYTES_A_SECOND,
    STOPPED_POLLING_NS,
    WRITE_STALL_NS,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.push_steps import PushStep
from kvshuttle.dataplane.transport import (
    BlockList,
    LocalRegion,
    ReadHandle,
    TransportError,
    counted_bytes,
)

if TYPE_CHECKING:
    from kvshuttle.dataplane.transfers import Transport

__all__ = ["GONE", "PUSHED", "STOPPING", "PushWriter"]

_log = get_logger("pushes")

PUSHED, STOPPING, GONE = b"pushed", b"stopping", b"gone"
"""Notices of a writer: all is written; or it will not be, and why, though something may be in
flight; or it writes no more, and why."""


@dataclass(eq=False)
class _Flying:
    handle: ReadHandle
    posted_ns: int
    # Its bytes, and those of other WRITEs to the same peer that were in flight when it was posted
    # or have been posted since.
    sharing: int

    @property
    def patience_ns(self) -> int:
        """How long it may take."""
        return WRITE_STALL_NS + self.sharing * NS // SLOWEST_BYTES_A_SECOND


@dataclass(eq=False)
class _Chunk:
    order: m.PushChunk
    # None: all of it was final when it was ordered.
    step: PushStep | None
    blocks: BlockList | None = None
    posted: int = 0
    flying: list[_Flying] = field(default_factory=list)


@dataclass(eq=False)
class _Push:
    order: m.Push
    peer: str
    target: BlockList | None
    deadline_ns: int
    faults: Faults
    chunks: list[_Chunk] = field(default_factory=list)
    chunks_done: int = 0
    chunks_all: int | None = None
    stopping: str = ""
    # Whoever waits for it was told that it stops, while something was in flight.
    said_stopping: bool = False
    blocks_written: int = 0
    bytes_moved: int = 0
    # In which something of it was in flight.
    transfer_ns: int = 0
    flying_since_ns: int = 0
    descriptors: int = 0

    @property
    def flying(self) -> bool:
        """Whether a WRITE is in flight."""
        return any(chunk.flying for chunk in self.chunks)

    @property
    def filling(self) -> bool:
        """Whether the device must be asked again how far it is."""
        steps = [chunk.step for chunk in self.chunks if not chunk.order.ready]
        return any(step is not None and step.waiting for step in steps)


class PushWriter:
    """One rank's pushes. One thread calls it; `peers` is the mover's table of boots."""

    def __init__(
        self,
        transport: Transport,
        regions: list[LocalRegion],
        send: Callable[[m.FromMover], None],
        faults: Faults,
        clock: Clock,
        peers: dict[tuple[str, int], str],
    ) -> None:
        self._transport = transport
        self._send = send
        self._faults = faults
        self._clock = clock
        self._peers = peers
        self._pushes: dict[str, _Push] = {}
        # Chunks whose lease has not been heard of yet: steps and orders come on ways of their own.
        self._early: dict[str, list[_Chunk]] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.num_regions = max(1, len(regions))
        self.linger_until = 0

    @property
    def busy(self) -> bool:
        """Whether NIXL, or the device, has to be polled."""
        now = self._clock()
        return now < self.linger_until or any(
            (push.stopping and now < push.deadline_ns + STOPPED_POLLING_NS)
            or (not push.stopping and (push.flying or push.filling))
            for push in self._pushes.values()
        )

    @property
    def writing(self) -> bool:
        """Whether a WRITE is in flight."""
        return any(push.flying for push in self._pushes.values())

    @property
    def filling(self) -> bool:
        """Whether the device has yet to come to something that is to be written. Its layers' hooks
        are called when they are queued, all at once, so nobody says when it has."""
        return any(push.filling and not push.stopping for push in self._pushes.values())

    def poll(self) -> bool:
        """Moves everything on. True: something happened."""
        moved = False
        for push in list(self._pushes.values()):
            moved |= self._progress(push)
        return moved

    def push(self, order: m.Push) -> None:
        """A lease to write under."""
        early = self._early.pop(order.lease_id, [])
        if order.lease_id in self._pushes:
            return
        if order.lease_id in self._closed:
            # Its destination may have the blocks back. Whoever ordered it again hears that it is
            # over, or would wait for that for ever.
            self._send(m.PushEnded(order.lease_id, False, "LEASE_USED"))
            return
        peer = self._peers.get((order.worker_id, order.incarnation), "")
        push = _Push(order, peer, None, order.deadline_ns, self._faults.now(), early)
        self._pushes[order.lease_id] = push
        if not peer:
            push.stopping = "PEER_UNKNOWN"
            return
        try:
            push.target = self._transport.prepare(peer, order.remote_block_ids)
        except TransportError as error:
            _log.warning("push_refused", lease=order.lease_id, error=str(error))
            push.stopping = "TRANSFER_FAILED"

    def blocks(self, order: m.PushChunk) -> None:
        """A chunk that is final."""
        self._add(_Chunk(order, None))

    def step(self, step: PushStep) -> None:
        """The chunks of a step that begins."""
        for order in step.chunks:
            self._add(_Chunk(order, step))

    def _add(self, chunk: _Chunk) -> None:
        lease_id = chunk.order.lease_id
        push = self._pushes.get(lease_id)
        if push is not None:
            push.chunks.append(chunk)
        elif lease_id not in self._closed:
            self._early.setdefault(lease_id, []).append(chunk)

    def finish(self, order: m.PushFinish) -> None:
        """No chunk follows."""
        push = self._pushes.get(order.lease_id)
        if push is not None:
            push.chunks_all = order.chunks

    def extend(self, order: m.ExtendPush) -> None:
        """A later deadline."""
        push = self._pushes.get(order.lease_id)
        if push is not None:
            push.deadline_ns = max(push.deadline_ns, order.deadline_ns)

    def stop(self, order: m.PushStop) -> None:
        """Nothing more is posted; PushEnded when nothing is in flight."""
        push = self._pushes.get(order.lease_id)
        if push is None:
            known = order.lease_id in self._closed
            self._close(order.lease_id)
            if order.anew or not known:
                self._send(m.PushEnded(order.lease_id, False, order.reason))
            return
        push.stopping = push.stopping or order.reason
        self._progress(push)

    def _progress(self, push: _Push) -> bool:
        moved = False
        now = self._clock()
        if not push.stopping and now > push.deadline_ns - DEADLINE_MARGIN_NS:
            push.stopping = "LEASE_EXPIRED"
        for chunk in list(push.chunks):
            moved |= self._look(push, chunk, now)
            if not push.stopping:
                moved |= self._post(push, chunk)
            if chunk.posted >= self.num_regions and not chunk.flying:
                self._drop_chunk(push, chunk)
                push.chunks_done += 1
                push.blocks_written += len(chunk.order.local_block_ids)
                self._send(m.PushChunkDone(push.order.lease_id, chunk.order.number))
                moved = True
        if push.stopping:
            if not push.flying:
                self._end(push, push.stopping)
                return True
            if not push.said_stopping:
                push.said_stopping = True
                self._say(push, STOPPING, push.stopping)
                self._send(m.PushStopping(push.order.lease_id, push.stopping))
        elif push.chunks_all is not None and push.chunks_done >= push.chunks_all:
            # After completion, not before: a process that was paused must see its own lateness.
            self._end(push, "LATE" if self._clock() > push.deadline_ns else "")
            return True
        return moved

    def _post(self, push: _Push, chunk: _Chunk) -> bool:
        step = chunk.step
        final = self.num_regions if step is None or chunk.order.ready else step.final()
        if final <= chunk.posted or push.target is None:
            return False
        push.faults.before_write(push.order.lease_id)
        # NIXL copies while it posts, between two processes of one machine.
        begun_ns = self._clock()
        try:
            if chunk.blocks is None:
                chunk.blocks = self._transport.prepare("", chunk.order.local_block_ids)
            handle = self._transport.post_write(
                chunk.blocks, push.target, chunk.order.offset, range(chunk.posted, final)
            )
        except TransportError as error:
            _log.warning("write_refused", lease=push.order.lease_id, error=str(error))
            push.stopping = "TRANSFER_FAILED"
            return True
        journal.note("write_posted", lease=push.order.lease_id, chunk=chunk.order.number)
        self._flies(push, chunk, handle, begun_ns)
        chunk.posted = final
        self._look(push, chunk, self._clock())
        return True

    def _flies(self, push: _Push, chunk: _Chunk, handle: ReadHandle, begun_ns: int) -> None:
        """A WRITE was posted."""
        if not push.flying:
            push.flying_since_ns = begun_ns
        size = handle.expected_bytes
        others = [
            write
            for other in self._pushes.values()
            if other.peer == push.peer
            for written in other.chunks
            for write in written.flying
        ]
        for write in others:
            write.sharing += size
        ahead = sum(write.handle.expected_bytes for write in others)
        chunk.flying.append(_Flying(handle, begun_ns, ahead + size))

    def _look(self, push: _Push, chunk: _Chunk, now: int) -> bool:
        """Takes out what has ended."""
        moved = False
        for write in list(chunk.flying):
            handle = write.handle
            status = self._transport.state(handle)
            if push.faults.stall_pushes:
                status = "PROC"
            if status == "PROC":
                if now > write.posted_ns + write.patience_ns:
                    push.stopping = push.stopping or "TRANSFER_STALLED"
                continue
            if status == "DONE":
                push.bytes_moved += counted_bytes(self._transport, handle, push.order.lease_id)
                push.descriptors += handle.descriptors
            else:
                push.stopping = push.stopping or "TRANSFER_FAILED"
            if not self._transport.release(handle) and status != "DONE":
                continue  # a part of it may be in flight
            chunk.flying.remove(write)
            moved = True
            if not push.flying:
                push.transfer_ns += max(0, self._clock() - push.flying_since_ns)
        return moved

    def _drop_chunk(self, push: _Push, chunk: _Chunk) -> None:
        push.chunks.remove(chunk)
        if chunk.blocks is not None:
            self._transport.drop_list(chunk.blocks)

    def _end(self, push: _Push, reason: str) -> None:
        order = push.order
        # Before its destination can hear of it.
        journal.note("writes_over", lease=order.lease_id, reason=reason)
        said = not push.peer or self._say(push, GONE if reason else PUSHED, reason)
        if not said and not reason:
            reason = "PEER_UNREACHABLE"
        for chunk in list(push.chunks):
            self._drop_chunk(push, chunk)
        if push.target is not None:
            self._transport.drop_list(push.target)
        del self._pushes[order.lease_id]
        self._close(order.lease_id)
        self._send(
            m.PushEnded(order.lease_id, not reason, reason, push.bytes_moved, push.transfer_ns)
        )

    def _say(self, push: _Push, kind: bytes, reason: str) -> bool:
        order = push.order
        words = [str(order.version), order.lease_id]
        counts = (push.bytes_moved, push.transfer_ns, push.blocks_written, push.descriptors)
        words += [reason] if reason else [str(count) for count in counts]
        notice = b"|".join([kind, *(word.encode() for word in words)])
        # The notice needs a few more calls into NIXL to leave this process.
        self.linger_until = max(self.linger_until, self._clock() + NS // 5)
        try:
            self._transport.notify(push.peer, notice)
        except TransportError as error:
            _log.warning("notice_lost", lease=order.lease_id, error=str(error))
            return False
        return True

    def _close(self, lease_id: str) -> None:
        self._early.pop(lease_id, None)
        self._closed[lease_id] = None
        while len(self._closed) > MAX_CLOSED_PUSHES:
            self._closed.popitem(last=False)

    def drop_peer(self, worker_id: str, incarnation: int) -> None:
        """A boot is attested dead: what is written to it is nobody's."""
        for push in list(self._pushes.values()):
            if (push.order.worker_id, push.order.incarnation) != (worker_id, incarnation):
                continue
            for chunk in push.chunks:
                for write in chunk.flying:
                    self._transport.release(write.handle)
                chunk.flying.clear()
            push.peer = ""
            self._end(push, push.stopping or "PEER_FENCED")

    def fail_everything(self, reason: str) -> None:
        """NIXL cannot be used any more. What is in flight stays so for all that is known; what is
        not is over, without a word to its destination: the control plane says it."""
        for push in list(self._pushes.values()):
            push.stopping = push.stopping or reason
            if not push.flying:
                del self._pushes[push.order.lease_id]
                self._close(push.order.lease_id)
                self._send(m.PushEnded(push.order.lease_id, False, push.stopping))

    def refuse(self, message: m.ToMover, reason: str) -> None:
        """One order after :meth:`fail_everything`."""
        match message:
            case m.Push():
                self._close(message.lease_id)
                self._send(m.PushEnded(message.lease_id, False, reason))
            case m.PushStop() if message.lease_id not in self._pushes:
                self.stop(message)
            case m.DropPeer():
                for push in self._pushes.values():
                    # No call into NIXL: its handles are lost with it.
                    for chunk in push.chunks:
                        chunk.blocks = None
                        chunk.flying.clear()
                    push.target = None
                self.drop_peer(message.worker_id, message.incarnation)
            case _:
                pass
