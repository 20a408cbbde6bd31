"""The transport over real NIXL: two agents, plain memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from kvshuttle.dataplane.limits import MAX_PREPARED
from kvshuttle.dataplane.messages import PeerRegion
from kvshuttle.dataplane.transport import LocalRegion, NixlTransport, ReadHandle, TransportError

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
        """As the control plane tells of them."""
        blocks = self.memory.shape[1]
        return [PeerRegion(int(a.ctypes.data), BLOCK_BYTES, "DRAM", 0, blocks) for a in self.memory]

    def meet(self, other: End, *, blocks: int | None = None) -> None:
        """As at registration, and no more than that; `blocks` is what is said of the other's."""
        regions = [
            x if blocks is None else msgspec.structs.replace(x, num_blocks=blocks)
            for x in other.regions
        ]
        self.transport.add_peer(other.transport.name, other.metadata, regions)
        self.transport.notify(other.transport.name, b"hello")


def end(name: str, blocks: int = BLOCKS) -> End:
    memory = np.zeros((LAYERS, blocks, BLOCK_BYTES), dtype=np.uint8)
    transport = Counting(name, "UCX", {})
    local = [
        LocalRegion(f"layer{i}", int(a.ctypes.data), BLOCK_BYTES, blocks, "DRAM", 0)
        for i, a in enumerate(memory)
    ]
    return End(transport, memory, transport.register(local))


@pytest.fixture
def pair() -> Iterator[tuple[End, End]]:
    """Two that have not met, with pools of different sizes."""
    ends = end("near"), end("far", BLOCKS + 7)
    yield ends
    for one in ends:
        one.transport.close()


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, f"still not so: {what}"


def finish(near: End, far: End, handle: ReadHandle) -> None:
    """Until a transfer that `near` has posted is over."""

    def done() -> bool:
        far.transport.notices()
        state = near.transport.state(handle)
        assert state != "ERR"
        return state == "DONE"

    until(done, "the transfer is over")


def read(near: End, far: End, mine: list[int], theirs: list[int]) -> ReadHandle:
    """A READ that moves what it should and nothing else."""
    luck = np.random.default_rng(1)
    for one in (near, far):
        one.memory[...] = luck.integers(0, 256, one.memory.shape, dtype=np.uint8)
    expected = near.memory.copy()
    expected[:, mine] = far.memory[:, theirs]
    handle = near.transport.post_read(far.transport.name, mine, theirs, b"done")
    finish(near, far, handle)
    assert (near.memory == expected).all()
    assert near.transport.bytes_moved(handle) == handle.expected_bytes
    assert handle.expected_bytes == len(mine) * LAYERS * BLOCK_BYTES
    return handle


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


def test_it_is_made_when_a_peer_is_met(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    made: list[str] = []
    monkeypatch.setattr(near.transport._agent, "make_connection", made.append)
    near.meet(far)
    assert made == ["far"]


def test_lists_are_prepared_once(pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of both pools when a peer is met, those of a chunk for all its layers."""
    near, far = pair
    prepared: list[str] = []
    prepare = near.transport._agent.prep_xfer_dlist

    def counted(name: str, *args: Any, **more: Any) -> Any:
        prepared.append(name)
        return prepare(name, *args, **more)

    monkeypatch.setattr(near.transport._agent, "prep_xfer_dlist", counted)
    near.meet(far)
    far.meet(near)
    assert prepared == ["NIXL_INIT_AGENT", "far"]
    for blocks in ([1, 2], [3], [9, 5]):
        near.transport.release(read(near, far, blocks, blocks))
    assert len(prepared) == 2
    local, remote = near.transport.prepare("", [1, 2]), near.transport.prepare("far", [3, 4])
    for region in range(LAYERS):
        handle = near.transport.post_write(local, remote, 0, range(region, region + 1))
        finish(near, far, handle)
        near.transport.release(handle)
    assert len(prepared) == 4
    near.transport.drop_list(local)


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

    finish(near, far, handle)
    assert (far.memory[:, theirs] == np.arange(1, 5, dtype=np.uint8)[None, :, None]).all()
    assert not far.memory[:, 0].any()
    assert transport.descriptors(handle) == handle.descriptors == pieces * LAYERS
    assert transport.bytes_moved(handle) == handle.expected_bytes == 4 * LAYERS * BLOCK_BYTES
    transport.release(handle)
    transport.drop_list(local)
    transport.drop_list(remote)


@pytest.mark.parametrize("blocks", [None, 0, MAX_PREPARED], ids=["known", "not said", "too many"])
@pytest.mark.parametrize(
    ("mine", "theirs", "pieces"),
    [
        ([0, 1, 2, 3], [35, 36, 37, 38], 1),
        ([31, 30, 29, 28], [13, 12, 11, 10], 1),
        ([3, 4, 5, 6], [10, 11, 20, 21], 2),
        ([6, 2, 31, 0], [38, 0, 5, 31], 4),
        ([4, 5, 6], [12, 11, 10], 3),
        ([31], [38], 1),
    ],
)
def test_a_read_moves_its_blocks_and_joins_neighbours(
    pair: tuple[End, End], mine: list[int], theirs: list[int], pieces: int, blocks: int | None
) -> None:
    """Out of lists of the whole pools, or where a peer's size is not known or too much, by
    descriptors of its own."""
    near, far = pair
    near.meet(far, blocks=blocks)
    far.meet(near)
    handle = read(near, far, mine, theirs)
    assert near.transport.descriptors(handle) == handle.descriptors == pieces * LAYERS
    near.transport.release(handle)


@pytest.mark.parametrize(("mine", "theirs"), [([BLOCKS], [0]), ([0], [BLOCKS + 7]), ([-1], [0])])
def test_a_block_past_the_end_is_not_the_next_layers(
    pair: tuple[End, End], mine: list[int], theirs: list[int]
) -> None:
    near, far = pair
    near.meet(far)
    far.meet(near)
    with pytest.raises(TransportError, match=r"blocks .* of (32|39)"):
        near.transport.post_read("far", mine, theirs, b"done")


def test_a_peer_that_comes_back_elsewhere_is_read_where_it_is(pair: tuple[End, End]) -> None:
    """A list of the boot before would read its memory."""
    near, far = pair
    near.meet(far)
    far.meet(near)
    near.transport.release(read(near, far, [1, 2], [3, 4]))
    near.transport.drop_peer("far")
    again = end("far-again", 5)
    again.meet(near)
    near.meet(again)
    near.transport.release(read(near, again, [7, 8, 9], [0, 1, 4]))
    with pytest.raises(TransportError, match="not connected"):
        near.transport.post_read("far", [1], [1], b"done")
    again.transport.close()


def test_a_read_that_flies_needs_no_list_any_more(pair: tuple[End, End]) -> None:
    """A peer may be dropped while something is in flight: what NIXL was given is its own copy."""
    near, far = pair
    near.meet(far)
    far.meet(near)
    far.memory[...] = 7
    blocks = list(range(0, BLOCKS, 2))
    handle = near.transport.post_read("far", blocks, blocks, b"done")
    near.transport.drop_peer("far")
    until(lambda: near.transport.state(handle) != "PROC", "it is over, one way or the other")
    near.transport.release(handle)
    assert set(np.unique(near.memory)) <= {0, 7}


@pytest.mark.parametrize(("mine", "theirs"), [([BLOCKS], [0]), ([0], [BLOCKS + 7])])
def test_nor_is_it_written(pair: tuple[End, End], mine: list[int], theirs: list[int]) -> None:
    near, far = pair
    near.meet(far)
    local, remote = near.transport.prepare("", mine), near.transport.prepare("far", theirs)
    with pytest.raises(TransportError, match=r"blocks .* of (32|39)"):
        near.transport.post_write(local, remote, 0, range(LAYERS))


@pytest.mark.parametrize("how", ["says so", "raises"])
def test_of_a_transfer_that_is_refused_something_may_be_on_its_way(
    pair: tuple[End, End], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it has a handle, whose state is an error, and which is let go like another."""
    near, far = pair
    near.meet(far)

    def refuses(_: object) -> str:
        if how == "raises":
            raise RuntimeError("no")
        return "ERR"

    monkeypatch.setattr(near.transport._agent, "transfer", refuses)
    handle = near.transport.post_read("far", [1], [1], b"done")
    assert near.transport.state(handle) == "ERR"
    assert near.transport.release(handle)
