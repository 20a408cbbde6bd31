"""Orders to agents, as plain data; they mirror `kvshuttle.v1.AgentCommand`. Times in ns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    "Fenced",
    "ForgetTurn",
    "Grant",
    "Harden",
    "PeerFenced",
    "ReaderStopped",
    "ReleaseReplica",
    "RetainReplica",
    "Revoke",
]


@dataclass(frozen=True, slots=True)
class ExpectTurn:
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


@dataclass(frozen=True, slots=True)
class ForgetTurn:
    """A turn is over."""

    turn_token: str
    leg: Leg


@dataclass(frozen=True, slots=True)
class Harden:
    """To the source: hold a range."""

    lease_id: str
    version: int
    key: SessionKey
    head_hash: bytes
    range: BlockRange
    ttl_ns: int
    guard_ns: int
    destination: WorkerRef


@dataclass(frozen=True, slots=True)
class Grant:
    """To the destination: you may read, once."""

    lease_id: str
    version: int
    turn_token: str
    direction: Direction
    source: WorkerRef
    blocks: Descriptors
    ttl_ns: int
    as_of: int


@dataclass(frozen=True, slots=True)
class Extend:
    """To either side: count longer. `as_of` is 0 to the source."""

    lease_id: str
    version: int
    ttl_ns: int
    guard_ns: int
    as_of: int
    is_source: bool


@dataclass(frozen=True, slots=True)
class Revoke:
    """To the destination: stop, and say so. `turn_token` ends the wait of a leg that hoped for the
    lease, even where it was never granted; empty when no turn is known."""

    lease_id: str
    version: int
    reason: str
    turn_token: str


@dataclass(frozen=True, slots=True)
class ReaderStopped:
    """To the source: nobody reads under this lease any more."""

    lease_id: str
    version: int


@dataclass(frozen=True, slots=True)
class ReleaseReplica:
    """Let a replica go; an empty hash means all of the session's."""

    key: SessionKey
    head_hash: bytes


@dataclass(frozen=True, slots=True)
class RetainReplica:
    """Change how long a replica is held, from now."""

    key: SessionKey
    head_hash: bytes
    retention_ns: int


@dataclass(frozen=True, slots=True)
class AnnouncePeer:
    """A worker came or came back. `ranks` is passed on as it came."""

    worker: WorkerRef
    ranks: object


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """A boot is known to be dead."""

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what you have."""

    undo: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """You are out; the stream ends after this."""

    reason: str


Command = (
    ExpectTurn
    | ForgetTurn
    | Harden
    | Grant
    | Extend
    | Revoke
    | ReaderStopped
    | ReleaseReplica
    | RetainReplica
    | AnnouncePeer
    | PeerFenced
    | Drain
    | Fenced
)
