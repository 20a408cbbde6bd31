"""Which rank reads which heads from whom: checked byte by byte for every split up to 8 ranks."""

from __future__ import annotations

import itertools

import pytest

from kvshuttle.dataplane.messages import WHOLE, HeadSlice
from kvshuttle.dataplane.shapes import Heads, heads_of_rank, links, readers, reads, same_split

HEADS = (1, 2, 4, 6, 8)
RANKS = (1, 2, 3, 4, 6, 8)


def split(ranks: int, total: int) -> list[Heads]:
    return [heads_of_rank(rank, ranks, total) for rank in range(ranks)]


def splits() -> list[tuple[int, int, int]]:
    """(KV heads, our ranks, their ranks) that vLLM starts."""
    return [
        (total, ours, theirs)
        for total, ours, theirs in itertools.product(HEADS, RANKS, RANKS)
        if all(total % n == 0 or n % total == 0 for n in (ours, theirs))
    ]


@pytest.mark.parametrize(("total", "ours", "theirs"), splits())
def test_every_head_comes_from_one_rank_that_has_it(total: int, ours: int, theirs: int) -> None:
    mine, others = split(ours, total), split(theirs, total)
    # A page as the heads in it.
    pages = [list(range(x.first, x.end)) for x in others]
    for rank, heads in enumerate(mine):
        page: list[int | None] = [None] * heads.count
        for other, part in reads(mine, rank, others).items():
            assert (part.my_heads, part.their_heads) == (heads.count, others[other].count)
            for i in range(part.count):
                assert page[part.mine + i] is None, "read twice"
                page[part.mine + i] = pages[other][part.theirs + i]
        assert page == list(range(heads.first, heads.end))


@pytest.mark.parametrize(("total", "ours", "theirs"), splits())
def test_both_ends_of_a_read_know_of_it(total: int, ours: int, theirs: int) -> None:
    mine, others = split(ours, total), split(theirs, total)
    from_here = {(rank, other) for rank in range(ours) for other in links(mine, rank, others)}
    from_there = {(rank, other) for other in range(theirs) for rank in links(others, other, mine)}
    assert from_here == from_there
    assert readers(others, mine) == sum(len(reads(mine, rank, others)) for rank in range(ours))


def test_the_readers_of_one_head_spread_over_its_replicas() -> None:
    """Two heads on eight ranks, read by eight ranks that are numbered alike, and by four."""
    eight, four = split(8, 2), split(4, 2)
    assert [list(reads(eight, rank, eight)) for rank in range(8)] == [[i] for i in range(8)]
    assert [list(reads(four, rank, eight)) for rank in range(4)] == [[0], [2], [4], [6]]
    assert [list(reads(eight, rank, four)) for rank in range(8)] == [
        [0], [0], [1], [1], [2], [2], [3], [3]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "ours", "theirs", "expected"),
    [
        # One rank with all four heads reads from two with two each, and the other way.
        (0, 1, 2, {0: HeadSlice(0, 0, 2, 4, 2), 1: HeadSlice(2, 0, 2, 4, 2)}),
        (1, 2, 1, {0: HeadSlice(0, 2, 2, 2, 4)}),
        # Two of our ranks share one of theirs.
        (3, 4, 2, {1: HeadSlice(0, 1, 1, 1, 2)}),
        # More ranks than heads: each rank's one head.
        (5, 8, 1, {0: HeadSlice(0, 2, 1, 1, 4)}),
        (0, 1, 8, {i: HeadSlice(i // 2, 0, 1, 4, 1) for i in (0, 2, 4, 6)}),
    ],
)
def test_splits_of_four_heads(
    rank: int, ours: int, theirs: int, expected: dict[int, HeadSlice]
) -> None:
    assert reads(split(ours, 4), rank, split(theirs, 4)) == expected


def test_equal_splits_read_whole_pages() -> None:
    part = reads(split(2, 4), 1, split(2, 4))
    assert list(part) == [1]
    assert part[1].whole
    assert WHOLE.whole
    assert not HeadSlice(0, 0, 1, 1, 2).whole


def test_pages_that_cannot_be_taken_apart_go_to_the_same_rank_only() -> None:
    opaque = [Heads(0, 0)] * 2
    assert same_split(opaque, split(2, 4))
    assert list(reads(opaque, 1, opaque)) == [1]
    with pytest.raises(ValueError, match="only equal splits"):
        reads(opaque, 0, split(4, 4))
    with pytest.raises(ValueError, match="only equal splits"):
        readers(split(1, 4), opaque)


def test_a_head_that_nobody_has_is_named() -> None:
    with pytest.raises(ValueError, match="KV head 2 lies on none"):
        reads([Heads(0, 4)], 0, [Heads(0, 2), Heads(0, 2)])


@pytest.mark.parametrize(("ranks", "total"), [(3, 4), (4, 6), (0, 2), (2, 0)])
def test_heads_that_ranks_cannot_share_are_refused(ranks: int, total: int) -> None:
    with pytest.raises(ValueError, match="one must be"):
        heads_of_rank(0, ranks, total)
