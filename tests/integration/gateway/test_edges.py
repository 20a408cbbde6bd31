"""What is checked before a turn begins, the routes that only read, and the process itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from google.rpc import code_pb2  # type: ignore[import-untyped, unused-ignore]

from kvshuttle.gateway.__main__ import main
from kvshuttle.v1 import types_pb2 as types
from tests.integration.gateway.conftest import CHAT, running_gateway
from tests.integration.gateway.fake_control_plane import (
    PERMISSION_DENIED,
    FakeControlPlane,
    status,
    worker,
)
from tests.integration.gateway.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.gateway.conftest import RunningGateway
    from tests.integration.gateway.fake_engine import FakeEngine

NOWHERE = "127.0.0.1:9"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`main` sets up logging for its process, which is that of all tests here."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b'{"model": ', "line 1, column"),
        (b"[1]", "not an object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a":' + b"[" * 100_000, "nested"),
    ],
)
async def test_broken_json_is_a_400_that_says_what_to_do(
    gateway: RunningGateway, control: FakeControlPlane, body: bytes, word: str
) -> None:
    response = await gateway.http.post("/v1/chat/completions", content=body)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "body"
    assert word in error["message"]
    assert control.begins == []


async def test_too_large_a_body_is_a_413(control: FakeControlPlane) -> None:
    async def in_pieces() -> Any:
        for _ in range(4):
            yield b" " * 100

    async with running_gateway(control_plane=control.target, max_body_bytes=300) as gateway:
        announced = await gateway.http.post("/v1/completions", content=b" " * 301)
        chunked = await gateway.http.post("/v1/completions", content=in_pieces())
    assert (announced.status_code, chunked.status_code) == (413, 413)
    assert "--max-body-bytes" in announced.json()["error"]["message"]


async def _say(gateway: RunningGateway, data: bytes) -> bytes:
    """Sends raw bytes, leaves the connection open, and returns what comes until it is closed."""
    host, _, port = gateway.server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionError:  # closed while we still sent
        return b""
    finally:
        writer.close()


LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("junk", [b"x-junk: " + b"a" * 2_000_000, b"x-j: a\r\n" * 200_000])
async def test_endless_headers_are_cut_off(control: FakeControlPlane, junk: bytes) -> None:
    async with running_gateway(control_plane=control.target) as gateway:
        answer = await _say(gateway, LINE + junk)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        # Longer than the bound by little: the client has sent all, so it sees the answer.
        answer = await _say(gateway, LINE + junk[:66_000])
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "headers"


MOST = 65_536
GET = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
FIRST = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("junk", "size"),
    [
        (b"a", MOST + 1),
        (b"a", 66_000),
        (b"a", 70_000),
        (b"a", 200_000),
        (b"a\r\nx-j: ", MOST + 1),
        (b"a\r\nx-j: ", 9_000 * 8),
        (b" ", MOST + 1),
        (b" ", 200_000),
    ],
)
async def test_a_head_that_comes_whole_is_measured_too(
    control: FakeControlPlane, junk: bytes, size: int
) -> None:
    def head(size: int) -> bytes:
        room = size - len(GET) - len(b"x-j: a\r\n\r\n")
        filled = (junk * room)[:room] if len(junk) == 1 else junk * (room // len(junk))
        return GET + b"x-j: " + filled.ljust(room, junk[:1]) + b"a\r\n\r\n"

    assert len(head(size)) == size
    async with running_gateway(control_plane=control.target) as gateway:
        assert (await _say(gateway, head(MOST))).startswith(b"HTTP/1.1 200 ")
        answer = await _say(gateway, head(size))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        assert answer != b"" or size > 100_000
        # Behind another request, in one piece with it.
        if junk != b" ":
            answer = await _say(gateway, FIRST + head(size))
            assert b"connection: close" not in answer.partition(b"HTTP/1.1 431 ")[0]
        assert (await _say(gateway, FIRST + head(MOST))).count(b"HTTP/1.1 200 ") == 2


async def test_a_body_does_not_count_as_a_head(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "x" * 300_000}]
    for _ in range(2):
        assert (await gateway.chat(messages=messages)).status_code == 200


@pytest.mark.parametrize("head", [b"", LINE])
async def test_headers_that_do_not_come_close_the_connection(
    control: FakeControlPlane, head: bytes
) -> None:
    async with running_gateway(control_plane=control.target, header_timeout_s=0.2) as gateway:
        assert (await _say(gateway, head)).startswith(b"HTTP/1.1 408 ")


async def test_slow_answers_and_many_requests_on_a_connection_are_not_late_headers(
    control: FakeControlPlane, decode: FakeEngine
) -> None:
    control.placements = [(None, ("d", decode.url))]
    async with running_gateway(
        control_plane=control.target, header_timeout_s=0.2, max_header_bytes=400
    ) as gateway:
        for _ in range(4):
            decode.script.before_answer = asyncio.Event()
            asked = asyncio.create_task(gateway.chat())
            await asyncio.sleep(0.3)
            decode.script.before_answer.set()
            assert (await asked).status_code == 200
            await asyncio.sleep(0.3)


@pytest.mark.parametrize("session_id", ["x" * 257, "tab\tinside", ""])
async def test_a_session_id_that_cannot_be_one_is_a_400(
    gateway: RunningGateway, session_id: str
) -> None:
    response = await gateway.chat(headers={"X-Session-ID": session_id})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Session-ID"
    assert "256" in response.json()["error"]["message"]


async def test_headers_that_are_not_ascii_reach_the_engines_as_they_came(
    gateway: RunningGateway, prefill: FakeEngine, decode: FakeEngine
) -> None:
    response = await gateway.http.post(
        "/v1/chat/completions",
        json=CHAT,
        headers={b"x-request-id": "né-1".encode(), b"traceparent": b"\xff"},
    )

    assert response.status_code == 200
    for engine in (prefill, decode):
        headers = engine.received[0].headers
        assert headers["x-request-id"].encode("latin-1") == "né-1".encode()
        assert headers["traceparent"] == "\xff"


async def test_keys_name_the_tenant_and_never_reach_an_engine(
    control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'k-1').hexdigest()}: acme\n")
    control.placements = [(("p", prefill.url), ("d", decode.url))]
    async with running_gateway(
        control_plane=control.target, api_keys_file=keys, engine_api_key="inner"
    ) as gateway:
        none = await gateway.chat()
        wrong = await gateway.chat(headers={"Authorization": "Bearer k-2"})
        right = await gateway.chat(headers={"Authorization": "Bearer k-1", "X-Request-Id": "r7"})
        models = await gateway.http.get("/v1/models")

    assert (none.status_code, wrong.status_code, right.status_code) == (401, 401, 200)
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert models.status_code == 401
    assert set(control.tenants) == {"acme"}
    for engine in (prefill, decode):
        assert engine.received[0].headers["authorization"] == "Bearer inner"
        assert engine.received[0].headers["x-request-id"] == "r7"


async def test_models_come_from_an_engine_that_answers(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    decode.healthy = False
    async with running_gateway(
        control_plane=NOWHERE, prefill_url=[prefill.url], decode_url=[decode.url]
    ) as gateway:
        response = await gateway.http.get("/v1/models")

    assert response.json()["data"] == [{"id": "m"}]


async def test_health(control: FakeControlPlane, prefill: FakeEngine, decode: FakeEngine) -> None:
    async with running_gateway(control_plane=NOWHERE) as gateway:
        response = await gateway.http.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "unavailable")
    async with running_gateway(control_plane=NOWHERE, decode_url=[decode.url]) as gateway:
        response = await gateway.http.get("/health")
        assert (response.status_code, response.json()["status"]) == (200, "degraded")
        assert response.json()["engines"][0]["reachable"] is True
    control.workers = [
        worker("d", decode.url, types.WORKER_ROLE_DECODE),
        worker("p", prefill.url, types.WORKER_ROLE_PREFILL),
    ]
    async with running_gateway(control_plane=control.target) as gateway:
        await eventually(lambda: control.lists > 1, "workers listed")
        response = await gateway.http.get("/health")
        assert (response.status_code, response.json()["status"]) == (200, "ok")
        assert [one["worker_id"] for one in response.json()["engines"]] == ["d", "p"]


async def test_metrics_and_unknown_routes(gateway: RunningGateway) -> None:
    await gateway.chat()
    text = (await gateway.http.get("/metrics")).text
    assert 'kvshuttle_gateway_requests_total{route="chat",status="200"} 1.0' in text
    assert 'kvshuttle_gateway_turns_total{mode="lazy",outcome="completed"} 1.0' in text
    missing = await gateway.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"
    assert (await gateway.http.get("/v1/completions")).status_code == 405


async def test_without_permission_to_list_workers_the_control_plane_is_up(
    gateway: RunningGateway, control: FakeControlPlane
) -> None:
    control.refuse_workers = PERMISSION_DENIED
    seen = control.lists
    await eventually(lambda: control.lists > seen + 1, "refused lists")
    assert (await gateway.chat()).headers["x-kvshuttle-turn"] == "1"
    assert await gateway.metric("kvshuttle_gateway_control_plane_up") == 1


async def test_a_control_plane_that_does_not_know_the_gateway_is_not_called_up(
    gateway: RunningGateway, control: FakeControlPlane, decode: FakeEngine
) -> None:
    unknown = status(code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED", "the bearer token is not known")
    control.refuse_workers = control.refuse_begin = unknown
    seen = control.lists
    await eventually(lambda: control.lists > seen + 1, "refused lists")

    report = (await gateway.http.get("/health")).json()
    assert report["control_plane"]["state"] == "down"
    assert report["control_plane"]["reason"] == "UNAUTHENTICATED"
    assert await gateway.metric("kvshuttle_gateway_control_plane_up") == 0


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--control-plane", "10.0.0.1:1", "--control-plane-token", "x"], "clear text"),
        (["--control-plane-ca-file", "/no/such.pem"], "/no/such.pem"),
        (["--control-plane-cert-file", "/no/such.pem"], "both a certificate file and a key file"),
    ],
)
def test_a_connection_that_cannot_be_is_one_line_at_the_start(
    argv: list[str], word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", *argv]) == 2
    said = capfd.readouterr().err
    assert said.startswith("kvshuttle-gateway: control plane: ")
    assert word in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["none/ready", "", "file/ready", "x" * 300])
def test_a_ready_file_that_cannot_be_is_one_line_at_the_start(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    assert main(["--port", "0", "--ready-file", str(path)]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"kvshuttle-gateway: --ready-file '{path}': ")
    assert len(said.splitlines()) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_config_file_that_cannot_be_is_one_line_at_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.yaml"
    for content in (b"- port", b"host: \xff", b"port: [", None):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        assert main(["--config", str(file)]) == 2
        said = capfd.readouterr().err
        assert said.startswith(f"kvshuttle-gateway: config file {file} ")
        assert len(said.splitlines()) == 1


@pytest.fixture(autouse=True)
def hangup_counts() -> Iterator[None]:
    """All this may run under nohup, which children would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before or signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_as_a_process(
    control: FakeControlPlane, decode: FakeEngine, tmp_path: Path, number: signal.Signals
) -> None:
    """Ready file, a request, a stop with a drain, exit status 0, and no secrets in the log."""
    control.placements = [(None, ("d", decode.url))]
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvshuttle.gateway", "--port", "0"),
        *("--ready-file", str(ready), "--control-plane", control.target),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await eventually(ready.exists, "ready file")
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        host, _, port = told["url"].removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()
    finally:
        process.send_signal(number)
        _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0
    assert not ready.exists()
    lines = [json.loads(line) for line in err.decode().splitlines()]
    request = next(line for line in lines if line["event"] == "request")
    assert (request["tenant"], request["turn"], request["status"]) == ("default", 1, 200)
    assert b"token-1" not in err
    assert b"be kind" not in err
    await eventually(lambda: control.ends, "EndTurn")
