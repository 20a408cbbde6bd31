"""`sessions`, `session ID`, `explain ID`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from kvshuttle.cli import exits, human
from kvshuttle.cli.commands.cluster import all_workers
from kvshuttle.cli.commands.leases import lease_rows, route, sort_key
from kvshuttle.cli.completing import complete_sessions, complete_workers
from kvshuttle.cli.explanation import Story, explain, next_turn, serves
from kvshuttle.cli.options import Command
from kvshuttle.cli.output import Column, Printer, Rows, literal
from kvshuttle.cli.reasons import NOTHING, reason
from kvshuttle.cli.run import (
    call,
    gather,
    gather_of,
    limit_option,
    more_note,
    page_size,
    pass_options,
)
from kvshuttle.cli.shape import seconds, shape, word
from kvshuttle.client import PermissionDeniedError
from kvshuttle.v1 import session_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.cli.options import Options
    from kvshuttle.cli.predictions import Actual
    from kvshuttle.client import AsyncClient
    from kvshuttle.v1 import cluster_service_pb2 as cluster_pb
    from kvshuttle.v1 import lease_service_pb2 as lease_pb


# Older turns' KV is the beginning of the newest's: the longest say what matters.
REPLICAS_SHOWN = 2
LEASES_SHOWN = 10


@click.command("sessions", cls=Command)
@click.option("--state", type=click.Choice(["active", "ended"]), help="Only those.")
@click.option(
    "--worker",
    default="",
    metavar="ID",
    shell_complete=complete_workers,
    help="Only those of which this worker has KV.",
)
@limit_option(50)
@pass_options
def sessions(options: Options, state: str | None, worker: str, limit: int) -> int:
    """The conversations, where their KV lies, and what was last decided."""
    wanted = pb.SessionState.Value(f"SESSION_STATE_{(state or 'unspecified').upper()}")

    async def ask(client: AsyncClient) -> tuple[list[pb.Session], bool]:
        listed = client.list_sessions(state=wanted, worker_id=worker, page_size=page_size(limit))
        return await gather_of(worker, client, listed, limit)

    found, more = call(options, ask)
    printer = options.printer()
    if printer.as_json:
        printer.document({"sessions": [shape(one) for one in found], "more": more})
        return exits.OK
    rows = Rows(
        [
            Column("TENANT", keep=60),
            Column("SESSION"),
            Column("STATE", keep=70),
            Column("TURNS", right=True, keep=90),
            Column("RUN", right=True, keep=65),
            Column("MODE", keep=85),
            Column("REASON", keep=80),
            Column("CACHED", right=True, keep=75),
            Column("TTFT", right=True, keep=74),
            Column("KV AT", keep=50),
            Column("CHANGED", right=True, keep=55),
        ]
    )
    at = human.now()
    for one in found:
        last = one.turns[-1] if one.turns else pb.Turn()
        running = sum(turn.state == pb.TURN_STATE_RUNNING for turn in one.turns)
        ttft = seconds(last.usage.time_to_first_token)
        rows.add(
            literal(one.tenant),
            literal(one.session_id),
            human.state(word(one, "state")),
            human.count(one.turn_count),
            str(running),
            word(last.plan, "return_mode") if one.turns else human.NONE,
            last.plan.reason,
            human.share(last.usage.cached_tokens, last.usage.prompt_tokens),
            human.span(ttft) if ttft else human.NONE,
            _where(one),
            human.age(one.update_time, at),
        )
    printer.rows(rows, empty="no sessions")
    if more:
        printer.note(more_note(len(found), more))
    return exits.OK


def _where(one: pb.Session) -> Text:
    """The longest replica of each worker."""
    best: dict[str, pb.Replica] = {}
    for replica in one.replicas:
        name = replica.worker.worker_id
        if name not in best or best[name].num_tokens < replica.num_tokens:
            best[name] = replica
    return Text(" ").join(
        Text.assemble(
            name,
            ":",
            (human.short(best[name].num_tokens), human.STATE_STYLES[word(best[name], "state")]),
        )
        for name in sorted(best)
    )


async def _read(
    client: AsyncClient, session_id: str
) -> tuple[pb.Session, list[lease_pb.Lease], dict[str, cluster_pb.Worker]]:
    """The session, its leases, and the workers where the caller may see them."""
    session = await client.get_session(session_id)
    leases: list[lease_pb.Lease] = []
    try:
        listed = client.list_leases(session_id=session_id, tenant=session.tenant)
        leases, _ = await gather(listed, 0)
    except PermissionDeniedError:  # a gateway's token may read sessions only
        pass
    try:
        workers = {one.ref.worker_id: one for one in await all_workers(client)}
    except PermissionDeniedError:
        workers = {}
    return session, leases, workers


@click.command("session", cls=Command)
@click.argument("session_id", shell_complete=complete_sessions)
@click.option("--all", "every", is_flag=True, help="Every replica and lease that is listed.")
@pass_options
def session(options: Options, session_id: str, every: bool) -> int:
    """One conversation: its turns, its KV, its leases."""
    found, leases, _ = call(options, lambda client: _read(client, session_id))
    printer = options.printer()
    if printer.as_json:
        printer.document({"session": shape(found), "leases": [shape(one) for one in leases]})
        return exits.OK
    at = human.now()
    head = _head(found)
    head.append(f", changed {human.age(found.update_time, at)} ago", style="dim")
    printer.line(head)
    hints = _hints(found)
    if hints:
        printer.line(Text(f"  {hints}", style="dim"))
    printer.line("\nTurns (those that run, and the last that ended)")
    printer.rows(_turn_rows(found.turns), empty="none", indent=2)
    printer.line("\nKV")
    rows = Rows(
        [
            Column("WORKER"),
            Column("STATE"),
            Column("TOKENS", right=True),
            Column("BLOCKS", right=True, keep=50),
            Column("HELD FOR", right=True, keep=60),
            Column("HEAD", keep=40),
        ]
    )
    replicas = sorted(found.replicas, key=lambda one: -one.num_tokens)
    shown: Counter[str] = Counter()
    for replica in replicas:
        name = replica.worker.worker_id
        if shown[name] >= REPLICAS_SHOWN and not every:
            continue
        shown[name] += 1
        left = replica.expire_time.seconds - at.timestamp()
        rows.add(
            literal(name),
            human.state(word(replica, "state")),
            human.count(replica.num_tokens),
            human.count(replica.num_blocks),
            human.span(max(0.0, left)) if replica.expire_time.seconds else human.NONE,
            replica.head_hash.hex()[:12],
        )
    printer.rows(rows, empty="no worker has any", indent=2)
    _and_more(printer, len(replicas) - shown.total(), "shorter: --all shows them")
    printer.line("\nLeases, the newest first")
    some = leases if every else leases[:LEASES_SHOWN]
    printer.rows(lease_rows(some, with_session=False), empty="none are listed", indent=2)
    _and_more(printer, len(leases) - len(some), "older: --all shows them")
    return exits.OK


def _and_more(printer: Printer, number: int, what: str) -> None:
    if number > 0:
        printer.line(Text(f"  and {number} {what}", style="dim"))


def _head(found: pb.Session) -> Text:
    head = Text()
    head.append(found.session_id, style="bold")
    head.append(f"  tenant {found.tenant}  ")
    head.append_text(human.state(word(found, "state")))
    turns = "turn" if found.turn_count == 1 else "turns"
    head.append(f"  {human.count(found.turn_count)} {turns}")
    return head


def _hints(found: pb.Session) -> str:
    said = []
    if found.hints.HasField("expected_idle"):
        idle = human.span(seconds(found.hints.expected_idle))
        said.append(f"the client expects its next turn after {idle}")
    if found.hints.value:
        said.append(f"its KV is of {word(found.hints, 'value')} value")
    return ", ".join(said)


def _turn_rows(turns: Sequence[pb.Turn]) -> Rows:
    rows = Rows(
        [
            Column("TURN", right=True),
            Column("STATE"),
            Column("PREFILL → DECODE", keep=80),
            Column("MODE", keep=90),
            Column("REASON", keep=85),
            Column("PROMPT", right=True, keep=75),
            Column("CACHED", right=True, keep=74),
            Column("OUTPUT", right=True, keep=50),
            Column("TTFT", right=True, keep=76),
            Column("BEGAN", keep=60),
            Column("TOOK", right=True, keep=55),
        ]
    )
    for turn in turns:
        usage = turn.usage
        ended = turn.HasField("end_time")
        took = turn.end_time.ToNanoseconds() - turn.begin_time.ToNanoseconds() if ended else 0
        ttft = seconds(usage.time_to_first_token)
        rows.add(
            str(turn.turn),
            human.state(word(turn, "outcome" if ended else "state")),
            route(turn.prefill.worker.worker_id, turn.decode.worker.worker_id),
            word(turn.plan, "return_mode"),
            turn.plan.reason,
            human.count(usage.prompt_tokens) if usage.prompt_tokens else human.NONE,
            human.share(usage.cached_tokens, usage.prompt_tokens),
            human.count(usage.output_tokens) if usage.output_tokens else human.NONE,
            human.span(ttft) if ttft else human.NONE,
            human.clock_time(turn.begin_time),
            human.span(took / 1e9) if ended else human.NONE,
        )
    return rows


@click.command("explain", cls=Command)
@click.argument("session_id", shell_complete=complete_sessions)
@pass_options
def explain_session(options: Options, session_id: str) -> int:
    """Why a session's last turns went where they went, and what came back.

    Exit status 1 when the last turn that ended got nothing of what was planned, or could have got
    something and did not.
    """
    found, leases, workers = call(options, lambda client: _read(client, session_id))
    stories = explain(found, leases, workers)
    ended = [one for one in stories if one.turn.state == pb.TURN_STATE_ENDED]
    status = exits.BAD_NEWS if ended and ended[0].verdict == "bad" else exits.OK
    printer = options.printer()
    if printer.as_json:
        document: dict[str, Any] = {
            "tenant": found.tenant,
            "session_id": found.session_id,
            "state": word(found, "state"),
            "turns": [_story_document(one) for one in stories],
            "next_turn": next_turn(found, leases),
        }
        printer.document(document)
        return status
    printer.line(_head(found))
    for one in stories:
        printer.line()
        _print_story(printer, one)
    if not stories:
        printer.line(Text("  no turn is remembered", style="dim"))
    ahead = next_turn(found, leases)
    if ahead:
        printer.line(f"\nFor the next turn: {ahead}")
    told = {one.turn.turn for one in stories}
    earlier = [one for one in leases if serves(one) not in told and one.turn < found.turn_count]
    if earlier:
        printer.line("\nLeases of earlier turns (the turns themselves are not listed any more)")
        earlier.sort(key=sort_key, reverse=True)
        some = earlier[:LEASES_SHOWN]
        printer.rows(lease_rows(some, with_session=False), empty="", indent=2)
        _and_more(printer, len(earlier) - len(some), "older: kvshuttle session --all shows them")
    return status


def _actual(actual: Actual) -> Text:
    text = Text.assemble((f"{human.span(actual.first_token_s):>8}", "bold"))
    text.append(f"  {actual.off:.1f} times what was predicted")
    if actual.computed_tokens is not None:
        text.append(f"; {human.count(actual.computed_tokens)} tokens were computed")
    if actual.moved_s is not None:
        text.append(f"; moving took {human.span(actual.moved_s)}")
    return text


_MARKS = {"good": ("✓", "green"), "bad": ("✗", "red"), "neutral": ("·", ""), "open": ("…", "cyan")}


def _print_story(printer: Printer, one: Story) -> None:
    turn = one.turn
    running = turn.state == pb.TURN_STATE_RUNNING
    head = Text.assemble(("Turn ", "bold"), (str(turn.turn), "bold"), "  ")
    head.append_text(human.state(word(turn, "state" if running else "outcome")))
    head.append(f"  began {human.clock_time(turn.begin_time)}", style="dim")
    printer.line(head)
    mark, style = _MARKS[one.verdict]
    plan_word = f"{word(turn.plan, 'return_mode')}, {turn.plan.reason}"
    said = [
        ("placed", Text(one.placement)),
        ("planned", Text.assemble((plan_word, "bold"), ": ", one.plan)),
        ("came back", Text.assemble((f"{mark} ", style), one.outcome)),
    ]
    if one.first_token:
        said.append(("speed", Text(one.first_token)))
    for at, way in enumerate(one.compared):
        text = Text.assemble(
            (f"{human.span(way.first_token_s):>8}", "bold" if way.chosen else ""),
            f"  {way.where}: {way.how}",
            (f" ({way.parts})" if way.parts else "", "dim"),
        )
        if way.note:
            text.append(f"; {way.note}", style="dim")
        said.append(("" if at else "predicted", text))
    if one.actual is not None:
        said.append(("actual", _actual(one.actual)))
    advice = one.advice
    if not advice and one.verdict == "bad" and one.remedy != NOTHING:
        advice = one.remedy
    if advice:
        said.append(("to do", Text(advice, style="yellow")))
    from rich.table import Table

    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(max_width=110)
    for name, text in said:
        grid.add_row(name, text)
    printer.print(grid)
    if one.leases:
        printer.rows(lease_rows(one.leases, with_session=False), empty="", indent=4)


def _story_document(one: Story) -> dict[str, Any]:
    return {
        "turn": shape(one.turn),
        "placement": one.placement,
        "plan": one.plan,
        "reason": one.turn.plan.reason,
        "meaning": reason(one.turn.plan.reason).meaning,
        "remedy": one.remedy,
        "returned_tokens": one.returned_tokens,
        "outcome": one.outcome,
        "verdict": one.verdict,
        "advice": one.advice,
        "first_token": one.first_token,
        "predicted": [dataclasses.asdict(way) for way in one.compared],
        "actual": dataclasses.asdict(one.actual) if one.actual is not None else None,
        "leases": [shape(lease) for lease in one.leases],
    }
