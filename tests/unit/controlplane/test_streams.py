"""Where commands go: to the boot that they are for, on its newest stream, or nowhere."""

from __future__ import annotations

import asyncio
from typing import Any

from kvshuttle.controlplane.model.commands import Drain
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.terms import WorkerRef
from kvshuttle.controlplane.services.agents import AgentService, Streams, _Stream
from kvshuttle.v1 import agent_service_pb2 as pb

OLD, NEW = WorkerRef("d", 1), WorkerRef("d", 2)


def drains(stream: _Stream) -> list[bool]:
    return [command.undo for command in stream.queue if isinstance(command, Drain)]


async def test_a_command_for_another_boot_is_dropped() -> None:
    streams = Streams(Limits())
    stream = _Stream(NEW, "boot", 1)
    streams.attach(stream)
    streams.deliver([(OLD, Drain(True)), (NEW, Drain(False)), (WorkerRef("p", 2), Drain(True))])
    assert drains(stream) == [False]


async def test_what_a_replaced_stream_had_queued_is_dropped() -> None:
    streams = Streams(Limits())
    older, newer = _Stream(NEW, "boot", 1), _Stream(NEW, "boot", 2)
    streams.attach(older)
    streams.deliver([(NEW, Drain(True))])
    streams.attach(newer)
    assert (drains(older), older.end_reason) == ([], "REPLACED")
    streams.deliver([(NEW, Drain(False))])
    assert (drains(older), drains(newer)) == ([], [False])
    # The end of the older one does not take the newer one's place.
    streams.detach(older)
    streams.deliver([(NEW, Drain(True))])
    assert drains(newer) == [False, True]


async def test_what_is_read_from_an_ended_stream_counts_for_nothing() -> None:
    applied: list[Any] = []

    class Runtime:
        registry = None

        def forget(self, event: Any) -> None:
            applied.append(event)

    any_: Any = None
    service = AgentService(Runtime(), Streams(Limits()), any_, Limits(), any_)  # type: ignore[arg-type]
    stream = _Stream(NEW, "boot", 1)
    beat = pb.ConnectRequest(heartbeat=pb.AgentHeartbeat(clock=1))
    service._apply(beat, stream)
    assert len(applied) == 1
    for reason in ("REPLACED", "FENCED", "STALLED"):
        ended = _Stream(NEW, "boot", 1)
        ended.end(reason)
        service._apply(beat, ended)
    assert len(applied) == 1
    await asyncio.sleep(0)
