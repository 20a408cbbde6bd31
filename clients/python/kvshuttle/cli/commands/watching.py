"""`watch`: every change of sessions and leases, a line each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from kvshuttle.cli import exits, human
from kvshuttle.cli.completing import complete_sessions
from kvshuttle.cli.options import Command, Seconds
from kvshuttle.cli.run import connect, pass_options
from kvshuttle.cli.shape import iso, seconds, shape, word
from kvshuttle.client import OutOfRangeError, UnavailableError
from kvshuttle.v1 import lease_service_pb2 as lease_pb
from kvshuttle.v1 import session_service_pb2 as session_pb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvshuttle.cli.options import Options
    from kvshuttle.cli.output import Printer
    from kvshuttle.client import AsyncClient

KINDS = ("sessions", "leases")
_Piece = session_pb.WatchSessionsResponse | lease_pb.WatchLeasesResponse
_Item = session_pb.Session | session_pb.SessionRemoved | lease_pb.Lease | lease_pb.LeaseRemoved

# A control plane that restarts is back within seconds; a watch that waited longer than ten between
# its tries would miss the first changes only to read them again.
RETRY_FIRST_S = 0.2
RETRY_MOST_S = 10.0


class _EnoughError(Exception):
    """As many changes as were asked for."""


@dataclass(slots=True)
class _Watch:
    """What both streams share."""

    options: Options
    printer: Printer
    session_id: str
    snapshot: bool
    left: int
    """Changes to print yet; below zero: any number."""
    tokens: dict[str, str] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    """Kinds of which a snapshot has come."""

    def resume(self) -> str:
        """Where a later watch goes on."""
        return ",".join(f"{kind}:{token}" for kind, token in self.tokens.items())

    def show(self, kind: str, event: str, item: _Item) -> None:
        """One line. Raises _EnoughError after the last that was wanted."""
        if self.printer.as_json:
            self.printer.line_document(
                {
                    "time": iso(human.now()),
                    "kind": kind.removesuffix("s"),
                    "event": event,
                    "resume": self.resume(),
                    kind.removesuffix("s"): shape(item),
                }
            )
        else:
            self.printer.line(_line(event, item), wrap=False)
            self.printer.console.file.flush()
        if event != "snapshot" and self.left > 0:
            self.left -= 1
            if not self.left:
                raise _EnoughError


def _line(event: str, item: _Item) -> Text:
    text = Text()
    text.append(f"{human.now().astimezone():%H:%M:%S} ", style="dim")
    text.append("= " if event == "snapshot" else "  ", style="dim")
    if isinstance(item, lease_pb.Lease):
        _lease_line(text, item)
    elif isinstance(item, lease_pb.LeaseRemoved):
        text.append(f"lease   {item.lease_id} is no longer listed", style="dim")
    elif isinstance(item, session_pb.SessionRemoved):
        text.append(f"session {item.session_id} is no longer listed", style="dim")
    else:
        _session_line(text, item)
    return text


def _lease_line(text: Text, item: lease_pb.Lease) -> None:
    text.append("lease   ")
    text.append(f"{item.session_id} turn {item.turn}  ", style="bold")
    text.append(f"{'eager' if item.eager else word(item, 'direction'):<7} ")
    text.append(f"{item.source.worker_id} → {item.destination.worker_id}  ")
    text.append_text(human.state(word(item, "state")))
    if item.end_reason:
        text.append(f" {item.end_reason}")
    blocks = item.stats.blocks or (item.range.end - item.range.start)
    if blocks:
        text.append(f"  {human.count(blocks)} blocks")
    if item.stats.bytes:
        took = seconds(item.stats.transfer_time)
        text.append(
            f", {human.size(item.stats.bytes)} in {human.span(took)} "
            f"({human.throughput(item.stats.bytes, took)})"
        )
    text.append(f"  {item.lease_id}", style="dim")


def _session_line(text: Text, item: session_pb.Session) -> None:
    text.append("session ")
    text.append(f"{item.session_id}  ", style="bold")
    text.append_text(human.state(word(item, "state")))
    for turn in item.turns:
        if turn.state == session_pb.TURN_STATE_RUNNING:
            text.append(f"  turn {turn.turn} ")
            text.append_text(human.state("running"))
            text.append(f" {word(turn.plan, 'return_mode')} {turn.plan.reason}")
        elif turn == item.turns[-1]:
            text.append(f"  turn {turn.turn} ")
            text.append_text(human.state(word(turn, "outcome")))
            if turn.usage.prompt_tokens:
                share = human.share(turn.usage.cached_tokens, turn.usage.prompt_tokens)
                text.append(f", {share} cached")
    held = {one.worker.worker_id: one for one in item.replicas}
    if held:
        text.append("  KV at ", style="dim")
        text.append(
            ", ".join(f"{name} {human.count(held[name].num_tokens)}" for name in sorted(held)),
            style="dim",
        )


def _parse_resume(value: str, kinds: tuple[str, ...]) -> dict[str, str]:
    """`sessions:TOKEN,leases:TOKEN`, or one token for all. UsageError."""
    tokens: dict[str, str] = {}
    for part in filter(None, value.split(",")):
        kind, colon, token = part.rpartition(":")
        if colon and kind not in KINDS:
            raise click.UsageError(
                f"--resume: {part!r}: give what a watch printed, as sessions:TOKEN,leases:TOKEN"
            )
        for name in [kind] if colon else kinds:
            tokens[name] = token
    return {name: token for name, token in tokens.items() if name in kinds}


@click.command("watch", cls=Command)
@click.argument("kind", type=click.Choice([*KINDS, "all"]), default="all")
@click.option(
    "--session",
    "session_id",
    default="",
    metavar="ID",
    shell_complete=complete_sessions,
    help="Only this session.",
)
@click.option("--resume", default="", metavar="TOKENS", help="Go on where a watch before ended.")
@click.option("--no-snapshot", is_flag=True, help="Do not print what there is at the start.")
@click.option(
    "--count", type=click.IntRange(min=0), default=0, help="End after so many changes; 0: never."
)
@click.option(
    "--for",
    "duration",
    type=Seconds(min=0),
    default=0.0,
    metavar="SECONDS",
    help="End after so long; 0: never.",
)
@pass_options
def watch(
    options: Options,
    kind: str,
    session_id: str,
    resume: str,
    no_snapshot: bool,
    count: int,
    duration: float,
) -> int:
    """Follow sessions and leases: a line for each change, as it happens.

    Lines that begin with = are the state at the start. When the connection breaks, the watch goes
    on by itself where it was; after Ctrl-C it prints the --resume with which a later one goes on.
    With -o json each line is one JSON object.
    """
    kinds = KINDS if kind == "all" else (kind,)
    state = _Watch(
        options,
        options.printer(),
        session_id,
        not no_snapshot,
        count or -1,
        _parse_resume(resume, kinds),
    )

    async def run() -> None:
        async with (
            connect(options) as client,
            asyncio.timeout(duration or None),
            asyncio.TaskGroup() as group,
        ):
            for name in kinds:
                group.create_task(_follow(state, name, client))

    try:
        asyncio.run(run())
    except* _EnoughError:
        pass
    except* TimeoutError:
        pass
    except* KeyboardInterrupt:
        pass
    finally:
        if state.resume():
            state.printer.note(f"go on with --resume {state.resume()}")
    return exits.OK


async def _follow(state: _Watch, kind: str, client: AsyncClient) -> None:
    """One stream, for ever. Raises what makes it senseless to try again."""
    pause = RETRY_FIRST_S
    connected = False
    while True:
        try:
            async for piece in _pieces(state, kind, client):
                if not connected:
                    connected, pause = True, RETRY_FIRST_S
                _take(state, kind, piece)
        except OutOfRangeError:
            # The snapshot that comes next says so, if it is not what was asked for anyway.
            state.tokens.pop(kind, None)
            state.begun.add(kind)
            continue
        except UnavailableError as error:
            # Before anything was heard, it is the address or the options that are wrong.
            if not connected and not state.tokens.get(kind):
                raise
            state.printer.note(f"{kind}: the connection broke ({error.message}); trying again")
        # The stream ended without an error: the control plane stops.
        connected = False if kind not in state.tokens else connected
        await asyncio.sleep(pause)
        pause = min(pause * 2, RETRY_MOST_S)


def _pieces(state: _Watch, kind: str, client: AsyncClient) -> AsyncGenerator[Any, None]:
    start = client.watch_sessions if kind == "sessions" else client.watch_leases
    return start(session_id=state.session_id, resume_token=state.tokens.get(kind, ""))


def _take(state: _Watch, kind: str, piece: _Piece) -> None:
    event = piece.WhichOneof("event")
    if piece.resume_token:
        state.tokens[kind] = piece.resume_token
    if event == "snapshot":
        again = piece.snapshot.first and kind in state.begun
        state.begun.add(kind)
        if again:
            state.printer.note(f"{kind}: some changes were missed; here is the state as it is")
        if state.snapshot or again:
            items: Any = getattr(piece.snapshot, kind)
            for item in items:
                state.show(kind, "snapshot", item)
            for gone in piece.snapshot.removed:
                state.show(kind, "removed", gone)
    elif event in ("changed", "removed"):
        state.show(kind, event, getattr(piece, event))
