"""What the APIs have to say about themselves, held against vLLM's own classes where it is here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshuttle.gateway import errors
from kvshuttle.gateway.body import RequestBody, estimate_prompt_tokens, leg_body, parse
from kvshuttle.gateway.dialects import DIALECTS, Route, Usage
from kvshuttle.gateway.dialects.responses import response_id
from kvshuttle.gateway.usage import TurnCost, usage_of

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
FULL: dict[Route, dict[str, Any]] = {
    "responses": {
        "model": "m",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "instructions": "be kind",
        "tools": [FUNCTION],
        "max_output_tokens": 90,
        "stream": True,
        "store": True,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "reasoning": {"effort": "low"},
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "enable_response_messages": True,
    },
    "messages": {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "max_tokens": 4_096,
        "thinking": {"type": "enabled", "budget_tokens": 2_048},
        "stream": True,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    },
}


def body(route: Route, **changes: Any) -> RequestBody:
    fields = {name: v for name, v in {**FULL[route], **changes}.items() if v is not ...}
    return parse(route, json.dumps(fields).encode())


def prefill(route: Route, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(leg_body(body(route, **changes), "prefill", "t"))
    return made


def test_the_prefill_leg_of_responses() -> None:
    made = prefill("responses")
    assert (made["stream"], made["store"], made["background"]) == (False, False, False)
    assert made["max_output_tokens"] == 1
    assert "top_logprobs" not in made
    for name in ("input", "instructions", "tools", "reasoning", "prompt_cache_key"):
        assert made[name] == FULL["responses"][name]


def test_the_prefill_leg_of_messages() -> None:
    made = prefill("messages")
    assert (made["stream"], made["max_tokens"]) == (False, 1)
    assert made["thinking"] == {"type": "adaptive"}
    for name in ("messages", "system", "tools", "metadata"):
        assert made[name] == FULL["messages"][name]
    assert prefill("messages", thinking={"type": "disabled"})["thinking"] == {"type": "disabled"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"tools": ...}, True),
        ({"previous_response_id": "resp_1"}, False),
        ({"background": True}, False),
        ({"tools": [FUNCTION, {"type": "web_search_preview"}]}, False),
        ({"tools": [{"type": "mcp", "server_label": "s"}]}, False),
    ],
)
def test_which_responses_can_be_split(fields: dict[str, Any], expected: bool) -> None:
    one = body("responses", **fields)
    assert one.dialect.can_be_split(one.fields) is expected


def test_estimates_count_texts_and_no_media() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "A" * 10_000}}
    for route, field in (("messages", "messages"), ("responses", "input")):
        texts = [{"role": "user", "content": [image, {"text": "x" * 400}]}]
        made = estimate_prompt_tokens(body(route, **{field: texts}))  # type: ignore[arg-type]
        assert 100 <= made < 150


def test_errors_in_each_apis_words() -> None:
    error = errors.no_engine_known()
    made = json.loads(DIALECTS["messages"].error_body(error))
    assert made == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": error.message},
    }
    assert json.loads(DIALECTS["responses"].error_body(error))["error"]["code"] == "no_engine"
    sent = b'event: x\ndata: {"sequence_number":7}\n\n'
    event = DIALECTS["responses"].error_event(errors.engine_broke_off(), sent)
    assert event.startswith(b"event: error\ndata: ")
    data = json.loads(event.split(b"data: ")[1])
    assert (data["type"], data["code"], data["sequence_number"]) == ("error", "engine_broke_off", 8)
    assert b"authentication_error" in DIALECTS["messages"].error_body(errors.unauthorized("x"))


def test_usage_is_read_alike() -> None:
    read: dict[Route, dict[str, Any]] = {
        "chat": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None},
        "responses": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": None},
        "messages": {"input_tokens": 9, "output_tokens": 2},
    }
    for route, usage in read.items():
        assert DIALECTS[route].usage(usage) == Usage(prompt=9, output=2)
    split = {"input_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3}
    assert DIALECTS["messages"].usage(split) == Usage(prompt=9, cached=4, created=3)


def test_numbers_nobody_told_are_not_made_up() -> None:
    for dialect in DIALECTS.values():
        assert dialect.true_numbers({}, Usage(prompt=9)) == {}


def test_the_name_of_a_response() -> None:
    assert response_id(b'{"id": "resp_1", "object": "response"}') == "resp_1"
    event = (
        b'event: response.created\ndata: {"response": {"id": "resp_2"}}\n\nevent: x\ndata: 1\n\n'
    )
    assert response_id(event) == "resp_2"
    for nothing in (b"", b"[1]", b"data: x\n\n", b'{"id": 7}'):
        assert response_id(nothing) is None


def test_vllm_takes_both_legs() -> None:
    """Its own classes read what the gateway sends, with the turn's token in it."""
    anthropic = pytest.importorskip("vllm.entrypoints.anthropic.protocol")
    responses = pytest.importorskip("vllm.entrypoints.openai.responses.protocol")
    classes = {
        "messages": anthropic.AnthropicMessagesRequest,
        "responses": responses.ResponsesRequest,
    }
    for route, kind in classes.items():
        for leg in ("prefill", "decode"):
            raw = leg_body(body(route), leg, "t")  # type: ignore[arg-type]
            read = kind.model_validate_json(raw)
            assert read.kv_transfer_params == {"kvshuttle": {"turn_token": "t", "leg": leg}}
            assert bool(read.stream) is (leg == "decode")


USAGES: dict[Route, dict[str, Any]] = {
    "chat": {
        "prompt_tokens": 20,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 16, "created_cache_tokens": 4},
    },
    "responses": {
        "input_tokens": 20,
        "output_tokens": 5,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 4},
    },
    "messages": {
        "input_tokens": 1,
        "output_tokens": 5,
        "cache_read_input_tokens": 16,
        "cache_creation_input_tokens": 3,
    },
}
MOST = 1 << 40
NO_COUNTS = [MOST + 1, 2**64, 2**70, 10**30, -1, True, 1.5, 1e300, "7", None, [], {"a": 1}]


def cost(route: Route, usage: dict[str, Any]) -> dict[str, int]:
    """What the control plane is told, of a usage that either leg has."""
    found = usage_of(json.dumps({"usage": usage}).encode(), DIALECTS[route])
    made = TurnCost(prefill=found, decode=found).message()
    assert made == TurnCost(decode=found).message()
    names = ("prompt_tokens", "cached_tokens", "output_tokens")
    return {name: getattr(made, name) for name in names}


@pytest.mark.parametrize("route", list(USAGES))
def test_a_usage_is_told_as_it_is(route: Route) -> None:
    assert cost(route, USAGES[route]) == {
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "output_tokens": 5,
    }


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
@pytest.mark.parametrize("route", list(USAGES))
def test_what_cannot_be_a_count_is_not_told(route: Route, value: Any) -> None:
    usage = USAGES[route]
    changed = [{**usage, name: value} for name in usage]
    for name, known in usage.items():
        if isinstance(known, dict):
            changed.extend({**usage, name: {**known, inner: value}} for inner in known)
    for one in changed:
        told = cost(route, one)
        assert told["cached_tokens"] <= told["prompt_tokens"] <= 20
        assert told["output_tokens"] in (0, 5)
    assert set(cost(route, dict.fromkeys(usage, value)).values()) == {0}


@pytest.mark.parametrize("route", list(USAGES))
def test_the_largest_counts_are_told(route: Route) -> None:
    told = cost(route, {name: MOST for name, one in USAGES[route].items() if isinstance(one, int)})
    assert told["output_tokens"] == MOST
    # Of messages it is the sum of three, which is no count any more.
    assert told["prompt_tokens"] == (0 if route == "messages" else MOST)


def test_more_cannot_have_been_found_than_there_was() -> None:
    found = Usage(prompt=20, cached=21, output=5)
    assert TurnCost(prefill=found).message().cached_tokens == 20
    assert TurnCost(decode=found).message().prompt_tokens == 20
