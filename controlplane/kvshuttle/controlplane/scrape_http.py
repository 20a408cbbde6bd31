"""The HTTP server that scrapes come to: the standard library's, with bounds on its clients."""

from __future__ import annotations

import io
import socket
import sys
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog

__all__ = ["CONNECTIONS", "ScrapeServer"]

log = structlog.get_logger("kvshuttle.controlplane")

CONNECTIONS = 8
"""Scrapes at once, each on a thread: scrapers are one or two, and an operator with curl. Beyond, a
new connection goes over the one that has waited longest without sending its request."""
REQUEST_S = 3.0
"""A scraper sends its request as soon as it is connected; this covers a lost packet or two."""
SCRAPE_S = 10.0
"""All of a connection. Prometheus waits no longer, unless set."""


class _Lines(io.BufferedReader):
    """Of a request. The standard library takes the end of the stream for the end of the request,
    and would answer one that was cut short."""

    def readline(self, size: int | None = -1, /) -> bytes:
        """ConnectionAbortedError for a line that is not whole."""
        line = super().readline(size)
        if not line.endswith(b"\n") and len(line) != size:
            raise ConnectionAbortedError("the request was cut short")
        return line


class _Handler(WSGIRequestHandler):
    """One scrape."""

    timeout = REQUEST_S
    rbufsize = 0
    server: ScrapeServer

    def setup(self) -> None:
        super().setup()
        self.rfile = _Lines(self.rfile)

    def handle(self) -> None:
        # A timeout of the socket begins anew with each byte.
        last = threading.Timer(SCRAPE_S, _cut, (self.connection,))
        last.daemon = True
        last.start()
        try:
            super().handle()
        finally:
            last.cancel()

    def parse_request(self) -> bool:
        whole = super().parse_request()
        self.server.waiting.pop(self.connection, None)
        # A reader of the answer that is too slow is cut off, which wsgiref takes as it should; it
        # would print a timeout.
        self.connection.settimeout(None)
        return whole

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""


class ScrapeServer(ThreadingMixIn, WSGIServer):
    """With a bound on what its clients can hold."""

    daemon_threads = True
    # With five, as it is else, a crowd makes the system drop a scraper's connection for seconds.
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self.waiting: dict[socket.socket, None] = {}
        """Those that have not sent their request, oldest first."""
        self._free = threading.Semaphore(CONNECTIONS)
        self._closing = False
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Called for one connection after another."""
        if not self._free.acquire(blocking=False):
            with suppress(StopIteration, KeyError, RuntimeError):  # it may just have sent it
                oldest = next(iter(self.waiting))
                del self.waiting[oldest]
                _cut(oldest)
            while not self._free.acquire(timeout=REQUEST_S):
                # All of them hang, maybe on a disk: a stop does not wait for that.
                if self._closing:
                    self.shutdown_request(request)
                    return
        self.waiting[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def shutdown(self) -> None:
        self._closing = True
        super().shutdown()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self.waiting.pop(request, None)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or is cut off, is no error."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("scrape_failed", error=repr(error))


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is gone already
        connection.shutdown(socket.SHUT_RDWR)
