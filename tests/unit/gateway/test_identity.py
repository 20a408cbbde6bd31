"""Which conversation a request belongs to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshuttle.gateway.body import RequestBody, parse
from kvshuttle.gateway.errors import ApiError
from kvshuttle.gateway.identity import identify


def chat(**fields: Any) -> RequestBody:
    return parse("chat", json.dumps({"model": "m", **fields}).encode())


def completion(prompt: Any) -> RequestBody:
    return parse("completions", json.dumps({"model": "m", "prompt": prompt}).encode())


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SYSTEM = message("system", "be kind")
HELLO = message("user", "hello")


def derived(body: RequestBody, tenant: str = "t") -> str:
    identity = identify(tenant, None, body)
    assert identity.source == "derived"
    return identity.session_id


def test_header_goes_before_key_goes_before_content() -> None:
    body = chat(messages=[HELLO], prompt_cache_key="k")
    assert identify("t", b"h", body).session_id == "h"
    assert identify("t", None, body).session_id == "k"
    assert identify("t", None, chat(messages=[HELLO], prompt_cache_key="")).source == "derived"


def test_later_turns_of_a_conversation_have_the_same_id() -> None:
    first = derived(chat(messages=[SYSTEM, HELLO]))
    later = chat(messages=[SYSTEM, HELLO, message("assistant", "hi"), message("user", "more")])
    assert derived(later) == first


@pytest.mark.parametrize(
    "other",
    [
        chat(messages=[SYSTEM, message("user", "goodbye")]),
        chat(messages=[message("system", "be rude"), HELLO]),
        chat(messages=[SYSTEM, HELLO], tools=[{"type": "function"}]),
        parse("chat", json.dumps({"model": "n", "messages": [SYSTEM, HELLO]}).encode()),
    ],
)
def test_what_differs_at_the_start_is_another_conversation(other: RequestBody) -> None:
    assert derived(other) != derived(chat(messages=[SYSTEM, HELLO]))


def test_tenants_do_not_share_a_derived_id() -> None:
    body = chat(messages=[HELLO])
    assert derived(body, "a") != derived(body, "b")


def test_completions() -> None:
    start = "x" * 300
    assert derived(completion(start)) == derived(completion(start + "more"))
    assert derived(completion([start])) == derived(completion(start))
    assert derived(completion(list(range(70)))) == derived(completion(list(range(90))))
    two = [identify("t", None, completion(["a", "b"])) for _ in range(2)]
    assert two[0].source == "unique"
    assert two[0].session_id != two[1].session_id


def test_ids_that_do_not_fit() -> None:
    long = chat(messages=[HELLO], prompt_cache_key="k" * 300)
    assert len(identify("t", None, long).session_id) <= 256
    assert identify("t", None, long) == identify("t", None, long)
    assert identify("t", "é".encode(), long).session_id == "é"
    for header in (b"x" * 257, b"", b"\xff", b"a\x07"):
        with pytest.raises(ApiError) as raised:
            identify("t", header, long)
        assert raised.value.status == 400
        assert raised.value.param == "X-Session-ID"
    with pytest.raises(ApiError):
        identify("t", None, chat(messages=[HELLO], prompt_cache_key=7))


def test_messages_that_are_none_do_not_break() -> None:
    for messages in (None, "x", [], [1], [{"role": "assistant"}]):
        assert identify("t", None, chat(messages=messages)).session_id
