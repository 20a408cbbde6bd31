"""How a frame looks in so many columns: the same on a terminal and in a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvshuttle.cli import human
from kvshuttle.cli.commands.cluster import connected
from kvshuttle.cli.commands.leases import route, wait_s, way
from kvshuttle.cli.output import GAP, Column, Rows, literal
from kvshuttle.cli.pool import bar, legend
from kvshuttle.cli.shape import seconds, word
from kvshuttle.cli.top import parts
from kvshuttle.cli.top.sample import Frame, WorkerLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

# With fewer lines, what flows is told in five.
LOW = 20
_POOL_LEAST, _POOL_MOST = 10, 42
_SILENT_S = 2.5

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
    first = parts.ends(left, right, width)
    if trouble:
        return Text("\n").join([first, parts.cut(Text(trouble, style="bold red"), width)])
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
    return Text("\n").join([first, parts.cut(second, width)])


def flow_lines(width: int, height: int) -> int:
    """How many lines `flow` has."""
    return parts.PANEL_LINES + 2 if width >= parts.WIDE else 8 if height >= LOW else 5


def flow(frame: Frame, width: int, height: int = 50) -> RenderableType:
    """What moves, where prompts' tokens come from, open leases, failures: in `flow_lines`."""
    if width >= parts.WIDE:
        inner = (width - 2) // 3 - 4
        grid = Table.grid(expand=True, padding=0)
        for _ in range(3):
            grid.add_column(ratio=1)
        grid.add_row(
            parts.panel("KV moved", parts.moved(frame, inner)),
            parts.panel("Prompt tokens", parts.tokens(frame, inner)),
            parts.panel("Open leases, failures", parts.leases(frame, inner, parts.PANEL_LINES)),
        )
        return grid
    moved, tokens = parts.moved(frame, width)[:2], parts.tokens(frame, width)[:2]
    title = f"KV moved, {frame.transfers_per_s:.1f} transfers/s"
    if height < LOW:
        return Group(
            parts.rule(title, width), *moved, tokens[0], *parts.leases(frame, width, 1)[:1]
        )
    leases = parts.leases(frame, width, 2)
    return Group(
        parts.rule(title, width),
        *moved,
        parts.rule("Prompt tokens, open leases, failures", width),
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


def snapshot(frame: Frame, target: str, width: int) -> RenderableType:
    """Everything at once, for a pipe."""
    return Group(
        head(frame, target, width),
        flow(frame, width),
        parts.rule("Workers", width),
        workers(frame, width),
        legend(),
        parts.rule("Leases that ended last", width),
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
        alive = connected(worker)
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
            str(pool.running_requests) if alive else human.NONE,
            Text(str(pool.waiting_requests), style="yellow" if pool.waiting_requests else "dim")
            if alive
            else human.NONE,
            str(pool.open_leases) if alive else human.NONE,
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
