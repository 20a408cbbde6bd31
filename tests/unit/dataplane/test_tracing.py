"""Spans that the agent makes of what it is told and what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvshuttle.dataplane import tracing as traced
from kvshuttle.dataplane.config import AgentConfig
from kvshuttle.dataplane.tracing import AgentTraces, traces_of
from kvshuttle.tracing import Tracing, TracingError, trace_id_of, valid
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import types_pb2 as types

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
MS = 1_000_000


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = AgentTraces(Tracing(provider), "d-0")

    def grant(self, lease_id: str, parent: str = PARENT) -> None:
        grant = pb.Grant(lease_id=lease_id, traceparent=parent, direction=types.DIRECTION_FORWARD)
        self.traces.told([pb.AgentCommand(grant=grant)])

    def stop(self, lease_id: str, outcome: pb.TransferOutcome.ValueType, millis: int = 0) -> None:
        stopped = pb.LeaseStopped(lease_id=lease_id, outcome=outcome, reason="WHY")
        stopped.stats.transfer_time.FromMilliseconds(millis)
        stopped.stats.bytes = 7
        self.traces.said(pb.AgentEvent(stopped=stopped))

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def agent() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.traces.close()


def test_a_hold_lasts_from_its_asking_to_its_release(agent: Traced) -> None:
    harden = pb.Harden(lease_id="l", traceparent=PARENT)
    agent.traces.told([pb.AgentCommand(harden=harden)])
    hardened = pb.LeaseHardened(lease_id="l")
    hardened.blocks.range.end = 9
    agent.traces.said(pb.AgentEvent(hardened=hardened))
    assert agent.spans() == []
    released = pb.SourceReleased(lease_id="l", reason="READER_STOPPED")
    agent.traces.said(pb.AgentEvent(source_released=released))
    (span,) = agent.spans()
    assert span.name == "kvshuttle.hold"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b" * 16
    assert dict(span.attributes or {}) == {
        "kvshuttle.lease_id": "l",
        "kvshuttle.worker_id": "d-0",
        "kvshuttle.blocks": 9,
        "kvshuttle.reason": "READER_STOPPED",
    }


def test_a_transfer_is_as_long_as_it_took(agent: Traced) -> None:
    agent.grant("l")
    # It was told of just now, so no more than since then can be believed.
    agent.stop("l", pb.TRANSFER_OUTCOME_PUBLISHED, 60_000)
    (span,) = agent.spans()
    assert span.attributes is not None
    assert span.attributes["kvshuttle.transfer_ms"] == 60_000
    assert span.attributes["kvshuttle.bytes"] == 7
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 <= span.end_time - span.start_time < 30_000 * MS
    assert span.status.status_code is StatusCode.UNSET


def test_one_that_failed_says_why(agent: Traced) -> None:
    agent.grant("l")
    agent.stop("l", pb.TRANSFER_OUTCOME_DISCARDED)
    (span,) = agent.spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "WHY")


def test_what_has_no_trace_makes_no_span(agent: Traced) -> None:
    agent.grant("l", parent="")
    agent.stop("l", pb.TRANSFER_OUTCOME_PUBLISHED)
    agent.stop("never heard of", pb.TRANSFER_OUTCOME_PUBLISHED)
    released = pb.SourceReleased(lease_id="neither")
    agent.traces.said(pb.AgentEvent(source_released=released))
    assert agent.spans() == []


def test_leases_that_never_end_are_forgotten(
    agent: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "KNOWN_MAX", 2)
    for number in range(4):
        agent.grant(f"l{number}")
    for number in range(4):
        agent.stop(f"l{number}", pb.TRANSFER_OUTCOME_PUBLISHED)
    names = [span.attributes["kvshuttle.lease_id"] for span in agent.spans() if span.attributes]
    assert names == ["l2", "l3"]


def test_an_engine_starts_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = {"control_plane": "127.0.0.1:1", "worker_id": "w", "role": "both", "url": "http://h:1"}
    config = AgentConfig.parse({**extra, "insecure": True})
    assert traces_of(config) is None
    module = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, module, None)
    assert traces_of(AgentConfig.parse({**extra, "insecure": True, "traces": True})) is None
    with pytest.raises(TracingError, match=r"pip install 'kvshuttle\[otel\]'"):
        Tracing.from_environment("anything")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        PARENT + "-more",
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert not valid(text)
    assert trace_id_of(text) == ""


def test_a_traceparent_names_its_trace() -> None:
    assert valid(PARENT)
    assert trace_id_of(PARENT) == "a" * 32
