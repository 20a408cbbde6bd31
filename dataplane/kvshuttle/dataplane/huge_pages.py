"""Huge pages for a KV pool in host memory.

Within a machine UCX copies from another process's memory page by page: the smoke command
(`kvshuttle.dataplane.smoke`, two cores of a virtual machine) moves 6.1 GB/s in pages of 4 KiB and
10.9 in pages of 2 MiB. vLLM's pool on CPU is made of small ones, unless the machine makes all pages
huge.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence

from kvshuttle.dataplane.limits import HUGE_PAGES_NS
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.transport import LocalRegion

__all__ = ["advise", "in_host_memory", "merged"]

_log = get_logger("pages")

# Bytes that are moved between two looks at the clock: some 20 to 150 ms.
PIECE = 64 << 20

# Linux's uapi/asm-generic/mman-common.h; the second one from 6.1 on.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def in_host_memory(regions: Sequence[LocalRegion]) -> list[tuple[int, int]]:
    """(address, bytes) of those regions that are."""
    return [(r.base, r.block_bytes * r.num_blocks) for r in regions if r.memory_type == "DRAM"]


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) of whole small pages, neighbours as one."""
    found: list[tuple[int, int]] = []
    for base, size in sorted(ranges):
        start = base - base % mmap.PAGESIZE
        end = -(-(base + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and start <= (last := found[-1])[0] + last[1]:
            found[-1] = (last[0], max(end - last[0], last[1]))
        else:
            found.append((start, end - start))
    return found


def advise(
    ranges: Sequence[tuple[int, int]],
    clock: Callable[[], int],
    madvise: Callable[[int, int, int], int] | None = None,
) -> int:
    """Asks for huge pages in these (address, bytes), now for as long as `HUGE_PAGES_NS` and by and
    by for the rest. What the machine refuses stays as it is. Returns the bytes that were moved.

    Nothing may have registered the memory yet: that would pin the small pages.
    """
    call = madvise or _madvise()
    if call is None or not ranges:
        return 0
    until = clock() + HUGE_PAGES_NS
    moved = total = 0
    for base, size in merged(ranges):
        total += size
        if call(base, size, _MADV_HUGEPAGE):
            continue
        # A huge page across the end of a piece would be in neither.
        for start in (base, *range(base - base % PIECE + PIECE, base + size, PIECE)):
            if clock() > until:
                break
            piece = min(PIECE - start % PIECE, base + size - start)
            if not call(start, piece, _MADV_COLLAPSE):
                moved += piece
    _log.info("huge_pages", bytes=moved, of=total)
    return moved


def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int
    return lambda base, size, advice: int(call(base, size, advice))
