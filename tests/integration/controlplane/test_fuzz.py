"""Whatever bytes come on whatever RPC: a right code, no crash, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import resource
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshuttle.controlplane.model.ledger import Ledger
from kvshuttle.controlplane.model.limits import MS, SECOND, Limits
from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.conftest import Cluster, T, eventually
from tests.integration.controlplane.test_turns import first_turn
from tests.support.wire_fuzz import message_bytes, methods, path_of

EXAMPLES = int(os.environ.get("KVSHUTTLE_FUZZ_EXAMPLES", "25"))
"""Requests for every RPC; a night's run may set more."""
RIGHT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    # The test ended the call, or its time was over.
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Target:
    """A control plane with some state, and how to throw bytes at it."""

    def __init__(self, path: Path) -> None:
        limits = dataclasses.replace(
            Limits(),
            tick_ns=20 * MS,
            silence_ns=3_600 * SECOND,
            hello_wait_ns=SECOND,
            turns_per_tenant=100_000,
            turns_per_worker=100_000,
        )
        self.cluster = Cluster(path, limits)

    async def start(self) -> None:
        await self.cluster.start()
        self.prefill, self.decode = await self.cluster.pair()
        await first_turn(self.cluster, self.prefill, self.decode)
        turn = await self.cluster.begin(return_policy=sessions.RETURN_POLICY_ALWAYS)
        listed = await self.cluster.leases.ListLeases(leases.ListLeasesRequest(), timeout=T)
        self.texts = ("s", "p", "d", "default", turn.turn_token, listed.leases[0].lease_id)

    def channel(self, method: MethodDescriptor) -> grpc.aio.Channel:
        agent = method.containing_service.name == "AgentService"
        return self.cluster.agents_channel if agent else self.cluster.api

    async def throw(self, method: MethodDescriptor, messages: list[bytes]) -> grpc.StatusCode:
        """Sends raw bytes; the status that comes back."""
        channel: Any = self.channel(method)
        path = path_of(method)
        try:
            if not method.client_streaming and not method.server_streaming:
                await channel.unary_unary(path)(messages[0], timeout=T)
            elif method.client_streaming:
                return await converse(channel.stream_stream(path)(timeout=2), messages)
            else:
                call = channel.unary_stream(path)(messages[0], timeout=T)
                try:
                    await call.read()
                finally:
                    call.cancel()
                return await ended(call)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def internal(self) -> list[str]:
        """What went wrong inside, as the metrics count it."""
        return [
            f"{sample.labels}"
            for metric in self.cluster.server.metrics.registry.collect()
            for sample in metric.samples
            if sample.name in ("kvshuttle_rpc_errors_total", "kvshuttle_agent_events_dropped_total")
            and sample.labels.get("reason", "INTERNAL") == "INTERNAL"
            and sample.value
        ]

    async def normal_turn(self, session_id: str) -> None:
        # The others may have been drained or fenced, rightly.
        await self.cluster.agent("fresh", types.WORKER_ROLE_BOTH).connect()
        turn = await self.cluster.begin(session_id)
        assert turn.turn.decode.url
        await self.cluster.end(turn.turn.turn, session_id)

    async def settle(self) -> None:
        """Ends whatever the fuzz has made, and checks that nothing is left of it."""
        server = self.cluster.server
        registry, runtime = server.registry, server.runtime
        for key in list(registry.state.sessions):
            await runtime.apply(lambda now, key=key: registry.end_session(now, key))  # type: ignore[misc]
        for agent in self.cluster._agents:
            await agent.close()

        async def streams() -> int:
            return len(server.streams._streams) + server.hubs.sessions._count.total

        await eventually(streams, lambda count: count == 0)
        state = registry.state
        assert not state.turns
        assert not state.ledger.turns.of
        assert not state.ledger.sessions.of
        afresh = Ledger.of(state, state.ledger.released)
        assert state.ledger.held == afresh.held
        assert state.ledger.leased.keys() == afresh.leased.keys()


async def converse(call: Any, messages: list[bytes]) -> grpc.StatusCode:
    """Writes all, reads to the end, and returns the status that the server gave."""
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        # A write into a stream that has ended fails on this side, with a code of its own.
        if "Internal error from Core" in str(error):
            return grpc.StatusCode.CANCELLED
    try:
        return await ended(call)
    finally:
        call.cancel()


async def ended(call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = await call.code()
    return code


def memory_mib() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def census() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(asyncio.all_tasks())


async def calm(before: tuple[int, int]) -> None:
    """Waits until there are no more threads and tasks than before."""

    async def now() -> tuple[int, int, list[str]]:
        return (*census(), sorted(str(task.get_coro()) for task in asyncio.all_tasks()))

    await eventually(now, lambda n: n[0] <= before[0] + 2 and n[1] <= before[1] + 2)


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.full_name)
def test_no_bytes_crash_an_rpc(method: MethodDescriptor, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        target = Target(tmp_path)
        runner.run(target.start())
        try:
            # What gRPC makes for a first call stays.
            for message in (b"", b"\xff"):
                runner.run(target.throw(method, [message]))
            before, memory = runner.run(async_census()), memory_mib()

            @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
            @given(
                st.lists(
                    message_bytes(method.input_type, target.texts),
                    min_size=1,
                    max_size=4 if method.client_streaming else 1,
                )
            )
            def fuzz(messages: list[bytes]) -> None:
                code = runner.run(target.throw(method, messages))
                assert code in RIGHT, code
                assert not target.internal()

            fuzz()
            runner.run(calm(before))
            assert memory_mib() < memory + 100, "what was refused must not be kept"
            runner.run(target.normal_turn("after"))
            runner.run(target.settle())
        finally:
            runner.run(target.cluster.stop())


async def async_census() -> tuple[int, int]:
    return census()


def test_no_bytes_of_an_agent_crash_its_stream_or_others(tmp_path: Path) -> None:
    """After a proper hello, anything."""
    descriptor = agents.ConnectRequest.DESCRIPTOR
    with asyncio.Runner() as runner:
        target = Target(tmp_path)
        runner.run(target.start())
        cluster = target.cluster
        hostile = cluster.agent("hostile", types.WORKER_ROLE_BOTH)
        raw: Any = cluster.agents_channel.stream_stream(
            "/kvshuttle.v1.AgentService/Connect",
            response_deserializer=agents.ConnectResponse.FromString,
        )

        async def speak(messages: list[bytes]) -> grpc.StatusCode:
            return await converse(raw(timeout=2), messages)

        try:

            @settings(
                max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
            )
            @given(st.lists(message_bytes(descriptor, target.texts), max_size=5), st.booleans())
            def fuzz(messages: list[bytes], tell: bool) -> None:
                hello = agents.ConnectRequest(hello=hostile.hello)
                code = runner.run(speak([hello.SerializeToString(), *messages]))
                assert code in RIGHT, code
                runner.run(readable(target))
                assert not target.internal()

            fuzz()
            runner.run(readable(target))
            runner.run(target.normal_turn("after"))
            runner.run(target.settle())
        finally:
            runner.run(cluster.stop())


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes, lie: int) -> bytes:
    """An HTTP/2 frame; `lie` is added to its length."""
    length = max(0, len(payload) + lie) & 0xFFFFFF
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


FRAMES = st.builds(
    frame,
    st.one_of(st.integers(0, 10), st.integers(0, 255)),
    st.integers(0, 255),
    st.sampled_from((0, 1, 3, 5, 2, 2**31 - 1, 2**32 - 1)),
    # Headers of a call, a gRPC message of an RPC, and anything.
    st.one_of(
        st.binary(max_size=64),
        st.just(bytes.fromhex("838644") + b"\x0d/kvshuttle.v1"),
        st.just(b"\x00\x00\x00\x00\x03\x0a\x01s"),
        st.just(b"\x00\xff\xff\xff\xff" + b"x" * 50),
    ),
    st.sampled_from((0, 0, 0, 0, -1, 1, 2**24 - 1)),
)


def test_no_frames_crash_a_listener(tmp_path: Path) -> None:
    """Below the RPCs: well-formed connections that then send anything."""
    with asyncio.Runner() as runner:
        target = Target(tmp_path)
        runner.run(target.start())
        addresses = target.cluster.server.addresses
        try:

            async def send(address: str, frames: list[bytes]) -> None:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                settings_frame = frame(4, 0, 0, b"", 0)
                writer.write(PREFACE + settings_frame + b"".join(frames))
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

            runner.run(send(addresses.api, []))
            before, memory = runner.run(async_census()), memory_mib()

            @settings(
                max_examples=8 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
            )
            @given(st.lists(FRAMES, max_size=8), st.booleans())
            def fuzz(frames: list[bytes], agents_too: bool) -> None:
                runner.run(send(addresses.agent if agents_too else addresses.api, frames))

            fuzz()
            runner.run(calm(before))
            assert memory_mib() < memory + 100
            assert not target.internal()
            runner.run(target.normal_turn("after"))
            runner.run(target.settle())
        finally:
            runner.run(target.cluster.stop())


async def readable(target: Target) -> None:
    """Whatever an agent said, callers can still read and begin."""
    cluster = target.cluster
    await cluster.session("s")
    await cluster.sessions.ListSessions(sessions.ListSessionsRequest(), timeout=T)
    await cluster.leases.ListLeases(leases.ListLeasesRequest(), timeout=T)
    await cluster.cluster.ListWorkers(workers.ListWorkersRequest(), timeout=T)
