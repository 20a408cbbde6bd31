"""Spans of the agent: how long a source held under a lease, how long a reader or writer moved.

Made of nothing but the commands that come and the events that go, so no other part of the agent
knows of it. Ids, blocks and bytes are in it, never a prompt or a token.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvshuttle.dataplane.log import get_logger
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvshuttle.dataplane.config import AgentConfig
    from kvshuttle.tracing import Tracing

__all__ = ["AgentTraces", "traces_of"]

_log = get_logger("tracing")
KNOWN_MAX = 10_000
"""Leases that are remembered at once; one that never ends (its stream was lost) must not stay."""


def traces_of(config: AgentConfig) -> AgentTraces | None:
    """What the configuration asks for. Traces that cannot be made are logged, and are none: they
    are no reason for an engine not to start."""
    if not config.traces:
        return None
    from kvshuttle.tracing import Tracing, TracingError

    try:
        return AgentTraces(
            Tracing.from_environment("kvshuttle-agent", config.worker_id), config.worker_id
        )
    except TracingError as error:
        _log.error("no_traces", error=str(error))
        return None


class AgentTraces:
    """`told` is called by the link's thread, `said` by the scheduler's: each entry is made by the
    first and taken by the second, in single steps."""

    def __init__(self, tracing: Tracing, worker_id: str) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        # Of a lease, here the source or the destination: its parent, and when that was told.
        self._parents: OrderedDict[tuple[str, str], tuple[str, int, str]] = OrderedDict()
        self._holds: OrderedDict[str, Span] = OrderedDict()

    def told(self, commands: Iterable[agent_pb2.AgentCommand]) -> None:
        """Orders came."""
        for command in commands:
            kind = command.WhichOneof("command")
            if kind == "harden" and command.harden.traceparent:
                harden = command.harden
                self._keep("harden", harden.lease_id, harden.traceparent, "")
            elif kind == "grant" and command.grant.traceparent:
                grant = command.grant
                direction = types_pb2.Direction.Name(grant.direction).removeprefix("DIRECTION_")
                self._keep("grant", grant.lease_id, grant.traceparent, direction)

    def said(self, event: agent_pb2.AgentEvent) -> None:
        """The agent says something."""
        kind = event.WhichOneof("event")
        if kind == "hardened":
            self._hardened(event.hardened)
        elif kind == "source_released":
            span = self._holds.pop(event.source_released.lease_id, None)
            if span is not None:
                span.set_attribute("kvshuttle.reason", event.source_released.reason)
                span.end()
        elif kind == "stopped":
            self._stopped(event.stopped)

    def close(self) -> None:
        """Exports what is left."""
        for span in self._holds.values():
            span.end()
        self._tracing.close()

    def _keep(self, kind: str, lease_id: str, parent: str, direction: str) -> None:
        self._parents[kind, lease_id] = (parent, time.time_ns(), direction)
        while len(self._parents) > KNOWN_MAX:
            self._parents.popitem(last=False)

    def _hardened(self, hardened: agent_pb2.LeaseHardened) -> None:
        found = self._parents.pop(("harden", hardened.lease_id), None)
        if found is None:
            return
        parent, told_ns, _ = found
        held = hardened.blocks.range
        span = self._tracing.start(
            "kvshuttle.hold",
            parent,
            attributes={
                "kvshuttle.lease_id": hardened.lease_id,
                "kvshuttle.worker_id": self._worker_id,
                "kvshuttle.blocks": held.end - held.start,
            },
            start_ns=told_ns,
        )
        span.add_event("held")
        self._holds[hardened.lease_id] = span
        while len(self._holds) > KNOWN_MAX:
            self._holds.popitem(last=False)[1].end()

    def _stopped(self, stopped: agent_pb2.LeaseStopped) -> None:
        found = self._parents.pop(("grant", stopped.lease_id), None)
        if found is None:
            return
        parent, told_ns, direction = found
        stats, now = stopped.stats, time.time_ns()
        moved_ns = stats.transfer_time.ToNanoseconds()
        outcome = agent_pb2.TransferOutcome.Name(stopped.outcome)
        span = self._tracing.start(
            "kvshuttle.transfer",
            parent,
            attributes={
                "kvshuttle.lease_id": stopped.lease_id,
                "kvshuttle.worker_id": self._worker_id,
                "kvshuttle.direction": direction,
                "kvshuttle.outcome": outcome.removeprefix("TRANSFER_OUTCOME_"),
                "kvshuttle.reason": stopped.reason,
                "kvshuttle.blocks": stats.blocks,
                "kvshuttle.tokens": stats.tokens,
                "kvshuttle.bytes": stats.bytes,
                "kvshuttle.transfer_ms": moved_ns / 1e6,
                "kvshuttle.wait_ms": stats.wait_time.ToNanoseconds() / 1e6,
            },
            # What came before the posting is in `wait_ms`, and a span of its own in the lease's.
            start_ns=max(told_ns, now - moved_ns) if moved_ns else told_ns,
        )
        if stopped.outcome in (
            agent_pb2.TRANSFER_OUTCOME_FAILED,
            agent_pb2.TRANSFER_OUTCOME_DISCARDED,
        ):
            self._tracing.failed(span, stopped.reason)
        span.end(now)
