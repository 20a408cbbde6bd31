"""How many events go into one message."""

from __future__ import annotations

from collections import deque

import pytest

from kvshuttle.dataplane.batches import take_events
from kvshuttle.dataplane.limits import EVENTS_BYTES, MAX_EVENTS_A_MESSAGE, MAX_MESSAGE_BYTES
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2


def hardened(size: int) -> agent_pb2.AgentEvent:
    blocks = types_pb2.BlockDescriptors(hashes=bytes(size))
    return agent_pb2.AgentEvent(hardened=agent_pb2.LeaseHardened(lease_id="l", blocks=blocks))


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([], [0]),
        ([10] * (MAX_EVENTS_A_MESSAGE + 1), [MAX_EVENTS_A_MESSAGE, 1, 0]),
        ([EVENTS_BYTES // 2] * 3, [1, 1, 1, 0]),
        ([EVENTS_BYTES // 3] * 5, [2, 2, 1, 0]),
        # One that is larger alone goes alone, and first.
        ([3 * EVENTS_BYTES, 10, 10], [1, 2, 0]),
        ([10, 3 * EVENTS_BYTES, 10], [1, 1, 1, 0]),
    ],
)
def test_batches(sizes: list[int], counts: list[int]) -> None:
    events = [hardened(size) for size in sizes]
    pending = deque(events)
    batches = [take_events(pending) for _ in counts]
    assert [len(batch) for batch in batches] == counts
    assert [event for batch in batches for event in batch] == events
    for batch in batches:
        if len(batch) > 1:
            assert agent_pb2.AgentEvents(events=batch).ByteSize() <= EVENTS_BYTES


def test_a_lease_over_a_million_tokens_fits() -> None:
    blocks = 1_000_000 // 16
    descriptors = types_pb2.BlockDescriptors(
        block_ids=range(1 << 20, (1 << 20) + blocks), hashes=bytes(32 * blocks)
    )
    assert descriptors.ByteSize() < MAX_MESSAGE_BYTES
