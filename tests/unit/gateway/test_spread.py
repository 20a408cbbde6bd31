"""Requests are spread over connection pools."""

from __future__ import annotations

import httpx
import pytest

from kvshuttle.gateway.spread import SpreadTransport


class Pool(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.asked = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if request.url.path == "/broken":
            raise httpx.ConnectError("no")
        return httpx.Response(200, stream=httpx.ByteStream(b"x"))


async def test_the_pool_with_the_fewest_running_and_the_first_of_equals() -> None:
    transport = SpreadTransport(keepalive_expiry_s=1, idle_connections=64)
    pools = [Pool() for _ in transport._pools]
    transport._pools = pools  # type: ignore[assignment]
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        for _ in range(3):
            await client.get("/")
        assert pools[0].asked == 3  # one after the other: the connection is used again
        async with client.stream("GET", "/"):
            await client.get("/")
            assert (pools[0].asked, pools[1].asked) == (4, 1)
            with pytest.raises(httpx.ConnectError):
                await client.get("/broken")
        response = await client.send(client.build_request("GET", "/"), stream=True)
        await response.aclose()
        await response.aclose()
        await client.get("/")
        assert (pools[0].asked, pools[1].asked) == (6, 2)
        assert not any(transport._running)
