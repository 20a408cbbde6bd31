"""Turns over a stream: many BeginTurn, EndTurn and UpdateSession of one tenant in few messages.

A call of its own costs the control plane about 0.3 ms before anything is decided; what waits here
while a message is on its way goes with the next. An operation means and raises what its call does.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.rpc import status_pb2  # type: ignore[import-untyped, unused-ignore]

from kvshuttle.client.errors import (
    DeadlineExceededError,
    UnavailableError,
    from_rpc_error,
    from_status,
)
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvshuttle.client.errors import KVShuttleError
    from kvshuttle.v1.session_service_pb2_grpc import SessionServiceAsyncStub

__all__ = ["NoTurnStreamError", "TurnStreams"]

_R = TypeVar("_R")

OPERATIONS_PER_MESSAGE = 1_000
"""The API's limit."""
COMPANY_S = 0.002
"""For so long what no request waits for (a turn's end, a hint) waits for a turn's begin to go
with: a message costs the control plane as much as an operation."""
MAX_STREAMS = 64
"""Tenants with a stream at once. Beyond it the one that was not used for longest is closed when it
is idle; while none is, a tenant makes calls."""
CALLS_AT_ONCE = 256
"""Calls in place of a stream's operations. A stream takes any burst; of calls, a server of grpc's
refuses some once about a thousand wait to be looked at."""


class NoTurnStreamError(Exception):
    """There is no stream for it: make the call. Nothing was sent, or nobody knows whether it was;
    its `request_id` makes it take effect once."""


def _late(message: str) -> DeadlineExceededError:
    return DeadlineExceededError(message, code=grpc.StatusCode.DEADLINE_EXCEEDED)


class _Stream:
    """One stream of one tenant."""

    def __init__(self, call: Any, ended: Callable[[_Stream, bool], None]) -> None:
        self._call = call
        self._ended = ended
        self._pending: list[session.TurnOperation] = []
        self._wake = asyncio.Event()
        self._last = 0
        self._over = False
        self._write_failed = False
        self.waiting: dict[int, asyncio.Future[session.TurnResult]] = {}
        self._tasks = [
            asyncio.create_task(self._write(), name="turns-write"),
            asyncio.create_task(self._read(), name="turns-read"),
        ]

    def send(self, kind: str, request: Any) -> asyncio.Future[session.TurnResult]:
        """Queues one operation."""
        self._last += 1
        future: asyncio.Future[session.TurnResult] = asyncio.get_running_loop().create_future()
        self.waiting[self._last] = future
        number = self._last
        future.add_done_callback(lambda _: self.waiting.pop(number, None))
        self._pending.append(session.TurnOperation(id=number, **{kind: request}))
        if kind == "begin":
            self._wake.set()
        elif len(self._pending) == 1:
            asyncio.get_running_loop().call_later(COMPANY_S, self._wake.set)
        return future

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._pending:
                    batch = self._pending[:OPERATIONS_PER_MESSAGE]
                    del self._pending[:OPERATIONS_PER_MESSAGE]
                    await self._call.write(session.TurnsRequest(operations=batch))
        except asyncio.InvalidStateError:
            pass  # the reader hears why
        except grpc.aio.AioRpcError:
            # A write that meets the stream's end gives the stream a status of its own (INTERNAL),
            # and that is what the reader hears.
            self._write_failed = True

    async def _read(self) -> None:
        error: KVShuttleError = UnavailableError(
            "the control plane ended the stream of turns", code=grpc.StatusCode.UNAVAILABLE
        )
        unknown = by_call = False
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                for result in response.results:
                    future = self.waiting.get(result.id)
                    if future is not None and not future.done():
                        future.set_result(result)
            # A refusal reaches a read as the stream's end.
            if await self._call.code() is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    await self._call.code(),
                    await self._call.initial_metadata(),
                    await self._call.trailing_metadata(),
                    await self._call.details(),
                )
        except grpc.aio.AioRpcError as problem:
            error = from_rpc_error(problem)
            unknown = problem.code() is grpc.StatusCode.UNIMPLEMENTED
            by_call = unknown or (self._write_failed and problem.code() is grpc.StatusCode.INTERNAL)
        finally:
            self._end(error, unknown=unknown, by_call=by_call)

    def _end(self, error: KVShuttleError, *, unknown: bool, by_call: bool) -> None:
        if self._over:
            return
        self._over = True
        self._ended(self, unknown)
        for future in list(self.waiting.values()):
            if not future.done():
                future.set_exception(NoTurnStreamError() if by_call else error)
                future.exception()  # nobody may be waiting any more
        self._tasks[0].cancel()

    async def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class TurnStreams:
    """A client's streams, one a tenant, opened when they are first needed.

    A control plane that knows no such stream is not asked again: its client makes calls.
    """

    def __init__(
        self,
        stub: SessionServiceAsyncStub,
        metadata: Callable[[str | None], grpc.aio.Metadata],
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        # The one that was used last comes last.
        self._streams: dict[str | None, _Stream] = {}
        self._unknown = False
        self._closing: set[asyncio.Task[None]] = set()
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)

    async def ask(
        self,
        tenant: str | None,
        kind: str,
        request: Any,
        answer: type[_R],
        timeout: float,  # noqa: ASYNC109 - as the calls have
    ) -> _R:
        """One operation: its answer, or what its call would raise. NoTurnStreamError: make the
        call."""
        stream = self._stream(tenant)
        future = stream.send(kind, request)
        try:
            async with asyncio.timeout(timeout):
                result = await future
        except TimeoutError:
            raise _late(f"no answer on the stream of turns within {timeout:g} s") from None
        if result.HasField("error"):
            raise from_status(status_pb2.Status.FromString(result.error.SerializeToString()))
        found = getattr(result, kind)
        assert isinstance(found, answer)
        return found

    @contextlib.asynccontextmanager
    async def one_call(self, timeout: float) -> AsyncIterator[None]:  # noqa: ASYNC109
        """For as long as a call is made in place of an operation."""
        try:
            async with asyncio.timeout(timeout):
                await self._calls.acquire()
        except TimeoutError:
            raise _late(f"{CALLS_AT_ONCE} calls were before it for {timeout:g} s") from None
        try:
            yield
        finally:
            self._calls.release()

    def _stream(self, tenant: str | None) -> _Stream:
        if self._unknown:
            raise NoTurnStreamError
        stream = self._streams.pop(tenant, None)
        if stream is None:
            self._make_room()
            call = self._stub.Turns(metadata=self._metadata(tenant))
            stream = _Stream(call, self._forget)
        self._streams[tenant] = stream
        return stream

    def _make_room(self) -> None:
        if len(self._streams) < MAX_STREAMS:
            return
        idle = [tenant for tenant, stream in self._streams.items() if not stream.waiting]
        if not idle:
            raise NoTurnStreamError
        task = asyncio.create_task(self._streams.pop(idle[0]).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _forget(self, stream: _Stream, unknown: bool) -> None:
        self._unknown = self._unknown or unknown
        for tenant, known in list(self._streams.items()):
            if known is stream:
                del self._streams[tenant]

    async def close(self) -> None:
        """Ends all streams; what waits raises UnavailableError."""
        streams = list(self._streams.values())
        await asyncio.gather(*(stream.close() for stream in streams), *self._closing)
