"""Why `--scheduling-policy priority` is refused: what vLLM's own scheduler does with it.

When this fails, vLLM has mended it, and the refusal may go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TINY = Path(__file__).parents[3] / ".models" / "tiny"
BLOCK = 16
# 11 blocks, without the null block: what makes a request of little weight, in chunks of three
# blocks, and a heavier one's next token want the last of them in one step.
POOL, LIGHT, HEAVY, CHUNK = 12, 150, 17, 48

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Steps:
    """vLLM's scheduler, and which blocks its steps have filled."""

    def __init__(self, policy: str) -> None:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            model_config=ModelConfig(model=str(TINY), dtype="float32", max_model_len=1_024),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=64,
                long_prefill_token_threshold=CHUNK,
                max_model_len=1_024,
                policy=policy,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.num_gpu_blocks = POOL
        spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(POOL, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.filled: set[int] = set()
        allocate = self.pool.get_new_blocks

        def allocated(count: int) -> Any:
            blocks = allocate(count)
            self.filled -= {block.block_id for block in blocks}
            return blocks

        self.pool.get_new_blocks = allocated

    def ask(self, name: str, tokens: int, priority: int) -> None:
        """A request comes in."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        sampling.update_from_generation_config({}, -1)
        self.scheduler.add_request(
            Request(
                name,
                [1_000 * (priority + 1) + i for i in range(tokens)],
                sampling,
                None,
                priority=priority,
                block_hasher=self._hasher,
            )
        )

    def step(self) -> None:
        """Schedules a step and says what has come of it."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            end = request.num_computed_tokens
            first = end - output.num_scheduled_tokens[name]
            self.filled.update(block_ids[first // BLOCK : end // BLOCK])
            tokens.append([7] if end >= request.num_tokens else [])
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=tokens,
            ),
        )

    @property
    def cached_unfilled(self) -> list[int]:
        """Blocks whose hash is in the prefix cache though no step has filled them."""
        return [
            block.block_id
            for block in self.pool.blocks
            if block.block_hash is not None and block.block_id not in self.filled
        ]


@pytest.mark.parametrize(("policy", "wrong"), [("fcfs", False), ("priority", True)])
def test_what_no_step_fills_is_not_cached(policy: str, wrong: bool) -> None:
    steps = Steps(policy)
    steps.ask("light", LIGHT, 5)
    steps.step()
    steps.ask("heavy", HEAVY, 0)
    found = False
    for _ in range(12):
        steps.step()
        found |= bool(steps.cached_unfilled)
    assert found == wrong
