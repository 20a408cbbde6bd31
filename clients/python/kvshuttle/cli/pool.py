"""A worker's block pool as a bar: held, in use, quarantined, free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from kvshuttle.v1 import cluster_service_pb2 as cluster_pb

HELD, USED, QUARANTINED, FREE = "#4e9af1", "#7d8597", "#e5534b", "#3a3f4b"
_FULL = "▆"
_FREE = "░"


def parts(pool: cluster_pb.PoolStats) -> tuple[int, int, int, int]:
    """Blocks: held (without quarantine), used by running requests, quarantined, free.

    Held blocks may be shared with requests, and quarantine is a kind of hold: the parts are cut so
    that they make up the whole.
    """
    total = pool.total_blocks
    free = min(pool.free_blocks, total)
    quarantined = min(pool.quarantined_blocks, total - free)
    held = min(max(0, pool.held_blocks - pool.quarantined_blocks), total - free - quarantined)
    return held, total - free - quarantined - held, quarantined, free


def bar(pool: cluster_pb.PoolStats, width: int) -> Text:
    """The bar. What is not nothing gets a cell, however small its share: quarantine above all."""
    total = pool.total_blocks
    if not total or width < 4:
        return Text("·" * max(0, width), style="dim")
    held, used, quarantined, free = parts(pool)
    cells = shares((held, used, quarantined, free), width)
    text = Text()
    for count, style in zip(cells, (HELD, USED, QUARANTINED, FREE), strict=True):
        text.append((_FULL if style != FREE else _FREE) * count, style=style)
    return text


def shares(values: tuple[int, ...], width: int) -> list[int]:
    """Cells for each value, together `width`; at least one for each that is not zero."""
    total = sum(values)
    if not total:
        return [0] * len(values)
    cells = [max(1, round(width * value / total)) if value else 0 for value in values]
    while sum(cells) != width:
        step = 1 if sum(cells) < width else -1
        # Whoever has most can give, and shows least of what it gets.
        widest = max(range(len(cells)), key=lambda i: cells[i])
        cells[widest] += step
    return cells


def legend() -> Text:
    """What the bar's colours mean."""
    text = Text()
    for name, style, mark in (
        ("held", HELD, _FULL),
        ("in use", USED, _FULL),
        ("quarantined", QUARANTINED, _FULL),
        ("free", FREE, _FREE),
    ):
        text.append(mark + " ", style=style)
        text.append(name + "  ", style="dim")
    text.rstrip()
    return text
