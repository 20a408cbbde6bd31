"""What this boot of the engine has counted; goes out with every heartbeat."""

from __future__ import annotations

from collections import Counter

from kvshuttle.v1 import cluster_service_pb2 as cluster_pb2

__all__ = ["Counters"]


class Counters:
    """Written by the scheduler thread, read by the link's; single words, so no lock is needed."""

    def __init__(self) -> None:
        self._transfers = 0
        self._forward_bytes = 0
        self._return_bytes = 0
        self._forward_tokens = 0
        self._returned_tokens = 0
        self._computed_tokens = 0
        self._local_hit_tokens = 0
        self._eager_tokens = 0
        self._pushed_tokens = 0
        self._fallbacks: Counter[str] = Counter()

    def transfer(
        self,
        *,
        is_return: bool,
        bytes_moved: int,
        tokens: int,
        eager: bool = False,
        pushed: bool = False,
    ) -> None:
        """A transfer was published; `eager`: no request waited for it; `pushed`: it was written to
        us."""
        self._transfers += 1
        if is_return:
            self._return_bytes += bytes_moved
            self._returned_tokens += tokens
            self._eager_tokens += tokens if eager else 0
        else:
            self._forward_bytes += bytes_moved
            self._forward_tokens += tokens
            self._pushed_tokens += tokens if pushed else 0

    def fallback(self, reason: str) -> None:
        """A leg recomputes although a transfer was hoped for."""
        self._fallbacks[reason] += 1

    def leg(self, *, computed: int, local_hit: int) -> None:
        """A leg's prompt was computed; tokens."""
        self._computed_tokens += computed
        self._local_hit_tokens += local_hit

    def snapshot(self) -> cluster_pb2.WorkerCounters:
        """As a message."""
        return cluster_pb2.WorkerCounters(
            transfers_completed=self._transfers,
            forward_bytes=self._forward_bytes,
            return_bytes=self._return_bytes,
            forward_tokens=self._forward_tokens,
            returned_tokens=self._returned_tokens,
            computed_tokens=self._computed_tokens,
            local_hit_tokens=self._local_hit_tokens,
            eager_tokens=self._eager_tokens,
            pushed_tokens=self._pushed_tokens,
            fallbacks=dict(self._fallbacks),
        )
