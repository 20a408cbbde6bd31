"""`top` on a terminal and on a pipe."""

from __future__ import annotations

from kvshuttle.v1 import cluster_service_pb2 as workers
from tests.integration.cli.conftest import Site, kvshuttle
from tests.integration.cli.terminal import Terminal
from tests.integration.controlplane.agent import Agent


async def beat(agent: Agent, clock: int, *, free: int, returned: int = 0) -> None:
    await agent.beat(
        clock,
        pool=workers.PoolStats(
            total_blocks=1_000, free_blocks=free, held_blocks=200, quarantined_blocks=83
        ),
        counters=workers.WorkerCounters(
            return_bytes=returned, returned_tokens=returned // 1_000, transfers_completed=1
        ),
    )


async def test_live_with_keys_and_a_control_plane_that_comes_back(site: Site) -> None:
    prefill, decode = await site.pair()
    await beat(prefill, 2_000, free=640)
    await site.first_turn(prefill, decode)
    site._settings["api_address"] = site.target
    async with Terminal("--target", site.target, "top", "--interval", "0.5") as terminal:
        await terminal.until("64 %")
        await terminal.until("completed")
        for word in ("2 ready", "8.3 %", "KV moved", "Prompt tokens", "quit"):
            await terminal.until(word)
        await beat(prefill, 3_000, free=320, returned=50_000_000)
        await terminal.until("32 %")
        await terminal.until("50 MB in all")
        terminal.mark()
        terminal.press("s")
        await terminal.until("FREE▲")
        terminal.press("r")
        await terminal.until("FREE▼")
        terminal.press("p")
        await terminal.until("PAUSED")
        terminal.press("p-")
        await terminal.until("every 1 s")
        terminal.press("?")
        await terminal.until("hold the picture")
        terminal.press("x")
        terminal.mark()
        await site.stop()
        await terminal.until("no answer for")
        terminal.mark()
        await site.start()
        await terminal.until("epoch 2")
        terminal.press("q")
        assert await terminal.ended() == 0
        assert "\x1b[?1049l" in terminal.raw, "the terminal is left as it was"


async def test_what_is_wrong_at_the_start_is_told_plainly() -> None:
    async with Terminal("top", "--target", "127.0.0.1:1") as terminal:
        assert await terminal.ended() == 3
        await terminal.until("nothing listens there")


async def test_one_snapshot_on_a_pipe(site: Site) -> None:
    prefill, decode = await site.pair()
    await beat(prefill, 2_000, free=640)
    await site.first_turn(prefill, decode)
    for columns in ("80", "160"):
        ran = await kvshuttle(
            *("--target", site.target, "top", "--interval", "0.1"), COLUMNS=columns
        )
        assert ran.status == 0
        assert "\x1b" not in ran.out
        for word in ("2 ready", "64 %", "8.3 %", "Prompt tokens", "p → d", "quarantined"):
            assert word in ran.out, columns
        assert max(len(line) for line in ran.out.splitlines()) <= int(columns)
    found = (await site.run("top", "-o", "json", "--interval", "0.1")).json
    line = next(one for one in found["workers"] if one["ref"]["worker_id"] == "p")
    assert line["pool"]["free_blocks"] == 640
    assert line["transfers_per_s"] == 0
