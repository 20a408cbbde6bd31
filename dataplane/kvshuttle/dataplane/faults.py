"""Faults planted by a test or by the demo; all off unless the engine's configuration says so.

They exist so that the oracles can be shown to fail: an oracle that cannot fail proves nothing.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshuttle.dataplane.holds import BlockStore, Hold, HoldTable
from kvshuttle.dataplane.log import get_logger

if TYPE_CHECKING:
    from kvshuttle.dataplane.messages import Await, Read
    from kvshuttle.dataplane.transport import LocalRegion

__all__ = ["Faults", "LeakyHolds"]

_log = get_logger("faults")


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose in this engine. Keys carry the prefix ``fault_``."""

    corrupt_returned_block: bool = False
    """Overwrites the first block of every return after it was read and confirmed."""

    corrupt_pushed_block: bool = False
    """Overwrites the first block of every landing zone once it was written."""

    stall_pushes: bool = False
    """Every write stays in flight for ever, as seen by the mover."""

    delay_layer_s: float = 0.0
    """Seconds that a layer's write waits before it is posted: time to kill somebody."""

    delay_read_s: float = 0.0
    """Seconds between a read's order and its posting: time to kill somebody."""

    stall_reads: bool = False
    """Every read stays in flight for ever, as seen by the mover."""

    keep_hold: str = ""
    """Holds of this kind (`HoldKind`) are not let go: whoever ends one goes on as if it were."""

    lose_references: str = ""
    """Holds of this kind end, but one reference to each of their blocks stays: nothing counts it
    any more, and the blocks are missing from the pool."""

    file: str = ""
    """JSON file with any of the others, read anew for every read while it exists, and whenever a
    hold ends."""

    @classmethod
    def from_config(cls, extra: Mapping[str, Any]) -> Faults:
        """Reads the ``fault_*`` keys; raises ``TypeError`` for an unknown one."""
        planted = {
            key.removeprefix("fault_"): value
            for key, value in extra.items()
            if key.startswith("fault_")
        }
        faults = cls(**planted)
        if faults != cls():
            _log.warning("faults_planted", faults=str(faults))
        return faults

    def now(self) -> Faults:
        """These faults, with those of the file."""
        if not self.file:
            return self
        try:
            found = json.loads(Path(self.file).read_text())
        except (OSError, ValueError):
            return self
        names = {f.name for f in fields(self)}
        return Faults(**{k: v for k, v in found.items() if k in names})

    def before_read(self, order: Read) -> None:
        """Called just before a read is posted."""
        if self.delay_read_s:
            _log.warning("fault_delay", lease=order.lease_id, seconds=self.delay_read_s)
            time.sleep(self.delay_read_s)

    def after_read(self, order: Read, regions: list[LocalRegion]) -> None:
        """Called when a read is about to be published."""
        if self.corrupt_returned_block and order.is_return:
            self._corrupt(order.lease_id, order.local_block_ids[0], regions)

    def before_write(self, lease_id: str) -> None:
        """Called just before a write is posted."""
        if self.delay_layer_s:
            _log.warning("fault_delay", lease=lease_id, seconds=self.delay_layer_s)
            time.sleep(self.delay_layer_s)

    def after_push(self, order: Await, regions: list[LocalRegion]) -> None:
        """Called when a landing zone is about to be published."""
        if self.corrupt_pushed_block:
            self._corrupt(order.lease_id, order.local_block_ids[0], regions)

    @staticmethod
    def _corrupt(lease_id: str, block: int, regions: list[LocalRegion]) -> None:
        _log.warning("fault_corrupt", lease=lease_id, block=block)
        for region in regions:
            if region.memory_type == "DRAM":
                # 0x3f3f is 0.75 in bfloat16: a plausible value, in the wrong place.
                ctypes.memset(region.base + block * region.block_bytes, 0x3F, region.block_bytes)


class LeakyHolds(HoldTable):
    """The table of holds with the two defects that leak blocks, for as long as they are planted;
    what has leaked is given back with the first hold that ends after. Scheduler thread only."""

    def __init__(self, store: BlockStore, faults: Faults) -> None:
        super().__init__(store)
        self._faults = faults
        self._kept: list[tuple[Hold, Callable[[int], None] | None]] = []
        self._lost: list[tuple[int, ...]] = []

    def release(self, hold: Hold, on_reuse: Callable[[int], None] | None = None) -> None:
        """Ends a hold, or fails to."""
        planted = self._faults.now()
        if not hold.ended and hold.kind.value == planted.keep_hold:
            _log.warning("fault_keep_hold", kind=hold.kind.value, blocks=len(hold.block_ids))
            self._kept.append((hold, on_reuse))
            return
        if not hold.ended and hold.kind.value == planted.lose_references:
            _log.warning("fault_lose_references", blocks=len(hold.block_ids))
            self._store.touch(hold.block_ids)
            self._lost.append(hold.block_ids)
        super().release(hold, on_reuse)
        if not planted.keep_hold:
            while self._kept:
                super().release(*self._kept.pop())
        if not planted.lose_references:
            while self._lost:
                self._store.free(self._lost.pop())
