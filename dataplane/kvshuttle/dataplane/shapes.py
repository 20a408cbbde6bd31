"""Which part of a block lies on which tensor-parallel rank, and who reads what from whom.

Tensor parallelism splits a layer's KV by heads. Where a block's page in a rank's memory has its
heads outermost, what a rank keeps of a block is one run of bytes, head by head, and the heads that
two ranks share are one run in both pages. So two workers need not be split alike: a rank reads from
each rank of the other worker the heads that both of them keep.

With more ranks than heads, vLLM keeps each head on several ranks (replicas). A reader takes it from
one of them, and readers of one head spread over its replicas.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvshuttle.dataplane.messages import HeadSlice

__all__ = ["Heads", "heads_of_rank", "links", "readers", "reads", "same_split"]


@dataclass(frozen=True, order=True)
class Heads:
    """The KV heads ``[first, first + count)`` of a model that a rank keeps. ``count`` 0: the rank's
    page cannot be taken apart by heads, so it is exchanged whole with the same rank's."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """One past the last."""
        return self.first + self.count


def heads_of_rank(rank: int, ranks: int, total: int) -> Heads:
    """What vLLM keeps on a rank, of ``total`` KV heads over ``ranks`` ranks.

    Raises ``ValueError`` where neither number is a multiple of the other: vLLM starts no such
    engine.
    """
    if ranks <= 0 or total <= 0 or (total % ranks and ranks % total):
        raise ValueError(
            f"{total} KV heads cannot be split over {ranks} tensor-parallel ranks: one must be a "
            "multiple of the other"
        )
    if ranks <= total:
        count = total // ranks
        return Heads(rank * count, count)
    return Heads(rank // (ranks // total), 1)


def same_split(ours: Sequence[Heads], theirs: Sequence[Heads]) -> bool:
    """Whether rank i of both keeps the same heads. Of pages that cannot be taken apart, and of a
    worker that does not say what it keeps, equal numbers of ranks are taken for it."""
    known = all(x.count for x in (*ours, *theirs))
    return list(ours) == list(theirs) if known else len(ours) == len(theirs)


def reads(ours: Sequence[Heads], rank: int, theirs: Sequence[Heads]) -> dict[int, HeadSlice]:
    """What rank ``rank`` of ours reads, by the rank of theirs that it reads it from.

    The slices cover our rank's heads, each head once. Raises ``ValueError`` where that cannot be:
    theirs lack a head, or one of both cannot be taken apart and the splits are not the same.
    """
    if same_split(ours, theirs):
        heads = max(1, ours[rank].count)
        return {rank: HeadSlice(0, 0, heads, heads, heads)}
    mine = ours[rank]
    if not all(x.count for x in (*ours, *theirs)):
        raise ValueError(
            f"{len(ours)} and {len(theirs)} tensor-parallel ranks, and heads that are not "
            "outermost in a block: only equal splits can be exchanged"
        )
    found: dict[int, HeadSlice] = {}
    at = mine.first
    while at < mine.end:
        holders = [i for i, x in enumerate(theirs) if x.first <= at < x.end]
        if not holders:
            raise ValueError(f"KV head {at} lies on none of the other worker's {len(theirs)} ranks")
        # Those of us who want this head take turns over those who have it.
        wanting = [i for i, x in enumerate(ours) if x.first <= at < x.end]
        chosen = holders[wanting.index(rank) * len(holders) // len(wanting)]
        their = theirs[chosen]
        end = min(mine.end, their.end)
        found[chosen] = HeadSlice(
            at - mine.first, at - their.first, end - at, mine.count, their.count
        )
        at = end
    return found


def readers(ours: Sequence[Heads], theirs: Sequence[Heads]) -> int:
    """How many reads of theirs one transfer from us is: (rank, rank) pairs. Raises as `reads`."""
    return sum(len(reads(theirs, rank, ours)) for rank in range(len(theirs)))


def links(ours: Sequence[Heads], rank: int, theirs: Sequence[Heads]) -> dict[int, HeadSlice | None]:
    """The ranks of theirs that our rank has to reach, with what it reads there; None: it only
    answers that one. Raises as `reads`."""
    found: dict[int, HeadSlice | None] = dict(reads(ours, rank, theirs))
    for other in range(len(theirs)):
        if rank in reads(theirs, other, ours):
            found.setdefault(other, None)
    return found
