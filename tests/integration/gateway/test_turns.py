"""A turn that goes well: what each leg gets, and what the client gets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvshuttle.v1 import session_service_pb2 as session
from tests.integration.gateway.conftest import CHAT
from tests.integration.gateway.fake_engine import DONE, EVENTS, Script
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from tests.integration.gateway.conftest import RunningGateway
    from tests.integration.gateway.fake_control_plane import FakeControlPlane
    from tests.integration.gateway.fake_engine import FakeEngine


async def test_two_legs_and_an_end(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    response = await gateway.chat(headers={"X-Session-ID": "s1"})

    assert response.status_code == 200
    assert prefill.legs() == ["prefill"]
    assert decode.legs() == ["decode"]
    assert prefill.received[0].token == decode.received[0].token == "token-1"
    assert response.headers["x-kvshuttle-session"] == "s1"
    assert response.headers["x-kvshuttle-turn"] == "1"
    assert response.headers["x-kvshuttle-mode"] == "lazy"
    assert response.headers["x-kvshuttle-reason"] == "CHEAPER_TO_MOVE"
    assert "x-kvshuttle-fallback" not in response.headers
    assert control.begins[0].session_id == "s1"
    assert control.begins[0].return_policy == session.RETURN_POLICY_AUTO
    await eventually(lambda: control.ends, "EndTurn")
    end = control.ends[0]
    assert (end.session_id, end.turn, end.outcome) == ("s1", 1, session.TURN_OUTCOME_COMPLETED)
    # What prefill found, not what decode did: that includes what prefill had just computed.
    assert end.usage.prompt_tokens == 20
    assert end.usage.cached_tokens == 16
    assert end.usage.output_tokens == 5
    assert not end.usage.HasField("time_to_first_token"), "an unstreamed answer has no first token"
    assert set(control.tenants) == {"default"}


async def test_a_streamed_answer_has_a_time_to_its_first_token(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    await gateway.chat(headers={"X-Session-ID": "s1"}, stream=True)
    await eventually(lambda: control.ends, "EndTurn")
    assert control.ends[0].usage.time_to_first_token.ToNanoseconds() > 0


async def test_prefill_gets_one_token_and_decode_the_request_as_it_is(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    asked: dict[str, Any] = {
        **CHAT,
        "max_completion_tokens": 77,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "best_of": 2,
        "min_tokens": 4,
        "logprobs": True,
        "top_logprobs": 3,
        "logprob_token_ids": [1],
        "seed": 7,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "json_object"},
        "stop": ["\ud83d", "é"],
        "temperature": 0.1,
        "something_new": {"a": [1, None, 1e-7, 12345678901234567890]},
    }
    await gateway.http.post("/v1/chat/completions", content=json.dumps(asked))

    got = decode.received[0].body
    params = got.pop("kv_transfer_params")
    assert got == asked
    assert params == {"kvshuttle": {"turn_token": "token-1", "leg": "decode"}}
    got = prefill.received[0].body
    assert got.pop("kv_transfer_params") == {
        "kvshuttle": {"turn_token": "token-1", "leg": "prefill"}
    }
    dropped = {
        *("stream_options", "best_of", "min_tokens", "logprobs", "top_logprobs"),
        *("logprob_token_ids", "seed"),
    }
    expected = {name: value for name, value in asked.items() if name not in dropped}
    assert got == {
        **expected,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
    }


async def test_stream_is_passed_through_byte_for_byte(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    response = await gateway.chat(stream=True)

    assert response.content == b"".join([*EVENTS, DONE])
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    await eventually(lambda: control.ends, "EndTurn")
    assert control.ends[0].outcome == session.TURN_OUTCOME_COMPLETED
    assert control.ends[0].usage.prompt_tokens == 20
    assert control.ends[0].usage.output_tokens == 0
    count = await gateway.metric(
        "kvshuttle_gateway_time_to_first_token_seconds_count", stream="true"
    )
    assert count == 1
    cached = control.ends[0].usage.cached_tokens
    tokens = "kvshuttle_gateway_prompt_tokens_total"
    assert await gateway.metric(tokens, source="cached") == cached
    assert await gateway.metric(tokens, source="computed") == 20 - cached


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [10**30, 2**70, 2**64, 2**40 + 1])
async def test_a_turn_whose_engine_counts_wrong_ends_all_the_same(
    gateway: RunningGateway,
    control: FakeControlPlane,
    prefill: FakeEngine,
    decode: FakeEngine,
    stream: bool,
    value: int,
) -> None:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = {**dict.fromkeys(names, value), "prompt_tokens_details": {"cached_tokens": value}}
    prefill.script = Script(usage=usage)
    event = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    decode.script = Script(usage=usage, last_event=event)
    response = await gateway.chat(stream=stream)

    assert response.status_code == 200
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, session.TURN_OUTCOME_COMPLETED)]
    told = control.ends[0].usage
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (0, 0, 0)


async def test_usage_of_a_stream_is_reported(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    await gateway.chat(stream=True, stream_options={"include_usage": True})

    await eventually(lambda: control.ends, "EndTurn")
    assert control.ends[0].usage.output_tokens == 5


async def test_answer_is_byte_for_byte_but_for_transfer_parameters(
    gateway: RunningGateway, decode: FakeEngine
) -> None:
    raw = '{ "id":"x", "text":"é\\u00e9",  "kv_transfer_params": null }'.encode()
    decode.script = Script(body=raw, headers={"x-request-id": "r-1"})
    response = await gateway.chat()
    assert response.content == raw
    assert response.headers["x-request-id"] == "r-1"

    decode.script = Script()
    response = await gateway.chat()
    assert "kv_transfer_params" not in response.json()
    assert response.json()["choices"][0]["message"]["content"] == "Grüße"


async def test_transfer_parameters_from_outside_are_dropped(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    evil = {"kvshuttle": {"turn_token": "stolen", "leg": "decode"}, "do_remote_prefill": True}
    await gateway.chat(
        kv_transfer_params=evil,
        extra_body={"kv_transfer_params": evil, "keep": 1},
        vllm_xargs={"kv_transfer_params": "x", "ec_transfer_params": "y", "keep": 2},
        ec_transfer_params={"do_remote_encode": True},
    )

    for engine in (prefill, decode):
        body = engine.received[0].body
        assert body["kv_transfer_params"]["kvshuttle"]["turn_token"] == "token-1"
        assert "do_remote_prefill" not in body["kv_transfer_params"]
        assert "ec_transfer_params" not in body
        assert body["extra_body"] == {"keep": 1}
        assert body["vllm_xargs"] == {"keep": 2}
    assert await gateway.metric("kvshuttle_gateway_dropped_kv_transfer_params_total") == 1


async def test_turn_on_one_worker(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    control.plan = session.Plan(return_mode=session.RETURN_MODE_DIRECT, reason="SAME_WORKER")
    response = await gateway.chat()

    assert response.headers["x-kvshuttle-mode"] == "direct"
    assert decode.legs() == ["decode"]
    assert prefill.legs() == []


async def test_completions_route(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    response = await gateway.http.post(
        "/v1/completions", json={"model": "m", "prompt": "once", "max_tokens": 9}
    )

    assert response.status_code == 200
    assert prefill.received[0].path == decode.received[0].path == "/v1/completions"
    assert prefill.received[0].body["max_tokens"] == 1
    assert "max_completion_tokens" not in prefill.received[0].body
    assert decode.received[0].body["max_tokens"] == 9


async def test_requests_that_cannot_be_split_run_on_decode_as_a_turn(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    for fields in (
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "echo": True, "logprobs": 1},
        {"prompt": "a", "prompt_logprobs": 0},
    ):
        await gateway.http.post("/v1/completions", json={"model": "m", **fields})

    assert prefill.legs() == []
    assert decode.legs() == ["plain"] * 4
    await eventually(lambda: len(control.ends) == 4, "four EndTurns")
    ids = [begin.session_id for begin in control.begins]
    assert ids[0] != ids[1]


async def test_return_policy_header(gateway: RunningGateway, control: FakeControlPlane) -> None:
    for word in ("never", "Always", "auto"):
        await gateway.chat(headers={"X-KVShuttle-Return": word})
    refused = await gateway.chat(headers={"X-KVShuttle-Return": "sometimes"})

    assert [begin.return_policy for begin in control.begins] == [
        session.RETURN_POLICY_NEVER,
        session.RETURN_POLICY_ALWAYS,
        session.RETURN_POLICY_AUTO,
    ]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-KVShuttle-Return"


async def test_engine_errors_reach_the_client_as_they_are(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    body = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'
    prefill.script = Script(
        status=400, body=body, headers={"content-type": "application/json", "x-mark": "p"}
    )
    response = await gateway.chat(stream=True)
    assert (response.status_code, response.content) == (400, body)
    assert response.headers["x-mark"] == "p"
    assert decode.legs() == []

    prefill.script = Script()
    decode.script = Script(status=503, body=b"overloaded", headers={"retry-after": "7"})
    response = await gateway.chat()
    assert (response.status_code, response.content) == (503, b"overloaded")
    assert response.headers["retry-after"] == "7"
    await eventually(lambda: len(control.ends) == 2, "two EndTurns")
    assert control.outcomes() == [
        (1, session.TURN_OUTCOME_FAILED),
        (2, session.TURN_OUTCOME_FAILED),
    ]
