"""The two ways out of the scheduler side: events for the control plane, orders for the movers."""

from __future__ import annotations

from typing import Protocol

from kvshuttle.dataplane.messages import ToMover
from kvshuttle.v1 import agent_service_pb2 as agent_pb2

__all__ = ["Outbox"]


class Outbox(Protocol):
    """Neither call blocks."""

    def emit(self, event: agent_pb2.AgentEvent) -> None:
        """Tells the control plane, in order, as soon as there is a stream."""

    def order(self, message: ToMover, rank: int | None = None) -> None:
        """Tells one rank's mover, or every rank's."""

    @property
    def num_ranks(self) -> int:
        """Number of movers."""

    @property
    def connected(self) -> bool:
        """Whether the control plane's stream is up."""
