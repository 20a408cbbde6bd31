"""The side that is read: replicas, their retention, and the ranges that leases hold.

A lease's source range stays held until its reader is known to have stopped or the local deadline
has passed; nothing else ends it: not a revoke, not a session's end, not a lost stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvshuttle.dataplane import journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.checkpoints import checkpoints
from kvshuttle.dataplane.clock import Clock, source_deadline
from kvshuttle.dataplane.grants import tail_out
from kvshuttle.dataplane.holds import BlockStore, Hold, HoldKind, HoldTable
from kvshuttle.dataplane.limits import MAX_SOFT_REPLICAS
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.matching import Tail
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.dataplane.replicas import Replica, ReplicaTable
from kvshuttle.dataplane.turns import TurnLeg
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import session_service_pb2 as session_pb2
from kvshuttle.v1 import types_pb2

__all__ = ["SourceLease", "SourceSide"]

_log = get_logger("source")


@dataclass(eq=False)
class SourceLease:
    """A range held for a reader."""

    lease_id: str
    version: int
    hold: Hold
    deadline_ns: int
    destination: tuple[str, int]
    # Epoch and number in it: its name where many leases are named at once.
    number: tuple[int, int] = (0, 0)
    ranks_done: int = 0
    # Why it is closing; empty while it is open. It is gone once every rank says no to the reader.
    closing: str = ""
    ranks_unserved: int = 0


class SourceSide:
    """Scheduler thread only."""

    def __init__(
        self,
        store: BlockStore,
        holds: HoldTable,
        outbox: Outbox,
        clock: Clock,
        block_size: int,
        steps: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`steps`: how many the engine has begun, and how many of these are over."""
        self.steps = steps
        self._store = store
        self._holds = holds
        self._out = outbox
        self._clock = clock
        self._block_size = block_size
        self._replicas = ReplicaTable()
        self._leases: dict[str, SourceLease] = {}
        # Soft replicas by the blocks that they count on, with the block's place in the chain; and
        # blocks that vLLM has handed out since the last look.
        self._owners: dict[int, list[tuple[Replica, int]]] = {}
        self._reused: list[int] = []
        # Of a reader: how many of its ranks' reads one transfer to it is; of others, one a rank.
        self.readers: dict[tuple[str, int], int] = {}
        self.drift_ppm = 200
        self.draining = False
        # As the control plane said; 0 until it has.
        self.checkpoint_interval = 0

    # Replicas.

    def offer(
        self,
        leg: TurnLeg,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        tail: Tail | None = None,
        *,
        filling: bool = False,
    ) -> Replica | None:
        """Holds what a finished request leaves and tells the control plane.

        ``hashes`` and ``block_ids`` are those of its full blocks whose KV is written; equal length.
        ``tail`` follows them. The control plane is not told of it: who is granted the whole replica
        is. ``filling``: a step that runs may have yet to fill some.
        """
        if not hashes or leg.retention_ns <= 0 or self.draining:
            return None
        expires = self._clock() + leg.retention_ns
        # First the new references, then the old ones go: a block of both is never free between.
        hold = self._holds.take(HoldKind.REPLICA, block_ids)
        replica = Replica(leg.tenant, leg.session_id, tuple(hashes), hold, expires)
        replica.filled_after = self.steps_begun if filling else 0
        if tail is not None:
            replica.tail = tail
            replica.tail_hold = self._holds.take(HoldKind.REPLICA, [tail.block_id])
        for old in self._replicas.of_session(leg.tenant, leg.session_id):
            if replica.hashes[: len(old.hashes)] == old.hashes:
                self._forget(old, "SUPERSEDED", tell=old.key != replica.key)
        self._replicas.add(replica)
        self._out.emit(agent_pb2.AgentEvent(offered=self._describe(replica, leg.token, leg.leg)))
        self._bound_soft()
        return replica

    def offer_cached(
        self,
        tenant: str,
        session_id: str,
        hashes: Sequence[bytes],
        filled: Mapping[int, int] | None = None,
    ) -> None:
        """Makes a soft replica of as much of a chain as the engine has cached, and tells.
        ``filled``: of blocks of which that is known, the number of the step after which they are
        filled. Another may be a request's, which a step that runs has yet to fill."""
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._store.lookup(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        if not block_ids:
            return
        chain = tuple(hashes[: len(block_ids)])
        for old in self._replicas.of_session(tenant, session_id):
            if old.hold is None and chain[: len(old.hashes)] == old.hashes:
                self._forget(old, "SUPERSEDED", tell=old.hashes != chain)
        replica = Replica(tenant, session_id, chain, None, 0)
        known, begun = filled or {}, self.steps_begun
        replica.filled_after = max(known.get(block_id, begun) for block_id in block_ids)
        if self._replicas.get(replica.key) is not None:
            return  # it is held hard already
        self._replicas.add(replica)
        self._watch(replica, self._holds.take(HoldKind.REPLICA, block_ids))
        self._out.emit(
            agent_pb2.AgentEvent(offered=self._describe(replica, "", types_pb2.LEG_UNSPECIFIED))
        )
        self._bound_soft()

    def settle_reused(self) -> None:
        """Shortens the soft replicas whose blocks vLLM has handed out, and tells."""
        if not self._reused:
            return
        reused, self._reused = self._reused, []
        shorter: dict[int, Replica] = {}
        for block_id in reused:
            for replica, index in self._owners.pop(block_id, ()):
                if index < replica.available and replica.hold is None:
                    replica.available = index
                    shorter[id(replica)] = replica
        for replica in shorter.values():
            if self._replicas.get(replica.key) is not replica:
                continue
            if replica.available:
                self._tell(replica, session_pb2.REPLICA_STATE_SOFT, "REUSED")
            else:
                self._forget(replica, "REUSED")

    def release(self, tenant: str, session_id: str, head_hash: bytes) -> None:
        """Obeys ReleaseReplica; leases keep their own holds."""
        for replica in self._replicas.of_session(tenant, session_id):
            if not head_hash or replica.hashes[-1] == head_hash:
                self._forget(replica, "RELEASED")

    def retain(
        self,
        tenant: str,
        session_id: str,
        head_hash: bytes,
        retention_ns: int,
        keep_blocks: int = 0,
    ) -> None:
        """Obeys RetainReplica."""
        replica = self._replicas.get((tenant, session_id, head_hash))
        if replica is None or replica.hold is None:
            return
        replica.expires_ns = self._clock() + retention_ns
        if retention_ns <= 0:
            self._soften(replica, "RELEASED")
        elif 0 < keep_blocks < len(replica.hold.block_ids):
            whole = replica.hold
            # The new references first: no block of both is free between.
            replica.hold = self._holds.take(HoldKind.REPLICA, whole.block_ids[:keep_blocks])
            self._holds.release(whole)
            self._drop_tail(replica)
            replica.available = keep_blocks
            self._tell(replica, session_pb2.REPLICA_STATE_HARD, "TRIMMED")

    def drain(self, *, undo: bool) -> None:
        """Nothing new is held, and no new lease begins. What is held for later turns is let go, as
        nobody may read it; it stays findable, in case the drain is undone."""
        self.draining = not undo
        if self.draining:
            for replica in list(self._replicas.hard):
                self._soften(replica, "DRAINING")

    def make_room(self, wanted_free: int) -> None:
        """Softens replicas, soonest-expiring first, until so many blocks are free.

        A running request goes before a replica: holds must not make vLLM preempt or starve.
        """
        if self._store.free_blocks >= wanted_free:
            return
        for replica in sorted(self._replicas.hard, key=lambda r: r.expires_ns):
            self._soften(replica, "PRESSURE")
            if self._store.free_blocks >= wanted_free:
                return

    def drop_replicas(self, reason: str) -> None:
        """Lets every replica go, for a reset of the engine's cache or a shutdown."""
        for replica in self._replicas.all():
            self._forget(replica, reason)

    def inventory(self) -> list[agent_pb2.ReplicaOffered]:
        """Every replica, for a hello; any thread."""
        return [self._describe(r, "", types_pb2.LEG_UNSPECIFIED) for r in self._replicas.all()]

    def blocks_of(
        self,
        tenant: str,
        session_id: str,
        start: int,
        hashes: Sequence[bytes],
        tail: Tail | None = None,
    ) -> list[int]:
        """Where these blocks of a session's chain, and the partial one behind them, lie in a held
        replica; empty if in none."""
        end = start + len(hashes)
        for replica in self._replicas.of_session(tenant, session_id):
            if replica.hold is None or list(replica.hashes[start:end]) != list(hashes):
                continue
            if not self._filled(replica):
                continue
            found = list(replica.hold.block_ids[start:end])
            if len(found) < len(hashes):
                continue  # it was trimmed
            if tail is None:
                return found
            own = replica.tail if end == len(replica.hashes) else None
            if own is not None and own.same_tokens(tail):
                return [*found, own.block_id]
        return []

    # Leases.

    def harden(self, command: agent_pb2.Harden) -> None:
        """Holds a range for a reader and answers with where it lies. Not before it is filled:
        see :meth:`unfilled`."""
        known = self._leases.get(command.lease_id)
        if known is not None:
            return
        replica = self._replicas.get((command.tenant, command.session_id, command.head_hash))
        start, end = command.range.start, command.range.end
        if self.draining:
            self._refuse(command, "DRAINING")
            return
        if replica is None or not start < end <= len(replica.hashes):
            self._refuse(command, "REPLICA_GONE")
            return
        block_ids = self._find(replica, start, end)
        if not block_ids:
            self._forget(replica, "REUSED")
            self._refuse(command, "REPLICA_GONE")
            return
        # A trimmed replica has none, and of a part of one it would not be what follows.
        tail = replica.tail if start + len(block_ids) == len(replica.hashes) else None
        held_ids = [*block_ids, tail.block_id] if tail is not None else block_ids
        guard = command.guard.ToNanoseconds()
        lease = SourceLease(
            lease_id=command.lease_id,
            version=command.version,
            hold=self._holds.take(HoldKind.SOURCE, held_ids),
            deadline_ns=source_deadline(
                self._clock(), command.ttl.ToNanoseconds(), guard, self.drift_ppm
            ),
            destination=(command.destination.worker_id, command.destination.incarnation),
            number=(command.lease_epoch, command.lease_seq),
        )
        self._leases[lease.lease_id] = lease
        journal.note(
            "range_held",
            blocks=held_ids,
            lease=lease.lease_id,
            version=lease.version,
            reader=lease.destination[0],
            reader_incarnation=lease.destination[1],
        )
        # The movers answer the reader from now on; they hear of it before the reader can.
        self._out.order(m.Serve(lease.lease_id, lease.deadline_ns))
        hashes = replica.hashes[start : start + len(block_ids)]
        blocks = types_pb2.BlockDescriptors(
            range=types_pb2.BlockRange(start=start, end=start + len(block_ids)),
            block_ids=block_ids,
            hashes=b"".join(hashes),
            hash_size=len(hashes[0]),
        )
        if tail is not None:
            blocks.tail.CopyFrom(tail_out(tail))
        self._out.emit(
            agent_pb2.AgentEvent(
                hardened=agent_pb2.LeaseHardened(
                    lease_id=lease.lease_id, version=command.version, blocks=blocks
                )
            )
        )

    def unfilled(self, command: agent_pb2.Harden) -> bool:
        """Whether a step that runs may have yet to fill what is to be held: ask again later."""
        replica = self._replicas.get((command.tenant, command.session_id, command.head_hash))
        return replica is not None and not self._filled(replica)

    def extend(self, command: agent_pb2.Extend) -> None:
        """Holds longer; a closing or unknown lease is not revived."""
        lease = self._leases.get(command.lease_id)
        if lease is None or lease.closing or command.version <= lease.version:
            return
        lease.version = command.version
        lease.deadline_ns = max(
            lease.deadline_ns,
            source_deadline(
                self._clock(),
                command.ttl.ToNanoseconds(),
                command.guard.ToNanoseconds(),
                self.drift_ppm,
            ),
        )
        self._out.order(m.Serve(lease.lease_id, lease.deadline_ns))
        self._out.emit(
            agent_pb2.AgentEvent(
                extended=agent_pb2.LeaseExtended(
                    lease_id=lease.lease_id, version=command.version, is_source=True
                )
            )
        )

    def extend_many(self, command: agent_pb2.ExtendLeases, elsewhere: Collection[int] = ()) -> None:
        """Holds longer, and says what it does not hold any more; `elsewhere` is what another side
        of this agent has."""
        deadline = source_deadline(
            self._clock(),
            command.ttl.ToNanoseconds(),
            command.guard.ToNanoseconds(),
            self.drift_ppm,
        )
        missing = dict.fromkeys(seq for seq in command.lease_seqs if seq not in elsewhere)
        for lease in self._leases.values():
            epoch, seq = lease.number
            if epoch != command.lease_epoch or seq not in missing or lease.closing:
                continue
            del missing[seq]
            if deadline > lease.deadline_ns:
                lease.deadline_ns = deadline
                self._out.order(m.Serve(lease.lease_id, deadline))
        self._out.emit(
            agent_pb2.AgentEvent(
                leases_extended=agent_pb2.LeasesExtended(
                    extension=command.extension, missing_seqs=missing
                )
            )
        )

    def reader_stopped(self, lease_id: str) -> None:
        """The control plane says that the reader has stopped."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._close(lease, "READER_STOPPED")

    def reader_done(self, lease_id: str) -> None:
        """One reader of one rank has finished reading, as NIXL told the mover."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        lease.ranks_done += 1
        if lease.ranks_done >= self.readers.get(lease.destination, self._out.num_ranks):
            self._close(lease, "READER_STOPPED")

    def unserved(self, lease_id: str) -> None:
        """One rank says no to the reader from now on; after all have, the blocks may go."""
        lease = self._leases.get(lease_id)
        if lease is None or not lease.closing:
            return
        lease.ranks_unserved += 1
        if lease.ranks_unserved >= self._out.num_ranks:
            del self._leases[lease_id]
            journal.note("range_let_go", lease=lease_id, reason=lease.closing)
            self._holds.release(lease.hold)
            self._out.emit(
                agent_pb2.AgentEvent(
                    source_released=agent_pb2.SourceReleased(
                        lease_id=lease_id, reason=lease.closing
                    )
                )
            )

    def fence(self, worker: tuple[str, int]) -> None:
        """A reader's boot is attested dead."""
        self.readers.pop(worker, None)
        for lease in list(self._leases.values()):
            if lease.destination == worker:
                self._close(lease, "READER_STOPPED")

    def expire(self, now: int) -> None:
        """Ends what is past its time."""
        for lease in list(self._leases.values()):
            if now >= lease.deadline_ns:
                self._close(lease, "DEADLINE")
        for replica in self._replicas.hard:
            if now >= replica.expires_ns:
                self._soften(replica, "EXPIRED")

    def next_deadline(self) -> int | None:
        """The next instant at which :meth:`expire` has something to do."""
        times = [x.deadline_ns for x in self._leases.values() if not x.closing]
        times += [r.expires_ns for r in self._replicas.hard]
        return min(times, default=None)

    @property
    def steps_begun(self) -> int:
        """The number of the newest step: what is cached now is filled when it is over."""
        return self.steps()[0]

    @property
    def open_leases(self) -> list[SourceLease]:
        """Leases whose range is held."""
        return list(self._leases.values())

    @property
    def lease_count(self) -> int:
        """Number of leases whose range is held; any thread."""
        return len(self._leases)

    # Inside.

    def _close(self, lease: SourceLease, reason: str) -> None:
        if not lease.closing:
            lease.closing = reason
            self._out.order(m.Unserve(lease.lease_id))

    def _refuse(self, command: agent_pb2.Harden, reason: str) -> None:
        self._out.emit(
            agent_pb2.AgentEvent(
                refused=agent_pb2.LeaseRefused(
                    lease_id=command.lease_id, version=command.version, reason=reason
                )
            )
        )

    def _filled(self, replica: Replica) -> bool:
        return replica.filled_after <= self.steps()[1]

    def _find(self, replica: Replica, start: int, end: int) -> list[int]:
        """Block ids of the range, or of as much of its start as is still there."""
        if replica.hold is not None:
            return list(replica.hold.block_ids[start:end])
        found: list[int] = []
        # Its own blocks, not what the cache finds under their hashes: vLLM caches a block when it
        # schedules it, so that may be another one that the step which runs now has yet to fill.
        for index in range(start, min(end, replica.available, len(replica.soft_ids))):
            if self._store.lookup(replica.hashes[index]) is None:
                break
            found.append(replica.soft_ids[index])
        return found

    def _soften(self, replica: Replica, reason: str) -> None:
        if replica.hold is None:
            return
        if not self._store.caching:
            # Without a prefix cache nothing finds the blocks again.
            self._forget(replica, reason)
            return
        hold, replica.hold = replica.hold, None
        self._replicas.turned_soft(replica)
        self._drop_tail(replica)
        self._watch(replica, hold)
        self._tell(replica, session_pb2.REPLICA_STATE_SOFT, reason)
        self._bound_soft()

    def _watch(self, replica: Replica, hold: Hold) -> None:
        """Gives up a hold, but wants to hear when its blocks are reused."""
        replica.soft_ids = hold.block_ids
        for index, block_id in enumerate(hold.block_ids):
            others = self._owners.get(block_id, ())
            # Those that are gone, or too short to count on it, are dropped on the way.
            still = [(other, i) for other, i in others if i < other.available]
            self._owners[block_id] = [*still, (replica, index)]
        self._holds.release(hold, self._note_reused)

    def _note_reused(self, block_id: int) -> None:
        # vLLM is in the midst of handing out blocks: only a note is taken.
        self._reused.append(block_id)

    def _forget(self, replica: Replica, reason: str, *, tell: bool = True) -> None:
        self._replicas.remove(replica.key)
        replica.available = 0
        self._drop_tail(replica)
        if replica.hold is not None:
            self._holds.release(replica.hold)
            replica.hold = None
        if tell:
            self._tell(replica, session_pb2.REPLICA_STATE_GONE, reason)

    def _drop_tail(self, replica: Replica) -> None:
        """Leases keep theirs."""
        replica.tail = None
        if replica.tail_hold is not None:
            self._holds.release(replica.tail_hold)
            replica.tail_hold = None

    def _bound_soft(self) -> None:
        for replica in self._replicas.soft_beyond(MAX_SOFT_REPLICAS):
            self._forget(replica, "REUSED")

    def _tell(
        self, replica: Replica, state: session_pb2.ReplicaState.ValueType, reason: str
    ) -> None:
        self._out.emit(
            agent_pb2.AgentEvent(
                replica_changed=agent_pb2.ReplicaChanged(
                    tenant=replica.tenant,
                    session_id=replica.session_id,
                    head_hash=replica.hashes[-1],
                    state=state,
                    num_blocks=replica.available,
                    reason=reason,
                )
            )
        )

    def _describe(
        self, replica: Replica, token: str, leg: types_pb2.Leg.ValueType
    ) -> agent_pb2.ReplicaOffered:
        hard = replica.hold is not None
        offered = agent_pb2.ReplicaOffered(
            turn_token=token,
            leg=leg,
            tenant=replica.tenant,
            session_id=replica.session_id,
            head_hash=replica.hashes[-1],
            num_blocks=replica.available,
            num_tokens=replica.available * self._block_size,
            state=session_pb2.REPLICA_STATE_HARD if hard else session_pb2.REPLICA_STATE_SOFT,
        )
        if leg != types_pb2.LEG_PREFILL:
            # What prefill leaves is let go of as soon as decode has it.
            offered.checkpoints.extend(
                checkpoints(replica.hashes, replica.available, self.checkpoint_interval)
            )
        if hard:
            offered.hold_remaining.FromNanoseconds(max(0, replica.expires_ns - self._clock()))
        return offered
