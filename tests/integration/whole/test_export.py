"""Spans leave the process by OTLP, to a collector that is a real gRPC server."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.test_process import Process

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps (service, span, trace) of what comes."""

    def __init__(self) -> None:
        self.spans: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock:
            for resource in request.resource_spans:
                attributes = {one.key: one.value for one in resource.resource.attributes}
                name = attributes["service.name"].string_value
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.add((name, span.name, span.trace_id.hex()))
        return otlp.ExportTraceServiceResponse()


async def test_a_control_plane_exports_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    add: Any = otlp_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
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
        server.stop(None)
    assert collector.spans == {("kvshuttle-controlplane", "kvshuttle.BeginTurn", TRACE)}
    assert [one["trace_id"] for one in process.log() if one["event"] == "turn_begun"] == [TRACE]
