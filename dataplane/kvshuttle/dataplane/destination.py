"""The side that reads: grants, the match with a request's own hashes, and loads in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvshuttle.dataplane import extensions, journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.checkpoints import checkpoints
from kvshuttle.dataplane.clock import Clock, destination_deadline
from kvshuttle.dataplane.counters import Counters
from kvshuttle.dataplane.eager import EagerSide
from kvshuttle.dataplane.grants import Grant, leg_of_direction, parse_grant, say_stopped
from kvshuttle.dataplane.holds import BlockStore, Hold, HoldKind, HoldTable
from kvshuttle.dataplane.limits import (
    DEADLINE_MARGIN_NS,
    QUARANTINE_SHARE,
    UNKNOWN_TURN_WAIT_NS,
)
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.matching import Tail, TailHash, common_prefix, partial_tokens
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.dataplane.push_landing import LandingSide, Zone
from kvshuttle.dataplane.turns import LegKey, TurnBook, TurnLeg
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2

__all__ = ["DestinationSide", "Load", "Match"]

_log = get_logger("destination")


@dataclass(eq=False)
class Load:
    """A read that a request waits for, or has waited for."""

    request_id: str
    grant: Grant
    hold: Hold
    first: int
    blocks: int
    tokens: int
    looked_ns: int
    ranks_left: int
    published: bool = True
    orphaned: bool = False
    # vLLM knows that it failed, and counts nothing of it as computed any more.
    told_failed: bool = False
    reason: str = ""
    bytes_moved: int = 0
    transfer_ns: int = 0
    descriptors: int = 0


@dataclass(frozen=True)
class _MayLand:
    """What may be written to a request: blocks with these hashes, and of the one behind them its
    first ``tail_tokens``."""

    start: int
    hashes: list[bytes]
    tokens: int
    tail_tokens: int
    tail_hash: bytes

    def zone(self, block_ids: Sequence[int]) -> Zone:
        """Where, once vLLM has allocated."""
        end = self.start + len(self.hashes)
        tail = Tail(block_ids[end], self.tail_tokens, self.tail_hash) if self.tail_hash else None
        return Zone(self.start, self.hashes, list(block_ids[self.start : end]), tail, self.tokens)


@dataclass(frozen=True)
class Match:
    """What a request may load: blocks ``[start, end)`` of its own chain, of which the last is full
    or not."""

    grant: Grant
    start: int
    end: int


class DestinationSide:
    """Scheduler thread only."""

    def __init__(
        self,
        store: BlockStore,
        holds: HoldTable,
        turns: TurnBook,
        counters: Counters,
        outbox: Outbox,
        clock: Clock,
        block_size: int,
        eager: EagerSide,
        landings: LandingSide,
    ) -> None:
        self._store = store
        self._holds = holds
        self._turns = turns
        self._counters = counters
        self._out = outbox
        self._clock = clock
        self._block_size = block_size
        self._grants: dict[str, Grant] = {}
        self._by_leg: dict[LegKey, Grant] = {}
        self._loads: dict[str, Load] = {}
        self._looked: dict[str, int] = {}
        self._matches: dict[str, Match] = {}
        self._why_not: dict[str, str] = {}
        # Requests that vLLM has and that have not been settled, by leg.
        self._queued: dict[LegKey, str] = {}
        self._eager = eager
        self._landings = landings
        # Requests that may land in a push.
        self._may_land: dict[str, _MayLand] = {}
        # Shared with the eager side.
        self._peers = eager.peers
        # Requests that wait to hear what they may load, and until when.
        self._undecided: dict[str, int] = {}
        # Answers of the movers that are still to come, by peer.
        self._unanswered: dict[tuple[str, int], int] = {}
        # As the control plane said; 0 until it has.
        self.checkpoint_interval = 0

    # Commands.

    def grant(self, command: agent_pb2.Grant) -> None:
        """Keeps a grant for the request that carries its token, or gives it back at once."""
        if command.lease_id in self._grants:
            return
        leg = self._turns.find((command.turn_token, leg_of_direction(command.direction)))
        if leg is not None and self._read_into_landing(command):
            return
        if leg is None or leg.settled or leg.refused:
            self._say_stopped(command.lease_id, agent_pb2.TRANSFER_OUTCOME_UNUSED, "TURN_GONE_ON")
            return
        if self._eager.paused:
            leg.refused = "ENGINE_PAUSED"
            self._say_stopped(command.lease_id, agent_pb2.TRANSFER_OUTCOME_UNUSED, leg.refused)
            return
        try:
            grant = parse_grant(command)
        except ValueError as error:
            _log.error("grant_malformed", lease=command.lease_id, error=str(error))
            leg.refused = "GRANT_MALFORMED"
            self._say_stopped(
                command.lease_id, agent_pb2.TRANSFER_OUTCOME_FAILED, "GRANT_MALFORMED"
            )
            return
        leg.lease_id = command.lease_id
        self._grants[grant.lease_id] = grant
        self._by_leg[grant.token, grant.leg] = grant

    def extend(self, command: agent_pb2.Extend) -> None:
        """Counts longer."""
        deadline = destination_deadline(command.as_of, command.ttl.ToNanoseconds())
        grant = self._grants.get(command.lease_id)
        if grant is None:
            grant = next((x for x in self._landings.grants if x.lease_id == command.lease_id), None)
        if grant is None:
            if not self._eager.extend(command.lease_id, command.version, deadline):
                return
        elif command.version <= grant.version:
            return
        else:
            grant.version = command.version
            grant.deadline_ns = max(grant.deadline_ns, deadline)
            if grant.request_id:
                self._out.order(m.ExtendRead(grant.request_id, grant.deadline_ns))
        self._out.emit(
            agent_pb2.AgentEvent(
                extended=agent_pb2.LeaseExtended(
                    lease_id=command.lease_id, version=command.version, is_source=False
                )
            )
        )

    def extend_many(self, command: agent_pb2.ExtendLeases) -> None:
        """Counts longer what it has asked for."""
        granted = [*self._grants.values(), *self._landings.grants]
        extensions.count_longer(self._out, granted, command, self._clock())

    def revoke(self, lease_id: str, reason: str, token: str = "") -> None:
        """Stops a lease: an unused one now, a running one as soon as NIXL lets go."""
        if lease_id:  # without one, it is the turn alone that is told
            self._turns.refuse_lease(lease_id, reason or "REVOKED")
        if token:
            self._turns.refuse(token, reason or "REVOKED")
        grant = self._grants.get(lease_id)
        if grant is not None and grant.request_id:
            self._out.order(m.Abandon(grant.request_id, reason or "REVOKED"))
            return
        if self._eager.revoke(lease_id, reason) or self._landings.revoke(lease_id, reason):
            return
        if grant is not None:
            self._drop(grant)
        if not lease_id:
            return  # there is no lease, and the turn's leg knows it now
        self._say_stopped(lease_id, agent_pb2.TRANSFER_OUTCOME_REVOKED, reason or "REVOKED")

    def let_go_unread(self, reason: str) -> None:
        """Gives back what nobody reads under yet: the requests that it was for compute."""
        for grant in list(self._grants.values()):
            if grant.request_id:
                continue
            leg = self._turns.find((grant.token, grant.leg))
            if leg is not None:
                leg.refused = reason
            self._give_back(grant, reason)

    def forget_turn(self, leg: TurnLeg) -> None:
        """A turn is over: what it did not use goes back."""
        grant = self._by_leg.get((leg.token, leg.leg))
        if grant is not None and not grant.request_id:
            self._give_back(grant, "TURN_ENDED")

    def writer_stopped(self, lease_id: str, reason: str, *, pull_follows: bool) -> None:
        """Nobody writes under the lease of a push; its landing zone may not even be there yet."""
        self._turns.push_over(lease_id, reason or "WRITER_STOPPED", pull_follows=pull_follows)
        self._landings.writer_stopped(lease_id, reason, pull_follows=pull_follows)

    def peer_announced(self, worker: tuple[str, int], connections: int) -> None:
        """The movers were told of a peer, and so many answers will come."""
        if self._peers.get(worker):
            del self._peers[worker]  # it could not be reached: tried again
        self._unanswered[worker] = connections

    def peer_ready(self, worker: tuple[str, int], error: str) -> None:
        """A rank has connected to one of a peer's, or says why it cannot. The peer can be read when
        all have."""
        left = self._unanswered.pop(worker, 1) - 1
        if left > 0:
            self._unanswered[worker] = left
        if error:
            self._peers[worker] = error
        elif left <= 0:
            self._peers.setdefault(worker, "")

    def peer_fenced(self, worker: tuple[str, int]) -> None:
        """A source's boot is attested dead."""
        self._peers.pop(worker, None)
        self._unanswered.pop(worker, None)
        self._eager.peer_fenced(worker)
        for grant in list(self._grants.values()):
            if grant.source == worker and not grant.request_id:
                self.revoke(grant.lease_id, "PEER_FENCED", grant.token)

    # Hooks.

    def arrived(self, request_id: str, key: LegKey) -> None:
        """vLLM has a leg's request and will look for it when its turn in the queue comes."""
        self._queued.setdefault(key, request_id)

    def look(
        self,
        request_id: str,
        key: LegKey,
        hashes: Sequence[bytes],
        num_tokens: int,
        num_computed: int,
        tail_hash: TailHash | None = None,
    ) -> int | None:
        """Tokens that can be loaded beyond ``num_computed``; None: ask again soon.

        May be called many times for one request.
        """
        self._undecided.pop(request_id, None)
        self._may_land.pop(request_id, None)
        if request_id in self._loads or self._landings.has(request_id):
            # Asked again after a failed load or a preemption: it has had its one lease.
            return self._no(request_id, "")
        now = self._clock()
        looked = self._looked.setdefault(request_id, now)
        leg = self._turns.find(key)
        if leg is None:
            if self._out.connected and now - looked < UNKNOWN_TURN_WAIT_NS:
                return self._later(request_id, looked + UNKNOWN_TURN_WAIT_NS)
            return self._no(request_id, "UNKNOWN_TURN")
        if leg.claimed_by not in ("", request_id):
            return self._no(request_id, "CLAIMED_BY_ANOTHER")
        # The last token is always computed: its logits are what the request is for.
        usable = min(len(hashes), (num_tokens - 1) // self._block_size)
        start = num_computed // self._block_size
        most = (min(usable, leg.replica_blocks or usable) - start) * self._block_size
        if leg.hopes and most < max(leg.min_tokens, 1):
            # Whatever is granted, it would not be used: a short prompt must not wait for it.
            return self._no(request_id, "TOO_FEW_TOKENS" if most > 0 else "LOCAL_HIT")
        grant = self._by_leg.get(key)
        lands = leg.leg == types_pb2.LEG_DECODE and leg.push is not None and leg.hopes
        if grant is None and lands and self._out.connected:
            return self._look_for_push(
                request_id, leg, hashes, start, usable, num_tokens, tail_hash, looked
            )
        if grant is None:
            if self._eager.has_ended(leg.lease_id):
                # What it brought is in the engine's own cache, and counted there.
                return self._no(request_id, "LOCAL_HIT")
            if leg.refused:
                return self._no(request_id, leg.refused)
            if not leg.hopes:
                return self._no(request_id, "")
            if not self._out.connected:
                return self._no(request_id, "CONTROL_PLANE_DOWN")
            if leg.may_ask and not leg.asked:
                leg.asked = True
                if not self._ask(leg, hashes, start, usable):
                    leg.refused = "NO_PREFIX"
                    return self._no(request_id, leg.refused)
            until = looked + leg.lookup_wait_ns
            worth = self._eager.worth_waiting_until(leg.lease_id, leg.block_compute_ns)
            if worth is not None and worth <= min(now, until):
                # What has landed is in the engine's own cache, and found there.
                return self._no(request_id, "FASTER_TO_COMPUTE")
            if now < until:
                return self._later(request_id, until if worth is None else min(until, worth))
            return self._no(request_id, "GRANT_TIMEOUT")
        if now > grant.deadline_ns - DEADLINE_MARGIN_NS:
            return self._no(request_id, "LEASE_EXPIRED")
        peer = self._peers.get(grant.source)
        if peer is None and now - looked < leg.lookup_wait_ns:
            return self._later(request_id, looked + leg.lookup_wait_ns)
        if peer is None or peer:
            return self._no(request_id, "PEER_UNREACHABLE" if peer else "PEER_UNKNOWN")
        if self._quarantine_full:
            return self._no(request_id, "QUARANTINE_FULL")
        end = grant.start + common_prefix(hashes[grant.start : usable], grant.hashes)
        if start < grant.start:
            return self._no(request_id, "RANGE_STARTS_LATER")
        missing = (end - start) * self._block_size
        if end <= grant.start:
            return self._no(request_id, "NO_COMMON_PREFIX")
        if missing <= 0:
            return self._no(request_id, "LOCAL_HIT")
        offset = end - grant.start
        partial = partial_tokens(
            hashes,
            num_tokens,
            self._block_size,
            end,
            grant.hashes[offset] if offset < len(grant.hashes) else None,
            grant.tail,
            tail_hash,
        )
        missing += partial
        if missing < leg.min_tokens:
            return self._no(request_id, "TOO_FEW_TOKENS")
        self._matches[request_id] = Match(grant, start, end + (partial > 0))
        self._why_not.pop(request_id, None)
        return missing

    def _look_for_push(
        self,
        request_id: str,
        leg: TurnLeg,
        hashes: Sequence[bytes],
        start: int,
        usable: int,
        num_tokens: int,
        tail_hash: TailHash | None,
        looked_ns: int,
    ) -> int | None:
        """What it lacks is written to it, if its blocks may be a landing zone."""
        assert leg.push is not None
        peer = self._peers.get(leg.push.peer)
        if peer is None and self._clock() - looked_ns < leg.lookup_wait_ns:
            return self._later(request_id, looked_ns + leg.lookup_wait_ns)
        if peer is None or peer:
            return self._no(request_id, "PEER_UNREACHABLE" if peer else "PEER_UNKNOWN")
        if self._quarantine_full:
            return self._no(request_id, "QUARANTINE_FULL")
        written = num_tokens - usable * self._block_size
        end, tail, tokens = usable, b"", usable * self._block_size
        if 1 < written < self._block_size and tail_hash is not None:
            tail = tail_hash(usable, written) or b""
        elif written == self._block_size and usable < len(hashes):
            end += 1
        if tail or end > usable:
            tokens = num_tokens - 1  # the last one is computed all the same
        tokens -= start * self._block_size
        self._may_land[request_id] = _MayLand(
            start, list(hashes[start:end]), tokens, written if tail else 0, tail
        )
        self._why_not.pop(request_id, None)
        return tokens

    def _read_into_landing(self, command: agent_pb2.Grant) -> bool:
        """A grant to read for a landing zone that nobody writes to; false if it is for none."""
        landing = self._landings.take_for_read(command.turn_token)
        if landing is None:
            return False
        zone = landing.zone
        count = len(zone.hashes)
        remote: list[int] = []
        why = "ENGINE_PAUSED" if self._eager.paused else "NO_COMMON_PREFIX"
        try:
            grant = parse_grant(command)
            offset = zone.first - grant.start
            fits = offset >= 0 and grant.hashes[offset : offset + count] == zone.hashes
            fits = fits and not self._peers.get(grant.source, "PEER_UNKNOWN")
            remote = grant.block_ids[offset : offset + count]
            if fits and zone.tail is not None:
                fits = offset + count == len(grant.block_ids)
                fits = fits and grant.tail is not None and grant.tail.same_tokens(zone.tail)
                remote = grant.readable_ids[offset:]
        except ValueError as error:
            _log.error("grant_malformed", lease=command.lease_id, error=str(error))
            fits = False
        if self._eager.paused or not fits:
            self._landings.give_back(landing, why)
            self._say_stopped(command.lease_id, agent_pb2.TRANSFER_OUTCOME_UNUSED, why)
            return True
        grant.request_id = landing.request_id
        self._grants[grant.lease_id] = grant
        self._by_leg[grant.token, grant.leg] = grant
        load = Load(
            request_id=landing.request_id,
            grant=grant,
            hold=landing.hold,
            first=zone.first,
            blocks=len(zone.all_ids),
            tokens=zone.tokens,
            looked_ns=landing.looked_ns,
            ranks_left=self._out.num_ranks,
        )
        self._loads[load.request_id] = load
        self._order_read(load, remote)
        return True

    def allocated(
        self, request_id: str, key: LegKey, block_ids: Sequence[int], num_tokens: int
    ) -> None:
        """vLLM has allocated: ``num_tokens`` are to be loaded; 0: the request runs without."""
        leg = self._turns.find(key)
        self._unqueue(request_id, key)
        may_land = self._may_land.pop(request_id, None)
        if may_land is not None and num_tokens > 0 and leg is not None and leg.push is not None:
            looked = self._looked.pop(request_id, self._clock())
            self._landings.open(request_id, leg, may_land.zone(block_ids), looked)
            leg.claimed_by = request_id
            leg.settled = True
            return
        match = self._matches.pop(request_id, None)
        looked = self._looked.pop(request_id, self._clock())
        if request_id in self._loads or self._landings.has(request_id):
            return
        if num_tokens <= 0 or match is None:
            reason = self._why_not.pop(request_id, "")
            self._settle_without(leg, reason, request_id)
            if num_tokens > 0:
                # Cannot be: vLLM loads only what look() promised. Fail the load, not the engine.
                self._out.order(m.Refuse(request_id))
            return
        grant = match.grant
        landing = list(block_ids[match.start : match.end])
        load = Load(
            request_id=request_id,
            grant=grant,
            hold=self._holds.take(HoldKind.LANDING, landing),
            first=match.start,
            blocks=len(landing),
            tokens=num_tokens,
            looked_ns=looked,
            ranks_left=self._out.num_ranks,
        )
        self._loads[request_id] = load
        grant.request_id = request_id
        if leg is not None:
            leg.claimed_by = request_id
            leg.settled = True
        offset = match.start - grant.start
        self._order_read(load, grant.readable_ids[offset : offset + len(landing)])

    def _order_read(self, load: Load, remote: Sequence[int]) -> None:
        grant = load.grant
        journal.landing_held(grant.lease_id, load.request_id, grant.source, load.hold.block_ids)
        self._out.order(
            m.Read(
                request_id=load.request_id,
                lease_id=grant.lease_id,
                worker_id=grant.source[0],
                incarnation=grant.source[1],
                local_block_ids=list(load.hold.block_ids),
                remote_block_ids=list(remote),
                deadline_ns=grant.deadline_ns,
                is_return=grant.is_return,
            )
        )
        self._out.emit(
            agent_pb2.AgentEvent(
                active=agent_pb2.LeaseActive(lease_id=grant.lease_id, blocks=load.blocks)
            )
        )

    def blocks_written(self, request_id: str) -> int | None:
        """How many of a request's first blocks have their KV for certain; None: as many as vLLM
        counts. vLLM counts the tokens of a load as computed from the moment it begins."""
        load = self._loads.get(request_id)
        if load is None:
            return self._landings.blocks_written(request_id)
        if load.told_failed or (load.published and load.ranks_left == 0):
            return None
        return load.first

    def request_gone(self, request_id: str, key: LegKey) -> int:
        """The request has finished or was aborted. Returns the tokens that a load spared it."""
        self._unqueue(request_id, key)
        self._undecided.pop(request_id, None)
        self._looked.pop(request_id, None)
        self._matches.pop(request_id, None)
        self._why_not.pop(request_id, None)
        self._may_land.pop(request_id, None)
        if self._landings.has(request_id):
            return self._landings.request_gone(request_id)
        load = self._loads.get(request_id)
        leg = self._turns.find(key)
        if load is None:
            if leg is not None and leg.claimed_by in ("", request_id):
                self._settle_without(leg, "REQUEST_ENDED", request_id)
            return 0
        spared = load.tokens if load.published and load.ranks_left == 0 else 0
        if load.ranks_left == 0:
            del self._loads[request_id]
        else:
            # Forgotten once every rank has let go.
            load.orphaned = True
            self._out.order(m.Abandon(request_id, "REQUEST_ENDED"))
        return spared

    def read_ended(self, message: m.ReadEnded) -> None:
        """One rank's read has ended and nothing of it writes any more."""
        load = self._loads.get(message.request_id)
        if load is None or load.grant.lease_id != message.lease_id or load.ranks_left == 0:
            return
        load.ranks_left -= 1
        load.published &= message.published
        load.reason = load.reason or message.reason
        load.bytes_moved += message.bytes_moved
        load.transfer_ns = max(load.transfer_ns, message.transfer_ns)
        load.descriptors += message.descriptors
        if load.ranks_left:
            return
        journal.landing_let_go(message.lease_id, message.request_id)
        self._holds.release(load.hold)
        self._drop(load.grant)
        stopped = agent_pb2.LeaseStopped(
            lease_id=load.grant.lease_id,
            outcome=_outcome(load),
            reason="" if load.published else load.reason,
        )
        if load.published:
            stopped.stats.blocks = load.blocks
            stopped.stats.tokens = load.tokens
            stopped.stats.bytes = load.bytes_moved
            stopped.stats.descriptors = load.descriptors
            stopped.stats.transfer_time.FromNanoseconds(load.transfer_ns)
            stopped.stats.wait_time.FromNanoseconds(max(0, self._clock() - load.looked_ns))
            self._counters.transfer(
                is_return=load.grant.is_return, bytes_moved=load.bytes_moved, tokens=load.tokens
            )
        else:
            self._counters.fallback(load.reason)
            _log.warning(
                "load_failed",
                lease=load.grant.lease_id,
                reason=load.reason,
                tokens=load.tokens,
            )
        self._out.emit(agent_pb2.AgentEvent(stopped=stopped))
        if load.orphaned:
            del self._loads[message.request_id]

    def load_failed(self, request_id: str) -> None:
        """vLLM was told that the load failed: what is in flight becomes a quarantine."""
        self._landings.load_failed(request_id)
        load = self._loads.get(request_id)
        if load is None:
            return
        load.told_failed = True
        if load.ranks_left:
            self._holds.quarantine(load.hold)

    def expire(self, now: int) -> None:
        """Asks for more time for grants in use; gives back those whose time is over and that no
        request has used."""
        extensions.ask(self._out, self._needed(), now)
        self._landings.expire(now)
        for grant in list(self._grants.values()):
            if not grant.request_id and now >= grant.deadline_ns:
                self._give_back(grant, "LEASE_EXPIRED")

    def next_deadline(self) -> int | None:
        """The next instant at which :meth:`expire` has something to do."""
        times = [g.deadline_ns for g in self._grants.values() if not g.request_id]
        if (asking := extensions.next_ask(self._needed())) is not None:
            times.append(asking)
        if (landing := self._landings.next_deadline()) is not None:
            times.append(landing)
        return min(times, default=None)

    @property
    def loading(self) -> int:
        """How many requests wait for a read."""
        return sum(
            load.ranks_left > 0 and not (load.told_failed or load.orphaned)
            for load in self._loads.values()
        )

    @property
    def undecided(self) -> Collection[int]:
        """For each request that waits to hear what it may load: until when it waits."""
        return self._undecided.values()

    @property
    def open_grants(self) -> list[Grant]:
        """Grants that are unused or in use."""
        return [*self._grants.values(), *self._eager.open_grants]

    @property
    def grant_count(self) -> int:
        """Number of grants that are unused or in use; any thread."""
        return len(self._grants) + len(self._eager.open_grants) + len(self._landings.held)

    # Inside.

    @property
    def _quarantine_full(self) -> bool:
        return self._holds.quarantined_blocks > QUARANTINE_SHARE * self._store.total_blocks

    def _needed(self) -> list[Grant]:
        """Grants that a request reads under, or may as soon as its turn in vLLM's queue comes and
        vLLM has blocks for it."""
        needed = [load.grant for load in self._loads.values() if load.ranks_left]
        needed += [match.grant for match in self._matches.values()]
        needed += self._landings.needed()
        for key, request_id in self._queued.items():
            grant = self._by_leg.get(key)
            looked = request_id in self._matches or request_id in self._why_not
            if grant is not None and not grant.request_id and not looked:
                needed.append(grant)
        return needed

    def _ask(self, leg: TurnLeg, hashes: Sequence[bytes], have: int, usable: int) -> bool:
        """Asks for what other sessions of the tenant have of this chain; false if it is too short
        to be found. The answer is a grant, or a revoke without a lease."""
        known = checkpoints(hashes, usable, self.checkpoint_interval)
        if not known:
            return False
        self._out.emit(
            agent_pb2.AgentEvent(
                prefix_wanted=agent_pb2.PrefixWanted(
                    turn_token=leg.token,
                    leg=leg.leg,
                    checkpoints=known,
                    have_blocks=have,
                    usable_blocks=usable,
                )
            )
        )
        return True

    def _unqueue(self, request_id: str, key: LegKey) -> None:
        if self._queued.get(key) == request_id:
            del self._queued[key]

    def _later(self, request_id: str, until_ns: int) -> int | None:
        """What the request may load is not known yet, and is waited for until then."""
        self._undecided[request_id] = until_ns
        return None

    def _no(self, request_id: str, reason: str) -> int:
        self._matches.pop(request_id, None)
        self._why_not[request_id] = reason
        return 0

    def _settle_without(self, leg: TurnLeg | None, reason: str, request_id: str) -> None:
        if reason not in _NO_FALLBACK:
            self._counters.fallback(reason)
            _log.info("recompute", reason=reason, request=request_id)
        if leg is None or leg.settled or reason == "CLAIMED_BY_ANOTHER":
            return
        leg.settled = True
        grant = self._by_leg.get((leg.token, leg.leg))
        if grant is not None and not grant.request_id:
            self._give_back(grant, reason or "NOT_NEEDED")
        if leg.push is not None and leg.leg == types_pb2.LEG_DECODE:
            hope, leg.push = leg.push, None
            self._out.emit(
                agent_pb2.AgentEvent(
                    refused=agent_pb2.LeaseRefused(
                        lease_id=hope.lease_id,
                        version=hope.version,
                        reason=reason or "NOT_NEEDED",
                    )
                )
            )

    def _give_back(self, grant: Grant, reason: str) -> None:
        self._drop(grant)
        self._say_stopped(grant.lease_id, agent_pb2.TRANSFER_OUTCOME_UNUSED, reason)

    def _drop(self, grant: Grant) -> None:
        self._grants.pop(grant.lease_id, None)
        if self._by_leg.get((grant.token, grant.leg)) is grant:
            del self._by_leg[grant.token, grant.leg]

    def _say_stopped(
        self, lease_id: str, outcome: agent_pb2.TransferOutcome.ValueType, reason: str
    ) -> None:
        say_stopped(self._out, lease_id, outcome, reason)


_NO_FALLBACK = frozenset({"", "LOCAL_HIT", "NO_PREFIX", "TOO_FEW_TOKENS", "REQUEST_ENDED"})
"""Reasons for which nothing was hoped for or nothing was lost."""

_DISCARDED = frozenset({"LATE", "SOURCE_LET_GO", "SOURCE_SILENT", "LEASE_EXPIRED"})


def _outcome(load: Load) -> agent_pb2.TransferOutcome.ValueType:
    if load.published:
        return agent_pb2.TRANSFER_OUTCOME_PUBLISHED
    if load.reason in _DISCARDED:
        return agent_pb2.TRANSFER_OUTCOME_DISCARDED
    return agent_pb2.TRANSFER_OUTCOME_FAILED
