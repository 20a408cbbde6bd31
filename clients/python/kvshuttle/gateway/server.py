"""Running the application: the socket, the signals, the ready file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import structlog
import uvicorn

from kvshuttle.gateway.app import create_app
from kvshuttle.gateway.http import bounded_http

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvshuttle.gateway.app import Gateway
    from kvshuttle.gateway.settings import GatewaySettings
    from kvshuttle.tracing import Tracing

log = structlog.get_logger(__name__)

# An idle client's connection is kept longer than most clients keep theirs, so that it is rarely
# the gateway that closes it under a request.
_CLIENT_KEEPALIVE_S = 75
# How often a second SIGINT is looked for while the notice runs, seconds.
_NOTICE_STEP_S = 0.05


class ReadyFileError(Exception):
    """The ready file cannot be written; the text says why."""


class GatewayServer(uvicorn.Server):
    """uvicorn's server on a socket of its own. SIGTERM, SIGHUP and SIGINT stop it after a drain; a
    second SIGINT stops it at once."""

    def __init__(self, settings: GatewaySettings, tracing: Tracing | None = None) -> None:
        self.settings = settings
        super().__init__(
            uvicorn.Config(
                create_app(settings, tracing),
                http=bounded_http(settings.max_header_bytes, settings.header_timeout_s),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_CLIENT_KEEPALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
            )
        )
        if settings.ready_file is not None:
            _check_ready_file(settings.ready_file)
        self._socket = _listen(settings.host, settings.port)

    @property
    def url(self) -> str:
        """Where it serves, with the port that it really has."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run_until_stopped(self) -> None:
        """Serves until `should_exit` is set, then drains."""
        url = self.url
        try:
            await self.serve(sockets=[self._socket])
        finally:
            self._socket.close()
            if self.settings.ready_file is not None:
                self.settings.ready_file.unlink(missing_ok=True)
        log.info("stopped", url=url)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and then tells that it serves."""
        await super().startup(sockets)
        if self.settings.ready_file is not None:
            _write_ready_file(self.settings.ready_file, self.url)
        log.info("serving", url=self.url, control_plane=self.settings.control_plane)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, after a while in which /health says what is coming."""
        gateway: Gateway = self.config.app.state.gateway  # type: ignore[union-attr]
        gateway.draining = True
        log.info("draining", url=self.url, notice_s=self.settings.drain_notice_s)
        until = time.monotonic() + self.settings.drain_notice_s
        while time.monotonic() < until and not self.force_exit:  # noqa: ASYNC110 - uvicorn's flag
            await asyncio.sleep(_NOTICE_STEP_S)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again: a drained stop is exit status 0. SIGHUP
        too, unless it is ignored, as nohup has it for one that outlives its terminal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        before = {one: signal.signal(one, self.handle_exit) for one in signals}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def _listen(host: str, port: int) -> socket.socket:
    """Binds now, so that a port in use is an error of the start. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _check_ready_file(path: Path) -> None:
    """Finds out at the start whether it can be written. Raises ReadyFileError."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ReadyFileError(
            f"--ready-file {str(path)!r}: {reason}. Give a file in a directory that exists and can "
            "be written."
        ) from error


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _write_ready_file(path: Path, url: str) -> None:
    """Whole or not at all: its reader may look at any time."""
    partial = _partial(path)
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n", encoding="utf-8")
    partial.replace(path)
