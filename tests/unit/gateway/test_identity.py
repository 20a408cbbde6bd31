"""Which conversation a request belongs to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshuttle.gateway.body import RequestBody, parse
from kvshuttle.gateway.conversations import Conversations
from kvshuttle.gateway.errors import ApiError
from kvshuttle.gateway.identity import CLIENT_HEADERS, Identity, identify
from kvshuttle.gateway.stored import StoredResponse, StoredResponses


def chat(**fields: Any) -> RequestBody:
    return parse("chat", json.dumps({"model": "m", **fields}).encode())


def completion(prompt: Any) -> RequestBody:
    return parse("completions", json.dumps({"model": "m", "prompt": prompt}).encode())


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SYSTEM = message("system", "be kind")
HELLO = message("user", "hello")


def derived(body: RequestBody, tenant: str = "t") -> str:
    identity = identify(tenant, {}, body)
    assert identity.source == "derived"
    return identity.session_id


def test_header_goes_before_key_goes_before_content() -> None:
    body = chat(messages=[HELLO], prompt_cache_key="k")
    assert identify("t", {"x-session-id": "h"}, body).session_id == "h"
    assert identify("t", {}, body).session_id == "k"
    assert identify("t", {}, chat(messages=[HELLO], prompt_cache_key="")).source == "derived"


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
    two = [identify("t", {}, completion(["a", "b"])) for _ in range(2)]
    assert two[0].source == "unique"
    assert two[0].session_id != two[1].session_id


def test_ids_that_do_not_fit() -> None:
    long = chat(messages=[HELLO], prompt_cache_key="k" * 300)
    assert len(identify("t", {}, long).session_id) <= 256
    assert identify("t", {}, long) == identify("t", {}, long)
    assert identify("t", {"x-session-id": "é".encode().decode("latin-1")}, long).session_id == "é"
    for header in (b"x" * 257, b"", b"\xff", b"a\x07"):
        with pytest.raises(ApiError) as raised:
            identify("t", {"x-session-id": header.decode("latin-1")}, long)
        assert raised.value.status == 400
        assert raised.value.param == "X-Session-ID"
    with pytest.raises(ApiError):
        identify("t", {}, chat(messages=[HELLO], prompt_cache_key=7))


def test_messages_that_are_none_do_not_break() -> None:
    for messages in (None, "x", [], [1], [{"role": "assistant"}]):
        assert identify("t", {}, chat(messages=messages)).session_id


@pytest.mark.parametrize("name", CLIENT_HEADERS)
def test_what_agents_send_by_themselves_names_the_session(name: str) -> None:
    body = chat(messages=[HELLO], prompt_cache_key="k")
    assert identify("t", {name: "abc"}, body) == Identity("abc", "client_header")
    assert identify("t", {name: "abc", "x-session-id": "mine"}, body).session_id == "mine"
    assert identify("t", {name: " "}, body).session_id == "k"


def test_the_earlier_of_two_client_headers_counts() -> None:
    headers = {name: f"by-{name}" for name in reversed(CLIENT_HEADERS)}
    assert identify("t", headers, chat(messages=[HELLO])).session_id == f"by-{CLIENT_HEADERS[0]}"


def test_a_client_header_that_does_not_fit_is_hashed_not_refused() -> None:
    headers = {"session-id": "x" * 300}
    found = identify("t", headers, chat(messages=[HELLO]))
    assert found.session_id.startswith("key-")
    assert found == identify("t", headers, chat(messages=[SYSTEM, HELLO]))


def test_a_session_in_the_users_id() -> None:
    user = "user_0a1b_account__session_7f3e2a10-0000-4000-8000-000000000000"
    body = chat(messages=[HELLO], metadata={"user_id": user})
    assert identify("t", {}, body) == Identity(
        "7f3e2a10-0000-4000-8000-000000000000", "user_session"
    )
    assert identify(
        "t", {}, chat(messages=[HELLO], prompt_cache_key="k", metadata={"user_id": user})
    )
    assert identify("t", {}, chat(messages=[HELLO], metadata=["user_id"])).source == "derived"


def test_two_conversations_of_one_user_stay_two() -> None:
    metadata = {"user_id": "someone"}
    one = identify("t", {}, chat(messages=[SYSTEM, HELLO], metadata=metadata))
    other = identify("t", {}, chat(messages=[SYSTEM, message("user", "bye")], metadata=metadata))
    assert one.source == other.source == "user"
    assert one.session_id != other.session_id
    later = chat(
        messages=[SYSTEM, HELLO, message("assistant", "hi"), message("user", "more")],
        metadata=metadata,
    )
    assert identify("t", {}, later) == one


def responses(given: Any, **fields: Any) -> RequestBody:
    raw = json.dumps({"model": "m", "input": given, **fields}).encode()
    return parse("responses", raw)


def messages(*given: Any, **fields: Any) -> RequestBody:
    raw = json.dumps({"model": "m", "messages": list(given), "max_tokens": 9, **fields}).encode()
    return parse("messages", raw)


def test_a_conversation_of_responses_by_its_name() -> None:
    stored = StoredResponses()
    stored.note("t", "resp_1", StoredResponse("s1", "http://d"))
    for named in ("conv_1", {"id": "conv_1"}):
        body = responses("hello", conversation=named, previous_response_id="resp_1")
        assert identify("t", {}, body, stored) == Identity("conv_1", "conversation")
    keyed = responses("hello", conversation="conv_1", prompt_cache_key="k")
    assert identify("t", {}, keyed, stored).session_id == "k"


def test_a_response_names_the_session_of_the_one_before_within_a_tenant() -> None:
    stored = StoredResponses(limit=2)
    stored.note("t", "resp_1", StoredResponse("s1", "http://d"))
    user = {"user_id": "user_1_session_00000000-1111"}
    body = responses("more", previous_response_id="resp_1", metadata=user)
    assert identify("t", {}, body, stored) == Identity("s1", "previous_response")
    assert identify("other", {}, body, stored).source == "user_session"
    for number in range(2, 4):  # the one that was used last is kept
        stored.get("t", "resp_1")
        stored.note("t", f"resp_{number}", StoredResponse("s2", "http://d"))
    assert len(stored) == 2
    assert stored.get("t", "resp_2") is None
    assert identify("t", {}, body, stored).session_id == "s1"


def test_later_turns_of_responses_have_the_same_id_in_whatever_form() -> None:
    said = [{"type": "message", "role": "user", "content": "hello"}]
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    answer = {"role": "assistant", "content": "hi"}
    ids = {
        derived(responses(given, instructions="be kind"))
        for given in ("hello", said, parts, [*parts, answer, {"role": "user", "content": "more"}])
    }
    assert len(ids) == 1
    assert derived(responses("hello", instructions="be rude")) not in ids
    assert derived(responses("bye", instructions="be kind")) not in ids


def test_later_turns_of_messages_have_the_same_id_though_the_cache_marks_move() -> None:
    def text(said: str, *, marked: bool) -> dict[str, Any]:
        mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
        return {"type": "text", "text": said, **mark}

    def system(number: int) -> list[Any]:
        billing = text(f"x-anthropic-billing-header: n={number}", marked=False)
        return [billing, text("be kind", marked=number == 1)]

    two = [text("context", marked=False), text("hello", marked=True)]
    first = derived(messages(message("user", two), system=system(1)))
    unmarked = [text("context", marked=False), text("hello", marked=False)]
    later = [message("user", unmarked), message("assistant", "hi"), message("user", "more")]
    assert derived(messages(*later, system=system(2))) == first
    assert derived(messages(message("user", "bye"), system=system(1))) != first


def test_a_session_in_a_users_id_that_is_json() -> None:
    user = json.dumps({"device_id": "d", "session_id": "7f3e2a10"})
    body = messages(HELLO, metadata={"user_id": user})
    assert identify("t", {}, body) == Identity("7f3e2a10", "user_session")
    for odd in ("{", "{}", '{"session_id": 7}'):
        assert identify("t", {}, messages(HELLO, metadata={"user_id": odd})).source == "user"


def test_without_a_name_the_longest_known_beginning_names_it() -> None:
    known = Conversations(lambda: "2")
    metadata = {"user_id": "someone"}

    def ask(*said: dict[str, Any], **fields: Any) -> Identity:
        return identify("t", {}, chat(messages=[SYSTEM, *said], **fields), None, known)

    for fields, source in (({}, "derived"), ({"metadata": metadata}, "user")):
        first = ask(HELLO, **fields)
        # As it is named where nothing is known.
        assert first == identify("t", {}, chat(messages=[SYSTEM, HELLO], **fields))
        assert first.source == source
        # Another one that begins so meanwhile.
        other = ask(HELLO, **fields)
        assert other == Identity(f"{first.session_id}-2", "forked")
        assert first.place is not None
        assert other.place is not None
        first.place.answered([["assistant", "hi"]])
        other.place.answered([["assistant", "hey"]])
        more = message("user", "more")
        later = ask(HELLO, message("assistant", "hey"), more, **fields)
        assert later == Identity(other.session_id, "prefix")
        assert ask(HELLO, message("assistant", "hi"), more, **fields).source == "prefix"


def test_who_has_a_name_is_not_looked_at() -> None:
    known = Conversations(lambda: "2")
    named = identify("t", {"session-id": "s"}, chat(messages=[HELLO]), None, known)
    assert named.place is None
    assert identify("t", {}, completion(["a", "b"]), None, known).place is None
    assert len(known) == 0
