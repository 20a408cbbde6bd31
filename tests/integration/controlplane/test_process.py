"""The program: its command line, its life, what operators run against it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.core import Metric

from kvshuttle.controlplane import scrape, scrape_http
from kvshuttle.controlplane.scrape import Files, MetricsServer, Now
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.conftest import Cluster

START_S = 30
COMMAND = [sys.executable, "-m", "kvshuttle.controlplane"]


@pytest.fixture(autouse=True)
def hangup_counts() -> Iterator[None]:
    """All this may run under nohup, which children would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before or signal.SIG_DFL)


class Process:
    """A control plane of its own."""

    def __init__(self, path: Path, *flags: str) -> None:
        self.ready_path = path / "ready.json"
        self.log_path = path / "log"
        with self.log_path.open("ab") as log:
            self.child = subprocess.Popen(
                [
                    *COMMAND,
                    "--insecure",
                    "--listen=127.0.0.1:0",
                    f"--ready-file={self.ready_path}",
                    f"--store={path / 'store.db'}",
                    "--log-format=json",
                    "--log-level=debug",
                    *flags,
                ],
                stderr=log,
            )
        until = time.monotonic() + START_S
        while not self.ready_path.exists():
            assert self.child.poll() is None, self.log_path.read_text()
            assert time.monotonic() < until, self.log_path.read_text()
            time.sleep(0.02)
        self.ready: dict[str, Any] = json.loads(self.ready_path.read_text())

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.child.send_signal(number)
        return self.child.wait(timeout=20)

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    # Its scripted agent sends no heartbeats.
    process = Process(tmp_path_factory.mktemp("cp"), "--silence=60")
    yield process
    if process.child.poll() is None:
        process.stop()


def buf(process: Process, method: str, data: str = "{}") -> Any:
    """As docs/operating.md has it."""
    found = subprocess.run(
        [
            str(Path(sys.executable).with_name("buf")),
            "curl",
            "--timeout=10s",
            "--protocol=grpc",
            "--http2-prior-knowledge",
            f"--data={data}",
            f"http://{process.ready['api']}/{method}",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "BUF_CACHE_DIR": str(process.ready_path.parent)},
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


async def test_operators_commands(process: Process) -> None:
    """One real turn, then every command of the operator's page."""
    async with grpc.aio.insecure_channel(process.ready["agent"]) as channel:
        agent = await Agent(channel, "b", types.WORKER_ROLE_BOTH).connect()
        stub = session_grpc.SessionServiceStub(channel)
        begun = await stub.BeginTurn(sessions.BeginTurnRequest(session_id="chat"), timeout=10)
        run = asyncio.to_thread
        listed = await run(buf, process, "kvshuttle.v1.SessionService/ListSessions")
        assert [s["sessionId"] for s in listed["sessions"]] == ["chat"]
        got = await run(
            buf, process, "kvshuttle.v1.SessionService/GetSession", '{"session_id": "chat"}'
        )
        assert got["session"]["turnCount"] == "1"
        assert await run(buf, process, "kvshuttle.v1.LeaseService/ListLeases") == {}
        workers = await run(buf, process, "kvshuttle.v1.ClusterService/ListWorkers")
        assert workers["workers"][0]["state"] == "WORKER_STATE_READY"
        status = await run(buf, process, "kvshuttle.v1.ClusterService/GetStatus")
        assert (status["store"], status["runningTurns"]) == ("sqlite", "1")
        health = await run(buf, process, "grpc.health.v1.Health/Check")
        assert health["status"] == "SERVING"
        drained = await run(
            buf, process, "kvshuttle.v1.ClusterService/DrainWorker", '{"worker_id": "b"}'
        )
        assert drained["worker"]["state"] == "WORKER_STATE_DRAINING"
        await agent.close()
    assert begun.turn_token not in process.log_path.read_text()


def test_metrics(process: Process) -> None:
    with urllib.request.urlopen(f"http://{process.ready['metrics']}/metrics") as answer:
        text = answer.read().decode()
    assert f"kvshuttle_epoch {float(process.ready['epoch'])}" in text
    assert 'kvshuttle_workers{state="ready"}' in text
    assert "kvshuttle_store_commit_seconds_bucket" in text
    assert 'kvshuttle_leases{state="granted"} 0.0' in text
    assert "kvshuttle_store_free_bytes" in text
    assert 'kvshuttle_store_size_bytes{file="log"}' in text
    assert 'kvshuttle_streams{kind="turns"} 0.0' in text
    assert "process_resident_memory_bytes" in text
    promtool = shutil.which("promtool")
    if promtool is not None:  # Debian's package prometheus has it
        found = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def connected(address: str, sent: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(sent)
    return connection


def threads(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.child.pid}/task"))


def test_connections_that_ask_nothing_neither_pile_up_nor_stay(process: Process) -> None:
    address = process.ready["metrics"]
    scraped(address)
    before = threads(process)
    crowd = [connected(address, b"GET /metr"[: n % 10]) for n in range(200)]
    try:
        # Each has a thread and a timer.
        assert threads(process) <= before + 2 * scrape_http.CONNECTIONS
        assert "kvshuttle_epoch" in scraped(address)
        for connection in crowd:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    finally:
        for connection in crowd:
            connection.close()
    assert "kvshuttle_epoch" in scraped(address)
    assert "Traceback" not in process.log_path.read_text()


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"GET /metr",
        b"GET /metrics HTTP/1.1",
        b"GET /metrics HTTP/1.1\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n",
    ],
)
def test_a_request_that_is_cut_short_is_no_scrape(process: Process, part: bytes) -> None:
    with connected(process.ready["metrics"], part) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    with connected(process.ready["metrics"], b"GET / HTTP/1.1\r\n\r\n") as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(12) == b"HTTP/1.0 200"
    assert "Traceback" not in process.log_path.read_text()


async def test_a_stop_does_not_wait_for_scrapes_that_hang(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that does not answer, say; a connection more stands at the door."""
    monkeypatch.setattr(scrape_http, "REQUEST_S", 0.2)
    go_on, hanging = threading.Event(), threading.Semaphore(0)

    class Slow(Files):
        def read(self) -> list[Metric]:
            hanging.release()
            go_on.wait(30)
            return []

    now = Now(cluster.server.registry, {})
    server = MetricsServer(cluster.server.metrics, now, Slow(None, {}), "127.0.0.1", 0)
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    number = scrape_http.CONNECTIONS
    clients = [connected(f"127.0.0.1:{server.port}", request) for _ in range(number + 1)]
    try:
        for _ in range(number):
            assert await asyncio.to_thread(hanging.acquire, timeout=10)
        await asyncio.wait_for(server.close(), 10)
    finally:
        go_on.set()
        for client in clients:
            client.close()


async def test_a_scrape_ends_in_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the client sends too slowly or the event loop is too busy."""
    monkeypatch.setattr(scrape_http, "SCRAPE_S", 1.0)
    monkeypatch.setattr(scrape, "STATE_S", 0.2)

    def busy() -> int:
        time.sleep(0.5)
        return 0

    now = Now(cluster.server.registry, {"busy": busy})
    server = MetricsServer(cluster.server.metrics, now, Files(None, {}), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"

    def drip() -> float:
        begun = time.monotonic()
        with connected(address, b"GET /") as connection, contextlib.suppress(ConnectionError):
            while time.monotonic() < begun + 5:
                connection.sendall(b"a")
                time.sleep(0.1)
        return time.monotonic() - begun

    try:
        assert await asyncio.to_thread(drip) < 2
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(scraped, address)
        assert caught.value.code == 503
        assert b"busy" in caught.value.read()
    finally:
        await server.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process = Process(tmp_path)
    assert process.stop(number) == 0
    assert not process.ready_path.exists()
    events = [line["event"] for line in process.log()]
    assert events[-2:] == ["stopping", "stopped"]
    again = Process(tmp_path)
    assert again.ready["epoch"] == process.ready["epoch"] + 1
    again.stop()


async def test_on_one_port_a_request_may_be_as_large_as_agents_messages(process: Process) -> None:
    async with grpc.aio.insecure_channel(process.ready["api"]) as channel:
        get = session_grpc.SessionServiceStub(channel).GetSession
        for mib, code in (
            (2, grpc.StatusCode.INVALID_ARGUMENT),
            (33, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            request = sessions.GetSessionRequest(session_id="x" * (mib << 20))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await get(request, timeout=30)
            assert caught.value.code() is code


async def test_what_was_answered_survives_sigkill(tmp_path: Path) -> None:
    process = await asyncio.to_thread(Process, tmp_path)
    async with grpc.aio.insecure_channel(process.ready["agent"]) as channel:
        agent = await Agent(channel, "b", types.WORKER_ROLE_BOTH).connect()
        stub = session_grpc.SessionServiceStub(channel)
        begun = [
            await stub.BeginTurn(sessions.BeginTurnRequest(session_id=f"s{n}"), timeout=10)
            for n in range(20)
        ]
        process.child.kill()
        process.child.wait()
        process.ready_path.unlink()
        await agent.close()
    process = await asyncio.to_thread(Process, tmp_path)
    async with grpc.aio.insecure_channel(process.ready["api"]) as channel:
        stub = session_grpc.SessionServiceStub(channel)
        page = await stub.ListSessions(sessions.ListSessionsRequest(), timeout=10)
        kept = {s.session_id: s.turns[0] for s in page.sessions}
        assert kept == {f"s{n}": answer.turn for n, answer in enumerate(begun)}
    process.stop()


def test_a_second_one_on_the_same_store_is_refused(process: Process, tmp_path: Path) -> None:
    store = process.ready_path.with_name("store.db")
    found = subprocess.run(
        [*COMMAND, "--insecure", "--listen=127.0.0.1:0", f"--store={store}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 1
    assert "in use by another control plane" in found.stderr


def run(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("flag", ["--ready-file=/nowhere/r", "--store=:memory:", "--config=/x"])
def test_wrong_settings_are_one_line_and_exit_status_2(flag: str) -> None:
    found = run("--insecure", "--listen=127.0.0.1:0", flag)
    assert found.returncode == 2
    option = flag[2:].partition("=")[0].replace("-", "_")
    assert found.stderr.startswith(f"kvshuttle-controlplane: {option}: ")
    assert len(found.stderr.splitlines()) == 1


def test_help_explains_each_option() -> None:
    found = run("--help")
    assert found.returncode == 0
    for option in ("--store", "--listen", "--lease-ttl", "--insecure", "--ready-file"):
        assert option in found.stdout
    assert "(default: 30.0)" in found.stdout
    assert "None)" not in found.stdout


def test_insecure_is_for_loopback_only() -> None:
    found = run("--insecure", "--agent-address=0.0.0.0:0")
    assert found.returncode == 2
    assert "loopback only" in found.stderr
