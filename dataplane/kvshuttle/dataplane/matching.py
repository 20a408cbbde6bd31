"""Which of the blocks on offer a request may use: those whose hashes it computes itself."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["common_prefix", "split_hashes"]


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


def split_hashes(joined: bytes, hash_size: int) -> list[bytes]:
    """Undoes the concatenation of ``BlockDescriptors.hashes``.

    Raises ``ValueError`` where the length is no multiple of ``hash_size``.
    """
    if hash_size <= 0 or len(joined) % hash_size:
        raise ValueError(f"hashes: {len(joined)} bytes are no multiple of hash_size {hash_size}")
    return [joined[i : i + hash_size] for i in range(0, len(joined), hash_size)]
