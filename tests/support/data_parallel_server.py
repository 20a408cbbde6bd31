"""vLLM's server for data-parallel engines of a model with experts on a machine without a GPU.

Such engines exchange what goes into their experts in every step, and vLLM 0.32 does not have the
two collectives that this takes for CPUs: its own engines end at their first request. Here they
are, over vLLM's own group of processes; nothing else is touched. Run with `python -m`; the
processes that it starts import it too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tests.support import patient_server


def _gathered(group: Any, mine: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Everybody's rows, one after the other; `sizes` are their numbers."""
    most = max(sizes)
    padded = mine.new_zeros((most, *mine.shape[1:]))
    padded[: len(mine)] = mine
    all_rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(all_rows, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(all_rows, sizes, strict=True)])


def _all_gatherv(self: Any, mine: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    assert dim == 0
    many = mine if isinstance(mine, list) else [mine]
    found = [_gathered(self.device_group, x, sizes or [len(x)] * self.world_size) for x in many]
    return found if isinstance(mine, list) else found[0]


def _reduce_scatterv(self: Any, all_rows: Any, dim: int = -1, sizes: Any = None) -> Any:
    assert dim == 0
    sizes = sizes or [len(all_rows) // self.world_size] * self.world_size
    total = all_rows.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv

if __name__ == "__main__":
    patient_server.main()
