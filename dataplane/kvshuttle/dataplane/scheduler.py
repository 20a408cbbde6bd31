"""The scheduler side of the agent: what runs inside vLLM's scheduler hooks.

Everything here runs on vLLM's scheduler thread, the only one that may touch the block pool. What
other threads have to say (commands of the control plane, reports of the movers, timers) waits in an
inbox that every hook empties first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvshuttle.dataplane import journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, Clock
from kvshuttle.dataplane.counters import Counters
from kvshuttle.dataplane.destination import DestinationSide
from kvshuttle.dataplane.eager import EagerSide
from kvshuttle.dataplane.holds import BlockStore, HoldTable
from kvshuttle.dataplane.limits import LONG_REST_NS, PAUSE_WAIT_NS, REST_LOOK_NS, REST_NS
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.matching import Tail, TailHash
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.dataplane.push_landing import LandingSide
from kvshuttle.dataplane.push_source import PushSide, RequestView
from kvshuttle.dataplane.shapes import Heads, links, readers
from kvshuttle.dataplane.source import SourceSide
from kvshuttle.dataplane.turns import LegKey, PushHope, TurnBook, TurnLeg
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import cluster_service_pb2 as cluster_pb2
from kvshuttle.v1 import types_pb2

__all__ = [
    "CommandBatch",
    "FinishedRequest",
    "SchedulerAgent",
    "StreamDown",
    "StreamLife",
    "StreamUp",
    "Tick",
]

_log = get_logger("scheduler")


@dataclass(eq=False)
class StreamLife:
    """Whether what came on a stream still counts. Ends by :meth:`SchedulerAgent.end_stream`."""

    open: bool = True


@dataclass(frozen=True)
class StreamUp:
    """The control plane has welcomed this boot on a new stream."""

    generation: int
    epoch: int
    welcome: agent_pb2.AgentWelcome


@dataclass(frozen=True)
class StreamDown:
    """The stream is gone; commands of it that still queue are dropped."""

    generation: int


@dataclass(frozen=True)
class CommandBatch:
    """Orders that came on a stream."""

    generation: int
    epoch: int
    commands: Sequence[agent_pb2.AgentCommand]
    life: StreamLife = field(default_factory=StreamLife)


@dataclass(frozen=True)
class Tick:
    """A deadline has come."""


@dataclass(frozen=True)
class FinishedRequest:
    """What a finished request leaves: its full, written blocks and their hashes, and what is
    written behind them."""

    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    prompt_tokens: int
    aborted: bool
    tail: Tail | None = None


InboxItem = StreamUp | StreamDown | CommandBatch | Tick | m.FromMover


@dataclass
class _LegTimes:
    """When a leg's request could last start to compute, and what it found in the cache."""

    admitted_ns: int
    local_tokens: int


class SchedulerAgent:
    """Commands in, holds and matches inside, events out."""

    def __init__(
        self,
        store: BlockStore,
        outbox: Outbox,
        clock: Clock,
        *,
        block_size: int,
        worker_id: str,
        counts: Callable[[], tuple[int, int]],
        steps: Callable[[], tuple[int, int]] = lambda: (0, 0),
        holds: HoldTable | None = None,
        heads: Sequence[Heads] = (),
    ) -> None:
        """`heads` is what each rank keeps, in order; left out where nobody is split otherwise.
        `counts`: requests that run and wait. `steps`: how many have begun and how many are over."""
        self._heads = list(heads) or [Heads(0, 0)] * outbox.num_ranks
        self._store = store
        self._out = outbox
        self._clock = clock
        self._block_size = block_size
        self._worker_id = worker_id
        self._counts = counts
        self._holds = HoldTable(store) if holds is None else holds
        self._turns = TurnBook()
        self.counters = Counters()
        self.source = SourceSide(store, self._holds, outbox, clock, block_size, steps)
        self.eager = EagerSide(
            store, self._holds, self.source, self.counters, outbox, clock, block_size, peers={}
        )
        self.landings = LandingSide(self._holds, self.counters, outbox, clock, block_size)
        self.destination = DestinationSide(
            store,
            self._holds,
            self._turns,
            self.counters,
            outbox,
            clock,
            block_size,
            self.eager,
            self.landings,
        )
        self.push = PushSide(
            self._holds, self._turns, self.source, outbox, clock, block_size, self.eager.peers
        )
        self._inbox: deque[InboxItem] = deque()
        # Hardens of ranges that a step which runs has yet to fill, a batch each.
        self._waiting: list[CommandBatch] = []
        self._news = threading.Event()
        # Until this step is over there is something that vLLM has yet to take up.
        self._stirred = 0
        self._obeying = threading.Lock()
        self._generation = 0
        self._highest_epoch = 0
        self._seen_epoch = 0
        self._lineage = ""
        # Every number that this boot has had, oldest first.
        self._incarnations: list[int] = []
        self._fenced = False
        # How many times vLLM was told to pause, if it is paused, and since when that waits.
        self._pauses = 0
        self._settling_ns: int | None = None
        self._times: dict[str, _LegTimes] = {}

    # From other threads.

    def post(self, item: InboxItem) -> None:
        """Queues something for the scheduler thread; the caller wakes the engine."""
        self._inbox.append(item)
        self._news.set()

    def end_stream(self, life: StreamLife) -> None:
        """When it returns, no command of the stream is being obeyed, nor will be: what the next
        hello says of leases stays true. The link's thread."""
        with self._obeying:
            life.open = False

    @property
    def highest_epoch(self) -> int:
        """The highest term heard of; any thread."""
        return max(self._highest_epoch, self._seen_epoch)

    def saw_epoch(self, epoch: int) -> None:
        """The control plane speaks in this term; the link's thread. The next hello must say so even
        if the scheduler's thread has not come to it."""
        self._seen_epoch = max(self._seen_epoch, epoch)

    @property
    def lineage(self) -> str:
        """The control plane's lineage; any thread."""
        return self._lineage

    @property
    def incarnations(self) -> list[int]:
        """Every number that this boot has had; any thread."""
        return list(self._incarnations)

    @property
    def fenced(self) -> bool:
        """Whether this boot has been declared dead; any thread."""
        return self._fenced

    def pool_stats(self) -> cluster_pb2.PoolStats:
        """For a heartbeat; any thread: reads single words that the scheduler thread writes."""
        running, waiting = self._counts()
        return cluster_pb2.PoolStats(
            total_blocks=self._store.total_blocks,
            free_blocks=self._store.free_blocks,
            held_blocks=self._holds.held_blocks,
            holds=self._holds.count,
            quarantined_blocks=self._holds.quarantined_blocks,
            running_requests=running,
            waiting_requests=waiting,
            open_leases=self.source.lease_count
            + self.destination.grant_count
            + len(self.push.open_leases),
        )

    # Hooks of vLLM's scheduler.

    def drain(self) -> None:
        """Applies what waits in the inbox. One bad item must not stop the engine or the rest."""
        self.source.settle_reused()
        self._news.clear()
        # Anew: with the checks of what has just come.
        self._inbox.extendleft(reversed(self._waiting))
        self._waiting.clear()
        if self._inbox:
            # What the mover has told vLLM's worker beside it is taken by a step that is scheduled
            # now, or next, and vLLM hears of it when that is over.
            self._stirred = self.source.steps_begun + 1
        while self._inbox:
            item = self._inbox.popleft()
            try:
                self._apply(item)
            except Exception:
                _log.exception("inbox_item_failed", item=type(item).__name__)
                self.counters.fallback("AGENT_ERROR")

    def arrived(self, request_id: str, key: LegKey) -> None:
        """vLLM has queued a request of a turn."""
        self.destination.arrived(request_id, key)

    def look(
        self,
        request_id: str,
        key: LegKey,
        hashes: Sequence[bytes],
        num_tokens: int,
        num_computed: int,
        tail_hash: TailHash | None = None,
    ) -> int | None:
        """Tokens that can be loaded; None: ask again soon."""
        self.drain()
        self._times[request_id] = _LegTimes(self._clock(), num_computed)
        return self.destination.look(request_id, key, hashes, num_tokens, num_computed, tail_hash)

    def allocated(
        self,
        request_id: str,
        key: LegKey,
        block_ids: Sequence[int],
        num_external: int,
        view: RequestView | None = None,
    ) -> None:
        """vLLM has allocated blocks for a request of a turn; again when its load has ended."""
        self.destination.allocated(request_id, key, block_ids, num_external)
        if view is not None:
            self.push.running(request_id, key, view)
        times = self._times.get(request_id)
        if times is not None:
            times.admitted_ns = self._clock()

    def finished(self, key: LegKey, request: FinishedRequest) -> None:
        """A request of a turn has ended: hold and offer what it leaves."""
        self.drain()
        written = self.destination.blocks_written(request.request_id)
        loaded = self.destination.request_gone(request.request_id, key)
        times = self._times.pop(request.request_id, None)
        # Behind blocks that a load has yet to fill there is nothing, and of a request that was cut
        # off nobody will want the last words.
        tail = request.tail if written is None and not request.aborted else None
        hashes, block_ids = request.hashes[:written], request.block_ids[:written]
        pushed = self.push.finished(
            request.request_id, key, hashes, block_ids, tail, aborted=request.aborted
        )
        leg = self._turns.find(key)
        if leg is None and key[1] == types_pb2.LEG_DECODE:
            leg = self._turns.find_past(key)
        if leg is None:
            return
        if not request.aborted and times is not None:
            self._leg_computed(leg, request, times, loaded)
        # A prefill that was aborted, or that is pushed, leaves nothing that anybody waits for.
        if pushed or (request.aborted and leg.leg == types_pb2.LEG_PREFILL):
            return
        # Who is cut off in its first step may have hits that another request's part of it fills.
        self.source.offer(leg, hashes, block_ids, tail, filling=request.aborted)

    def load_failed(self, request_ids: Sequence[str]) -> None:
        """vLLM was told that these loads failed."""
        for request_id in request_ids:
            self.destination.load_failed(request_id)

    def refuse_load(self, request_id: str, num_external: int) -> None:
        """Something broke after vLLM was promised a load: let it fail instead of hang."""
        self.counters.fallback("AGENT_ERROR")
        if num_external > 0:
            self._out.order(m.Refuse(request_id))

    def lease_inventory(self) -> list[agent_pb2.AgentLease]:
        """Every lease that this side knows, for a hello; the link's thread."""
        now = self._clock()
        leases: list[agent_pb2.AgentLease] = []
        for lease in self.source.open_leases:
            entry = agent_pb2.AgentLease(
                lease_id=lease.lease_id, version=lease.version, is_source=True
            )
            entry.remaining.FromNanoseconds(max(0, lease.deadline_ns - now))
            leases.append(entry)
        for lease_id, version, deadline in self.push.open_leases:
            entry = agent_pb2.AgentLease(
                lease_id=lease_id, version=version, is_source=True, transferring=True
            )
            entry.remaining.FromNanoseconds(max(0, deadline - now))
            leases.append(entry)
        for landing in self.landings.held:
            worker_id, incarnation = landing.hope.peer
            entry = agent_pb2.AgentLease(
                lease_id=landing.grant.lease_id,
                version=landing.grant.version,
                writer=types_pb2.WorkerRef(worker_id=worker_id, incarnation=incarnation),
            )
            entry.remaining.FromNanoseconds(max(0, landing.grant.deadline_ns - now))
            leases.append(entry)
        for grant in self.destination.open_grants:
            entry = agent_pb2.AgentLease(
                lease_id=grant.lease_id,
                version=grant.version,
                transferring=bool(grant.request_id) or self.eager.in_flight(grant.lease_id),
            )
            entry.remaining.FromNanoseconds(max(0, grant.deadline_ns - now))
            leases.append(entry)
        return leases

    def computing(self) -> None:
        """The step that is being scheduled computes something: who has asked waits for its end."""
        self._stirred = max(self._stirred, self.source.steps_begun)

    def heed_pause(self, told: int) -> None:
        """How many times vLLM was told to pause, 0 while it is not paused. While it is its weights
        may be about to change: eager returns end, leases that nobody reads yet go back, and neither
        is begun before it goes on."""
        if told == self._pauses:
            return
        paused, changed = bool(told), bool(told) != bool(self._pauses)
        self._pauses = told
        # Whoever asks again waits again.
        self._settling_ns = None
        if not changed:
            return
        _log.info("engine_paused" if paused else "engine_goes_on", moving=self._holds.moving)
        self.eager.paused = paused
        if paused:
            # Sources shall be able to pause too, and may have other weights when this one goes on.
            self.destination.let_go_unread("ENGINE_PAUSED")
            self.eager.yield_room("ENGINE_PAUSED")

    def settling(self) -> bool:
        """Whether a pause has to wait, asked when the engine has nothing else to do: vLLM cannot
        reset a cache whose blocks are read or written, and a paused engine promises that nothing
        moves."""
        if not self._pauses or not self._holds.moving:
            self._settling_ns = None
            return False
        now = self._clock()
        if self._settling_ns is None:
            self._settling_ns = now
        return now - self._settling_ns < PAUSE_WAIT_NS

    def rest(self, has_input: Callable[[], bool]) -> None:
        """Nothing is to be computed in this step. If requests wait for their KV, or for a word on
        it, vLLM's loop would step on and on until it is there, on cores that prefill, and who has
        the word, may need: so it waits here, until something is heard, the engine has input, or a
        moment has passed. Not while a step is under way of which vLLM has yet to hear: where it
        schedules ahead, it comes to that step's output after this one only."""
        # A paused vLLM does not ask for those again before it goes on.
        undecided = () if self._pauses else self.destination.undecided
        awaited = self.landings.awaited + self.destination.loading + len(undecided)
        settling = self._settling_ns is not None
        # What waits for a step to be over hears of it in the next one.
        if not (awaited or settling) or self._waiting or self.source.steps()[1] < self._stirred:
            return
        running, waiting = self._counts()
        # Who waits for something else (blocks, a grammar) must be looked at again soon.
        alone = not running and waiting <= awaited and not settling
        now = self._clock()
        # Who has waited for a word for long enough computes.
        rest = min([LONG_REST_NS if alone else REST_NS, *(until - now for until in undecided)])
        for _ in range(max(0, rest) // REST_LOOK_NS):
            if self._news.is_set() or has_input():
                return
            self._news.wait(REST_LOOK_NS / NS)

    def make_room(self, wanted_free: int) -> None:
        """Lets replicas go until so many blocks are free, or no hard replica is left."""
        wanted_free = min(wanted_free, self._store.total_blocks)
        if self._store.free_blocks < wanted_free:
            self.eager.yield_room()
            self.source.make_room(wanted_free)

    def reset(self) -> None:
        """The engine's cache is being reset: replicas go, leases keep their ranges. They go before
        anything is obeyed: a lease on them that begins now would be in the way of the reset."""
        self._let_go_for_reset()
        self.drain()
        # What has ended by that may have left some.
        self._let_go_for_reset()

    def next_deadline(self) -> int | None:
        """The next instant (ns) at which a Tick is due. Every hook but the lookup ends with it, so
        this is where blocks may be taken from the pool: see `EagerSide.advance`."""
        try:
            self.eager.advance()
        except Exception:
            # A return that nobody waits for must not stop the engine.
            _log.exception("eager_failed")
            self.counters.fallback("AGENT_ERROR")
        times = [
            self.source.next_deadline(),
            self.destination.next_deadline(),
            self.push.next_deadline(),
        ]
        return min((t for t in times if t is not None), default=None)

    # Inside.

    def _let_go_for_reset(self) -> None:
        self.eager.yield_room("RESET")
        self.source.drop_replicas("RESET")

    def _apply(self, item: InboxItem) -> None:
        match item:
            case CommandBatch():
                with self._obeying:
                    self._obey_batch(item)
            case StreamUp():
                self._generation = item.generation
                self._highest_epoch = max(self._highest_epoch, item.epoch)
                self._lineage = item.welcome.lineage_id
                journal.note(
                    "welcomed",
                    worker=self._worker_id,
                    incarnation=item.welcome.incarnation,
                    epoch=item.epoch,
                    lineage=self._lineage,
                )
                if item.welcome.incarnation not in self._incarnations:
                    self._incarnations.append(item.welcome.incarnation)
                self.source.drift_ppm = item.welcome.clock_drift_ppm
                self.source.checkpoint_interval = item.welcome.checkpoint_interval
                self.destination.checkpoint_interval = item.welcome.checkpoint_interval
                for peer in item.welcome.peers:
                    self._add_peer(peer)
            case StreamDown():
                self.landings.stream_down()
            case Tick():
                now = self._clock()
                self.source.expire(now)
                self.destination.expire(now)
                self.push.expire(now)
            case m.ReadEnded():
                if not self.eager.read_ended(item):
                    self.destination.read_ended(item)
            case m.ReadGivenUp():
                self.eager.given_up(item)
            case m.ReaderDone():
                self.source.reader_done(item.lease_id)
            case m.Unserved():
                self.source.unserved(item.lease_id)
            case m.PeerReady():
                self.destination.peer_ready((item.worker_id, item.incarnation), item.error)
            case m.LandingEnded():
                self.landings.ended(item)
            case m.LandingGivenUp():
                self.landings.given_up(item)
            case m.PushChunkDone():
                self.push.chunk_done(item)
            case m.PushStopping():
                self.push.mover_stops(item)
            case m.PushEnded():
                self.push.ended(item)
            case m.MoverFailed():
                _log.error("mover_failed", error=item.error)
                self.counters.fallback("MOVER_FAILED")
                self.push.mover_failed()

    def _obey_batch(self, batch: CommandBatch) -> None:
        # What a closed stream or an older term had queued is not obeyed any more.
        current = batch.generation == self._generation and batch.life.open
        if not current or batch.epoch < self.highest_epoch:
            _log.warning("stale_commands_dropped", count=len(batch.commands), epoch=batch.epoch)
            return
        for command in batch.commands:
            if command.WhichOneof("command") == "harden" and self.source.unfilled(command.harden):
                self._waiting.append(replace(batch, commands=[command]))
                continue
            if journal.enabled():
                self._note_order(command, batch.epoch)
            self._obey(command)

    def _no_longer_wait(self, over: Callable[[agent_pb2.Harden], bool]) -> None:
        self._waiting = [batch for batch in self._waiting if not over(batch.commands[0].harden)]

    def _note_order(self, command: agent_pb2.AgentCommand, epoch: int) -> None:
        kind = command.WhichOneof("command")
        if kind not in ("harden", "grant", "extend", "revoke", "reader_stopped", "writer_stopped"):
            return
        order = getattr(command, kind)
        journal.note("obeys", order=kind, lease=order.lease_id, version=order.version, epoch=epoch)

    def _obey(self, command: agent_pb2.AgentCommand) -> None:
        match command.WhichOneof("command"):
            case "expect_turn":
                self._expect(command.expect_turn)
            case "forget_turn":
                forget = command.forget_turn
                leg = self._turns.forget((forget.turn_token, forget.leg))
                if leg is not None:
                    self.destination.forget_turn(leg)
            case "harden":
                self.source.harden(command.harden)
            case "grant":
                self._grant(command.grant)
            case "extend":
                extend = command.extend
                if not extend.is_source:
                    self.destination.extend(extend)
                elif not self.push.extend(extend):
                    self.source.extend(extend)
            case "extend_leases":
                many = command.extend_leases
                if many.is_source:
                    self.source.extend_many(many, self.push.extend_many(many))
                else:
                    self.destination.extend_many(many)
            case "revoke":
                revoke = command.revoke
                if revoke.is_source:
                    self.push.revoke(revoke.lease_id, revoke.reason)
                else:
                    self.destination.revoke(revoke.lease_id, revoke.reason, revoke.turn_token)
            case "landing_granted":
                self.landings.granted(command.landing_granted.lease_id)
            case "writer_stopped":
                over = command.writer_stopped
                self.destination.writer_stopped(
                    over.lease_id, over.reason, pull_follows=over.pull_follows
                )
            case "reader_stopped":
                lease_id = command.reader_stopped.lease_id
                self._no_longer_wait(lambda harden: harden.lease_id == lease_id)
                self.source.reader_stopped(lease_id)
            case "release_replica":
                release = command.release_replica
                self.source.release(release.tenant, release.session_id, release.head_hash)
            case "retain_replica":
                retain = command.retain_replica
                self.source.retain(
                    retain.tenant,
                    retain.session_id,
                    retain.head_hash,
                    retain.retention.ToNanoseconds(),
                    retain.keep_blocks,
                )
            case "peer":
                self._add_peer(command.peer)
            case "peer_fenced":
                worker = command.peer_fenced.worker
                key = (worker.worker_id, worker.incarnation)
                self._no_longer_wait(lambda harden: harden.destination == worker)
                self._out.order(m.DropPeer(*key))
                self.destination.peer_fenced(key)
                self.source.fence(key)
                self.push.peer_fenced(key)
            case "drain":
                self.source.drain(undo=command.drain.undo)
            case "fenced":
                self._fenced = True
                _log.error("fenced", reason=command.fenced.reason)
            case unknown:
                _log.warning("unknown_command", command=str(unknown))

    def _grant(self, grant: agent_pb2.Grant) -> None:
        if grant.push:
            self.push.grant(grant)
        elif grant.eager:
            self.eager.grant(grant)
        else:
            self.destination.grant(grant)

    def _expect(self, expect: agent_pb2.ExpectTurn) -> None:
        self._turns.expect(
            TurnLeg(
                token=expect.turn_token,
                leg=expect.leg,
                tenant=expect.tenant,
                session_id=expect.session_id,
                turn=expect.turn,
                lease_id=expect.lease_id,
                lease_follows=expect.lease_follows,
                lookup_wait_ns=expect.lookup_wait.ToNanoseconds(),
                retention_ns=expect.retention.ToNanoseconds(),
                min_tokens=expect.min_tokens,
                replica_blocks=expect.replica_blocks,
                block_compute_ns=expect.block_compute_time.ToNanoseconds(),
                may_ask=expect.may_ask,
                push=_push_hope(expect.push) if expect.HasField("push") else None,
            )
        )

    def _add_peer(self, peer: agent_pb2.Peer) -> None:
        key = (peer.worker.worker_id, peer.worker.incarnation)
        ranks = sorted(peer.ranks, key=lambda x: x.rank)
        theirs = [Heads(x.first_head, x.num_heads) for x in ranks]
        try:
            orders = [
                (rank, ranks[other], heads)
                for rank in range(len(self._heads))
                for other, heads in links(self._heads, rank, theirs).items()
            ]
            self.source.readers[key] = readers(self._heads, theirs)
        except ValueError as error:
            # The control plane registers no such pair.
            _log.error("peer_split_otherwise", worker=key[0], error=str(error))
            self.destination.peer_ready(key, f"{key[0]}: {error}")
            return
        self.destination.peer_announced(key, len(orders))
        for rank, there, heads in orders:
            self._out.order(
                m.AddPeer(
                    worker_id=key[0],
                    incarnation=key[1],
                    agent_name=there.agent_name,
                    agent_metadata=there.agent_metadata,
                    regions=[
                        m.PeerRegion(
                            r.base_address,
                            r.block_bytes,
                            r.memory_type,
                            r.device_id,
                            peer.num_blocks,
                        )
                        for r in there.regions
                    ],
                    heads=heads,
                ),
                rank=rank,
            )

    def _leg_computed(
        self, leg: TurnLeg, request: FinishedRequest, times: _LegTimes, loaded: int
    ) -> None:
        computed = max(0, request.prompt_tokens - times.local_tokens - loaded)
        self.counters.leg(computed=computed, local_hit=times.local_tokens)
        event = agent_pb2.LegComputed(
            turn_token=leg.token,
            leg=leg.leg,
            prompt_tokens=request.prompt_tokens,
            local_hit_tokens=times.local_tokens,
            external_tokens=loaded,
            computed_tokens=computed,
        )
        if leg.leg == types_pb2.LEG_PREFILL:
            # It generates one token, so its end is the end of the prompt's computation.
            event.compute_time.FromNanoseconds(max(0, self._clock() - times.admitted_ns))
        self._out.emit(agent_pb2.AgentEvent(leg_computed=event))


def _push_hope(plan: agent_pb2.PushPlan) -> PushHope:
    return PushHope(
        lease_id=plan.lease_id,
        version=plan.version,
        peer=(plan.peer.worker_id, plan.peer.incarnation),
        ttl_ns=plan.ttl.ToNanoseconds(),
        number=(plan.lease_epoch, plan.lease_seq),
    )
