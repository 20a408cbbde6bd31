"""`drain`, `fence`, `end-session`: what changes something."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvshuttle.cli import exits, human
from kvshuttle.cli.commands.cluster import show_worker
from kvshuttle.cli.completing import complete_sessions, complete_workers
from kvshuttle.cli.options import Command
from kvshuttle.cli.run import call, pass_options
from kvshuttle.cli.shape import shape, word
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from kvshuttle.cli.options import Options

# The server's limit of an attestation.
ATTESTATION_CHARS = 200


@click.command("drain", cls=Command)
@click.argument("worker_id", shell_complete=complete_workers)
@click.option("--undo", is_flag=True, help="Put it back into service.")
@pass_options
def drain(options: Options, worker_id: str, undo: bool) -> int:
    """Take a worker out of service: no new turns or leases, what is open goes on to its end."""
    found = call(options, lambda client: client.drain_worker(worker_id, undo=undo))
    printer = options.printer()
    if printer.as_json:
        printer.document({"worker": shape(found)})
        return exits.OK
    pool = found.pool
    state = word(found, "state")
    printer.line(f"{worker_id} is {state}")
    if state == "draining":
        printer.line(
            f"  at its last heartbeat: {pool.running_requests} running requests, "
            f"{pool.waiting_requests} waiting, {pool.open_leases} open leases; follow it with "
            "kvshuttle top"
        )
    elif state == "lost":
        order = "ready" if undo else "draining"
        printer.line(f"  it is not connected; when it comes back it will be {order}")
    return exits.OK


@click.command("fence", cls=Command)
@click.argument("worker_id", shell_complete=complete_workers)
@click.option(
    "--incarnation",
    type=click.IntRange(min=1),
    help="Which boot is dead; without it the one that is registered now.",
)
@click.option(
    "--attestation",
    metavar="TEXT",
    help="Who says so, and how it is known; asked for when it is not given.",
)
@click.option("--yes", is_flag=True, help="Do not ask again.")
@pass_options
def fence(
    options: Options,
    worker_id: str,
    incarnation: int | None,
    attestation: str | None,
    yes: bool,
) -> int:
    """Attest that a worker's process is dead, so that nothing waits for it any more.

    Its leases end at once instead of at their deadlines, and blocks that it might have written to
    leave quarantine. Only when you know it: if the process lives, it may write into memory that
    others use by then. A stream that is lost is not a death.
    """
    interactive = sys.stdin.isatty()
    if not interactive and (attestation is None or not yes):
        raise click.UsageError(
            "stdin is no terminal to ask at: give --attestation 'who knows it, and how' and --yes"
        )
    found = call(options, lambda client: client.get_worker(worker_id))
    printer = options.printer()
    if incarnation is None:
        incarnation = found.ref.incarnation
    if interactive and not yes:
        show_worker(printer, found)
        state = word(found, "state")
        if state in ("ready", "draining"):
            heard = human.age(found.heartbeat_time, human.now())
            click.secho(
                f"It is connected and was heard {heard} ago: it does not look dead.",
                fg="red",
                err=True,
            )
    if attestation is None:
        attestation = click.prompt(
            "Who attests that this process is dead, and how is it known", err=True
        )
    attestation = attestation.strip()
    if not attestation:
        raise click.UsageError("--attestation: say who knows that the process is dead, and how")
    if len(attestation) > ATTESTATION_CHARS:
        raise click.UsageError(
            f"--attestation: {len(attestation)} characters; at most {ATTESTATION_CHARS}"
        )
    if not yes:
        click.confirm(
            f"Boot {incarnation} of {worker_id} is dead and writes to no memory",
            abort=True,
            err=True,
        )
    ref = types.WorkerRef(worker_id=worker_id, incarnation=incarnation)
    fenced = call(options, lambda client: client.fence_worker(ref, attestation))
    if printer.as_json:
        printer.document({"worker": shape(fenced), "attestation": attestation})
    else:
        printer.line(f"boot {incarnation} of {worker_id} is {word(fenced, 'state')}")
    return exits.OK


@click.command("end-session", cls=Command)
@click.argument("session_id", shell_complete=complete_sessions)
@pass_options
def end_session(options: Options, session_id: str) -> int:
    """End a conversation: its KV is released everywhere, its leases are revoked.

    A new turn of the same id starts it afresh and computes everything.
    """
    found = call(options, lambda client: client.end_session(session_id))
    printer = options.printer()
    if printer.as_json:
        printer.document({"session": shape(found)})
    else:
        left = len(found.replicas)
        more = f"; {left} worker(s) have yet to let go of its KV" if left else ""
        printer.line(
            f"session {session_id} of tenant {found.tenant} has {word(found, 'state')}{more}"
        )
    return exits.OK
