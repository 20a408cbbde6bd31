"""Everything that touches vLLM's internals. Run against vLLM 0.32 (CPU build).

The rest of the agent sees plain types only. What is used here, and why it may move with a version:

* ``BlockPool``: ``reset_prefix_cache`` (wrapped, to let go first), ``touch``, ``free_blocks``,
  ``unpin_blocks``, ``get_new_blocks``, ``get_cached_block``, ``_insert_block_hash``, ``blocks``,
  the free count;
* ``WorkerProc.rpc_broadcast_mq`` and its ``SpinCondition``: ``wait`` (wrapped), ``last_read``,
  ``busy_loop_s``: for a second after each step a worker looks for the next one in a tight loop;
* ``EngineCoreProc.input_queue`` with ``EngineCoreRequestType.WAKEUP``: an idle engine blocks on it;
* the scheduler's ``get_request_counts``, ``pause_state``, ``set_pause_state``, ``schedule``,
  ``update_from_output``;
* ``Request``: ``block_hashes``, ``all_token_ids``, ``num_computed_tokens``,
  ``num_in_flight_tokens``, status;
* ``hash_block_tokens``, ``generate_block_hash_extra_keys``: the hash of a block that is not full;
* the resolved KV cache layout and the attention backends' names, for the fingerprint.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    make_block_hash_with_group_id,
    resolve_none_hash_seed,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvshuttle.dataplane import journal
from kvshuttle.dataplane.limits import WORKER_LOOK_NS
from kvshuttle.dataplane.matching import Tail, TailHash
from kvshuttle.dataplane.push_source import Scheduled
from kvshuttle.dataplane.push_steps import Fence
from kvshuttle.dataplane.scheduler import FinishedRequest
from kvshuttle.dataplane.shapes import Heads, heads_of_rank
from kvshuttle.dataplane.transport import LocalRegion

__all__ = [
    "CacheHitSource",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "Pool",
    "Request",
    "RunningRequest",
    "SchedulerOutput",
    "SupportsHMA",
    "TailHasher",
    "UnsupportedError",
    "VllmConfig",
    "check_supported",
    "device_binder",
    "device_fence",
    "engine_probe",
    "fingerprint",
    "finished_state",
    "kernel_blocks",
    "kv_heads",
    "kv_regions",
    "rank_of",
    "scheduled",
    "vllm_version",
    "worker_rest",
]

TESTED_VERSIONS = ("0.32",)
"""Minor versions that this module was run against."""


class UnsupportedError(ValueError):
    """The engine is configured in a way that kvshuttle cannot serve; says which and what to do."""


def vllm_version() -> str:
    """vLLM's version."""
    return str(vllm.__version__)


def check_supported(config: VllmConfig, kv: KVCacheConfig) -> None:
    """Refuses what would be wrong or is not built; raises :class:`UnsupportedError`."""
    transfer = config.kv_transfer_config
    parallel = config.parallel_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedError(
            f"kv_load_failure_policy: {transfer.kv_load_failure_policy!r} fails a request when a "
            "transfer fails; set it to 'recompute' in --kv-transfer-config"
        )
    if transfer is not None and not transfer.is_kv_consumer:
        raise UnsupportedError(
            f"kv_role: {transfer.kv_role!r} lets vLLM reuse an ended request's blocks while a step "
            "still writes them; set it to 'kv_both' in --kv-transfer-config"
        )
    if getattr(parallel, "enable_fault_tolerance", False):
        raise UnsupportedError(
            "enable_fault_tolerance: True drops steps that were to fill blocks which are cached "
            "already; start the engine without it"
        )
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            f"pipeline_parallel_size: {parallel.pipeline_parallel_size} is not supported; use 1"
        )
    # An engine of a dense model is told by vLLM that it is alone; that there are others it keeps in
    # a field of elastic expert parallelism, elastic or not.
    engines = max(parallel.data_parallel_size, parallel.elastic_ep_max_dp_size)
    if engines > 1 and not parallel.data_parallel_external_lb:
        raise UnsupportedError(
            f"data_parallel_size: {engines} behind one address would make as many engines one "
            "worker; start each as an engine of its own, with its own worker_id (a dense model's "
            "without any --data-parallel option, one with experts with --data-parallel-external-lb)"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise UnsupportedError(
            "enable_sleep_mode: True gives up memory that NIXL has registered, and wakes in other; "
            "start the engine without it"
        )
    if getattr(parallel, "use_ubatching", False):
        raise UnsupportedError(
            "enable_dbo: True, or ubatch_size above 1, fills a layer's blocks in two halves, which "
            "a push would take for one; start the engine without dual-batch overlap"
        )
    if getattr(config.scheduler_config, "policy", "fcfs") == "priority":
        raise UnsupportedError(
            "scheduling_policy: 'priority' can leave blocks in vLLM's prefix cache that no step "
            "has filled, when memory is short; start the engine with --scheduling-policy fcfs"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name}: {getattr(parallel, name)} is not supported; use 1")
    if len(kv.kv_cache_groups) != 1:
        raise UnsupportedError(
            f"kv_cache_groups: {len(kv.kv_cache_groups)}; models with more than one kind of cache "
            "(hybrid attention, Mamba) are not supported"
        )
    spec = kv.kv_cache_groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        raise UnsupportedError(
            f"kv_cache_spec: {type(spec).__name__}; only full attention is supported"
        )
    if config.speculative_config is not None:
        raise UnsupportedError(
            "speculative_config: speculative decoding is not supported with kvshuttle yet; "
            "start the engine without it"
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    if "xxhash" in algorithm and "PYTHONHASHSEED" not in os.environ:
        raise UnsupportedError(
            f"prefix_caching_hash_algo: {algorithm!r} seeds its hashes at random, so no two "
            "engines agree; use sha256, or set PYTHONHASHSEED to one value on all of them"
        )
    unit = config.cache_config.prefix_match_unit
    if unit not in (None, config.cache_config.block_size):
        raise UnsupportedError(
            f"prefix_match_unit: {unit} differs from block_size "
            f"{config.cache_config.block_size}; leave it unset"
        )


# The scheduler side.


class Pool:
    """vLLM's BlockPool as a :class:`kvshuttle.dataplane.holds.BlockStore`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        if journal.enabled():
            self._note_allocations()

    def _note_allocations(self) -> None:
        allocate = self._pool.get_new_blocks

        def noted(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            journal.note("handed_out", blocks=[int(block.block_id) for block in blocks])
            return blocks

        self._pool.get_new_blocks = noted

    def before_reset(self, release: Callable[[], None]) -> None:
        """Calls `release` whenever vLLM is about to reset its prefix cache: it looks for references
        before it asks the connector, and refuses, or fails a sleep or a weight update, over them.
        """
        reset = self._pool.reset_prefix_cache

        def release_and_reset() -> bool:
            release()
            return bool(reset())

        self._pool.reset_prefix_cache = release_and_reset

    def touch(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each block."""
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes one reference from each; the tail of the chain is reused first."""
        self._pool.free_blocks([self._pool.blocks[i] for i in reversed(block_ids)])

    def free_watched(self, block_ids: Sequence[int], on_reuse: Callable[[int], None]) -> None:
        """Like `free`; `on_reuse` hears of each block that is handed out again."""
        self._pool.unpin_blocks(
            [self._pool.blocks[i] for i in reversed(block_ids)],
            lambda block: on_reuse(int(block.block_id)),
        )

    def allocate(self, count: int) -> list[int]:
        """Free blocks, one reference each."""
        return [int(block.block_id) for block in self._pool.get_new_blocks(count)]

    def insert(self, block_hash: bytes, block_id: int, num_tokens: int) -> None:
        """Enters a block into the prefix cache. Emits no KV event: those are made of requests."""
        self._pool._insert_block_hash(
            make_block_hash_with_group_id(BlockHash(block_hash), 0),
            self._pool.blocks[block_id],
            num_tokens=num_tokens,
        )

    def lookup(self, block_hash: bytes) -> int | None:
        """The cached block with this hash."""
        found = self._pool.get_cached_block(block_hash, [0])
        return int(found[0].block_id) if found else None

    @property
    def free_blocks(self) -> int:
        """Blocks without a reference."""
        return int(self._pool.get_num_free_blocks())

    @property
    def total_blocks(self) -> int:
        """Blocks that can be used; block 0 is vLLM's null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def caching(self) -> bool:
        """Whether the prefix cache is on."""
        return bool(self._pool.enable_caching)


@dataclass(frozen=True)
class EngineProbe:
    """Ways into the engine that runs this scheduler."""

    wake: Callable[[], None]
    """Makes an idle engine look at its scheduler; any thread."""
    has_input: Callable[[], bool]
    """Whether something waits for the engine to look at its input; its own thread."""
    request_counts: Callable[[], tuple[int, int]]
    """(running, waiting); any thread, may be slightly stale."""
    steps: Callable[[], tuple[int, int]]
    """How many steps were begun to be scheduled, and how many of these are over: what those fill is
    filled. Steps end in the order in which they began. The scheduler's thread."""
    pauses: Callable[[], int]
    """How many times vLLM was told to pause; 0 while it is not paused. The scheduler's thread."""


class _Steps:
    """Counts a scheduler's steps. vLLM comes with the output of each, in order, whatever it has."""

    def __init__(self, scheduler: Any) -> None:
        self._begun = self._over = 0
        # What was scheduled and is not over: its number, and vLLM's object.
        self._running: deque[tuple[int, object]] = deque()
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def counted_schedule(*args: Any, **kwargs: Any) -> Any:
            self._begun += 1
            number, step = self._begun, schedule(*args, **kwargs)
            self._running.append((number, step))
            return step

        def counted_update(step: Any, *args: Any, **kwargs: Any) -> Any:
            # At its beginning: the step's output is there. By identity, so that a step whose output
            # never comes is not one that all later ones are short of.
            while self._running:
                self._over, begun = self._running.popleft()
                if begun is step:
                    break
            return update(step, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = counted_schedule, counted_update

    def __call__(self) -> tuple[int, int]:
        return self._begun, self._over


class _Pauses:
    """Counts how often a scheduler was told to pause: who is told again has somebody who waits
    again."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._told = 0
        set_state = scheduler.set_pause_state

        def counted(state: PauseState) -> None:
            self._told += state != PauseState.UNPAUSED
            set_state(state)

        scheduler.set_pause_state = counted

    def __call__(self) -> int:
        return self._told if self._scheduler.pause_state != PauseState.UNPAUSED else 0


def engine_probe() -> EngineProbe:
    """Finds the engine by walking the frames that are constructing the connector.

    vLLM gives a scheduler-side connector no handle to its engine. Where there is none (the offline
    ``LLM`` class in-process), waking does nothing and commands wait for the next step.
    """
    core: Any = None
    scheduler: Any = None
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if candidate is not None:
            if scheduler is None and hasattr(candidate, "get_request_counts"):
                scheduler = candidate
            if hasattr(candidate, "input_queue") and hasattr(candidate, "run_busy_loop"):
                core = candidate
                break
        frame = frame.f_back
    del frame

    def wake() -> None:
        if core is not None:
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def has_input() -> bool:
        return core is not None and not core.input_queue.empty()

    def counts() -> tuple[int, int]:
        if scheduler is None:
            return 0, 0
        running, waiting = scheduler.get_request_counts()
        return int(running), int(waiting)

    steps = _Steps(scheduler) if scheduler is not None else lambda: (0, 0)
    pauses = _Pauses(scheduler) if scheduler is not None else lambda: 0
    return EngineProbe(wake, has_input, counts, steps, pauses)


class TailHasher:
    """Hashes of blocks that are not full, as vLLM makes those of full ones: its function, its
    parent hash, and its extra keys (LoRA, images, salt, embeddings) over the tokens that are there.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        self._block_size = int(config.cache_config.block_size)

    def of(self, request: Request) -> TailHash:
        """Of one request, as it is when asked."""

        def tail_hash(full: int, tokens: int) -> bytes | None:
            start = full * self._block_size
            if not 0 < full <= len(request.block_hashes) or not 0 < tokens < self._block_size:
                return None
            if start + tokens > request.num_tokens:
                return None
            # From the first image on: those that end before are passed over.
            extra_keys, _ = generate_block_hash_extra_keys(request, start, start + tokens, 0)
            return bytes(
                hash_block_tokens(
                    self._function,
                    request.block_hashes[full - 1],
                    request.all_token_ids[start : start + tokens],
                    extra_keys,
                )
            )

        return tail_hash


def finished_state(
    request: Request, block_ids: Sequence[int], block_size: int, hasher: TailHasher
) -> FinishedRequest:
    """Which of a finishing request's blocks are full and written, and what follows them.

    Below the computed tokens only: the last sampled token has no KV yet, and what a step in flight
    is writing does not count.
    """
    computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
    full = min(computed // block_size, len(request.block_hashes), len(block_ids))
    tail = None
    tokens = computed - full * block_size
    if 0 < tokens < block_size and full < len(block_ids):
        tail_hash = hasher.of(request)(full, tokens)
        tail = Tail(int(block_ids[full]), tokens, tail_hash) if tail_hash is not None else None
    return FinishedRequest(
        request_id=request.request_id,
        hashes=tuple(bytes(h) for h in request.block_hashes[:full]),
        block_ids=tuple(block_ids[:full]),
        prompt_tokens=int(request.num_prompt_tokens),
        # An error too may end it while a step of it runs.
        aborted=request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR),
        tail=tail,
    )


class RunningRequest:
    """A :class:`kvshuttle.dataplane.push_source.RequestView` of vLLM's request."""

    def __init__(self, request: Request, hasher: TailHasher) -> None:
        self._request = request
        self._hasher = hasher

    def hashes(self) -> Sequence[bytes]:
        """Hashes of its full blocks."""
        return list(self._request.block_hashes)

    def tail_hash(self, full: int, tokens: int) -> bytes | None:
        """The hash of a block of just these tokens."""
        return self._hasher.of(self._request)(full, tokens)

    def preemptions(self) -> int:
        """How often its blocks were taken."""
        return int(self._request.num_preemptions)


def scheduled(output: SchedulerOutput, wanted: Callable[[str], bool]) -> list[Scheduled]:
    """Of the step's requests, those that are wanted."""
    found = [
        (new.req_id, new.num_computed_tokens)
        for new in output.scheduled_new_reqs
        if wanted(new.req_id)
    ]
    cached = output.scheduled_cached_reqs
    found += [
        (request_id, computed)
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        if wanted(request_id)
    ]
    if not found:
        return []
    state = output.kv_connector_block_state
    assert state is not None  # vLLM sets it for connectors
    result = []
    for request_id, computed in found:
        block_ids = state.get_block_ids(request_id)
        if block_ids is not None:
            tokens = int(output.num_scheduled_tokens.get(request_id, 0))
            result.append(Scheduled(request_id, int(computed), tokens, block_ids[0]))
    return result


# The worker side.


class _Rest:
    """Lets a reader of vLLM's queue block at once, instead of looking for the next step in a tight
    loop for a second.

    A notice that comes in the very moment in which its reader blocks can be lost (ZeroMQ's
    ``CONFLATE``), and vLLM, which blocks so much later, hears of that step after five seconds. So
    for the second in which vLLM would not have blocked, it looks now and then.
    """

    def __init__(self, condition: Any) -> None:
        self._condition = condition
        self._wait = condition.wait
        # When the step that rests was read.
        self._read = float("-inf")
        condition.wait = self._rest

    def __call__(self) -> None:
        """The step that was read last computes nothing."""
        self._read = self._condition.last_read

    def _rest(self, timeout_ms: int | None = None) -> None:
        read = self._condition.last_read
        would_look = time.monotonic() <= read + self._condition.busy_loop_s
        if read != self._read or not would_look:
            self._wait(timeout_ms)
            return
        look_ms = WORKER_LOOK_NS // 1_000_000
        self._condition.last_read = float("-inf")
        try:
            self._wait(look_ms if timeout_ms is None else min(timeout_ms, look_ms))
        finally:
            self._condition.last_read = read


def worker_rest() -> Callable[[], None]:
    """Makes the worker that is in a step block until its next one. Found by walking the frames that
    are constructing the connector; where there is no such loop (one process for all) it does
    nothing.
    """
    frame = inspect.currentframe()
    while frame is not None:
        queue = getattr(frame.f_locals.get("self"), "rpc_broadcast_mq", None)
        condition = getattr(queue, "_spin_condition", None)
        if condition is not None and condition.is_reader:
            return _Rest(condition)
        frame = frame.f_back
    return lambda: None


def device_fence(caches: dict[str, torch.Tensor]) -> Callable[[], Fence]:
    """Makes a mark on the device's queue: what was queued before has run when the mark says so.
    Nothing on a CPU, where a layer's hook comes after its computation."""
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return lambda: None

    def mark() -> Fence:
        event = torch.cuda.Event() if device.type == "cuda" else torch.Event(device)
        event.record()
        return lambda: bool(event.query())

    return mark


def kv_regions(caches: dict[str, torch.Tensor], num_blocks: int) -> list[LocalRegion]:
    """The contiguous regions of a rank's KV caches in which block i starts at i * block_bytes.

    Knows the layouts with the block dimension outermost in memory (one region a layer), and those
    with K and V outermost (two regions a layer). ``num_blocks`` counts scheduler blocks; a kernel
    block may be a fraction of one. Raises :class:`UnsupportedError` for anything else.
    """
    regions: list[LocalRegion] = []
    seen: set[int] = set()
    for layer, tensor in caches.items():
        if tensor.data_ptr() in seen:
            continue  # layers that share one cache
        seen.add(tensor.data_ptr())
        views = _views(tensor, num_blocks)
        for part, view in enumerate(views):
            if not _blocks_outermost(view, num_blocks):
                raise UnsupportedError(
                    f"KV cache of {layer}: shape {tuple(tensor.shape)}, strides "
                    f"{tensor.stride()}: blocks are not contiguous in memory"
                )
            total = view.numel() * view.element_size()
            on_host = view.device.type == "cpu"
            regions.append(
                LocalRegion(
                    layer=layer if len(views) == 1 else f"{layer}/{'kv'[part]}",
                    base=view.data_ptr(),
                    block_bytes=total // num_blocks,
                    num_blocks=num_blocks,
                    memory_type="DRAM" if on_host else "VRAM",
                    device_id=0 if on_host else int(view.device.index or 0),
                )
            )
    return regions


def _views(tensor: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """A layer's cache, or its K and its V where those are apart: blocks come first in each."""
    if tensor.shape[0] == 2 and not _blocks_outermost(tensor, num_blocks):
        return [tensor[0], tensor[1]]
    return [tensor]


def _blocks_outermost(view: torch.Tensor, num_blocks: int) -> bool:
    """Whether the view fills its memory without gaps, its first dimension slowest."""
    if view.shape[0] % num_blocks:
        return False
    inner = view.numel() // view.shape[0]
    dense = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) + 1
    return bool(view.stride(0) == inner and dense == view.numel())


def kernel_blocks(caches: dict[str, torch.Tensor], num_blocks: int) -> int:
    """How many blocks of an attention kernel's make up one of the scheduler's, at most."""
    views = [view for tensor in caches.values() for view in _views(tensor, num_blocks)]
    return max(int(view.shape[0]) // num_blocks for view in views)


def kv_heads(
    config: VllmConfig,
    kv: KVCacheConfig,
    rank: int,
    regions: Sequence[LocalRegion],
    pieces: int = 1,
) -> Heads:
    """The KV heads that a rank keeps; none where a block cannot be taken apart by heads.

    It can where heads are outermost in a block (vLLM's LBHNC): then each head of a block is one run
    of bytes. Not where a block is several of the kernel's (`pieces`, see :func:`kernel_blocks`):
    then heads are outermost in each of those. Raises :class:`UnsupportedError` where vLLM's split
    is not the one that is known here.
    """
    spec = kv.kv_cache_groups[0].kv_cache_spec
    assert isinstance(spec, FullAttentionSpec)  # see check_supported
    ranks = config.parallel_config.tensor_parallel_size
    # With MLA every rank keeps the one latent head.
    total = 1 if config.model_config.use_mla else config.model_config.get_total_num_kv_heads()
    try:
        heads = heads_of_rank(rank, ranks, total)
    except ValueError as error:
        raise UnsupportedError(f"tensor_parallel_size: {error}") from error
    if heads.count != spec.num_kv_heads:
        raise UnsupportedError(
            f"tensor_parallel_size: rank {rank} of {ranks} keeps {spec.num_kv_heads} KV heads, not "
            f"{heads.count} of {total}; this way to split attention is not supported"
        )
    layout = config.cache_config.get_resolved_kv_cache_layout()
    padded = spec.num_head_slots not in (None, heads.count) or spec.page_size_padded is not None
    if padded or not (layout.is_block_contiguous or heads.count == total == 1):
        return Heads(0, 0)
    if (pieces > 1 and total > 1) or any(region.block_bytes % heads.count for region in regions):
        return Heads(0, 0)
    return heads


def fingerprint(
    config: VllmConfig,
    regions: Sequence[LocalRegion],
    heads: Heads,
    model_id: str,
    pieces: int = 1,
) -> list[tuple[str, str]]:
    """All that must be equal for two workers' KV to be the same bytes, as (name, value).

    Where a block can be taken apart by heads, the number of ranks need not be: then a head's bytes
    count. Dummy weights are drawn anew for each split.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    backends = [b.get_name() for b in get_current_attn_backends(config)]
    hash_name = cache.prefix_caching_hash_algo
    fields = [
        ("model", model_id or f"{model.model}@{model.revision or ''}"),
        ("model_config", _digest(model.hf_config.to_json_string(use_diff=False))),
        ("load_format", str(config.load_config.load_format)),
        ("model_dtype", str(model.dtype)),
        ("quantization", str(model.quantization)),
        ("kv_cache_dtype", str(cache.cache_dtype)),
        ("kv_cache_layout", str(cache.get_resolved_kv_cache_layout().name)),
        ("attention_backend", ",".join(sorted(set(backends)))),
        ("block_size", str(cache.block_size)),
        (
            "region_head_bytes",
            _digest(json.dumps([r.block_bytes // max(1, heads.count) for r in regions])),
        ),
        ("kv_heads", str(model.get_total_num_kv_heads())),
        ("block_hash", hash_name),
        ("block_hash_seed", _hash_seed(hash_name)),
        ("vllm", ".".join(vllm_version().split(".")[:2])),
        ("platform", str(current_platform.device_type)),
    ]
    if current_platform.device_type == "cpu":
        fields.append(("cpu_isa", _cpu_isa(config)))
    if str(config.load_config.load_format) in ("dummy", "LoadFormats.DUMMY"):
        fields.append(("dummy_seed", str(model.seed)))
        fields.append(("dummy_weights_ranks", str(parallel.tensor_parallel_size)))
    # What `main` was when it was fetched; nothing for a folder.
    if not model_id and (commit := getattr(model.hf_config, "_commit_hash", None)):
        fields.append(("model_commit", str(commit)))
    if pieces > 1:
        fields.append(("kernel_blocks", str(pieces)))
    if not heads.count:
        fields.append(("tensor_parallel_size", str(parallel.tensor_parallel_size)))
    return fields


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash_seed(name: str) -> str:
    from vllm.utils.hashing import get_hash_fn_by_name

    return _digest(resolve_none_hash_seed(get_hash_fn_by_name(name)))


def _cpu_isa(config: VllmConfig) -> str:
    """How the CPU attention kernel packs K and V."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(
        _get_attn_isa(
            config.model_config.dtype,
            config.cache_config.block_size,
            config.model_config.get_head_size(),
            config.cache_config.cache_dtype,
        )
    )


def rank_of(config: VllmConfig) -> int:
    """This worker's tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    del config
    return int(get_tensor_model_parallel_rank())


def device_binder(caches: dict[str, torch.Tensor]) -> Callable[[], None]:
    """What a new thread must call before it uses the caches' device; nothing on a CPU."""
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return lambda: None
    return lambda: current_platform.set_device(device)
