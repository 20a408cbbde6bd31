"""Spans leave the process by OTLP, to a collector that is a real gRPC server."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.test_process import Process
from tests.support.otlp import Collector

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_control_plane_exports_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    process = Process(tmp_path, "--traces", "--silence=60")
    try:
        async with grpc.aio.insecure_channel(process.ready["agent"]) as channel:
            agent = await Agent(channel, "b", types.WORKER_ROLE_BOTH).connect()
            await session_grpc.SessionServiceStub(channel).BeginTurn(
                sessions.BeginTurnRequest(
                    session_id="s", traceparent=f"00-{TRACE}-b7ad6b7169203331-01"
                ),
                timeout=10,
            )
            await agent.close()
    finally:
        # What is left is exported before it ends.
        assert process.stop() == 0
        collector.stop()
    found = {(one.service, one.name, one.trace_id) for one in collector.spans()}
    assert found == {("kvshuttle-controlplane", "kvshuttle.BeginTurn", TRACE)}
    assert [one["trace_id"] for one in process.log() if one["event"] == "turn_begun"] == [TRACE]
