"""`status` and `workers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvshuttle.cli import exits, human
from kvshuttle.cli.options import Command
from kvshuttle.cli.output import Column, Printer, Rows, literal
from kvshuttle.cli.pool import bar, legend
from kvshuttle.cli.reasons import NOTHING, reason
from kvshuttle.cli.run import call, gather, limit_option, more_note, page_size, pass_options
from kvshuttle.cli.shape import seconds, shape, word
from kvshuttle.v1 import cluster_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.cli.options import Options
    from kvshuttle.client import AsyncClient

STATES = ("ready", "draining", "lost", "fenced")
_POOL_WIDTH = 12


async def all_workers(client: AsyncClient) -> list[pb.Worker]:
    """Every listed worker."""
    return [worker async for worker in client.list_workers()]


def connected(one: pb.Worker) -> bool:
    """Whether what its last heartbeat said of its requests may still be so."""
    return word(one, "state") in ("ready", "draining")


def live(workers: Sequence[pb.Worker]) -> list[pb.Worker]:
    """Those that are connected."""
    return [one for one in workers if connected(one)]


def totals(workers: Sequence[pb.Worker]) -> dict[str, int]:
    """The counters of all workers, summed; each counts from its own boot."""
    names = [
        "transfers_completed",
        "forward_bytes",
        "return_bytes",
        "forward_tokens",
        "returned_tokens",
        "eager_tokens",
        "computed_tokens",
        "local_hit_tokens",
    ]
    found = {name: sum(getattr(one.counters, name) for one in workers) for name in names}
    found["fallbacks"] = sum(sum(one.counters.fallbacks.values()) for one in workers)
    return found


def prompt_tokens(workers: Sequence[pb.Worker]) -> dict[str, int]:
    """Where the prompts' tokens of prefill came from.

    Forward tokens are left out: they are the same prompts, seen again by decode. What was brought
    ahead of a request is not counted as returned, but as found in the cache by who used it.
    """
    prefills = [one for one in workers if word(one, "role") != "decode"] or list(workers)
    return {
        "returned": sum(
            max(0, one.counters.returned_tokens - one.counters.eager_tokens) for one in prefills
        ),
        "local": sum(one.counters.local_hit_tokens for one in prefills),
        "computed": sum(one.counters.computed_tokens for one in prefills),
    }


@click.command("status", cls=Command)
@pass_options
def status(options: Options) -> int:
    """The control plane, its workers and what moved, in one look.

    Exit status 1 when no worker is ready.
    """

    async def ask(client: AsyncClient) -> tuple[pb.GetStatusResponse, list[pb.Worker]]:
        return await client.get_status(), await all_workers(client)

    found, workers = call(options, ask)
    states = {name: sum(word(one, "state") == name for one in workers) for name in STATES}
    printer = options.printer()
    if printer.as_json:
        printer.document(
            {
                "target": options.target,
                "status": shape(found),
                "workers": states,
                "totals": totals(workers),
                "prompt_tokens": prompt_tokens(workers),
            }
        )
    else:
        printer.print(_status_table(options.target, found, workers, states, printer.width))
    return exits.OK if states["ready"] else exits.BAD_NEWS


def _status_table(
    target: str,
    found: pb.GetStatusResponse,
    workers: Sequence[pb.Worker],
    states: dict[str, int],
    width: int,
) -> Table:
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    access = "insecure, loopback only" if found.insecure_agents else "mTLS"
    grid.add_row(
        "Control plane",
        literal(
            f"{target}, version {found.version}, up {human.span(seconds(found.uptime))}, "
            f"epoch {found.epoch}"
        ),
    )
    grid.add_row("Store", literal(f"{found.store}, {found.lineage_id}; agents: {access}"))
    line = Text()
    for name in STATES:
        if states[name] or name == "ready":
            shown = human.state(name)
            shown.style = shown.style if states[name] else "red"
            line.append_text(Text(f"{states[name]} ")).append_text(shown).append("  ")
    grid.add_row("Workers", line)
    grid.add_row(
        "Now",
        literal(
            f"{human.count(found.active_sessions)} active sessions, "
            f"{human.count(found.running_turns)} running turns, "
            f"{human.count(found.open_leases)} open leases"
        ),
    )
    pool = pb.PoolStats()
    for one in live(workers):
        for name in ("total_blocks", "free_blocks", "held_blocks", "quarantined_blocks"):
            setattr(pool, name, getattr(pool, name) + getattr(one.pool, name))
    if pool.total_blocks:
        grid.add_row("Pools", _explained_bar(pool, width - 15))
    sums = totals(workers)
    grid.add_row(
        "KV moved",
        literal(
            f"{human.size(sums['return_bytes'])} returned "
            f"({human.short(sums['eager_tokens'])} of {human.short(sums['returned_tokens'])} "
            f"tokens ahead of their turns), {human.size(sums['forward_bytes'])} forwarded, in "
            f"{human.count(sums['transfers_completed'])} transfers; "
            f"recomputed instead: {human.count(sums['fallbacks'])}"
        ),
    )
    tokens = prompt_tokens(workers)
    whole = sum(tokens.values())
    grid.add_row(
        "Prompt tokens",
        literal(
            f"{human.share(tokens['returned'], whole)} returned while the request waited, "
            f"{human.share(tokens['local'], whole)} found in the cache, "
            f"{human.share(tokens['computed'], whole)} computed, of {human.short(whole)}"
            if whole
            else "none yet"
        ),
    )
    return grid


def _explained_bar(pool: pb.PoolStats, width: int) -> Text:
    """A bar with its legend, on one line."""
    key = legend()
    return bar(pool, max(10, min(30, width - key.cell_len - 2))).append("  ").append_text(key)


@click.command("workers", cls=Command)
@click.argument("worker_id", required=False)
@click.option("--state", type=click.Choice(STATES), multiple=True, help="Only these; repeatable.")
@limit_option(100)
@pass_options
def workers(options: Options, worker_id: str | None, state: tuple[str, ...], limit: int) -> int:
    """The workers; with an id, all of one of them."""
    printer = options.printer()
    if worker_id is not None:
        one = call(options, lambda client: client.get_worker(worker_id))
        if printer.as_json:
            printer.document({"worker": shape(one)})
        else:
            show_worker(printer, one)
        return exits.OK

    async def ask(client: AsyncClient) -> tuple[list[pb.Worker], bool]:
        async def wanted() -> Any:
            async for one in client.list_workers(page_size=page_size(0 if state else limit)):
                if not state or word(one, "state") in state:
                    yield one

        return await gather(wanted(), limit)

    found, more = call(options, ask)
    if printer.as_json:
        printer.document({"workers": [shape(one) for one in found], "more": more})
        return exits.OK
    printer.rows(_worker_rows(found), empty="no workers: start an engine with the agent in it")
    if more:
        printer.note(more_note(len(found), more))
    return exits.OK


def _worker_rows(found: Sequence[pb.Worker]) -> Rows:
    rows = Rows(
        [
            Column("WORKER"),
            Column("ROLE", keep=90),
            Column("STATE", keep=99),
            Column("HEARD", right=True, keep=70),
            Column("POOL", keep=60),
            Column("FREE", right=True, keep=80),
            Column("HELD", right=True, keep=79),
            Column("QUAR", right=True, keep=78),
            Column("RUN", right=True, keep=88),
            Column("WAIT", right=True, keep=87),
            Column("LEASES", right=True, keep=75),
            Column("RETURNED", right=True, keep=50),
            Column("FORWARDED", right=True, keep=49),
            Column("TOK/S", right=True, keep=48),
            Column("BOOT", right=True, keep=40),
            Column("NIXL", keep=30),
            Column("VLLM", keep=29),
            Column("URL", keep=45),
        ]
    )
    at = human.now()
    for one in found:
        pool = one.pool
        rows.add(
            literal(one.ref.worker_id),
            word(one, "role"),
            human.state(word(one, "state")),
            human.age(one.heartbeat_time, at),
            bar(pool, _POOL_WIDTH),
            human.share(pool.free_blocks, pool.total_blocks),
            human.share(pool.held_blocks, pool.total_blocks),
            human.share(pool.quarantined_blocks, pool.total_blocks),
            human.count(pool.running_requests) if connected(one) else human.NONE,
            human.count(pool.waiting_requests) if connected(one) else human.NONE,
            human.count(pool.open_leases) if connected(one) else human.NONE,
            human.size(one.counters.return_bytes),
            human.size(one.counters.forward_bytes),
            human.short(one.prefill_tokens_per_second) if one.prefill_tokens_per_second else "-",
            str(one.ref.incarnation),
            literal(one.nixl_backend or "-"),
            literal(one.vllm_version or "-"),
            literal(one.url),
        )
    return rows


def show_worker(printer: Printer, one: pb.Worker) -> None:
    """Everything of one worker."""
    at = human.now()
    pool, counters = one.pool, one.counters
    head = Text()
    head.append(one.ref.worker_id, style="bold")
    head.append(f"  boot {one.ref.incarnation}  {word(one, 'role')}  ")
    head.append_text(human.state(word(one, "state")))
    printer.line(head)
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("url", literal(one.url))
    grid.add_row(
        "heard",
        f"{human.age(one.heartbeat_time, at)} ago; registered "
        f"{human.age(one.register_time, at)} ago",
    )
    grid.add_row(
        "versions",
        literal(
            f"vLLM {one.vllm_version or '?'}, agent {one.agent_version or '?'}, "
            f"NIXL {one.nixl_backend or '?'}, {one.num_ranks} rank(s), prefix cache "
            f"{'on' if one.prefix_caching else 'off'}"
        ),
    )
    grid.add_row("pool", _explained_bar(pool, printer.width - 17))
    grid.add_row(
        "blocks",
        f"{human.count(pool.total_blocks)} of {one.block_size} tokens "
        f"({human.size(one.bytes_per_block)}): {human.count(pool.free_blocks)} free, "
        f"{human.count(pool.held_blocks)} under {human.count(pool.holds)} holds, "
        f"{human.count(pool.quarantined_blocks)} quarantined",
    )
    grid.add_row(
        "requests",
        f"{'' if connected(one) else 'when it was last heard: '}"
        f"{pool.running_requests} running, {pool.waiting_requests} waiting; "
        f"{pool.open_leases} open leases",
    )
    grid.add_row(
        "since boot",
        f"{human.count(counters.transfers_completed)} transfers: "
        f"{human.size(counters.return_bytes)} returned "
        f"({human.count(counters.returned_tokens)} tokens), "
        f"{human.size(counters.forward_bytes)} forwarded "
        f"({human.count(counters.forward_tokens)} tokens)",
    )
    grid.add_row(
        "prompt tokens",
        f"{human.count(counters.computed_tokens)} computed, "
        f"{human.count(counters.local_hit_tokens)} found in its own cache",
    )
    if one.prefill_tokens_per_second:
        grid.add_row("prefill", f"{human.count(one.prefill_tokens_per_second)} tokens/s, learned")
    for field in one.fingerprint:
        grid.add_row(literal(field.name), literal(field.value))
    printer.print(grid)
    for name in sorted(counters.fallbacks, key=lambda name: -counters.fallbacks[name]):
        known = reason(name)
        remedy = "" if known.remedy == NOTHING else f" Do: {known.remedy}."
        times = human.count(counters.fallbacks[name])
        printer.print(Padding(Text(f"recomputed {times} times: {name}"), (0, 0, 0, 2)))
        printer.print(Padding(Text(f"{known.meaning}.{remedy}", style="dim"), (0, 0, 0, 4)))
