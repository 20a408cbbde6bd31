"""A collector of OpenTelemetry spans: a real gRPC server that keeps what comes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

__all__ = ["Collector", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """A span that has ended; ids in hexadecimal, `parent_id` empty at a trace's start."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: tuple[tuple[str, str | int], ...]

    def get(self, name: str) -> str | int | None:
        """One of kvshuttle's attributes."""
        return dict(self.attributes).get(f"kvshuttle.{name}")


class Collector(otlp_grpc.TraceServiceServicer):
    """Listens until it is stopped."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(1))
        add: Any = otlp_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """Listens no more."""
        self._server.stop(None).wait()

    def spans(self, trace_id: str | None = None) -> list[Span]:
        """What has come so far; of one trace, if it is named."""
        with self._lock:
            return [one for one in self._spans if trace_id in (None, one.trace_id)]

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = [
            Span(
                service,
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                tuple((one.key, _plain(one.value)) for one in span.attributes),
            )
            for resource in request.resource_spans
            for service in [_service(resource)]
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
        return otlp.ExportTraceServiceResponse()


def _service(resource: Any) -> str:
    names = (one.value for one in resource.resource.attributes if one.key == "service.name")
    return str(next(names).string_value)


def _plain(value: Any) -> str | int:
    return int(value.int_value) if value.HasField("int_value") else str(value.string_value)
