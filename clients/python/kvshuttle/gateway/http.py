"""uvicorn's HTTP, with bounds on a request's head: it has none of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvshuttle.gateway.errors import error_body

if TYPE_CHECKING:
    import asyncio

_REASONS = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class _HeadTooLong(Exception):  # noqa: N818 - a way out of the parser
    """Makes the parser stop."""


class BoundedHttp(HttpToolsProtocol):
    """Refuses a head that is too long, and one that is not whole in time.

    Without this a client that never ends its headers takes memory, or a connection, for ever.
    """

    max_head_bytes: ClassVar[int]
    head_timeout_s: ClassVar[float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        # The same by its parts, for a head that began in one piece with the request before it.
        self._named_bytes = 0
        self._behind = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # A head that is still not whole after as many bytes as it may have is too long. What comes
        # with it in one piece is parsed only after that.
        while data and self._in_head and not self.transport.is_closing():
            room = self.max_head_bytes - self._head_bytes
            if room <= 0:
                self._refuse_long_head()
                return
            if not self._named_bytes:
                self._behind = False
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece)
            self._watch_head()
            super().data_received(piece)
        if data and not self.transport.is_closing():
            super().data_received(data)

    def on_url(self, url: bytes) -> None:
        self._named_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value) + len(b": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._named_bytes += len(self.parser.get_method()) + len(b"  HTTP/1.1\r\n\r\n")
        if self._is_named_long():
            raise _HeadTooLong
        self._in_head = False
        self._unwatch_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_named_long():
            self._refuse_long_head()
        else:
            super().send_400_response(msg)

    def _is_named_long(self) -> bool:
        return self._behind and self._named_bytes > self.max_head_bytes

    def on_message_complete(self) -> None:
        # What follows on this connection is the next request's head.
        self._in_head = self._behind = True
        self._head_bytes = self._named_bytes = 0
        super().on_message_complete()

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The request before is still being answered; this one waits for it anyway.
            self._watch_head()
            return
        self._refuse(408, "The request's headers did not arrive in time. Send it again.")

    def _refuse_long_head(self) -> None:
        self._refuse(
            431,
            f"The request's line and headers are longer than {self.max_head_bytes} bytes. Send "
            "fewer or shorter headers; what is long belongs into the body.",
        )

    def _refuse(self, status: int, message: str) -> None:
        self._unwatch_head()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(message, kind="invalid_request_error", param="headers")
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%s" % (status, _REASONS[status], len(body), body)
            )
        self.transport.close()


def bounded_http(max_head_bytes: int, head_timeout_s: float) -> type[BoundedHttp]:
    """The protocol with these bounds, for uvicorn, which makes one a connection."""
    return type(
        "BoundedHttp",
        (BoundedHttp,),
        {"max_head_bytes": max_head_bytes, "head_timeout_s": head_timeout_s},
    )
