"""A model of vLLM's scheduler, as far as a KV connector can tell.

The order of things is vLLM 0.32's (`v1/core/sched/scheduler.py`): prefix hits are looked up, then
the connector is asked, then blocks are allocated; blocks are cached when the step that fills them
is scheduled, and filled when it ends; a request that waits for a load counts the load's tokens as
computed; an abort in that state keeps the blocks until the worker reports; a failed load frees them
and the request starts again. The connector's part follows `kvshuttle.dataplane.connector`.

With `overlap` the next step is scheduled while one runs (`v1/core/sched/async_scheduler.py`, vLLM's
default wherever the executor can): computed tokens count what is in flight, a request that ends by
itself has one step too many in flight, and the blocks of who ends then come back when that is over.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.dataplane.matching import Tail
from kvshuttle.dataplane.push_source import Scheduled
from kvshuttle.dataplane.scheduler import FinishedRequest, SchedulerAgent
from kvshuttle.dataplane.turns import LegKey
from tests.simulation.kernel import SECOND, Violation, between
from tests.simulation.pool import partial_hash

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
    never get full. `known_end`: the scheduler knows its number of tokens; else it ends by itself.
    `computed` counts what is `in_flight`, in steps that are not over; `placeholders`: tokens that
    those will have generated. `last_step`: the newest step of it that computes."""

    request_id: str
    key: LegKey | None
    hashes: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    done: Callable[[EngineRequest, str], None]
    known_end: bool = True
    status: Status = Status.WAITING
    generated: int = 0
    computed: int = 0
    in_flight: int = 0
    placeholders: int = 0
    last_step: int = 0
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


@dataclass(frozen=True)
class _Part:
    """A request's tokens in a step, `first` to before `end`, and the blocks they are written to,
    whatever becomes of the request in the meantime. `generates`: a token comes out of it."""

    request: EngineRequest
    first: int
    end: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    generates: bool


@dataclass(eq=False)
class _Step:
    """What was scheduled at once. `over` is called when it is. `taken`: what the workers had to
    say of loads when they came to it, on each rank; None: they have not."""

    number: int
    parts: list[_Part] = field(default_factory=list)
    taken: list[tuple[set[str], set[str]]] | None = None
    ends_ns: int = 0
    over: Callable[[], None] = lambda: None


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
    # Whether a step is scheduled while the one before runs.
    overlap: bool = False
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
    # Again, for vLLM looks at those alone before it looks at a step's output.
    _aborts: list[str] = field(default_factory=list)
    # Steps that are not over, the oldest first; the last one is being scheduled.
    _steps: deque[_Step] = field(default_factory=deque)
    _begun: int = 0
    _over: int = 0
    # Blocks that a step which is not over may still write, and the number of the last such step.
    _deferred: deque[tuple[int, list[int]]] = field(default_factory=deque)
    # Set by a fault: the scheduler thinks that it is out of blocks.
    preempt_next: bool = False
    # How often it was told to pause, 0 while it is not; who waits until it has come to rest.
    pauses: int = 0
    _pausing: list[Callable[[bool], None]] = field(default_factory=list)

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    def steps(self) -> tuple[int, int]:
        """(begun, over)."""
        return self._begun, self._over

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
        if self.overlap:
            self._aborts.append(request_id)
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

    def pause(self, done: Callable[[bool], None]) -> None:
        """vLLM's `/pause?mode=wait`: nothing new begins, what has blocks goes on to its end, and
        then the prefix cache is emptied; `done` hears whether it could be."""

        def begin() -> None:
            self.pauses += 1
            self._pausing.append(done)

        self._inputs.append(begin)
        self._start()

    def resume(self) -> None:
        """vLLM's `/resume`."""

        def go_on() -> None:
            self.pauses = 0

        self._inputs.append(go_on)
        self._start()

    def _has_work(self) -> bool:
        if not self.pauses:
            return bool(self.requests)
        queued = sum(1 for request in self.waiting if not request.block_ids)
        if len(self.requests) > queued:
            return True
        self._tend(0)
        return self.agent.settling()

    def _at_rest(self) -> None:
        """What was told to wait for it goes on."""
        while self._pausing:
            done = self._pausing.pop(0)
            self.agent.reset()
            self.after_hook()
            done(self.pool.reset())

    # The loop.

    def _start(self) -> None:
        if not self._stepping and (self.requests or self._inputs):
            self._stepping = True
            self.kernel.at(0, self.thread, self._begin_step)

    def _begin_step(self) -> None:
        while self._inputs:
            self._inputs.pop(0)()
        if self._has_work():
            self._execute(self._schedule())
            if self.overlap and len(self._steps) == 1:
                # What comes in meanwhile is looked at before the next is scheduled.
                self.kernel.at(between(self.kernel.rng, 0, 0.5), self.thread, self._begin_step)
                return
        elif not self._steps:
            self._stepping = False
            self._tend(0)
            self._at_rest()
            return
        wait_ns = max(0, self._steps[0].ends_ns - self.kernel.now)
        self.kernel.at(wait_ns, self.thread, self._end_step)

    def _execute(self, step: _Step) -> None:
        self._tend(len(self.running))
        push = self.agent.push
        chunks = push.step(
            [
                Scheduled(p.request.request_id, p.first, p.end - p.first, list(p.block_ids))
                for p in step.parts
                if push.wants(p.request.request_id)
            ]
        )
        self.after_hook()
        if chunks:
            step.over = self.push_step(chunks)
        if self.overlap:
            # They are done with a step when it is queued on the device.
            step.taken = [results.take() for results in self.results]
        busy = bool(self.running)
        took = (
            between(self.kernel.rng, 2, self.step_ms) if busy else between(self.kernel.rng, 2, 60)
        )
        before = self._steps[-2].ends_ns if len(self._steps) > 1 else 0
        step.ends_ns = max(self.kernel.now, before) + took

    def _schedule(self) -> _Step:
        self._begun += 1
        step = _Step(self._begun)
        self._steps.append(step)
        if self.preempt_next and self.running and self._can_free(self.running[-1]):
            self.preempt_next = False
            self._preempt(self.running[-1])
        for request in list(self.running):
            if not self._schedule_running(request):
                break
        for request in list(self.waiting):
            if request.request_id in self.finished_recving:
                self._load_over(request)
        # Those that hold blocks come first (vLLM keeps them in a queue of their own): who waits
        # for blocks must not stand in the way of who has them.
        for request in sorted(self.waiting, key=lambda request: not request.block_ids):
            if request.status is Status.LOADING or (self.pauses and not request.block_ids):
                continue
            if not self._admit(request):
                break
        for part in step.parts:
            request = part.request
            request.computed = part.end
            request.in_flight += part.end - part.first
            request.placeholders += part.generates
            request.last_step = step.number
        return step

    def _schedule_running(self, request: EngineRequest) -> bool:
        """What is left of its prompt, or a chunk, or one token more, for which it may need a block;
        False: there is none, and nobody behind it is looked at."""
        if request.status is not Status.RUNNING:
            return True
        longest = request.prompt_tokens + (request.output_tokens if request.known_end else 10_000)
        if request.placeholders and request.computed + 2 - request.placeholders >= longest:
            return True  # the step that runs is its last
        end = self._end_of(request)
        if end == request.computed:
            return True
        while len(request.block_ids) < -(-end // BLOCK_TOKENS):
            if self.pool.free_blocks:
                request.block_ids += self.pool.allocate(1)
                continue
            victim = self.running[-1]
            if not self._can_free(victim):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        self._schedule_tokens(request, end)
        return True

    def _end_of(self, request: EngineRequest) -> int:
        end = request.num_tokens + request.placeholders
        if self.chunk_tokens:
            end = min(end, request.computed + self.chunk_tokens)
        return end

    def _preempt(self, request: EngineRequest) -> None:
        self.kernel.fault("preempt", self.name, request=request.request_id)
        self.running.remove(request)
        step = self._steps[-1]
        step.parts = [part for part in step.parts if part.request is not request]
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.computed = request.in_flight = request.placeholders = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.waiting.insert(0, request)

    # A step that is not over may still write its blocks, and no load is ordered after that.

    def _can_free(self, request: EngineRequest) -> bool:
        return request.last_step <= self._over

    def _free_blocks(self, request: EngineRequest) -> None:
        if self._can_free(request):
            self.pool.free(request.block_ids)
        else:
            self.kernel.reached("deferred_free")
            self._deferred.append((self._steps[-1].number, request.block_ids))
        request.block_ids = []

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
                    # A hit is cached, and a step that runs may have yet to fill it.
                    if self.pool.blocks[block_id].block_hash != block_hash:
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
        self._schedule_tokens(request, self._end_of(request))
        return True

    def _schedule_tokens(self, request: EngineRequest, end: int) -> None:
        """Cached now as far as its tokens are known, filled when the step ends."""
        first = request.computed // BLOCK_TOKENS
        # What its own steps in flight write is there for the next one.
        there = (request.computed - request.in_flight) // BLOCK_TOKENS
        for index, block_id in enumerate(request.block_ids[:there]):
            block = self.pool.blocks[block_id]
            if not block.holds(request.hashes[index]) and not block.pending:
                raise Violation(
                    "wrong KV",
                    f"{self.name}: {request.request_id} goes on from block {block_id} "
                    f"(index {index}), which does not hold {request.hashes[index].hex()}",
                )
        if not request.in_flight:
            self._check_partial(request, first)
        block_ids = tuple(request.block_ids)
        self._steps[-1].parts.append(
            _Part(
                request,
                request.computed,
                end,
                block_ids,
                tuple(self.pool.blocks[block_id].generation for block_id in block_ids),
                end == request.num_tokens + request.placeholders,
            )
        )
        for index in range(first, min(end, request.num_tokens) // BLOCK_TOKENS):
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
        step = self._steps.popleft()
        while self._aborts:
            self._abort(self._aborts.pop(0))
        self._over = step.number
        while self._deferred and self._deferred[0][0] <= self._over:
            self.pool.free(self._deferred.popleft()[1])
        for part in step.parts:
            self._write(part)
        for part in step.parts:
            self._check_read(part)
            self._update(part)
        step.over()
        self._hear_of_loads(step.taken or [results.take() for results in self.results])
        self._begin_step()

    def _update(self, part: _Part) -> None:
        """What has come of a request's tokens."""
        request = part.request
        request.in_flight -= part.end - part.first
        if request.status is Status.DONE or not part.generates:
            return
        request.generated += 1
        request.placeholders -= 1
        if self.pool.caching:
            known = min(request.computed - request.placeholders, request.num_tokens)
            for index in range(known // BLOCK_TOKENS):
                block = self.pool.blocks[request.block_ids[index]]
                if block.block_hash is None and index < len(request.hashes):
                    self.pool.insert(request.hashes[index], block.block_id, 0)
        if request.generated >= request.output_tokens:
            self.running.remove(request)
            self._free_request(request, keep_blocks=False)

    def _check_read(self, part: _Part) -> None:
        """A step has read what came before its tokens, all the time that it ran."""
        for index, block_hash in enumerate(part.request.hashes[: part.first // BLOCK_TOKENS]):
            block = self.pool.blocks[part.block_ids[index]]
            if block.generation != part.generations[index] or not block.holds(block_hash):
                raise Violation(
                    "wrong KV",
                    f"{self.name}: {part.request.request_id} has gone on from block "
                    f"{block.block_id} (index {index}), which did not hold {block_hash.hex()}",
                )

    def _write(self, part: _Part) -> None:
        hashes = part.request.hashes

        first, (last, rest) = part.first // BLOCK_TOKENS, divmod(part.end, BLOCK_TOKENS)
        for index in range(first, min(last + bool(rest), len(hashes))):
            block_id = part.block_ids[index]
            if self.pool.blocks[block_id].generation != part.generations[index]:
                raise Violation(
                    "reuse",
                    f"{self.name}: a step of {part.request.request_id} writes block {block_id}, "
                    "which has been handed out meanwhile",
                )
            if index < last:
                self.pool.write(block_id, hashes[index])
            else:
                self.pool.write_partial(block_id, hashes[index], rest)

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
        self.agent.heed_pause(self.pauses)
        self.agent.drain()
        if num_requests:
            self.agent.make_room(min(STEP_BLOCKS, num_requests + STEP_BLOCKS // 2))
        self.after_hook()

    def _hear_of_loads(self, taken: list[tuple[set[str], set[str]]]) -> None:
        """The workers' answer to a step, over all ranks."""
        failed_now: set[str] = set()
        finished_now: list[str] = []
        for finished, failed in taken:
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
            computed = request.computed - request.in_flight
            full = min(computed // BLOCK_TOKENS, len(request.hashes), len(request.block_ids))
            tail = tail_hash = None
            tokens = computed - full * BLOCK_TOKENS
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
            self._free_blocks(request)
            del self.requests[request.request_id]
