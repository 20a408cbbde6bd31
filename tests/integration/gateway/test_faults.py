"""What a request gets when something on its way is broken: an answer, in time, and the reason."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from google.rpc import code_pb2  # type: ignore[import-untyped, unused-ignore]

from kvshuttle.gateway import limits
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types
from tests.integration.gateway.conftest import running_gateway
from tests.integration.gateway.fake_control_plane import (
    NO_WORKER,
    PERMISSION_DENIED,
    FakeControlPlane,
    status,
    worker,
)
from tests.integration.gateway.fake_engine import (
    DONE,
    EVENTS,
    FakeEngine,
    Script,
    dropping_server,
)
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from tests.integration.gateway.conftest import RunningGateway

FAILED = session.TURN_OUTCOME_FAILED
COMPLETED = session.TURN_OUTCOME_COMPLETED
# Nothing listens on the discard port; a connection is refused at once.
NOBODY = "http://127.0.0.1:9"


# What workers may say of themselves, and no request can be sent to.
NO_URLS = pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://[zz]",
        "http://x:abc",
        "http://127.0.0.1:65536",
        "http://a\x00b",
        "http://user\n@127.0.0.1:9",
        "http://\u2603\u00e9.invalid",
        "http://xn--a",
        "http://127.0.0.1:9/" + "a" * 70_000,
        "http://",
        "ftp://127.0.0.1:9",
        "127.0.0.1:9",
        "not a url",
    ],
)


async def fallbacks(gateway: RunningGateway, reason: str) -> float:
    return await gateway.metric("kvshuttle_gateway_fallbacks_total", reason=reason)


async def test_prefill_server_error_falls_back_to_decode(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    prefill.script = Script(status=500)
    response = await gateway.chat()

    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "PREFILL_ERROR"
    assert decode.legs() == ["decode"]
    assert await fallbacks(gateway, "PREFILL_ERROR") == 1
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, COMPLETED)]


async def test_prefill_unreachable(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(("p", NOBODY), ("d", decode.url))]
    response = await gateway.chat()

    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "PREFILL_UNREACHABLE"


async def test_prefill_too_slow(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.placements = [(("p", prefill.url), ("d", decode.url))]
    prefill.script = Script(before_answer=asyncio.Event())
    async with running_gateway(control_plane=control.target, prefill_timeout_s=0.1) as gateway:
        response = await gateway.chat()

    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "PREFILL_TIMEOUT"
    await asyncio.wait_for(prefill.received[0].disconnected.wait(), 10)


async def test_decode_unreachable_is_placed_again_without_it(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.placements = [
        (("p", prefill.url), ("dead", NOBODY)),
        (("p", prefill.url), ("d", decode.url)),
    ]
    response = await gateway.chat()

    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "DECODE_UNREACHABLE"
    assert response.headers["x-kvshuttle-turn"] == "2"
    assert list(control.begins[1].exclude_worker_ids) == ["dead"]
    assert control.begins[0].request_id != control.begins[1].request_id
    assert decode.received[0].token == "token-2"
    await eventually(lambda: len(control.ends) == 2, "two EndTurns")
    assert sorted(control.outcomes()) == [(1, FAILED), (2, COMPLETED)]


@NO_URLS
async def test_a_worker_whose_url_is_none_is_unreachable(
    gateway: RunningGateway,
    control: FakeControlPlane,
    prefill: FakeEngine,
    decode: FakeEngine,
    url: str,
) -> None:
    control.placements = [
        (("p", prefill.url), ("bad", url)),
        (("p", prefill.url), ("d", decode.url)),
        (("bad", url), ("d", decode.url)),
    ]
    control.workers = [
        worker("bad", url, types.WORKER_ROLE_DECODE),
        worker("d", decode.url, types.WORKER_ROLE_DECODE),
    ]
    seen = control.lists
    await eventually(lambda: control.lists > seen + 1, "workers listed")
    health = await gateway.http.get("/health")
    models = await gateway.http.get("/v1/models")
    decode_elsewhere = await gateway.chat()
    no_prefill = await gateway.chat()

    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert {one["worker_id"]: one["reachable"] for one in health.json()["engines"]} == {
        "bad": False,
        "d": True,
    }
    assert models.status_code == 200
    assert decode_elsewhere.status_code == no_prefill.status_code == 200
    assert decode_elsewhere.headers["x-kvshuttle-fallback"] == "DECODE_UNREACHABLE"
    assert no_prefill.headers["x-kvshuttle-fallback"] == "PREFILL_UNREACHABLE"
    assert decode.legs() == ["decode", "decode"]


async def test_no_decode_at_all_ends_on_the_prefill_engine(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine
) -> None:
    control.placements = [(("p", prefill.url), ("dead", NOBODY))]
    response = await gateway.chat()

    assert response.status_code == 200
    assert prefill.legs() == ["prefill", "prefill", "plain"]


async def test_decode_that_closes_without_a_word_is_asked_once(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    async with dropping_server() as (url, requests):
        control.placements = [
            (("p", prefill.url), ("bad", url)),
            (("p", prefill.url), ("d", decode.url)),
        ]
        response = await gateway.chat()
        assert response.status_code == 200
        assert len(requests) == 1


async def test_a_request_that_kills_engines_is_not_given_to_a_third(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    async with dropping_server() as (one, first), dropping_server() as (two, second):
        control.placements = [(None, ("a", one)), (None, ("b", two))]
        response = await gateway.chat()

    assert response.status_code == 502
    assert response.json()["error"]["code"] == "engine_broke_off"
    assert (len(first), len(second)) == (1, 1)
    assert decode.legs() == prefill.legs() == []


async def test_a_stream_that_breaks_before_its_first_event_is_asked_elsewhere(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    async with FakeEngine("bad") as bad:
        bad.script = Script(break_after=0)
        control.placements = [(None, ("bad", bad.url)), (None, ("d", decode.url))]
        response = await gateway.chat(stream=True)

    assert response.status_code == 200
    assert response.text.endswith("data: [DONE]\n\n")
    assert len(bad.received) == 1


@pytest.mark.parametrize("half_event", [False, True])
async def test_a_stream_that_breaks_ends_with_an_error_event(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine, half_event: bool
) -> None:
    decode.script = Script(break_after=2, break_in_event=half_event)
    response = await gateway.chat(stream=True)

    sent = b"".join(EVENTS[:2])
    assert response.content.startswith(sent)
    last = response.content[len(sent) :]
    assert last.startswith(b"data: ")
    assert last.endswith(b"\n\n")
    error = json.loads(last[len(b"data: ") :])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in response.content
    assert len(decode.received) == 1
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, FAILED)]


async def test_a_stream_that_ends_without_done_is_an_error(
    gateway: RunningGateway, decode: FakeEngine
) -> None:
    decode.script = Script(no_done=True)
    response = await gateway.chat(stream=True)

    assert response.content.startswith(b"".join(EVENTS))
    assert b'"error"' in response.content[len(b"".join(EVENTS)) :]


@pytest.mark.parametrize("before", [b"", EVENTS[0]])
async def test_an_event_that_does_not_end_is_an_error(
    gateway: RunningGateway,
    control: FakeControlPlane,
    decode: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    before: bytes,
) -> None:
    monkeypatch.setattr(limits, "EVENT_BYTES", 100_000)
    decode.script = Script(only_event=before + b"data: " + b"a" * 1_000_000, no_done=True)
    response = await gateway.chat(stream=True)

    assert response.content.startswith(before)
    error = json.loads(response.content[len(before) + len(b"data: ") :])["error"]
    assert error["code"] == "engine_event_too_long"
    assert "100000 bytes" in error["message"]
    await asyncio.wait_for(decode.received[0].disconnected.wait(), 10)
    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, FAILED)]


async def test_a_stream_that_says_no_event_is_asked_elsewhere(
    gateway: RunningGateway,
    control: FakeControlPlane,
    prefill: FakeEngine,
    decode: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "EVENT_BYTES", 100_000)
    decode.script = Script(only_event=b"a" * 1_000_000, no_done=True)
    control.placements = [(None, ("bad", decode.url)), (None, ("p", prefill.url))]
    response = await gateway.chat(stream=True)

    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["x-kvshuttle-fallback"] == "DECODE_UNREACHABLE"


async def test_a_stream_that_goes_silent_ends(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    decode.script = Script(mid_stream=asyncio.Event())
    async with running_gateway(control_plane=control.target, stream_idle_timeout_s=0.1) as gateway:
        response = await gateway.chat(stream=True)

    assert response.content.startswith(EVENTS[0])
    assert b'"error"' in response.content
    await asyncio.wait_for(decode.received[0].disconnected.wait(), 10)


async def test_decode_that_never_answers_is_a_504(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    decode.script = Script(before_answer=asyncio.Event())
    async with running_gateway(control_plane=control.target, decode_timeout_s=0.1) as gateway:
        response = await gateway.chat()

    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"


ERROR_EVENT = b'data: {"error":{"message":"EngineCore encountered an issue.","code":500}}\n\n'


@pytest.mark.parametrize("stream", [True, False])
async def test_the_errors_of_an_engine_whose_core_is_dead_are_not_the_clients(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine, stream: bool
) -> None:
    control.placements = [(None, ("d", decode.url)), (None, ("p", prefill.url))]
    decode.healthy = False
    decode.script = Script(only_event=ERROR_EVENT) if stream else Script(status=500)
    async with running_gateway(control_plane=control.target) as gateway:
        response = await gateway.chat(stream=stream)

    assert response.status_code == 200
    assert b'"error"' not in response.content
    assert response.headers["x-kvshuttle-fallback"] == "DECODE_UNREACHABLE"
    assert prefill.legs() == ["decode"]


async def test_an_error_in_the_stream_of_an_engine_that_lives_is_the_clients(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    decode.script = Script(only_event=ERROR_EVENT)
    async with running_gateway(control_plane=control.target) as gateway:
        response = await gateway.chat(stream=True)

    assert response.status_code == 200
    assert response.content.startswith(ERROR_EVENT)
    assert "x-kvshuttle-fallback" not in response.headers


async def test_a_turn_whose_stream_ends_with_an_error_has_failed(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    decode.script = Script(last_event=ERROR_EVENT)
    async with running_gateway(control_plane=control.target) as gateway:
        response = await gateway.chat(stream=True)
        await eventually(lambda: control.ends, "EndTurn")

    assert response.content == b"".join([*EVENTS, ERROR_EVENT, DONE])
    assert control.ends[0].outcome == FAILED


HANG = {"engine_hang_s": 0.4, "probe_timeout_s": 0.1}


async def test_a_prefill_engine_that_hangs_is_done_without(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.placements = [(("p", prefill.url), ("d", decode.url))]
    prefill.hangs = True
    prefill.script = Script(before_answer=asyncio.Event())
    async with running_gateway(control_plane=control.target, **HANG) as gateway:
        response = await gateway.chat()

    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "PREFILL_HUNG"
    await asyncio.wait_for(prefill.received[0].disconnected.wait(), 10)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_that_hangs_has_its_requests_taken_away(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine, stream: bool
) -> None:
    control.placements = [(None, ("d", decode.url)), (None, ("p", prefill.url))]
    decode.hangs = True
    decode.script = Script(before_answer=asyncio.Event())
    async with running_gateway(control_plane=control.target, **HANG) as gateway:
        response = await gateway.chat(stream=stream)

    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "DECODE_HUNG"
    assert prefill.legs() == ["decode"]
    await asyncio.wait_for(decode.received[0].disconnected.wait(), 10)


async def test_a_decode_engine_that_hangs_within_a_stream_ends_it(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    decode.hangs = True
    decode.script = Script(mid_stream=asyncio.Event())
    async with running_gateway(control_plane=control.target, **HANG) as gateway:
        response = await gateway.chat(stream=True)

    assert response.content.startswith(EVENTS[0])
    assert b'"error"' in response.content


async def test_a_request_that_makes_two_engines_hang_is_not_given_to_a_third(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url)), (None, ("p", prefill.url))]
    for engine in (prefill, decode):
        engine.hangs = True
        engine.script = Script(before_answer=asyncio.Event())
    async with (
        FakeEngine("third") as third,
        running_gateway(control_plane=control.target, decode_url=[third.url], **HANG) as gateway,
    ):
        response = await gateway.chat()

    assert response.status_code == 502
    assert not third.received


async def test_an_engine_that_computes_for_long_is_not_taken_for_hung(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    computed = asyncio.Event()
    decode.script = Script(before_answer=computed)
    async with running_gateway(control_plane=control.target, **HANG) as gateway:
        asked = asyncio.create_task(gateway.chat())
        await decode.wait_for_request()
        # Five times as long as a hung engine would be borne.
        asyncio.get_running_loop().call_later(2.0, computed.set)
        response = await asked

    assert response.status_code == 200
    assert "x-kvshuttle-fallback" not in response.headers


async def test_no_worker_goes_to_an_engine_known_from_the_list(
    gateway: RunningGateway, control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine
) -> None:
    control.refuse_begin = NO_WORKER
    refused = await gateway.chat()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_engine"

    control.workers = [
        worker("d", decode.url, types.WORKER_ROLE_DECODE),
        worker("p", prefill.url, types.WORKER_ROLE_PREFILL),
    ]
    directory = gateway.server.config.app.state.gateway.engines  # type: ignore[union-attr]
    await eventually(directory.known, "workers listed")
    response = await gateway.chat()
    assert response.status_code == 200
    assert decode.legs() == ["plain"]
    assert response.headers["x-kvshuttle-mode"] == "none"
    assert response.headers["x-kvshuttle-reason"] == "NO_WORKER"
    assert response.headers["x-kvshuttle-fallback"] == "NO_WORKER"
    assert "x-kvshuttle-turn" not in response.headers


async def test_control_plane_down_and_back(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine
) -> None:
    headers = {"X-Session-ID": "s1"}
    await gateway.chat(headers=headers)
    await eventually(lambda: control.ends, "EndTurn")
    await control.stop()
    # The list of workers was empty; the placement of the last turn is what is left to go by.
    response = await gateway.chat(headers=headers)

    assert response.status_code == 200
    assert response.headers["x-kvshuttle-fallback"] == "CONTROL_PLANE_DOWN"
    assert decode.legs() == ["decode", "plain"]

    await control.start()
    while "x-kvshuttle-fallback" in response.headers:
        response = await gateway.chat(headers=headers)
    assert response.headers["x-kvshuttle-mode"] == "lazy"


async def test_control_plane_slow_costs_its_timeout_only_and_leaks_no_turn(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    control.hold_begin = asyncio.Event()
    async with running_gateway(
        control_plane=control.target, begin_turn_timeout_s=0.05, decode_url=[decode.url]
    ) as gateway:
        for _ in range(3):
            response = await gateway.chat()
            assert response.headers["x-kvshuttle-fallback"] == "CONTROL_PLANE_SLOW"
        assert decode.legs() == ["plain"] * 3
        # The fourth does not ask: three in a row were too late.
        response = await gateway.chat()
        assert response.headers["x-kvshuttle-fallback"] == "CONTROL_PLANE_SLOW"
        assert len(control.begins) == 3
        control.hold_begin.set()
        await eventually(lambda: len(control.ends) == 3, "late turns ended")
    assert {outcome for _, outcome in control.outcomes()} == {FAILED}


async def test_end_turn_is_tried_again_with_the_same_request_id(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    control.refuse_ends = [NO_WORKER, NO_WORKER]
    await gateway.chat()

    await eventually(lambda: control.ends, "EndTurn")
    assert control.outcomes() == [(1, COMPLETED)]
    assert len(control.end_tries) == 3
    assert len({one.request_id for one in control.end_tries}) == 1


async def test_end_turn_that_is_refused_for_good_is_counted(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    control.refuse_ends = [PERMISSION_DENIED]
    assert (await gateway.chat()).status_code == 200

    registry = gateway.server.config.app.state.gateway.metrics.registry  # type: ignore[union-attr]
    await eventually(lambda: registry.get_sample_value("kvshuttle_gateway_end_turn_failures_total"))
    assert len(control.end_tries) == 1


async def test_end_turns_are_flushed_at_stop(control: FakeControlPlane, decode: FakeEngine) -> None:
    control.placements = [(None, ("d", decode.url))]
    async with running_gateway(control_plane=control.target) as gateway:
        control.refuse_ends = [NO_WORKER] * 2
        assert (await gateway.chat()).status_code == 200
    assert control.outcomes() == [(1, COMPLETED)]


async def test_running_stream_is_drained_at_stop(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    go_on = asyncio.Event()
    decode.script = Script(mid_stream=go_on)
    async with running_gateway(control_plane=control.target, drain_timeout_s=10.0) as gateway:
        running = asyncio.create_task(gateway.chat(stream=True))
        await decode.wait_for_request()
        gateway.server.should_exit = True
        go_on.set()
        response = await running
        assert response.text.endswith("data: [DONE]\n\n")
    assert control.outcomes() == [(1, COMPLETED)]


async def test_no_engine_reachable_is_a_502(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    control.placements = [(("p", NOBODY), ("d", NOBODY))]
    response = await gateway.chat()

    assert response.status_code == 502
    assert response.json()["error"]["code"] == "engine_unreachable"
    await eventually(lambda: len(control.ends) == 2, "two EndTurns")
    assert {outcome for _, outcome in control.outcomes()} == {FAILED}


async def test_an_end_that_the_connection_lost_is_sent_again(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    """gRPC gives calls up by itself, when thousands end at once."""
    lost = [status(code, "") for code in (code_pb2.CANCELLED, code_pb2.INTERNAL)]
    control.refuse_ends = lost
    await gateway.chat()
    await eventually(lambda: control.ends, "EndTurn")
    assert len({one.request_id for one in control.end_tries}) == 1
    assert len(control.end_tries) == 3
    assert await gateway.metric("kvshuttle_gateway_end_turn_failures_total") == 0
