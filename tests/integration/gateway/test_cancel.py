"""The client goes away: the leg that runs is closed, and the turn is ended as cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from kvshuttle.v1 import session_service_pb2 as session
from tests.integration.gateway.conftest import CHAT
from tests.integration.gateway.fake_engine import Script
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from tests.integration.gateway.conftest import RunningGateway
    from tests.integration.gateway.fake_control_plane import FakeControlPlane
    from tests.integration.gateway.fake_engine import FakeEngine

CANCELLED = session.TURN_OUTCOME_CANCELLED


async def _send(gateway: RunningGateway, *, stream: bool) -> asyncio.StreamWriter:
    """Sends a request over a socket of its own, which the test closes."""
    host, _, port = gateway.server.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**CHAT, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


async def _leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def _assert_cancelled(gateway: RunningGateway, control: FakeControlPlane, phase: str) -> None:
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, CANCELLED)]
    assert await gateway.metric("kvshuttle_gateway_client_cancels_total", phase=phase) == 1
    assert await gateway.metric("kvshuttle_gateway_requests_total", route="chat", status="499") == 1


async def test_during_begin_turn(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine
) -> None:
    control.hold_begin = asyncio.Event()
    writer = await _send(gateway, stream=False)
    await eventually(lambda: control.begins, "BeginTurn")
    await _leave(writer)
    registry = gateway.server.config.app.state.gateway.metrics.registry  # type: ignore[union-attr]
    labels = {"phase": "begin"}
    await eventually(
        lambda: registry.get_sample_value("kvshuttle_gateway_client_cancels_total", labels)
    )
    control.hold_begin.set()

    await _assert_cancelled(gateway, control, "begin")
    assert prefill.legs() == []


async def test_during_the_prefill_leg(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    prefill.script = Script(before_answer=asyncio.Event())
    writer = await _send(gateway, stream=True)
    got = await prefill.wait_for_request()
    await _leave(writer)

    await asyncio.wait_for(got.disconnected.wait(), 10)
    await _assert_cancelled(gateway, control, "prefill")
    assert decode.legs() == []


@pytest.mark.parametrize("stream", [False, True])
async def test_while_decode_has_not_answered(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine, stream: bool
) -> None:
    decode.script = Script(before_answer=asyncio.Event())
    writer = await _send(gateway, stream=stream)
    got = await decode.wait_for_request()
    await _leave(writer)

    await asyncio.wait_for(got.disconnected.wait(), 10)
    await _assert_cancelled(gateway, control, "decode")


async def test_in_the_middle_of_a_stream(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine
) -> None:
    decode.script = Script(mid_stream=asyncio.Event())
    async with gateway.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as response:
        await anext(response.aiter_raw())
        got = decode.received[0]
        assert not got.disconnected.is_set()

    await asyncio.wait_for(got.disconnected.wait(), 10)
    await _assert_cancelled(gateway, control, "stream")
    assert control.ends[0].usage.prompt_tokens == 20
