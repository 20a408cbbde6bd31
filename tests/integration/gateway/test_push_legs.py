"""Turns whose KV is pushed: both legs run at once, and end together."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types
from tests.integration.gateway.conftest import CHAT, RunningGateway, running_gateway
from tests.integration.gateway.fake_engine import FakeEngine, Script, dropping_server
from tests.integration.gateway.test_cancel import _assert_cancelled, _leave, _send
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from tests.integration.gateway.fake_control_plane import FakeControlPlane

PREFILL_OK = (
    "kvshuttle_gateway_leg_duration_seconds_count",
    {"leg": "prefill", "result": "ok"},
)
COMPLETED, FAILED = session.TURN_OUTCOME_COMPLETED, session.TURN_OUTCOME_FAILED


def pushing(control: FakeControlPlane) -> None:
    control.plan = session.Plan(
        return_mode=session.RETURN_MODE_LAZY,
        reason="CHEAPER_TO_MOVE",
        forward_mode=types.FORWARD_MODE_PUSH,
        forward_reason="CONFIGURED",
    )


@pytest.fixture
def push(control: FakeControlPlane) -> None:
    pushing(control)


pytestmark = pytest.mark.usefixtures("push")


@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_run_at_once(
    gateway: RunningGateway,
    control: FakeControlPlane,
    prefill: FakeEngine,
    decode: FakeEngine,
    stream: bool,
) -> None:
    go = asyncio.Event()
    prefill.script = Script(before_answer=go)
    decode.script = Script(before_answer=go)
    answer = asyncio.create_task(gateway.chat(stream=stream))
    await prefill.wait_for_request()
    await decode.wait_for_request()  # though prefill has not answered
    go.set()
    assert (await answer).status_code == 200
    assert (prefill.legs(), decode.legs()) == (["prefill"], ["decode"])
    assert prefill.received[0].token == decode.received[0].token == "token-1"
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, COMPLETED)]
    assert control.ends[0].usage.prompt_tokens == 20


async def test_what_prefill_found_is_in_the_usage(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    decode.script = Script(mid_stream=asyncio.Event())
    async with gateway.http.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as response:
        await anext(response.aiter_raw())
        await prefill.wait_for_request()
        registry = gateway.server.config.app.state.gateway.metrics.registry  # type: ignore[union-attr]
        await eventually(lambda: registry.get_sample_value(*PREFILL_OK), "prefill's answer")
        assert decode.script.mid_stream is not None
        decode.script.mid_stream.set()
    await eventually(lambda: control.ends, "EndTurn")
    assert control.ends[0].usage.cached_tokens == 16


async def test_decode_may_answer_before_prefill_and_prefill_is_let_go_at_the_end(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine
) -> None:
    """Decode has computed alone, because the push failed."""
    prefill.script = Script(before_answer=asyncio.Event())
    assert (await gateway.chat()).status_code == 200
    await asyncio.wait_for(prefill.received[0].disconnected.wait(), 10)
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, COMPLETED)]


async def test_a_request_that_prefill_finds_wrong_is_answered_with_its_words(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    prefill.script = Script(status=422, body=b'{"error": "too long"}')
    decode.script = Script(before_answer=asyncio.Event())
    response = await gateway.chat()
    assert (response.status_code, response.json()) == (422, {"error": "too long"})
    await asyncio.wait_for(decode.received[0].disconnected.wait(), 10)
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, FAILED)]


@pytest.mark.parametrize("how", ["error", "dropped", "unreachable"])
async def test_a_prefill_leg_that_fails_takes_decode_with_it_and_the_turn_is_placed_anew(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine, how: str
) -> None:
    decode.script = Script(before_answer=asyncio.Event())
    async with (
        dropping_server() as (dropping, _),
        running_gateway(control_plane=control.target) as gateway,
    ):
        url = {"error": prefill.url, "dropped": dropping, "unreachable": "http://127.0.0.1:1"}[how]
        prefill.script = Script(status=503)
        control.placements = [(("p", url), ("d", decode.url)), (None, ("d", decode.url))]
        answer = asyncio.create_task(gateway.chat())
        # An engine that cannot be reached may be found out before decode's request has left.
        await eventually(
            lambda: any(one.token == "token-2" for one in decode.received), "the second turn"
        )
        for one in decode.received[:-1]:
            await asyncio.wait_for(one.disconnected.wait(), 10)
        decode.script.before_answer.set()  # type: ignore[union-attr]
        response = await answer
        assert response.status_code == 200
        reason = "PREFILL_ERROR" if how == "error" else "PREFILL_UNREACHABLE"
        assert response.headers["x-kvshuttle-fallback"] == reason
        await eventually(lambda: len(control.ends) == 2, "EndTurn")
        assert control.outcomes() == [(1, FAILED), (2, COMPLETED)]
        assert list(control.begins[1].exclude_worker_ids) == ["p"]


async def test_decode_that_cannot_be_reached_lets_prefill_go_and_another_is_asked(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    prefill.script = Script(before_answer=asyncio.Event())
    async with running_gateway(control_plane=control.target) as gateway:
        control.placements = [
            (("p", prefill.url), ("gone", "http://127.0.0.1:1")),
            (None, ("d", decode.url)),
        ]
        response = await gateway.chat()
        assert response.status_code == 200
        assert response.headers["x-kvshuttle-fallback"] == "DECODE_UNREACHABLE"
        if prefill.received:
            await asyncio.wait_for(prefill.received[0].disconnected.wait(), 10)


async def test_an_error_of_decodes_is_the_clients(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    prefill.script = Script(before_answer=asyncio.Event())
    decode.script = Script(status=400, body=b"no")
    response = await gateway.chat()
    assert (response.status_code, response.content) == (400, b"no")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs(
    gateway: RunningGateway,
    control: FakeControlPlane,
    prefill: FakeEngine,
    decode: FakeEngine,
    stream: bool,
) -> None:
    prefill.script = Script(before_answer=asyncio.Event())
    decode.script = Script(before_answer=asyncio.Event())
    writer = await _send(gateway, stream=stream)
    legs = [await prefill.wait_for_request(), await decode.wait_for_request()]
    await _leave(writer)
    for leg in legs:
        await asyncio.wait_for(leg.disconnected.wait(), 10)
    await _assert_cancelled(gateway, control, "prefill")


async def test_a_client_that_leaves_when_prefill_has_ended(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    decode.script = Script(before_answer=asyncio.Event())
    writer = await _send(gateway, stream=True)
    await prefill.wait_for_request()
    leg = await decode.wait_for_request()
    registry = gateway.server.config.app.state.gateway.metrics.registry  # type: ignore[union-attr]
    await eventually(lambda: registry.get_sample_value(*PREFILL_OK), "prefill's answer")
    await _leave(writer)
    await asyncio.wait_for(leg.disconnected.wait(), 10)
    await _assert_cancelled(gateway, control, "decode")


async def test_a_request_for_one_engine_runs_on_one(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    """Prompt logprobs: a plain request, whatever the plan says."""
    response = await gateway.chat(prompt_logprobs=1)
    assert response.status_code == 200
    assert prefill.legs() == []
    assert decode.legs() == ["plain"]
    assert json.loads(response.content)["choices"]
