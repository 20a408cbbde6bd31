"""What the scheduler side and the movers say to each other, over local sockets (msgpack)."""

from __future__ import annotations

import msgspec

__all__ = [
    "WHOLE",
    "Abandon",
    "AddPeer",
    "Await",
    "DropPeer",
    "ExtendPush",
    "ExtendRead",
    "FromMover",
    "HeadSlice",
    "LandingEnded",
    "LandingGivenUp",
    "MoverFailed",
    "PeerReady",
    "PeerRegion",
    "Push",
    "PushBlocks",
    "PushChunk",
    "PushChunkDone",
    "PushEnded",
    "PushFinish",
    "PushStop",
    "PushStopping",
    "Read",
    "ReadEnded",
    "ReadGivenUp",
    "ReaderDone",
    "Refuse",
    "Serve",
    "Stop",
    "ToMover",
    "Unawait",
    "Unserve",
    "Unserved",
    "decode_from_mover",
    "decode_to_mover",
    "encode",
]


class PeerRegion(msgspec.Struct, array_like=True, frozen=True):
    """A remote KV region; block i starts at ``base + i * block_bytes``. `num_blocks` is 0 where the
    control plane does not say it."""

    base: int
    block_bytes: int
    memory_type: str
    device_id: int
    num_blocks: int = 0


class HeadSlice(msgspec.Struct, array_like=True, frozen=True):
    """The KV heads that two ranks share: ``count`` of them, from number ``mine`` of this rank's
    ``my_heads`` and from number ``theirs`` of the other's ``their_heads``."""

    mine: int
    theirs: int
    count: int
    my_heads: int
    their_heads: int

    @property
    def whole(self) -> bool:
        """Whether it is all of both."""
        return self.count == self.my_heads == self.their_heads


WHOLE = HeadSlice(0, 0, 1, 1, 1)
"""Two ranks that keep the same heads, however many."""


class AddPeer(msgspec.Struct, tag=True, frozen=True):
    """Learn the memory of one rank of another worker and connect to it; one order for each rank
    that this one has to reach. Answered by PeerReady.

    ``heads`` is what is read there; None: nothing, that rank reads from this one.
    """

    worker_id: str
    incarnation: int
    agent_name: str
    agent_metadata: bytes
    regions: list[PeerRegion]
    heads: HeadSlice | None = WHOLE


class DropPeer(msgspec.Struct, tag=True, frozen=True):
    """A boot is known to be dead: forget it and what was read from it."""

    worker_id: str
    incarnation: int


class Serve(msgspec.Struct, tag=True, frozen=True):
    """A lease of which this rank is the source is open: progress NIXL, answer its reader."""

    lease_id: str
    deadline_ns: int


class Unserve(msgspec.Struct, tag=True, frozen=True):
    """The lease is closing; answer its reader with no from now on. Answered by Unserved."""

    lease_id: str


class Read(msgspec.Struct, tag=True, frozen=True):
    """Read remote blocks into local ones.

    ``attended``: a request of vLLM's waits for them, ``request_id`` is its id, and vLLM is told how
    it went. Otherwise ``request_id`` is any name, and vLLM is told nothing.
    ``last``: no other read follows under this lease.
    """

    request_id: str
    lease_id: str
    worker_id: str
    incarnation: int
    local_block_ids: list[int]
    remote_block_ids: list[int]
    deadline_ns: int
    is_return: bool
    attended: bool = True
    last: bool = True


class ExtendRead(msgspec.Struct, tag=True, frozen=True):
    """A read's lease was renewed."""

    request_id: str
    deadline_ns: int


class Abandon(msgspec.Struct, tag=True, frozen=True):
    """Stop a read: the request recomputes, the landing blocks stay in quarantine until it ends."""

    request_id: str
    reason: str


class Refuse(msgspec.Struct, tag=True, frozen=True):
    """Report a load to vLLM as failed although nothing was posted."""

    request_id: str


class Await(msgspec.Struct, tag=True, frozen=True):
    """A request's blocks are the landing zone of a push: progress NIXL, and listen for the notice
    of this writer with this version. `partial`: the last of them is not full, and a writer that
    does not say how many blocks it has written does not know of it."""

    request_id: str
    lease_id: str
    version: int
    worker_id: str
    incarnation: int
    local_block_ids: list[int]
    deadline_ns: int
    partial: bool = False


class Unawait(msgspec.Struct, tag=True, frozen=True):
    """Nobody writes into a landing zone any more. `quiet`: its request is not told, and nothing is
    reported, since a `Read` into the same blocks follows, or a `Refuse`."""

    request_id: str
    lease_id: str
    reason: str
    quiet: bool = False


class Push(msgspec.Struct, tag=True, frozen=True):
    """The right to write into another's landing zone, of which chunks name parts."""

    lease_id: str
    version: int
    worker_id: str
    incarnation: int
    remote_block_ids: list[int]
    deadline_ns: int


class PushChunk(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of one step: ``local_block_ids[i]`` goes to ``remote_block_ids[offset + i]``.

    ``ready``: their KV was final before the step began; else it is final layer by layer.
    """

    lease_id: str
    number: int
    offset: int
    local_block_ids: list[int]
    ready: bool


class PushBlocks(msgspec.Struct, tag=True, frozen=True):
    """A chunk that no step computes: all of it is final."""

    chunk: PushChunk


class PushFinish(msgspec.Struct, tag=True, frozen=True):
    """So many chunks are all that there is: say so to the destination once they are written."""

    lease_id: str
    chunks: int


class ExtendPush(msgspec.Struct, tag=True, frozen=True):
    """A push's lease was renewed."""

    lease_id: str
    deadline_ns: int


class PushStop(msgspec.Struct, tag=True, frozen=True):
    """Post nothing more under this lease, heard of or not; PushEnded follows when nothing is in
    flight. ``anew``: also where it was said before."""

    lease_id: str
    reason: str
    anew: bool = False


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The engine shuts down."""


ToMover = (
    AddPeer
    | DropPeer
    | Serve
    | Unserve
    | Read
    | ExtendRead
    | Abandon
    | Refuse
    | Await
    | Unawait
    | Push
    | PushBlocks
    | PushFinish
    | ExtendPush
    | PushStop
    | Stop
)


class PeerReady(msgspec.Struct, tag=True, frozen=True):
    """The connection to a peer stands, or why it does not."""

    worker_id: str
    incarnation: int
    error: str


class ReadEnded(msgspec.Struct, tag=True, frozen=True):
    """A read has ended and NIXL has let go of it: nothing writes to the landing blocks any more.

    ``published`` is what was reported to vLLM for this rank.
    """

    request_id: str
    lease_id: str
    published: bool
    reason: str
    bytes_moved: int
    transfer_ns: int
    descriptors: int = 0


class ReadGivenUp(msgspec.Struct, tag=True, frozen=True):
    """A read is given up, but NIXL has not let go: ReadEnded comes when it has. Of one that is
    attended vLLM is told too, by the worker; this makes the engine look."""

    request_id: str
    reason: str


class ReaderDone(msgspec.Struct, tag=True, frozen=True):
    """The reader of a served lease has finished reading this rank."""

    lease_id: str


class Unserved(msgspec.Struct, tag=True, frozen=True):
    """The lease is closed here: no reader was told yes after this."""

    lease_id: str


class LandingEnded(msgspec.Struct, tag=True, frozen=True):
    """The writer has stopped, as far as this rank's memory goes.

    ``published`` is what was reported to vLLM for this rank; bytes, time and the number of pieces
    are the writer's.
    """

    request_id: str
    lease_id: str
    published: bool
    reason: str
    bytes_moved: int = 0
    transfer_ns: int = 0
    descriptors: int = 0


class LandingGivenUp(msgspec.Struct, tag=True, frozen=True):
    """vLLM was told that the load failed, but the writer may still write: LandingEnded comes when
    it is known to have stopped."""

    request_id: str
    lease_id: str
    reason: str


class PushChunkDone(msgspec.Struct, tag=True, frozen=True):
    """A chunk is written: its local blocks are read no more."""

    lease_id: str
    number: int


class PushStopping(msgspec.Struct, tag=True, frozen=True):
    """This rank posts nothing more under the lease, but something is in flight: PushEnded comes
    when it has ended."""

    lease_id: str
    reason: str


class PushEnded(msgspec.Struct, tag=True, frozen=True):
    """Nothing of this rank's is in flight under the lease, and nothing more will be posted."""

    lease_id: str
    written: bool
    reason: str
    bytes_moved: int = 0
    transfer_ns: int = 0


class MoverFailed(msgspec.Struct, tag=True, frozen=True):
    """The mover cannot go on."""

    error: str


FromMover = (
    PeerReady
    | ReadEnded
    | ReadGivenUp
    | ReaderDone
    | Unserved
    | LandingEnded
    | LandingGivenUp
    | PushChunkDone
    | PushStopping
    | PushEnded
    | MoverFailed
)

_encoder = msgspec.msgpack.Encoder()
_to_mover = msgspec.msgpack.Decoder(ToMover)
_from_mover = msgspec.msgpack.Decoder(FromMover)


def encode(message: ToMover | FromMover) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode_to_mover(data: bytes) -> ToMover:
    """A message for the mover; raises ``msgspec.DecodeError`` on anything else."""
    return _to_mover.decode(data)


def decode_from_mover(data: bytes) -> FromMover:
    """A message of the mover; raises ``msgspec.DecodeError`` on anything else."""
    return _from_mover.decode(data)
