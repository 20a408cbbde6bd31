"""One turn, one trace: gateway, control plane, both agents, and the transfer."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from structlog.testing import capture_logs

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.tracing import Tracing
from kvshuttle.v1 import agent_service_pb2 as pb
from tests.integration.controlplane.conftest import eventually
from tests.integration.whole.stack import Stack, running_stack

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "x-session-id": "s"}
LONG = [{"role": "user", "content": "hello " * 400}]


class Collector:
    """All services' spans in one place; each has its own provider, as in its own process."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    def __call__(self, service: str) -> Tracing:
        provider = TracerProvider(
            resource=Resource({"service.name": service}), shutdown_on_exit=False
        )
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return Tracing(provider)

    def of(self, trace_id: str) -> list[ReadableSpan]:
        """The spans of a trace that have ended."""
        return [
            span
            for span in self.exporter.get_finished_spans()
            if f"{span.context.trace_id:032x}" == trace_id
        ]

    async def until(self, trace_id: str, names: Sequence[str]) -> list[ReadableSpan]:
        """Waits for spans of these names and no other."""

        async def read() -> list[str]:
            return sorted(span.name for span in self.of(trace_id))

        await eventually(read, lambda found: found == sorted(names))
        return self.of(trace_id)


def service(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.name"])


def parents(spans: list[ReadableSpan]) -> set[tuple[str, str, str]]:
    """(service, span, its parent's name) of each; the client's own span is called CLIENT."""
    names = {f"{span.context.span_id:016x}": span.name for span in spans} | {CLIENT: "CLIENT"}
    found = set()
    for span in spans:
        assert span.parent is not None, span.name
        parent = names[f"{span.parent.span_id:016x}"]
        name = span.name.removeprefix("kvshuttle.")
        found.add((service(span), name, parent.removeprefix("kvshuttle.")))
    return found


def done(least: int, found: tuple[int, list[str]]) -> bool:
    """So many grants were taken, and no lease is open."""
    return found[0] >= least and not found[1]


async def ask(
    stack: Stack,
    headers: dict[str, str],
    *,
    returns: int = 0,
    stream: bool = True,
    writer: str = "d",
) -> None:
    """A turn whose engines answer when KV has come to them: so many returns, and one forward,
    which is granted to decode, or to prefill where that writes."""
    known = {name: len(agent.grants) for name, agent in stack.agents.items()}
    state = stack.cluster.server.registry.state
    gates = {"p": asyncio.Event(), "d": asyncio.Event()}
    stack.prefill.script.before_answer = gates["p"]
    stack.decode.script.before_answer = gates["d"]
    asking = asyncio.create_task(stack.gateway.chat(headers=headers, messages=LONG, stream=stream))
    for gate, name, more in (("p", "p", returns), ("d", writer, 1)):

        async def taken(name: str = name) -> tuple[int, list[str]]:
            return len(stack.agents[name].grants), state.open_leases

        least = known[name] + more
        await eventually(taken, partial(done, least))
        gates[gate].set()
    assert (await asking).status_code == 200


TURN = [
    "kvshuttle.gateway.request",
    "kvshuttle.gateway.begin_turn",
    "kvshuttle.gateway.prefill",
    "kvshuttle.gateway.decode",
    "kvshuttle.BeginTurn",
]
LEASE = ["kvshuttle.lease", "kvshuttle.hold", "kvshuttle.transfer"]


async def test_a_turn_is_one_trace_through_everything(tmp_path: Path) -> None:
    collector = Collector()
    lazy = dataclasses.replace(Limits(), eager=False)
    async with running_stack(tmp_path, lazy, tracing=collector) as stack:
        await ask(stack, {**HEADERS, "traceparent": f"00-{'1' * 32}-{CLIENT}-01"})
        # The turn before has left KV at decode alone: this one has a return and a forward.
        await stack.agents["p"].forget("s", 1)
        replicas = stack.cluster.server.registry.state.replicas.count_of

        async def left() -> tuple[int, int]:
            return replicas["p"], replicas["d"]

        await eventually(left, lambda found: found == (0, 1))
        with capture_logs() as logs:
            await ask(stack, {**HEADERS, "x-kvshuttle-return": "always"}, returns=1)
            spans = await collector.until(TRACE, TURN + LEASE * 2)
    assert parents(spans) == {
        ("gateway", "gateway.request", "CLIENT"),
        ("gateway", "gateway.begin_turn", "gateway.request"),
        ("gateway", "gateway.prefill", "gateway.request"),
        ("gateway", "gateway.decode", "gateway.request"),
        ("controlplane", "BeginTurn", "gateway.begin_turn"),
        ("controlplane", "lease", "BeginTurn"),
        ("d", "hold", "lease"),
        ("p", "transfer", "lease"),
        ("p", "hold", "lease"),
        ("d", "transfer", "lease"),
    }
    # vLLM makes its own spans under what it is told.
    legs = {span.name: f"{span.context.span_id:016x}" for span in spans}
    for engine, leg in ((stack.prefill, "prefill"), (stack.decode, "decode")):
        told = engine.received[-1].headers["traceparent"]
        assert told == f"00-{TRACE}-{legs[f'kvshuttle.gateway.{leg}']}-01"
    transfers = [span for span in spans if span.name == "kvshuttle.transfer"]
    assert {span.attributes["kvshuttle.direction"] for span in transfers if span.attributes} == {
        "FORWARD",
        "RETURN",
    }
    for span in transfers:
        assert span.attributes is not None
        assert span.attributes["kvshuttle.outcome"] == "PUBLISHED"
        assert span.attributes["kvshuttle.blocks"] == 8 * (
            1 if span.attributes["kvshuttle.direction"] == "RETURN" else 2
        )
        assert span.attributes["kvshuttle.bytes"] == span.attributes["kvshuttle.blocks"] * 736_000
        assert span.attributes["kvshuttle.transfer_ms"] == 5
    leases = [span for span in spans if span.name == "kvshuttle.lease"]
    for span in leases:
        assert span.attributes is not None
        assert span.attributes["kvshuttle.state"] == "COMPLETED"
        assert [event.name for event in span.events] == ["granted"]
        assert span.attributes["kvshuttle.bytes"]
    # Logs of both join by the same id.
    marked = {line["event"] for line in logs if line.get("trace_id") == TRACE}
    assert {
        "request",
        "turn_begun",
        "lease_made",
        "lease_granted",
        "lease_ended",
        "transfer",
    } <= marked
    # Ids, never what was said.
    assert "hello" not in "".join(span.to_json() for span in spans)


async def test_what_returns_after_a_turn_belongs_to_the_turn_that_left_it(tmp_path: Path) -> None:
    collector = Collector()
    async with running_stack(tmp_path, Limits(), tracing=collector) as stack:
        await ask(stack, HEADERS)
        spans = await collector.until(TRACE, TURN + LEASE * 2)
    (returned,) = (
        span
        for span in spans
        if span.name == "kvshuttle.transfer"
        and span.attributes
        and span.attributes["kvshuttle.direction"] == "RETURN"
    )
    assert service(returned) == "p"


async def test_what_is_pushed_is_traced_by_its_writer(tmp_path: Path) -> None:
    collector = Collector()
    lazy = dataclasses.replace(Limits(), eager=False, forward="push")
    async with running_stack(tmp_path, lazy, tracing=collector) as stack:
        await ask(stack, HEADERS, writer="p")
        spans = await collector.until(TRACE, [*TURN, "kvshuttle.lease", "kvshuttle.transfer"])
    assert parents(spans) >= {
        ("gateway", "gateway.prefill", "gateway.request"),
        ("gateway", "gateway.decode", "gateway.request"),
        ("controlplane", "lease", "BeginTurn"),
        ("p", "transfer", "lease"),
    }


async def test_what_fails_is_marked(tmp_path: Path) -> None:
    collector = Collector()
    async with running_stack(tmp_path, Limits(), tracing=collector) as stack:
        stack.agents["d"].outcome_of = lambda _: pb.TRANSFER_OUTCOME_FAILED
        stack.agents["p"].outcome_of = lambda _: pb.TRANSFER_OUTCOME_FAILED
        await ask(stack, HEADERS, stream=False)
        spans = await collector.until(TRACE, TURN + LEASE * 2)
    for span in spans:
        bad = span.name in ("kvshuttle.lease", "kvshuttle.transfer")
        assert span.status.status_code is (StatusCode.ERROR if bad else StatusCode.UNSET), span.name


async def test_a_request_without_a_trace_begins_one(tmp_path: Path) -> None:
    collector = Collector()
    async with running_stack(tmp_path, Limits(), tracing=collector) as stack:
        await ask(stack, {"x-session-id": "s", "traceparent": "nonsense"})

        async def roots() -> list[ReadableSpan]:
            return [one for one in collector.exporter.get_finished_spans() if one.parent is None]

        (root,) = await eventually(roots, bool)
        assert root.name == "kvshuttle.gateway.request"
        await collector.until(f"{root.context.trace_id:032x}", TURN + LEASE * 2)


async def test_an_unsampled_request_leaves_no_span(tmp_path: Path) -> None:
    collector = Collector()
    async with running_stack(tmp_path, Limits(), tracing=collector) as stack:
        await ask(stack, {**HEADERS, "traceparent": f"00-{TRACE}-{CLIENT}-00"})
        other = {"traceparent": f"00-{'1' * 32}-{CLIENT}-01", "x-session-id": "other"}
        await ask(stack, other)
        await collector.until("1" * 32, TURN + LEASE * 2)
        assert collector.of(TRACE) == []


async def test_without_traces_the_clients_goes_on_as_it_came(tmp_path: Path) -> None:
    async with running_stack(tmp_path, Limits()) as stack:
        await ask(stack, HEADERS)
        for engine in (stack.prefill, stack.decode):
            assert engine.received[-1].headers["traceparent"] == HEADERS["traceparent"]
        for agent in stack.agents.values():
            assert {one.traceparent for one in agent.expected} == {""}
            assert {one.traceparent for one in agent.hardens} <= {""}


@pytest.mark.parametrize("module", ["controlplane.server", "gateway.app", "dataplane.tracing"])
def test_without_traces_nothing_of_it_is_loaded(module: str) -> None:
    program = (
        f"import sys, kvshuttle.{module}; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
