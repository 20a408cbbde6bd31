"""`kvshuttle-controlplane`, and `python -m kvshuttle.controlplane`."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from typing import TYPE_CHECKING

import structlog
import uvloop

from kvshuttle.controlplane import logs, settings
from kvshuttle.controlplane.model.errors import SupersededError
from kvshuttle.controlplane.server import Server
from kvshuttle.controlplane.settings import SettingsError
from kvshuttle.controlplane.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

log = structlog.get_logger("kvshuttle.controlplane")


def _settle() -> None:
    """What was loaded stays, and is not looked at by the collector again; and it looks at all else
    less often. A pass over a million sessions would hold up every grant for a third of a second,
    and finds nothing: the state has no cycles."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 50, 50)
    # The journal's thread waits for the interpreter after each statement and each sync, and every
    # grant waits for the journal.
    sys.setswitchinterval(0.000_2)


async def serve(options: settings.Settings) -> int:
    """Serves until a signal or the store's failure. Returns the exit status."""
    server = Server(options)
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()

    def asked(name: str) -> None:
        if not stop.done():
            stop.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # as nohup has it, for one that outlives its terminal
        loop.add_signal_handler(number, asked, number.name)
    # What a start makes stays: to look for garbage among it, again and again as it grows, would
    # take as long as all else.
    gc.disable()
    try:
        try:
            await server.start()
        except (StoreError, SettingsError) as error:
            log.error("cannot_start", error=str(error))
            return 1
        _settle()
        failed = asyncio.create_task(server.failed())
        await asyncio.wait((stop, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            why = failed.result()
            if isinstance(why, SupersededError):
                log.error("superseded", error=str(why), **why.metadata)
                return 3
            log.error("store_failed", error=str(why))
            return 1
        failed.cancel()
        log.info("stopping", signal=stop.result())
        return 0
    finally:
        await server.stop()


def main(argv: Sequence[str] | None = None) -> None:
    """The command. Exits 0 after a signal, 1 when it cannot go on, 2 for wrong settings, 3 when
    another control plane has taken over: starting this one again would take the agents back."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = settings.load(arguments)
    except SettingsError as error:
        sys.stderr.write(f"kvshuttle-controlplane: {error}\n")
        sys.exit(2)
    logs.set_up(options.log_format, options.log_level)
    sys.exit(uvloop.run(serve(options)))


if __name__ == "__main__":
    main()
