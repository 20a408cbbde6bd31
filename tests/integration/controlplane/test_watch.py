"""Watches over the wire."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvshuttle.controlplane.model.limits import MS, Limits
from kvshuttle.controlplane.model.terms import SessionKey
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1.session_service_pb2_grpc import SessionServiceStub
from tests.integration.controlplane.conftest import Cluster, T, eventually
from tests.integration.controlplane.status import reason
from tests.integration.controlplane.test_turns import first_turn


async def take(call: Any, kind: str) -> Any:
    """The next message of a kind, over those that say only that time passes."""
    while True:
        message = await call.read()
        assert message is not grpc.aio.EOF, await call.details()
        if message.WhichOneof("event") == kind:
            return message
        assert message.WhichOneof("event") == "progress"


def watch(cluster: Cluster, **request: Any) -> Any:
    return cluster.sessions.WatchSessions(sessions.WatchSessionsRequest(**request), timeout=30)


async def test_a_snapshot_then_every_change_once_in_order(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.begin("a")
    call = watch(cluster)
    first = await take(call, "snapshot")
    assert [s.session_id for s in first.snapshot.sessions] == ["a"]
    assert first.snapshot.complete
    await cluster.begin("b")
    await cluster.end(1, "b")
    await cluster.end(1, "a")
    seen = [(await take(call, "changed")).changed for _ in range(3)]
    assert [s.session_id for s in seen] == ["b", "b", "a"]
    assert [s.version for s in seen] == sorted(s.version for s in seen)
    assert seen[1].turns[0].state == sessions.TURN_STATE_ENDED
    call.cancel()


async def test_a_watch_is_resumed_without_loss(cluster: Cluster) -> None:
    await cluster.pair()
    call = watch(cluster)
    token = (await take(call, "snapshot")).resume_token
    call.cancel()
    await cluster.begin("a")
    await cluster.begin("b")
    call = watch(cluster, resume_token=token)
    message = await take(call, "changed")
    assert message.changed.session_id == "a"
    call.cancel()
    call = watch(cluster, resume_token=message.resume_token)
    assert (await take(call, "changed")).changed.session_id == "b"
    progress = await take(call, "progress")
    assert progress.progress.HasField("time")
    call.cancel()


async def test_only_one_session(cluster: Cluster) -> None:
    await cluster.pair()
    call = watch(cluster, session_id="b")
    await take(call, "snapshot")
    await cluster.begin("a")
    await cluster.begin("b")
    assert (await take(call, "changed")).changed.session_id == "b"
    call.cancel()


async def test_a_token_from_before_a_restart_is_out_of_range(cluster: Cluster) -> None:
    call = watch(cluster)
    token = (await take(call, "snapshot")).resume_token
    call.cancel()
    await cluster.restart()
    call = watch(cluster, resume_token=token)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert reason(caught.value) == "WATCH_COMPACTED"


async def test_history_is_bounded(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, dataclasses.replace(Limits(), watch_history=3))
    await cluster.start()
    try:
        await cluster.pair()
        call = watch(cluster)
        token = (await take(call, "snapshot")).resume_token
        call.cancel()
        for number in range(5):
            await cluster.begin(f"s{number}")
        call = watch(cluster, resume_token=token)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert reason(caught.value) == "WATCH_COMPACTED"
    finally:
        await cluster.stop()


async def test_a_tenant_sees_its_own_only(cluster: Cluster) -> None:
    await cluster.pair()
    acme = (("kvshuttle-tenant", "acme"),)

    async def begin(session_id: str, tenant: str) -> None:
        request = sessions.BeginTurnRequest(session_id=session_id)
        metadata = (("kvshuttle-tenant", tenant),)
        await cluster.sessions.BeginTurn(request, timeout=T, metadata=metadata)

    await begin("a", "acme")
    await begin("b", "other")
    asked = sessions.WatchSessionsRequest()
    call = cluster.sessions.WatchSessions(asked, timeout=30, metadata=acme)
    message = await take(call, "snapshot")
    assert [(s.tenant, s.session_id) for s in message.snapshot.sessions] == [("acme", "a")]
    await begin("c", "other")
    await begin("d", "acme")
    message = await take(call, "changed")
    assert message.changed.session_id == "d"
    call.cancel()
    # The other's changes lie between, and are skipped when it goes on from its token too.
    await begin("e", "other")
    await begin("f", "acme")
    asked = sessions.WatchSessionsRequest(resume_token=message.resume_token)
    call = cluster.sessions.WatchSessions(asked, timeout=30, metadata=acme)
    assert (await take(call, "changed")).changed.session_id == "f"
    call.cancel()


async def test_leases_are_watched(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    call = cluster.leases.WatchLeases(leases.WatchLeasesRequest(), timeout=30)
    first = await take(call, "snapshot")
    assert first.snapshot.complete
    assert not first.snapshot.leases
    await first_turn(cluster, prefill, decode)
    states: list[int] = []
    while not states or states[-1] < leases.LEASE_STATE_COMPLETED:
        states.append((await take(call, "changed")).changed.state)
    assert states == [
        leases.LEASE_STATE_PENDING,
        leases.LEASE_STATE_GRANTED,
        leases.LEASE_STATE_ACTIVE,
        leases.LEASE_STATE_COMPLETED,
    ]
    call.cancel()


async def test_a_snapshot_comes_in_pieces(tmp_path: Path) -> None:
    limits = dataclasses.replace(Limits(), snapshot_piece=2, watch_progress_ns=50 * MS)
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    try:
        await cluster.pair()
        for number in range(5):
            await cluster.begin(f"s{number}")
        call = watch(cluster)
        pieces = [await take(call, "snapshot") for _ in range(3)]
        assert [len(p.snapshot.sessions) for p in pieces] == [2, 2, 1]
        assert [p.snapshot.complete for p in pieces] == [False, False, True]
        call.cancel()
    finally:
        await cluster.stop()


async def test_a_session_that_is_no_longer_listed_is_said_to_be_gone(tmp_path: Path) -> None:
    limits = dataclasses.replace(Limits(), ended_session_kept_ns=50 * MS, tick_ns=10 * MS)
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    try:
        await cluster.pair()
        call = watch(cluster)
        first = await take(call, "snapshot")
        assert first.snapshot.first
        await cluster.begin("a")
        await cluster.sessions.EndSession(sessions.EndSessionRequest(session_id="a"), timeout=T)
        seen: list[Any] = []
        while not seen or seen[-1].WhichOneof("event") != "removed":
            seen.append(await call.read())
        assert seen[-1].removed == sessions.SessionRemoved(tenant="default", session_id="a")
        assert seen[-1].resume_token
        call.cancel()
    finally:
        await cluster.stop()


async def many_sessions(cluster: Cluster, count: int) -> None:
    """Large ones, made without a call each."""
    registry, runtime = cluster.server.registry, cluster.server.runtime
    for number in range(count):
        key = SessionKey("default", f"{number:05}" + "x" * 250)
        runtime.forget(
            lambda now, key=key: registry.begin_turn(  # type: ignore[misc]
                now, BeginTurn(key=key, token=f"t{key.session_id[:5]}")
            )
        )
    await runtime.settled()


async def test_a_reader_that_takes_nothing_is_let_go(tmp_path: Path) -> None:
    limits = dataclasses.replace(
        Limits(), stream_stall_ns=2_000 * MS, silence_ns=60 * 1_000 * MS, turns_per_tenant=9_999
    )
    limits = dataclasses.replace(limits, turns_per_worker=99_999)
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    try:
        await cluster.pair()
        await many_sessions(cluster, 4_000)
        hub = cluster.server.hubs.sessions
        before = len(asyncio.all_tasks())
        # A client that offers a small window, as one does that has no memory for more.
        small = grpc.aio.insecure_channel(
            cluster.server.addresses.api,
            options=(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)),
        )
        asked = sessions.WatchSessionsRequest()
        calls = [SessionServiceStub(small).WatchSessions(asked, timeout=60), watch(cluster)]
        reading = calls[1]

        async def watching() -> int:
            return hub._count.total

        await eventually(watching, lambda count: count == 2)
        pieces = 0
        while not (message := await reading.read()).snapshot.complete:
            pieces += 1
            assert message.snapshot.sessions
        assert pieces > 1
        # One reads and stays; the other does not, and goes.
        await eventually(watching, lambda count: count == 1)
        await cluster.begin("a")
        assert (await take(reading, "changed")).changed.session_id == "a"
        for call in calls:
            call.cancel()
        await small.close()
        await eventually(watching, lambda count: count == 0)

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        await eventually(tasks, lambda count: count <= before)
    finally:
        await cluster.stop()


async def test_a_reader_too_slow_for_the_changes_is_told_and_resynchronised(
    tmp_path: Path,
) -> None:
    limits = dataclasses.replace(
        Limits(),
        watch_buffer=10,
        turns_per_tenant=9_999,
        turns_per_worker=99_999,
        silence_ns=60 * 1_000 * MS,
    )
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    try:
        await cluster.pair()
        call = watch(cluster)
        assert (await take(call, "snapshot")).snapshot.complete
        await many_sessions(cluster, 4_000)
        known: dict[str, int] = {}
        again = 0
        while len(known) < 4_000:
            message = await call.read()
            if message.WhichOneof("event") == "changed":
                known[message.changed.session_id] = message.changed.version
            elif message.WhichOneof("event") == "snapshot":
                if message.snapshot.first:
                    known = {}
                    again += 1
                known |= {s.session_id: s.version for s in message.snapshot.sessions}
        assert again == 1
        call.cancel()
    finally:
        await cluster.stop()


async def test_too_many_watches_are_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, dataclasses.replace(Limits(), watches_max=1))
    await cluster.start()
    try:
        call = watch(cluster)
        await take(call, "snapshot")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await take(watch(cluster), "snapshot")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason(caught.value) == "WATCHES"
        call.cancel()
    finally:
        await cluster.stop()
