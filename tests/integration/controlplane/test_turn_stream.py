"""SessionService.Turns does what the calls of their own do, and answers the same."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.services.checks import Checks
from kvshuttle.controlplane.services.operations import Operations
from kvshuttle.controlplane.services.turns import TurnStream
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import hashes
from tests.integration.controlplane.conftest import Cluster, T


class Stream:
    """A gateway's stream: `ask` sends operations and waits for all their answers."""

    def __init__(self, cluster: Cluster, **metadata: str) -> None:
        self.call: Any = cluster.sessions.Turns(metadata=tuple(metadata.items()))
        self._last = 0

    async def ask(self, *operations: Any) -> list[sessions.TurnResult]:
        request = sessions.TurnsRequest()
        for operation in operations:
            self._last += 1
            kind = {
                sessions.BeginTurnRequest: "begin",
                sessions.EndTurnRequest: "end",
                sessions.UpdateSessionRequest: "update",
            }[type(operation)]
            request.operations.add(id=self._last, **{kind: operation})
        first = self._last - len(operations) + 1
        await self.call.write(request)
        found: dict[int, sessions.TurnResult] = {}
        async with asyncio.timeout(T):
            while len(found) < len(operations):
                response = await self.call.read()
                assert response is not grpc.aio.EOF
                for result in response.results:
                    assert result.id not in found
                    found[result.id] = result
        return [found[number] for number in range(first, self._last + 1)]

    async def one(self, operation: Any) -> Any:
        (result,) = await self.ask(operation)
        kind = result.WhichOneof("result")
        if kind != "error":
            return getattr(result, kind or "")
        return result.error


@pytest.fixture
async def stream(cluster: Cluster) -> AsyncIterator[Stream]:
    stream = Stream(cluster)
    yield stream
    stream.call.cancel()


async def unary(cluster: Cluster, operation: Any) -> Any:
    """The same operation as a call of its own; an error as the status that it carries."""
    method: Any = {
        sessions.BeginTurnRequest: cluster.sessions.BeginTurn,
        sessions.EndTurnRequest: cluster.sessions.EndTurn,
        sessions.UpdateSessionRequest: cluster.sessions.UpdateSession,
    }[type(operation)]
    try:
        return await method(operation, timeout=T)
    except grpc.aio.AioRpcError as error:
        found = status_pb2.Status()
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                found.ParseFromString(value)
        return found


def shape(message: Any) -> Any:
    """A message without what differs from one turn to the next."""
    if isinstance(message, status_pb2.Status | sessions.OperationError):
        return (
            message.code,
            message.message,
            [(x.type_url, x.value) for x in message.details],
        )
    message = type(message).FromString(message.SerializeToString())
    if isinstance(message, sessions.BeginTurnResponse):
        assert message.turn_token
        message.turn_token = ""
    if hasattr(message, "turn"):
        message.turn.ClearField("begin_time")
        message.turn.plan.ClearField("predicted_ttft")  # the other one's turn queues before it
        message.turn.plan.ClearField("candidates")
        message.turn.ClearField("end_time")
    if isinstance(message, sessions.UpdateSessionResponse):
        for name in ("create_time", "update_time", "version", "turns"):
            message.session.ClearField(name)
    return type(message).__name__, message.SerializeToString(deterministic=True)


VALID: list[Any] = [
    sessions.BeginTurnRequest(session_id="S"),
    sessions.BeginTurnRequest(session_id="S", prompt_tokens_estimate=9, request_id="r1"),
    sessions.BeginTurnRequest(session_id="S", request_id="r1"),
    sessions.EndTurnRequest(session_id="S", turn=1, outcome=sessions.TURN_OUTCOME_COMPLETED),
    sessions.EndTurnRequest(
        session_id="S",
        turn=2,
        outcome=sessions.TURN_OUTCOME_CANCELLED,
        usage=sessions.TurnUsage(prompt_tokens=5, output_tokens=7),
        hints=types.SessionHints(value=types.SESSION_VALUE_LOW),
    ),
    sessions.EndTurnRequest(session_id="S", turn=2, outcome=sessions.TURN_OUTCOME_FAILED),
    sessions.UpdateSessionRequest(
        session_id="S", hints=types.SessionHints(value=types.SESSION_VALUE_HIGH)
    ),
]
INVALID: list[Any] = [
    sessions.BeginTurnRequest(),
    sessions.BeginTurnRequest(session_id="a\nb"),
    sessions.BeginTurnRequest(session_id="x" * 257),
    sessions.BeginTurnRequest(session_id="s", request_id="x" * 129),
    sessions.BeginTurnRequest(session_id="s", return_policy=77),  # type: ignore[arg-type]
    sessions.BeginTurnRequest(session_id="s", exclude_worker_ids=["p", "d"]),
    sessions.EndTurnRequest(session_id="s", outcome=sessions.TURN_OUTCOME_COMPLETED),
    sessions.EndTurnRequest(session_id="s", turn=1),
    sessions.EndTurnRequest(session_id="s", turn=1, outcome=sessions.TURN_OUTCOME_ABANDONED),
    sessions.EndTurnRequest(
        session_id="s",
        turn=1,
        outcome=sessions.TURN_OUTCOME_COMPLETED,
        usage=sessions.TurnUsage(output_tokens=(1 << 64) - 1),
    ),
    sessions.EndTurnRequest(session_id="none", turn=1, outcome=sessions.TURN_OUTCOME_FAILED),
    sessions.UpdateSessionRequest(session_id="none"),
]


@pytest.mark.parametrize("operation", INVALID, ids=lambda x: f"{type(x).__name__}:{str(x)[:30]!r}")
async def test_an_error_is_the_same_status(
    cluster: Cluster, stream: Stream, operation: Any
) -> None:
    await cluster.pair()
    await unary(cluster, sessions.BeginTurnRequest(session_id="s"))
    expected = await unary(cluster, operation)
    assert isinstance(expected, status_pb2.Status)
    assert expected.code != 0
    assert shape(await stream.one(operation)) == shape(expected)


async def test_answers_are_the_same(cluster: Cluster, stream: Stream) -> None:
    await cluster.pair()
    for operation in VALID:
        mine, theirs = type(operation)(), type(operation)()
        mine.CopyFrom(operation)
        theirs.CopyFrom(operation)
        mine.session_id, theirs.session_id = "one", "two"
        got, expected = await stream.one(mine), await unary(cluster, theirs)
        if isinstance(got, sessions.UpdateSessionResponse):
            got.session.session_id = "two"
        assert shape(got) == shape(expected)


async def test_operations_of_a_message_are_applied_in_order(
    cluster: Cluster, stream: Stream
) -> None:
    await cluster.pair()
    results = await stream.ask(
        sessions.BeginTurnRequest(session_id="s"),
        sessions.EndTurnRequest(session_id="s", turn=1, outcome=sessions.TURN_OUTCOME_COMPLETED),
        sessions.EndTurnRequest(session_id="s", turn=9, outcome=sessions.TURN_OUTCOME_FAILED),
        sessions.BeginTurnRequest(session_id="s"),
    )
    assert results[0].begin.turn.turn == 1
    assert results[1].end.turn.outcome == sessions.TURN_OUTCOME_COMPLETED
    assert results[2].error.code == grpc.StatusCode.NOT_FOUND.value[0]
    info = error_details_pb2.ErrorInfo()
    results[2].error.details[0].Unpack(info)
    assert info.domain == "kvshuttle"
    assert results[3].begin.turn.turn == 2


async def test_a_whole_turn_with_its_return(cluster: Cluster, stream: Stream) -> None:
    prefill, decode = await cluster.pair()
    chain = hashes("s", 20)
    begun = await stream.one(sessions.BeginTurnRequest(session_id="s"))
    await decode.offer(chain, "s", begun.turn_token, types.LEG_DECODE)
    ended = await stream.one(
        sessions.EndTurnRequest(session_id="s", turn=1, outcome=sessions.TURN_OUTCOME_COMPLETED)
    )
    assert ended.turn.state == sessions.TURN_STATE_ENDED
    begun = await stream.one(sessions.BeginTurnRequest(session_id="s"))
    assert begun.turn.plan.return_mode == sessions.RETURN_MODE_LAZY
    await decode.harden(await decode.told("harden"), chain)
    grant = await prefill.told("grant", turn_token=begun.turn_token)
    await prefill.publish(grant.lease_id, 20)
    await decode.told("reader_stopped", lease_id=grant.lease_id)


async def test_an_operation_that_is_not_known_is_refused(cluster: Cluster, stream: Stream) -> None:
    await stream.call.write(sessions.TurnsRequest(operations=[sessions.TurnOperation(id=7)]))
    response = await stream.call.read()
    assert [result.id for result in response.results] == [7]
    assert response.results[0].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_too_many_operations_end_the_stream(cluster: Cluster, stream: Stream) -> None:
    request = sessions.TurnsRequest()
    for number in range(1_001):
        request.operations.add(id=number)
    await stream.call.write(request)
    assert await stream.call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_has_said_all_hears_all(cluster: Cluster, stream: Stream) -> None:
    await cluster.pair()
    request = sessions.TurnsRequest()
    for number in range(300):
        request.operations.add(id=number, begin=sessions.BeginTurnRequest(session_id=f"s{number}"))
    await stream.call.write(request)
    await stream.call.done_writing()
    heard: list[int] = []
    async with asyncio.timeout(T):
        while (response := await stream.call.read()) is not grpc.aio.EOF:
            heard += [result.id for result in response.results if result.HasField("begin")]
    assert sorted(heard) == list(range(300))
    assert await stream.call.code() == grpc.StatusCode.OK


async def test_no_more_is_read_while_too_many_answers_wait(cluster: Cluster) -> None:
    """Answers that nobody reads do not pile up without bound."""
    server = cluster.server
    limits = dataclasses.replace(server.limits, operations_unanswered_max=10)
    operations = Operations(server.runtime, Checks(limits), lambda: "token")
    stream = TurnStream(server.runtime, operations, limits, server.metrics)
    taken = 0

    async def requests() -> AsyncIterator[sessions.TurnsRequest]:
        nonlocal taken
        while taken < 8:
            taken += 1
            yield sessions.TurnsRequest(operations=[sessions.TurnOperation()] * 4)

    responses = stream.run(requests())
    heard = len((await anext(responses)).results)
    # The reader has run as far as it goes: it stopped at the message that reached the bound.
    assert (taken, heard) == (3, 12)
    async for response in responses:
        heard += len(response.results)
    assert (taken, heard) == (8, 32)


async def test_the_stream_ends_when_the_server_stops(tmp_path: Path, limits: Limits) -> None:
    cluster = Cluster(tmp_path, limits, stop_grace=T)
    await cluster.start()
    await cluster.pair()
    stream = Stream(cluster)
    await stream.one(sessions.BeginTurnRequest(session_id="s"))
    stopping = asyncio.create_task(cluster.stop())
    async with asyncio.timeout(T):
        assert await stream.call.read() is grpc.aio.EOF
    await stopping


async def test_the_tenant_is_the_streams(cluster: Cluster) -> None:
    await cluster.pair()
    mine = Stream(cluster, **{"kvshuttle-tenant": "mine"})
    theirs = Stream(cluster, **{"kvshuttle-tenant": "theirs"})
    await mine.one(sessions.BeginTurnRequest(session_id="s"))
    refused = await theirs.one(
        sessions.EndTurnRequest(session_id="s", turn=1, outcome=sessions.TURN_OUTCOME_FAILED)
    )
    assert refused.code == grpc.StatusCode.NOT_FOUND.value[0]
    mine.call.cancel()
    theirs.call.cancel()
