"""Movers of workers that are split otherwise, over real NIXL: each rank a process of its own."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.shapes import Heads, heads_of_rank, links, readers
from tests.integration.dataplane.mover_process import HEAD_BYTES
from tests.integration.dataplane.test_mover import LAYERS, Far, deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("nixl._api", reason="NIXL is installed with the engines", exc_type=ImportError)
pytestmark = pytest.mark.engines

THERE, HERE = [3, 4, 9], [10, 11, 20]


class Split:
    """One worker: its ranks, each with the heads that it keeps."""

    def __init__(self, name: str, ranks: int, total: int) -> None:
        self.heads: list[Heads] = [heads_of_rank(rank, ranks, total) for rank in range(ranks)]
        self.worker = (name, 1)
        self.ranks = [Far(name, heads=heads.count) for heads in self.heads]

    def meet(self, other: Split) -> None:
        for rank, far in enumerate(self.ranks):
            for there, part in links(self.heads, rank, other.heads).items():
                far.meet(other.ranks[there], part)

    def fill(self, block: int) -> None:
        for heads, far in zip(self.heads, self.ranks, strict=True):
            for i in range(heads.count):
                far.ask(fill_head=[block, i, value(block, heads.first + i)])

    def close(self) -> None:
        for far in self.ranks:
            far.close()


def value(block: int, head: int) -> int:
    return 16 * head + block


@contextlib.contextmanager
def pair(ranks: tuple[int, int], total: int) -> Iterator[tuple[Split, Split]]:
    with contextlib.ExitStack() as stack:
        one, other = (Split(f"split-in-{n}", n, total) for n in ranks)
        stack.callback(one.close)
        stack.callback(other.close)
        one.meet(other)
        other.meet(one)
        for split in (one, other):
            for block in THERE:
                split.fill(block)
        yield one, other


@pytest.fixture(scope="module")
def whole_and_halves() -> Iterator[tuple[Split, Split]]:
    """Four heads on one rank, and on two."""
    with pair((1, 2), 4) as found:
        yield found


_numbers = itertools.count(1)


@pytest.fixture
def lease() -> str:
    """A fresh id a test: the processes are shared."""
    return f"lease-{next(_numbers)}"


def moves(source: Split, reader: Split, lease: str) -> None:
    """Reads once, and checks every byte and who hears of it."""
    for far in source.ranks:
        far.order(m.Serve(lease, deadline()))
    for far in reader.ranks:
        far.order(m.Read(lease, lease, *source.worker, HERE, THERE, deadline(), True))
    for heads, far in zip(reader.heads, reader.ranks, strict=True):
        assert far.results() == ([lease], [])
        ended = far.event_of("ReadEnded", lease)
        assert ended["published"]
        assert ended["bytes_moved"] == len(HERE) * LAYERS * heads.count * HEAD_BYTES
        for here, there in zip(HERE, THERE, strict=True):
            assert far.ask(peek_heads=here) == [
                [value(there, heads.first + i) + layer for i in range(heads.count)]
                for layer in range(LAYERS)
            ]
        assert far.ask(peek_heads=12) == [[0] * heads.count] * LAYERS
    # The source hears of each read, so that it knows when all have ended.
    heard = 0
    for far in source.ranks:
        while (event := far.ask(events=0.3)) is not None:
            heard += event == ["ReaderDone", {"lease_id": lease}]
    assert heard == readers(source.heads, reader.heads)


def test_halves_read_their_heads_of_a_whole(
    whole_and_halves: tuple[Split, Split], lease: str
) -> None:
    whole, halves = whole_and_halves
    moves(whole, halves, lease)


def test_a_whole_is_read_from_halves(whole_and_halves: tuple[Split, Split], lease: str) -> None:
    whole, halves = whole_and_halves
    moves(halves, whole, lease)


def test_more_ranks_than_heads(lease: str) -> None:
    """One head on two ranks: it is taken from one of its replicas, and given to both."""
    with pair((1, 2), 1) as (whole, replicas):
        moves(replicas, whole, lease)
        moves(whole, replicas, f"{lease}-back")


def test_one_rank_that_holds_no_more_makes_the_whole_read_nothing(
    whole_and_halves: tuple[Split, Split], lease: str
) -> None:
    whole, halves = whole_and_halves
    halves.ranks[0].order(m.Serve(lease, deadline()))
    halves.ranks[1].order(m.Serve(f"not-{lease}", deadline()))
    far = whole.ranks[0]
    far.order(m.Read(lease, lease, *halves.worker, HERE, THERE, deadline(), True))
    assert far.results() == ([lease], [lease])
    ended = far.event_of("ReadEnded", lease)
    assert (ended["published"], ended["reason"]) == (False, "SOURCE_LET_GO")


def test_regions_whose_heads_have_other_sizes_are_no_peer(
    whole_and_halves: tuple[Split, Split],
) -> None:
    whole, halves = whole_and_halves
    with pytest.raises(AssertionError, match="other block sizes"):
        whole.ranks[0].meet(halves.ranks[0], m.HeadSlice(0, 0, 1, 2, 2))
