"""One lease between two workers, in every order of events: the worlds that are explored.

In one the lease is a turn's, and a request reads under it. In the other it is eager: its turn has
ended, prefill's agent reads it piece by piece of one block, and the next turn comes when it will.

The registry, both agents' scheduler sides, their transfers and conversations are the real ones.
Whatever can happen next is an action with a name; a state is what `fingerprint` says of it. Blocks
of the source that nothing references are overwritten after every action: the worst that memory
pressure can do.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from kvshuttle.controlplane.clock import Timeline
from kvshuttle.controlplane.model.effects import LeaseChange
from kvshuttle.controlplane.model.errors import DomainError
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.terms import ReturnPolicy, SessionKey, TurnOutcome, WorkerRef
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.services.convert import duration
from kvshuttle.controlplane.services.wire import (
    apply_event,
    command_out,
    heartbeat_in,
    hello_in,
    peer_out,
)
from kvshuttle.controlplane.store import MemoryStore
from kvshuttle.dataplane import eager as eager_module
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.dataplane.conversation import Conversation
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.push_steps import PushStep
from kvshuttle.dataplane.scheduler import (
    FinishedRequest,
    SchedulerAgent,
    StreamDown,
    StreamUp,
    Tick,
)
from kvshuttle.dataplane.transfers import Results, Transfers
from kvshuttle.dataplane.transport import LocalRegion
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import types_pb2
from tests.simulation.clients import chain_hash
from tests.simulation.fabric import BLOCK_BYTES, Fabric, FlyingRead, FlyingWrite, SimTransport
from tests.simulation.invariants import Checker
from tests.simulation.kernel import SECOND, Kernel, Machine, Thread
from tests.simulation.pool import Block, BlockPool

__all__ = ["BLOCKS", "BLOCK_TOKENS", "DRIFT_PPM", "HASHES", "KEY", "PREFILL", "Node", "SmallWorld"]

BLOCK_TOKENS = 32
BLOCKS = 2
KEY = SessionKey("t", "s")
PREFILL, DECODE = types_pb2.LEG_PREFILL, types_pb2.LEG_DECODE
DRIFT_PPM = 50_000


def _chain(length: int) -> tuple[bytes, ...]:
    hashes: list[bytes] = []
    for i in range(length):
        hashes.append(chain_hash(hashes[-1] if hashes else b"root", i))
    return tuple(hashes)


HASHES = _chain(BLOCKS)


class _Notices(Fabric):
    """READs, WRITEs and notices move when an action says so. A block's content has an entry for
    each layer here."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel, lambda _a, _b: False, lambda _: None, one_sided=True)
        self.notices: deque[tuple[SimTransport, SimTransport, bytes]] = deque()
        self.lose_next = False

    def start(self, read: FlyingRead) -> None:
        self.posted += 1
        self.flying.append(read)

    def send(self, sender: SimTransport, to: SimTransport, message: bytes) -> None:
        if self.lose_next:
            self.lose_next = False
            return
        self.notices.append((sender, to, message))

    def finish(self, read: FlyingRead) -> None:
        """Its bytes move now."""
        self.flying.remove(read)
        if not read.source.alive:
            read.status = "ERR"
            return
        while read.copied < len(read.local):
            self._copy(read)
        read.status = "DONE"
        self.send(read.reader, read.source, read.notice)

    def _copy(self, read: FlyingRead) -> None:
        block = read.reader.pool.blocks[read.local[read.copied]]
        block_there = read.source.pool.blocks[read.remote[read.copied]]
        super()._copy(read)
        block.content[:] = block_there.content

    def start_write(self, write: FlyingWrite) -> None:
        self.written += 1
        self.writing.append(write)

    def _bytes(self, write: FlyingWrite, to: Block, source: Block) -> None:
        for layer in write.regions:
            to.content[layer] = source.content[layer]

    def move_write(self, write: FlyingWrite, blocks: int) -> None:
        """So many blocks of it move now; all of it: it has ended. To a dead process nothing does,
        and NIXL says so."""
        if not write.target.alive:
            self._end_write(write, "ERR")
            return
        for _ in range(blocks):
            self._copy_write(write)
        if write.copied == len(write.local):
            self._end_write(write, "DONE")

    def fail_write(self, write: FlyingWrite) -> None:
        """NIXL says that it has failed."""
        self._end_write(write, "ERR")


@dataclass
class _Spec:
    worker_id: str


class Node:
    """One boot of one worker; everything of it happens at once unless it is held up."""

    blocks = 4
    layers = 1
    push = False

    def __init__(
        self, world: SmallWorld, worker_id: str, role: int, machine: Machine, number: int
    ) -> None:
        self.world = world
        self.spec = _Spec(worker_id)
        self.role = role
        self.machine = machine
        self.name = f"{worker_id}.{number}"
        self.alive = True
        self.incarnation = 0
        self.replaced_lives: set[Any] = set()
        self._old_lives: list[Any] = []
        self.thread = Thread(machine, self.name)
        self.pool = BlockPool(
            self.name,
            self.blocks,
            world.kernel.rng,
            ranks=self.layers,
            caching=True,
            adversarial=False,
        )
        self.agent = SchedulerAgent(
            self.pool,
            self,
            boottime_ns,
            block_size=BLOCK_TOKENS,
            worker_id=worker_id,
            counts=lambda: (0, 0),
        )
        self.transports = [
            SimTransport(
                world.fabric,
                f"{self.name}/m",
                0,
                self.pool,
                self.thread,
                lambda: None,
                world.checker.posting,
                world.checker.writing,
            )
        ]
        self.results = Results()
        # What the mover has to say to the scheduler's side.
        self.reports: deque[m.FromMover] = deque()
        regions = [
            LocalRegion(f"layer{i}", 0, BLOCK_BYTES, self.blocks, "cpu", 0)
            for i in range(self.layers)
        ]
        self.transfers = [
            Transfers(
                self.transports[0],
                regions,
                self.results,
                self.reports.append,
                Faults(),
                boottime_ns,
            )
        ]
        # Steps of the engine that the mover has not heard of: they come on a way of their own.
        self.steps: deque[PushStep] = deque()
        self.orders: list[deque[m.ToMover]] = [deque()]
        self.up: deque[pb.ConnectRequest] = deque()
        self.down: deque[pb.ConnectResponse] = deque()
        self.pending: list[pb.AgentEvent] = []
        self.conversation: Conversation | None = None
        # The one on which the control plane speaks.
        self.welcomed: Conversation | None = None
        # The engine is in a long step; the mover's process is stopped.
        self.stalled = False
        self.mover_paused = False
        world.checker.watch(self)  # type: ignore[arg-type]

    # Outbox.

    def emit(self, event: pb.AgentEvent) -> None:
        self.pending.append(event)

    def order(self, message: m.ToMover, rank: int | None = None) -> None:
        self.orders[0].append(message)

    @property
    def num_ranks(self) -> int:
        return 1

    @property
    def connected(self) -> bool:
        return self.conversation is not None and self.conversation.generation > 0

    # Steps.

    def settle(self) -> None:
        """Its threads do what they have to do."""
        transfers = self.transfers[0]
        moves = transfers._reads or transfers.pushes._pushes or transfers.zones._landings
        idle = not (self.agent._inbox or self.orders[0] or self.steps or self.reports or moves)
        if not self.alive or (idle and not self.transports[0].inbox and not self.pending):
            return
        with self.world.kernel.on(self.thread):
            while True:
                if not self.stalled:
                    self.agent.drain()
                    self.agent.next_deadline()
                if not self.mover_paused:
                    while self.orders[0]:
                        transfers.obey(self.orders[0].popleft())
                    while self.steps:
                        transfers.begin_step(self.steps.popleft())
                    transfers.poll()
                while self.reports and f"{self.spec.worker_id}^" not in self.world.held:
                    self.agent.post(self.reports.popleft())
                if (self.orders[0] and not self.mover_paused) or (
                    self.agent._inbox and not self.stalled
                ):
                    continue
                break
        if self.pending and self.connected:
            self.up.append(pb.ConnectRequest(events=pb.AgentEvents(events=self.pending)))
            self.pending = []

    def say_hello(self) -> None:
        with self.world.kernel.on(self.thread):
            hello = pb.AgentHello(
                worker_id=self.spec.worker_id,
                boot_id=f"boot-{self.name}",
                role=types_pb2.WorkerRole.ValueType(self.role),
                url="http://x",
                block_size=BLOCK_TOKENS,
                num_blocks=self.blocks,
                bytes_per_block=BLOCK_BYTES,
                prefix_caching=True,
                ranks=[
                    pb.RankEndpoint(
                        agent_name=self.transports[0].name,
                        agent_metadata=self.transports[0].name.encode(),
                    )
                ],
                highest_epoch=self.agent.highest_epoch,
                lineage_id=self.agent.lineage,
                replicas=self.agent.source.inventory(),
                leases=self.agent.lease_inventory(),
                clock=boottime_ns(),
                push=self.push,
                past_incarnations=self.agent.incarnations,
            )
            self.conversation = Conversation(hello, boottime_ns())
        self.replaced_lives.update(self._old_lives)
        self.up.append(pb.ConnectRequest(hello=hello))

    def beat(self) -> None:
        if self.alive and self.connected:
            with self.world.kernel.on(self.thread):
                beat = pb.AgentHeartbeat(clock=boottime_ns())
            self.up.append(pb.ConnectRequest(heartbeat=beat))

    def hear(self) -> None:
        message = self.down.popleft()
        if self.conversation is None:
            return
        with self.world.kernel.on(self.thread):
            item = self.conversation.hear(message, boottime_ns())
        if item is None:
            return
        self.agent.post(item)
        if isinstance(item, StreamUp):
            self.incarnation = item.welcome.incarnation
            self.conversation.generation = item.generation
            self.world.checker.welcomed(self)  # type: ignore[arg-type]

    def cut(self) -> None:
        """Its stream breaks: both ways are lost."""
        self.up.clear()
        self.down.clear()
        if self.conversation is not None:
            self.agent.end_stream(self.conversation.life)
            self._old_lives.append(self.conversation.life)
            if self.conversation.generation:
                self.agent.post(StreamDown(self.conversation.generation))
            self.conversation = None

    def die(self) -> None:
        self.cut()
        self.alive = False
        self.transports[0].alive = False
        self.world.fabric.dead(self.transports[0])
        for read in list(self.world.fabric.flying):
            if read.source is self.transports[0]:
                read.status = "ERR"
                self.world.fabric.flying.remove(read)


class SmallWorld:
    """Two workers, one lease, one control plane."""

    node = Node
    prefill_id = "d"

    def __init__(self, kernel: Kernel, *, eager: bool = False) -> None:
        self.kernel = kernel
        self.eager = eager
        if eager:
            vars(eager_module)["EAGER_PIECE_BLOCKS"] = 1
        self.fabric = _Notices(self.kernel)
        self.checker = Checker(self.kernel, self.fabric)
        self.limits = self._limits()
        half = DRIFT_PPM // 2
        self.cp_machine = Machine(self.kernel, "cp", ppm=-half)
        self.cp_thread = Thread(self.cp_machine, "cp")
        # The source's clock is fast, the reader's slow: the worst for the lease.
        self.machines = {
            "s": Machine(self.kernel, "s", ppm=half),
            "d": Machine(self.kernel, "d", ppm=-half),
        }
        self.store = MemoryStore()
        self.stores_lost = 0
        # Every lease that was in the books, oldest first.
        self.leases: dict[str, None] = {}
        self.boots = 0
        self.starts = 0
        self.used: dict[str, int] = {}
        # Of these it makes no difference any more how often they were used.
        self.used_up: Collection[str] = ()
        # Channels on which nothing arrives for now: "s>", "s<", "d>", "d<", "notices".
        self.held: set[str] = set()
        self.streams: dict[str, tuple[WorkerRef, int, str]] = {}
        self.token = ""
        self.request = "none"
        self.request_blocks: list[int] = []
        self.request_external = 0
        self.request_hits = 0
        self.kernel.now = 100 * SECOND
        self.start_control()
        self.nodes = {"s": self.boot("s"), "d": self.boot("d")}
        self._set_up()

    # Making it.

    def _limits(self) -> Limits:
        return Limits(
            lease_ttl_ns=2 * SECOND,
            lease_ttl_max_ns=3 * SECOND,
            guard_ns=SECOND,
            clock_drift_ppm=DRIFT_PPM,
            eager=self.eager,
            min_tokens=1,
            silence_ns=3_600 * SECOND,
            turn_timeout_ns=3_600 * SECOND,
            lookup_wait_ns=100 * SECOND,
        )

    def boot(self, worker_id: str) -> Node:
        self.boots += 1
        role = 1 if worker_id == self.prefill_id else 2
        return self.node(self, worker_id, role, self.machines[worker_id], self.boots)

    def start_control(self) -> None:
        self.starts += 1
        with self.kernel.on(self.cp_thread):
            self.clock = Timeline()
            self._offset_ns = self.clock.now_ns() - self.cp_machine.boottime()
            lost = self.stores_lost
            self.registry = Registry(
                self.limits, Planner(min_tokens=1), accept_lineage_change=lost > 0
            )
            snapshot = self.store.load()
            if snapshot.epoch == 0:
                # A new store's numbers begin where no other's have been.
                snapshot = replace(snapshot, last_incarnation=100 * lost)
            decision = self.registry.start(self.clock.now_ns(), snapshot, f"lineage{lost}")
        self.control_name = f"cp{self.starts}"
        self.streams.clear()
        self._effects(decision)

    def _set_up(self) -> None:
        """Up to where the source is about to be asked to hold the range."""
        source, reader = self.nodes["s"], self.nodes["d"]
        for node in (reader, source):
            node.say_hello()
        self.flow()
        # A first turn's decode leg has left two blocks at the source.
        self.turn()
        self.flow()
        ids = source.pool.allocate(BLOCKS)
        for block_hash, block_id in zip(HASHES, ids, strict=True):
            source.pool.write(block_id, block_hash)
            source.pool.insert(block_hash, block_id, 0)
        with self.kernel.on(source.thread):
            source.agent.finished(
                (self.token, DECODE),
                FinishedRequest("first", HASHES, tuple(ids), BLOCKS * BLOCK_TOKENS, False),
            )
        source.pool.free(ids)
        self.post(lambda now: self.registry.end_turn(now, KEY, 1, TurnOutcome.COMPLETED))
        if self.eager:
            # The offer arrives, and what it leads to is still on its way.
            self.held = {"s<", "d<"}
            self.flow()
            self.held = set()
        else:
            self.flow()
            self.turn()
        (lease_id,) = self.registry.state.open_leases
        self.lease_id = lease_id

    def turn(self) -> None:
        """Another turn begins."""
        self.token = "second" if self.token else "first"
        ask = BeginTurn(key=KEY, token=self.token, policy=ReturnPolicy.ALWAYS)
        self.post(lambda now: self.registry.begin_turn(now, ask))

    def may_begin(self) -> bool:
        """Whether both workers can take another turn."""
        workers = self.registry.state.workers
        return all(name in workers and workers[name].ready for name in self.nodes)

    def flow(self) -> None:
        """Everything that is not held up arrives and is dealt with."""
        held = self.held
        busy = True
        while busy:
            busy = False
            for name, node in self.nodes.items():
                if not node.alive:
                    continue
                node.settle()
                while node.up and f"{name}>" not in held:
                    busy = True
                    self._control_hears(node)
                while node.down and f"{name}<" not in held:
                    busy = True
                    node.hear()
                if busy:
                    node.settle()
            while self.fabric.notices and "notices" not in held:
                busy = True
                self.deliver_notice()

    # The control plane.

    def post(self, event: Callable[[int], Any]) -> Any:
        with self.kernel.on(self.cp_thread):
            decision = event(self.clock.now_ns())
        return self._effects(decision)

    def attempt(self, event: Callable[[int], Any]) -> None:
        """As `post`, where a refusal is as good as an answer."""
        with contextlib.suppress(DomainError):
            self.post(event)

    def _effects(self, decision: Any) -> Any:
        effects = decision.effects
        self.checker.decided(self, effects)  # type: ignore[arg-type]
        self.leases.update(
            dict.fromkeys(x.lease.lease_id for x in effects.changes if isinstance(x, LeaseChange))
        )
        self.store.commit(effects.records)
        for ref, command in effects.commands:
            stream = self.streams.get(ref.worker_id)
            if stream is not None and stream[0] == ref:
                commands = pb.AgentCommands(commands=[command_out(command)])
                self._say(ref.worker_id, commands=commands)
        return decision.result

    @property
    def name(self) -> str:
        """For the checker."""
        return self.control_name

    def _say(self, worker_id: str, **what: Any) -> None:
        _, generation, boot_id = self.streams[worker_id]
        node = next((x for x in self.nodes.values() if f"boot-{x.name}" == boot_id), None)
        if node is None or node.conversation is not node.welcomed:
            return  # on a stream that has ended; of its next one the hello has not come
        node.down.append(
            pb.ConnectResponse(
                epoch=self.registry.state.epoch,
                boot_id=boot_id,
                stream_generation=generation,
                **what,
            )
        )

    def _control_hears(self, node: Node) -> None:
        message = node.up.popleft()
        worker_id = node.spec.worker_id
        if message.HasField("hello"):
            says = hello_in(message.hello)
            try:
                with self.kernel.on(self.cp_thread):
                    decision = self.registry.hello(self.clock.now_ns(), says)
            except DomainError:
                node.cut()
                return
            welcome = decision.result
            worker = welcome.worker
            node.down.clear()
            node.welcomed = node.conversation
            self.streams[worker_id] = (worker.ref, worker.stream_generation, worker.boot_id)
            self._say(
                worker_id,
                welcome=pb.AgentWelcome(
                    incarnation=worker.ref.incarnation,
                    lineage_id=welcome.lineage_id,
                    heartbeat_interval=duration(SECOND),
                    clock_drift_ppm=DRIFT_PPM,
                    peers=[peer_out(peer) for peer in welcome.peers],
                ),
            )
            self._effects(decision)
            return
        stream = self.streams.get(worker_id)
        if stream is None or stream[2] != f"boot-{node.name}":
            return

        def event(now: int) -> Any:
            batch = self.registry.agent(now, stream[0])
            if message.HasField("heartbeat"):
                batch.heartbeat(heartbeat_in(message.heartbeat))
            for item in message.events.events:
                apply_event(batch, item)
            return batch.finish()

        self.post(event)

    def deliver_notice(self) -> None:
        sender, to, message = self.fabric.notices.popleft()
        if to.alive:
            to.inbox.append((sender.name, message))

    @property
    def uses(self) -> tuple[tuple[str, int], ...]:
        """How often what was used that may not be used again at will."""
        return tuple(sorted(x for x in self.used.items() if x[0] not in self.used_up))

    def digest(self) -> bytes:
        """Its fingerprint, short."""
        return hashlib.blake2b(repr(self.fingerprint()).encode(), digest_size=12).digest()

    def fingerprint(self) -> tuple[Any, ...]:
        """Everything that what happens next can depend on."""
        state = self.registry.state
        lease = state.leases.get(self.lease_id)
        books = (
            (lease.state, lease.version, lease.stop, lease.renewal, lease.reader_stopped)
            if lease is not None
            else None,
            self._left(self.cp_machine, lease.deadline_ns - self._offset_ns) if lease else 0,
            lease is not None and self._left(self.cp_machine, lease.create_ns - self._offset_ns),
            state.epoch,
            tuple(
                (w.ref, w.state, w.stream_generation, w.clock - self._clock_of(w.ref.worker_id))
                for w in (state.workers[i] for i in sorted(state.workers))
            ),
            tuple(sorted(self.streams.items())),
        )
        return (
            self.uses,
            tuple(sorted(self.held)),
            books,
            self.request,
            tuple(self._of_node(self.nodes[i]) for i in ("s", "d")),
            tuple((a.name, b.name, n) for a, b, n in self.fabric.notices),
            tuple((r.reader.name, r.copied) for r in self.fabric.flying),
        )

    def _clock_of(self, worker_id: str) -> int:
        return self.machines[worker_id].boottime()

    @staticmethod
    def _left(machine: Machine, deadline_ns: int) -> int:
        """What is left until then; how long ago it was makes no difference."""
        return max(0, deadline_ns - machine.boottime())

    def _of_node(self, node: Node) -> tuple[Any, ...]:
        left = self._left
        machine = node.machine
        agent, transfers = node.agent, node.transfers[0]
        return (
            node.name,
            node.alive,
            node.stalled,
            node.mover_paused,
            node.connected,
            node.conversation is None,
            node.conversation is node.welcomed,
            tuple(x.SerializeToString(deterministic=True) for x in node.up),
            tuple(x.SerializeToString(deterministic=True) for x in node.down),
            tuple(x.SerializeToString(deterministic=True) for x in node.pending),
            tuple(repr(o) for o in node.orders[0]),
            tuple(repr(o) for o in node.reports),
            tuple(_of_item(i) for i in agent._inbox),
            tuple(
                (x.lease_id, x.version, left(machine, x.deadline_ns), x.closing)
                for x in agent.source.open_leases
            ),
            tuple(
                (g.lease_id, g.version, left(machine, g.deadline_ns), g.request_id)
                for g in agent.destination.open_grants
            ),
            tuple(
                (i, x.ranks_left, x.published, x.orphaned, x.hold.kind.value)
                for i, x in agent.destination._loads.items()
            ),
            agent._generation,
            agent.highest_epoch,
            tuple((i, left(machine, at)) for i, at in transfers._serving.items()),
            tuple(
                (i, s.phase.value, s.given_up, s.held, left(machine, s.deadline_ns))
                for i, s in transfers._reads.items()
            ),
            # What garbage it is makes no difference.
            tuple(
                (b.refs, b.block_hash, tuple(x in HASHES and x for x in b.content))
                for b in node.pool.blocks
            ),
            len(node.transports[0].inbox),
            tuple(_of_return(i, job) for i, job in agent.eager._open.items()),
            tuple(agent.eager._ended),
            tuple(
                (key, x.lease_id, x.refused, x.claimed_by, x.settled)
                for key, x in agent._turns._legs.items()
            ),
        )


def _of_return(lease_id: str, job: Any) -> tuple[Any, ...]:
    piece = job.piece
    return (
        lease_id,
        tuple(job.missing),
        None if piece is None else (piece.name, piece.hold.kind.value, piece.published),
        [len(hold.block_ids) for hold in job.kept],
        job.stopping,
        job.revoked,
        job.blocks,
    )


def _of_item(item: Any) -> str:
    if isinstance(item, StreamUp):
        return f"up {item.generation} {item.epoch}"
    if isinstance(item, Tick):
        return "tick"
    commands = getattr(item, "commands", None)
    if commands is not None:
        said = b"".join(c.SerializeToString(deterministic=True) for c in commands)
        return f"{item.generation} {item.epoch} {item.life.open} {said!r}"
    return repr(item)
