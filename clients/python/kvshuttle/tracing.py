"""OpenTelemetry for control plane, gateway and agent: one trace a turn.

Nothing of it is loaded, and nothing done, unless traces are asked for. Where they go and how many
are kept is OpenTelemetry's own environment: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and so
on. Contexts are passed on as W3C `traceparent` texts, never by context variables: what belongs
together here runs on many tasks and threads.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

__all__ = ["Tracing", "TracingError", "trace_id_of", "valid"]

Kind = Literal["internal", "server", "client"]
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NOTHING = ("0" * 32, "0" * 16)


class TracingError(Exception):
    """Traces were asked for and cannot be made; says what is missing."""


def valid(traceparent: str) -> bool:
    """Whether it is a traceparent of the version that is known, and names something."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return (
        found is not None
        and traceparent[:2] != "ff"
        and found[1] != _NOTHING[0]
        and found[2] != _NOTHING[1]
    )


def trace_id_of(traceparent: str) -> str:
    """The trace's id, for logs; empty if there is none."""
    return traceparent[3:35] if valid(traceparent) else ""


class Tracing:
    """Makes spans, whose parents are traceparents. Safe from any thread."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace

        try:
            own = version("kvshuttle")
        except PackageNotFoundError:  # run from a source tree that was not installed
            own = ""
        self._provider = provider
        self._trace = trace
        self._tracer = provider.get_tracer("kvshuttle", own)
        self._kinds = {
            "internal": trace.SpanKind.INTERNAL,
            "server": trace.SpanKind.SERVER,
            "client": trace.SpanKind.CLIENT,
        }

    @classmethod
    def from_environment(cls, service: str, instance: str = "") -> Tracing:
        """Exports by OTLP over gRPC. Raises TracingError when the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise TracingError(
                f"traces: the Python module {error.name} is not installed. It comes with the extra "
                "otel: pip install 'kvshuttle[otel]'"
            ) from error
        attributes = {"service.instance.id": instance} if instance else {}
        if "OTEL_SERVICE_NAME" not in os.environ:
            attributes["service.name"] = service
        provider = TracerProvider(resource=Resource.create(attributes))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def start(
        self,
        name: str,
        parent: str = "",
        kind: Kind = "internal",
        attributes: Mapping[str, str | int | float | bool] | None = None,
        start_ns: int | None = None,
    ) -> Span:
        """A span under what a traceparent names; a trace of its own without one. `start_ns`: Unix
        time, for what is told only afterwards."""
        trace = self._trace
        context: Any = None
        found = _TRACEPARENT.fullmatch(parent) if valid(parent) else None
        if found is not None:
            remote = trace.SpanContext(
                int(found[1], 16), int(found[2], 16), True, trace.TraceFlags(int(found[3], 16))
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        else:
            from opentelemetry.context import Context

            context = Context()
        return self._tracer.start_span(
            name, context, self._kinds[kind], attributes, start_time=start_ns
        )

    def failed(self, span: Span, reason: str) -> None:
        """Marks a span as an error."""
        span.set_status(self._trace.StatusCode.ERROR, reason)

    @staticmethod
    def traceparent(span: Span) -> str:
        """How others name this span as their parent."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def close(self) -> None:
        """Exports what is left; may wait for that."""
        self._provider.shutdown()
