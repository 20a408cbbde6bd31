"""Many small connection pools instead of one: a pool looks through all of its connections at every
request, and asks the sockets of idle ones, which was a third of the gateway's work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["SpreadTransport"]

# With a few thousand streams a pool has a hundred connections or so.
_POOLS = 32


class SpreadTransport(httpx.AsyncBaseTransport):
    """Gives each request to the pool with the fewest running, the first of equals: so requests that
    come one after the other find the connection that the last one left."""

    def __init__(self, *, keepalive_expiry_s: float, idle_connections: int) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=max(1, idle_connections // _POOLS),
            keepalive_expiry=keepalive_expiry_s,
        )
        self._pools = [
            httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits)
            for _ in range(_POOLS)
        ]
        self._running = [0] * _POOLS

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As any transport's."""
        place = self._running.index(min(self._running))
        self._running[place] += 1
        try:
            response = await self._pools[place].handle_async_request(request)
        except BaseException:
            self._running[place] -= 1
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Counted(response.stream, self._running, place)
        return response

    async def aclose(self) -> None:
        """Closes all connections."""
        for pool in self._pools:
            await pool.aclose()


class _Counted(httpx.AsyncByteStream):
    """An answer's body, which is one request of its pool's until it is closed."""

    def __init__(self, inner: httpx.AsyncByteStream, running: list[int], place: int) -> None:
        self._inner = inner
        self._running = running
        self._place = place
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            yield chunk

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            if self._open:
                self._open = False
                self._running[self._place] -= 1
