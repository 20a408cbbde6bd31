"""A model of vLLM's scheduler, as far as a KV connector can tell.

The order of things is vLLM 0.32's (`v1/core/sched/scheduler.py`): prefix hits are looked up, then
the connector is asked, then blocks are allocated; blocks are cached when the step that fills them
is scheduled, and filled when it ends; a request that waits for a load counts the load's tokens as
computed; an abort in that state keeps the blocks until the worker reports; a failed load frees them
and the request starts again. The connector's part follows `kvshuttle.dataplane.connector`.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.dataplane.matching import Tail
from kvshuttle.dataplane.push_source import Scheduled
from kvshuttle.dataplane.scheduler import FinishedRequest, SchedulerAgent
from kvshuttle.dataplane.turns import LegKey
from tests.simulation.kernel import SECOND, Violation, between

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.dataplane.messages import PushChunk
    from kvshuttle.dataplane.transfers import Results
    from tests.simulation.kernel import Kernel, Thread
    from tests.simulation.pool import BlockPool

__all__ = ["BLOCK_TOKENS", "Engine", "EngineRequest", "Status"]

BLOCK_TOKENS = 32
STEP_BLOCKS = 3


class Status(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False)
class EngineRequest:
    """`hashes` are those of its prompt's blocks, then of what it will generate; the last block may
    never get full."""

    request_id: str
    key: LegKey | None
    hashes: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    done: Callable[[EngineRequest, str], None]
    status: Status = Status.WAITING
    generated: int = 0
    computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    aborted: bool = False
    arrived_ns: int = 0
    load_began_ns: int = 0
    loads: int = 0
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and what has been generated."""
        return self.prompt_tokens + self.generated

    def tail_hash(self, full: int, tokens: int) -> bytes | None:
        """Of a block's first tokens: equal where the whole block will be."""
        known = 0 < full < len(self.hashes) and full * BLOCK_TOKENS + tokens <= self.num_tokens
        return partial_hash(self.hashes[full], tokens) if known else None


def partial_hash(block_hash: bytes, tokens: int) -> bytes:
    """Names, and is the content of, a block of which so many tokens are written."""
    return hashlib.blake2b(block_hash + tokens.to_bytes(2, "big"), digest_size=8).digest()


@dataclass(frozen=True)
class _View:
    """A `kvshuttle.dataplane.push_source.RequestView`."""

    request: EngineRequest

    def hashes(self) -> Sequence[bytes]:
        """Of its full blocks."""
        return self.request.hashes[: self.request.num_tokens // BLOCK_TOKENS]

    def tail_hash(self, full: int, tokens: int) -> bytes | None:
        """Of a block's first tokens."""
        return self.request.tail_hash(full, tokens)

    def preemptions(self) -> int:
        """How often its blocks were taken."""
        return self.request.preemptions


@dataclass(eq=False)
class Engine:
    """One engine: a loop of steps while it has requests, asleep without."""

    kernel: Kernel
    name: str
    thread: Thread
    pool: BlockPool
    agent: SchedulerAgent
    results: list[Results]
    after_hook: Callable[[], None]
    # The step that begins computes these chunks; what is returned says that it has ended.
    push_step: Callable[[list[PushChunk]], Callable[[], None]]
    step_ms: float = 15.0
    # Most prompt tokens of a step; 0: a whole prompt.
    chunk_tokens: int = 0
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    waiting: list[EngineRequest] = field(default_factory=list)
    running: list[EngineRequest] = field(default_factory=list)
    # Of vLLM's scheduler: loads that have ended, and those of them that failed.
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    # Of vLLM's aggregation over workers: on how many ranks a load has ended.
    _ranks_finished: dict[str, int] = field(default_factory=dict)
    _ranks_failed: set[str] = field(default_factory=set)
    _stepping: bool = False
    _inputs: list[Callable[[], None]] = field(default_factory=list)
    _step_over: Callable[[], None] = lambda: None
    _pending: list[tuple[EngineRequest, int]] = field(default_factory=list)
    # Set by a fault: the scheduler thinks that it is out of blocks.
    preempt_next: bool = False

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    # From outside, on the engine's thread.

    def add(self, request: EngineRequest) -> None:
        """A request comes in; the engine looks at its input between steps."""
        request.arrived_ns = self.kernel.now
        self._inputs.append(lambda: self._add(request))
        self._start()

    def _add(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def wake(self) -> None:
        """vLLM's WAKEUP: an idle engine looks for work, and finds the connector's inbox."""
        if not self._stepping:
            self._tend(0)

    def abort(self, request_id: str) -> None:
        """The client went away."""
        self._inputs.append(lambda: self._abort(request_id))
        self._start()

    def _abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.status is Status.DONE:
            return
        keep_blocks = False
        if request.status is Status.LOADING:
            keep_blocks = request_id not in self.finished_recving
            self.finished_recving.discard(request_id)
            self.failed_recving.discard(request_id)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.aborted = True
        self._free_request(request, keep_blocks=keep_blocks)

    # The loop.

    def _start(self) -> None:
        if not self._stepping and (self.requests or self._inputs):
            self._stepping = True
            self.kernel.at(0, self.thread, self._begin_step)

    def _begin_step(self) -> None:
        while self._inputs:
            self._inputs.pop(0)()
        if not self.requests:
            self._stepping = False
            self._tend(0)
            return
        self._schedule()
        self._tend(len(self.running))
        push = self.agent.push
        chunks = push.step(
            [
                Scheduled(r.request_id, r.computed, tokens - r.computed, list(r.block_ids))
                for r, tokens in self._pending
                if push.wants(r.request_id)
            ]
        )
        self.after_hook()
        self._step_over = self.push_step(chunks) if chunks else lambda: None
        busy = bool(self.running)
        took = (
            between(self.kernel.rng, 2, self.step_ms) if busy else between(self.kernel.rng, 2, 60)
        )
        self.kernel.at(took, self.thread, self._end_step)

    def _schedule(self) -> None:
        self._pending.clear()
        if self.preempt_next and self.running:
            self.preempt_next = False
            self._preempt(self.running[-1])
        for request in list(self.running):
            if request.status is Status.RUNNING and request.computed >= request.num_tokens - 1:
                self._schedule_decode(request)
            elif request.status is Status.RUNNING:
                self._schedule_prefill(request)
        for request in list(self.waiting):
            if request.request_id in self.finished_recving:
                self._load_over(request)
        # Those that hold blocks come first (vLLM keeps them in a queue of their own): who waits
        # for blocks must not stand in the way of who has them.
        for request in sorted(self.waiting, key=lambda request: not request.block_ids):
            if request.status is Status.LOADING:
                continue
            if not self._admit(request):
                break

    def _schedule_decode(self, request: EngineRequest) -> None:
        """One token more, for which it may need a block."""
        if request.status is not Status.RUNNING:
            return
        needed = -(-request.num_tokens // BLOCK_TOKENS)
        while len(request.block_ids) < needed:
            if self.pool.free_blocks:
                request.block_ids += self.pool.allocate(1)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return
        self._pending.append((request, request.num_tokens))

    def _preempt(self, request: EngineRequest) -> None:
        self.kernel.fault("preempt", self.name, request=request.request_id)
        self.running.remove(request)
        self._pending = [(r, n) for r, n in self._pending if r is not request]
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.computed = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.waiting.insert(0, request)

    def _load_over(self, request: EngineRequest) -> None:
        request_id = request.request_id
        self.finished_recving.discard(request_id)
        if request_id in self.failed_recving:
            self.failed_recving.discard(request_id)
            self.pool.free(request.block_ids)
            request.block_ids = []
            request.computed = 0
        else:
            full, rest = divmod(request.computed, BLOCK_TOKENS)
            if rest:
                self.kernel.reached("partial_load")
            if self.pool.caching:
                for block_hash, block_id in zip(
                    request.hashes[:full], request.block_ids, strict=False
                ):
                    self.pool.insert(block_hash, block_id, 0)
        request.status = Status.WAITING

    def _admit(self, request: EngineRequest) -> bool:
        """False: no blocks, and nobody behind it is looked at."""
        hits: list[int] = []
        external = 0
        if request.computed == 0:
            hits = self._local_hits(request)
            external_or_none = self._connector_look(request, len(hits) * BLOCK_TOKENS)
            if external_or_none is None:
                return True
            external = external_or_none
        to_fill = len(hits) * BLOCK_TOKENS + external if external else request.num_tokens
        wanted = -(-to_fill // BLOCK_TOKENS) - len(hits) - len(request.block_ids)
        evictable = sum(1 for block_id in hits if self.pool.blocks[block_id].refs == 0)
        # The whole sequence must fit beside what loading requests still need, or two of them
        # could wait for each other's blocks.
        in_all = -(-request.num_tokens // BLOCK_TOKENS) - len(hits) - len(request.block_ids)
        reserved = sum(
            -(-other.num_tokens // BLOCK_TOKENS) - len(other.block_ids)
            for other in self.waiting
            if other is not request and other.block_ids
        )
        if in_all + evictable + reserved > self.pool.free_blocks:
            return False
        self.pool.touch(hits)
        request.block_ids += hits
        if wanted > 0:
            request.block_ids += self.pool.allocate(wanted)
        if request.key is not None:
            try:
                self.agent.allocated(
                    request.request_id,
                    request.key,
                    request.block_ids,
                    external,
                    _View(request),
                )
            finally:
                self.after_hook()
        if external:
            request.status = Status.LOADING
            request.computed = to_fill
            request.load_began_ns = self.kernel.now
            request.loads += 1
            if request.loads > 1:
                raise Violation("single use", f"{request.request_id} loads a second time")
            return True
        if request.computed == 0:
            request.computed = len(hits) * BLOCK_TOKENS
        request.computed = min(request.computed, request.num_tokens - 1)
        self.waiting.remove(request)
        request.status = Status.RUNNING
        self.running.append(request)
        self._schedule_prefill(request)
        return True

    def _schedule_prefill(self, request: EngineRequest) -> None:
        """What is left of it, or a chunk; cached now, filled when the step ends."""
        tokens = request.num_tokens
        if self.chunk_tokens:
            tokens = min(tokens, request.computed + self.chunk_tokens)
        first = request.computed // BLOCK_TOKENS
        for index, block_id in enumerate(request.block_ids[:first]):
            block = self.pool.blocks[block_id]
            if not block.holds(request.hashes[index]) and not block.pending:
                raise Violation(
                    "wrong KV",
                    f"{self.name}: {request.request_id} goes on from block {block_id} "
                    f"(index {index}), which does not hold {request.hashes[index].hex()}",
                )
        self._check_partial(request, first)
        self._pending.append((request, tokens))
        for index in range(first, tokens // BLOCK_TOKENS):
            self.pool.insert_pending(request.hashes[index], request.block_ids[index])

    def _check_partial(self, request: EngineRequest, index: int) -> None:
        """What is written of the block that it goes on in, or more of the same."""
        tokens = request.computed % BLOCK_TOKENS
        if not tokens or index >= len(request.hashes):
            return
        whole = request.hashes[index]
        right = [whole, *(partial_hash(whole, n) for n in range(tokens, BLOCK_TOKENS))]
        block = self.pool.blocks[request.block_ids[index]]
        if not any(block.holds(content) for content in right):
            raise Violation(
                "wrong KV",
                f"{self.name}: {request.request_id} goes on in block {block.block_id} (index "
                f"{index}), which does not hold {tokens} tokens of {whole.hex()}",
            )

    def _end_step(self) -> None:
        for request, tokens in self._pending:
            self._write(request, tokens)
            request.computed = tokens
            if tokens < request.num_tokens:
                continue
            request.generated += 1
            if request.generated >= request.output_tokens:
                self.running.remove(request)
                self._free_request(request, keep_blocks=False)
        self._pending.clear()
        self._step_over()
        self._take_results()
        self._begin_step()

    def _write(self, request: EngineRequest, tokens: int) -> None:
        for index in range(request.computed // BLOCK_TOKENS, tokens // BLOCK_TOKENS):
            block_id, block_hash = request.block_ids[index], request.hashes[index]
            self.pool.write(block_id, block_hash)
            if self.pool.caching and self.pool.blocks[block_id].block_hash is None:
                self.pool.insert(block_hash, block_id, 0)
        last, rest = divmod(tokens, BLOCK_TOKENS)
        if rest and last < len(request.hashes):
            self.pool.write(request.block_ids[last], partial_hash(request.hashes[last], rest))

    # The connector.

    def _local_hits(self, request: EngineRequest) -> list[int]:
        hits: list[int] = []
        if not self.pool.caching:
            return hits
        for block_hash in request.hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]:
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _connector_look(self, request: EngineRequest, computed: int) -> int | None:
        needed = -(-(request.num_tokens - computed) // BLOCK_TOKENS)
        self.agent.drain()
        self.agent.make_room(needed + STEP_BLOCKS)
        if request.key is None:
            return 0
        # What it has generated already is not asked for after a preemption, in no engine.
        known = request.hashes[: request.num_tokens // BLOCK_TOKENS]
        return self.agent.look(
            request.request_id,
            request.key,
            known,
            request.num_tokens,
            computed,
            request.tail_hash,
        )

    def _tend(self, num_requests: int) -> None:
        self.agent.drain()
        if num_requests:
            self.agent.make_room(min(STEP_BLOCKS, num_requests + STEP_BLOCKS // 2))
        self.after_hook()

    def _take_results(self) -> None:
        """The workers' answer to a step, over all ranks."""
        failed_now: set[str] = set()
        finished_now: list[str] = []
        for results in self.results:
            finished, failed = results.take()
            self._ranks_failed |= failed
            for request_id in sorted(finished):
                count = self._ranks_finished.get(request_id, 0) + 1
                self._ranks_finished[request_id] = count
                if count == len(self.results):
                    del self._ranks_finished[request_id]
                    finished_now.append(request_id)
                    if request_id in self._ranks_failed:
                        self._ranks_failed.discard(request_id)
                        failed_now.add(request_id)
        for request_id in sorted(failed_now):
            request = self.requests.get(request_id)
            if request is not None and request.status is Status.LOADING:
                request.computed = 0
                self.failed_recving.add(request_id)
        if failed_now:
            self.agent.load_failed(sorted(failed_now))
        for request_id in finished_now:
            request = self.requests.get(request_id)
            if request is None:
                raise Violation(
                    "engine", f"{self.name}: {request_id} is reported, which vLLM does not know"
                )
            if request.status is Status.LOADING:
                self.finished_recving.add(request_id)
                if self.kernel.now - request.load_began_ns > 60 * SECOND:
                    raise Violation("stuck", f"{self.name}: {request_id} waited for its load")
            elif request.status is Status.DONE:
                self.pool.free(request.block_ids)
                request.block_ids = []
                del self.requests[request_id]
            else:
                raise Violation("engine", f"{self.name}: {request_id} is reported, but runs")

    def _free_request(self, request: EngineRequest, *, keep_blocks: bool) -> None:
        was_loading = request.status is Status.LOADING
        request.status = Status.DONE
        if request.key is not None:
            full = min(
                request.computed // BLOCK_TOKENS, len(request.hashes), len(request.block_ids)
            )
            tail = tail_hash = None
            tokens = request.computed - full * BLOCK_TOKENS
            if 0 < tokens < BLOCK_TOKENS and full < len(request.block_ids):
                tail_hash = request.tail_hash(full, tokens)
            if tail_hash is not None:
                tail = Tail(request.block_ids[full], tokens, tail_hash)
            self.agent.finished(
                request.key,
                FinishedRequest(
                    request.request_id,
                    request.hashes[:full],
                    tuple(request.block_ids[:full]),
                    request.prompt_tokens,
                    request.aborted,
                    tail,
                ),
            )
            self.after_hook()
        elif was_loading:
            raise Violation("engine", f"{self.name}: {request.request_id} loads without a turn")
        request.done(request, "aborted" if request.aborted else "finished")
        if not keep_blocks:
            self.pool.free(request.block_ids)
            request.block_ids = []
            del self.requests[request.request_id]
