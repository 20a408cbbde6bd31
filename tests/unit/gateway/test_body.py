"""The legs' bodies, and how long a prompt is guessed to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.gateway.body import (
    MAX_DEPTH,
    TRANSFER_PARAMS,
    estimate_prompt_tokens,
    is_disaggregable,
    leg_body,
    parse,
    without_kv_params,
)
from kvshuttle.gateway.dialects import Route
from kvshuttle.gateway.errors import ApiError

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text().filter(lambda name: name not in TRANSFER_PARAMS), json_values))
def test_decode_leg_means_what_the_client_sent(fields: dict[str, Any]) -> None:
    for name in ("extra_body", "vllm_xargs"):
        fields.pop(name, None)
    body = parse("chat", json.dumps(fields).encode())
    assert json.loads(leg_body(body, "decode", None)) == fields
    with_token = json.loads(leg_body(body, "decode", "t"))
    assert with_token.pop("kv_transfer_params") == {
        "kvshuttle": {"turn_token": "t", "leg": "decode"}
    }
    assert with_token == fields


@pytest.mark.parametrize(
    ("route", "fields", "expected"),
    [
        ("chat", {"messages": []}, True),
        ("chat", {"messages": [], "logprobs": True, "top_logprobs": 2}, True),
        ("chat", {"messages": [], "prompt_logprobs": 0}, False),
        ("chat", {"messages": [], "echo": True}, False),
        ("completions", {"prompt": "a", "echo": True}, True),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 0}, False),
        ("completions", {"prompt": ["a"]}, True),
        ("completions", {"prompt": [1, 2, 3]}, True),
        ("completions", {"prompt": [[1], [2]]}, False),
        ("completions", {"prompt": "a", "use_beam_search": True}, False),
    ],
)
def test_is_disaggregable(route: Route, fields: dict[str, Any], expected: bool) -> None:
    assert is_disaggregable(parse(route, json.dumps(fields).encode())) is expected


def test_estimate() -> None:
    def tokens(route: Route, **fields: Any) -> int:
        return estimate_prompt_tokens(parse(route, json.dumps(fields).encode()))

    assert tokens("completions", prompt=list(range(7))) == 7
    assert tokens("completions", prompt=[[1, 2], [3]]) == 3
    assert tokens("completions", prompt="x" * 40) == 10
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 10_000}}
    with_image = tokens("chat", messages=[{"content": [image, {"text": "x" * 400}]}])
    assert 100 <= with_image < 150


@pytest.mark.parametrize("form", ["[", '{"a":'])
def test_nesting_is_bounded_before_anything_walks_it(form: str) -> None:
    def body(depth: int) -> bytes:
        close = "]" if form == "[" else "}"
        return f'{{"tools":{form * depth}1{close * depth}}}'.replace("[1]", "[]").encode()

    deepest = parse("chat", body(MAX_DEPTH - 1))
    assert estimate_prompt_tokens(deepest) == 0
    for depth in (MAX_DEPTH, 500, 900, 100_000):
        with pytest.raises(ApiError, match="nested too deeply"):
            parse("chat", body(depth))


def test_wide_is_not_deep() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 1_000
    parse("chat", json.dumps({"messages": messages}).encode())


def test_without_kv_params() -> None:
    for untouched in (b"", b'{"kv_transfer_params": null}', b"kv_transfer_params", b"[1]"):
        assert without_kv_params(untouched) == untouched
    raw = b'{"a": "\\ud83d", "kv_transfer_params": {"x": 1}}'
    assert json.loads(without_kv_params(raw)) == {"a": "\ud83d"}
    raw = b'{"a": 1, "kv_transfer_params": null, "ec_transfer_params": {"x": 1}}'
    assert json.loads(without_kv_params(raw)) == {"a": 1, "kv_transfer_params": None}
