"""The transport over real NIXL: two agents, plain memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvshuttle.dataplane.messages import PeerRegion
from kvshuttle.dataplane.transport import LocalRegion, NixlTransport, ReadHandle

pytest.importorskip("nixl._api", reason="NIXL is installed with the engines", exc_type=ImportError)
pytestmark = pytest.mark.engines

LAYERS, BLOCKS, BLOCK_BYTES = 3, 32, 4096


class Counting(NixlTransport):
    """With NIXL's own count of what it has made of a transfer."""

    def descriptors(self, handle: ReadHandle) -> int:
        return int(self._agent.get_xfer_telemetry(handle.raw).descCount)


@dataclass
class End:
    """One agent and its memory: layer, block, byte."""

    transport: Counting
    memory: np.ndarray[Any, Any]
    metadata: bytes

    @property
    def regions(self) -> list[PeerRegion]:
        return [PeerRegion(int(a.ctypes.data), BLOCK_BYTES, "DRAM", 0) for a in self.memory]

    def meet(self, other: End) -> None:
        """As at registration, and no more than that."""
        self.transport.add_peer(other.transport.name, other.metadata, other.regions)
        self.transport.notify(other.transport.name, b"hello")


def end(name: str) -> End:
    memory = np.zeros((LAYERS, BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    transport = Counting(name, "UCX", {})
    local = [
        LocalRegion(f"layer{i}", int(a.ctypes.data), BLOCK_BYTES, BLOCKS, "DRAM", 0)
        for i, a in enumerate(memory)
    ]
    return End(transport, memory, transport.register(local))


@pytest.fixture
def pair() -> Iterator[tuple[End, End]]:
    """Two that have not met."""
    ends = end("near"), end("far")
    yield ends
    for one in ends:
        one.transport.close()


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, f"still not so: {what}"


def test_a_connection_is_up_before_anything_is_transferred(pair: tuple[End, End]) -> None:
    """What the first transfer would pay for: both ends hear each other, and none was posted."""
    near, far = pair
    near.meet(far)
    far.meet(near)
    heard: dict[str, list[tuple[str, bytes]]] = {"near": [], "far": []}

    def both() -> bool:
        for one in pair:
            heard[one.transport.name] += one.transport.notices()
        return all(heard.values())

    until(both, "each has heard the other")
    assert heard == {"near": [("far", b"hello")], "far": [("near", b"hello")]}


@pytest.mark.parametrize(
    ("mine", "theirs", "pieces"),
    [
        ([3, 4, 5, 6], [10, 11, 12, 13], 1),
        # Neighbours on both sides go together, and only those.
        ([3, 4, 5, 6], [10, 11, 20, 21], 2),
        ([3, 5, 7, 9], [10, 11, 12, 13], 4),
    ],
)
def test_neighbours_of_a_push_go_as_one(
    pair: tuple[End, End], mine: list[int], theirs: list[int], pieces: int
) -> None:
    near, far = pair
    near.meet(far)
    far.meet(near)
    near.memory[:, mine] = np.arange(1, 5, dtype=np.uint8)[None, :, None]
    transport = near.transport
    local, remote = transport.prepare("", mine), transport.prepare("far", [0, *theirs])
    handle = transport.post_write(local, remote, 1, range(LAYERS))

    def done() -> bool:
        far.transport.notices()
        state = transport.state(handle)
        assert state != "ERR"
        return state == "DONE"

    until(done, "the WRITE is over")
    assert (far.memory[:, theirs] == np.arange(1, 5, dtype=np.uint8)[None, :, None]).all()
    assert not far.memory[:, 0].any()
    assert transport.descriptors(handle) == pieces * LAYERS
    assert transport.bytes_moved(handle) == handle.expected_bytes == 4 * LAYERS * BLOCK_BYTES
    transport.release(handle)
    transport.drop_list(local)
    transport.drop_list(remote)
