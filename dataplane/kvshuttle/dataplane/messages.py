"""What the scheduler side and the movers say to each other, over local sockets (msgpack)."""

from __future__ import annotations

import msgspec

__all__ = [
    "Abandon",
    "AddPeer",
    "DropPeer",
    "ExtendRead",
    "FromMover",
    "MoverFailed",
    "PeerReady",
    "PeerRegion",
    "Read",
    "ReadEnded",
    "ReadGivenUp",
    "ReaderDone",
    "Refuse",
    "Serve",
    "Stop",
    "ToMover",
    "Unserve",
    "Unserved",
    "decode_from_mover",
    "decode_to_mover",
    "encode",
]


class PeerRegion(msgspec.Struct, array_like=True, frozen=True):
    """A remote KV region; block i starts at ``base + i * block_bytes``."""

    base: int
    block_bytes: int
    memory_type: str
    device_id: int


class AddPeer(msgspec.Struct, tag=True, frozen=True):
    """Learn another worker's memory and connect to it."""

    worker_id: str
    incarnation: int
    agent_name: str
    agent_metadata: bytes
    regions: list[PeerRegion]


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


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The engine shuts down."""


ToMover = AddPeer | DropPeer | Serve | Unserve | Read | ExtendRead | Abandon | Refuse | Stop


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


class ReadGivenUp(msgspec.Struct, tag=True, frozen=True):
    """An unattended read is given up, but NIXL has not let go: ReadEnded comes when it has."""

    request_id: str
    reason: str


class ReaderDone(msgspec.Struct, tag=True, frozen=True):
    """The reader of a served lease has finished reading this rank."""

    lease_id: str


class Unserved(msgspec.Struct, tag=True, frozen=True):
    """The lease is closed here: no reader was told yes after this."""

    lease_id: str


class MoverFailed(msgspec.Struct, tag=True, frozen=True):
    """The mover cannot go on."""

    error: str


FromMover = PeerReady | ReadEnded | ReadGivenUp | ReaderDone | Unserved | MoverFailed

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
