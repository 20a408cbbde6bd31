"""How a worker's KV is split over its tensor-parallel ranks, and which workers can exchange it.

A rank keeps some of the model's KV heads. Where a block can be taken apart by heads, workers that
are split otherwise read from each other head by head; else only equal splits can be exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.errors import UnsupportedError

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.reports import Hello
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["check", "check_pair", "same"]

HEADS_FIELD = "kv_heads"
"""The field of a fingerprint that tells how many KV heads the model has."""


def check(says: Hello) -> None:
    """Raises UnsupportedError unless the ranks keep what vLLM's split of the heads gives them."""
    if not _by_heads(says.heads):
        return
    told = dict(says.fingerprint).get(HEADS_FIELD, "")
    total = int(told) if told.isascii() and told.isdecimal() else 0
    ranks = len(says.heads)
    if total <= 0 or (total % ranks and ranks % total):
        raise UnsupportedError(
            f"worker {says.worker_id} has {told or 'no number of'} KV heads over {ranks} ranks: "
            "one must be a multiple of the other. Start the engine with another "
            "--tensor-parallel-size",
            what=HEADS_FIELD,
            kv_heads=total,
            ranks=ranks,
            worker_id=says.worker_id,
        )
    for rank, (first, count) in enumerate(says.heads):
        share = max(1, total // ranks)
        expected = (rank * share if ranks <= total else rank // (ranks // total), share)
        if (first, count) != expected:
            raise UnsupportedError(
                f"rank {rank} of worker {says.worker_id} keeps {count} KV heads from {first} on, "
                f"and of {total} over {ranks} ranks it should be {expected[1]} from {expected[0]} "
                "on: is the agent's version the control plane's?",
                what=HEADS_FIELD,
                rank=rank,
                worker_id=says.worker_id,
            )


def check_pair(says: Hello, other: Worker) -> None:
    """Raises UnsupportedError where the two cannot exchange blocks."""
    if says.num_ranks == other.num_ranks or (_by_heads(says.heads) and _by_heads(other.heads)):
        return
    raise UnsupportedError(
        f"worker {says.worker_id} has {says.num_ranks} ranks, worker {other.ref.worker_id} has "
        f"{other.num_ranks}, and their blocks cannot be taken apart by heads: start both with the "
        "same tensor-parallel size, or with a KV cache layout whose heads are outermost in a block "
        "(HND)",
        what="ranks",
        ours=other.num_ranks,
        theirs=says.num_ranks,
    )


def same(one: Worker, other: Worker) -> bool:
    """Whether rank i of both keeps the same part of each block."""
    return one.num_ranks == other.num_ranks


def _by_heads(heads: tuple[tuple[int, int], ...]) -> bool:
    return bool(heads) and all(count for _, count in heads)
