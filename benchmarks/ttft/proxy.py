"""A proxy for vLLM's own connectors: one prefill engine, one decode engine, conversations by id.

    python -m benchmarks.ttft.proxy --mode bidirectional --port 9000 \
        --prefill-url http://127.0.0.1:8100 --decode-url http://127.0.0.1:8200

As thin as a proxy can be, on the same server and HTTP client as kvshuttle's gateway, so that what
differs between the arms of the benchmark is the movement of KV.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.ttft.params import Cache, Mode, Params, PushTarget, decode_body, prefill_body
from kvshuttle.localstack.chat import SESSION_HEADER

__all__ = ["PREFILL_HEADER", "make_app"]

# Milliseconds of the prefill leg, for the benchmark; absent where both legs run side by side.
PREFILL_HEADER = "X-Prefill-Ms"
_PATH = "/v1/chat/completions"


class _Proxy:
    def __init__(
        self, mode: Mode, prefill: httpx.AsyncClient, decode: httpx.AsyncClient, target: PushTarget
    ) -> None:
        self._mode = mode
        self._prefill = prefill
        self._decode = decode
        self._target = target
        self._cache = Cache()

    async def serve(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        conversation = request.headers.get(SESSION_HEADER, "")
        # One id on both legs: upstream's push finds the other side's half by it.
        request_id = uuid.uuid4().hex
        headers = {"X-Request-Id": request_id}
        cached = self._cache.take(conversation) if conversation else None
        leg = prefill_body(body, self._mode, cached, request_id)
        if self._mode == "push":
            first = asyncio.create_task(self._prefill.post(_PATH, json=leg, headers=headers))
            params: Params | None = self._target.params(request_id)
            return await self._stream(body, params, headers, conversation, {}, first)
        start = time.perf_counter()
        answer = await self._prefill.post(_PATH, json=leg, headers=headers)
        took = {PREFILL_HEADER: f"{(time.perf_counter() - start) * 1e3:.2f}"}
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code, media_type="application/json")
        params = answer.json().get("kv_transfer_params")
        return await self._stream(body, params, headers, conversation, took, None)

    async def _stream(
        self,
        body: dict[str, Any],
        params: Params | None,
        headers: dict[str, str],
        conversation: str,
        extra_headers: dict[str, str],
        beside: asyncio.Task[httpx.Response] | None,
    ) -> Response:
        sent = self._decode.build_request(
            "POST", _PATH, json=decode_body(body, params), headers=headers
        )
        answer = await self._decode.send(sent, stream=True)
        if answer.status_code != 200:
            await answer.aread()
            return Response(answer.content, answer.status_code, media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            try:
                async for line in answer.aiter_lines():
                    if line and not self._is_ours(line, conversation):
                        yield f"{line}\n\n".encode()
            finally:
                await answer.aclose()
                if beside is not None:
                    await beside

        return StreamingResponse(events(), media_type="text/event-stream", headers=extra_headers)

    def _is_ours(self, line: str, conversation: str) -> bool:
        """Whether the line is what `streamed_params` adds at the end; it is kept, not sent on."""
        if '"kv_transfer_params"' not in line or not line.startswith("data:"):
            return False
        with contextlib.suppress(json.JSONDecodeError):
            chunk = json.loads(line.removeprefix("data:"))
            params = chunk.get("kv_transfer_params")
            if params and not chunk.get("choices"):
                if conversation and self._mode == "bidirectional":
                    self._cache.put(conversation, params)
                return True
        return False


def make_app(mode: Mode, prefill_url: str, decode_url: str, target: PushTarget) -> Starlette:
    """The proxy as an ASGI application."""

    def client(url: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client(prefill_url) as prefill, client(decode_url) as decode:
            app.state.proxy = _Proxy(mode, prefill, decode, target)
            yield

    async def completions(request: Request) -> Response:
        proxy: _Proxy = request.app.state.proxy
        return await proxy.serve(request)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[Route(_PATH, completions, methods=["POST"]), Route("/health", health)],
        lifespan=lifespan,
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft.proxy")
    parser.add_argument("--mode", choices=["one-way", "bidirectional", "push"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill-url", required=True)
    parser.add_argument("--decode-url", required=True)
    parser.add_argument("--prefill-engine-id", default="", help="push: as in prefill's config")
    parser.add_argument("--prefill-side-port", type=int, default=0, help="push: NIXL side channel")
    options = parser.parse_args()
    target = PushTarget(options.prefill_engine_id, "localhost", options.prefill_side_port)
    app = make_app(options.mode, options.prefill_url, options.decode_url, target)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        loop="uvloop",
        http="httptools",
    )


if __name__ == "__main__":
    main()
