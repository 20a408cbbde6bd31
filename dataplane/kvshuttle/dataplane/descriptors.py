"""Descriptors of blocks, as NIXL takes them: which memory a transfer moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Region", "breaks", "in_order", "merge_runs", "parts_of", "rows_of"]


class Region(Protocol):
    """Memory in which block i starts at ``base + i * block_bytes``."""

    @property
    def base(self) -> int:
        """Address in its process."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def device_id(self) -> int:
        """Device index; 0 for DRAM."""


def in_order(
    local: Sequence[int], remote: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The pairs by local block; ValueError where one side has more."""
    a = np.asarray(local, dtype=np.int64)
    b = np.asarray(remote, dtype=np.int64)
    if len(a) != len(b):
        raise ValueError(f"{len(a)} local blocks, {len(b)} of the peer's")
    order = np.argsort(a, kind="stable")
    return a[order], b[order]


def breaks(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where, among pairs in order, a block does not follow the one before on both sides."""
    return np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1


def merge_runs(
    local: Sequence[int], remote: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Joins neighbouring blocks that are contiguous on both sides, in whatever order they come: a
    pool hands blocks out in falling order after a request's were freed from their end.

    Returns three arrays of equal length: first local block, first remote block and number of
    blocks of each run. ``local`` and ``remote`` have the same length, at least 1.
    """
    a, b = in_order(local, remote)
    starts = np.concatenate(([0], breaks(a, b)))
    lengths = np.diff(np.concatenate((starts, [len(a)])))
    return a[starts], b[starts], lengths


def parts_of(
    region: Region, blocks: Sequence[int], head: int, heads: int, size: int
) -> npt.NDArray[np.uint64]:
    """NIXL descriptors of `size` bytes of each block, from a head on."""
    first = np.asarray(blocks, dtype=np.uint64)
    rows = np.empty((len(first), 3), dtype=np.uint64)
    start = region.base + head * (region.block_bytes // heads)
    rows[:, 0] = np.uint64(start) + first * np.uint64(region.block_bytes)
    rows[:, 1] = np.uint64(size)
    rows[:, 2] = np.uint64(region.device_id)
    return rows


def rows_of(
    regions: Sequence[Region],
    first: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint64]:
    """NIXL descriptors (address, bytes, device), one a run, region by region."""
    places = [(r.base, r.block_bytes, r.device_id) for r in regions]
    base, size, device = np.array(places, dtype=np.uint64).T[:, :, None]
    rows = np.empty((len(regions), len(first), 3), dtype=np.uint64)
    rows[:, :, 0] = base + first.astype(np.uint64) * size
    rows[:, :, 1] = lengths.astype(np.uint64) * size
    rows[:, :, 2] = device
    return rows.reshape(-1, 3)
