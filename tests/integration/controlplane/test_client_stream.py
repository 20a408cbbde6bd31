"""The client's turns over a stream: as its calls, against a real control plane."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvshuttle.client import (
    AsyncClient,
    ClientOptions,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from kvshuttle.client import turns as client_turns
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.conftest import Cluster, T

COMPLETED = sessions.TURN_OUTCOME_COMPLETED


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(cluster.server.addresses.api, ClientOptions(turn_stream=True))
    yield client
    await client.close()


def streams(client: AsyncClient) -> dict[Any, Any]:
    assert client._turns is not None
    return client._turns._streams


async def test_a_turn_and_a_hint(cluster: Cluster, client: AsyncClient) -> None:
    await cluster.pair()
    begun = await client.begin_turn("s", timeout=T)
    assert (begun.turn.turn, bool(begun.turn_token)) == (1, True)
    ended = await client.end_turn("s", 1, COMPLETED, timeout=T)
    assert ended.outcome == COMPLETED
    hints = types.SessionHints(value=types.SESSION_VALUE_HIGH)
    updated = await client.update_session("s", hints, timeout=T)
    assert updated.hints.value == types.SESSION_VALUE_HIGH
    assert len(streams(client)) == 1


async def test_many_at_once_get_their_own_answers(cluster: Cluster, client: AsyncClient) -> None:
    await cluster.pair()
    begun = await asyncio.gather(*(client.begin_turn(f"s{i}", timeout=T) for i in range(300)))
    assert len({x.turn_token for x in begun}) == 300
    for number in (0, 299):
        session = await client.get_session(f"s{number}", timeout=T)
        assert session.turns[0].turn == 1


async def test_errors_are_those_of_the_calls(cluster: Cluster, client: AsyncClient) -> None:
    plain = AsyncClient(cluster.server.addresses.api)
    for one in (client, plain):
        with pytest.raises(InvalidArgumentError, match="session_id") as invalid:
            await one.begin_turn("", timeout=T)
        assert invalid.value.reason == "INVALID_FIELD"
        with pytest.raises(NotFoundError):
            await one.end_turn("none", 1, COMPLETED, timeout=T)
        with pytest.raises(UnavailableError) as nobody:
            await one.begin_turn("s", timeout=T)
        assert (nobody.value.reason, nobody.value.retry_after_s) == ("NO_WORKER", 1.0)
    await plain.close()


async def test_a_stream_a_tenant_and_no_more_than_the_most(
    cluster: Cluster, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_turns, "MAX_STREAMS", 2)
    await cluster.pair()
    for tenant in ("a", "b", "a", "c"):
        begun = await client.begin_turn("s", tenant=tenant, timeout=T)
        assert begun.turn.turn in (1, 2)
    # The one that was not used for longest has gone.
    assert list(streams(client)) == ["a", "c"]


class Old(session_grpc.SessionServiceServicer):
    """A control plane that knows calls only."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def BeginTurn(  # noqa: N802
        self, request: sessions.BeginTurnRequest, context: Any
    ) -> sessions.BeginTurnResponse:
        self.asked.append(request.session_id)
        return sessions.BeginTurnResponse(turn_token="t")


@contextlib.asynccontextmanager
async def served(servicer: Old) -> AsyncIterator[AsyncClient]:
    server = grpc.aio.server()
    session_grpc.add_SessionServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = AsyncClient(f"127.0.0.1:{port}", ClientOptions(turn_stream=True))
    yield client
    await client.close()
    await server.stop(0)


async def test_a_control_plane_without_the_stream_gets_calls() -> None:
    old = Old()  # type: ignore[abstract]
    async with served(old) as client:
        await asyncio.gather(*(client.begin_turn(f"s{i}", timeout=T) for i in range(5)))
        await client.begin_turn("again", timeout=T)
        assert sorted(old.asked) == ["again", "s0", "s1", "s2", "s3", "s4"]
        assert streams(client) == {}


async def test_a_burst_of_first_turns_finds_no_stream_and_becomes_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many messages are on their way when the refusal comes: it is lost to the one being written.
    And a server of grpc's does not take so many calls at once, where it would take the stream."""
    monkeypatch.setattr(client_turns, "OPERATIONS_PER_MESSAGE", 1)
    old = Old()  # type: ignore[abstract]
    async with served(old) as client:
        names = sorted(f"s{i}" for i in range(1_500))
        await asyncio.gather(*(client.begin_turn(name, timeout=T) for name in names))
        assert sorted(old.asked) == names
        await client.begin_turn("again", timeout=T)
        assert streams(client) == {}


async def test_after_a_restart_there_is_another_stream(tmp_path: Path, limits: Limits) -> None:
    cluster = Cluster(tmp_path, limits, stop_grace=T)
    await cluster.start()
    await cluster.pair()
    client = AsyncClient(cluster.server.addresses.api, ClientOptions(turn_stream=True))
    await client.begin_turn("s", timeout=T)
    (first,) = streams(client).values()
    await cluster.stop()
    async with asyncio.timeout(T):
        while first in streams(client).values():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(UnavailableError):
        await client.begin_turn("s", timeout=T)
    await client.close()


async def test_no_answer_in_time_is_said_so(cluster: Cluster, client: AsyncClient) -> None:
    await cluster.pair()
    await client.begin_turn("s", timeout=T)
    cluster.server.runtime._journal.append = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceededError):
        await client.begin_turn("t", timeout=0.05)
    (stream,) = streams(client).values()
    assert not stream.waiting
