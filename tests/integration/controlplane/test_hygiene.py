"""Rules of every RPC, found by the descriptors, so that a new one is covered by itself; and what
an agent, a header or a connection may not do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from kvshuttle.controlplane.model.limits import MS, Limits
from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from kvshuttle.v1.session_service_pb2_grpc import SessionServiceStub
from tests.integration.controlplane.agent import hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually
from tests.integration.controlplane.status import details, reason
from tests.integration.controlplane.test_turns import first_turn
from tests.support.wire_fuzz import enum_paths, methods, path_of, request_class, with_enum

UNARY = [m for m in methods() if not m.client_streaming and not m.server_streaming]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def name(method: MethodDescriptor) -> str:
    return f"{method.containing_service.name}.{method.name}"


@pytest.fixture
async def town(cluster: Cluster) -> Cluster:
    """With a session and a lease that valid requests can name."""
    cluster.prefill, cluster.decode = await cluster.pair()  # type: ignore[attr-defined]
    await first_turn(cluster, cluster.prefill, cluster.decode)  # type: ignore[attr-defined]
    return cluster


async def valid(cluster: Cluster) -> dict[str, Message]:
    """A request that is answered, for every unary RPC."""
    listed = await cluster.leases.ListLeases(leases.ListLeasesRequest(), timeout=T)
    lease_id = listed.leases[0].lease_id
    completed = sessions.TURN_OUTCOME_COMPLETED
    return {
        "ClusterService.DrainWorker": workers.DrainWorkerRequest(worker_id="d"),
        "ClusterService.FenceWorker": workers.FenceWorkerRequest(worker=cluster.decode.ref),  # type: ignore[attr-defined]
        "ClusterService.GetStatus": workers.GetStatusRequest(),
        "ClusterService.GetWorker": workers.GetWorkerRequest(worker_id="d"),
        "ClusterService.ListWorkers": workers.ListWorkersRequest(),
        "LeaseService.GetLease": leases.GetLeaseRequest(lease_id=lease_id),
        "LeaseService.ListLeases": leases.ListLeasesRequest(),
        "LeaseService.RenewLease": leases.RenewLeaseRequest(lease_id=lease_id),
        "LeaseService.RevokeLease": leases.RevokeLeaseRequest(lease_id=lease_id),
        "SessionService.BeginTurn": sessions.BeginTurnRequest(session_id="s"),
        "SessionService.EndTurn": sessions.EndTurnRequest(
            session_id="s", turn=1, outcome=completed
        ),
        "SessionService.EndSession": sessions.EndSessionRequest(session_id="s"),
        "SessionService.GetSession": sessions.GetSessionRequest(session_id="s"),
        "SessionService.ListSessions": sessions.ListSessionsRequest(),
        "SessionService.UpdateSession": sessions.UpdateSessionRequest(session_id="s"),
    }


def unary(cluster: Cluster, path: str) -> Any:
    return cluster.api.unary_unary(path)


async def call(
    cluster: Cluster, method: MethodDescriptor, raw: bytes, **more: Any
) -> grpc.aio.AioRpcError:
    """The refusal of a call that must be refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unary(cluster, path_of(method))(raw, **more)
    return caught.value


async def test_the_table_names_every_unary_rpc(town: Cluster) -> None:
    assert {name(m) for m in UNARY} == set(await valid(town)), "say what a valid request is"
    for method in UNARY:
        assert isinstance((await valid(town))[name(method)], request_class(method))


@pytest.mark.parametrize("method", UNARY, ids=name)
async def test_every_unary_rpc_needs_a_deadline(method: MethodDescriptor, town: Cluster) -> None:
    request = (await valid(town))[name(method)].SerializeToString()
    error = await call(town, method, request)
    assert error.code() is INVALID
    assert reason(error) == "DEADLINE_REQUIRED"


@pytest.mark.parametrize("method", UNARY, ids=name)
async def test_every_unary_rpc_bounds_its_request(method: MethodDescriptor, town: Cluster) -> None:
    request = (await valid(town))[name(method)].SerializeToString()
    # A field that nobody knows, so that nothing but the size is wrong.
    size = 2 << 20
    padding = b"\xfa\x7f" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128])
    padding += bytes([size >> 21]) + b"x" * size
    assert request_class(method).FromString(request + padding)
    error = await call(town, method, request + padding, timeout=T)
    assert error.code() is EXHAUSTED


def readable(method: MethodDescriptor, raw: bytes) -> bool:
    try:
        request_class(method).FromString(raw)
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("method", UNARY, ids=name)
async def test_every_unary_rpc_refuses_bytes_that_are_no_message(
    method: MethodDescriptor, town: Cluster
) -> None:
    for raw in (b"\xff\xfe\x00garbage", b"\x0a\x02\xff\xfe", b"\x0a\x7f"):
        if not readable(method, raw):
            error = await call(town, method, raw, timeout=T)
            assert error.code() is INVALID
            assert reason(error) == "INVALID_FIELD"
            assert details(error)["ErrorInfo"].metadata["field"] == "request"


@pytest.mark.parametrize("value", [77, -1, 2**31 - 1])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        pytest.param(m, path, id=f"{name(m)}.{'.'.join(path)}")
        for m in UNARY
        for path in enum_paths(m.input_type)
    ],
)
async def test_every_enum_of_a_request_must_be_known(
    method: MethodDescriptor, path: tuple[str, ...], value: int, town: Cluster
) -> None:
    request = with_enum((await valid(town))[name(method)], path, value)
    error = await call(town, method, request.SerializeToString(), timeout=T)
    assert error.code() is INVALID
    assert details(error)["ErrorInfo"].metadata["field"] == ".".join(path)
    assert str(value) in (error.details() or "")


@pytest.mark.parametrize("path", list(enum_paths(sessions.TurnsRequest.DESCRIPTOR)), ids=".".join)
async def test_every_enum_of_an_operation_must_be_known(
    path: tuple[str, ...], town: Cluster
) -> None:
    table = await valid(town)
    kind = path[1]
    asked = {"begin": "BeginTurn", "end": "EndTurn", "update": "UpdateSession"}[kind]
    operation: Any = sessions.TurnOperation(id=7)
    getattr(operation, kind).CopyFrom(table[f"SessionService.{asked}"])
    fine = sessions.TurnsRequest(operations=[operation])
    stub: Any = town.sessions
    stream = stub.Turns(timeout=T)
    await stream.write(fine)
    (result,) = (await stream.read()).results
    assert (result.id, result.WhichOneof("result")) == (7, kind)
    await stream.write(with_enum(fine, path, 77))
    (result,) = (await stream.read()).results
    assert result.error.code == INVALID.value[0]
    assert ".".join(path[2:]) in result.error.message
    assert "77" in result.error.message
    stream.cancel()


async def test_every_valid_request_is_answered(town: Cluster) -> None:
    """Else the tests above would prove nothing."""
    table = await valid(town)
    for method in UNARY:
        if method.name in ("FenceWorker", "DrainWorker", "EndSession", "RenewLease"):
            continue  # below, since they take things away or (renewal) the lease has ended
        await unary(town, path_of(method))(table[name(method)].SerializeToString(), timeout=T)
    for last in ("DrainWorker", "FenceWorker", "EndSession"):
        method = next(m for m in UNARY if m.name == last)
        await unary(town, path_of(method))(table[name(method)].SerializeToString(), timeout=T)


# -- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [
        (("kvshuttle-tenant", "x" * 129),),
        (("kvshuttle-tenant", "a"), ("kvshuttle-tenant", "b")),
        (("authorization", "Bearer"),),
        (("authorization", ""), ("kvshuttle-tenant-bin", b"\xff\x00")),
        (("x-bin", os.urandom(4_000)),),
        tuple((f"h{i}", "v") for i in range(100)),
    ],
)
async def test_headers_do_no_harm(metadata: Any, cluster: Cluster) -> None:
    request = sessions.ListSessionsRequest()
    called = cluster.sessions.ListSessions(request, timeout=T, metadata=metadata)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await called
    assert await called.code() in (grpc.StatusCode.OK, INVALID, EXHAUSTED)
    await cluster.sessions.ListSessions(request, timeout=T)


async def test_headers_beyond_all_measure_are_refused(cluster: Cluster) -> None:
    request = sessions.ListSessionsRequest()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.sessions.ListSessions(request, timeout=T, metadata=(("x", "y" * 200_000),))
    assert caught.value.code() is EXHAUSTED
    await cluster.sessions.ListSessions(request, timeout=T)


async def test_a_method_that_is_not_there(cluster: Cluster) -> None:
    for path in ("/kvshuttle.v1.SessionService/Nothing", "/x/y", "/kvshuttle.v1./", "//", "/a/b/c"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(cluster, path)(b"", timeout=T)
        assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, INVALID), path


# -- agents --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("highest_epoch", 1 << 30),
        ("highest_epoch", (1 << 64) - 1),
        ("bytes_per_block", (1 << 64) - 1),
        ("vllm_version", "x" * 201),
        ("agent_version", "a\nb"),
        ("lineage_id", "x" * 1_000),
        ("nixl_backend", "x" * 1_000),
        ("ranks", [agents.RankEndpoint()] * 1_025),
        ("fingerprint", [workers.FingerprintField(name="a", value="b")] * 65),
        ("fingerprint", [workers.FingerprintField(name="a", value="x" * 3_000)]),
        ("role", 9),
        ("role", 0),
    ],
)
async def test_a_hello_that_cannot_be_meant_is_refused(
    field: str, value: Any, cluster: Cluster
) -> None:
    agent = cluster.agent("d", types.WORKER_ROLE_DECODE)
    if isinstance(value, list):
        del getattr(agent.hello, field)[:]
        getattr(agent.hello, field).extend(value)
    else:
        setattr(agent.hello, field, value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await agent.connect()
    assert caught.value.code() is INVALID
    assert field in (caught.value.details() or "") or "hello" in (caught.value.details() or "")
    # And nothing of it stays.
    listed = await cluster.cluster.ListWorkers(workers.ListWorkersRequest(), timeout=T)
    assert not listed.workers
    await cluster.pair()
    await cluster.begin()


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://[v1.x]:80",
        "http://[::1]x:80",
        "http://::1:80",
        "http://h:99999",
        "http://h:0",
        "http://h:-1",
        "http://h:x",
        "http://h:80:80",
        "ftp://x",
        "//h:80",
        "h:80",
        "h",
        "http:h",
        "http://",
        "http:///v1",
        "http://:80",
        "http://user@h",
        "http://user:word@h:80",
        "http://h?",
        "http://h/?a=b",
        "http://h#",
        "http://h/#a",
        "http://a b",
        "http://a%20b",
        "http://a..b",
        f"http://{'x' * 64}",
        f"http://{'x.' * 127}x",
    ],
)
async def test_a_hello_whose_url_nobody_can_reach_is_refused(url: str, cluster: Cluster) -> None:
    agent = cluster.agent("d", types.WORKER_ROLE_DECODE, url=url)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await agent.connect()
    assert caught.value.code() is INVALID
    found = details(caught.value)["ErrorInfo"].metadata
    assert found["field"] == "hello.url"
    assert url[:40] in found["value"]
    assert found["remedy"]
    listed = await cluster.cluster.ListWorkers(workers.ListWorkersRequest(), timeout=T)
    assert not listed.workers


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "HTTPS://Host.example.:443/",
        "http://10.0.0.1:65535",
        "http://[::1]:8000",
        "http://[fe80::1%eth0]",
        "http://decode_0-a.svc:8000/engine",
        "http://bücher.example",
    ],
)
async def test_urls_that_can_be_reached_are_taken(url: str, cluster: Cluster) -> None:
    await cluster.agent("d", types.WORKER_ROLE_DECODE, url=url).connect()


async def test_what_an_agent_says_can_always_be_told_again(town: Cluster) -> None:
    """Durations, counts and words beyond all measure, of an agent that is broken."""
    prefill, decode = town.prefill, town.decode  # type: ignore[attr-defined]
    most = (1 << 63) - 1
    turn = await town.begin("t")
    offered = decode.replica(hashes("t", 3), "t", turn_token=turn.turn_token, leg=types.LEG_DECODE)
    offered.hold_remaining.seconds = most
    offered.num_tokens = (1 << 64) - 1
    await decode.say(offered=offered)
    computed = agents.LegComputed(
        turn_token=turn.turn_token, leg=types.LEG_PREFILL, computed_tokens=(1 << 64) - 1
    )
    computed.compute_time.seconds = most
    await prefill.say(leg_computed=computed)
    await decode.say(refused=agents.LeaseRefused(lease_id="x", reason="R" * 10_000))
    await prefill.beat(
        (1 << 64) - 1,
        pool=workers.PoolStats(total_blocks=1, free_blocks=1),
        counters=workers.WorkerCounters(
            computed_tokens=(1 << 64) - 1, fallbacks={f"R{i}" * 90: 1 for i in range(500)}
        ),
    )
    await decode.beat(5)

    async def replicas() -> int:
        return len((await town.session("t")).replicas)

    await eventually(replicas, lambda count: count == 1)
    await town.end(turn.turn.turn, "t")
    again = await town.begin("t", return_policy=sessions.RETURN_POLICY_ALWAYS)
    assert again.turn.plan.reusable_tokens
    order = await decode.told("harden", session_id="t")
    # It hardens more than it was asked to.
    order.range.end = 1 << 31
    await decode.say(
        hardened=agents.LeaseHardened(
            lease_id=order.lease_id,
            version=order.version,
            blocks=types.BlockDescriptors(range=order.range, hash_size=32, hashes=b"h" * 32),
        )
    )
    await prefill.told("revoke", lease_id=order.lease_id)
    ended = await town.leases.GetLease(leases.GetLeaseRequest(lease_id=order.lease_id), timeout=T)
    assert ended.lease.end_reason == "WRONG_RANGE"
    listed = await town.cluster.ListWorkers(workers.ListWorkersRequest(), timeout=T)
    fallbacks = next(w for w in listed.workers if w.ref.worker_id == "p").counters.fallbacks
    assert 0 < len(fallbacks) <= 64
    assert max(map(len, fallbacks)) <= 64


@pytest.mark.parametrize("total", [0, 1, 1_000])
async def test_no_part_of_a_pool_is_more_than_the_whole(total: int, cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    request = workers.GetWorkerRequest(worker_id="d")
    parts = ("free_blocks", "held_blocks", "quarantined_blocks")
    most = (1 << 32) - 1

    async def worker() -> workers.Worker:
        return (await cluster.cluster.GetWorker(request, timeout=T)).worker

    def heard(clock: int, got: workers.Worker) -> bool:
        return got.pool_clock == clock

    for clock, (said, shown) in enumerate([(most, total), (total + 1, total), (total, total)], 1):
        pool = workers.PoolStats(total_blocks=total, holds=most, **dict.fromkeys(parts, said))
        await decode.beat(clock, pool=pool)

        known = await eventually(worker, partial(heard, clock))
        assert [getattr(known.pool, part) for part in parts] == [shown] * 3
        assert (known.pool.total_blocks, known.pool.holds) == (total, most)


async def test_events_beyond_a_messages_limit_are_dropped(town: Cluster) -> None:
    decode = town.decode  # type: ignore[attr-defined]
    most = Limits().events_per_message
    filling = agents.AgentEvent(active=agents.LeaseActive(lease_id="never made"))

    def dropped() -> float | None:
        return town.server.metrics.registry.get_sample_value(
            "kvshuttle_agent_events_dropped_total", {"reason": "MALFORMED"}
        )

    async def clock() -> int:
        return (await town.cluster.GetWorker(request, timeout=T)).worker.pool_clock

    request = workers.GetWorkerRequest(worker_id="d")
    for name, before, lost in (("t", most - 1, 0), ("u", most, 1), ("v", most + 4, 5)):
        begun = await town.begin(name)
        offered = decode.replica(
            hashes(name, 3), name, turn_token=begun.turn_token, leg=types.LEG_DECODE
        )
        events = [*[filling] * before, agents.AgentEvent(offered=offered)]
        had = dropped() or 0
        await decode._call.write(agents.ConnectRequest(events=agents.AgentEvents(events=events)))
        # The next message is taken after it.
        await decode.beat(5_000 + before)
        await eventually(clock, partial(eq, 5_000 + before))
        assert (dropped() or 0) - had == lost
        assert len((await town.session(name)).replicas) == (0 if lost else 1)


async def test_an_agent_that_sends_no_message_is_told_so(town: Cluster) -> None:
    raw: Any = town.agents_channel.stream_stream("/kvshuttle.v1.AgentService/Connect")
    hello = town.agent("other", types.WORKER_ROLE_DECODE).hello
    stream = raw(timeout=T)
    await stream.write(agents.ConnectRequest(hello=hello).SerializeToString())
    await stream.read()
    await stream.write(b"\xff\xff")
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await stream.read() is not grpc.aio.EOF:
            pass
    assert await stream.code() is INVALID

    async def state() -> int:
        request = workers.GetWorkerRequest(worker_id="other")
        return (await town.cluster.GetWorker(request, timeout=T)).worker.state

    await eventually(state, lambda s: s == workers.WORKER_STATE_LOST)


async def test_a_silent_agent_is_found_out_and_its_stream_ended(tmp_path: Path) -> None:
    """Its connection lives and answers pings; only its process says nothing."""
    limits = dataclasses.replace(
        Limits(), heartbeat_ns=100 * MS, silence_ns=500 * MS, tick_ns=20 * MS
    )
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    try:
        agent = await cluster.agent("d", types.WORKER_ROLE_DECODE).connect()
        await agent.until_ended()
        worker = (
            await cluster.cluster.GetWorker(workers.GetWorkerRequest(worker_id="d"), timeout=T)
        ).worker
        assert worker.state == workers.WORKER_STATE_LOST
        assert not cluster.server.streams._streams
    finally:
        await cluster.stop()


async def test_an_agent_that_takes_nothing_is_let_go(tmp_path: Path) -> None:
    """It sends heartbeats, but what it is told waits: it would not obey anything."""
    limits = dataclasses.replace(
        Limits(), heartbeat_ns=200 * MS, silence_ns=3_000 * MS, tick_ns=20 * MS
    )
    cluster = Cluster(tmp_path, limits)
    await cluster.start()
    small = grpc.aio.insecure_channel(
        cluster.server.addresses.agent,
        options=(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)),
    )
    try:
        agent = cluster.agent("d", types.WORKER_ROLE_DECODE)
        raw: Any = small.stream_stream("/kvshuttle.v1.AgentService/Connect")
        stream = raw(timeout=60)
        await stream.write(agents.ConnectRequest(hello=agent.hello).SerializeToString())
        await stream.read()

        async def beats() -> None:
            beat = agents.ConnectRequest(heartbeat=agents.AgentHeartbeat(clock=1))
            while True:
                await stream.write(beat.SerializeToString())
                await asyncio.sleep(0.2)

        beating = asyncio.create_task(beats())
        # Ever new peers, each with much to tell.
        large = [agents.RankEndpoint(rank=0, agent_metadata=os.urandom(500_000))]
        for number in range(8):
            peer = cluster.agent(f"p{number}", types.WORKER_ROLE_PREFILL)
            del peer.hello.ranks[:]
            peer.hello.ranks.extend(large)
            await peer.connect()
            await peer.close()

        async def attached() -> bool:
            return "d" in cluster.server.streams._streams

        await eventually(attached, lambda there: not there, seconds=30)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        stream.cancel()
    finally:
        await small.close()
        await cluster.stop()


async def test_a_gateway_that_reads_no_answers_is_let_go(tmp_path: Path, limits: Limits) -> None:
    own = dataclasses.replace(limits, stream_stall_ns=2_000 * MS, turns_per_tenant=99_999)
    cluster = Cluster(tmp_path, own)
    await cluster.start()
    small = grpc.aio.insecure_channel(
        cluster.server.addresses.api,
        options=(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)),
    )
    try:
        await cluster.pair()
        stub: Any = SessionServiceStub(small)
        stream = stub.Turns(timeout=60)
        refused = sessions.TurnOperation(begin=sessions.BeginTurnRequest(session_id="x" * 300))
        asked = sessions.TurnsRequest(operations=[refused] * 1_000)

        async def ask() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await stream.write(asked)

        asking = asyncio.create_task(ask())
        assert cluster.server._turns is not None
        streams = cluster.server._turns._streams

        async def count() -> int:
            return len(streams)

        await eventually(count, lambda n: n == 1)
        await eventually(count, lambda n: n == 0, seconds=30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        # Others are served as before.
        turn = await cluster.begin()
        await cluster.end(turn.turn.turn)
    finally:
        await small.close()
        await cluster.stop()


# -- connections ---------------------------------------------------------------------------------


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


GARBAGE = [
    b"\x00" * 100,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200,
    # A preface, a SETTINGS frame, then a HEADERS frame that lies about its length.
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    b"\xff\xff\xff\x01\x04\x00\x00\x00\x01" + b"\x00" * 50,
    # HPACK that refers to what is not there.
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    b"\x00\x00\x05\x01\x05\x00\x00\x00\x01\xff\xff\xff\xff\x7f",
    # A ping with a wrong size.
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    b"\x00\x00\x01\x06\x00\x00\x00\x00\x00\x00",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 100,
    os.urandom(2_000),
]


async def test_garbage_on_a_connection_hurts_nobody_else(town: Cluster) -> None:
    for address in (town.server.addresses.api, town.server.addresses.agent):
        for garbage in GARBAGE:
            _, writer = await opened(address)
            writer.write(garbage)
            await writer.drain()
            writer.close()
    turn = await town.begin("after")
    await town.end(turn.turn.turn, "after")


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path, limits: Limits) -> None:
    own = dataclasses.replace(limits, handshake_timeout_ns=500 * MS)
    cluster = Cluster(tmp_path, own)
    await cluster.start()
    try:
        await cluster.pair()
        mute = [await opened(cluster.server.addresses.api) for _ in range(50)]
        slow = [await opened(cluster.server.addresses.agent) for _ in range(50)]
        for _, writer in slow:
            writer.write(b"PRI * HTTP/2.0\r\n")  # and no more of it
        # Meanwhile others are served.
        turn = await cluster.begin()
        await cluster.end(turn.turn.turn)
        async with asyncio.timeout(20):
            for reader, writer in mute + slow:
                while await reader.read(1_000):
                    pass  # the server's own preface
                writer.close()
    finally:
        await cluster.stop()


async def test_an_idle_connection_is_closed_and_one_with_a_stream_is_not(
    tmp_path: Path, limits: Limits
) -> None:
    own = dataclasses.replace(limits, connection_idle_ns=300 * MS)
    cluster = Cluster(tmp_path, own)
    await cluster.start()
    try:
        prefill, decode = await cluster.pair()
        reader, writer = await opened(cluster.server.addresses.api)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        async with asyncio.timeout(20):
            while await reader.read(1_000):
                pass
        writer.close()
        for agent in (prefill, decode):
            await agent.beat(5)
            assert agent.ended is None
        await cluster.begin()  # the client's own connection comes back by itself
    finally:
        await cluster.stop()


async def test_calls_on_one_connection_are_bounded(tmp_path: Path, limits: Limits) -> None:
    own = dataclasses.replace(limits, streams_per_connection=2)
    cluster = Cluster(tmp_path, own)
    await cluster.start()
    try:
        request = sessions.WatchSessionsRequest()
        watches = [cluster.sessions.WatchSessions(request, timeout=60) for _ in range(2)]
        for watch in watches:
            await watch.read()
        # The third waits in the client, and another connection is served.
        waiting = asyncio.ensure_future(
            cluster.cluster.GetStatus(workers.GetStatusRequest(), timeout=30)
        )
        other = grpc.aio.insecure_channel(
            cluster.server.addresses.api, options=(("grpc.use_local_subchannel_pool", 1),)
        )
        stub = type(cluster.cluster)(other)
        await stub.GetStatus(workers.GetStatusRequest(), timeout=T)
        assert not waiting.done()
        watches[0].cancel()
        await waiting
        watches[1].cancel()
        await other.close()
    finally:
        await cluster.stop()


def test_both_ends_look_after_their_connections() -> None:
    """A peer that vanished without a word is noticed within a minute, on idle streams too."""
    from kvshuttle.client.options import _CHANNEL_OPTIONS as CLIENT
    from kvshuttle.controlplane.server import listener_options
    from kvshuttle.dataplane.link import _CHANNEL_OPTIONS as AGENT

    server = dict(listener_options(Limits(), 1))
    for options in (server, dict(CLIENT), dict(AGENT)):
        noticed = int(options["grpc.keepalive_time_ms"]) + int(options["grpc.keepalive_timeout_ms"])
        assert 0 < noticed <= 60_000
        # Else pings stop after two on a stream where only the other side speaks.
        assert options["grpc.http2.max_pings_without_data"] == 0
    # And the server must not take a client's pings for an attack.
    allowed = int(server["grpc.http2.min_recv_ping_interval_without_data_ms"])
    for options in (dict(CLIENT), dict(AGENT)):
        assert allowed <= int(options["grpc.keepalive_time_ms"])
