"""How a frame looks in so many columns: the same on a terminal and in a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvshuttle.cli import human
from kvshuttle.cli.commands.leases import route, wait_s, way
from kvshuttle.cli.output import GAP, Column, Rows, literal
from kvshuttle.cli.pool import bar, legend, shares
from kvshuttle.cli.reasons import reason
from kvshuttle.cli.shape import seconds, word
from kvshuttle.cli.top.sample import TOKEN_WINDOW_S, Frame, WorkerLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

WIDE = 116
LOW = 20
RETURNED, LOCAL, COMPUTED = "#57ab5a", "#4e9af1", "#d29922"
RETURN_STYLE, FORWARD_STYLE = RETURNED, "#8b949e"
_TICKS = "▁▂▃▄▅▆▇█"
_POOL_LEAST, _POOL_MOST = 10, 42
_SILENT_S = 2.5
_PANEL_LINES = 4

_Key = Callable[[WorkerLine], float | str]


@dataclass(frozen=True, slots=True)
class Sort:
    """An order of the workers; `title` is the column that shows it."""

    name: str
    title: str
    key: _Key
    descending: bool = True


SORTS: Sequence[Sort] = (
    Sort("id", "WORKER", lambda one: one.worker.ref.worker_id, descending=False),
    Sort("free", "FREE", lambda one: _part(one, "free_blocks"), descending=False),
    Sort("held", "HELD", lambda one: _part(one, "held_blocks")),
    Sort("quarantine", "QUAR", lambda one: _part(one, "quarantined_blocks")),
    Sort("running", "RUN", lambda one: one.worker.pool.running_requests),
    Sort("waiting", "WAIT", lambda one: one.worker.pool.waiting_requests),
    Sort("speed", "SPEED", lambda one: one.bytes_per_s),
    Sort("heard", "HEARD", lambda one: one.heard_s),
)


def _part(one: WorkerLine, field: str) -> float:
    pool = one.worker.pool
    return float(getattr(pool, field)) / pool.total_blocks if pool.total_blocks else 0.0


def ordered(frame: Frame, sort: Sort, *, reverse: bool) -> list[WorkerLine]:
    """The workers in an order; equal ones by id."""
    lines = sorted(frame.workers, key=lambda one: one.worker.ref.worker_id)
    return sorted(lines, key=sort.key, reverse=sort.descending != reverse)


def head(frame: Frame, target: str, width: int, *, note: str = "", trouble: str = "") -> Text:
    """Two lines: which control plane, and how much there is of everything."""
    status = frame.sample.status
    left = Text.assemble(
        ("kvshuttle ", "bold"),
        (target, "bold cyan"),
        (f"  {status.version}  epoch {status.epoch}  up {human.span(seconds(status.uptime))}", ""),
    )
    right = Text(f"{frame.sample.time.astimezone():%H:%M:%S}", style="dim")
    if note:
        right = Text.assemble((f"{note}  ", "bold yellow"), right)
    first = _ends(left, right, width)
    if trouble:
        return Text("\n").join([first, _cut(Text(trouble, style="bold red"), width)])
    states: dict[str, int] = {}
    for one in frame.workers:
        name = word(one.worker, "state")
        states[name] = states.get(name, 0) + 1
    second = Text("workers ", style="dim")
    for name in ("ready", "draining", "lost", "fenced"):
        if states.get(name) or name == "ready":
            number = states.get(name, 0)
            style = human.STATE_STYLES[name] if number else "bold red"
            second.append(f"{number} {name} ", style=style)
    for name, number in (
        ("sessions", status.active_sessions),
        ("turns", status.running_turns),
        ("open leases", status.open_leases),
    ):
        second.append(f"  {name} ", style="dim").append(human.count(number), style="bold")
    return Text("\n").join([first, _cut(second, width)])


def flow_lines(width: int, height: int) -> int:
    """How many lines `flow` has."""
    return _PANEL_LINES + 2 if width >= WIDE else 8 if height >= LOW else 5


def flow(frame: Frame, width: int, height: int = 50) -> RenderableType:
    """What moves, where prompts' tokens come from, open leases, failures: in `flow_lines`."""
    if width >= WIDE:
        inner = (width - 2) // 3 - 4
        grid = Table.grid(expand=True, padding=0)
        for _ in range(3):
            grid.add_column(ratio=1)
        grid.add_row(
            _panel("KV moved", _moved(frame, inner)),
            _panel("Prompt tokens", _tokens(frame, inner)),
            _panel("Open leases, failures", _leases(frame, inner, _PANEL_LINES)),
        )
        return grid
    moved, tokens = _moved(frame, width)[:2], _tokens(frame, width)[:2]
    title = f"KV moved, {frame.transfers_per_s:.1f} transfers/s"
    if height < LOW:
        return Group(_rule(title, width), *moved, tokens[0], *_leases(frame, width, 1)[:1])
    leases = _leases(frame, width, 2)
    return Group(
        _rule(title, width),
        *moved,
        _rule("Prompt tokens, open leases, failures", width),
        *tokens,
        *leases[:2],
    )


def workers(
    frame: Frame, width: int, sort: Sort = SORTS[0], *, reverse: bool = False
) -> RenderableType:
    """The table of workers, as wide as there is room."""
    lines = ordered(frame, sort, reverse=reverse)
    if not lines:
        return Text("no workers: start an engine with the agent in it", style="dim")
    rows = _rows(lines, sort, reverse=reverse, pool_width=_POOL_LEAST)
    shown, _ = rows.fitting(width)
    used = sum(
        max(len(rows.columns[i].title), *(_width(row[i]) for row in rows.rows)) + GAP for i in shown
    )
    spare = max(0, width - used + GAP)
    rows = _rows(lines, sort, reverse=reverse, pool_width=min(_POOL_MOST, _POOL_LEAST + spare))
    return rows.render(width)[0]


def recent(frame: Frame, width: int) -> RenderableType:
    """Leases that ended last, as transfers."""
    rows = Rows(
        [
            Column("ENDED", keep=90),
            Column("SESSION"),
            Column("TURN", right=True, keep=70),
            Column("DIRECTION", keep=88),
            Column("FROM → TO", keep=82),
            Column("STATE", keep=93),
            Column("REASON", keep=89),
            Column("TOKENS", right=True, keep=80),
            Column("BYTES", right=True, keep=60),
            Column("SPEED", right=True, keep=84),
            Column("WAIT", right=True, keep=72),
        ]
    )
    for one in frame.sample.ended:
        stats = one.stats
        wait = wait_s(one)
        rows.add(
            Text(human.clock_time(one.end_time), style="dim"),
            literal(one.session_id),
            str(one.turn),
            way(one),
            route(one.source.worker_id, one.destination.worker_id),
            human.state(word(one, "state")),
            literal(one.end_reason),
            human.count(stats.tokens) if stats.tokens else human.NONE,
            human.size(stats.bytes) if stats.bytes else human.NONE,
            human.throughput(stats.bytes, seconds(stats.transfer_time)),
            human.span(wait) if wait else human.NONE,
        )
    if not rows.rows:
        return Text("none in the last ten minutes", style="dim")
    return rows.render(width)[0]


def rule(title: str, width: int) -> Text:
    """A line that begins a part."""
    return _rule(title, width)


def snapshot(frame: Frame, target: str, width: int) -> RenderableType:
    """Everything at once, for a pipe."""
    return Group(
        head(frame, target, width),
        flow(frame, width),
        _rule("Workers", width),
        workers(frame, width),
        legend(),
        _rule("Leases that ended last", width),
        recent(frame, width),
    )


def _width(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else len(cell)


def _rows(lines: Sequence[WorkerLine], sort: Sort, *, reverse: bool, pool_width: int) -> Rows:
    def column(title: str, *, right: bool = True, keep: int = 100) -> Column:
        if title == sort.title:
            # What is sorted by stays to be seen.
            arrow = "▼" if sort.descending != reverse else "▲"
            return Column(title + arrow, right=right, keep=98)
        return Column(title, right=right, keep=keep)

    rows = Rows(
        [
            column("WORKER", right=False),
            column("ROLE", right=False, keep=55),
            column("STATE", right=False, keep=96),
            column("POOL", right=False, keep=95),
            column("FREE", keep=90),
            column("HELD", keep=60),
            column("QUAR", keep=85),
            column("RUN", keep=94),
            column("WAIT", keep=93),
            column("LEASES", keep=50),
            column("XFER/S", keep=80),
            column("SPEED", keep=88),
            column("TOK/S", keep=45),
            column("HEARD", keep=70),
        ]
    )
    for one in lines:
        worker, pool = one.worker, one.worker.pool
        alive = word(worker, "state") in ("ready", "draining")
        heard_style = "red" if alive and one.heard_s > _SILENT_S else "dim"
        quarantined = human.share(pool.quarantined_blocks, pool.total_blocks)
        rows.add(
            Text(worker.ref.worker_id, style="bold" if alive else "dim"),
            word(worker, "role"),
            human.state(word(worker, "state")),
            bar(pool, pool_width),
            human.share(pool.free_blocks, pool.total_blocks),
            human.share(pool.held_blocks, pool.total_blocks),
            Text(quarantined, style="red" if pool.quarantined_blocks else "dim"),
            str(pool.running_requests),
            Text(str(pool.waiting_requests), style="yellow" if pool.waiting_requests else "dim"),
            str(pool.open_leases),
            f"{one.transfers_per_s:.1f}",
            human.gigabytes(one.bytes_per_s) if one.bytes_per_s else Text("-", style="dim"),
            human.short(worker.prefill_tokens_per_second)
            if worker.prefill_tokens_per_second
            else Text("-", style="dim"),
            Text(_ago(one.heard_s), style=heard_style),
        )
    return rows


def _ago(age_s: float) -> str:
    return f"{age_s:.0f} s" if age_s < 100 else human.span(age_s)


def _panel(title: str, lines: list[Text]) -> Panel:
    lines += [Text()] * (_PANEL_LINES - len(lines))
    return Panel(
        Group(*lines[:_PANEL_LINES]),
        title=Text(title, style="bold #c9d1d9"),
        title_align="left",
        border_style="#444c56",
        padding=(0, 1),
    )


def _rule(title: str, width: int) -> Text:
    text = Text.assemble(("── ", "#444c56"), (title, "bold"), " ")
    text.append("─" * max(0, width - text.cell_len), style="#444c56")
    return text


def _moved(frame: Frame, width: int) -> list[Text]:
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
    return [_cut(line, width) for line in lines]


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


def _tokens(frame: Frame, width: int) -> list[Text]:
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
    lines.insert(1, _cut(key, width))
    return lines


def _leases(frame: Frame, width: int, lines: int) -> list[Text]:
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
    found = [_cut(line, width)]
    for name, number, recent in frame.failures[: lines - 1]:
        new = f" +{recent}" if recent else ""
        style = "dim" if reason(name).fine or not recent else "red"
        text = Text(f"{name} ", style=style).append(human.count(number), style="bold")
        text.append(f"{new}", style="bold red" if recent and not reason(name).fine else "dim")
        text.append(f"  {reason(name).meaning}", style="dim")
        found.append(_cut(text, width))
    if len(frame.failures) > lines - 1:
        rest = sum(number for _, number, _ in frame.failures[lines - 1 :])
        found[-1] = _cut(found[-1], width - 10 - len(human.count(rest)))
        found[-1].append(f"  +{human.count(rest)} others", style="dim")
    if not frame.failures:
        found.append(Text("no leg recomputed that hoped for a transfer", style="dim"))
    return found


def _ends(left: Text, right: Text, width: int) -> Text:
    room = width - left.cell_len - right.cell_len
    if room < 1:
        left = left.copy()
        left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
        room = width - left.cell_len - right.cell_len
    return left.append(" " * room).append_text(right)


def _cut(text: Text, width: int) -> Text:
    text = text.copy()
    text.truncate(max(0, width), overflow="ellipsis")
    return text
