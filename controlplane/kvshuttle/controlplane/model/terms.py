"""The words of the domain that everything else is made of.

Enum values equal those of `kvshuttle.v1` (a test compares them), so that the adapters convert by
value; this package itself does not know the wire.
"""

from __future__ import annotations

from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple, TypeVar

from msgspec import Struct

__all__ = [
    "BlockRange",
    "Direction",
    "ForwardMode",
    "Hints",
    "LeaseState",
    "Leg",
    "ReplicaState",
    "ReturnMode",
    "ReturnPolicy",
    "SessionKey",
    "SessionState",
    "SessionValue",
    "TransferOutcome",
    "TransferStats",
    "TurnOutcome",
    "TurnState",
    "WorkerRef",
    "WorkerRole",
    "WorkerState",
    "plain",
]

E = TypeVar("E", bound=type[IntEnum])


def plain(kind: E) -> E:
    """An enum whose members are plain attributes of it, as they are from Python 3.12 on. Before,
    each look at one goes through a descriptor written in Python, and so does each look at its
    name: a turn takes some hundred."""
    for name, member in kind.__members__.items():
        type.__setattr__(kind, name, member)
    type.__setattr__(kind, "name", property(attrgetter("_name_")))
    return kind


class SessionKey(NamedTuple):
    """One conversation: whose, and the client's name for it."""

    tenant: str
    session_id: str


class WorkerRef(NamedTuple):
    """One boot of one worker. Block ids mean nothing without it."""

    worker_id: str
    incarnation: int


class BlockRange(NamedTuple):
    """Half-open range of a chain, in blocks."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of blocks."""
        return self.end - self.start


@plain
class Direction(IntEnum):
    """Which way KV moves."""

    FORWARD = 1
    RETURN = 2


@plain
class ForwardMode(IntEnum):
    """Which side moves a running turn's KV from prefill to decode."""

    PULL = 1
    PUSH = 2


@plain
class WorkerRole(IntEnum):
    """What an engine is used for."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


@plain
class WorkerState(IntEnum):
    """A boot's life as the control plane sees it."""

    READY = 1
    DRAINING = 2
    LOST = 3
    FENCED = 4


@plain
class Leg(IntEnum):
    """One of the (at most) two requests of a turn."""

    PREFILL = 1
    DECODE = 2


@plain
class ReturnPolicy(IntEnum):
    """What the caller of BeginTurn allows."""

    AUTO = 1
    NEVER = 2
    ALWAYS = 3


@plain
class ReturnMode(IntEnum):
    """How prefill gets the KV of the earlier turns."""

    NONE = 1
    LAZY = 2
    EAGER = 3
    DIRECT = 4


@plain
class TurnState(IntEnum):
    """A turn's life."""

    RUNNING = 1
    ENDED = 2


@plain
class TurnOutcome(IntEnum):
    """How a turn ended; UNSPECIFIED while it runs."""

    UNSPECIFIED = 0
    COMPLETED = 1
    CANCELLED = 2
    FAILED = 3
    ABANDONED = 4


@plain
class SessionState(IntEnum):
    """A session's life."""

    ACTIVE = 1
    ENDED = 2


@plain
class SessionValue(IntEnum):
    """A session's claim on memory against others of its tenant."""

    LOW = 1
    NORMAL = 2
    HIGH = 3


@plain
class ReplicaState(IntEnum):
    """How much of a worker's copy is guaranteed."""

    HARD = 1
    SOFT = 2
    GONE = 3


@plain
class LeaseState(IntEnum):
    """PENDING, GRANTED, ACTIVE, then one of four ends."""

    PENDING = 1
    GRANTED = 2
    ACTIVE = 3
    COMPLETED = 4
    FAILED = 5
    EXPIRED = 6
    REVOKED = 7

    @property
    def open(self) -> bool:
        """Whether the lease has not ended."""
        return self <= LeaseState.ACTIVE


@plain
class TransferOutcome(IntEnum):
    """How a destination's use of a lease ended."""

    PUBLISHED = 1
    UNUSED = 2
    FAILED = 3
    DISCARDED = 4
    REVOKED = 5
    WRITTEN = 6


class Hints(Struct, frozen=True, array_like=True, gc=False):
    """What the client knows of the time after a turn; None where it said nothing."""

    expected_idle_ns: int | None = None
    value: SessionValue | None = None

    def merged(self, newer: Hints) -> Hints:
        """These hints with what `newer` says put over them."""
        return Hints(
            self.expected_idle_ns if newer.expected_idle_ns is None else newer.expected_idle_ns,
            self.value if newer.value is None else newer.value,
        )


class TransferStats(Struct, frozen=True, array_like=True, gc=False):
    """What a destination measured; times in ns."""

    blocks: int = 0
    tokens: int = 0
    bytes: int = 0
    transfer_ns: int = 0
    wait_ns: int = 0
    descriptors: int = 0
