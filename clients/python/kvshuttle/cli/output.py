"""Prints answers: tables that fit the terminal, or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

GAP = 2
# Wide enough for every table: what reads a pipe must find all columns, each on one line.
PIPE_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class Column:
    """One column. Where a terminal is too narrow, the column with the lowest `keep` goes first."""

    title: str
    right: bool = False
    keep: int = 100


@dataclass(slots=True)
class Rows:
    """A table in the making."""

    columns: Sequence[Column]
    rows: list[Sequence[str | Text]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        """One row, a cell for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def fitting(self, width: int) -> tuple[list[int], list[str]]:
        """The indexes of the columns that fit, and the titles of those that do not."""
        widths = [
            max([cell_len(column.title), *(_length(row[i]) for row in self.rows)])
            for i, column in enumerate(self.columns)
        ]
        shown = list(range(len(self.columns)))
        hidden: list[str] = []
        while len(shown) > 1 and sum(widths[i] + GAP for i in shown) - GAP > width:
            gone = min(shown, key=lambda i: self.columns[i].keep)
            shown.remove(gone)
            hidden.append(self.columns[gone].title)
        return shown, hidden

    def render(self, width: int) -> tuple[Table, list[str]]:
        """The table for a width, and what was left out."""
        shown, hidden = self.fitting(width)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold dim")
        for i in shown:
            column = self.columns[i]
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in self.rows:
            table.add_row(*(row[i] for i in shown))
        return table, hidden


def _length(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


def literal(text: str) -> Text:
    """Text as it is: ids are chosen by clients and may look like markup."""
    return Text(text)


class PipeClosedError(Exception):
    """Whoever read our output has enough of it."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the process here, in the middle of whatever runs."""
        raise PipeClosedError


class Printer:
    """Where a command's answer goes. With `as_json`, one document on stdout and nothing else."""

    def __init__(self, *, as_json: bool, color: bool | None = None) -> None:
        self.as_json = as_json
        terminal = sys.stdout.isatty()
        self.console = _Console(
            width=None if terminal else PIPE_WIDTH,
            no_color=None if color is None else not color,
            force_terminal=True if color else None,
            highlight=False,
            markup=False,
            soft_wrap=False,
        )
        self.notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    @property
    def width(self) -> int:
        """Columns to print in."""
        return self.console.width

    def document(self, data: Mapping[str, Any]) -> None:
        """The answer as JSON."""
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def line_document(self, data: Mapping[str, Any]) -> None:
        """One of many, on a line of its own, at once."""
        sys.stdout.write(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n")
        sys.stdout.flush()

    def rows(self, rows: Rows, *, empty: str, indent: int = 0) -> None:
        """A table, or a line that says why there is none."""
        if not rows.rows:
            self.line(Text(" " * indent + empty, style="dim"))
            return
        table, hidden = rows.render(self.width - indent)
        self.print(_indented(table, indent))
        if hidden:
            titles = ", ".join(reversed(hidden))
            self.line(
                Text(" " * indent + f"not shown for want of width: {titles}", style="dim"),
                wrap=True,
            )

    def print(self, what: RenderableType) -> None:
        """Anything."""
        self.console.print(what)

    def line(self, text: str | Text = "", *, wrap: bool = True) -> None:
        """One line; long ones are wrapped at words on a terminal."""
        self.console.print(text, soft_wrap=not wrap)

    def note(self, text: str) -> None:
        """For people, beside the answer: to stderr."""
        self.notes.print(Text(text, style="dim"))


def _indented(table: Table, indent: int) -> RenderableType:
    if not indent:
        return table
    from rich.padding import Padding

    return Padding(table, (0, 0, 0, indent), expand=False)
