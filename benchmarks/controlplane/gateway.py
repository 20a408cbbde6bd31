"""A busy gateway: its turns go over one stream (SessionService.Turns), as the client's own do
(`kvshuttle.client.turns`)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from benchmarks.controlplane.fleet import OPTIONS
from kvshuttle.client.turns import COMPANY_S
from kvshuttle.v1 import session_service_pb2 as pb
from kvshuttle.v1 import session_service_pb2_grpc as pb_grpc

__all__ = ["Gateway"]


class Gateway:
    """Sends what waits as soon as the stream takes another message, all of it in one."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        self._stub = pb_grpc.SessionServiceStub(self._channel)
        self._call: Any = self._stub.Turns()
        self._pending: list[pb.TurnOperation] = []
        self._wake = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self.sent_messages = self.heard_messages = 0
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def ask(self, **operation: Any) -> Any:
        """One operation's answer; RuntimeError when it failed."""
        self._last += 1
        number = self._last
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._pending.append(pb.TurnOperation(id=number, **operation))
        if "begin" in operation:
            self._wake.set()
        elif len(self._pending) == 1:
            asyncio.get_running_loop().call_later(COMPANY_S, self._wake.set)
        return await future

    async def begin(self, session_id: str, request_id: str) -> pb.BeginTurnResponse:
        """Begins a turn whose KV is returned whenever there is any."""
        request = pb.BeginTurnRequest(
            session_id=session_id, request_id=request_id, return_policy=pb.RETURN_POLICY_ALWAYS
        )
        answer: pb.BeginTurnResponse = await self.ask(begin=request)
        return answer

    async def end(self, session_id: str, turn: int) -> None:
        """Ends a turn with what it cost."""
        await self.ask(
            end=pb.EndTurnRequest(
                session_id=session_id,
                turn=turn,
                outcome=pb.TURN_OUTCOME_COMPLETED,
                usage=pb.TurnUsage(prompt_tokens=2_000, cached_tokens=1_500, output_tokens=200),
            )
        )

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                batch = self._pending[:1_000]
                del self._pending[:1_000]
                await self._call.write(pb.TurnsRequest(operations=batch))
                self.sent_messages += 1

    async def _read(self) -> None:
        problem = "the control plane ended the stream"
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self.heard_messages += 1
                for result in response.results:
                    future = self._answers.pop(result.id)
                    kind = result.WhichOneof("result")
                    if future.done():
                        continue
                    if kind == "error":
                        future.set_exception(RuntimeError(result.error.message))
                    else:
                        future.set_result(getattr(result, kind))
        except grpc.aio.AioRpcError as error:
            problem = f"{error.code().name} {error.details()}"
        for future in self._answers.values():
            if not future.done():
                future.set_exception(RuntimeError(problem))

    async def close(self) -> None:
        """Ends the stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self._channel.close()
