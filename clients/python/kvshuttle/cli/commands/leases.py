"""`leases`, `lease ID`, `transfers`, `revoke ID`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from kvshuttle.cli import exits, human
from kvshuttle.cli.completing import complete_sessions, complete_workers
from kvshuttle.cli.options import Command
from kvshuttle.cli.output import Column, Rows, literal
from kvshuttle.cli.reasons import NOTHING, reason
from kvshuttle.cli.run import call, gather_of, limit_option, more_note, page_size, pass_options
from kvshuttle.cli.shape import moment, seconds, shape, word
from kvshuttle.v1 import lease_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvshuttle.cli.options import Options
    from kvshuttle.client import AsyncClient

OPEN = (pb.LEASE_STATE_PENDING, pb.LEASE_STATE_GRANTED, pb.LEASE_STATE_ACTIVE)
ENDED = (
    pb.LEASE_STATE_COMPLETED,
    pb.LEASE_STATE_FAILED,
    pb.LEASE_STATE_EXPIRED,
    pb.LEASE_STATE_REVOKED,
)
_WORDS = {pb.LeaseState.Name(s).removeprefix("LEASE_STATE_").lower(): s for s in (*OPEN, *ENDED)}


def sort_key(lease: pb.Lease) -> tuple[int, int]:
    """When it was asked for."""
    return (lease.create_time.seconds, lease.create_time.nanos)


def route(source: str, destination: str) -> Text:
    """From where to where; one place alone when they are one."""
    if not source or source == destination:
        return Text(destination or human.NONE)
    return Text.assemble(source, (" → ", "dim"), destination)


def way(lease: pb.Lease) -> Text:
    """Which way, and whether with no request waiting."""
    return Text.assemble(word(lease, "direction"), (" eager" if lease.eager else "", "dim"))


def wait_s(lease: pb.Lease) -> float:
    """How long a request waited for it; no request waits for an eager one."""
    return 0.0 if lease.eager else seconds(lease.stats.wait_time)


def lease_rows(leases: Sequence[pb.Lease], *, with_session: bool = True) -> Rows:
    """Leases in any state."""
    rows = Rows(
        [
            Column("LEASE", keep=60),
            *([Column("SESSION", keep=95)] if with_session else ()),
            Column("TURN", right=True, keep=85),
            Column("DIRECTION", keep=90),
            Column("FROM → TO", keep=92),
            Column("STATE", keep=99),
            Column("REASON", keep=88),
            Column("BLOCKS", right=True, keep=70),
            Column("TOKENS", right=True, keep=75),
            Column("SPEED", right=True, keep=65),
            Column("WAIT", right=True, keep=64),
            Column("AGE", right=True, keep=80),
            Column("LEFT", right=True, keep=50),
        ]
    )
    at = human.now()
    for one in leases:
        blocks = one.stats.blocks or (one.range.end - one.range.start)
        wait = wait_s(one)
        rows.add(
            literal(one.lease_id),
            *([literal(one.session_id)] if with_session else ()),
            str(one.turn),
            way(one),
            route(one.source.worker_id, one.destination.worker_id),
            human.state(word(one, "state")),
            literal(one.end_reason or human.NONE),
            human.count(blocks) if blocks else human.NONE,
            human.count(one.stats.tokens) if one.stats.tokens else human.NONE,
            human.throughput(one.stats.bytes, seconds(one.stats.transfer_time)),
            human.span(wait) if wait else human.NONE,
            human.age(one.create_time, at),
            _left(one, at.timestamp()),
        )
    return rows


def _left(one: pb.Lease, at_s: float) -> str:
    if one.state not in (pb.LEASE_STATE_GRANTED, pb.LEASE_STATE_ACTIVE):
        return human.NONE
    return human.span(max(0.0, moment(one.grant_time).timestamp() + seconds(one.ttl) - at_s))


_of_session = click.option(
    "--session",
    "session_id",
    default="",
    metavar="ID",
    shell_complete=complete_sessions,
    help="Only of this session.",
)
_of_worker = click.option(
    "--worker",
    default="",
    metavar="ID",
    shell_complete=complete_workers,
    help="Only from or to this worker.",
)


@click.command("leases", cls=Command)
@click.option(
    "--state", type=click.Choice(list(_WORDS)), multiple=True, help="Only these; repeatable."
)
@click.option("--all", "ended", is_flag=True, help="Those too that have ended.")
@_of_session
@_of_worker
@limit_option(50)
@pass_options
def leases(
    options: Options,
    state: tuple[str, ...],
    ended: bool,
    session_id: str,
    worker: str,
    limit: int,
) -> int:
    """The leases that are open, or --all that are listed, newest first."""
    states = [_WORDS[one] for one in state] or ([] if ended else list(OPEN))

    async def ask(client: AsyncClient) -> tuple[list[pb.Lease], bool]:
        listed = client.list_leases(
            states=states, session_id=session_id, worker_id=worker, page_size=page_size(limit)
        )
        return await gather_of(worker, client, listed, limit)

    found, more = call(options, ask)
    printer = options.printer()
    if printer.as_json:
        printer.document({"leases": [shape(one) for one in found], "more": more})
        return exits.OK
    empty = "no leases" if ended or state else "no open leases (--all lists those that ended)"
    printer.rows(lease_rows(found), empty=empty)
    if more:
        printer.note(more_note(len(found), more))
    return exits.OK


@click.command("lease", cls=Command)
@click.argument("lease_id")
@pass_options
def lease(options: Options, lease_id: str) -> int:
    """One lease, and what its end means."""
    found = call(options, lambda client: client.get_lease(lease_id))
    printer = options.printer()
    known = reason(found.end_reason) if found.end_reason else None
    if printer.as_json:
        printer.document(
            {
                "lease": shape(found),
                "meaning": known.meaning if known else None,
                "remedy": known.remedy if known else None,
            }
        )
        return exits.OK
    printer.rows(lease_rows([found]), empty="")
    if found.source_session_id:
        printer.line(f"It moves what session {found.source_session_id} left: the same prefix.")
    if known is not None:
        remedy = "" if known.remedy == NOTHING else f" Do: {known.remedy}."
        printer.line(f"{found.end_reason}: {known.meaning}.{remedy}")
    return exits.OK


@click.command("revoke", cls=Command)
@click.argument("lease_id")
@click.option("--reason", "why", default="", help="For the log and the lease's books.")
@pass_options
def revoke(options: Options, lease_id: str, why: str) -> int:
    """Stop a lease; its request recomputes.

    It ends when its reader has said so, or at its deadline.
    """
    found = call(options, lambda client: client.revoke_lease(lease_id, why))
    printer = options.printer()
    if printer.as_json:
        printer.document({"lease": shape(found)})
    else:
        printer.rows(lease_rows([found]), empty="")
    return exits.OK


@click.command("transfers", cls=Command)
@click.option("--all", "every", is_flag=True, help="Those leases too under which nothing moved.")
@_of_session
@_of_worker
@click.option("--direction", type=click.Choice(["return", "forward"]), help="Only this way.")
@limit_option(50)
@pass_options
def transfers(
    options: Options,
    every: bool,
    session_id: str,
    worker: str,
    direction: str | None,
    limit: int,
) -> int:
    """What moved under leases that ended: bytes, GB/s, how long its request waited."""

    async def ask(client: AsyncClient) -> tuple[list[pb.Lease], bool]:
        async def wanted() -> AsyncIterator[pb.Lease]:
            async for one in client.list_leases(
                states=ENDED, session_id=session_id, worker_id=worker
            ):
                right_way = direction is None or word(one, "direction") == direction
                if right_way and (every or one.stats.bytes):
                    yield one

        return await gather_of(worker, client, wanted(), limit)

    found, more = call(options, ask)
    summary = _summary(found)
    printer = options.printer()
    if printer.as_json:
        printer.document(
            {
                "transfers": [shape(one) | {"bytes_per_second": _rate(one)} for one in found],
                "summary": summary,
                "more": more,
            }
        )
        return exits.OK
    rows = Rows(
        [
            Column("ENDED", keep=85),
            Column("SESSION"),
            Column("TURN", right=True, keep=70),
            Column("DIRECTION", keep=90),
            Column("FROM → TO", keep=92),
            Column("STATE", keep=75),
            Column("REASON", keep=60),
            Column("BLOCKS", right=True, keep=50),
            Column("TOKENS", right=True, keep=80),
            Column("BYTES", right=True, keep=88),
            Column("TIME", right=True, keep=65),
            Column("SPEED", right=True, keep=95),
            Column("WAIT", right=True, keep=93),
            Column("LEASE", keep=40),
        ]
    )
    at = human.now()
    for one in found:
        stats = one.stats
        took, wait = seconds(stats.transfer_time), wait_s(one)
        rows.add(
            human.age(one.end_time, at) + " ago",
            literal(one.session_id),
            str(one.turn),
            way(one),
            route(one.source.worker_id, one.destination.worker_id),
            human.state(word(one, "state")),
            literal(one.end_reason or human.NONE),
            human.count(stats.blocks),
            human.count(stats.tokens),
            human.size(stats.bytes),
            human.span(took),
            human.throughput(stats.bytes, took),
            human.span(wait) if wait else human.NONE,
            literal(one.lease_id),
        )
    printer.rows(rows, empty="nothing has moved in the last ten minutes")
    if found:
        printer.line(Text(_summary_line(summary), style="dim"))
    if more:
        printer.note(more_note(len(found), more))
    return exits.OK


def _rate(one: pb.Lease) -> float | None:
    took = seconds(one.stats.transfer_time)
    return one.stats.bytes / took if took and one.stats.bytes else None


def _summary(found: Sequence[pb.Lease]) -> dict[str, Any]:
    """Over those that are shown."""
    rates = [rate for one in found if (rate := _rate(one)) is not None]
    waits = [wait for one in found if (wait := wait_s(one))]
    return {
        "transfers": len(found),
        "bytes": sum(one.stats.bytes for one in found),
        "tokens": sum(one.stats.tokens for one in found),
        "median_bytes_per_second": statistics.median(rates) if rates else None,
        "median_wait_s": statistics.median(waits) if waits else None,
        "longest_wait_s": max(waits, default=None),
    }


def _summary_line(summary: dict[str, Any]) -> str:
    text = (
        f"{human.count(summary['transfers'])} shown: {human.size(summary['bytes'])}, "
        f"{human.count(summary['tokens'])} tokens"
    )
    if summary["median_bytes_per_second"]:
        text += f", median {human.gigabytes(summary['median_bytes_per_second'])}"
    if summary["median_wait_s"]:
        text += (
            f", wait median {human.span(summary['median_wait_s'])}, "
            f"longest {human.span(summary['longest_wait_s'])}"
        )
    return text
