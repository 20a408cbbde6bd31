"""Huge pages for a pool in host memory."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from kvshuttle.dataplane.clock import NS, boottime_ns
from kvshuttle.dataplane.huge_pages import PIECE, advise, merged

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20


def huge_kib(address: int) -> int:
    """KiB of huge pages in the mapping that begins at or before this address."""
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found = int(line.split()[1])
    return found


def test_memory_that_is_written_already_moves_to_huge_pages() -> None:
    memory = mmap.mmap(-1, 8 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    address = ctypes.addressof(view)
    memory[:] = b"\x07" * len(memory)
    assert huge_kib(address) == 0
    moved = advise([(address + 5, len(memory) - 10)], boottime_ns)
    if not moved:
        pytest.skip("this machine has no huge pages to give")
    assert huge_kib(address) >= 7 * HUGE_PAGE // 1024
    assert bytes(memory[:]) == b"\x07" * len(memory)
    del view
    memory.close()


def test_neighbours_are_one_range() -> None:
    assert merged([]) == []
    assert merged([(3 * PAGE, PAGE), (PAGE + 1, 2 * PAGE - 1)]) == [(PAGE, 3 * PAGE)]
    assert merged([(PAGE + 7, 1), (9 * PAGE, 1)]) == [(PAGE, PAGE), (9 * PAGE, PAGE)]
    assert merged([(0, 10 * PAGE), (2 * PAGE, PAGE)]) == [(0, 10 * PAGE)]


def test_a_start_is_not_held_up_for_long_and_the_rest_is_advised() -> None:
    now = 0
    calls: list[tuple[int, int]] = []

    def slow(base: int, size: int, advice: int) -> int:
        nonlocal now
        now += 3 * NS
        calls.append((base, advice))
        return 0

    moved = advise([(0, 4 * PIECE), (8 * PIECE, PIECE)], lambda: now, slow)
    assert calls == [(0, 14), (0, 25), (8 * PIECE, 14)]
    assert moved == PIECE


def test_pieces_meet_where_huge_pages_do() -> None:
    """A huge page across the end of a piece would stay small."""
    calls: list[tuple[int, int]] = []

    def note(base: int, size: int, advice: int) -> int:
        if advice == 25:
            calls.append((base, size))
        return 0

    base, size = 5 * PIECE + 3 * PAGE, 2 * PIECE
    assert advise([(base, size)], boottime_ns, note) == size
    assert calls == [
        (base, PIECE - 3 * PAGE),
        (6 * PIECE, PIECE),
        (7 * PIECE, 3 * PAGE),
    ]


def test_what_the_machine_refuses_stays_as_it_is() -> None:
    assert advise([(0, PIECE)], boottime_ns, lambda *_: -1) == 0
    # Memory that is not there.
    assert advise([(PAGE, PAGE)], boottime_ns) == 0
