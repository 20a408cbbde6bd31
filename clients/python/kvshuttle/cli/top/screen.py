"""The live view: keys, the loop that reads, and where each part stands on the screen."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from kvshuttle.cli import human
from kvshuttle.cli.pool import legend
from kvshuttle.cli.top import parts, view
from kvshuttle.cli.top.sample import Frame, History, Sample, take
from kvshuttle.client import KVShuttleError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from textual.binding import BindingType

    from kvshuttle.client import AsyncClient

_HEAD_LINES, _FOOTER_LINES = 2, 1
INTERVALS_S = (0.5, 1.0, 2.0, 5.0, 10.0)

_HELP = """[b]Keys[/b]
  q              quit
  s, S           sort by the next column, by the one before
  r              the other way round
  p, space       hold the picture, and go on
  +, -           read more often, more rarely
  ↑ ↓ PgUp PgDn  scroll the workers
  ?              this; any key closes it

[b]What it shows[/b]
  KV moved       bytes a second, counted by NIXL; one column of the curve a reading
  Prompt tokens  of prefill, in the last 30 s and since the engines started:
                 returned while the request waited, found in prefill's own cache
                 (what was brought ahead of the request among it), computed
  Failures       legs that recomputed although a transfer was hoped for;
                 a red +n is new in the last 30 s. kvshuttle explain SESSION says more
  Pools          """


class _Help(ModalScreen[None]):
    """What the keys do."""

    CSS = """
    _Help { align: center middle; }
    #help { width: auto; max-width: 100%; height: auto; max-height: 100%; padding: 1 2;
            border: round $primary; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        """One box."""
        yield Static(Text.from_markup(_HELP).append_text(legend()), id="help")

    def on_key(self) -> None:
        """Any key."""
        self.dismiss()


class TopApp(App[None]):
    """Reads at an interval and draws. A control plane that goes away is told of, and waited for."""

    CSS = """
    Screen { background: $background; overflow: hidden; }
    #head { height: auto; padding: 0 1; }
    #flow { height: auto; padding: 0 1; }
    #workers { height: auto; padding: 0 1; scrollbar-size-vertical: 1; }
    #table { height: auto; width: 1fr; }
    #recent { height: 1fr; padding: 0 1; overflow: hidden; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", "reverse"),
        Binding("p,space", "pause", "pause"),
        Binding("plus,equals_sign", "faster", "faster"),
        Binding("minus", "slower", "slower"),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown", "scroll(10)", show=False),
        Binding("question_mark", "help", "keys"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self,
        client: AsyncClient,
        target: str,
        first: Sample,
        interval_s: float,
        read: Callable[[AsyncClient], Awaitable[Sample]] = take,
    ) -> None:
        super().__init__()
        self.theme = "textual-dark"
        self._client = client
        self._target = target
        self._read = read
        self._history = History()
        self._frame: Frame = self._history.add(first)
        self._interval_s = interval_s
        self._sort = 0
        self._reverse = False
        self._paused = False
        self._trouble = ""
        self._answered_s = time.monotonic()
        self._again = asyncio.Event()
        self._mounted = False

    def compose(self) -> ComposeResult:
        """Head, what flows, workers, keys."""
        yield Static(id="head")
        yield Static(id="flow")
        with VerticalScroll(id="workers", can_focus=False):
            yield Static(id="table")
        yield Static(id="recent")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begins to read."""
        self._mounted = True
        self._draw()
        self.run_worker(self._read_forever(), exit_on_error=True)

    def on_resize(self) -> None:
        """The same in another width."""
        self._draw()

    async def _read_forever(self) -> None:
        while True:
            self._again.clear()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._again.wait()
            except TimeoutError:
                pass
            if self._paused:
                continue
            try:
                sample = await self._read(self._client)
            except KVShuttleError as error:
                silent = human.span(round(time.monotonic() - self._answered_s))
                self._trouble = (
                    f"no answer for {silent} ({error.code.name.lower()}); what is shown is old; "
                    "trying again"
                )
            else:
                self._answered_s = time.monotonic()
                self._trouble = ""
                if not self._paused:
                    self._frame = self._history.add(sample)
            self._draw()

    def _draw(self) -> None:
        if not self._mounted:
            return
        width, height = max(20, self.size.width - 2), self.size.height
        # Head, footer and what flows have their lines; of the rest the workers get what they need,
        # but for a few lines where there are many to share.
        rest = max(2, height - _HEAD_LINES - _FOOTER_LINES - view.flow_lines(width, height))
        self.query_one("#workers").styles.max_height = rest if rest < 12 else rest - rest // 3
        note = "PAUSED" if self._paused else f"every {self._interval_s:g} s"
        sort = view.SORTS[self._sort]
        self.query_one("#head", Static).update(
            view.head(self._frame, self._target, width, note=note, trouble=self._trouble)
        )
        self.query_one("#flow", Static).update(view.flow(self._frame, width, height))
        self.query_one("#table", Static).update(
            view.workers(self._frame, width - 1, sort, reverse=self._reverse)
        )

        self.query_one("#recent", Static).update(
            Group(parts.rule("Leases that ended last", width), view.recent(self._frame, width))
        )

    def action_sort(self, step: int) -> None:
        """By the next column."""
        self._sort = (self._sort + step) % len(view.SORTS)
        self._draw()

    def action_reverse(self) -> None:
        """The other way round."""
        self._reverse = not self._reverse
        self._draw()

    def action_pause(self) -> None:
        """Holds the picture, or goes on at once."""
        self._paused = not self._paused
        self._draw()
        if not self._paused:
            self._again.set()

    def action_faster(self) -> None:
        """The next shorter interval."""
        shorter = [one for one in INTERVALS_S if one < self._interval_s]
        self._interval_s = shorter[-1] if shorter else self._interval_s
        self._again.set()

    def action_slower(self) -> None:
        """The next longer interval."""
        self._interval_s = next(
            (one for one in INTERVALS_S if one > self._interval_s), self._interval_s
        )
        self._draw()

    def action_scroll(self, lines: int) -> None:
        """The workers up or down."""
        self.query_one("#workers", VerticalScroll).scroll_relative(y=lines, animate=False)

    def action_help(self) -> None:
        """What the keys do."""
        self.push_screen(_Help())
