"""The client against a real gRPC server in this process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvshuttle.client import (
    AsyncClient,
    Client,
    ClientOptions,
    DeadlineExceededError,
    NotFoundError,
    OutOfRangeError,
    TlsOptions,
    UnavailableError,
)
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types
from tests.integration.gateway.fake_control_plane import FakeControlPlane, status, worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def control() -> AsyncIterator[FakeControlPlane]:
    async with FakeControlPlane() as fake:
        fake.placements = [(("p", "http://p"), ("d", "http://d"))]
        yield fake


async def test_a_turn(control: FakeControlPlane) -> None:
    options = ClientOptions(tenant="acme", token="secret")
    async with AsyncClient(control.target, options) as client:
        begun = await client.begin_turn("s", exclude_worker_ids=["x"], timeout=5)
        await client.end_turn(
            "s",
            begun.turn.turn,
            session.TURN_OUTCOME_COMPLETED,
            turn_token=begun.turn_token,
            tenant="other",
            timeout=5,
        )

    assert begun.turn.decode.url == "http://d"
    assert control.begins[0].request_id
    assert control.ends[0].turn == begun.turn.turn
    assert control.ends[0].turn_token == begun.turn_token != ""
    assert control.tenants == ["acme", "other"]
    assert control.authorizations == ["Bearer secret"] * 2
    assert "secret" not in repr(options)


async def test_lists_follow_their_pages(control: FakeControlPlane) -> None:
    control.sessions = [session.Session(session_id=f"s{number}") for number in range(3)]
    control.workers = [worker("d", "http://d", types.WORKER_ROLE_DECODE)]
    async with AsyncClient(control.target) as client:
        assert [one.session_id async for one in client.list_sessions()] == ["s0", "s1", "s2"]
        assert [one.ref.worker_id async for one in client.list_workers()] == ["d"]
        assert (await client.get_session("s1")).session_id == "s1"
        assert (await client.get_worker("d")).url == "http://d"
        assert (await client.get_status()).epoch == 1


async def test_update_and_end(control: FakeControlPlane) -> None:
    hints = types.SessionHints(value=types.SESSION_VALUE_HIGH)
    async with AsyncClient(control.target) as client:
        assert (await client.update_session("s", hints)).hints == hints
        assert (await client.end_session("s")).state == session.SESSION_STATE_ENDED


async def test_an_error_says_why_and_what_to_do(control: FakeControlPlane) -> None:
    async with AsyncClient(control.target) as client:
        with pytest.raises(NotFoundError) as raised:
            await client.get_session("nobody")
        error = raised.value
        assert (error.reason, error.domain) == ("SESSION_NOT_FOUND", "kvshuttle")
        assert error.remedy == "Begin a turn."
        assert error.metadata["worker_id"] == "w1"
        assert "Begin a turn." in str(error)

        control.refuse_begin = status(14, "NO_WORKER", retry_after_s=1.5)
        with pytest.raises(UnavailableError) as unavailable:
            await client.begin_turn("s", timeout=5)
        assert unavailable.value.reason == "NO_WORKER"
        assert unavailable.value.retry_after_s == 1.5


async def test_deadline_and_no_server(control: FakeControlPlane) -> None:
    control.hold_begin = asyncio.Event()
    async with AsyncClient(control.target) as client:
        with pytest.raises(DeadlineExceededError) as raised:
            await client.begin_turn("s", timeout=0.05)
        assert raised.value.reason == ""
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(UnavailableError):
            await client.get_status()


async def test_watch(control: FakeControlPlane) -> None:
    control.sessions = [session.Session(session_id="s")]
    async with AsyncClient(control.target) as client:
        watch = client.watch_sessions()
        piece = await anext(watch)
        assert piece.snapshot.complete
        assert piece.resume_token == "r1"
        await watch.aclose()
        with pytest.raises(OutOfRangeError) as raised:
            await anext(client.watch_sessions(resume_token="old"))
        assert raised.value.reason == "WATCH_COMPACTED"


async def test_a_token_does_not_travel_in_clear_text() -> None:
    with pytest.raises(ValueError, match="clear text"):
        AsyncClient("10.0.0.1:50051", ClientOptions(token="secret"))
    with pytest.raises(ValueError, match="both"):
        TlsOptions(cert_file=Path("c"))


async def test_a_target_that_cannot_be_is_told_before_anything_is_asked() -> None:
    for target in ("", "http://10.0.0.1:7400", "10.0.0.1", "10.0.0.1:99999"):
        with pytest.raises(ValueError, match="such as 127"):
            AsyncClient(target)
        with pytest.raises(ValueError, match="such as 127"):
            Client(target)


async def test_a_long_way_to_the_server(control: FakeControlPlane) -> None:
    """A handshake that takes longer than the pause before a retry is waited for."""
    host, _, port = control.target.rpartition(":")

    over = asyncio.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await asyncio.sleep(0.4)
            writer.write(data)
            await writer.drain()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))
        both = asyncio.gather(slowly(reader, ours), slowly(theirs, writer))
        await over.wait()
        both.cancel()
        await asyncio.gather(both, return_exceptions=True)
        for one in (ours, writer):
            one.close()
            with contextlib.suppress(ConnectionError):
                await one.wait_closed()
        closed.release()

    closed = asyncio.Semaphore(0)
    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    address, number = proxy.sockets[0].getsockname()[:2]
    async with AsyncClient(f"{address}:{number}") as client:
        assert (await client.get_status(timeout=30)).epoch == 1
    proxy.close()
    over.set()
    await closed.acquire()
