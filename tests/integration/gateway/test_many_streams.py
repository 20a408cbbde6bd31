"""Two thousand streams at once, each with a first token and then nothing for a while, as agents'
are whose engine is busy: through a gateway in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.integration.gateway.conftest import CHAT
from tests.integration.gateway.fake_engine import DONE, EVENTS
from tests.integration.gateway.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.gateway.fake_control_plane import FakeControlPlane

STREAMS = 2_000
# In this process: an engine's and a client's socket a stream.
NEEDED_FILES = 2 * STREAMS + 500
PATIENCE_S = 60.0


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


@pytest.mark.timeout(300)
async def test_two_thousand_idle_streams(
    control: FakeControlPlane, engine: IdleEngine, tmp_path: Path, files: None
) -> None:
    control.placements = [(None, ("d", engine.url))]
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvshuttle.gateway", "--port", "0", "--log-level", "error"),
        *("--ready-file", str(ready), "--control-plane", control.target),
        *("--begin-turn-timeout-s", "60", "--engine-hang-s", "600"),
        *("--end-turn-timeout-s", "60"),
    )
    try:
        await eventually(ready.exists, "ready file")
        url = json.loads(ready.read_text())["url"]
        before = memory_bytes(process.pid), open_files(process.pid)
        async with asyncio.timeout(PATIENCE_S):
            # One first: its client has to find out that here is no stream of turns.
            asked = [asyncio.create_task(stream(url))]
            await eventually(lambda: engine.open, "the first stream")
            asked += [asyncio.create_task(stream(url)) for _ in range(STREAMS - 1)]
            while engine.open < STREAMS:  # noqa: ASYNC110 - counted by the engine
                await asyncio.sleep(0.02)
            during = memory_bytes(process.pid), open_files(process.pid)
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
                # It is there for others meanwhile.
                metrics = (await http.get("/metrics")).text
                assert f"kvshuttle_gateway_requests_in_flight {STREAMS}.0" in metrics
            engine.end.set()
            answers = await asyncio.gather(*asked)
        whole = b"".join([*EVENTS, DONE])
        assert all(answer == whole for answer in answers)
        await eventually(
            lambda: len({one.turn for one in control.ends}) == STREAMS,
            "every turn has ended",
            patience_s=90,
        )
        per_stream = (during[0] - before[0]) / STREAMS
        print(
            f"\n{STREAMS} streams: RSS {before[0] / 2**20:.0f} to {during[0] / 2**20:.0f} MiB "
            f"({per_stream / 1_024:.0f} KiB each), open files {before[1]} to {during[1]}"
        )
        # Two sockets each and little else: a leak would show as more.
        assert during[1] - before[1] <= 2 * STREAMS + 50
        assert per_stream < 512 * 1_024
        await eventually(lambda: open_files(process.pid) < 100, "all sockets closed")
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    assert process.returncode == 0


# So many connect at the same moment; the kernel's queue for a listening socket is finite.
_CONNECTING = asyncio.Semaphore(200)


async def stream(url: str) -> bytes:
    """One client's stream, to its end: the events without the transfer's framing."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with _CONNECTING:
        reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.closing(writer):
        body = json.dumps({**CHAT, "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        chunks = []
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            chunks.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(chunks)
