"""Stand-ins in a process of their own: engines that answer at once, and a control plane.

Engines take no time to compute, so that what is measured is what lies between. A token's event has
the moment in which it was written: CLOCK_MONOTONIC is one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any, cast

import grpc
import uvloop

from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_USAGE = {
    "prompt_tokens": 1_000,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 960},
}


class Engine(asyncio.Protocol):
    """HTTP/1.1 as vLLM's server speaks it, on one connection."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._buffer = b""
        self._transport: asyncio.Transport
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            if b"content-length:" in head:
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head.split(b" ")[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path != b"/v1/chat/completions":
            self._whole({"object": "list", "data": [{"id": "m", "object": "model"}]})
            return
        asked = json.loads(body)
        if asked.get("stream"):
            task = asyncio.create_task(self._stream(asked["max_tokens"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            message = {"role": "assistant", "content": "x"}
            self._whole({"id": "c", "choices": [{"message": message}], "usage": _USAGE})

    def _whole(self, fields: dict[str, Any]) -> None:
        raw = json.dumps(fields).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(raw), raw)
        )

    async def _stream(self, tokens: int) -> None:
        head = _STREAM_HEAD
        for number in range(tokens):
            if number:
                await asyncio.sleep(self._interval_s)
            event = (
                b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":'
                b'[{"index":0,"delta":{"content":" word"},"t":%d}]}\n\n' % time.monotonic_ns()
            )
            self._transport.write(head + b"%x\r\n%s\r\n" % (len(event), event))
            head = b""
        last = b"data: " + json.dumps({"id": "c", "choices": [], "usage": _USAGE}).encode()
        last += b"\n\ndata: [DONE]\n\n"
        self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))


class ControlPlane(session_grpc.SessionServiceServicer):
    """Places every turn on the same workers; legs one after the other."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode
        self._turns = 0

    async def Turns(  # noqa: N802
        self, request_iterator: AsyncIterator[session.TurnsRequest], _context: grpc.ServicerContext
    ) -> AsyncIterator[session.TurnsResponse]:
        async for request in request_iterator:
            yield session.TurnsResponse(results=map(self._result, request.operations))

    def _result(self, operation: session.TurnOperation) -> session.TurnResult:
        if operation.WhichOneof("operation") == "begin":
            return session.TurnResult(id=operation.id, begin=self._begin(operation.begin))
        return session.TurnResult(id=operation.id, end=session.EndTurnResponse())

    def _begin(self, asked: session.BeginTurnRequest) -> session.BeginTurnResponse:
        self._turns += 1
        turn = session.Turn(turn=self._turns, state=session.TURN_STATE_RUNNING)
        turn.decode.url = self._decode
        turn.decode.worker.worker_id = "d"
        if asked.session_id.startswith("two"):
            turn.prefill.url = self._prefill
            turn.prefill.worker.worker_id = "p"
        return session.BeginTurnResponse(turn=turn, turn_token="token")


async def main(interval_s: float) -> None:
    """Serves until its input ends; says where on its first line of output."""
    loop = asyncio.get_running_loop()
    urls = []
    for _ in range(2):
        server = await loop.create_server(lambda: Engine(interval_s), "127.0.0.1", 0, backlog=512)
        urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    control = grpc.aio.server()
    session_grpc.add_SessionServiceServicer_to_server(ControlPlane(*urls), control)  # type: ignore[abstract, no-untyped-call, unused-ignore]
    port = control.add_insecure_port("127.0.0.1:0")
    await control.start()
    where = {"prefill": urls[0], "decode": urls[1], "control": f"127.0.0.1:{port}"}
    print(json.dumps(where), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    await control.stop(0)


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1])))
