"""`watch`: every change, across broken connections, and from where it ended."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvshuttle.v1 import types_pb2 as types
from tests.integration.cli.conftest import RUN_S, Site, environment, kvshuttle
from tests.integration.cli.terminal import Terminal


class Watch:
    """A running `watch -o json`."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child

    async def next(self) -> Any:
        assert self.child.stdout is not None
        async with asyncio.timeout(RUN_S):
            return json.loads(await self.child.stdout.readline())

    async def until(self, kind: str, **fields: Any) -> Any:
        """The next line of a kind whose object has these fields."""
        while True:
            found = await self.next()
            if found["kind"] == kind and all(
                found[kind].get(name) == value for name, value in fields.items()
            ):
                return found

    async def ended(self) -> tuple[int, str]:
        async with asyncio.timeout(RUN_S):
            _, err = await self.child.communicate()
        assert self.child.returncode is not None
        return self.child.returncode, err.decode()


@asynccontextmanager
async def watching(site: Site, *arguments: str) -> AsyncIterator[Watch]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvshuttle.cli", "--target", site.target, "-o", "json", "watch", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    try:
        yield Watch(child)
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()


async def test_each_change_is_a_line_and_a_later_watch_goes_on(site: Site) -> None:
    prefill, decode = await site.pair()
    begun = await site.begin()
    async with watching(site) as watch:
        first = await watch.next()
        assert (first["event"], first["session"]["session_id"]) == ("snapshot", "s")
        await site._forward(prefill, decode, begun.turn_token, 0, 10)
        states: list[str] = []
        while not states or states[-1] != "completed":
            found = await watch.until("lease", session_id="s")
            assert found["event"] == "changed"
            states.append(found["lease"]["state"])
        assert states == ["pending", "granted", "active", "completed"]
        await site._end(1, 10, cached=0)
        await watch.until("session", turn_count=1)
        last = await _last_of_turn(watch)
        watch.child.send_signal(signal.SIGINT)
        status, err = await watch.ended()
        assert status == 0
        assert "--resume" in err
    await site.begin()
    ran = await kvshuttle(
        *("--target", site.target, "watch", "sessions", "-o", "json"),
        *("--resume", last["resume"], "--count", "1"),
    )
    assert ran.status == 0
    (line,) = ran.out.splitlines()
    changed = json.loads(line)
    assert (changed["event"], changed["session"]["turn_count"]) == ("changed", 2)


async def _last_of_turn(watch: Watch) -> Any:
    while True:
        found = await watch.until("session", turn_count=1)
        if found["session"]["turns"][-1]["state"] == "ended":
            return found


async def test_a_restart_of_the_control_plane_does_not_end_it(site: Site) -> None:
    await site.agent("b", types.WORKER_ROLE_BOTH).connect()
    begun = await site.begin("before")
    await site.end(begun.turn.turn, "before")
    site._settings["api_address"] = site.target
    async with watching(site, "sessions") as watch:
        await watch.until("session", session_id="before")
        await site.restart()
        await site._agents[0].connect()
        again = await watch.until("session", session_id="before")
        assert again["event"] == "snapshot"
        await site.begin("after")
        assert (await watch.until("session", session_id="after"))["event"] == "changed"
        watch.child.send_signal(signal.SIGINT)
        status, err = await watch.ended()
        assert status == 0
        assert "trying again" in err


async def test_what_cannot_be(site: Site) -> None:
    bad = await site.run("watch", "leases", "--resume", "not-a-token")
    assert bad.status == 2
    assert "resume_token" in bad.err
    unknown = await site.run("watch", "--resume", "turns:1")
    assert unknown.status == 2
    nowhere = await kvshuttle("watch", "--target", "127.0.0.1:1")
    assert nowhere.status == 3
    assert "nothing listens there" in nowhere.err
    ran = await site.run("watch", "--for", "0.5")
    assert ran.status == 0
    assert ran.out == ""


async def test_on_a_terminal(site: Site) -> None:
    prefill, decode = await site.pair()
    begun = await site.begin()
    async with Terminal("--target", site.target, "watch", columns=100) as terminal:
        await terminal.until("turn 1 running none NO_REPLICA")
        await site._forward(prefill, decode, begun.turn_token, 0, 10)
        await terminal.until("completed  10 blocks, 7.36 MB in 5 ms (1.47 GB/s)")
        terminal.child.send_signal(signal.SIGINT)
        assert await terminal.ended() == 0
        await terminal.until("go on with --resume")


async def test_a_reader_that_has_enough(site: Site) -> None:
    """As with `| head -1`: no complaint, whatever form the lines have."""
    await site.pair()
    for form in ("table", "json"):
        await site.begin(form)
        command = f"{sys.executable} -m kvshuttle.cli watch -o {form} | head -n 1"
        child = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"set -o pipefail; {command}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(KVSHUTTLE_TARGET=site.target),
        )
        assert child.stdout is not None
        assert child.stderr is not None
        async with asyncio.timeout(RUN_S):
            assert await child.stdout.readline()
            # What is written next finds that nobody reads any more.
            running = asyncio.create_task(child.wait())
            number = 0
            while not running.done():
                number += 1
                await site.begin(f"{form}-{number}")
                await asyncio.wait({running}, timeout=0.2)
            err = (await child.stderr.read()).decode()
        assert child.returncode == 0, err
        assert "Error" not in err
        assert "Traceback" not in err
