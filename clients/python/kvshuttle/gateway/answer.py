"""An answer on its way to the client: its head, its pieces, its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Send

    from kvshuttle.gateway.dialects import Dialect
    from kvshuttle.gateway.errors import ApiError

__all__ = ["ClientAnswer", "ClientStalled"]

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "date",
        "server",
    }
)


class ClientStalled(Exception):  # noqa: N818
    """The client reads nothing any more."""


class ClientAnswer:
    """One answer. Raises ClientStalled where the client takes nothing for `stall_timeout_s`."""

    def __init__(
        self,
        send: Send,
        dialect: Dialect,
        stall_timeout_s: float,
        own_headers: Callable[[], Mapping[str, str]],
    ) -> None:
        """`own_headers` is asked once, when the answer begins."""
        self._send = send
        self._dialect = dialect
        self._stall_timeout_s = stall_timeout_s
        self._own_headers = own_headers
        self.status = 0
        self.started = False
        # True once all that the answer says was handed over: from then on a disconnect means
        # nothing. Most clients hang up at a stream's last event, before the end of its HTTP.
        self.ended = False

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """All of it at once."""
        await self.start(status, headers, length=len(body))
        await self.body(body, more=False)

    async def error(self, error: ApiError) -> None:
        """The gateway's own refusal. Raises it where part of an answer has gone."""
        if self.started:
            # A defect in the middle of a stream: the connection's end without the last chunk tells
            # the client that the answer is not whole.
            raise error
        headers = {"content-type": "application/json", **error.headers}
        await self.whole(error.status, headers, self._dialect.error_body(error))

    async def start(
        self, status: int, headers: Mapping[str, str], length: int | None = None
    ) -> None:
        """Status and headers: the engine's, but for what belongs to its connection, and ours."""
        self.status = status
        self.started = True
        raw = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in headers.items()
            if name.lower() not in _HOP_BY_HOP
        ]
        if length is not None:
            raw.append((b"content-length", str(length).encode()))
        raw.extend(
            (name.encode(), value.encode("utf-8")) for name, value in self._own_headers().items()
        )
        await self._message({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, body: bytes, *, more: bool, says_all: bool = False) -> None:
        """A piece; the last one with `more` false. `says_all`: nothing of meaning follows it."""
        if says_all or not more:
            self.ended = True
        await self._message({"type": "http.response.body", "body": body, "more_body": more})

    async def _message(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send(message)
        except TimeoutError as error:
            raise ClientStalled from error
