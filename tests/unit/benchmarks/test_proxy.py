"""The proxy of upstream's connectors, against engines that are HTTP servers and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.ttft.params import Cache, Mode, PushTarget, decode_body, prefill_body
from benchmarks.ttft.proxy import PREFILL_HEADER, make_app
from benchmarks.ttft.streamed_params import with_params

REQUEST = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_tokens": 2,
}
TARGET = PushTarget("prefill-id", "localhost", 5_600)


def test_the_prefill_leg_makes_one_token_and_does_not_stream() -> None:
    body = prefill_body(REQUEST, "one-way", None, "r")
    assert (body["stream"], body["max_tokens"]) == (False, 1)
    assert "stream_options" not in body
    assert "min_tokens" not in body
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert body["kv_transfer_params"]["remote_block_ids"] is None


def test_what_decode_kept_is_turned_round_and_used_once() -> None:
    cache = Cache()
    cache.put("x", {"do_remote_decode": False, "do_remote_prefill": True, "remote_block_ids": [3]})
    found = cache.take("x")
    assert found == {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": [3]}
    assert cache.take("x") is None
    body = prefill_body(REQUEST, "bidirectional", found, "r")
    assert body["kv_transfer_params"] == found
    one_way = prefill_body(REQUEST, "one-way", found, "r")
    assert one_way["kv_transfer_params"]["remote_block_ids"] is None


def test_push_tells_decode_where_prefill_is_before_it_has_answered() -> None:
    params = TARGET.params("r")
    assert params["remote_engine_id"] == "prefill-id"
    assert params["remote_request_id"] == "r"
    assert "remote_block_ids" not in params
    prefill = prefill_body(REQUEST, "push", None, "r")
    assert prefill["kv_transfer_params"]["transfer_id"] == params["transfer_id"]
    assert decode_body(REQUEST, params)["kv_transfer_params"] == params
    assert decode_body(REQUEST, None) == REQUEST


class FakeEngine:
    """Answers as vLLM does, and keeps what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[dict[str, Any]] = []
        self.ids: list[str | None] = []
        self.status = 200

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.ids.append(request.headers.get("x-request-id"))
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.status)
        params = {"remote_engine_id": self.name, "remote_block_ids": [[len(self.requests)]]}
        if not body["stream"]:
            return JSONResponse({"choices": [], "kv_transfer_params": params})

        async def events() -> AsyncIterator[str]:
            for word in ("good", " day"):
                chunk = {"choices": [{"index": 0, "delta": {"content": word}}]}
                yield f"data: {json.dumps(chunk)}\n\n"
            yield f"data: {json.dumps({'choices': [], 'kv_transfer_params': params})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @property
    def app(self) -> Starlette:
        """As an ASGI application."""
        return Starlette(routes=[Route("/v1/chat/completions", self.completions, methods=["POST"])])


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The application on a port of its own."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def stack(mode: Mode) -> AsyncIterator[tuple[str, FakeEngine, FakeEngine]]:
    """Proxy, prefill, decode."""
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
    async with (
        served(prefill.app) as prefill_url,
        served(decode.app) as decode_url,
        served(make_app(mode, prefill_url, decode_url, TARGET)) as url,
    ):
        yield url, prefill, decode


async def ask(url: str, conversation: str = "x") -> httpx.Response:
    """One request through the proxy."""
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(
            f"{url}/v1/chat/completions", json=REQUEST, headers={"X-Session-ID": conversation}
        )


async def test_the_second_turn_gives_prefill_what_decode_kept() -> None:
    async with stack("bidirectional") as (url, prefill, decode):
        first = await ask(url)
        assert "good" in first.text
        assert first.text.rstrip().endswith("data: [DONE]")
        assert "kv_transfer_params" not in first.text
        assert float(first.headers[PREFILL_HEADER]) > 0
        assert decode.requests[0]["kv_transfer_params"]["remote_engine_id"] == "prefill"
        assert decode.requests[0]["max_tokens"] == 9
        await ask(url)
        params = prefill.requests[1]["kv_transfer_params"]
        assert params["remote_engine_id"] == "decode"
        assert params["remote_block_ids"] == [[1]]
        assert params["do_remote_decode"] is True
        await ask(url, "another")
        assert prefill.requests[2]["kv_transfer_params"]["remote_block_ids"] is None


async def test_one_way_never_gives_anything_back() -> None:
    async with stack("one-way") as (url, prefill, _):
        await ask(url)
        await ask(url)
        assert prefill.requests[1]["kv_transfer_params"]["remote_block_ids"] is None


async def test_push_asks_both_with_one_id() -> None:
    async with stack("push") as (url, prefill, decode):
        answer = await ask(url)
        assert answer.status_code == 200
        assert PREFILL_HEADER not in answer.headers
        assert prefill.ids == decode.ids != [None]
        params = decode.requests[0]["kv_transfer_params"]
        assert params["remote_port"] == 5_600


@pytest.mark.parametrize("broken", ["prefill", "decode"])
async def test_an_engine_that_refuses_is_heard(broken: str) -> None:
    async with stack("one-way") as (url, prefill, decode):
        (prefill if broken == "prefill" else decode).status = 400
        assert (await ask(url)).status_code == 400


async def test_a_streamed_answer_ends_with_the_params_that_the_engine_gave() -> None:
    class Result:
        def __init__(self, params: dict[str, int] | None) -> None:
            self.kv_transfer_params = params

    async def results() -> AsyncIterator[Result]:
        yield Result(None)
        yield Result({"blocks": 3})

    async def generator(_server: object, _request: object, found: Any) -> AsyncIterator[str]:
        async for _ in found:
            yield "data: {}\n\n"
        yield "data: [DONE]\n\n"

    events = [event async for event in with_params(generator)(None, None, results())]
    assert events[:2] == ["data: {}\n\n"] * 2
    assert json.loads(events[2].removeprefix("data: "))["kv_transfer_params"] == {"blocks": 3}
    assert events[3] == "data: [DONE]\n\n"
