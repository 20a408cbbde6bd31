"""One boot of a simulated worker: the real agent between a model of vLLM and a model of NIXL.

Real: `SchedulerAgent` with all its sides, `Transfers` for each rank, `Conversation`, the messages.
Modelled after `kvshuttle.dataplane.link` and `.connector`: threads, sockets, the hello.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.dataplane.conversation import Conversation
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.limits import STOPPED_LOOK_NS
from kvshuttle.dataplane.push_steps import PushStep
from kvshuttle.dataplane.scheduler import SchedulerAgent, StreamDown, StreamLife, StreamUp, Tick
from kvshuttle.dataplane.transfers import Results, Transfers
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import cluster_service_pb2 as cluster_pb2
from kvshuttle.v1 import types_pb2
from tests.simulation.engine import BLOCK_TOKENS, Engine
from tests.simulation.fabric import BLOCK_BYTES, Fabric, SimTransport
from tests.simulation.kernel import MS, Kernel, Machine, Thread, between
from tests.simulation.pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.stream import Stream

__all__ = ["Boot", "WorkerSpec"]

RECONNECT_MIN_MS, RECONNECT_MAX_MS = 100.0, 1_500.0


class WorkerSpec:
    """What an operator has configured."""

    def __init__(
        self, worker_id: str, role: types_pb2.WorkerRole.ValueType, *, blocks: int, ranks: int
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.blocks = blocks
        self.ranks = ranks
        self.caching = True
        self.push = True
        self.chunk_tokens = 0
        self.overlap = False
        self.step_ms = 15.0


class Boot:
    """Implements `kvshuttle.dataplane.outbox.Outbox`."""

    def __init__(
        self,
        kernel: Kernel,
        machine: Machine,
        fabric: Fabric,
        spec: WorkerSpec,
        number: int,
        *,
        adversarial: bool,
        dial: Callable[[Boot], Stream | None],
        check_post: Callable[[SimTransport, SimTransport, bytes], None],
        check_write: Callable[[SimTransport, SimTransport, list[int]], None],
        welcomed: Callable[[Boot], None],
    ) -> None:
        self.kernel = kernel
        self.machine = machine
        self.spec = spec
        self.name = f"{spec.worker_id}.{number}"
        self.boot_id = f"boot-{self.name}"
        self.alive = True
        self.engine_thread = Thread(machine, self.name)
        self.link_thread = Thread(machine, f"{self.name}/l")
        self.mover_threads = [Thread(machine, f"{self.name}/m{r}") for r in range(spec.ranks)]
        self.incarnation = 0
        self.refused = ""
        # Streams that a later hello has replaced: what they had queued must not be obeyed.
        self.replaced_lives: set[StreamLife] = set()
        self._old_lives: list[StreamLife] = []
        self._welcomed = welcomed
        self._dial = dial
        self._fabric = fabric
        self.pool = BlockPool(
            self.name,
            spec.blocks,
            kernel.rng,
            ranks=spec.ranks,
            caching=spec.caching,
            adversarial=adversarial,
        )
        self.agent = SchedulerAgent(
            self.pool,
            self,
            boottime_ns,
            block_size=BLOCK_TOKENS,
            worker_id=spec.worker_id,
            counts=lambda: self.engine.counts(),  # noqa: PLW0108 (made below)
            steps=lambda: self.engine.steps(),  # noqa: PLW0108
        )
        self.results = [Results() for _ in range(spec.ranks)]
        self.transports = [
            SimTransport(
                fabric,
                f"{self.name}/m{rank}",
                rank,
                self.pool,
                self.mover_threads[rank],
                (lambda r: lambda: self._poke(r))(rank),
                check_post,
                check_write,
            )
            for rank in range(spec.ranks)
        ]
        self.transfers = [
            Transfers(
                self.transports[rank],
                [],
                self.results[rank],
                self._from_mover,
                Faults(),
                boottime_ns,
            )
            for rank in range(spec.ranks)
        ]
        self.engine = Engine(
            kernel,
            self.name,
            self.engine_thread,
            self.pool,
            self.agent,
            self.results,
            self._after_hook,
            self._push_step,
            chunk_tokens=spec.chunk_tokens,
            overlap=spec.overlap,
            step_ms=spec.step_ms,
        )
        # Orders on their way to each rank, in order.
        self.orders: list[deque[m.ToMover]] = [deque() for _ in range(spec.ranks)]
        self._polling = [False] * spec.ranks
        self._wake_due = False
        self._deadline: int | None = None
        self.pending: deque[agent_pb2.AgentEvent] = deque()
        self.conversation: Conversation | None = None
        self.stream: Stream | None = None
        self._pause_ms = RECONNECT_MIN_MS
        self._flush_due = False
        self.start_ns = kernel.now
        kernel.at(between(kernel.rng, 0, 50), self.link_thread, self.connect)

    @property
    def threads(self) -> list[Thread]:
        """All of its threads."""
        return [self.engine_thread, self.link_thread, *self.mover_threads]

    def crash(self) -> None:
        """All its processes die."""
        self.alive = False
        for thread in self.threads:
            thread.die()
        for transport in self.transports:
            transport.alive = False
            self._fabric.dead(transport)
        if self.stream is not None:
            self.stream.cut("crash")

    # Outbox; the engine's thread.

    def emit(self, event: agent_pb2.AgentEvent) -> None:
        """Queues an event for the control plane."""
        self.pending.append(event)
        if event.HasField("offered") and not event.offered.leg:
            self.kernel.reached("brought")
        self.kernel.log(self.name, "says", event=_short(event))
        self._flush_soon()

    def order(self, message: m.ToMover, rank: int | None = None) -> None:
        """Sends an order to one rank or all."""
        for r in range(self.spec.ranks):
            if rank is None or rank == r:
                self.orders[r].append(message)
                self.kernel.at(
                    between(self.kernel.rng, 0.05, 1), self.mover_threads[r], self._obey, r
                )

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return self.spec.ranks

    @property
    def connected(self) -> bool:
        """Whether a stream is up and welcomed."""
        return self.conversation is not None and self.conversation.generation > 0

    # The engine's thread.

    def _wake(self) -> None:
        if not self._wake_due:
            self._wake_due = True
            self.kernel.at(between(self.kernel.rng, 0.05, 0.5), self.engine_thread, self._woken)

    def _woken(self) -> None:
        self._wake_due = False
        self.engine.wake()

    def _after_hook(self) -> None:
        if self.agent._waiting:
            self.kernel.reached("waits_for_step")
        due = self.agent.next_deadline()
        if due == self._deadline:
            return
        self._deadline = due
        if due is not None:
            left = max(0, due - self.machine.boottime())
            # The timer counts on this machine's clock; the small addition covers its rate.
            self.kernel.at(left + left // 10 + MS, self.link_thread, self._tick, due)

    def _tick(self, due: int) -> None:
        if due == self._deadline:
            self._deadline = None
            self.agent.post(Tick())
            self._wake()

    def _push_step(self, chunks: list[m.PushChunk]) -> Callable[[], None]:
        """As the connector does in every rank's process; there is one layer here."""
        steps = [PushStep(chunks, 1) for _ in self.transfers]
        for rank, step in enumerate(steps):
            self.kernel.at(
                between(self.kernel.rng, 0.05, 1), self.mover_threads[rank], self._begin, rank, step
            )

        def over() -> None:
            for rank, step in enumerate(steps):
                step.all_final()
                self._poke(rank)

        return over

    # The movers' threads.

    def _begin(self, rank: int, step: PushStep) -> None:
        self.transfers[rank].begin_step(step)
        self._poll(rank)

    def _obey(self, rank: int) -> None:
        message = self.orders[rank].popleft()
        self.transfers[rank].obey(m.decode_to_mover(m.encode(message)))
        self._poll(rank)

    def _poke(self, rank: int) -> None:
        self.kernel.at(
            between(self.kernel.rng, 0.05, 4), self.mover_threads[rank], self._poll, rank
        )

    def _poll(self, rank: int) -> None:
        mover = self.transfers[rank]
        mover.poll()
        if (mover.busy or mover.unsettled) and not self._polling[rank]:
            self._polling[rank] = True
            fast = mover.waited_for or mover.written_to
            often = between(self.kernel.rng, 20, 80) if fast else 500 * MS
            delay = often if mover.busy else STOPPED_LOOK_NS
            self.kernel.at(delay, self.mover_threads[rank], self._poll_again, rank)

    def _poll_again(self, rank: int) -> None:
        self._polling[rank] = False
        self._poll(rank)

    def _from_mover(self, message: m.FromMover) -> None:
        delay = between(self.kernel.rng, 0.05, 1)
        self.kernel.at(delay, self.link_thread, self._heard_mover, message)

    def _heard_mover(self, message: m.FromMover) -> None:
        self.kernel.log(self.name, "mover", message=message)
        self.agent.post(m.decode_from_mover(m.encode(message)))
        self._wake()

    # The link's thread.

    def connect(self) -> None:
        """One try."""
        if self.agent.fenced or self.stream is not None:
            return
        stream = self._dial(self)
        if stream is None:
            self._try_again()
            return
        self.stream = stream
        self.conversation = Conversation(self.hello(), boottime_ns())
        self.replaced_lives.update(self._old_lives)
        self.kernel.log(self.name, "hello", leases=len(self.conversation.hello.leases))
        stream.up(agent_pb2.ConnectRequest(hello=self.conversation.hello))

    def _try_again(self) -> None:
        pause = self._pause_ms * self.kernel.rng.uniform(0.5, 1.0)
        self._pause_ms = min(self._pause_ms * 2, RECONNECT_MAX_MS)
        self.kernel.at(int(pause * MS), self.link_thread, self.connect)

    def heard(self, stream: Stream, response: agent_pb2.ConnectResponse) -> None:
        """A message of the control plane's."""
        if stream is not self.stream or self.conversation is None:
            return
        item = self.conversation.hear(response, boottime_ns())
        if item is None:
            return
        self.agent.post(item)
        self._wake()
        if isinstance(item, StreamUp):
            self.incarnation = item.welcome.incarnation
            self.conversation.generation = item.generation
            self._pause_ms = RECONNECT_MIN_MS
            self._welcomed(self)
            self.kernel.log(
                self.name, "welcomed", epoch=item.epoch, incarnation=item.welcome.incarnation
            )
            self._beat(stream)

    def closed(self, stream: Stream, why: str) -> None:
        """The stream has ended, as seen from here."""
        if stream is not self.stream or self.conversation is None:
            return
        self.kernel.log(self.name, "stream_ended", why=why)
        self.refused = why
        conversation, self.conversation, self.stream = self.conversation, None, None
        self.agent.end_stream(conversation.life)
        self._old_lives.append(conversation.life)
        if conversation.generation:
            self.agent.post(StreamDown(conversation.generation))
            self._wake()
        self._try_again()

    def _beat(self, stream: Stream) -> None:
        conversation = self.conversation
        if stream is not self.stream or conversation is None:
            return
        if conversation.silent(boottime_ns()):
            self.kernel.log(self.name, "control_plane_silent")
            stream.cut("silent", agent_knows=True)
            self.closed(stream, "silent")
            return
        stream.up(
            agent_pb2.ConnectRequest(
                heartbeat=agent_pb2.AgentHeartbeat(
                    clock=boottime_ns(),
                    pool=self.agent.pool_stats(),
                    counters=self.agent.counters.snapshot(),
                )
            )
        )
        self.kernel.at(conversation.heartbeat_ns, self.link_thread, self._beat, stream)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_due and self.pending and self.connected:
            self._flush_due = True
            self.kernel.at(between(self.kernel.rng, 0.05, 1), self.link_thread, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if not self.connected or self.stream is None or not self.pending:
            return
        events = list(self.pending)
        self.pending.clear()
        self.stream.up(agent_pb2.ConnectRequest(events=agent_pb2.AgentEvents(events=events)))

    def hello(self) -> agent_pb2.AgentHello:
        """As `KVShuttleConnector._hello`."""
        return agent_pb2.AgentHello(
            worker_id=self.spec.worker_id,
            boot_id=self.boot_id,
            role=self.spec.role,
            url=f"http://{self.spec.worker_id}",
            fingerprint=[cluster_pb2.FingerprintField(name="model", value="m")],
            block_size=BLOCK_TOKENS,
            num_blocks=self.spec.blocks,
            bytes_per_block=BLOCK_BYTES,
            prefix_caching=self.spec.caching,
            ranks=[
                agent_pb2.RankEndpoint(
                    rank=t.rank, agent_name=t.name, agent_metadata=t.name.encode()
                )
                for t in self.transports
            ],
            highest_epoch=self.agent.highest_epoch,
            lineage_id=self.agent.lineage,
            replicas=self.agent.source.inventory(),
            leases=self.agent.lease_inventory(),
            clock=boottime_ns(),
            push=self.spec.push,
            past_incarnations=self.agent.incarnations,
        )


def _short(event: agent_pb2.AgentEvent) -> str:
    kind = event.WhichOneof("event") or "nothing"
    inner = getattr(event, kind)
    lease = getattr(inner, "lease_id", "")
    reason = getattr(inner, "reason", "")
    return " ".join(x for x in (kind, lease, reason) if x)
