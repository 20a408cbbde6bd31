"""What top computes from samples, and that it fits every terminal."""

from __future__ import annotations

import datetime
import io
from typing import Any, cast

import grpc
import pytest
from rich.console import Console, RenderableType

from kvshuttle.cli.top import view
from kvshuttle.cli.top.sample import History, Sample
from kvshuttle.cli.top.screen import TopApp
from kvshuttle.client import AsyncClient, UnavailableError
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import types_pb2 as types

AT = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
REASONS = ("GRANT_TIMEOUT", "SOURCE_SILENT", "PEER_UNREACHABLE", "TRANSFER_STALLED", "LATE")


def worker(name: str, role: int, boot: int = 1, **counters: Any) -> cluster.Worker:
    made = cluster.Worker(
        ref=types.WorkerRef(worker_id=name, incarnation=boot),
        role=types.WorkerRole.ValueType(role),
        state=cluster.WORKER_STATE_READY,
        pool=cluster.PoolStats(
            total_blocks=1_000, free_blocks=300, held_blocks=250, quarantined_blocks=40
        ),
        counters=cluster.WorkerCounters(**counters),
        prefill_tokens_per_second=12_345,
    )
    made.heartbeat_time.FromDatetime(AT)
    return made


def sample(second: float, *workers: cluster.Worker, more: int = 0) -> Sample:
    ended = leases.Lease(
        lease_id="lineage-0123456789abcdef-1-77",
        session_id="an-agent's-conversation-with-a-long-name",
        direction=types.DIRECTION_RETURN,
        state=leases.LEASE_STATE_COMPLETED,
        source=types.WorkerRef(worker_id="decode-0"),
        destination=types.WorkerRef(worker_id="prefill-0"),
    )
    ended.stats.bytes = 5_000_000
    ended.stats.transfer_time.FromMilliseconds(5)
    granted = leases.Lease(direction=types.DIRECTION_RETURN, state=leases.LEASE_STATE_GRANTED)
    status = cluster.GetStatusResponse(version="0.1.0", epoch=12, ready_workers=len(workers))
    return Sample(
        second,
        AT + datetime.timedelta(seconds=second),
        status,
        workers,
        [granted] * more,
        False,
        [ended] * 30,
    )


PREFILL, DECODE = types.WORKER_ROLE_PREFILL, types.WORKER_ROLE_DECODE


def test_rates_shares_and_failures_are_of_the_last_while() -> None:
    history = History()
    history.add(
        sample(
            0, worker("p", PREFILL, return_bytes=1_000, fallbacks={"LATE": 9}), worker("d", DECODE)
        )
    )
    for second in range(1, 60):
        frame = history.add(
            sample(
                second,
                worker(
                    "p",
                    PREFILL,
                    return_bytes=1_000 + second * 2_000_000,
                    returned_tokens=100 * second,
                    computed_tokens=300 * second,
                    transfers_completed=second,
                    fallbacks={"LATE": 9, "GRANT_TIMEOUT": second // 30},
                ),
                worker("d", DECODE, forward_bytes=second * 1_000_000),
                more=2,
            )
        )
    assert frame.return_bytes_per_s == pytest.approx(2_000_000)
    assert frame.forward_bytes_per_s == pytest.approx(1_000_000)
    assert frame.transfers_per_s == pytest.approx(1)
    assert frame.tokens == {"returned": 3_000, "local": 0, "computed": 9_000}
    assert frame.tokens_ever["computed"] == 300 * 59
    assert frame.leases == {("return", "granted"): 2}
    assert frame.failures == [("GRANT_TIMEOUT", 1, 1), ("LATE", 9, 0)]
    assert len(frame.return_series) == 59
    assert set(frame.return_series[1:]) == {2_000_000.0}


def test_a_new_boot_begins_anew_and_never_below_zero() -> None:
    history = History()
    history.add(sample(0, worker("p", PREFILL, return_bytes=9_000_000, computed_tokens=500)))
    frame = history.add(sample(5, worker("p", PREFILL, boot=2, return_bytes=1_000)))
    assert frame.return_bytes_per_s == 0
    assert frame.tokens["computed"] == 0
    assert frame.workers[0].bytes_per_s == 0


def test_orders() -> None:
    frame = History().add(sample(0, worker("b", PREFILL), worker("a", DECODE), worker("c", DECODE)))
    by = {sort.name: sort for sort in view.SORTS}
    names = [one.worker.ref.worker_id for one in view.ordered(frame, by["id"], reverse=False)]
    assert names == ["a", "b", "c"]
    names = [one.worker.ref.worker_id for one in view.ordered(frame, by["id"], reverse=True)]
    assert names == ["c", "b", "a"]
    frame.workers[1].worker.pool.waiting_requests = 7
    first = view.ordered(frame, by["waiting"], reverse=False)[0]
    assert first.worker.pool.waiting_requests == 7


def full() -> History:
    history = History()
    for second in range(40):
        history.add(
            sample(
                second,
                *(
                    worker(
                        f"{name}-{number}-in-rack-{number}",
                        role,
                        return_bytes=second * 10**9,
                        returned_tokens=second * 10**6,
                        local_hit_tokens=second * 10**5,
                        computed_tokens=second * 10**6,
                        fallbacks=dict.fromkeys(REASONS, second * 1000),
                    )
                    for number in range(6)
                    for name, role in (("prefill", PREFILL), ("decode", DECODE))
                ),
                more=999,
            )
        )
    return history


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 240])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    frame = full().frame()
    parts: list[RenderableType] = [
        view.head(frame, "controlplane.internal:7400", width, note="PAUSED", trouble="x" * 300),
        view.flow(frame, width),
        view.flow(frame, width, height=10),
        view.workers(frame, width),
        view.recent(frame, width),
    ]
    for part in parts:
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        console.print(part)
        printed = cast("io.StringIO", console.file).getvalue()
        for line in printed.splitlines():
            assert len(line) <= width
    for height in (10, 40):
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        console.print(view.flow(frame, width, height))
        lines = cast("io.StringIO", console.file).getvalue().splitlines()
        assert len(lines) == view.flow_lines(width, height)


@pytest.mark.parametrize("size", [(80, 24), (160, 40), (50, 16)])
async def test_the_screen(size: tuple[int, int]) -> None:
    history = full()
    answers: list[Sample | Exception] = []

    async def read(client: AsyncClient) -> Sample:
        if answers and isinstance(answers[0], Exception):
            raise answers[0]
        return history.samples[-1]

    async with AsyncClient("127.0.0.1:1") as client:
        app = TopApp(client, "cp:7400", history.samples[-1], 0.05, read)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            svg = app.export_screenshot()
            assert "cp:7400" in svg
            assert "decode-0" in svg
            await pilot.press("s", "s", "r", "down", "pagedown", "plus", "minus")
            answers.append(UnavailableError("gone", code=grpc.StatusCode.UNAVAILABLE))
            await _until(pilot, app, "no&#160;answer&#160;for")
            answers.clear()
            await pilot.press("question_mark")
            await _until(pilot, app, "hold&#160;the&#160;picture")
            await pilot.press("escape")
            await pilot.press("q")
        assert app.return_code == 0


async def _until(pilot: Any, app: TopApp, wanted: str) -> None:
    for _ in range(500):
        await pilot.pause(0.02)
        if wanted in app.export_screenshot():
            return
    raise AssertionError(f"{wanted} never came")
