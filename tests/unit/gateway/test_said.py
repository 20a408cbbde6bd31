"""What is said looks alike in whatever form it comes back, and answers are heard as they are sent
back: whole, streamed, by each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshuttle.gateway import limits
from kvshuttle.gateway.dialects import DIALECTS, Route, said

TEXT = ["assistant", "Let me look."]
CALL = ["call", "look", '{"at":"a b","n":1}']
ARGUMENTS = '{"n": 1,  "at": "a b"}'
INPUT = {"at": "a b", "n": 1}

CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "look", "input": INPUT}
FUNCTION_CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "look",
    "arguments": ARGUMENTS,
    "status": "completed",
}
OUTPUT_TEXT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "s"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


# The same answer as clients send it back with the next turn.
BACK: dict[str, tuple[Route, Any]] = {
    "chat": ("chat", [assistant("Let me look.", tool_calls=[CHAT_CALL])]),
    "chat-spaces": ("chat", [assistant("\nLet me look. ", tool_calls=[CHAT_CALL], refusal=None)]),
    "chat-parts": (
        "chat",
        [assistant([{"type": "text", "text": "Let me look."}], tool_calls=[CHAT_CALL])],
    ),
    "chat-thoughts": (
        "chat",
        [assistant("Let me look.", tool_calls=[CHAT_CALL], reasoning_content="hm", reasoning="hm")],
    ),
    "chat-old": (
        "chat",
        [assistant("Let me look.", function_call={"name": "look", "arguments": ARGUMENTS})],
    ),
    "messages": ("messages", [assistant([{"type": "text", "text": "Let me look."}, TOOL_USE])]),
    "messages-thoughts": (
        "messages",
        [
            assistant(
                [
                    THINKING,
                    {"type": "text", "text": "Let me ", "citations": None},
                    {"type": "text", "text": "look.", "cache_control": {"type": "ephemeral"}},
                    {**TOOL_USE, "id": "other"},
                ]
            )
        ],
    ),
    "responses": ("responses", [OUTPUT_TEXT, FUNCTION_CALL]),
    "responses-easy": ("responses", [assistant("Let me look."), FUNCTION_CALL]),
    "responses-thoughts": (
        "responses",
        [
            REASONING,
            {**OUTPUT_TEXT, "id": "other"},
            {"type": "function_call", "call_id": "x", "name": "look", "arguments": ARGUMENTS},
        ],
    ),
}


def of_request(route: Route, messages: Any) -> list[Any]:
    field = {"responses": "input", "completions": "prompt"}.get(route, "messages")
    return DIALECTS[route].said({field: messages})


@pytest.mark.parametrize("name", BACK)
def test_an_answer_is_the_same_however_it_comes_back(name: str) -> None:
    assert of_request(*BACK[name]) == [TEXT, CALL]


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(
        b"event: " + str(one.get("type", "message")).encode() + b"\n"
        b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n"
        for one in events
    )


def delta(**fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def called(**function: Any) -> dict[str, Any]:
    return delta(tool_calls=[{"index": 0, "function": function}])


OTHER_CHOICE = {"choices": [{"index": 1, "delta": {"content": "else"}}]}
WHOLE: dict[Route, Any] = {
    "chat": {"choices": [{"index": 0, "message": BACK["chat-thoughts"][1][0]}]},
    "messages": {"content": BACK["messages-thoughts"][1][0]["content"]},
    "responses": {"output": BACK["responses-thoughts"][1]},
}
STREAMED: dict[Route, bytes] = {
    "chat": sse(
        delta(role="assistant", content=""),
        delta(reasoning="hm"),
        delta(content="Let me"),
        OTHER_CHOICE,
        delta(content=" look."),
        called(name="look", arguments=""),
        called(arguments=ARGUMENTS[:9]),
        called(arguments=ARGUMENTS[9:]),
        {"choices": [], "usage": {"prompt_tokens": 1}},
    )
    + b"data: [DONE]\n\n",
    "messages": sse(
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
        {"type": "content_block_delta", "index": 0, "delta": {"thinking": "hm"}},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "text", "text": ""},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"text": "Let me "}},
        {"type": "content_block_delta", "index": 1, "delta": {"text": "look."}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {**TOOL_USE, "input": {}}},
        {"type": "content_block_delta", "index": 2, "delta": {"partial_json": ARGUMENTS}},
        {"type": "message_stop"},
    ),
    "responses": sse(
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_text.delta", "delta": "Let me look."},
        {"type": "response.completed", "response": WHOLE["responses"]},
    ),
}


@pytest.mark.parametrize("route", STREAMED)
def test_an_answer_is_heard_as_it_will_come_back(route: Route) -> None:
    whole = DIALECTS[route].listener({})
    whole.whole(json.dumps(WHOLE[route]).encode())
    assert whole.said() == [TEXT, CALL]
    at_once = DIALECTS[route].listener({})
    at_once.events(STREAMED[route])
    assert at_once.said() == [TEXT, CALL]
    one_by_one = DIALECTS[route].listener({})
    for event in STREAMED[route].split(b"\n\n"):
        one_by_one.events(event + b"\n\n")
    assert one_by_one.said() == [TEXT, CALL]


@pytest.mark.parametrize("route", STREAMED)
def test_an_answer_that_is_none_is_not_heard(route: Route) -> None:
    for raw in (b"{", b"[]", b"{}", b'{"choices":[7]}', b'{"content":7,"output":7}'):
        listener = DIALECTS[route].listener({})
        listener.whole(raw)
        listener.events(b'event: response.completed\ndata: {"choices":' + raw + b"\n\n")
        listener.events(b'data: {"choices":[{"delta":{"tool_calls":[7]}}],"index":[]}\n\n')
        assert not listener.said()


def test_what_is_too_long_is_not_taken_note_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEARD_CHARS", 10)
    for route in ("chat", "messages"):
        listener = DIALECTS[route].listener({})
        listener.events(STREAMED[route])
        assert listener.said() is None


def test_what_others_say_differs_by_all_but_marks_and_ids() -> None:
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    user = of_request("messages", [{"role": "user", "content": [marked]}])
    assert user == of_request("chat", [{"role": "user", "content": "hi"}]) == [["user", "hi"]]
    assert of_request("responses", "hi") == user
    assert of_request("chat", [{"role": "system", "content": "hi"}]) != user
    results = [
        of_request("messages", [{"role": "user", "content": [{**found, "tool_use_id": number}]}])
        for number in ("1", "2")
        for found in [{"type": "tool_result", "content": "found"}]
    ]
    assert results[0] == results[1]
    outputs = [
        of_request("responses", [{"type": "function_call_output", "call_id": "1", "output": text}])
        for text in ("found", "nothing")
    ]
    assert outputs[0] != outputs[1]
    images = [
        of_request("chat", [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])
        for url in ("a", "b")
    ]
    assert images[0] != images[1]


@pytest.mark.parametrize("given", [None, 7, "x", [], [7], [[]], [{}], [{"role": "assistant"}]])
@pytest.mark.parametrize("route", ["chat", "messages", "responses", "completions"])
def test_what_is_no_conversation_does_no_harm(route: Route, given: Any) -> None:
    json.dumps(of_request(route, given))


def test_arguments_that_are_nested_far_too_deep_are_a_text() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 50_000 + "]" * 50_000}}
    for piece in of_request("chat", [assistant(None, tool_calls=[call])]):
        assert isinstance(piece[2], str)


@pytest.mark.parametrize("given", [None, "", "{}", " {} ", {}])
def test_a_call_without_arguments_is_the_same_however_that_is_said(given: Any) -> None:
    """Engines stream none at all, or `{}`; frameworks parse what came and write it anew."""
    call = {"function": {"name": "now", "arguments": given}}
    assert of_request("chat", [assistant(None, tool_calls=[call])]) == [["call", "now", "{}"]]
    use = {"type": "tool_use", "id": "t", "name": "now", "input": given}
    assert of_request("messages", [assistant([use])]) == [["call", "now", "{}"]]
    item = {"type": "function_call", "call_id": "c", "name": "now", "arguments": given}
    assert of_request("responses", [item]) == [["call", "now", "{}"]]


def test_a_completion_goes_on_where_its_answer_ended() -> None:
    prompt = "".join(map(str, range(200)))
    listener = DIALECTS["completions"].listener({"prompt": [prompt]})
    listener.events(sse({"choices": [{"index": 0, "text": "x" * 300}]}))
    listener.events(sse({"choices": [{"index": 0, "text": "y" * 300}]}))
    answer = listener.said()
    assert answer is not None
    before = of_request("completions", prompt)
    whole = of_request("completions", prompt + "x" * 300 + "y" * 300)
    assert before + answer == whole
    assert len(before) == len(prompt) // said.PIECE_CHARS > 0
    tokens = DIALECTS["completions"].listener({"prompt": [1, 2]})
    tokens.whole(b'{"choices":[{"text":"x"}]}')
    assert tokens.said() is None
    assert of_request("completions", [list(range(130))]) == of_request(
        "completions", list(range(128))
    )
