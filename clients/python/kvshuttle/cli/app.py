"""The program: its commands, and how each of its ends is told."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import sys
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from kvshuttle.cli import exits, failure
from kvshuttle.cli.commands.acting import drain, end_session, fence
from kvshuttle.cli.commands.cluster import status, workers
from kvshuttle.cli.commands.diagnosis import doctor
from kvshuttle.cli.commands.leases import lease, leases, revoke, transfers
from kvshuttle.cli.commands.sessions import explain_session, session, sessions
from kvshuttle.cli.commands.topping import top
from kvshuttle.cli.commands.watching import watch
from kvshuttle.cli.options import Command, Group, Options
from kvshuttle.cli.output import PipeClosedError
from kvshuttle.client import KVShuttleError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "kvshuttle"
SHELLS = ("bash", "zsh", "fish")
_COMPLETE_VARIABLE = "_KVSHUTTLE_COMPLETE"


def version() -> str:
    """Of the installed distribution."""
    try:
        return importlib.metadata.version("kvshuttle")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


class _Program(Group):
    sections = (
        ("Look", ("status", "workers", "sessions", "session", "leases", "lease", "transfers")),
        ("Understand", ("explain", "top", "watch", "doctor")),
        ("Act", ("drain", "fence", "end-session", "revoke")),
        ("Set up", ("completion",)),
    )


@click.group(
    PROGRAM,
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0 ok, 1 the answer is bad news, 2 wrong usage, 3 cannot reach, 4 refused.",
)
@click.version_option(version(), prog_name=PROGRAM)
def program() -> None:
    """See who holds which conversation's KV, why a turn was slow, and act.

    Options of every command may stand before or after it. Each is an environment variable too:
    --ca-file is KVSHUTTLE_CA_FILE, or else the gateway's KVSHUTTLE_GW_CONTROL_PLANE_CA_FILE.
    """


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print the shell's completion script.

    \b
    bash  echo 'eval "$(kvshuttle completion bash)"' >> ~/.bashrc
    zsh   echo 'eval "$(kvshuttle completion zsh)"' >> ~/.zshrc
    fish  kvshuttle completion fish > ~/.config/fish/completions/kvshuttle.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    sys.stdout.write(kind(program, {}, PROGRAM, _COMPLETE_VARIABLE).source() + "\n")
    return exits.OK


for _command in (
    status,
    workers,
    sessions,
    session,
    leases,
    lease,
    transfers,
    explain_session,
    top,
    watch,
    doctor,
    drain,
    fence,
    end_session,
    revoke,
):
    assert isinstance(_command, Command)
    program.add_command(_command)
program.add_command(completion)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit status; nothing but a bug shows a traceback."""
    options = Options()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        found = program.main(
            args=arguments,
            prog_name=PROGRAM,
            standalone_mode=False,
            complete_var=_COMPLETE_VARIABLE,
            obj=options,
        )
        sys.stdout.flush()
    except BaseExceptionGroup as group:
        return _end(_leaf(group), options)
    except click.ClickException as error:
        # It may have come before `-o` was read.
        options.output = "json" if _asks_for_json(arguments) else "table"
        return _end(error, options)
    except BaseException as error:
        return _end(error, options)
    return found if isinstance(found, int) else exits.OK


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether the last `-o` of a command line, or else the variable, says so."""
    said = os.environ.get("KVSHUTTLE_OUTPUT", "")
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if word == "--":
            break
        if word in ("-o", "--output"):
            said = following
        elif word.startswith("--output="):
            said = word.removeprefix("--output=")
        elif word.startswith("-o"):
            said = word.removeprefix("-o")
    return said == "json"


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _end(error: BaseException, options: Options) -> int:
    """Tells an end that is not the usual one. Raises what is none of those: a bug."""
    match error:
        case KVShuttleError():
            told = failure.of_call(error, options.target, tls=options.tls_options() is not None)
            return _tell(told, options)
        case failure.BadNewsError():
            return _tell(
                failure.Failure(exits.BAD_NEWS, "bad news", "", error.message, error.remedy),
                options,
            )
        case click.exceptions.Exit():
            return error.exit_code
        case click.ClickException():
            if options.output == "json":
                return _tell(failure.of_usage(error, PROGRAM), options)
            error.show()
            return exits.USAGE
        case KeyboardInterrupt() | click.Abort():
            sys.stderr.write("\n")
            return exits.INTERRUPTED
        case PipeClosedError() | BrokenPipeError():
            # Python must not complain at its end that it could not write the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exits.OK
        case SystemExit():
            return error.code if isinstance(error.code, int) else exits.OK
    raise error


def _tell(told: failure.Failure, options: Options) -> int:
    if options.output == "json":
        sys.stderr.write(json.dumps(told.document(), ensure_ascii=False) + "\n")
    else:
        sys.stderr.write(told.text() + "\n")
    return told.status
