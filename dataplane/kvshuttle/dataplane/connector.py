"""The connector that vLLM loads: ``kv_connector_module_path`` names this module.

It translates vLLM's hooks into calls of the scheduler side or of the mover, and keeps one promise:
no request fails and no engine dies because of KV movement. Whatever goes wrong inside answers vLLM
with "nothing to load".
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kvshuttle.dataplane import huge_pages
from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.dataplane.config import AgentConfig
from kvshuttle.dataplane.faults import Faults, LeakyHolds
from kvshuttle.dataplane.handshake import RankHandshake
from kvshuttle.dataplane.link import ControlLink
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.messages import PushChunk
from kvshuttle.dataplane.mover import Mover
from kvshuttle.dataplane.push_steps import Fence
from kvshuttle.dataplane.scheduler import SchedulerAgent
from kvshuttle.dataplane.turns import leg_of_params
from kvshuttle.dataplane.vllm_compat import (
    CacheHitSource,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    Pool,
    Request,
    RunningRequest,
    SchedulerOutput,
    SupportsHMA,
    TailHasher,
    VllmConfig,
    check_supported,
    device_binder,
    device_fence,
    engine_probe,
    fingerprint,
    finished_state,
    kernel_blocks,
    kv_heads,
    kv_regions,
    rank_of,
    scheduled,
    vllm_version,
    worker_rest,
)
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import cluster_service_pb2 as cluster_pb2

__all__ = ["KVShuttleConnector"]

_log = get_logger("connector")


@dataclass
class _StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Orders go to the movers directly; only what the step itself fills goes with it."""

    chunks: list[PushChunk] = field(default_factory=list)
    # Nothing is computed in it: requests wait for their KV.
    idle: bool = False


class KVShuttleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's v1 connector; one instance in the scheduler's process, one in every worker's."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._extra: dict[str, Any] = dict(transfer.kv_connector_extra_config)
        self._config = AgentConfig.parse(self._extra)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._boot_id = uuid.uuid4().hex
        self._mover: Mover | None = None
        self._handshake: RankHandshake | None = None
        self._pool: Pool | None = None
        self._link: ControlLink | None = None
        self._agent: SchedulerAgent | None = None
        self._step_blocks, self._batch_blocks = 8, 4
        self._mark: Callable[[], Fence] = lambda: None
        self._worker_rest: Callable[[], None] = lambda: None
        if role == KVConnectorRole.WORKER:
            self._worker_rest = worker_rest()
        if role == KVConnectorRole.SCHEDULER:
            self._probe = engine_probe()
            self._tails = TailHasher(vllm_config)
            # Data-parallel engines step together: one that rests would keep the others waiting.
            self._alone = vllm_config.parallel_config.data_parallel_size == 1
            scheduler = vllm_config.scheduler_config
            # Blocks that one step can take at most: a full batch of tokens, and one block more for
            # each running request that crosses a boundary.
            self._batch_blocks = scheduler.max_num_batched_tokens // self._block_size
            self._step_blocks = self._batch_blocks + scheduler.max_num_seqs

    @property
    def requires_kv_delivery(self) -> bool:
        """Best effort: a replica that a preemption took is a future miss, nothing else."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """One contiguous page a block and layer makes the fewest descriptors."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers this rank's memory with NIXL and starts its mover."""
        num_blocks = int(self._kv_cache_config.num_blocks)
        regions = kv_regions(kv_caches, num_blocks)
        huge_pages.advise(huge_pages.in_host_memory(regions), boottime_ns)
        rank = rank_of(self._vllm_config)
        pieces = kernel_blocks(kv_caches, num_blocks)
        heads = kv_heads(self._vllm_config, self._kv_cache_config, rank, regions, pieces)
        self._mover = Mover(
            rank,
            f"kvshuttle-{uuid.uuid4().hex}",
            regions,
            backend=self._config.nixl_backend,
            backend_params=self._config.nixl_backend_params,
            faults=Faults.from_config(self._extra),
            bind_device=device_binder(kv_caches),
        )
        self._mark = device_fence(kv_caches)
        endpoint = self._mover.start()
        self._handshake = RankHandshake(
            endpoint=endpoint,
            fingerprint=tuple(
                fingerprint(self._vllm_config, regions, heads, self._config.model_id, pieces)
            ),
            num_blocks=num_blocks,
            heads=heads,
        )
        _log.info(
            "registered",
            rank=rank,
            regions=len(regions),
            bytes=sum(r.block_bytes * r.num_blocks for r in regions),
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Sent by vLLM to the scheduler's process."""
        return self._handshake

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended on this rank since the last step."""
        del finished_req_ids
        if self._mover is None:
            return KVConnectorTransferResults()
        finished, failed = self._mover.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: what it computes may be written as it goes."""
        super().bind_connector_metadata(connector_metadata)
        if getattr(connector_metadata, "idle", False):
            self._worker_rest()
        chunks = getattr(connector_metadata, "chunks", None)
        if chunks and self._mover is not None:
            self._mover.begin_step(chunks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads start when their blocks are allocated."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs only after its load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """One layer is filled: the mover may write it. Nothing here waits."""
        if self._mover is not None and self._mover.stepping:
            self._mover.layer_final(layer_name, self._mark())

    def wait_for_save(self) -> None:
        """All layers are filled, whether or not each was said to be. Nothing here waits."""
        if self._mover is not None and self._mover.stepping:
            self._mover.end_step(self._mark())

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM hands over its block pool."""
        self._pool = Pool(gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Every rank is registered: the agent can introduce itself."""
        if self._pool is None:
            raise RuntimeError("vLLM set the handshake metadata before it bound the block pool")
        handshakes = [x for _, x in sorted(metadata.items()) if isinstance(x, RankHandshake)]
        self._handshakes = handshakes
        self._link = ControlLink(
            self._config, [x.endpoint for x in handshakes], self._hello, self._probe.wake
        )
        faults = Faults.from_config(self._extra)
        self._agent = SchedulerAgent(
            self._pool,
            self._link,
            boottime_ns,
            block_size=self._block_size,
            worker_id=self._config.worker_id,
            counts=self._probe.request_counts,
            steps=self._probe.steps,
            holds=LeakyHolds(self._pool, faults) if faults != Faults() else None,
            heads=[x.heads for x in handshakes],
        )
        self._pool.before_reset(self._let_go)
        self._link.start(self._agent)

    def on_new_request(self, request: Request) -> None:
        """vLLM has queued a request: what it may read under must not run out meanwhile."""
        key = leg_of_params(request.kv_transfer_params)
        if self._agent is not None and key is not None:
            with _guarded("on_new_request"):
                self._agent.arrived(request.request_id, key)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many prompt tokens can be loaded beyond those that the engine has."""
        if self._agent is None:
            return 0, False
        try:
            needed = -(-(request.num_tokens - num_computed_tokens) // self._block_size)
            self._agent.drain()
            self._agent.make_room(needed + self._step_blocks)
            key = leg_of_params(request.kv_transfer_params)
            if key is None:
                return 0, False
            tokens = self._agent.look(
                request.request_id,
                key,
                request.block_hashes,
                request.num_tokens,
                num_computed_tokens,
                self._tails.of(request),
            )
        except Exception:
            _log.exception("hook_failed", hook="get_num_new_matched_tokens")
            return 0, False
        return (tokens, bool(tokens)) if tokens is not None else (None, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM has allocated: start the load, if one was promised."""
        if self._agent is None:
            return
        key = leg_of_params(request.kv_transfer_params)
        if key is None:
            return
        try:
            self._agent.allocated(
                request.request_id,
                key,
                blocks.get_block_ids()[0],
                num_external_tokens,
                RunningRequest(request, self._tails),
            )
        except Exception:
            _log.exception("hook_failed", hook="update_state_after_alloc")
            self._agent.refuse_load(request.request_id, num_external_tokens)
        self._after_hook()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Once a step: obey what came in, and keep enough blocks free for the next step."""
        self._tend(len(scheduler_output.num_scheduled_tokens))
        idle = not scheduler_output.num_scheduled_tokens
        if idle:
            self._rest()
        else:
            self._computing()
        return _StepMetadata(self._chunks(scheduler_output), idle)

    def _chunks(self, output: SchedulerOutput) -> list[PushChunk]:
        """What the step that is about to run fills for a push."""
        if self._agent is None:
            return []
        chunks: list[PushChunk] = []
        with _guarded("push_step"):
            chunks += self._agent.push.step(scheduled(output, self._agent.push.wants))
        return chunks

    def has_pending_push_work(self) -> bool:
        """vLLM asks this when it looks for work: the moment to obey commands in an idle engine.
        True makes it step on, and its pause wait."""
        self._tend(0)
        return self._agent is not None and self._settling(self._agent)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learns which loads vLLM was told have failed."""
        if self._agent is None or not connector_output.failed_recving:
            return
        with _guarded("update_connector_output"):
            self._agent.load_failed(list(connector_output.failed_recving))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Holds what the request leaves. vLLM forgets the request at once; the references stay."""
        key = leg_of_params(request.kv_transfer_params)
        if self._agent is None or key is None:
            return False, None
        with _guarded("request_finished"):
            state = finished_state(request, block_ids[0], self._block_size, self._tails)
            self._agent.finished(key, state)
        self._after_hook()
        return False, None

    def reset_cache(self) -> bool | None:
        """Lets all replicas go; leases keep their ranges until their readers have stopped."""
        self._let_go()
        return True

    def take_events(self) -> Iterable[Any]:
        """None of ours: replicas are reported on the control stream."""
        return ()

    def shutdown(self) -> None:
        """The process ends."""
        if self._link is not None:
            self._link.shutdown()
        if self._mover is not None:
            self._mover.shutdown()

    # Inside.

    def _tend(self, num_requests: int) -> None:
        if self._agent is None:
            return
        with _guarded("tend"):
            self._agent.heed_pause(self._probe.pauses())
            self._agent.drain()
            if num_requests:
                self._agent.make_room(min(self._step_blocks, num_requests + self._batch_blocks))
        self._after_hook()

    def _settling(self, agent: SchedulerAgent) -> bool:
        try:
            return agent.settling()
        except Exception:
            _log.exception("hook_failed", hook="settling")
            return False

    def _rest(self) -> None:
        if self._agent is None or not self._alone:
            return
        with _guarded("rest"):
            self._agent.rest(self._probe.has_input)

    def _computing(self) -> None:
        if self._agent is None:
            return
        with _guarded("computing"):
            self._agent.computing()

    def _let_go(self) -> None:
        if self._agent is None:
            return
        with _guarded("reset"):
            self._agent.reset()
        self._after_hook()

    def _after_hook(self) -> None:
        if self._agent is None or self._link is None:
            return
        with _guarded("deadline"):
            self._link.set_deadline(self._agent.next_deadline())

    def _hello(self) -> agent_pb2.AgentHello:
        """Who this boot is and what it holds; called by the link's thread for every stream."""
        assert self._agent is not None
        first = self._handshakes[0]
        return agent_pb2.AgentHello(
            worker_id=self._config.worker_id,
            boot_id=self._boot_id,
            role=self._config.role,
            url=self._config.url,
            fingerprint=[
                cluster_pb2.FingerprintField(name=name, value=value)
                for name, value in first.fingerprint
            ],
            block_size=self._block_size,
            num_blocks=min(x.num_blocks for x in self._handshakes),
            bytes_per_block=sum(
                r.block_bytes for x in self._handshakes for r in x.endpoint.regions
            ),
            prefix_caching=bool(self._vllm_config.cache_config.enable_prefix_caching),
            ranks=[x.describe() for x in self._handshakes],
            highest_epoch=self._agent.highest_epoch,
            lineage_id=self._agent.lineage,
            replicas=self._agent.source.inventory(),
            leases=self._agent.lease_inventory(),
            vllm_version=vllm_version(),
            agent_version=_agent_version(),
            clock=boottime_ns(),
            nixl_backend=self._config.nixl_backend,
            push=True,
            past_incarnations=self._agent.incarnations,
        )


@contextmanager
def _guarded(hook: str) -> Iterator[None]:
    """What leaves a hook ends the engine: it is logged instead."""
    try:
        yield
    except Exception:
        _log.exception("hook_failed", hook=hook)


def _agent_version() -> str:
    try:
        return version("kvshuttle")
    except PackageNotFoundError:
        return "0"
