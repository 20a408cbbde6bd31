"""Conversations with tool calls by the makers' own clients, which name no session: each stays one,
the engines get what the client sent, and the client gets what its engine answered."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from tests.integration.gateway.fake_answers import CACHED
from tests.integration.gateway.fake_engine import Script
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.gateway.conftest import RunningGateway
    from tests.integration.gateway.fake_control_plane import FakeControlPlane
    from tests.integration.gateway.fake_engine import FakeEngine

anthropic = pytest.importorskip("anthropic", reason="comes with vLLM")
openai = pytest.importorskip("openai", reason="comes with vLLM")
# What their clients speak HTTP with.
httpx2 = pytest.importorskip("httpx2", reason="comes with vLLM")

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = ("read_file", "list_files")
RESULTS = {"call_1": "line 1\nline 2 ü", "call_2": "a.txt"}
BEFORE, AFTER = "Let me look. ", "It has two lines."


def calls(path: str | None) -> list[tuple[str, str, str]]:
    """Id, name and arguments, as a model writes them; none without a path."""
    arguments = f'{{"path": "{path}",  "lines": [1, 2], "deep": {{"ü": null}}}}'
    return [("call_1", TOOLS[0], arguments), ("call_2", TOOLS[1], "{}")] if path else []


def sse(*events: dict[str, Any]) -> bytes:
    """As vLLM writes them: spaces and escapes of its own."""
    return b"".join(
        f"event: {one['type']}\ndata: {json.dumps(one, ensure_ascii=False)}\n\n".encode()
        for one in events
    )


class Wire:
    """What a client sent and got, byte for byte."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.got: list[bytes] = []
        self.sessions: list[str] = []
        self.http = httpx2.AsyncClient(
            trust_env=False, event_hooks={"request": [self._request], "response": [self._response]}
        )

    async def _request(self, request: Any) -> None:
        self.sent.append(json.loads(request.content))

    async def _response(self, response: Any) -> None:
        self.sessions.append(response.headers["x-kvshuttle-session"])
        self.got.append(await response.aread())


class Api(Protocol):
    """One API, by its maker's client."""

    path: str
    # Of a request, what says the prompt.
    prompt: tuple[str, ...]

    def __init__(self, url: str, http: Any) -> None: ...

    def answer(self, *, stream: bool, path: str | None) -> bytes:
        """What an engine says; with a path, it calls the tools too."""

    async def ask(self, said: list[Any], *, stream: bool) -> list[Any]:
        """The answer as this client sends it back."""

    def asks(self, text: str) -> list[Any]:
        """What the user says."""

    def results(self, answer: list[Any], results: dict[str, str]) -> list[Any]:
        """What the tools said that were called in an answer."""


class Messages:
    path = "/v1/messages"
    prompt: tuple[str, ...] = ("system", "messages", "tools", "tool_choice", "model")

    def __init__(self, url: str, http: Any) -> None:
        self.sdk = anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0, http_client=http
        )

    def answer(self, *, stream: bool, path: str | None) -> bytes:
        message: dict[str, Any] = {
            "id": "chatcmpl-1",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "m",
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 20, "output_tokens": 0},
        }
        reason = "tool_use" if path else "end_turn"
        if not stream:
            text = {"type": "text", "text": BEFORE if path else AFTER}
            uses = [
                {"type": "tool_use", "id": name, "name": function, "input": json.loads(arguments)}
                for name, function, arguments in calls(path)
            ]
            return json.dumps(
                {**message, "content": [text, *uses], "stop_reason": reason}, ensure_ascii=False
            ).encode()
        events: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
        blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
            (
                {"type": "text", "text": ""},
                [{"type": "text_delta", "text": one} for one in (BEFORE if path else AFTER)],
            )
        ]
        for name, function, arguments in calls(path):
            use = {"type": "tool_use", "id": name, "name": function, "input": {}}
            cut = len(arguments) // 2
            parts = [one for one in (arguments[:cut], arguments[cut:]) if arguments != "{}"]
            blocks.append(
                (use, [{"type": "input_json_delta", "partial_json": one} for one in parts])
            )
        for index, (block, deltas) in enumerate(blocks):
            where = {"index": index}
            events.append({"type": "content_block_start", **where, "content_block": block})
            events += [{"type": "content_block_delta", **where, "delta": one} for one in deltas]
            events.append({"type": "content_block_stop", **where})
        stop = {"stop_reason": reason, "stop_sequence": None}
        usage = {
            "input_tokens": 4,
            "cache_read_input_tokens": CACHED["prefill"],
            "output_tokens": 5,
        }
        events.append({"type": "message_delta", "delta": stop, "usage": usage})
        return sse(*events, {"type": "message_stop"})

    async def ask(self, said: list[Any], *, stream: bool) -> list[Any]:
        asked: dict[str, Any] = {
            "model": "m",
            "max_tokens": 500,
            "system": [{"type": "text", "text": "be kind"}],
            "messages": said,
            "tools": [{"name": name, "description": "d", "input_schema": SCHEMA} for name in TOOLS],
            "tool_choice": {"type": "auto"},
        }
        if stream:
            async with self.sdk.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await self.sdk.messages.create(**asked)
        return [{"role": "assistant", "content": [one.to_dict() for one in answer.content]}]

    def asks(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def results(self, answer: list[Any], results: dict[str, str]) -> list[Any]:
        uses = [one for one in answer[0]["content"] if one["type"] == "tool_use"]
        found = [
            {
                "type": "tool_result",
                "tool_use_id": use["id"],
                "content": [{"type": "text", "text": results[use["id"]]}],
            }
            for use in uses
        ]
        return [{"role": "user", "content": found}]


class Responses:
    path = "/v1/responses"
    prompt: tuple[str, ...] = ("instructions", "input", "tools", "tool_choice", "model")

    def __init__(self, url: str, http: Any) -> None:
        self.sdk = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
        )

    def answer(self, *, stream: bool, path: str | None) -> bytes:
        text = {"type": "output_text", "text": BEFORE if path else AFTER, "annotations": []}
        items: list[dict[str, Any]] = [
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            },
        ]
        items += [
            {
                "id": f"fc_{name}",
                "type": "function_call",
                "call_id": name,
                "name": function,
                "arguments": arguments,
                "status": "completed",
            }
            for name, function, arguments in calls(path)
        ]
        begun: dict[str, Any] = {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": "m",
            "status": "in_progress",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }
        usage = {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": CACHED["prefill"]},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 25,
        }
        done = {**begun, "status": "completed", "output": items, "usage": usage}
        if not stream:
            return json.dumps(done, ensure_ascii=False).encode()
        events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
        for index, item in enumerate(items):
            where = {"output_index": index}
            empty = {**item, "status": "in_progress"}
            if item["type"] == "function_call":
                empty["arguments"] = ""
                deltas = [
                    {"type": "response.function_call_arguments.delta", "delta": one}
                    for one in item["arguments"]
                ]
            else:
                empty["content"] = []
                deltas = []
            events.append({"type": "response.output_item.added", **where, "item": empty})
            events += [{**one, **where, "item_id": item["id"]} for one in deltas]
            events.append({"type": "response.output_item.done", **where, "item": item})
        events.append({"type": "response.completed", "response": done})
        return sse(*({**one, "sequence_number": at} for at, one in enumerate(events)))

    async def ask(self, said: list[Any], *, stream: bool) -> list[Any]:
        asked: dict[str, Any] = {
            "model": "m",
            "instructions": "be kind",
            "input": said,
            "tools": [
                {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
                for name in TOOLS
            ],
        }
        answer: Any = await self.sdk.responses.create(**asked, stream=stream)
        if stream:
            async for event in answer:
                last = event
            answer = last.response
        return [one.to_dict() for one in answer.output]

    def asks(self, text: str) -> list[Any]:
        return [{"role": "user", "content": text}]

    def results(self, answer: list[Any], results: dict[str, str]) -> list[Any]:
        calls = [one for one in answer if one["type"] == "function_call"]
        return [
            {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": results[call["call_id"]],
            }
            for call in calls
        ]


APIS: dict[str, type[Api]] = {"messages": Messages, "responses": Responses}


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    one = Wire()
    async with one.http:
        yield one


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest, gateway: RunningGateway, wire: Wire) -> Api:
    return APIS[request.param](gateway.server.url, wire.http)


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def script(answer: bytes, *, stream: bool, gate: asyncio.Event | None = None) -> Script:
    if stream:
        return Script(only_event=answer, no_done=True, before_answer=gate)
    return Script(body=answer, before_answer=gate)


async def test_what_tools_say_goes_on_in_the_session_that_called_them(
    gateway: RunningGateway,
    control: FakeControlPlane,
    prefill: FakeEngine,
    decode: FakeEngine,
    wire: Wire,
    api: Api,
    stream: bool,
) -> None:
    answers = []

    async def ask(said: list[Any], path: str | None = None) -> list[Any]:
        answers.append(api.answer(stream=stream, path=path))
        decode.script = script(answers[-1], stream=stream)
        return await api.ask(said, stream=stream)

    # Three requests: two tools are called at once, their results go back, the next question.
    said = api.asks("how long is it?")
    first = await ask(said, "a.txt")
    said = [*said, *first, *api.results(first, RESULTS)]
    second = await ask(said)
    said = [*said, *second, *api.asks("thanks")]
    await ask(said)

    assert len(set(wire.sessions)) == 1
    assert {one.session_id for one in control.begins} == set(wire.sessions)
    counts = "kvshuttle_gateway_sessions_named_total"
    assert await gateway.metric(counts, source="derived") == 1
    assert await gateway.metric(counts, source="prefix") == 2
    # The client's bytes are the engine's, and the engine's request is the client's.
    assert wire.got == answers
    for sent, at_prefill, at_decode in zip(
        wire.sent, prefill.received, decode.received, strict=True
    ):
        got = dict(at_decode.body)
        assert got.pop("kv_transfer_params")["kvshuttle"]["leg"] == "decode"
        assert got == sent
        for field in api.prompt:
            assert at_prefill.body.get(field) == sent.get(field), field
        assert (at_prefill.path, at_decode.path) == (api.path, api.path)

    # The same question and calls, other results: that is another conversation.
    fork = [*api.asks("how long is it?"), *first, *api.results(first, {**RESULTS, "call_1": "-"})]
    await ask(fork)
    assert wire.sessions[-1] not in wire.sessions[:-1]
    assert await gateway.metric(counts, source="forked") == 1


async def test_two_that_differ_in_a_calls_arguments_alone_go_on_as_themselves(
    control: FakeControlPlane,
    decode: FakeEngine,
    wire: Wire,
    api: Api,
    stream: bool,
) -> None:
    """They begin equally and at once, so that only what was answered can tell them apart."""
    question = api.asks("how long is it?")
    gate = asyncio.Event()
    asked = []
    for path in ("a.txt", "b.txt"):
        decode.script = script(api.answer(stream=stream, path=path), stream=stream, gate=gate)
        asked.append(asyncio.create_task(api.ask(question, stream=stream)))
        await eventually(lambda: len(decode.received) == len(asked), "the request")
    gate.set()
    answers = [await one for one in asked]
    sessions = [begun.session_id for begun in control.begins]
    assert len(set(sessions)) == 2

    decode.script = script(api.answer(stream=stream, path=None), stream=stream)
    for number in (1, 0):
        said = [*question, *answers[number], *api.results(answers[number], RESULTS)]
        said += await api.ask(said, stream=stream)
        assert wire.sessions[-1] == sessions[number]
        said += api.asks("thanks")
        await api.ask(said, stream=stream)
        assert wire.sessions[-1] == sessions[number]
