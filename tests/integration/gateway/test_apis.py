"""The Responses API and Anthropic's messages, through both legs, and what their clients see."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types
from tests.integration.gateway.conftest import CHAT, running_gateway
from tests.integration.gateway.fake_engine import FakeEngine, Script
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.integration.gateway.conftest import RunningGateway
    from tests.integration.gateway.fake_control_plane import FakeControlPlane

ASK: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "responses": ("/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 5}),
    "messages": (
        "/v1/messages",
        {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
    ),
}
APIS = pytest.mark.parametrize("api", list(ASK))


async def ask(gateway: RunningGateway, api: str, **changes: Any) -> httpx.Response:
    path, fields = ASK[api]
    headers = changes.pop("headers", {})
    body = {**fields, **changes}
    if not body.get("stream"):
        body.pop("stream_options", None)
    return await gateway.http.post(path, json=body, headers=headers)


def datas(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def cached(api: str, usage: dict[str, Any]) -> int:
    if api == "messages":
        read: int = usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + read == 20
        return read
    name = "input_tokens_details" if api == "responses" else "prompt_tokens_details"
    return int(usage[name]["cached_tokens"])


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_both_legs_and_a_usage_that_is_true(
    gateway: RunningGateway,
    control: FakeControlPlane,
    prefill: FakeEngine,
    decode: FakeEngine,
    api: str,
    stream: bool,
) -> None:
    """Decode found 19 of 20 tokens, 16 of which prefill had found: the client pays for the rest."""
    response = await ask(gateway, api, stream=stream)

    assert response.status_code == 200
    assert (prefill.legs(), decode.legs()) == (["prefill"], ["decode"])
    assert prefill.received[0].body["stream"] is False
    if stream:
        usages = [
            found
            for one in datas(response)
            for found in (one.get("usage"), (one.get("response") or {}).get("usage"))
            if found
        ]
        usage = usages[-1]
    else:
        usage = response.json()["usage"]
        assert not response.json().get("kv_transfer_params")
    assert cached(api, usage) == 16
    await eventually(lambda: control.ends, "EndTurn")
    told = control.ends[0].usage
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (20, 16, 5)
    assert control.outcomes() == [(1, session.TURN_OUTCOME_COMPLETED)]


@APIS
async def test_without_a_prefill_leg_the_bytes_are_the_engines(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine, api: str
) -> None:
    control.placements = [(None, ("d", decode.url))]
    through = await ask(gateway, api, stream=True)
    path, fields = ASK[api]
    plain = await gateway.http.post(decode.url + path, json={**fields, "stream": True})
    expected = plain.text.replace("resp_decode_2", "resp_decode_1")
    # But for what the engine says about the transfer to whoever sent a turn's token.
    assert through.text == expected
    assert "secret" not in through.text


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_a_stream_that_breaks_ends_with_an_error_event_of_its_api(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine, api: str
) -> None:
    decode.script = Script(break_after=4, break_in_event=True)
    response = await ask(gateway, api, stream=True)
    event = response.text.rstrip("\n").split("\n\n")[-1]
    assert event.startswith("event: error\ndata: ")
    data = json.loads(event.split("data: ")[1])
    assert data["type"] == "error"
    if api == "responses":
        assert (data["code"], data["sequence_number"]) == ("engine_broke_off", 4)
    else:
        assert data["error"]["type"] == "api_error"
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, session.TURN_OUTCOME_FAILED)]


@APIS
async def test_a_client_that_hangs_up_at_the_last_event_has_its_answer(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine, api: str
) -> None:
    """As most do: what is left is the end of the HTTP answer, which says nothing."""
    decode.script = Script(before_end=asyncio.Event())
    path, fields = ASK[api]
    end = {"chat": b"data: [DONE]", "responses": b"response.completed", "messages": b"message_stop"}
    async with gateway.http.stream("POST", path, json={**fields, "stream": True}) as response:
        got = b""
        async for chunk in response.aiter_raw():
            got += chunk
            if end[api] in got and got.endswith(b"\n\n"):
                break
    left = "kvshuttle_gateway_requests_in_flight"
    await eventually(lambda: not gateway.server.server_state.connections, "the client is gone")
    assert await gateway.metric(left) == 1
    decode.script.before_end.set()  # type: ignore[union-attr]

    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, session.TURN_OUTCOME_COMPLETED)]
    assert await gateway.metric("kvshuttle_gateway_client_cancels_total", phase="stream") == 0
    assert await gateway.metric("kvshuttle_gateway_requests_total", route=api, status="200") == 1


@APIS
async def test_a_stream_that_breaks_after_its_last_event_is_whole(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine, api: str
) -> None:
    whole = await ask(gateway, api, stream=True)
    decode.script = Script(break_at_end=True)
    broken = await ask(gateway, api, stream=True)
    assert broken.text == whole.text.replace("resp_decode_1", "resp_decode_2")
    await eventually(lambda: len(control.ends) == 2, "EndTurn")
    assert {outcome for _, outcome in control.outcomes()} == {session.TURN_OUTCOME_COMPLETED}


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_an_engines_error_event_is_the_last(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine, api: str
) -> None:
    error = b'event: error\ndata: {"type":"error"}\n\n'
    decode.script = Script(last_event=error, no_done=True)
    response = await ask(gateway, api, stream=True)
    assert response.content.endswith(error)
    assert response.text.count("event: error") == 1
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, session.TURN_OUTCOME_FAILED)]


async def test_responses_go_elsewhere_until_the_first_token(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine
) -> None:
    """vLLM's first two events say nothing: an engine that dies after them may be replaced."""
    async with FakeEngine("bad") as bad:
        bad.script = Script(break_after=2)
        control.placements = [(None, ("bad", bad.url)), (None, ("d", decode.url))]
        response = await ask(gateway, "responses", stream=True)
    assert response.headers["x-kvshuttle-fallback"] == "DECODE_UNREACHABLE"
    assert response.text.count("event: response.created") == 1
    assert datas(response)[-1]["type"] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thinking_budget_does_not_stop_the_prefill_leg(
    gateway: RunningGateway, prefill: FakeEngine, stream: bool
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1_024}
    answer = await ask(gateway, "messages", thinking=thinking, max_tokens=2_000, stream=stream)
    assert answer.status_code == 200
    assert "x-kvshuttle-fallback" not in answer.headers
    assert prefill.received[0].body["thinking"] == {"type": "adaptive"}


async def test_refusals_have_the_apis_shape(control: FakeControlPlane) -> None:
    async with running_gateway(control_plane="127.0.0.1:9") as gateway:
        messages = await ask(gateway, "messages")
        responses = await ask(gateway, "responses")
        broken = await gateway.http.post("/v1/messages", content=b"{")
    assert (messages.status_code, responses.status_code) == (503, 503)
    assert messages.json()["type"] == "error"
    assert messages.json()["error"]["type"] == "overloaded_error"
    assert responses.json()["error"]["code"] == "no_engine"
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_an_engines_refusal_has_the_apis_shape(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    """vLLM checks a body before it looks at the route, and says so in OpenAI's form."""
    said = json.dumps({"error": {"message": "max_tokens: none", "type": "Bad Request"}}).encode()
    for engine in (prefill, decode):
        prefill.script = decode.script = Script()
        engine.script = Script(status=422, body=said)
        refused = await ask(gateway, "messages")
        assert refused.status_code == 422
        assert refused.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "max_tokens: none"},
        }
        assert (await ask(gateway, "responses")).content == said
        engine.script = Script(status=404, body=b"no such thing")
        assert (await ask(gateway, "messages")).content == b"no such thing"


async def test_keys_of_both_kinds_of_clients(
    control: FakeControlPlane, decode: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'k-1').hexdigest()}: acme\n")
    control.placements = [(None, ("d", decode.url))]
    async with running_gateway(control_plane=control.target, api_keys_file=keys) as gateway:
        right = await ask(gateway, "messages", headers={"X-Api-Key": "k-1"})
        wrong = await ask(gateway, "messages", headers={"X-Api-Key": "k-2"})
        none = await ask(gateway, "messages")
        await ask(gateway, "responses", headers={"X-Api-Key": "k-1"}, request_id="resp_mine")
    assert (right.status_code, wrong.status_code, none.status_code) == (200, 401, 401)
    assert wrong.json()["error"]["type"] == "authentication_error"
    for got in decode.received:
        assert "x-api-key" not in got.headers
    assert "request_id" not in decode.received[-1].body


async def test_tokens_are_counted_by_an_engine(gateway: RunningGateway, decode: FakeEngine) -> None:
    path, fields = ASK["messages"]
    nobody = await gateway.http.post(path + "/count_tokens", json=fields)
    assert (nobody.status_code, nobody.json()["type"]) == (503, "error")
    await ask(gateway, "messages")
    counted = await gateway.http.post(path + "/count_tokens", json=fields)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 1})
    assert gateway.http.headers.get("authorization") is None


async def test_a_conversation_of_stored_responses_stays_one_session_where_it_is_kept(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.placements = [(("p", prefill.url), ("d", decode.url))]
    decode.stores = True
    async with running_gateway(control_plane=control.target) as gateway:
        first = await ask(gateway, "responses", headers={"X-Session-ID": "s1"})
        name = first.json()["id"]
        for stream in (True, False):
            second = await ask(gateway, "responses", previous_response_id=name, stream=stream)
            assert second.status_code == 200
            assert second.headers["x-kvshuttle-session"] == "s1"
            assert second.headers["x-kvshuttle-reason"] == "STORED_RESPONSE"
            name = datas(second)[0]["response"]["id"] if stream else second.json()["id"]
        assert not prefill.stored
        assert decode.legs() == ["decode", "plain", "plain"]
        read = await gateway.http.get(f"/v1/responses/{name}")
        assert (read.status_code, read.json()["id"]) == (200, name)
        events = await gateway.http.get(f"/v1/responses/{name}?stream=true")
        assert events.text == "event: response.completed\ndata: {}\n\n"
        cancelled = await gateway.http.post(f"/v1/responses/{name}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        unknown = await ask(gateway, "responses", previous_response_id="resp_x")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "previous_response_not_found"

    # Another gateway, which has never seen it, finds the engine by asking.
    async with running_gateway(
        control_plane=control.target, decode_url=[prefill.url, decode.url]
    ) as other:
        third = await ask(other, "responses", previous_response_id=name)
        assert third.status_code == 200
        assert third.headers["x-kvshuttle-session"].startswith("auto-")
    assert len(decode.received) == 4


async def test_a_tenant_does_not_reach_anothers_responses(
    control: FakeControlPlane, decode: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("".join(f"{hashlib.sha256(t.encode()).hexdigest()}: {t}\n" for t in "ab"))
    control.placements = [(None, ("d", decode.url))]
    decode.stores = True
    async with running_gateway(
        control_plane=control.target, api_keys_file=keys, decode_url=[decode.url]
    ) as gateway:
        a, b = ({"authorization": f"Bearer {one}"} for one in "ab")
        name = (await ask(gateway, "responses", headers=a)).json()["id"]
        assert (await gateway.http.get(f"/v1/responses/{name}", headers=a)).status_code == 200
        assert (await gateway.http.get(f"/v1/responses/{name}", headers=b)).status_code == 404
        stolen = await ask(gateway, "responses", headers=b, previous_response_id=name)
        assert stolen.status_code == 404
    assert len(decode.received) == 1


async def test_a_background_response_is_one_engines(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    decode.stores = True
    queued = await ask(gateway, "responses", background=True)
    assert queued.json()["status"] == "queued"
    assert prefill.legs() == []
    read = await gateway.http.get(f"/v1/responses/{queued.json()['id']}")
    assert read.status_code == 200


async def test_decodes_own_numbers_where_prefill_failed(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine
) -> None:
    prefill.script = Script(status=500)
    response = await ask(gateway, "chat")
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 19


async def test_a_pushed_turns_usage_is_prefills_once_it_is_known(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.plan = session.Plan(
        return_mode=session.RETURN_MODE_LAZY, forward_mode=types.FORWARD_MODE_PUSH
    )
    decode.script = Script(mid_stream=asyncio.Event())
    answer = asyncio.create_task(ask(gateway, "messages", stream=True))
    ok = {"leg": "prefill", "result": "ok"}
    registry = gateway.server.config.app.state.gateway.metrics.registry  # type: ignore[union-attr]
    name = "kvshuttle_gateway_leg_duration_seconds_count"
    await eventually(lambda: registry.get_sample_value(name, ok), "prefill's answer")
    assert decode.script.mid_stream is not None
    decode.script.mid_stream.set()
    usage = [one["usage"] for one in datas(await answer) if "usage" in one][-1]
    assert cached("messages", usage) == 16


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"down", "answered 503: down. Try"),
        (b"", "answered 503. Try"),
        (b'{"error": {"message": "out of memory.", "code": 503}}', "503: out of memory. Try"),
        (b'{"error": "no"}', '503: {"error": "no"}. Try'),
        (b"[" * 100_000, "503: [[["),
        (b"\xff\x00", "503: "),
        (b"x" * 1_000_000, "503: xxx"),
    ],
)
async def test_an_engine_that_answers_an_error_was_reached(
    prefill: FakeEngine, decode: FakeEngine, body: bytes, said: str
) -> None:
    prefill.reads_fail = decode.reads_fail = body
    async with running_gateway(
        control_plane="127.0.0.1:9", prefill_url=[prefill.url], decode_url=[decode.url]
    ) as gateway:
        path, fields = ASK["messages"]
        counted = await gateway.http.post(path + "/count_tokens", json=fields)
        models = await gateway.http.get("/v1/models")
        # One that can answer is found.
        prefill.reads_fail = None
        assert (await gateway.http.post(path + "/count_tokens", json=fields)).status_code == 200

    assert counted.status_code == models.status_code == 502
    assert counted.json()["type"] == "error"
    assert models.json()["error"]["code"] == "engine_error"
    for answer in (counted, models):
        message = answer.json()["error"]["message"]
        assert said in message
        assert "reached" not in message
        assert len(message) < 500
