"""Faults planted by a test or by the demo; all off unless the engine's configuration says so.

They exist so that the oracles can be shown to fail: an oracle that cannot fail proves nothing.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshuttle.dataplane.log import get_logger

if TYPE_CHECKING:
    from kvshuttle.dataplane.messages import Read
    from kvshuttle.dataplane.transport import LocalRegion

__all__ = ["Faults"]

_log = get_logger("faults")


@dataclass(frozen=True)
class Faults:
    """What goes wrong on purpose in this engine. Keys carry the prefix ``fault_``."""

    corrupt_returned_block: bool = False
    """Overwrites the first block of every return after it was read and confirmed."""

    delay_read_s: float = 0.0
    """Seconds between a read's order and its posting: time to kill somebody."""

    stall_reads: bool = False
    """Every read stays in flight for ever, as seen by the mover."""

    file: str = ""
    """JSON file with any of the others, read anew for every read while it exists."""

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
        if not (self.corrupt_returned_block and order.is_return):
            return
        block = order.local_block_ids[0]
        _log.warning("fault_corrupt", lease=order.lease_id, block=block)
        for region in regions:
            if region.memory_type == "DRAM":
                # 0x3f3f is 0.75 in bfloat16: a plausible value, in the wrong place.
                ctypes.memset(region.base + block * region.block_bytes, 0x3F, region.block_bytes)
