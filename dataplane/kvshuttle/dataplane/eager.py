"""Returns that no request waits for: read while the agent runs its tools, into the prefix cache.

A granted chain is read in pieces. For each piece blocks are taken from the pool (never below a
watermark), read, confirmed by the source, and entered under the hashes that they were granted as.
What has landed is held until the end, so that later pieces do not push out earlier ones, and is
then left to vLLM as ordinary cached blocks. The next turn finds a plain local hit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvshuttle.dataplane import journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import Clock
from kvshuttle.dataplane.counters import Counters
from kvshuttle.dataplane.grants import Grant, parse_grant, say_stopped
from kvshuttle.dataplane.holds import BlockStore, Hold, HoldKind, HoldTable
from kvshuttle.dataplane.limits import (
    DEADLINE_MARGIN_NS,
    EAGER_FREE_SHARE,
    EAGER_PIECE_BLOCKS,
    EAGER_PIECE_NS,
    EAGER_PIECE_SHARE,
    EAGER_REMEMBERED,
    QUARANTINE_SHARE,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.matching import laid_out_as
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.dataplane.source import SourceSide
from kvshuttle.v1 import agent_service_pb2 as agent_pb2

__all__ = ["EagerSide"]

_log = get_logger("eager")


_UNUSED = frozenset({"", "NO_ROOM", "QUARANTINE_FULL", "PRESSURE", "RESET", "ENGINE_PAUSED"})
"""Why a return that brought nothing is no failure."""


@dataclass(eq=False)
class _Piece:
    """Blocks that one READ fills: `hold` has one reference each."""

    name: str
    hold: Hold
    indexes: list[int]
    ranks_left: int
    published: bool = True
    reason: str = ""
    bytes_moved: int = 0
    transfer_ns: int = 0
    descriptors: int = 0


@dataclass(eq=False)
class _Return:
    """One eager return under way."""

    grant: Grant
    tenant: str
    session_id: str
    began_ns: int
    # Positions in the grant that are still to be read.
    missing: list[int]
    # What was cached already, then what has landed, piece by piece.
    kept: list[Hold]
    # After which step each of them that is cached is filled.
    filled: dict[int, int]
    piece: _Piece | None = None
    pieces: int = 0
    # Why nothing more is read; empty while it goes on.
    stopping: str = ""
    revoked: bool = False
    blocks: int = 0
    landed_ns: int = 0
    bytes_moved: int = 0
    transfer_ns: int = 0
    descriptors: int = 0

    @property
    def left(self) -> int:
        """Blocks that have yet to land."""
        return len(self.missing) + (len(self.piece.indexes) if self.piece is not None else 0)


@dataclass
class EagerSide:
    """Scheduler thread only. `peers` maps a worker's boot to "" (ready) or to why it is not."""

    store: BlockStore
    holds: HoldTable
    source: SourceSide
    counters: Counters
    out: Outbox
    clock: Clock
    block_size: int
    peers: dict[tuple[str, int], str]
    paused: bool = False
    """Whether vLLM is: nothing is begun then, neither here nor at the destination side."""
    _open: dict[str, _Return] = field(default_factory=dict)
    _by_piece: dict[str, _Return] = field(default_factory=dict)
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)

    # Commands.

    def grant(self, command: agent_pb2.Grant) -> None:
        """Begins a return, or gives the lease back at once."""
        if command.lease_id in self._open:
            return
        try:
            grant = parse_grant(command)
        except ValueError as error:
            _log.error("grant_malformed", lease=command.lease_id, error=str(error))
            self._refuse(command.lease_id, agent_pb2.TRANSFER_OUTCOME_FAILED, "GRANT_MALFORMED")
            return
        reason = self._why_not(grant)
        if reason:
            self._refuse(command.lease_id, agent_pb2.TRANSFER_OUTCOME_UNUSED, reason)
            return
        cached = [self.store.lookup(h) for h in grant.hashes]
        begun = self.source.steps_begun
        job = _Return(
            grant=grant,
            tenant=command.tenant,
            session_id=command.session_id,
            began_ns=self.clock(),
            missing=[i for i, block_id in enumerate(cached) if block_id is None],
            # Held, so that what is read now does not push out what it continues.
            kept=[self.holds.take(HoldKind.LANDING, [b for b in cached if b is not None])],
            filled={block_id: begun for block_id in cached if block_id is not None},
        )
        self._open[grant.lease_id] = job
        self._go_on(job)

    def revoke(self, lease_id: str, reason: str) -> bool:
        """Stops a return; false if this side does not know the lease."""
        job = self._open.get(lease_id)
        if job is None:
            return False
        job.revoked = True
        self._stop(job, reason or "REVOKED")
        return True

    def extend(self, lease_id: str, version: int, deadline_ns: int) -> bool:
        """Counts longer; false if this side does not know the lease or the version is old."""
        job = self._open.get(lease_id)
        if job is None or version <= job.grant.version:
            return False
        job.grant.version = version
        job.grant.deadline_ns = max(job.grant.deadline_ns, deadline_ns)
        if job.piece is not None:
            self.out.order(m.ExtendRead(job.piece.name, job.grant.deadline_ns))
        return True

    def peer_fenced(self, worker: tuple[str, int]) -> None:
        """A source's boot is attested dead: the mover ends what it was reading from it."""
        for job in list(self._open.values()):
            if job.grant.source == worker:
                self._stop(job, "PEER_FENCED")

    # The mover's reports.

    def read_ended(self, message: m.ReadEnded) -> bool:
        """One rank's read has ended and nothing of it writes any more; false if not ours."""
        job = self._by_piece.get(message.request_id)
        if job is None or job.piece is None:
            return False
        piece = job.piece
        piece.ranks_left -= 1
        piece.published &= message.published
        piece.reason = piece.reason or message.reason
        piece.bytes_moved += message.bytes_moved
        piece.transfer_ns = max(piece.transfer_ns, message.transfer_ns)
        piece.descriptors += message.descriptors
        if piece.ranks_left:
            return True
        del self._by_piece[piece.name]
        journal.landing_let_go(job.grant.lease_id, piece.name)
        job.piece = None
        if piece.published:
            self._land(job, piece)
        else:
            self.holds.release(piece.hold)
            self.counters.fallback(piece.reason or "TRANSFER_FAILED")
            job.stopping = job.stopping or piece.reason or "TRANSFER_FAILED"
        self._go_on(job)
        return True

    def given_up(self, message: m.ReadGivenUp) -> bool:
        """The mover waits no longer for a piece, but it may still be written to."""
        job = self._by_piece.get(message.request_id)
        if job is None or job.piece is None:
            return False
        self.holds.quarantine(job.piece.hold)
        self._stop(job, message.reason)
        return True

    # For the scheduler's hooks.

    def advance(self) -> None:
        """Orders what is to be read next, and takes blocks for it. Never in vLLM's lookup: there
        it has found prefix hits that nothing references yet, and taking blocks might take them."""
        for job in list(self._open.values()):
            if job.piece is None and job.missing and not job.stopping:
                job.stopping = self._order_piece(job)
                self._go_on(job)

    def in_flight(self, lease_id: str) -> bool:
        """Whether a request may wait for this lease's blocks to land."""
        job = self._open.get(lease_id)
        return job is not None and not job.stopping

    def worth_waiting_until(self, lease_id: str, block_compute_ns: int) -> int | None:
        """The instant from which on a request had better compute what has yet to land, if it takes
        so long for a block; None where nothing tells how fast it lands.

        What is left lands as fast as what has landed. If that is later than computed, the instant
        has passed. Else it is that much after it should be there: what is late by so much is
        expected to take as long again.
        """
        job = self._open.get(lease_id)
        if job is None or job.stopping or not job.blocks or not block_compute_ns:
            return None
        lands_ns = job.landed_ns + job.left * (job.landed_ns - job.began_ns) // job.blocks
        computes_ns = job.left * block_compute_ns
        if lands_ns - self.clock() > computes_ns:
            return job.landed_ns
        return lands_ns + computes_ns

    def has_ended(self, lease_id: str) -> bool:
        """Whether this lease was an eager one and is over (as far as is remembered)."""
        return lease_id in self._ended

    def yield_room(self, reason: str = "PRESSURE") -> None:
        """The engine needs the blocks: eager returns stop, and what has landed may be reused at
        once."""
        for job in list(self._open.values()):
            self._stop(job, reason)

    @property
    def open_grants(self) -> list[Grant]:
        """For an inventory and the count of open leases."""
        return [job.grant for job in list(self._open.values())]

    # Inside.

    def _why_not(self, grant: Grant) -> str:
        if not self.store.caching:
            return "PREFIX_CACHING_OFF"
        if self.paused:
            # What comes from an engine that has yet to be paused may be of weights before these.
            return "ENGINE_PAUSED"
        if self.source.draining:
            return "DRAINING"
        if self.peers.get(grant.source, "PEER_UNKNOWN"):
            return "PEER_UNREACHABLE" if grant.source in self.peers else "PEER_UNKNOWN"
        if grant.start:
            # The hashes before it are not known here, so neither is what a hit would need.
            return "RANGE_STARTS_LATER"
        return ""

    def _go_on(self, job: _Return) -> None:
        """Ends the return if nothing is left of it; else `advance` orders the next piece."""
        if job.piece is None and (job.stopping or not job.missing):
            self._end(job)

    def _order_piece(self, job: _Return) -> str:
        """Why no more is read; empty if a read was ordered."""
        if self.clock() > job.grant.deadline_ns - DEADLINE_MARGIN_NS:
            return "LEASE_EXPIRED"
        if self.holds.quarantined_blocks > QUARANTINE_SHARE * self.store.total_blocks:
            return "QUARANTINE_FULL"
        room = self.store.free_blocks - int(EAGER_FREE_SHARE * self.store.total_blocks)
        indexes = job.missing[: max(0, min(self._piece_blocks(job), room))]
        if not indexes:
            return "NO_ROOM"
        remote = [job.grant.block_ids[i] for i in indexes]
        landing = laid_out_as(remote, self.store.allocate(len(indexes)))
        del job.missing[: len(indexes)]
        name = f"{job.grant.lease_id}#{job.pieces}"
        job.pieces += 1
        job.piece = _Piece(
            name, self.holds.adopt(HoldKind.LANDING, landing), indexes, self.out.num_ranks
        )
        self._by_piece[name] = job
        journal.landing_held(job.grant.lease_id, name, job.grant.source, landing)
        self.out.order(
            m.Read(
                request_id=name,
                lease_id=job.grant.lease_id,
                worker_id=job.grant.source[0],
                incarnation=job.grant.source[1],
                local_block_ids=landing,
                remote_block_ids=remote,
                deadline_ns=job.grant.deadline_ns,
                is_return=True,
                attended=False,
                last=not job.missing,
            )
        )
        if job.pieces == 1:
            self.out.emit(
                agent_pb2.AgentEvent(
                    active=agent_pb2.LeaseActive(
                        lease_id=job.grant.lease_id, blocks=len(job.missing) + len(indexes)
                    )
                )
            )
        return ""

    def _piece_blocks(self, job: _Return) -> int:
        """Blocks that one READ moves. A busy engine orders one piece a step, so it is as much as
        the pieces before have moved in a step's time."""
        if not job.transfer_ns:
            return EAGER_PIECE_BLOCKS
        as_fast = job.blocks * EAGER_PIECE_NS // job.transfer_ns
        return max(
            EAGER_PIECE_BLOCKS, min(as_fast, int(EAGER_PIECE_SHARE * self.store.total_blocks))
        )

    def _land(self, job: _Return, piece: _Piece) -> None:
        """Enters what was read and confirmed into the prefix cache."""
        for index, block_id in zip(piece.indexes, piece.hold.block_ids, strict=True):
            block_hash = job.grant.hashes[index]
            # A request may have computed the same block meanwhile: one copy is enough.
            if self.store.lookup(block_hash) is None:
                self.store.insert(block_hash, block_id, (index + 1) * self.block_size)
                job.filled[block_id] = 0
        job.kept.append(piece.hold)
        job.blocks += len(piece.indexes)
        job.landed_ns = self.clock()
        job.bytes_moved += piece.bytes_moved
        job.transfer_ns += piece.transfer_ns
        job.descriptors += piece.descriptors
        if job.stopping:
            self._let_go(job)

    def _stop(self, job: _Return, reason: str) -> None:
        job.stopping = job.stopping or reason
        self._let_go(job)
        if job.piece is not None:
            self.out.order(m.Abandon(job.piece.name, reason))
        else:
            self._end(job)

    def _let_go(self, job: _Return) -> None:
        # What is freed first is reused first, and the end of a chain is worth least.
        while job.kept:
            self.holds.release(job.kept.pop())
        job.filled.clear()

    def _end(self, job: _Return) -> None:
        lease_id = job.grant.lease_id
        if self._open.pop(lease_id, None) is None:
            return
        # Told before the lease's end, so that the control plane knows of the copy by then.
        self.source.offer_cached(job.tenant, job.session_id, job.grant.hashes, job.filled)
        self._let_go(job)
        self._remember(lease_id)
        stopped = agent_pb2.LeaseStopped(lease_id=lease_id, reason=job.stopping)
        if job.blocks:
            stopped.outcome = agent_pb2.TRANSFER_OUTCOME_PUBLISHED
            stopped.stats.blocks = job.blocks
            stopped.stats.tokens = job.blocks * self.block_size
            stopped.stats.bytes = job.bytes_moved
            stopped.stats.descriptors = job.descriptors
            stopped.stats.transfer_time.FromNanoseconds(job.transfer_ns)
            stopped.stats.wait_time.FromNanoseconds(max(0, self.clock() - job.began_ns))
            self.counters.transfer(
                is_return=True,
                bytes_moved=job.bytes_moved,
                tokens=job.blocks * self.block_size,
                eager=True,
            )
        elif job.revoked:
            stopped.outcome = agent_pb2.TRANSFER_OUTCOME_REVOKED
        elif job.stopping in _UNUSED:
            stopped.outcome = agent_pb2.TRANSFER_OUTCOME_UNUSED
            stopped.reason = job.stopping or "LOCAL_HIT"
        else:
            stopped.outcome = agent_pb2.TRANSFER_OUTCOME_FAILED
        _log.info(
            "eager_return_ended",
            lease=lease_id,
            session=job.session_id,
            blocks=job.blocks,
            reason=stopped.reason,
        )
        self.out.emit(agent_pb2.AgentEvent(stopped=stopped))

    def _refuse(
        self, lease_id: str, outcome: agent_pb2.TransferOutcome.ValueType, reason: str
    ) -> None:
        self._remember(lease_id)
        say_stopped(self.out, lease_id, outcome, reason)

    def _remember(self, lease_id: str) -> None:
        self._ended[lease_id] = None
        while len(self._ended) > EAGER_REMEMBERED:
            self._ended.popitem(last=False)
