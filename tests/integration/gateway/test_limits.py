"""Too many requests, tenants over their budget, the end of a gateway, and what a client is told."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING

import httpx
import pytest
from google.rpc import code_pb2  # type: ignore[import-untyped, unused-ignore]

from kvshuttle.v1 import session_service_pb2 as session
from tests.integration.gateway.conftest import CHAT, running_gateway
from tests.integration.gateway.fake_control_plane import FakeControlPlane, status
from tests.integration.gateway.fake_engine import DONE, EVENTS, FakeEngine, Script
from tests.integration.gateway.test_apis import ask
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.gateway.conftest import RunningGateway

BUDGET = status(
    code_pb2.RESOURCE_EXHAUSTED, "TENANT_BUDGET", "tenant default has 8 turns.", retry_after_s=2.5
)


async def refused(gateway: RunningGateway, reason: str) -> float:
    return await gateway.metric("kvshuttle_gateway_refused_total", reason=reason)


async def test_beyond_its_limit_the_gateway_says_when_to_come_back(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    go = asyncio.Event()
    decode.script = Script(before_answer=go)
    async with running_gateway(control_plane=control.target, max_requests=2) as gateway:
        running = [asyncio.create_task(gateway.chat()) for _ in range(2)]
        await decode.wait_for_request(2)
        chat = await gateway.chat()
        messages = await ask(gateway, "messages")
        assert await refused(gateway, "GATEWAY_LIMIT") == 2
        go.set()
        assert [(await one).status_code for one in running] == [200, 200]
        assert (await gateway.chat()).status_code == 200

    for response in (chat, messages):
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert "--max-requests" in response.json()["error"]["message"]
        assert response.json()["error"]["type"] == "rate_limit_error"
    assert messages.json()["type"] == "error"
    assert len(decode.received) == 3


async def test_a_tenant_at_its_limit_leaves_room_for_others(
    control: FakeControlPlane, decode: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("".join(f"{hashlib.sha256(t.encode()).hexdigest()}: {t}\n" for t in "ab"))
    control.placements = [(None, ("d", decode.url))]
    go = asyncio.Event()
    decode.script = Script(before_answer=go)
    a, b = ({"authorization": f"Bearer {one}"} for one in "ab")
    # Three quarters of four.
    async with running_gateway(
        control_plane=control.target, max_requests=4, api_keys_file=keys
    ) as gateway:
        running = [asyncio.create_task(gateway.chat(headers=a)) for _ in range(3)]
        await decode.wait_for_request(3)
        assert (await gateway.chat(headers=a)).status_code == 429
        assert await refused(gateway, "TENANT_LIMIT") == 1
        running.append(asyncio.create_task(gateway.chat(headers=b)))
        await decode.wait_for_request(4)
        go.set()
        assert [(await one).status_code for one in running] == [200] * 4


async def test_a_place_is_free_again_whatever_became_of_the_request(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    async with running_gateway(control_plane=control.target, max_requests=1) as gateway:
        bad = await gateway.http.post("/v1/chat/completions", content=b"{")
        assert bad.status_code == 400
        decode.script = Script(before_answer=asyncio.Event())
        with pytest.raises(httpx.ReadTimeout):
            await gateway.http.post("/v1/chat/completions", json=CHAT, timeout=0.3)
        name = "kvshuttle_gateway_requests_in_flight"
        registry = gateway.server.config.app.state.gateway.metrics.registry  # type: ignore[union-attr]
        await eventually(lambda: registry.get_sample_value(name) == 0, "the client left")
        decode.script = Script()
        assert (await gateway.chat()).status_code == 200


async def test_a_tenant_over_its_budget_is_served_without_a_turn(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine
) -> None:
    await gateway.chat()
    control.refuse_begin = BUDGET
    response = await gateway.chat()
    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "TENANT_BUDGET"
    assert decode.legs() == ["decode", "plain"]
    counted = await gateway.metric("kvshuttle_gateway_over_budget_total", decision="served")
    assert counted == 1


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_a_tenant_over_its_budget_is_refused_where_the_operator_wants_that(
    control: FakeControlPlane, decode: FakeEngine, api: str
) -> None:
    control.refuse_begin = BUDGET
    async with running_gateway(
        control_plane=control.target, over_budget="refuse", decode_url=[decode.url]
    ) as gateway:
        response = await ask(gateway, api)
        assert await refused(gateway, "OVER_BUDGET") == 1
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert "tenant default has 8 turns." in response.json()["error"]["message"]
    assert not decode.received


async def test_before_it_stops_it_says_so_and_serves(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    async with running_gateway(control_plane=control.target, drain_notice_s=30) as gateway:
        assert (await gateway.http.get("/health")).json()["status"] != "draining"
        gateway.server.should_exit = True
        app = gateway.server.config.app.state.gateway  # type: ignore[union-attr]
        await eventually(lambda: app.draining, "draining")
        health = await gateway.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert (await gateway.chat()).status_code == 200
        gateway.server.force_exit = True


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_stream_that_outlasts_the_drain_is_told(
    control: FakeControlPlane, decode: FakeEngine, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And nobody else: a traceback for each of thousands would bury what matters."""
    control.placements = [(None, ("d", decode.url))]
    decode.script = Script(mid_stream=asyncio.Event())
    async with running_gateway(control_plane=control.target) as gateway:
        asked = asyncio.create_task(ask(gateway, api, stream=True))
        await decode.wait_for_request()
        name = "kvshuttle_gateway_time_to_first_token_seconds_count"
        registry = gateway.server.config.app.state.gateway.metrics.registry  # type: ignore[union-attr]
        if api != "responses":  # whose first events are no tokens
            labels = {"stream": "true"}
            await eventually(lambda: registry.get_sample_value(name, labels), "the first token")
        gateway.server.should_exit = True
        response = await asked
    if api == "responses":
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "gateway_stopping"
    else:
        assert response.status_code == 200
        last = response.text.rstrip("\n").split("\n\n")[-1]
        assert "being stopped" in json.loads(last.split("data: ")[1])["error"]["message"]
    status = {"route": api, "status": str(response.status_code)}
    assert registry.get_sample_value("kvshuttle_gateway_requests_total", status) == 1
    assert [record.name for record in caplog.records if record.exc_info] == []
    assert control.outcomes() == [(1, session.TURN_OUTCOME_FAILED)]


async def test_a_stream_that_ends_within_the_drain_is_whole(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    go = asyncio.Event()
    decode.script = Script(before_answer=go)
    async with running_gateway(control_plane=control.target, drain_timeout_s=30) as gateway:
        asked = asyncio.create_task(gateway.chat(stream=True))
        await decode.wait_for_request()
        gateway.server.should_exit = True
        app = gateway.server.config.app.state.gateway  # type: ignore[union-attr]
        await eventually(lambda: app.draining, "draining")
        go.set()
        assert (await asked).content == b"".join([*EVENTS, DONE])


async def test_tokens_in_headers(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.plan = session.Plan(return_mode=session.RETURN_MODE_LAZY, reusable_tokens=17)
    for stream in (False, True):
        headers = (await gateway.chat(stream=stream)).headers
        assert headers["x-kvshuttle-prompt-tokens"] == "20"
        assert headers["x-kvshuttle-cached-tokens"] == "16"
        assert headers["x-kvshuttle-reusable-tokens"] == "17"
    control.placements = [(None, ("d", decode.url))]
    assert (await gateway.chat()).headers["x-kvshuttle-cached-tokens"] == "19"
    assert "x-kvshuttle-cached-tokens" not in (await gateway.chat(stream=True)).headers


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_comment_at_a_streams_end_for_who_asks(gateway: RunningGateway, api: str) -> None:
    without = await ask(gateway, api, stream=True, headers={"X-Session-ID": "s"})
    asking = {"X-Session-ID": "s", "X-KVShuttle-Report": "stream"}
    told = await ask(gateway, api, stream=True, headers=asking)
    events = told.text.split("\n\n")
    comment = json.loads(events[-3].removeprefix(": kvshuttle "))
    assert (comment["session"], comment["turn"], comment["mode"]) == ("s", "2", "lazy")
    assert (comment["prompt-tokens"], comment["cached-tokens"]) == (20, 16)
    assert "kvshuttle" not in without.text
    rest = "\n\n".join(events[:-3] + events[-2:])
    assert rest.replace("resp_decode_2", "resp_decode_1") == without.text
    bad = await ask(gateway, api, headers={"X-KVShuttle-Report": "loud"})
    assert bad.status_code == 400
