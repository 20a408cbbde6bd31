"""Parts of top's picture: curves, bars, short lists, each line no longer than it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from kvshuttle.cli import human
from kvshuttle.cli.pool import shares
from kvshuttle.cli.reasons import reason
from kvshuttle.cli.top.sample import TOKEN_WINDOW_S, Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDE = 116
"""From so many columns on, what flows stands side by side in boxes."""
PANEL_LINES = 4
RETURNED, LOCAL, COMPUTED = "#57ab5a", "#4e9af1", "#d29922"
RETURN_STYLE, FORWARD_STYLE = RETURNED, "#8b949e"
_TICKS = "▁▂▃▄▅▆▇█"


def panel(title: str, lines: list[Text]) -> Panel:
    """A box around lines."""
    lines += [Text()] * (PANEL_LINES - len(lines))
    return Panel(
        Group(*lines[:PANEL_LINES]),
        title=Text(title, style="bold #c9d1d9"),
        title_align="left",
        border_style="#444c56",
        padding=(0, 1),
    )


def rule(title: str, width: int) -> Text:
    """A line that begins a part."""
    text = Text.assemble(("── ", "#444c56"), (title, "bold"), " ")
    text.append("─" * max(0, width - text.cell_len), style="#444c56")
    return text


def moved(frame: Frame, width: int) -> list[Text]:
    """Curves and figures of what moves."""
    lines = []
    for name, rate, series, style in (
        ("return", frame.return_bytes_per_s, frame.return_series, RETURN_STYLE),
        ("forward", frame.forward_bytes_per_s, frame.forward_series, FORWARD_STYLE),
    ):
        label = Text(f"{name:<8}", style="dim")
        value = Text(f"{human.gigabytes(rate):>10}", style="bold")
        total = frame.return_bytes if name == "return" else frame.forward_bytes
        tail = Text(f"  {human.size(total):>8} in all", style="dim")
        if width < WIDE // 2:
            tail = Text("")
        room = width - label.cell_len - value.cell_len - tail.cell_len - 1
        lines.append(
            label.append_text(sparkline(series, room, style)).append(" ").append_text(value) + tail
        )
    lines.append(
        Text.assemble(
            (f"{frame.transfers_per_s:.1f}", "bold"),
            (" transfers/s", "dim"),
        )
    )
    lines.append(
        Text(
            f"{human.size(frame.return_bytes)} returned, {human.size(frame.forward_bytes)} "
            "forwarded in all",
            style="dim",
        )
    )
    return [cut(line, width) for line in lines]


def sparkline(series: Sequence[float], width: int, style: str) -> Text:
    """The newest values to the right, scaled by the largest that is shown."""
    width = max(0, width)
    shown = list(series)[-width:] if width else []
    top = max(shown, default=0.0)
    text = Text(" " * (width - len(shown)))
    for value in shown:
        tick = _TICKS[round(value / top * (len(_TICKS) - 1))] if top and value else "▁"
        text.append(tick, style=style if value else "#30363d")
    return text


def tokens(frame: Frame, width: int) -> list[Text]:
    """Where prompts' tokens came from, now and ever."""
    lines = []
    for label, tokens in ((f"{TOKEN_WINDOW_S:.0f} s", frame.tokens), ("ever", frame.tokens_ever)):
        whole = sum(tokens.values())
        line = Text(f"{label:<6}", style="dim")
        count = Text(f" {human.short(whole):>6}", style="bold")
        room = width - line.cell_len - count.cell_len
        if whole:
            cells = shares(tuple(tokens.values()), room)
            for number, style in zip(cells, (RETURNED, LOCAL, COMPUTED), strict=True):
                line.append("█" * number, style=style)
        else:
            line.append("·" * room, style="#30363d")
        lines.append(line.append_text(count))
    shown = frame.tokens if sum(frame.tokens.values()) else frame.tokens_ever
    whole = sum(shown.values())
    key = Text()
    for name, style in (("returned", RETURNED), ("local", LOCAL), ("computed", COMPUTED)):
        key.append("█ ", style=style)
        key.append(f"{name} ", style="dim").append(human.share(shown[name], whole), style="bold")
        key.append("  ")
    lines.insert(1, cut(key, width))
    return lines


def leases(frame: Frame, width: int, lines: int) -> list[Text]:
    """Open leases by state, then failures, in so many lines."""
    line = Text()
    for direction in ("return", "forward"):
        states = [
            (state, frame.leases[direction, state])
            for state in ("pending", "granted", "active")
            if frame.leases.get((direction, state))
        ]
        line.append(f"{direction} ", style="dim")
        if not states:
            line.append("none ", style="dim")
        for state, number in states:
            line.append(f"{number} ", style="bold").append_text(human.state(state)).append(" ")
        line.append("  ")
    if frame.sample.more_leases:
        line.append("and more", style="dim")
    found = [cut(line, width)]
    for name, number, recent in frame.failures[: lines - 1]:
        new = f" +{recent}" if recent else ""
        style = "dim" if reason(name).fine or not recent else "red"
        text = Text(f"{name} ", style=style).append(human.count(number), style="bold")
        text.append(f"{new}", style="bold red" if recent and not reason(name).fine else "dim")
        text.append(f"  {reason(name).meaning}", style="dim")
        found.append(cut(text, width))
    if len(frame.failures) > lines - 1:
        rest = sum(number for _, number, _ in frame.failures[lines - 1 :])
        tail = (
            f"  +{human.count(rest)} others" if lines > 1 else f"  {human.count(rest)} recomputed"
        )
        found[-1] = cut(found[-1], width - len(tail)).append(tail, style="dim")
    if not frame.failures:
        found.append(Text("no leg recomputed that hoped for a transfer", style="dim"))
    return found


def ends(left: Text, right: Text, width: int) -> Text:
    """Two texts at the two ends of a line."""
    room = width - left.cell_len - right.cell_len
    if room < 1:
        left = left.copy()
        left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
        room = width - left.cell_len - right.cell_len
    return left.append(" " * room).append_text(right)


def cut(text: Text, width: int) -> Text:
    """A text that is no longer than it may be."""
    text = text.copy()
    text.truncate(max(0, width), overflow="ellipsis")
    return text
