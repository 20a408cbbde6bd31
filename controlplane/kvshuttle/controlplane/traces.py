"""Spans of the control plane: a turn's placement, and each of its leases from asking to its end.

An observer of facts, before the one that logs and counts: what it knows the trace of is logged with
the trace's id. The state machines know nothing of traces, and no trace is stored: what was open
when the control plane stops has no end in the trace.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeVar

from kvshuttle.controlplane.model.commands import ExpectTurn, Grant, Harden
from kvshuttle.controlplane.model.terms import TransferStats
from kvshuttle.tracing import trace_id_of, valid

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Span

    from kvshuttle.controlplane.model.commands import Command
    from kvshuttle.controlplane.model.effects import Fact
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.session import Turn
    from kvshuttle.controlplane.model.terms import SessionKey
    from kvshuttle.controlplane.runtime import Observer
    from kvshuttle.tracing import Tracing
    from kvshuttle.v1 import agent_service_pb2 as pb

__all__ = ["ControlTraces"]

K = TypeVar("K")
V = TypeVar("V")
TURNS_MAX = 100_000
"""Turns whose trace is remembered. An eager return begins when its turn has ended, so a turn's end
does not end that; at some hundred bytes each."""
LEASES_MAX = 20_000
"""Open spans; a lease that outlives so many others is traced to that moment."""


def _text(value: object) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else str(value)


class ControlTraces:
    """Belongs to the event loop. `find` reads a lease: a source is asked to harden before the fact
    that the lease was made is durable and comes here."""

    def __init__(
        self, tracing: Tracing, then: Observer, find: Callable[[str], Lease | None]
    ) -> None:
        self._tracing = tracing
        self._find = find
        self._then = then
        # By tenant, session and number; and by token.
        self._turns: OrderedDict[tuple[str, str, int], str] = OrderedDict()
        self._tokens: OrderedDict[str, str] = OrderedDict()
        self._leases: OrderedDict[str, Span] = OrderedDict()
        # A lease that ended with the last fact: what was moved is said right after.
        self._last: tuple[str, Span, int] | None = None

    # What comes in.

    def begin(self, traceparent: str) -> Span:
        """BeginTurn was asked for by a request with this traceparent, or none."""
        parent = traceparent if valid(traceparent) else ""
        return self._tracing.start("kvshuttle.BeginTurn", parent, "server")

    def begun(self, span: Span, key: SessionKey, turn: Turn) -> None:
        """The registry has decided. A repeated request has the turn's first trace."""
        parent = self._tracing.traceparent(span)
        if turn.token not in self._tokens:
            self._remember(self._turns, (key.tenant, key.session_id, turn.number), parent)
            self._remember(self._tokens, turn.token, parent)
        for name, value in (
            ("session_id", key.session_id),
            ("tenant", key.tenant),
            ("turn", turn.number),
            ("prefill", turn.prefill.worker.worker_id if turn.prefill is not None else ""),
            ("decode", turn.decode.worker.worker_id),
            ("return_mode", turn.plan.return_mode.name),
            ("reason", turn.plan.reason),
        ):
            span.set_attribute(f"kvshuttle.{name}", value)

    def refused(self, span: Span, error: BaseException) -> None:
        """It was not begun."""
        reason = str(getattr(error, "reason", type(error).__name__))
        span.set_attribute("kvshuttle.reason", reason)
        self._tracing.failed(span, reason)
        span.end()

    # What goes out.

    def mark(self, command: Command, message: pb.AgentCommand) -> None:
        """A command on its way to an agent says what its spans belong to."""
        match command:
            case ExpectTurn():
                message.expect_turn.traceparent = self._tokens.get(command.turn_token, "")
            case Harden():
                if command.lease_id not in self._leases:
                    self._asked(command)
                message.harden.traceparent = self._of(command.lease_id)
            case Grant():
                message.grant.traceparent = self._of(command.lease_id)
            case _:
                pass

    # Observer.

    def fact(self, fact: Fact) -> None:
        """Something happened, and is durable."""
        v = fact.values
        lease_id = v.get("lease_id")
        span = self._leases.get(lease_id) if isinstance(lease_id, str) else None
        if span is None and self._last is not None and self._last[0] == lease_id:
            span = self._last[1]
        match fact.name:
            case "lease_made":
                span = self._made(v)
            case "lease_granted" if span is not None:
                span.add_event("granted", {"kvshuttle.blocks": _text(v["blocks"])})
            case "transfer" if span is not None:
                stats = v["stats"]
                assert isinstance(stats, TransferStats)
                span.set_attribute("kvshuttle.outcome", _text(v["outcome"]))
                span.set_attribute("kvshuttle.bytes", stats.bytes)
                span.set_attribute("kvshuttle.moved_blocks", stats.blocks)
            case _:
                pass
        if span is not None:
            v["trace_id"] = trace_id_of(self._tracing.traceparent(span))
        elif "session_id" in v and "turn" in v:
            parent = self._turns.get((str(v.get("tenant")), str(v["session_id"]), _number(v)), "")
            if parent:
                v["trace_id"] = trace_id_of(parent)
        self._settle()
        self._then.fact(fact)
        if fact.name == "lease_ended" and span is not None:
            self._ended(str(lease_id), span, v)

    def committed(self, records: int, seconds: float) -> None:
        """A commit to a durable store."""
        self._then.committed(records, seconds)

    def late(self, seconds: float) -> None:
        """The event loop woke up so much later than asked."""
        self._settle()
        self._then.late(seconds)

    def close(self) -> None:
        """Exports what is left; may wait."""
        self._settle()
        for span in self._leases.values():
            span.end()
        self._leases.clear()
        self._tracing.close()

    def _made(self, v: dict[str, object]) -> Span:
        name = (str(v["tenant"]), str(v["session_id"]), _number(v))
        lease_id = str(v["lease_id"])
        span = self._leases.get(lease_id) or self._start(lease_id, name)
        for key in ("direction", "session_id", "turn", "source", "destination", "blocks"):
            span.set_attribute(f"kvshuttle.{key}", _text(v[key]))
        return span

    def _asked(self, command: Harden) -> None:
        lease = self._find(command.lease_id)
        # One of before a start is not traced, nor one that has ended meanwhile.
        if lease is not None and lease.open:
            name = (lease.key.tenant, lease.key.session_id, lease.turn)
            if name in self._turns:
                self._start(command.lease_id, name)

    def _start(self, lease_id: str, name: tuple[str, str, int]) -> Span:
        span = self._tracing.start(
            "kvshuttle.lease",
            self._turns.get(name, ""),
            attributes={"kvshuttle.lease_id": lease_id},
        )
        self._leases[lease_id] = span
        while len(self._leases) > LEASES_MAX:
            self._leases.popitem(last=False)[1].end()
        return span

    def _ended(self, lease_id: str, span: Span, v: dict[str, object]) -> None:
        del self._leases[lease_id]
        span.set_attribute("kvshuttle.state", _text(v["state"]))
        span.set_attribute("kvshuttle.reason", _text(v["reason"]))
        if v["state"] in ("FAILED", "EXPIRED"):
            self._tracing.failed(span, str(v["reason"]))
        self._last = (lease_id, span, time.time_ns())

    def _settle(self) -> None:
        if self._last is not None:
            _, span, end_ns = self._last
            self._last = None
            span.end(end_ns)

    def _of(self, lease_id: str) -> str:
        span = self._leases.get(lease_id)
        return self._tracing.traceparent(span) if span is not None else ""

    @staticmethod
    def _remember(book: OrderedDict[K, V], name: K, value: V) -> None:
        book[name] = value
        while len(book) > TURNS_MAX:
            book.popitem(last=False)


def _number(v: dict[str, object]) -> int:
    number = v["turn"]
    assert isinstance(number, int)
    return number
