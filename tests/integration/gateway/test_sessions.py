"""Conversations of agents that reach the gateway only: over HTTP, by hand and through the client's
hook. The control plane is a real one; its agents and the engines are stand-ins."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshuttle.client.agents import AsyncConversation, Conversation, attach
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.conftest import Cluster, eventually
from tests.integration.gateway.conftest import CHAT, RunningGateway, running_gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.integration.gateway.fake_engine import FakeEngine

PATH = "/v1/kvshuttle/sessions/"


@pytest.fixture
async def cluster(
    tmp_path: Path, prefill: FakeEngine, decode: FakeEngine
) -> AsyncIterator[Cluster]:
    """A control plane with two workers, whose URLs are the stand-ins'."""
    limits = dataclasses.replace(Limits(), silence_ns=60 * SECOND, eager=False)
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    await cluster.agent("p", types.WORKER_ROLE_PREFILL, url=prefill.url).connect()
    await cluster.agent("d", types.WORKER_ROLE_DECODE, url=decode.url).connect()
    yield cluster
    await cluster.stop()


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncIterator[RunningGateway]:
    async with running_gateway(control_plane=cluster.server.addresses.api) as running:
        yield running


async def ended(cluster: Cluster, session_id: str, turn: int) -> session.Session:
    """Once the gateway has told that the turn has ended, which it does by the way."""

    def told(found: session.Session) -> bool:
        return any(t.turn == turn and t.state == session.TURN_STATE_ENDED for t in found.turns)

    found = await eventually(lambda: cluster.session(session_id), told)
    assert isinstance(found, session.Session)
    return found


async def test_a_session_by_hand(gateway: RunningGateway, cluster: Cluster) -> None:
    said = {"X-Session-ID": "a/b ü", "X-KVShuttle-Expected-Idle": "20", "X-KVShuttle-Value": "high"}
    await gateway.chat(headers={name: value.encode() for name, value in said.items()})
    found = await ended(cluster, "a/b ü", 1)
    assert found.hints.expected_idle.seconds == 20
    assert found.hints.value == types.SESSION_VALUE_HIGH

    path = PATH + "a%2Fb%20%C3%BC"
    answer = (await gateway.http.get(path)).json()
    assert answer["session_id"] == "a/b ü"
    assert answer["hints"] == {"expected_idle_s": 20.0, "value": "high"}
    assert (answer["state"], answer["turn_count"], answer["kept_tokens"]) == ("active", 1, 0)
    turn = answer["turns"][0]
    assert (turn["turn"], turn["state"], turn["outcome"]) == (1, "ended", "completed")
    assert (turn["mode"], turn["reason"]) == ("none", "NO_REPLICA")
    assert (turn["prompt_tokens"], turn["cached_tokens"], turn["output_tokens"]) == (20, 16, 5)
    assert turn["time_to_first_token_s"] is None, "it was not streamed"

    answer = (await gateway.http.post(path + "/hint", json={"expected_idle_s": 7})).json()
    assert answer["hints"] == {"expected_idle_s": 7.0, "value": "high"}
    assert (await gateway.http.delete(path)).json()["state"] == "ended"
    assert (await cluster.session("a/b ü")).state == session.SESSION_STATE_ENDED
    assert await gateway.metric("kvshuttle_gateway_requests_total", route="sessions", status="200")


async def test_refusals_name_the_reason(gateway: RunningGateway, cluster: Cluster) -> None:
    unknown = await gateway.http.post(PATH + "nobody/hint", json={"value": "low"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "SESSION_NOT_FOUND"
    assert (await gateway.http.get(PATH + "x" * 300)).status_code == 400
    bad = await gateway.http.post(PATH + "s/hint", json={"expected_idle": 20})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "expected_idle")
    long = await gateway.http.post(PATH + "s/hint", content=b" " * 5_000)
    assert long.status_code == 400
    assert (await gateway.chat(headers={"X-KVShuttle-Value": "great"})).status_code == 400
    assert (await gateway.http.put(PATH + "s")).status_code == 405
    await cluster.server.stop()
    away = await gateway.http.get(PATH + "s")
    assert away.status_code == 503
    assert away.json()["error"]["code"] == "UNAVAILABLE"


async def test_a_remedy_is_said_once(gateway: RunningGateway) -> None:
    refused = await gateway.http.delete(PATH + "a" * 300)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].count("at most 256 characters") == 1


async def test_a_tenant_sees_its_own_sessions(cluster: Cluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    lines = [f"{hashlib.sha256(t.encode()).hexdigest()}: {t}\n" for t in ("acme", "other")]
    keys.write_text("".join(lines))
    async with running_gateway(
        control_plane=cluster.server.addresses.api, api_keys_file=keys
    ) as gateway:
        acme = {"authorization": "Bearer acme"}
        await gateway.chat(headers={**acme, "X-Session-ID": "s"})
        assert (await gateway.http.get(PATH + "s", headers=acme)).status_code == 200
        other = {"authorization": "Bearer other"}
        assert (await gateway.http.get(PATH + "s", headers=other)).status_code == 404
        assert (await gateway.http.delete(PATH + "s", headers=other)).status_code == 404
        assert (await gateway.http.delete(PATH + "s")).status_code == 401

        # The hook shows the key that the agent's own requests showed.
        http = attach(httpx.AsyncClient(base_url=gateway.http.base_url, headers=acme))
        async with http, AsyncConversation("mine") as mine:
            await http.post("/v1/chat/completions", json=CHAT)
            assert await mine.tool_running(20)
            assert "acme" not in repr(mine._known.gateway)


async def test_an_agents_conversation(
    gateway: RunningGateway, cluster: Cluster, prefill: FakeEngine
) -> None:
    http = attach(httpx.AsyncClient(base_url=gateway.http.base_url))

    async def chat() -> httpx.Response:
        return await http.post("/v1/chat/completions", json=CHAT)

    async with http:
        async with AsyncConversation("s1", value="high") as one:
            assert not await one.tool_running(20)  # nobody to tell yet
            assert await one.report() is None
            one.idle_after(9)
            await asyncio.create_task(chat())  # a task of its own, as frameworks make
            assert one.last is not None
            assert (one.last.session_id, one.last.turn, one.last.mode) == ("s1", 1, "none")
            report = await one.report()
            assert report is not None
            assert (report.turn, report.prompt_tokens, report.cached_tokens) == (1, 20, 16)
            found = await ended(cluster, "s1", 1)
            assert found.hints.expected_idle.seconds == 9
            assert found.hints.value == types.SESSION_VALUE_HIGH

            assert await one.tool_running(20)
            assert (await cluster.session("s1")).hints.expected_idle.seconds == 20
            async with AsyncConversation("s2") as two:
                await chat()
                assert two.last is not None
                assert two.last.session_id == "s2"
            await chat()
            assert one.last.turn == 2
            # It was for one turn.
            assert not (await ended(cluster, "s1", 2)).hints.HasField("expected_idle")
        assert (await cluster.session("s1")).state == session.SESSION_STATE_ENDED
        assert (await cluster.session("s2")).state == session.SESSION_STATE_ENDED

        # Around no conversation, and with a name of its own, a request is left as it is.
        derived = await chat()
        assert derived.headers["x-kvshuttle-session"].startswith("auto-")
        async with AsyncConversation("s3") as three:
            named = await http.post(
                "/v1/chat/completions", json=CHAT, headers={"X-Session-ID": "other"}
            )
            assert named.headers["x-kvshuttle-session"] == "other"
            assert three.last is None
    assert "x-session-id" not in prefill.received[-2].headers


async def test_conversations_at_once_are_kept_apart(gateway: RunningGateway) -> None:
    http = attach(httpx.AsyncClient(base_url=gateway.http.base_url))

    async def converse(name: str) -> set[str]:
        seen = set()
        async with AsyncConversation(name) as conversation:
            for _ in range(3):
                await http.post("/v1/chat/completions", json=CHAT)
                assert conversation.last is not None
                seen.add(conversation.last.session_id)
        return seen

    async with http:
        names = [f"s{number}" for number in range(8)]
        assert await asyncio.gather(*map(converse, names)) == [{name} for name in names]


async def test_the_same_without_an_event_loop(gateway: RunningGateway, cluster: Cluster) -> None:
    def converse() -> list[Any]:
        http = attach(httpx.Client(base_url=gateway.http.base_url))
        with http, Conversation(keep=True) as one:
            http.post("/v1/chat/completions", json=CHAT)
            report = one.report()
            assert report is not None
            assert report.cached_tokens == 16
            return [one.session_id, one.tool_running(20), one.last and one.last.turn]

    session_id, taken, turn = await asyncio.to_thread(converse)
    assert (taken, turn) == (True, 1)
    found = await cluster.session(session_id)
    assert found.hints.expected_idle.seconds == 20
    assert found.state == session.SESSION_STATE_ACTIVE  # to be kept


async def test_a_hint_that_is_lost_costs_the_agent_nothing(
    gateway: RunningGateway, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    http = attach(httpx.AsyncClient(base_url=gateway.http.base_url))
    caplog.set_level(logging.WARNING, "kvshuttle.client.agents")
    async with AsyncConversation("s1") as one:
        await http.post("/v1/chat/completions", json=CHAT)
        await cluster.server.stop()
        assert not await one.tool_running(20)
        assert "503" in caplog.messages[-1]
        await http.aclose()
        assert not await one.tool_running(20)
    assert "its end was not delivered" in caplog.messages[-1]


async def test_a_default_conversation_and_what_cannot_be_meant(gateway: RunningGateway) -> None:
    one = AsyncConversation("s1")
    http = attach(httpx.AsyncClient(base_url=gateway.http.base_url), default=one)
    async with http:
        await http.post("/v1/chat/completions", json=CHAT)
        assert one.last is not None
        assert one.last.turn == 1
        assert await one.over()
    with pytest.raises(ValueError, match="1 to 256 printable"):
        Conversation("a\nb")
    with pytest.raises(ValueError, match="use one of low, normal, high"):
        Conversation(value="great")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give seconds from 0 up"):
        one.idle_after(-1)


async def test_a_body_that_does_not_come(cluster: Cluster) -> None:
    target = cluster.server.addresses.api
    async with running_gateway(control_plane=target, body_timeout_s=0.1) as gateway:
        port = httpx.URL(gateway.server.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {PATH}s/hint HTTP/1.1\r\nhost: gateway\r\ncontent-length: 9\r\n\r\n"
        writer.write(head.encode())
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        await writer.wait_closed()


async def test_either_kind_of_client_in_either_kind_of_conversation(
    gateway: RunningGateway, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with attach(httpx.Client(base_url=gateway.http.base_url)) as http:
        async with AsyncConversation("s1") as one:
            await asyncio.to_thread(http.post, "/v1/chat/completions", json=CHAT)
            assert await one.tool_running(20)
    assert (await cluster.session("s1")).state == session.SESSION_STATE_ENDED

    async with attach(httpx.AsyncClient(base_url=gateway.http.base_url)) as http:
        with Conversation("s2") as two:
            await http.post("/v1/chat/completions", json=CHAT)
            assert two.last is not None
            # It would have to wait for the event loop that it blocks.
            assert not two.tool_running(20)
    assert "use AsyncConversation" in caplog.messages[-1]
