"""The examples against a real gateway and a real control plane; the engines are stand-ins, since
this is about whose turn a request is and what is said of the time after it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import TYPE_CHECKING

import pytest

from kvshuttle.client import AsyncClient
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.conftest import Cluster
from tests.integration.frameworks.conftest import (
    FRAMEWORKS,
    PLAIN,
    VllmStandIn,
    needs_frameworks,
    run_example,
)
from tests.integration.gateway.conftest import running_gateway
from tests.integration.gateway.fake_engine import FakeEngine, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = needs_frameworks()

TURNS = 4
"""Two questions, each with a tool call between two requests."""


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    """Prefill and decode."""
    async with FakeEngine("prefill") as prefill, FakeEngine("decode") as decode:
        for engine in (prefill, decode):
            engine.script = Script(answer=VllmStandIn().answer)
        yield prefill, decode


@pytest.fixture
async def cluster(tmp_path: Path, engines: tuple[FakeEngine, FakeEngine]) -> AsyncIterator[Cluster]:
    prefill, decode = engines
    limits = dataclasses.replace(Limits(), silence_ns=600 * SECOND, eager=False)
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    await cluster.agent("p", types.WORKER_ROLE_PREFILL, url=prefill.url).connect()
    await cluster.agent("d", types.WORKER_ROLE_DECODE, url=decode.url).connect()
    yield cluster
    await cluster.stop()


async def changes(target: str, found: list[session.Session]) -> None:
    """Everything that the control plane tells of sessions."""
    async with AsyncClient(target) as client:
        async for piece in client.watch_sessions():
            if piece.HasField("changed"):
                found.append(piece.changed)


@pytest.mark.parametrize(
    ("name", "planned"),
    [*((name, planned) for name in FRAMEWORKS for planned in (False, True)), (PLAIN, True)],
)
async def test_one_session_hints_and_its_end(
    cluster: Cluster,
    engines: tuple[FakeEngine, FakeEngine],
    name: str,
    planned: bool,
) -> None:
    prefill, decode = engines
    target = cluster.server.addresses.api
    seen: list[session.Session] = []
    watch = asyncio.create_task(changes(target, seen))
    flags = ["--session", "mine", "--tool-takes", "0", *(["--planned"] if planned else [])]
    async with running_gateway(control_plane=target, begin_turn_timeout_s=30.0) as gateway:
        found = await run_example(name, gateway.server.url, "m", *flags)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)

    # One session for all requests, each a turn of two legs.
    assert {one.session_id for one in seen} == {"mine"}
    assert [one.leg for one in prefill.received] == ["prefill"] * TURNS
    assert [one.leg for one in decode.received] == ["decode"] * TURNS
    bodies = [one.body for one in decode.received]
    roles = [[one["role"] for one in body["messages"]] for body in bodies]
    result = "user" if name == PLAIN else "tool"
    assert [one[-1] for one in roles] == ["user", result, "user", result]
    # Each request begins with what the one before it was: else no KV could be returned.
    for before, after in itertools.pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]

    if planned:  # an engine without a tool parser refuses anything else
        assert {body.get("tool_choice", "none") for body in bodies} == {"none"}
        assert all("tool_choice" in body for body in bodies if "tools" in body)

    # What each turn cost, as the control plane knows it.
    assert found["session"] == "mine"
    assert [one["turn"] for one in found["turns"]] == [1, 2, 3, 4]
    reused = [one["cached_tokens"] for one in found["turns"]]
    assert reused == [16 * (len(one) // 2) for one in roles]

    # "A tool is running, about 20 s", once for each of the two tool calls, then "over".
    idle = [one.hints.expected_idle.seconds for one in seen if one.hints.HasField("expected_idle")]
    assert set(idle) == {20}
    said_after = {one.turn_count for one in seen if one.hints.HasField("expected_idle")}
    assert said_after == {1, 3}
    assert (await cluster.session("mine")).state == session.SESSION_STATE_ENDED
