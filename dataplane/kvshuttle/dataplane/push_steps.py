"""What a forward pass has filled so far: the one thing that two threads of a rank share.

vLLM's worker thread says which layers are final; the mover's thread asks how far that goes. The
worker thread never waits: it appends to a queue and wakes the mover.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvshuttle.dataplane.messages import PushChunk
from kvshuttle.dataplane.transport import LocalRegion

__all__ = ["Fence", "PushStep", "region_ends"]

Fence = Callable[[], bool] | None
"""Whether what was queued on the device before has run; None: it has."""


def region_ends(regions: Sequence[LocalRegion]) -> dict[str, tuple[int, int]]:
    """Which regions are a layer's: first, and one past the last."""
    ends: dict[str, tuple[int, int]] = {}
    for index, region in enumerate(regions):
        layer = region.layer.split("/")[0]
        first, _ = ends.get(layer, (index, index))
        ends[layer] = (first, index + 1)
    return ends


class PushStep:
    """One step of the engine and the chunks that it computes. `layer_final` and `all_final` are
    called by vLLM's worker thread, the rest by the mover's."""

    def __init__(self, chunks: Sequence[PushChunk], regions: int) -> None:
        self.chunks = tuple(chunks)
        self._regions = regions
        self._said: deque[tuple[int, int, Fence]] = deque()
        # Of the mover's thread: regions that are final without a gap, and those beyond one.
        self._final = 0
        self._beyond: dict[int, int] = {}

    def layer_final(self, first: int, end: int, fence: Fence = None) -> None:
        """A layer's regions are filled, as soon as the device comes so far."""
        self._said.append((first, end, fence))

    def all_final(self, fence: Fence = None) -> None:
        """The forward pass is over, hooks or no hooks."""
        self._said.append((0, self._regions, fence))

    def final(self) -> int:
        """Regions that may be written, counted from the first one."""
        while self._said:
            first, end, fence = self._said[0]
            if fence is not None and not fence():
                break
            self._said.popleft()
            self._beyond[first] = max(end, self._beyond.get(first, 0))
        while True:
            end = max((e for f, e in self._beyond.items() if f <= self._final < e), default=0)
            if not end:
                return self._final
            self._final = end
            self._beyond = {f: e for f, e in self._beyond.items() if e > end}

    @property
    def waiting(self) -> bool:
        """Whether the device must be asked again."""
        return bool(self._said)
