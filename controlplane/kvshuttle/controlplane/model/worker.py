"""Workers: one boot of one engine, as the control plane sees it."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from kvshuttle.controlplane.model.errors import IllegalTransitionError
from kvshuttle.controlplane.model.reports import Counters, Heartbeat, Hello, PoolStats
from kvshuttle.controlplane.model.requests import remember
from kvshuttle.controlplane.model.terms import WorkerRef, WorkerRole, WorkerState

__all__ = ["Worker"]


FENCED_BOOTS = 16
"""So many fenced boots of one worker are remembered, for as long as the worker is listed."""


class Worker(Struct, frozen=True):
    """READY ⇄ DRAINING, either → LOST → either (the same boot reconnects), all → FENCED.

    `clock` is the worker's own reading in the newest heartbeat, the `as_of` of grants to it.
    `pool_clock` is the same for `pool` and `counters`: a hello renews the clock, but not them.
    `ranks` is what peers need to reach its memory; None until this boot has said hello to this
    process of the control plane.
    """

    ref: WorkerRef
    boot_id: str
    role: WorkerRole
    url: str
    state: WorkerState
    register_ns: int
    heard_ns: int
    draining: bool = False
    stream_generation: int = 0
    fingerprint: tuple[tuple[str, str], ...] = ()
    block_size: int = 0
    num_blocks: int = 0
    bytes_per_block: int = 0
    prefix_caching: bool = True
    num_ranks: int = 0
    ranks: object = None
    clock: int = 0
    pool_clock: int = 0
    pool: PoolStats = field(default_factory=PoolStats)
    counters: Counters = field(default_factory=Counters)
    vllm_version: str = ""
    agent_version: str = ""
    nixl_backend: str = ""
    push: bool = False
    past: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    end_ns: int = 0
    requests: tuple[str, ...] = ()
    fenced_boots: tuple[str, ...] = ()

    def was(self, ref: WorkerRef) -> bool:
        """Whether this very process has, or had, this number."""
        return ref == self.ref or (
            ref.worker_id == self.ref.worker_id and ref.incarnation in self.past
        )

    def numbers(self) -> list[WorkerRef]:
        """Every number that this very process has had, the present one last: leases are made under
        each."""
        past = [WorkerRef(self.ref.worker_id, number) for number in self.past]
        return [*(x for x in past if x != self.ref), self.ref]

    @property
    def connected(self) -> bool:
        """Whether its stream lives."""
        return self.state in (WorkerState.READY, WorkerState.DRAINING)

    @property
    def ready(self) -> bool:
        """Whether it takes new turns and leases."""
        return self.state is WorkerState.READY

    def connected_as(self, hello: Hello, now_ns: int) -> Worker:
        """The boot (again) connected: a new stream, what it says now replaces what it said."""
        if self.state is WorkerState.FENCED:
            raise IllegalTransitionError("a fenced boot does not come back")
        return replace(
            self,
            role=hello.role,
            url=hello.url,
            state=WorkerState.DRAINING if self.draining else WorkerState.READY,
            stream_generation=self.stream_generation + 1,
            heard_ns=now_ns,
            fingerprint=hello.fingerprint,
            block_size=hello.block_size,
            num_blocks=hello.num_blocks,
            bytes_per_block=hello.bytes_per_block,
            prefix_caching=hello.prefix_caching,
            num_ranks=hello.num_ranks,
            ranks=hello.ranks,
            clock=hello.clock,
            vllm_version=hello.vllm_version,
            agent_version=hello.agent_version,
            nixl_backend=hello.nixl_backend,
            push=hello.push,
            past=hello.past,
            heads=hello.heads,
            end_ns=0,
        )

    def heard(self, now_ns: int) -> Worker:
        """It said something."""
        return replace(self, heard_ns=now_ns)

    def beat(self, heartbeat: Heartbeat, now_ns: int) -> Worker:
        """A heartbeat. Its clock never goes back within a boot; a smaller one was overtaken."""
        return replace(
            self,
            heard_ns=now_ns,
            clock=max(self.clock, heartbeat.clock),
            pool_clock=heartbeat.clock,
            pool=heartbeat.pool,
            counters=heartbeat.counters,
        )

    def lost(self, now_ns: int) -> Worker:
        """Its stream is gone: it may still run, and still read."""
        if not self.connected:
            raise IllegalTransitionError(f"a worker that is {self.state.name} cannot be lost")
        return replace(self, state=WorkerState.LOST, end_ns=now_ns)

    def fenced(self, now_ns: int) -> Worker:
        """Attested dead."""
        if self.state is WorkerState.FENCED:
            raise IllegalTransitionError("a boot is fenced once")
        return replace(
            self,
            state=WorkerState.FENCED,
            end_ns=now_ns,
            ranks=None,
            fenced_boots=(*self.fenced_boots, self.boot_id)[-FENCED_BOOTS:],
        )

    def asked(self, request: str) -> Worker:
        """The worker with a request remembered."""
        return replace(self, requests=remember(self.requests, request))

    def drained(self, undo: bool) -> Worker:
        """Into or out of draining; a lost worker keeps the order for its return."""
        state = self.state
        if self.connected:
            state = WorkerState.READY if undo else WorkerState.DRAINING
        return replace(self, draining=not undo, state=state)
