"""The side that writes: prefill's blocks go to decode's landing zone while they are computed.

For each step of the engine the blocks that it completes are a chunk, which the movers write layer
by layer as the forward pass fills them; a prompt's last block, which is not full, goes with the
step that computes its last token. What was computed before the grant came goes with the
next step, whole; and where the leg has ended by then, from what it left. A chunk's blocks are held
until every rank has written them, so that vLLM may free or preempt the request meanwhile.

Whole goes only what a step has computed that is over. With asynchronous scheduling the step before
may still run, and a request's first step, also after a preemption, may have found prefix hits that
another request's part of it fills: that is written layer by layer, with what is computed next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvshuttle.dataplane import journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import Clock
from kvshuttle.dataplane.grants import Grant, parse_grant
from kvshuttle.dataplane.holds import Hold, HoldKind, HoldTable
from kvshuttle.dataplane.limits import DEADLINE_MARGIN_NS
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.matching import Tail, common_prefix
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.dataplane.source import SourceSide
from kvshuttle.dataplane.turns import LegKey, TurnBook
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2

__all__ = ["PushSide", "RequestView", "Scheduled"]

_log = get_logger("push")


class RequestView(Protocol):
    """What is asked of a running request."""

    def hashes(self) -> Sequence[bytes]:
        """Hashes of its full blocks."""

    def tail_hash(self, full: int, tokens: int) -> bytes | None:
        """A `kvshuttle.dataplane.matching.TailHash`."""

    def preemptions(self) -> int:
        """How often vLLM has taken its blocks."""


@dataclass(frozen=True)
class Scheduled:
    """A request in a step: tokens computed before it and in it, and its blocks."""

    request_id: str
    computed: int
    tokens: int
    block_ids: Sequence[int]


@dataclass(eq=False)
class _Live:
    request_id: str
    view: RequestView
    # Its steps that are not known to be over: number, and tokens that are computed after it.
    running: deque[tuple[int, int]] = field(default_factory=deque)
    # Tokens whose KV is final.
    final: int = 0

    def settle(self, over: int) -> None:
        """All steps to this one are over."""
        while self.running and self.running[0][0] <= over:
            _, self.final = self.running.popleft()


@dataclass(eq=False)
class _Push:
    grant: Grant
    destination: tuple[str, int]
    ranks_left: int
    # Blocks before this one are in a chunk.
    sent: int
    preemptions: int | None = None
    holds: dict[int, Hold] = field(default_factory=dict)
    # Ranks that still write a chunk.
    writing: dict[int, int] = field(default_factory=dict)
    chunks: int = 0
    stopping: str = ""
    written: bool = True
    reason: str = ""

    @property
    def end(self) -> int:
        """One past the last block of the landing zone."""
        return self.grant.start + len(self.grant.readable_ids)

    @property
    def full_end(self) -> int:
        """One past its last full block."""
        return self.grant.start + len(self.grant.block_ids)

    def in_chain(self, hashes: Sequence[bytes]) -> bool:
        """Whether the full blocks that are wanted are those of a request with these hashes."""
        own, wanted = hashes[self.grant.start : self.full_end], self.grant.hashes
        return common_prefix(own, wanted) == len(wanted)

    def filled(self, tokens: int, block_size: int) -> int:
        """One past the last block of it that so many computed tokens fill as far as is wanted."""
        tail = self.grant.tail
        if tail is not None and tokens >= self.full_end * block_size + tail.tokens:
            return self.end
        return min(tokens // block_size, self.full_end)


class PushSide:
    """Scheduler thread only. `peers` as in :class:`kvshuttle.dataplane.eager.EagerSide`."""

    def __init__(
        self,
        holds: HoldTable,
        turns: TurnBook,
        source: SourceSide,
        outbox: Outbox,
        clock: Clock,
        block_size: int,
        peers: dict[tuple[str, int], str],
    ) -> None:
        self._holds = holds
        self._turns = turns
        self._source = source
        self._out = outbox
        self._clock = clock
        self._block_size = block_size
        self._peers = peers
        self._pushes: dict[str, _Push] = {}
        self._by_token: dict[str, _Push] = {}
        self._live: dict[str, _Live] = {}

    # Commands.

    def grant(self, command: agent_pb2.Grant) -> None:
        """Begins a push, or says that it cannot."""
        if command.lease_id in self._pushes:
            return
        key = (command.turn_token, types_pb2.LEG_PREFILL)
        leg = self._turns.find(key)
        reason = ""
        try:
            grant = parse_grant(command)
        except ValueError as error:
            _log.error("grant_malformed", lease=command.lease_id, error=str(error))
            self._refuse(command, "GRANT_MALFORMED")
            return
        destination = (command.destination.worker_id, command.destination.incarnation)
        if leg is None or leg.push is None or command.turn_token in self._by_token:
            reason = "TURN_GONE_ON"
        elif self._peers.get(destination, "PEER_UNKNOWN"):
            reason = "PEER_UNREACHABLE" if destination in self._peers else "PEER_UNKNOWN"
        elif self._clock() > grant.deadline_ns - DEADLINE_MARGIN_NS:
            reason = "LEASE_EXPIRED"
        left: list[int] = []
        if not reason and leg is not None and leg.ended:
            left = self._source.blocks_of(
                leg.tenant, leg.session_id, grant.start, grant.hashes, grant.tail
            )
            reason = "" if left else "REPLICA_GONE"
        if reason:
            self._refuse(command, reason)
            return
        push = _Push(grant, destination, self._out.num_ranks, grant.start)
        self._pushes[grant.lease_id] = push
        self._by_token[grant.token] = push
        self._out.order(
            m.Push(
                lease_id=grant.lease_id,
                version=command.landing_version,
                worker_id=destination[0],
                incarnation=destination[1],
                remote_block_ids=grant.readable_ids,
                deadline_ns=grant.deadline_ns,
            )
        )
        if left:
            self._chunk_now(push, left)

    def revoke(self, lease_id: str, reason: str) -> None:
        """Writes no more, and says so when nothing is in flight."""
        push = self._pushes.get(lease_id)
        if push is not None:
            self._stop(push, reason or "REVOKED")
            return
        # Its grant, had there been one, would have come before on this stream. The movers' word
        # counts, all the same: what they know of it is over before it is said.
        self._pushes[lease_id] = push = _Push(
            Grant(lease_id, 0, "", types_pb2.LEG_PREFILL, ("", 0), 0, [], [], 0, False),
            ("", 0),
            self._out.num_ranks,
            0,
        )
        push.stopping = reason or "REVOKED"
        self._out.order(m.PushStop(lease_id, push.stopping, anew=True))

    def extend(self, command: agent_pb2.Extend) -> bool:
        """Counts longer; false if this side does not know the lease."""
        push = self._pushes.get(command.lease_id)
        if push is None or push.stopping or command.version <= push.grant.version:
            return False
        push.grant.version = command.version
        self._count_to(push, self._clock() + command.ttl.ToNanoseconds())
        self._out.emit(
            agent_pb2.AgentEvent(
                extended=agent_pb2.LeaseExtended(
                    lease_id=command.lease_id, version=command.version, is_source=True
                )
            )
        )
        return True

    def extend_many(self, command: agent_pb2.ExtendLeases) -> Collection[int]:
        """Counts longer; which of the leases it has."""
        named = set(command.lease_seqs)
        found = []
        for push in self._pushes.values():
            epoch, seq = push.grant.number
            if epoch == command.lease_epoch and seq in named and not push.stopping:
                self._count_to(push, self._clock() + command.ttl.ToNanoseconds())
                found.append(seq)
        return found

    def peer_fenced(self, worker: tuple[str, int]) -> None:
        """A destination's boot is attested dead: the movers end what they wrote to it."""
        for push in self._pushes.values():
            if push.destination == worker:
                push.stopping = push.stopping or "PEER_FENCED"

    def mover_failed(self) -> None:
        """Nothing can be written any more."""
        for push in list(self._pushes.values()):
            self._stop(push, "MOVER_FAILED")

    # Hooks.

    def running(self, request_id: str, key: LegKey, view: RequestView) -> None:
        """vLLM has allocated blocks for a leg's request, maybe not for the first time."""
        leg = self._turns.find(key)
        if key[1] == types_pb2.LEG_PREFILL and leg is not None and leg.push is not None:
            if leg.push_request not in ("", request_id):
                return  # another prompt of the same call: only the first one's hashes are compared
            # Anew where it was preempted: its first step may find such hits again, see the module.
            self._live[request_id] = _Live(request_id, view)
            leg.push_request = request_id

    def wants(self, request_id: str) -> bool:
        """Whether a step with this request is to be told."""
        return request_id in self._live

    def step(self, scheduled: Sequence[Scheduled]) -> list[m.PushChunk]:
        """A step is scheduled: what of it is to be written."""
        if not self._live:
            return []
        chunks: list[m.PushChunk] = []
        begun, over = self._source.steps()
        for known in self._live.values():
            known.settle(over)
        by_request = {item.request_id: item for item in scheduled}
        for token, push in list(self._by_token.items()):
            leg = self._turns.find((token, types_pb2.LEG_PREFILL))
            live = self._live.get(leg.push_request) if leg is not None else None
            if live is None or push.stopping:
                continue
            if not self._same(push, live):
                continue
            item = by_request.get(live.request_id)
            if item is not None:
                chunks += self._step_of(push, live, item)
        for item in scheduled:
            live = self._live.get(item.request_id)
            if live is not None:
                live.running.append((begun, item.computed + item.tokens))
        return chunks

    def finished(
        self,
        request_id: str,
        key: LegKey,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        tail: Tail | None = None,
        *,
        aborted: bool,
    ) -> bool:
        """A prefill leg's request has ended, with these full, written blocks and what follows
        them. True: its KV is pushed, and there is nothing to offer."""
        self._live.pop(request_id, None)
        leg = self._turns.find(key)
        if leg is None or key[1] != types_pb2.LEG_PREFILL:
            return False
        push = self._by_token.get(key[0])
        if leg.push_request not in ("", request_id):
            return push is not None  # another prompt of the same call, see `running`
        leg.ended = True
        leg.push_request = ""
        if push is None:
            return False
        if push.sent < push.end and not push.stopping:
            left = list(block_ids[push.sent : push.full_end])
            wanted = push.grant.tail
            if wanted is not None and tail is not None and tail.same_tokens(wanted):
                left.append(tail.block_id)
            if aborted:
                self._stop(push, "REQUEST_ABORTED")
            elif push.sent + len(left) < push.end:
                self._stop(push, "REQUEST_ENDED")
            elif not push.in_chain(hashes):
                # No step has compared them.
                self._stop(push, "NO_COMMON_PREFIX")
            else:
                # Granted while the last step ran: it is over, so all of it is final.
                self._chunk_now(push, left)
        return True

    def expire(self, now: int) -> None:
        """After the deadline nothing is said to be written, so nothing need be held for it."""
        for push in list(self._pushes.values()):
            if push.grant.deadline_ns and now > push.grant.deadline_ns:
                self._stop(push, "LEASE_EXPIRED")
                self._let_go(push)

    def next_deadline(self) -> int | None:
        """The next instant at which :meth:`expire` has something to do."""
        times = [
            push.grant.deadline_ns + 1
            for push in self._pushes.values()
            if push.grant.deadline_ns and (push.holds or not push.stopping)
        ]
        return min(times, default=None)

    # The movers' reports.

    def chunk_done(self, message: m.PushChunkDone) -> None:
        """One rank has written a chunk."""
        push = self._pushes.get(message.lease_id)
        if push is None or message.number not in push.writing:
            return
        push.writing[message.number] -= 1
        if not push.writing[message.number]:
            del push.writing[message.number]
            self._release(push, message.number)

    def mover_stops(self, message: m.PushStopping) -> None:
        """One rank posts nothing more, so the others need not either; and no extension is given."""
        push = self._pushes.get(message.lease_id)
        if push is not None:
            self._stop(push, message.reason)

    def ended(self, message: m.PushEnded) -> None:
        """One rank writes no more under a lease, and nothing of it is in flight."""
        push = self._pushes.get(message.lease_id)
        if push is None:
            return
        push.ranks_left -= 1
        push.written &= message.written
        push.reason = push.reason or message.reason
        if not message.written:
            # The destination cannot use what other ranks write.
            self._stop(push, message.reason)
        if push.ranks_left > 0:
            return
        self._let_go(push)
        del self._pushes[message.lease_id]
        if self._by_token.get(push.grant.token) is push:
            del self._by_token[push.grant.token]
        written = agent_pb2.TRANSFER_OUTCOME_WRITTEN
        self._out.emit(
            agent_pb2.AgentEvent(
                stopped=agent_pb2.LeaseStopped(
                    lease_id=message.lease_id,
                    outcome=written if push.written else agent_pb2.TRANSFER_OUTCOME_FAILED,
                    reason="" if push.written else push.reason,
                    is_source=True,
                )
            )
        )
        if not push.written:
            _log.info("push_ended", lease=message.lease_id, reason=push.reason)

    @property
    def open_leases(self) -> list[tuple[str, int, int]]:
        """(lease, version, deadline) of each; any thread."""
        return [
            (x.grant.lease_id, x.grant.version, x.grant.deadline_ns)
            for x in list(self._pushes.values())
        ]

    # Inside.

    def _same(self, push: _Push, live: _Live) -> bool:
        """Whether the request still is what was granted: its own hashes, never preempted."""
        preemptions = live.view.preemptions()
        if push.preemptions is None:
            push.preemptions = preemptions
            tail = push.grant.tail
            differs = not push.in_chain(live.view.hashes())
            if tail is not None:
                differs |= live.view.tail_hash(push.full_end, tail.tokens) != tail.hash
            if differs:
                self._stop(push, "NO_COMMON_PREFIX")
                return False
        elif preemptions != push.preemptions:
            # It will compute again, later than decode can.
            self._stop(push, "PREEMPTED")
            return False
        return True

    def _step_of(self, push: _Push, live: _Live, item: Scheduled) -> list[m.PushChunk]:
        before = push.filled(live.final, self._block_size)
        after = push.filled(item.computed + item.tokens, self._block_size)
        found = []
        if before > push.sent:
            found.append(self._chunk(push, item.block_ids[push.sent : before], ready=True))
        if after > push.sent:
            found.append(self._chunk(push, item.block_ids[push.sent : after], ready=False))
        self._finish(push)
        return found

    def _chunk_now(self, push: _Push, block_ids: Sequence[int]) -> None:
        self._out.order(m.PushBlocks(self._chunk(push, block_ids, ready=True)))
        self._finish(push)

    def _chunk(self, push: _Push, block_ids: Sequence[int], *, ready: bool) -> m.PushChunk:
        number = push.chunks
        push.chunks += 1
        # A block that the request and others have lost by now stays as it is until it is written.
        push.holds[number] = self._holds.take(HoldKind.SOURCE, block_ids)
        push.writing[number] = self._out.num_ranks
        journal.note("chunk_held", blocks=block_ids, lease=push.grant.lease_id, chunk=number)
        offset = push.sent - push.grant.start
        push.sent += len(block_ids)
        if number == 0:
            self._out.emit(
                agent_pb2.AgentEvent(
                    active=agent_pb2.LeaseActive(
                        lease_id=push.grant.lease_id, blocks=len(push.grant.readable_ids)
                    )
                )
            )
        return m.PushChunk(push.grant.lease_id, number, offset, list(block_ids), ready)

    def _finish(self, push: _Push) -> None:
        if push.sent >= push.end:
            self._out.order(m.PushFinish(push.grant.lease_id, push.chunks))

    def _stop(self, push: _Push, reason: str) -> None:
        if not push.stopping:
            push.stopping = reason
            self._out.order(m.PushStop(push.grant.lease_id, reason))

    def _let_go(self, push: _Push) -> None:
        for number in reversed(list(push.holds)):
            self._release(push, number)
        push.writing.clear()

    def _release(self, push: _Push, number: int) -> None:
        """A chunk's blocks, if they are held still."""
        hold = push.holds.pop(number, None)
        if hold is not None:
            journal.note("chunk_let_go", lease=push.grant.lease_id, chunk=number)
            self._holds.release(hold)

    def _count_to(self, push: _Push, deadline_ns: int) -> None:
        if deadline_ns > push.grant.deadline_ns:
            push.grant.deadline_ns = deadline_ns
            self._out.order(m.ExtendPush(push.grant.lease_id, deadline_ns))

    def _refuse(self, command: agent_pb2.Grant, reason: str) -> None:
        self._out.emit(
            agent_pb2.AgentEvent(
                refused=agent_pb2.LeaseRefused(
                    lease_id=command.lease_id, version=command.version, reason=reason
                )
            )
        )
