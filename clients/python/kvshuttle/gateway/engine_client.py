"""Requests to engines, over httpx's transport.

httpx's own client looks for cookies, redirects, credentials and the machine's settings at each
request, none of which there are here: a sixth of the gateway's processor time.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["EngineClient"]

_MAX_PORT = 65_535


@functools.lru_cache(maxsize=1_024)
def _parsed(url: str) -> httpx.URL:
    """Raises httpx.ConnectError for what is no URL: nobody can be reached there."""
    try:
        parsed = httpx.URL(url)
        # Reading the host decodes it, which may fail by itself.
        if parsed.host and (parsed.port or 0) > _MAX_PORT:
            raise ValueError(f"port {parsed.port} is above {_MAX_PORT}")
    except (httpx.InvalidURL, ValueError) as error:
        raise httpx.ConnectError(f"{url[:200]!r} is no URL of an engine: {error}") from error
    return parsed


class EngineClient:
    """The connections to all engines. A `patience` is for each step. Raises httpx.HTTPError."""

    def __init__(
        self, transport: httpx.AsyncBaseTransport, headers: Mapping[str, str] | None = None
    ) -> None:
        """`headers` go with every request."""
        self._transport = transport
        self._headers = {name.encode(): value.encode() for name, value in (headers or {}).items()}

    async def aclose(self) -> None:
        """Closes all connections, which aborts what runs on them."""
        await self._transport.aclose()

    async def open(
        self,
        method: str,
        url: str,
        patience: httpx.Timeout,
        *,
        body: bytes | None = None,
        headers: Mapping[bytes, bytes] | None = None,
    ) -> httpx.Response:
        """An answer's status and headers. Whoever has it closes it."""
        request = httpx.Request(
            method,
            _parsed(url),
            headers={**self._headers, **(headers or {})},
            content=body,
            extensions={"timeout": patience.as_dict()},
        )
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response

    async def ask(
        self,
        method: str,
        url: str,
        patience: httpx.Timeout,
        *,
        body: bytes | None = None,
        headers: Mapping[bytes, bytes] | None = None,
    ) -> httpx.Response:
        """A whole answer."""
        async with self.streamed(method, url, patience, body=body, headers=headers) as response:
            await response.aread()
            return response

    @contextlib.asynccontextmanager
    async def streamed(
        self,
        method: str,
        url: str,
        patience: httpx.Timeout,
        *,
        body: bytes | None = None,
        headers: Mapping[bytes, bytes] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """An answer that may go on for long."""
        response = await self.open(method, url, patience, body=body, headers=headers)
        try:
            yield response
        finally:
            await response.aclose()
