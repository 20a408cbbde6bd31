"""A request's spans at the gateway: the request, its placement, its legs.

Without traces the client's own traceparent goes on as it came, and nothing else is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvshuttle.tracing import valid

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.trace import Span

    from kvshuttle.tracing import Tracing

__all__ = ["RequestTrace", "Step"]


class Step:
    """A part of a request, from `with` to its end; or from `begin` to `end`."""

    def __init__(self, tracing: Tracing | None, name: str, parent: str, **attributes: str) -> None:
        self._tracing = tracing
        self._span: Span | None = None
        self.traceparent = parent
        if tracing is not None:
            given = {f"kvshuttle.{key}": value for key, value in attributes.items()}
            self._span = tracing.start(name, parent, "client", given)
            self.traceparent = tracing.traceparent(self._span)

    def headers(self, client: Mapping[str, str]) -> Mapping[str, str]:
        """The client's headers, with this step as the parent of what the engine does."""
        return client if self._span is None else {**client, "traceparent": self.traceparent}

    def end(self, error: str = "") -> None:
        """May be called twice."""
        if self._span is not None and self._tracing is not None:
            if error:
                self._tracing.failed(self._span, error)
            self._span.end()
            self._span = None

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self.end(type(error).__name__ if error is not None else "")


class RequestTrace:
    """One request."""

    def __init__(
        self, tracing: Tracing | None, headers: Mapping[str, str], **attributes: str
    ) -> None:
        self._tracing = tracing
        self._span: Span | None = None
        given_by_client = headers.get("traceparent", "")
        self._traceparent = given_by_client if valid(given_by_client) else ""
        self._leg: Step | None = None
        if tracing is not None:
            given = {f"kvshuttle.{key}": value for key, value in attributes.items()}
            self._span = tracing.start(
                "kvshuttle.gateway.request", self._traceparent, "server", given
            )
            self._traceparent = tracing.traceparent(self._span)

    @property
    def trace_id(self) -> dict[str, str]:
        """For log lines: empty without traces."""
        return {} if self._span is None else {"trace_id": self._traceparent[3:35]}

    def step(self, name: str, **attributes: str) -> Step:
        """A part of the request: begin_turn, prefill."""
        return Step(self._tracing, f"kvshuttle.gateway.{name}", self._traceparent, **attributes)

    def decode(self, **attributes: str) -> Step:
        """The decode leg, which ends with the request or with the next try."""
        self.leg_ended("not the last try")
        self._leg = self.step("decode", **attributes)
        return self._leg

    def leg_ended(self, error: str = "") -> None:
        """The decode leg that runs, if one does, has ended."""
        if self._leg is not None:
            self._leg.end(error)
            self._leg = None

    def end(self, status: int, outcome: str, **attributes: str | int) -> None:
        """The request has been answered, or has been left."""
        self.leg_ended("" if outcome == "completed" else outcome)
        if self._span is None or self._tracing is None:
            return
        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("kvshuttle.outcome", outcome)
        for name, value in attributes.items():
            self._span.set_attribute(f"kvshuttle.{name}", value)
        if status >= 500:
            self._tracing.failed(self._span, f"status {status}")
        self._span.end()
