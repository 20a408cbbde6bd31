"""Conversations whose clients name none: each goes on as itself, by what it was answered."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.gateway.conftest import running_gateway
from tests.integration.gateway.fake_engine import FakeEngine, Script
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from tests.integration.gateway.conftest import RunningGateway
    from tests.integration.gateway.fake_control_plane import FakeControlPlane

PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


@pytest.fixture
async def gateway(control: FakeControlPlane, decode: FakeEngine) -> AsyncIterator[RunningGateway]:
    control.placements = [(None, ("d", decode.url))]
    async with running_gateway(control_plane=control.target) as running:
        yield running


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def whole(api: str, text: str) -> dict[str, Any]:
    block = {"type": "text", "text": text}
    if api == "messages":
        return {"type": "message", "content": [block], "usage": {}}
    if api == "responses":
        item = {"type": "message", "role": "assistant", "content": [block]}
        return {"id": f"resp_{text}", "output": [item]}
    return {"choices": [{"index": 0, "message": assistant(text)}]}


def streamed(api: str, text: str) -> bytes:
    if api == "chat":
        chunks = [{"choices": [{"index": 0, "delta": {"content": one}}]} for one in text]
        lines = [f"data: {json.dumps(one)}\n\n" for one in chunks]
        return "".join([*lines, "data: [DONE]\n\n"]).encode()
    events: list[dict[str, Any]]
    if api == "messages":
        start = {"type": "content_block_start", "index": 0}
        events = [
            {**start, "content_block": {"type": "text", "text": ""}},
            *({"type": "content_block_delta", "index": 0, "delta": {"text": one}} for one in text),
            {"type": "message_stop"},
        ]
    else:
        events = [
            {"type": "response.output_text.delta", "delta": text},
            {"type": "response.completed", "response": whole(api, text)},
        ]
    return "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events).encode()


def says(api: str, text: str, *, stream: bool, gate: asyncio.Event | None = None) -> Script:
    if stream:
        return Script(only_event=streamed(api, text), no_done=True, before_answer=gate)
    return Script(answer=lambda _: whole(api, text), before_answer=gate)


async def ask(
    gateway: RunningGateway, api: str, said: list[Any], *, stream: bool = False
) -> httpx.Response:
    body = {
        "model": "m",
        "max_output_tokens" if api == "responses" else "max_tokens": 5,
        "input" if api == "responses" else "messages": said,
        "stream": stream,
    }
    answer = await gateway.http.post(f"/v1/{PATHS[api]}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def session(answer: httpx.Response) -> str:
    return answer.headers["x-kvshuttle-session"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", PATHS)
async def test_two_that_begin_equally_go_on_as_themselves(
    gateway: RunningGateway, decode: FakeEngine, api: str, stream: bool
) -> None:
    gate = asyncio.Event()
    first = []
    for text in ("one", "two"):
        decode.script = says(api, text, stream=stream, gate=gate)
        first.append(asyncio.create_task(ask(gateway, api, [user("hello")], stream=stream)))
        await eventually(lambda: len(decode.received) == len(first), "the request")
    gate.set()
    one, two = [session(await answer) for answer in first]
    assert two.startswith(f"{one}-")

    for text, expected in (("two", two), ("one", one)):
        decode.script = says(api, f"{text}-more", stream=stream)
        said = [user("hello"), assistant(text), user("more")]
        assert session(await ask(gateway, api, said, stream=stream)) == expected
        said += [assistant(f"{text}-more"), user("and more")]
        assert session(await ask(gateway, api, said, stream=stream)) == expected
    # Back to what was asked before, with other words.
    fork = session(await ask(gateway, api, [user("hello"), assistant("one"), user("no")]))
    assert fork not in (one, two)

    name = "kvshuttle_gateway_sessions_named_total"
    counts = [await gateway.metric(name, source=x) for x in ("derived", "prefix", "forked")]
    assert counts == [1, 4, 2]
    assert await gateway.metric("kvshuttle_gateway_known_conversations") == 3


async def test_a_client_that_left_comes_back_to_its_session(
    gateway: RunningGateway, decode: FakeEngine
) -> None:
    decode.script = Script(before_answer=asyncio.Event())
    task = asyncio.create_task(ask(gateway, "chat", [user("hello")]))
    await eventually(lambda: decode.received, "the request")
    task.cancel()
    app: Any = gateway.server.config.app
    await eventually(lambda: not app.state.gateway.in_flight._all, "the client gone")
    decode.script = says("chat", "hi", stream=False)
    again = session(await ask(gateway, "chat", [user("hello")]))
    assert "-" not in again.removeprefix("auto-")
    later = await ask(gateway, "chat", [user("hello"), assistant("hi"), user("more")])
    assert session(later) == again


async def test_a_stream_that_broke_off_is_no_answer(
    gateway: RunningGateway, decode: FakeEngine
) -> None:
    decode.script = Script(break_after=2)
    broken = session(await ask(gateway, "chat", [user("hello")], stream=True))
    decode.script = says("chat", "hi", stream=False)
    said = [user("hello"), assistant("half an answ"), user("go on")]
    assert session(await ask(gateway, "chat", said)) == broken
