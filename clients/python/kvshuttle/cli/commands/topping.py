"""`top`: a live view on a terminal, one snapshot on a pipe."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from kvshuttle.cli import exits
from kvshuttle.cli.options import Command, Seconds
from kvshuttle.cli.run import connect, pass_options
from kvshuttle.cli.shape import iso, shape

if TYPE_CHECKING:
    from kvshuttle.cli.options import Options
    from kvshuttle.cli.top.sample import Frame

SNAPSHOT_COLUMNS = 120


@click.command("top", cls=Command)
@click.option(
    "--interval",
    type=Seconds(min=0.1, max=3_600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to read.",
)
@click.option("--once", is_flag=True, help="One snapshot, as on a pipe.")
@pass_options
def top(options: Options, interval: float, once: bool) -> int:
    """Watch workers, pools, transfers and hit rates live.

    Keys: q quits, s sorts by the next column, r turns it round, p pauses, + and - change how often
    it reads, ? explains. On a pipe or with -o json it prints one snapshot, after an interval for
    the rates.
    """
    live = sys.stdout.isatty() and sys.stdin.isatty() and options.output == "table" and not once
    if live:
        asyncio.run(_live(options, interval))
        return exits.OK
    frame = asyncio.run(_snapshot(options, interval))
    printer = options.printer()
    if printer.as_json:
        printer.document(_document(options.target, frame))
        return exits.OK
    from kvshuttle.cli.top import view

    width = int(os.environ.get("COLUMNS", "0") or 0) or SNAPSHOT_COLUMNS
    if sys.stdout.isatty():
        width = printer.width
    printer.console.width = width
    printer.print(view.snapshot(frame, options.target, width))
    return exits.OK


async def _live(options: Options, interval_s: float) -> None:
    from kvshuttle.cli.top.sample import take
    from kvshuttle.cli.top.screen import TopApp

    async with connect(options) as client:
        # What is wrong from the start is told as by every other command.
        first = await take(client)
        await TopApp(client, options.target, first, interval_s).run_async()


async def _snapshot(options: Options, interval_s: float) -> Frame:
    from kvshuttle.cli.top.sample import History, take

    history = History()
    async with connect(options) as client:
        history.add(await take(client))
        await asyncio.sleep(interval_s)
        return history.add(await take(client))


def _document(target: str, frame: Frame) -> dict[str, Any]:
    return {
        "time": iso(frame.sample.time),
        "target": target,
        "status": shape(frame.sample.status),
        "transfers_per_s": frame.transfers_per_s,
        "return_bytes_per_s": frame.return_bytes_per_s,
        "forward_bytes_per_s": frame.forward_bytes_per_s,
        "prompt_tokens": frame.tokens_ever,
        "open_leases": {
            f"{direction}_{state}": number
            for (direction, state), number in sorted(frame.leases.items())
        },
        "fallbacks": {name: number for name, number, _ in frame.failures},
        "workers": [
            shape(one.worker)
            | {
                "heard_s": one.heard_s,
                "transfers_per_s": one.transfers_per_s,
                "bytes_per_s": one.bytes_per_s,
            }
            for one in frame.workers
        ],
    }
