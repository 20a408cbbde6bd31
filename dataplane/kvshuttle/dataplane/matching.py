"""Which of the blocks on offer a request may use: those whose hashes it computes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Tail", "TailHash", "common_prefix", "laid_out_as", "partial_tokens", "split_hashes"]

TailHash = Callable[[int, int], bytes | None]
"""Of a request: (full blocks before, tokens) to the hash of a full block of just these tokens, as
the engine would compute it; None where the request has not so many."""


@dataclass(frozen=True)
class Tail:
    """A last block of which only the first ``tokens`` are written: 1 to a block's tokens less one.
    ``hash`` is its `TailHash`."""

    block_id: int
    tokens: int
    hash: bytes

    def same_tokens(self, other: Tail) -> bool:
        """Whether both are written with the same KV, wherever they lie."""
        return (self.tokens, self.hash) == (other.tokens, other.hash)


def partial_tokens(
    own: Sequence[bytes],
    num_tokens: int,
    block_size: int,
    end: int,
    offered_next: bytes | None,
    tail: Tail | None,
    tail_hash: TailHash | None,
) -> int:
    """How many tokens a request of ``num_tokens`` may use of the block behind ``end`` equal ones.

    ``offered_next`` is that block's hash where it is offered as a full one, of which the request's
    last token is computed all the same; else it may be the offer's ``tail``. A block counts only
    where the request's own hash over all tokens that are written in it is equal; never a token
    count alone, and never a part of what differs further on.
    """
    left = min(num_tokens - 1 - end * block_size, block_size - 1)
    if left <= 0:
        return 0
    if offered_next is not None:
        return left if end < len(own) and own[end] == offered_next else 0
    if tail is None or tail_hash is None or not 0 < tail.tokens < block_size:
        return 0
    if tail_hash(end, tail.tokens) != tail.hash:
        return 0
    return min(tail.tokens, left)


def common_prefix(own: Sequence[bytes], offered: Sequence[bytes]) -> int:
    """Number of leading hashes that are equal.

    A block hash covers everything before it, so the *last* equal position would be enough; the scan
    from the front costs microseconds and does not lean on that.
    """
    n = min(len(own), len(offered))
    for i in range(n):
        if own[i] != offered[i]:
            return i
    return n


def laid_out_as(remote: Sequence[int], local: Sequence[int]) -> list[int]:
    """Of these local blocks, which one is to have the KV of which remote one, so that as many
    neighbours as can be stay neighbours: each run of them is one piece of memory to move."""
    order = sorted(range(len(remote)), key=remote.__getitem__)
    found = [0] * len(remote)
    for index, block_id in zip(order, sorted(local), strict=True):
        found[index] = block_id
    return found


def split_hashes(joined: bytes, hash_size: int) -> list[bytes]:
    """Undoes the concatenation of ``BlockDescriptors.hashes``.

    Raises ``ValueError`` where the length is no multiple of ``hash_size``.
    """
    if hash_size <= 0 or len(joined) % hash_size:
        raise ValueError(f"hashes: {len(joined)} bytes are no multiple of hash_size {hash_size}")
    return [joined[i : i + hash_size] for i in range(0, len(joined), hash_size)]
