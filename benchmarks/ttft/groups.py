"""Which arms run side by side: as many as memory allows, so that noise hits them all."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from benchmarks.ttft.arms import ArmKind
from kvshuttle.localstack import Engine

__all__ = ["RESERVE_BYTES", "available_bytes", "plan_groups", "used_bytes"]

# Left to the rest of the machine, and to raw NIXL's two ends, of 1.4 GB each (`raw_nixl.SLOTS`
# stretches for returns of 90 MB), which are there while a group's engines are.
RESERVE_BYTES = 5 << 30


def available_bytes() -> int:
    """What programs may still take without swapping."""
    return int(psutil.virtual_memory().available)


def used_bytes(engine: Engine) -> int:
    """What an engine's processes have to themselves."""
    return sum(int(psutil.Process(pid).memory_full_info().uss) for pid in engine.pids())


def plan_groups(
    kinds: Sequence[ArmKind], engine_bytes: int, available: int, reserve: int = RESERVE_BYTES
) -> list[list[ArmKind]]:
    """Groups of arms that fit together beside the plain engine, which runs already and stays.

    `kinds` are in order of importance and stay so; an arm that does not fit in what is left of a
    group opens the next one. An arm that does not even fit alone gets a group of its own: it is
    tried.
    """
    groups: list[list[ArmKind]] = []
    room = 0
    for kind in kinds:
        need = kind.engines * engine_bytes
        if not groups or need > room:
            groups.append([])
            room = available - reserve
        groups[-1].append(kind)
        room -= need
    return groups
