"""What this agent did with blocks under leases: one log line a step, at level debug.

Off unless ``KVSHUTTLE_LOG_LEVEL=debug``: a line for each lease and each allocation is for whoever
looks into one run, or checks it afterwards (the tests do, after every end-to-end run). Each line
has the instant on this machine's clock, which its processes share, and blocks by number; none has
a prompt, a token or a turn token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.dataplane.log import get_logger

__all__ = ["enabled", "landing_held", "landing_let_go", "note", "ranges"]

_log = get_logger("journal")


def enabled() -> bool:
    """Whether anything is written."""
    return bool(_log.is_enabled_for(logging.DEBUG))


def note(event: str, *, blocks: Iterable[int] = (), **ids: Any) -> None:
    """One step. `blocks` are those of this engine."""
    if enabled():
        _log.debug(event, at=boottime_ns(), blocks=ranges(blocks), **ids)


def landing_held(lease_id: str, read: str, source: tuple[str, int], blocks: Iterable[int]) -> None:
    """Blocks wait for what is read, or written, under a lease. `read` is a name for it, a request's
    for most; `source` is (worker, incarnation)."""
    note(
        "landing_held",
        blocks=blocks,
        lease=lease_id,
        read=read,
        source=source[0],
        source_incarnation=source[1],
    )


def landing_let_go(lease_id: str, read: str, reason: str = "") -> None:
    """Nothing lands there any more."""
    note("landing_let_go", lease=lease_id, read=read, reason=reason)


def ranges(blocks: Iterable[int]) -> str:
    """Numbers in few characters: ``3-5,9``, in their order."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
