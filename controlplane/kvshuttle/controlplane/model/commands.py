"""Orders to agents, as plain data; they mirror `kvshuttle.v1.AgentCommand`. Times in ns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvshuttle.controlplane.model.reports import Descriptors
    from kvshuttle.controlplane.model.terms import (
        BlockRange,
        Direction,
        Leg,
        SessionKey,
        WorkerRef,
    )

__all__ = [
    "AnnouncePeer",
    "Command",
    "Drain",
    "ExpectTurn",
    "Extend",
    "ExtendLeases",
    "Fenced",
    "ForgetTurn",
    "Grant",
    "Harden",
    "LandingGranted",
    "PeerFenced",
    "PushPlan",
    "ReaderStopped",
    "ReleaseReplica",
    "RetainReplica",
    "Revoke",
    "WriterStopped",
]


class PushPlan(Struct, frozen=True, gc=False):
    """The turn's forward KV may be pushed under this lease; `peer` runs the other leg."""

    lease_id: str
    version: int
    peer: WorkerRef
    ttl_ns: int
    epoch: int
    seq: int


class ExpectTurn(Struct, frozen=True, gc=False):
    """A leg of a turn will arrive. Said again to an agent that reconnects."""

    turn_token: str
    key: SessionKey
    turn: int
    leg: Leg
    lease_id: str
    lease_follows: bool
    lookup_wait_ns: int
    retention_ns: int
    min_tokens: int
    replica_blocks: int = 0
    push: PushPlan | None = None
    may_ask: bool = False
    block_compute_ns: int = 0


class ForgetTurn(Struct, frozen=True, gc=False):
    """A turn is over."""

    turn_token: str
    leg: Leg


class Harden(Struct, frozen=True, gc=False):
    """To the source: hold a range."""

    lease_id: str
    version: int
    key: SessionKey
    head_hash: bytes
    range: BlockRange
    ttl_ns: int
    guard_ns: int
    destination: WorkerRef
    # With the epoch, the lease's name among many.
    epoch: int = 0
    seq: int = 0


class Grant(Struct, frozen=True, gc=False):
    """To the destination: you may read, once."""

    lease_id: str
    version: int
    turn_token: str
    direction: Direction
    source: WorkerRef
    blocks: Descriptors
    ttl_ns: int
    as_of: int
    # Whose session it is brought back for, where no turn waits for it.
    eager_for: SessionKey | None = None
    epoch: int = 0
    seq: int = 0
    # Of a push, which is granted to the source: where it writes, and the offer that it answers to.
    push_to: WorkerRef | None = None
    landing_version: int = 0


class Extend(Struct, frozen=True, gc=False):
    """To either side: count longer. `as_of` is 0 to the source."""

    lease_id: str
    version: int
    ttl_ns: int
    guard_ns: int
    as_of: int
    is_source: bool


class ExtendLeases(Struct, frozen=True, gc=False):
    """To either side: count many leases of an epoch longer. `as_of` is 0 to the source, `extension`
    0 to the destination."""

    extension: int
    epoch: int
    seqs: npt.NDArray[np.uint64]
    ttl_ns: int
    guard_ns: int
    as_of: int
    is_source: bool


class Revoke(Struct, frozen=True, gc=False):
    """To the destination: stop, and say so. `turn_token` ends the wait of a leg that hoped for the
    lease, even where it was never granted; empty when no turn is known."""

    lease_id: str
    version: int
    reason: str
    turn_token: str
    # To the source of a push, which is to say so even where it does not know the lease.
    is_source: bool = False


class LandingGranted(Struct, frozen=True, gc=False):
    """To the destination of a push: the writer may write."""

    lease_id: str
    version: int


class WriterStopped(Struct, frozen=True, gc=False):
    """To the destination of a push: nobody writes under this lease, now or later."""

    lease_id: str
    version: int
    reason: str
    pull_follows: bool = False


class ReaderStopped(Struct, frozen=True, gc=False):
    """To the source: nobody reads under this lease any more."""

    lease_id: str
    version: int


class ReleaseReplica(Struct, frozen=True, gc=False):
    """Let a replica go; an empty hash means all of the session's."""

    key: SessionKey
    head_hash: bytes


class RetainReplica(Struct, frozen=True, gc=False):
    """Change how long a replica is held, from now, and how much of it (0: all)."""

    key: SessionKey
    head_hash: bytes
    retention_ns: int
    keep_blocks: int = 0


class AnnouncePeer(Struct, frozen=True, gc=False):
    """A worker came or came back. `ranks` is passed on as it came."""

    worker: WorkerRef
    ranks: object
    num_blocks: int


class PeerFenced(Struct, frozen=True, gc=False):
    """A boot is known to be dead."""

    worker: WorkerRef


class Drain(Struct, frozen=True, gc=False):
    """Finish what you have."""

    undo: bool


class Fenced(Struct, frozen=True, gc=False):
    """You are out; the stream ends after this."""

    reason: str


Command = (
    ExpectTurn
    | ForgetTurn
    | Harden
    | Grant
    | Extend
    | ExtendLeases
    | Revoke
    | LandingGranted
    | WriterStopped
    | ReaderStopped
    | ReleaseReplica
    | RetainReplica
    | AnnouncePeer
    | PeerFenced
    | Drain
    | Fenced
)
