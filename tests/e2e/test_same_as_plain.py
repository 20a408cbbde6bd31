"""Whatever a client asks for, the gateway answers as one plain engine does: status and answer.

Parameters of all kinds, right, wrong and absurd.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshuttle.localstack import local_http
from tests.support.conversation import LOGPROB_TOLERANCE, text

if TYPE_CHECKING:
    from kvshuttle.localstack import Engine
    from tests.e2e.conftest import Cluster

pytestmark = pytest.mark.usefixtures("nothing_leaked")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = text(150, 4_242)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}

# Added to a greedy request of eight tokens; None takes a key away.
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-token": {"max_tokens": 1},
    "no-token": {"max_tokens": 0},
    "negative-tokens": {"max_tokens": -1},
    "tokens-as-text": {"max_tokens": "8"},
    "tokens-as-word": {"max_tokens": "many"},
    "tokens-as-float": {"max_tokens": 8.5},
    "tokens-true": {"max_tokens": True},
    "more-than-the-window": {"max_tokens": 1_000_000},
    "max-completion-tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "both-maxima": {"max_tokens": 3, "max_completion_tokens": 5},
    "min-tokens": {"min_tokens": 8, "ignore_eos": True},
    "min-above-max": {"min_tokens": 20},
    "n-2": {"n": 2},
    "n-0": {"n": 0},
    "n-negative": {"n": -3},
    "n-text": {"n": "2"},
    "n-null": {"n": None},
    "top-logprobs": {"logprobs": True, "top_logprobs": 5},
    "top-logprobs-alone": {"top_logprobs": 5},
    "top-logprobs-far": {"logprobs": True, "top_logprobs": 100_000},
    "top-logprobs-negative": {"logprobs": True, "top_logprobs": -5},
    "prompt-logprobs": {"prompt_logprobs": 1},
    "prompt-logprobs-streamed": {"prompt_logprobs": 1, "stream": True},
    "stop": {"stop": ["e", "qq"]},
    "stop-empty": {"stop": ""},
    "stop-number": {"stop": 5},
    "stop-null": {"stop": None},
    "stop-token-ids": {"stop_token_ids": [5, 6, 7]},
    "stop-many": {"stop": [f"x{i}" for i in range(500)]},
    "temperature-negative": {"temperature": -1},
    "temperature-text": {"temperature": "hot"},
    "top-p-0": {"top_p": 0},
    "top-p-2": {"top_p": 2},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.5},
    "penalty-far": {"presence_penalty": 99},
    "repetition-penalty": {"repetition_penalty": 1.3},
    "logit-bias": {"logit_bias": {"7": 100}},
    "logit-bias-word": {"logit_bias": {"x": 100}},
    "logit-bias-far": {"logit_bias": {"99999999": 100}},
    "allowed-tokens": {"allowed_token_ids": [10, 11, 12]},
    "allowed-none": {"allowed_token_ids": []},
    "bad-words": {"bad_words": ["a"]},
    "seed-far": {"seed": 2**70},
    "seed-negative": {"seed": -5},
    "tools": {"tools": [TOOL]},
    "tools-none": {"tools": [TOOL], "tool_choice": "none"},
    "tools-auto": {"tools": [TOOL], "tool_choice": "auto"},
    "tools-named": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    },
    "tools-wrong-name": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "leap"}},
    },
    "tools-required": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
    "tools-number": {"tools": 5},
    "tools-empty": {"tools": []},
    "tool-choice-alone": {"tool_choice": "auto"},
    "json-object": {"response_format": {"type": "json_object"}},
    "json-schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}},
        }
    },
    "json-unknown": {"response_format": {"type": "poem"}},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    "choice": {"structured_outputs": {"choice": ["left", "right"]}},
    "no-messages": {"messages": []},
    "messages-missing": {"messages": None},
    "messages-text": {"messages": "hello"},
    "messages-numbers": {"messages": [1, 2]},
    "message-unknown-role": {"messages": [{"role": "wizard", "content": "hello"}]},
    "message-no-content": {"messages": [{"role": "user"}]},
    "message-null": {"messages": [{"role": "user", "content": None}]},
    "message-number": {"messages": [{"role": "user", "content": 5}]},
    "message-empty": {"messages": [{"role": "user", "content": ""}]},
    "message-parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]},
    "message-image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
                ],
            }
        ]
    },
    "message-unknown-part": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "unicode": {"messages": [{"role": "user", "content": "ü漢字🙂\u0000\u202e" * 30}]},
    "assistant-last": {
        "messages": [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "So"}]
    },
    "continue-last": {
        "messages": [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "So"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "echo": {"echo": True},
    "too-long": {"messages": [{"role": "user", "content": text(6_000, 3)}]},
    "truncated": {"truncate_prompt_tokens": 64},
    "truncated-wrong": {"truncate_prompt_tokens": -7},
    "unknown-model": {"model": "nobody"},
    "no-model": {"model": None},
    "model-number": {"model": 7},
    "stream": {"stream": True},
    "stream-n": {"stream": True, "n": 3},
    "stream-word": {"stream": "perhaps"},
    "stream-usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream-usage-each": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "stream-options-alone": {"stream_options": {"include_usage": True}},
    "stream-options-wrong": {"stream": True, "stream_options": 5},
    "stream-too-long": {"stream": True, "messages": [{"role": "user", "content": text(6_000, 3)}]},
    "salt": {"cache_salt": "mine"},
    "salt-empty": {"cache_salt": ""},
    "salt-number": {"cache_salt": 5},
    "priority": {"priority": 3},
    "request-id": {"request_id": "chosen-by-the-client"},
    "unknown-keys": {"who": "knows", "deep": {"x": [[[[[[1]]]]]]}},
    "kv-params": {"kv_transfer_params": {"do_remote_prefill": True}},
    "kv-params-number": {"kv_transfer_params": 5},
    "template": {"chat_template": "{{ messages[0].content }}"},
    "template-broken": {"chat_template": "{{ messages["},
    "template-arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "beam": {"use_beam_search": True, "n": 2},
    "special-tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "ids-as-logprobs": {"logprobs": True, "return_tokens_as_token_ids": True},
}

TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-token": {"max_tokens": 1},
    "no-token": {"max_tokens": 0},
    "echo": {"echo": True},
    "echo-no-token": {"echo": True, "max_tokens": 0},
    "echo-logprobs": {"echo": True, "logprobs": 2},
    "logprobs": {"logprobs": 3},
    "logprobs-negative": {"logprobs": -3},
    "ids": {"prompt": list(range(100, 300))},
    "ids-far": {"prompt": [99_999_999, 5]},
    "ids-negative": {"prompt": [-1, 5]},
    "two-texts": {"prompt": [WORDS, "Once"]},
    "two-id-lists": {"prompt": [list(range(100, 200)), list(range(200, 300))]},
    "mixed": {"prompt": ["a", [1, 2]]},
    "empty": {"prompt": ""},
    "empty-list": {"prompt": []},
    "null": {"prompt": None},
    "number": {"prompt": 5},
    "suffix": {"suffix": "the end"},
    "n-3": {"n": 3},
    "two-texts-n-2": {"prompt": [WORDS, "Once"], "n": 2},
    "two-texts-streamed": {"prompt": [WORDS, "Once"], "stream": True},
    "stream": {"stream": True},
    "stream-echo": {"stream": True, "echo": True},
    "beam": {"use_beam_search": True, "n": 2},
    "embeds": {"prompt_embeds": "AAAA"},
    "too-long": {"prompt": text(6_000, 3)},
}


def base(route: str) -> dict[str, Any]:
    """A greedy request of eight tokens."""
    body: dict[str, Any] = {"model": "model", "max_tokens": 8, "temperature": 0.0, "seed": 0}
    if route == CHAT:
        return body | {"messages": [{"role": "user", "content": WORDS}]}
    return body | {"prompt": WORDS}


def parts(response: httpx.Response) -> Any:
    """What was answered, without ids and times; the pieces of a stream put together."""
    if response.status_code != 200:
        return None
    if not response.headers["content-type"].startswith("text/event-stream"):
        answer = response.json()
        return [_shape(choice) for choice in answer["choices"]], _counts(answer.get("usage"))
    pieces: dict[int, list[str]] = {}
    usage = None
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    for line in lines[:-1]:
        chunk = json.loads(line)
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            pieces.setdefault(choice["index"], []).append(piece)
            if choice.get("finish_reason"):
                pieces[choice["index"]].append(f"|{choice['finish_reason']}")
    return {i: "".join(x) for i, x in pieces.items()}, _counts(usage), lines[-1]


def _counts(usage: dict[str, Any] | None) -> Any:
    keys = ("prompt_tokens", "completion_tokens", "total_tokens")
    return usage and {key: usage.get(key) for key in keys}


def _shape(value: Any) -> Any:
    """Numbers rounded by what may differ in float32; ids that are drawn taken out."""
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in sorted(value.items()) if k not in ("id", "created")}
    if isinstance(value, list):
        return [_shape(v) for v in value]
    return pytest.approx(value, abs=LOGPROB_TOLERANCE) if isinstance(value, float) else value


def message(response: httpx.Response) -> str:
    """What is said to be wrong, but for how many keys the body had."""
    return re.sub(r"<dict of \d+ items>", "…", response.json()["error"]["message"])


def changed(route: str, changes: dict[str, Any]) -> dict[str, Any]:
    body = base(route) | changes
    return {key: value for key, value in body.items() if value is not None}


@pytest.mark.parametrize(
    ("route", "name"),
    [*((CHAT, name) for name in CHATS), *((COMPLETIONS, name) for name in TEXTS)],
    ids=lambda value: value.rsplit("/", 1)[-1],
)
def test_answered_as_by_a_plain_engine(
    cluster: Cluster, plain: Engine, route: str, name: str
) -> None:
    body = changed(route, (CHATS if route == CHAT else TEXTS)[name])
    # From outside they open nothing: they are not sent on, so not looked at either.
    own = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    expected = local_http.post(f"{plain.url}{route}", json=own, timeout=60)
    if expected.status_code == 200:
        # Warm, as decode's cache is after prefill's work.
        expected = local_http.post(f"{plain.url}{route}", json=own, timeout=60)
    for _ in range(2):
        answer = local_http.post(
            f"{cluster.gateway.url}{route}",
            json=body,
            headers={"X-Session-ID": f"same-{name}"},
            timeout=60,
        )
        assert answer.status_code == expected.status_code, (answer.text, expected.text)
        assert parts(answer) == parts(expected)
        if answer.status_code != 200:
            assert message(answer) == message(expected)
