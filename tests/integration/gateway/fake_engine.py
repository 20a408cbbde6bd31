"""A stand-in for vLLM's OpenAI server: real HTTP, scripted faults, a record of what came."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.integration.gateway import fake_answers as answers
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.types import Receive, Scope, Send


@dataclass
class Received:
    """A request as the engine saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def leg(self) -> str:
        """Which leg it says that it is; `plain` without transfer parameters."""
        params = self.body.get("kv_transfer_params")
        return "plain" if params is None else str(params["kvshuttle"]["leg"])

    @property
    def token(self) -> str | None:
        params = self.body.get("kv_transfer_params")
        return None if params is None else str(params["kvshuttle"]["turn_token"])


@dataclass
class Script:
    """How the next requests are answered."""

    status: int = 200
    # The whole body of an answer that is not streamed, or of an error.
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    # Blocks before the answer's headers.
    before_answer: asyncio.Event | None = None
    # Blocks between the first and the second event of a stream.
    mid_stream: asyncio.Event | None = None
    # Blocks after the last event of a stream, before the end of its HTTP.
    before_end: asyncio.Event | None = None
    # Breaks the connection after the last event of a stream.
    break_at_end: bool = False
    # Sent instead of the events of a stream.
    only_event: bytes | None = None
    # Sent within a stream, before [DONE].
    last_event: bytes = b""
    # Breaks the connection after so many events.
    break_after: int | None = None
    # Half an event is sent before the break.
    break_in_event: bool = False
    # Ends the stream in order, but without [DONE].
    no_done: bool = False
    usage: dict[str, Any] | None = None
    # Makes the whole answer to a request that is not streamed.
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None


class BrokenConnectionError(Exception):
    """Makes uvicorn close the connection in the middle of an answer."""


SSE = "text/event-stream; charset=utf-8"
EVENTS, DONE = answers.CHAT_EVENTS, answers.CHAT_DONE


class FakeEngine:
    """One engine on a port of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.script = Script()
        self.received: list[Received] = []
        self.healthy = True
        # What models and counts of tokens are answered instead, with status 503.
        self.reads_fail: bytes | None = None
        # /health never answers.
        self.hangs = False
        # Keeps responses, as with VLLM_ENABLE_RESPONSES_API_STORE=1.
        self.stores = False
        self.stored: dict[str, dict[str, Any]] = {}
        self.url = ""
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeEngine:
        endpoint = _Completions(self)
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", endpoint, methods=["POST"]),
                Route("/v1/completions", endpoint, methods=["POST"]),
                Route("/v1/responses", endpoint, methods=["POST"]),
                Route("/v1/responses/{id}", self._stored),
                Route("/v1/responses/{id}/cancel", self._stored, methods=["POST"]),
                Route("/v1/messages", endpoint, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ]
        )
        config = uvicorn.Config(
            app,
            port=0,
            log_config=None,
            log_level="critical",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = _QuietServer(config)
        self._task = asyncio.create_task(self._server.serve())
        await eventually(lambda: self._server is not None and self._server.started, "engine up")
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stops at once: what is open breaks."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server = self._task = None

    def legs(self) -> list[str]:
        return [one.leg for one in self.received]

    async def wait_for_request(self, number: int = 1) -> Received:
        await eventually(lambda: len(self.received) >= number, f"{self.name} request {number}")
        return self.received[number - 1]

    async def _models(self, request: Request) -> Response:
        if self.reads_fail is not None:
            return Response(self.reads_fail, status_code=503)
        if not self.healthy:
            return Response("down", status_code=500)
        body = {
            "object": "list",
            "data": [{"id": "m"}],
            "auth": request.headers.get("authorization"),
        }
        return JSONResponse(body)

    async def _stored(self, request: Request) -> Response:
        found = self.stored.get(request.path_params["id"])
        if found is None:
            body = answers.error(404, "Response not found.", request.url.path)
            return Response(body, status_code=404, media_type="application/json")
        if request.url.path.endswith("/cancel"):
            found["status"] = "cancelled"
        if request.query_params.get("stream") == "true":
            return Response(b"event: response.completed\ndata: {}\n\n", media_type=SSE)
        return JSONResponse(found)

    async def _count_tokens(self, request: Request) -> Response:
        if self.reads_fail is not None:
            return Response(self.reads_fail, status_code=503)
        if not self.healthy:
            return Response("down", status_code=500)
        fields = await request.json()
        return JSONResponse({"input_tokens": len(fields["messages"])})

    async def _health(self, _request: Request) -> Response:
        if self.hangs:
            await asyncio.Event().wait()
        return Response(status_code=200 if self.healthy else 503)


class _QuietServer(uvicorn.Server):
    """Leaves the signals alone, and stops at once."""

    async def main_loop(self) -> None:
        while not self.should_exit:  # noqa: ASYNC110 - uvicorn's own flag
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Completions:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw = await request.body()
        got = Received(scope["path"], dict(request.headers), json.loads(raw))
        self.engine.received.append(got)
        script = self.engine.script
        watch = asyncio.create_task(_watch(receive, got))
        answer = asyncio.create_task(self._answer(script, got, scope, receive, send))
        try:
            await asyncio.wait({watch, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            watch.cancel()
            answer.cancel()
            await asyncio.gather(watch, answer, return_exceptions=True)

    async def _answer(
        self, script: Script, got: Received, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if script.before_answer is not None:
            await script.before_answer.wait()
        if script.status != 200:
            body = script.body if script.body is not None else b"engine says no"
            response = Response(body, status_code=script.status, headers=script.headers)
            await response(scope, receive, send)
        elif (refusal := self._refusal(got)) is not None:
            status, message = refusal
            response = Response(
                answers.error(status, message, got.path),
                status_code=status,
                media_type="application/json",
            )
            await response(scope, receive, send)
        elif got.body.get("stream"):
            await self._stream(script, got, send)
        else:
            whole = script.body
            if script.answer is not None:
                whole = json.dumps(script.answer(got.body)).encode()
            if whole is None:
                whole = json.dumps(self._completion(script, got)).encode()
            response = Response(
                whole, headers={"content-type": "application/json", **script.headers}
            )
            await response(scope, receive, send)

    def _refusal(self, got: Received) -> tuple[int, str] | None:
        """What vLLM itself would say of a request that it cannot serve."""
        previous = got.body.get("previous_response_id")
        if previous is not None and previous not in self.engine.stored:
            return 404, f"Response with id '{previous}' not found."
        thinking = got.body.get("thinking") or {}
        if (
            thinking.get("type") == "enabled"
            and thinking["budget_tokens"] >= got.body["max_tokens"]
        ):
            return 400, "thinking.budget_tokens must be less than max_tokens"
        return None

    def _asked(self, got: Received) -> answers.Asked:
        number = sum(one.path == got.path for one in self.engine.received)
        return answers.Asked(
            got.path,
            got.body,
            got.leg,
            self.engine.name,
            response_id=f"resp_{self.engine.name}_{number}",
            cached=answers.CACHED[got.leg],
        )

    def _completion(self, script: Script, got: Received) -> dict[str, Any]:
        asked = self._asked(got)
        made = answers.whole(asked, script.usage)
        if got.path == "/v1/responses":
            if got.body.get("background"):
                made = answers.response(asked, "queued", None)
            self._keep(got, made)
        return made

    def _keep(self, got: Received, response: dict[str, Any]) -> None:
        if self.engine.stores and got.body.get("store", True):
            self.engine.stored[response["id"]] = response

    async def _stream(self, script: Script, got: Received, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", SSE.encode())],
            }
        )
        async for event in self._events(script, got):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, script: Script, got: Received) -> AsyncIterator[bytes]:
        asked = self._asked(got)
        events = answers.events(asked) if script.only_event is None else [script.only_event]
        if got.path == "/v1/responses":
            usage = answers.responses_usage(asked)
            self._keep(got, answers.response(asked, "completed", usage))
        if script.last_event:
            events.append(script.last_event)
        if not script.no_done:
            events.append(answers.end(asked))
        for number, event in enumerate(events):
            if script.break_after == number:
                if script.break_in_event:
                    yield event[: len(event) // 2]
                raise BrokenConnectionError
            if number == 1 and script.mid_stream is not None:
                await script.mid_stream.wait()
            yield event
        if script.before_end is not None:
            await script.before_end.wait()
        if script.break_at_end:
            raise BrokenConnectionError


async def _watch(receive: Receive, got: Received) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    got.disconnected.set()


@contextlib.asynccontextmanager
async def dropping_server() -> AsyncIterator[tuple[str, list[int]]]:
    """A server that reads a request and closes without a word; its URL and one entry a request."""
    requests: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read(65_536)
        requests.append(len(data))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", requests
    finally:
        server.close()
        await server.wait_closed()
