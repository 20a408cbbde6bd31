"""`kvshuttle-gateway` and `python -m kvshuttle.gateway`."""

from __future__ import annotations

import asyncio
import resource
import sys
from typing import TYPE_CHECKING

import uvloop
from pydantic import ValidationError

from kvshuttle.gateway import logs
from kvshuttle.gateway.auth import KeyFileError
from kvshuttle.gateway.server import GatewayServer, ReadyFileError
from kvshuttle.gateway.settings import ConfigFileError, load
from kvshuttle.tracing import TracingError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Exit status 2: the settings are wrong; 1: it cannot serve."""
    try:
        settings = load(sys.argv[1:] if argv is None else argv)
    except ValidationError as error:
        for problem in error.errors():
            name = "_".join(map(str, problem["loc"]))
            print(f"kvshuttle-gateway: {name or 'settings'}: {problem['msg']}", file=sys.stderr)  # noqa: T201
        return 2
    except ConfigFileError as error:
        print(f"kvshuttle-gateway: {error}", file=sys.stderr)  # noqa: T201
        return 2
    logs.configure(settings)
    try:
        settings.client_options().check(settings.control_plane)
    except (OSError, ValueError) as error:
        print(f"kvshuttle-gateway: control plane: {error}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        _raise_file_limit()
        _say_that_it_is_asyncio()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            server = GatewayServer(settings)
            runner.run(server.run_until_stopped())
    except (KeyFileError, ReadyFileError, TracingError, ValueError) as error:
        print(f"kvshuttle-gateway: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except OSError as error:
        print(f"kvshuttle-gateway: {settings.host}:{settings.port}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _raise_file_limit() -> None:
    """Two sockets a stream: the limit that a shell starts with, often 1,024, is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say_that_it_is_asyncio() -> None:
    """anyio and httpcore ask sniffio some fifty times a request, and it finds out each time anew.
    Where it is not installed they do not ask."""
    try:
        import sniffio
    except ImportError:
        return
    sniffio.thread_local.name = "asyncio"


if __name__ == "__main__":
    sys.exit(main())
