"""Two thousand streams at once, each with a first token and then nothing for a while, as agents'
are whose engine is busy: through a gateway in a process of its own.

Nothing here is a matter of time: the gateway's limits in seconds are far away, few requests begin
at once, and what is waited for may take as long as it comes nearer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.integration.gateway.conftest import CHAT
from tests.integration.gateway.fake_engine import DONE, EVENTS
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.integration.gateway.fake_control_plane import FakeControlPlane

STREAMS = 2_000
# In this process: an engine's and a client's socket a stream.
NEEDED_FILES = 2 * STREAMS + 500
# As many requests at once have no byte of an answer yet.
BEGINNING = 100
# Of standing still, on a machine that is busy with other things.
PATIENCE_S = 120.0
NEVER_S = "3600"
LIMITS = (
    *("header-timeout-s", "body-timeout-s", "client-stall-timeout-s"),
    *("begin-turn-timeout-s", "begin-turn-settle-s", "end-turn-timeout-s"),
    *("connect-timeout-s", "decode-timeout-s", "stream-idle-timeout-s"),
    *("probe-timeout-s", "engine-hang-s", "drain-timeout-s", "flush-timeout-s"),
)


class IdleEngine:
    """Answers each request with the head of a stream and its first event, and ends all at once."""

    def __init__(self) -> None:
        self.open = 0
        self.end = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"connection: close\r\n\r\n" + EVENTS[0]
            )
            self.open += 1
            await self.end.wait()
            writer.write(b"".join(EVENTS[1:]) + DONE)
            with contextlib.suppress(ConnectionError):
                await writer.drain()


@pytest.fixture
async def engine() -> AsyncIterator[IdleEngine]:
    one = IdleEngine()
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0, backlog=STREAMS)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield one
    one.end.set()
    server.close()
    await server.wait_closed()


def memory_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) * 1_024


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NEEDED_FILES:
        pytest.skip(f"{NEEDED_FILES} open files are needed, {hard} allowed")
    if soft != resource.RLIM_INFINITY and soft < NEEDED_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def comes_to(goal: int, count: Callable[[], int], asked: list[asyncio.Task[bytes]]) -> None:
    """Returns once it is that many. Raises what a client raised, or a TimeoutError if for
    `PATIENCE_S` it grew no more."""
    seen, until = -1, 0.0
    while (now := count()) < goal:
        for one in asked:
            if one.done():
                one.result()
        if now > seen:
            seen, until = now, time.monotonic() + PATIENCE_S
        elif time.monotonic() > until:
            raise TimeoutError(f"{now} of {goal}, and no more for {PATIENCE_S} s")
        await asyncio.sleep(0.02)


@pytest.mark.timeout(1_800)
async def test_two_thousand_idle_streams(
    control: FakeControlPlane, engine: IdleEngine, tmp_path: Path, files: None
) -> None:
    control.placements = [(None, ("d", engine.url))]
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvshuttle.gateway", "--port", "0", "--log-level", "error"),
        *("--ready-file", str(ready), "--control-plane", control.target),
        *(flag for name in LIMITS for flag in (f"--{name}", NEVER_S)),
    )
    try:
        await eventually(ready.exists, "ready file", PATIENCE_S)
        url = json.loads(ready.read_text())["url"]
        before = memory_bytes(process.pid), open_files(process.pid)
        # One first: its client has to find out that here is no stream of turns.
        asked = [asyncio.create_task(stream(url))]
        await comes_to(1, lambda: engine.open, asked)
        asked += [asyncio.create_task(stream(url)) for _ in range(STREAMS - 1)]
        await comes_to(STREAMS, lambda: engine.open, asked)
        during = memory_bytes(process.pid), open_files(process.pid)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None) as http:
            # It is there for others meanwhile.
            metrics = (await http.get("/metrics")).text
            assert f"kvshuttle_gateway_requests_in_flight {STREAMS}.0" in metrics
        engine.end.set()
        await comes_to(STREAMS, lambda: sum(one.done() for one in asked), asked)
        whole = b"".join([*EVENTS, DONE])
        assert all(one.result() == whole for one in asked)
        await comes_to(STREAMS, lambda: len({one.turn for one in control.ends}), asked)
        per_stream = (during[0] - before[0]) / STREAMS
        print(
            f"\n{STREAMS} streams: RSS {before[0] / 2**20:.0f} to {during[0] / 2**20:.0f} MiB "
            f"({per_stream / 1_024:.0f} KiB each), open files {before[1]} to {during[1]}"
        )
        # Two sockets each and little else: a leak would show as more.
        assert during[1] - before[1] <= 2 * STREAMS + 50
        assert per_stream < 512 * 1_024
        await eventually(lambda: open_files(process.pid) < 100, "all sockets closed", PATIENCE_S)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    assert process.returncode == 0


_BEGINNING = asyncio.Semaphore(BEGINNING)


async def stream(url: str) -> bytes:
    """One client's stream, to its end: the events without the transfer's framing."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with _BEGINNING:
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({**CHAT, "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
    with contextlib.closing(writer):
        assert head.startswith(b"HTTP/1.1 200"), head
        chunks = []
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            chunks.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(chunks)
