"""How many events go into one message."""

from __future__ import annotations

from collections import deque

from kvshuttle.dataplane.limits import EVENTS_BYTES, MAX_EVENTS_A_MESSAGE
from kvshuttle.v1 import agent_service_pb2 as agent_pb2

__all__ = ["take_events"]

_FRAME_BYTES = 8
"""Tag and length of an event in its message: 6 at most, for one of 4 GiB."""


def take_events(pending: deque[agent_pb2.AgentEvent]) -> list[agent_pb2.AgentEvent]:
    """Takes the oldest events, as many as one message should carry: by number, and by bytes, of
    which the first may have more alone."""
    taken: list[agent_pb2.AgentEvent] = []
    size = 0
    while pending and len(taken) < MAX_EVENTS_A_MESSAGE:
        size += pending[0].ByteSize() + _FRAME_BYTES
        if taken and size > EVENTS_BYTES:
            break
        taken.append(pending.popleft())
    return taken
