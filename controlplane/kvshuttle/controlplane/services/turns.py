"""SessionService.Turns: a busy gateway's operations on one stream.

A call of its own costs the server about 0.3 ms before anything is decided; here many operations
share a message, and many answers share another. What an operation means is `operations`' business.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from kvshuttle.controlplane.model.errors import InvalidFieldError
from kvshuttle.controlplane.services.errors import status_of
from kvshuttle.controlplane.services.guard import note_failure
from kvshuttle.controlplane.store import StoreError
from kvshuttle.v1 import session_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.observer import Metrics
    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.operations import Operation, Operations

__all__ = ["TurnStream", "TurnStreams"]

_METHODS = {"begin": "BeginTurn", "end": "EndTurn", "update": "UpdateSession"}


class TurnStream:
    """One stream: a reader applies operations as they come, the call's own task writes answers."""

    def __init__(
        self, runtime: Runtime, operations: Operations, limits: Limits, metrics: Metrics
    ) -> None:
        self._runtime = runtime
        self._limits = limits
        self._metrics = metrics
        self._make: dict[str, Callable[[Any], Operation[Any, Any]]] = {
            "begin": operations.begin,
            "end": operations.end,
            "update": operations.update,
        }
        self._results: list[pb.TurnResult] = []
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        # Operations applied whose answer is not on its way to the client.
        self._open = 0
        self._closed = False
        self._failure: Exception | None = None

    async def run(
        self, requests: AsyncIterator[pb.TurnsRequest]
    ) -> AsyncIterator[pb.TurnsResponse]:
        """Serves until the client has said all and heard all, or the server stops."""
        reader = asyncio.create_task(self._read(requests))
        self._runtime.failed.add_done_callback(self._store_failed)
        size = self._limits.operations_per_message
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._results:
                    batch = self._results[:size]
                    del self._results[:size]
                    self._open -= len(batch)
                    yield pb.TurnsResponse(results=batch)
                    self._drained.set()
                if self._failure is not None:
                    raise self._failure
                if self._closed and not self._open:
                    return
        finally:
            self._runtime.failed.remove_done_callback(self._store_failed)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def close(self) -> None:
        """Reads no more; ends the stream once what was applied is answered."""
        self._closed = True
        self._wake.set()

    def _store_failed(self, _: object) -> None:
        self._fail(StoreError("the control plane's store failed; it is stopping"))

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._wake.set()

    async def _read(self, requests: AsyncIterator[pb.TurnsRequest]) -> None:
        try:
            async for request in requests:
                if len(request.operations) > self._limits.operations_per_message:
                    raise InvalidFieldError(
                        "operations",
                        len(request.operations),
                        f"send at most {self._limits.operations_per_message} in one message",
                    )
                for operation in request.operations:
                    if self._closed:
                        return  # unanswered: the client repeats it elsewhere
                    self._apply(operation)
                while self._open >= self._limits.operations_unanswered_max:
                    self._drained.clear()
                    await self._drained.wait()
            self.close()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)

    def _apply(self, operation: pb.TurnOperation) -> None:
        kind = operation.WhichOneof("operation")
        number = operation.id
        began = time.perf_counter()
        self._open += 1
        try:
            if kind is None:
                raise InvalidFieldError("operation", "", "set begin, end or update")
            made = self._make[kind](getattr(operation, kind))

            def done(result: Any) -> None:
                self._metrics.calls.labels(_METHODS[kind]).observe(time.perf_counter() - began)
                try:
                    self._answer(pb.TurnResult(id=number, **{kind: made.answer(result)}))
                except Exception as error:  # the session has gone meanwhile
                    self._refuse(number, kind, error)

            self._runtime.submit(made.event, done)
        except Exception as error:
            self._refuse(number, kind or "", error)

    def _refuse(self, number: int, kind: str, error: Exception) -> None:
        note_failure(self._metrics, _METHODS.get(kind, "Turns"), error)
        _, _, status = status_of(error)
        self._answer(
            pb.TurnResult(
                id=number,
                error=pb.OperationError(
                    code=status.code, message=status.message, details=status.details
                ),
            )
        )

    def _answer(self, result: pb.TurnResult) -> None:
        self._results.append(result)
        self._wake.set()


class TurnStreams:
    """All open streams of turns."""

    def __init__(
        self, runtime: Runtime, operations: Operations, limits: Limits, metrics: Metrics
    ) -> None:
        self._make = partial(TurnStream, runtime, operations, limits, metrics)
        self._streams: set[TurnStream] = set()
        self._stopping = False

    @property
    def open(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    async def serve(
        self, requests: AsyncIterator[pb.TurnsRequest]
    ) -> AsyncIterator[pb.TurnsResponse]:
        """One stream, from its start to its end."""
        stream = self._make()
        if self._stopping:
            stream.close()
        self._streams.add(stream)
        try:
            async for response in stream.run(requests):
                yield response
        finally:
            self._streams.discard(stream)

    def stop(self) -> None:
        """The control plane stops."""
        self._stopping = True
        for stream in self._streams:
            stream.close()
