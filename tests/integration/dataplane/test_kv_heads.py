"""What a rank says of the heads that it keeps, by vLLM's own description of its cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvshuttle.dataplane.shapes import Heads
from kvshuttle.dataplane.transport import LocalRegion

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def heads_of(
    *,
    ranks: int,
    rank: int,
    total: int,
    keeps: int,
    layout: str = "LBHNC",
    block_bytes: int = 1 << 20,
    mla: bool = False,
    pieces: int = 1,
    **spec: Any,
) -> Heads:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

    from kvshuttle.dataplane.vllm_compat import kv_heads

    cache = FullAttentionSpec(
        block_size=32, num_kv_heads=keeps, head_size=64, dtype=torch.float32, **spec
    )
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(use_mla=mla, get_total_num_kv_heads=lambda: total),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout]),
    )
    kv: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=cache)])
    regions = [LocalRegion("layer", 0, block_bytes, 10, "DRAM", 0)]
    return kv_heads(config, kv, rank, regions, pieces)


def test_heads_outermost_in_a_block_are_told() -> None:
    assert heads_of(ranks=1, rank=0, total=4, keeps=4) == Heads(0, 4)
    assert heads_of(ranks=2, rank=1, total=4, keeps=2) == Heads(2, 2)
    assert heads_of(ranks=2, rank=1, total=4, keeps=2, layout="BLHNC") == Heads(2, 2)
    # More ranks than heads: each on several.
    assert heads_of(ranks=4, rank=3, total=2, keeps=1) == Heads(1, 1)


def test_pages_that_do_not_come_apart_by_heads_are_whole() -> None:
    whole = Heads(0, 0)
    for layout in ("LBNHC", "BLNHC"):
        assert heads_of(ranks=2, rank=1, total=4, keeps=2, layout=layout) == whole
    # K and V in slots of their own, padding, and bytes that the heads do not share.
    assert heads_of(ranks=2, rank=1, total=4, keeps=2, num_head_slots=4) == whole
    assert heads_of(ranks=2, rank=1, total=4, keeps=2, page_size_padded=1 << 20) == whole
    assert heads_of(ranks=2, rank=1, total=4, keeps=2, block_bytes=1_001) == whole
    # A block of two of the kernel's has heads outermost in each half.
    assert heads_of(ranks=2, rank=1, total=4, keeps=2, pieces=2) == whole
    assert heads_of(ranks=2, rank=1, total=1, keeps=1, pieces=2) == Heads(0, 1)


def test_how_many_of_the_kernels_blocks_are_one_of_the_schedulers() -> None:
    import torch

    from kvshuttle.dataplane.vllm_compat import kernel_blocks

    assert kernel_blocks({"a": torch.empty(10, 4, 32, 8)}, 10) == 1
    assert kernel_blocks({"a": torch.empty(10, 4, 32, 8), "b": torch.empty(20, 4, 16, 8)}, 10) == 2
    # K and V apart.
    assert kernel_blocks({"a": torch.empty(2, 30, 4, 16, 8)}, 10) == 3


def test_the_one_head_of_mla_is_on_every_rank() -> None:
    for rank in range(4):
        found = heads_of(ranks=4, rank=rank, total=128, keeps=1, layout="LBNHC", mla=True)
        assert found == Heads(0, 1)


def test_a_split_that_is_not_vllms_own_is_refused() -> None:
    from kvshuttle.dataplane.vllm_compat import UnsupportedError

    with pytest.raises(UnsupportedError, match="6 KV heads cannot be split over 4"):
        heads_of(ranks=4, rank=0, total=6, keeps=1)
    with pytest.raises(UnsupportedError, match="keeps 4 KV heads, not 2 of 4"):
        heads_of(ranks=2, rank=0, total=4, keeps=4)
