"""How the demo looks: progress while programs start, then the conversation and its table."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvshuttle.localstack import user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.demo.cluster import DemoCluster
    from kvshuttle.demo.measure import TurnResult
    from kvshuttle.localstack import ManagedProcess

WIDTH = 100
_ROLES = {
    "controlplane": "control plane",
    "prefill-0": "vLLM, computes prompts (no prefix cache)",
    "decode-0": "vLLM, generates",
    "plain": "vLLM without kvshuttle, to compare with",
    "gateway": "OpenAI API",
}


def make_console() -> Console:
    """Full width in a terminal, up to 100 columns; 100 columns without one."""
    console = Console(highlight=False)
    if not console.is_terminal:
        return Console(width=WIDTH, highlight=False)
    return Console(width=min(console.width, WIDTH), highlight=False)


def title(console: Console) -> None:
    """Says what will be shown."""
    console.print()
    console.print(Text.assemble(("kvshuttle", "bold cyan"), "  one conversation, two engines"))
    console.print(
        "Each turn resends the whole conversation. Prefill has none of it cached: with the return "
        "it reads from decode what decode still holds, and computes the new tokens only.",
        style="dim",
    )
    console.print()


class StartProgress:
    """The programs and where each stands. Lines instead of a live table without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cluster: DemoCluster | None = None
        self._phases: dict[str, str] = {}
        self._took: dict[str, float] = {}
        self._spinners: dict[str, Spinner] = {}
        self._start = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> StartProgress:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._console.print()

    def show(self, cluster: DemoCluster) -> None:
        """Which programs there will be."""
        self._cluster = cluster

    def update(self, process: ManagedProcess, phase: str) -> None:
        """A program got further."""
        name = process.name
        self._phases[name] = phase
        if phase == "ready":
            self._took[name] = process.age_s
            if self._live is None:
                self._console.print(f"  {name:<13} ready after {process.age_s:.0f} s")
        elif phase == "starting" and self._live is None:
            self._console.print(f"  {name:<13} starting: {_ROLES.get(name, '')}")

    def registering(self) -> None:
        """The engines serve; their agents meet the control plane."""
        if self._cluster is not None:
            self._phases[self._cluster.gateway.name] = "waiting for the engines' agents"

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for process in self._cluster.processes if self._cluster else []:
            phase = self._phases.get(process.name)
            seconds = ""
            mark: Text | Spinner
            if phase == "ready":
                mark = Text("✓", style="green")
                seconds = f"{self._took[process.name]:.0f} s"
            elif phase is None:
                mark = Text("·", style="dim")
                phase = "waits"
            else:
                mark = self._spinners.setdefault(process.name, Spinner("dots", style="cyan"))
                if process.running:
                    seconds = f"{process.age_s:.0f} s"
            table.add_row(
                Text(" ") if isinstance(mark, str) else mark,
                Text(process.name, style="bold"),
                Text(_ROLES.get(process.name, ""), style="dim"),
                Text(phase, style="green" if phase == "ready" else ""),
                Text(seconds, style="dim"),
            )
        return table


class TurnTable:
    """The conversation scrolls by, its table stays below."""

    def __init__(self, console: Console, turns: int) -> None:
        self._console = console
        self._turns = turns
        self._results: list[TurnResult] = []
        self._live: Live | None = None
        self._spinner = Spinner("dots", style="cyan")

    def __enter__(self) -> TurnTable:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._live_view, console=self._console, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._console.print(self.table(self._results))

    def add(self, result: TurnResult) -> None:
        """One more turn."""
        self._results.append(result)
        talk = Table.grid(padding=(0, 1))
        talk.add_column(style="dim")
        talk.add_column()
        talk.add_row("you", Text(f"… {result.question}", style="bold"))
        talk.add_row("model", " ".join(result.text.split()))
        for difference in result.differences:
            talk.add_row("", Text(difference, style="red"))
        self._console.print(talk)
        self._console.print()

    def _live_view(self) -> Group:
        parts: list[Table | Spinner] = [self.table(self._results)]
        if len(self._results) < self._turns:
            self._spinner.update(text=f"turn {len(self._results) + 1} of {self._turns}")
            parts.append(self._spinner)
        return Group(*parts)

    @staticmethod
    def table(results: Sequence[TurnResult]) -> Table:
        """Turn by turn, in at most 80 columns."""
        table = Table(
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold"
        )
        for header in (
            "turn",
            "prompt\ntokens",
            "returned",
            "computed",
            "bytes\nreturned",
            "first\ntoken\nwith",
            "first\ntoken\nwithout",
            "ratio",
            "same\nas\nplain",
        ):
            table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
        for r in results:
            table.add_row(
                str(r.turn),
                f"{r.prompt_tokens:,}",
                Text(f"{r.returned_tokens:,}", style="cyan" if r.returned_tokens else "dim"),
                f"{r.recomputed_tokens:,}",
                _megabytes(r.returned_bytes),
                f"{r.ttft_with_s * 1e3:,.0f} ms",
                f"{r.ttft_without_s * 1e3:,.0f} ms",
                Text(f"{r.ratio:.2f}", style="bold green" if r.ratio < 0.9 else ""),
                Text("yes", style="green") if r.identical else Text("NO", style="bold red"),
            )
        return table


def _megabytes(count: int) -> str:
    if count >= 100_000_000:
        return f"{count / 1e6:,.0f} MB"
    return f"{count / 1e6:,.1f} MB" if count else "–"


def verdict(console: Console, summary: dict[str, object], problems: Sequence[str]) -> None:
    """One sentence, or what is wrong."""
    if problems:
        console.print(Text("The demo has failed:", style="bold red"))
        for problem in problems:
            console.print(Text(f"  {problem}", style="red"))
        return
    console.print(
        Text.assemble(
            ("✓ ", "bold green"),
            "Every answer is the plain engine's. A turn in the middle: ",
            (f"{summary['returned_tokens']:,} tokens returned", "cyan"),
            f", {summary['recomputed_tokens']:,} computed.",
        )
    )


def operators_program() -> str:
    """The operator's program as a shell can start it here: the one beside this Python."""
    beside = Path(sys.executable).with_name("kvshuttle")
    if not beside.exists():
        return f"{sys.executable} -m kvshuttle.cli"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def part_ended(console: Console, process: ManagedProcess) -> None:
    """A program has died while the demo was kept running."""
    said = f"\n  {process.name} has ended by itself; the rest goes on. The end of its log:"
    console.print(said, style="red")
    console.print(Text(process.tail()), soft_wrap=True)


def keep_running(console: Console, cluster: DemoCluster, model: str) -> None:
    """Where everything is and how to chat."""
    body = json.dumps({"model": model, "messages": [user("Why is the sea salty?")]})
    lines = [
        ("OpenAI API", cluster.gateway.url + "/v1"),
        ("control plane", f"{cluster.control_plane.target} (gRPC, kvshuttle.v1)"),
        ("prefill engine", cluster.prefill.url),
        ("decode engine", cluster.decode.url),
        ("plain engine", cluster.plain.url),
        ("see it move", f"{operators_program()} --target {cluster.control_plane.target} top"),
        (
            "in each terminal",
            f"export KVSHUTTLE_TARGET={cluster.control_plane.target} GATEWAY={cluster.gateway.url}",
        ),
        ("logs", str(cluster.control_plane.log_path.parent)),
    ]
    console.print()
    for name, value in lines:
        console.print(Text(f"  {name:<17}", style="bold") + Text(value), soft_wrap=True)
    console.print("\n  Chat; send the whole conversation again with every turn:", style="dim")
    console.print(
        Text(
            f"  curl {cluster.gateway.url}/v1/chat/completions \\\n"
            f"    -H 'Content-Type: application/json' -H 'X-Session-ID: mine' \\\n"
            f"    -d '{body}'"
        ),
        soft_wrap=True,
    )
    console.print("\n  Ctrl-C ends everything.", style="dim")
