"""What an event decides: records to store, commands for agents, changes for watchers, facts for
logs and metrics. Effects leave the control plane only after their records are durable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.commands import Command
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef
    from kvshuttle.controlplane.model.worker import Worker

__all__ = [
    "Change",
    "Decision",
    "Disconnect",
    "DropLease",
    "DropSession",
    "DropWorker",
    "Effects",
    "Fact",
    "LeaseChange",
    "PutLease",
    "PutSession",
    "PutTerm",
    "PutWorker",
    "Record",
    "SessionChange",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PutSession:
    """A session as it stands now."""

    session: Session


@dataclass(frozen=True, slots=True)
class DropSession:
    """A session is forgotten."""

    key: SessionKey


@dataclass(frozen=True, slots=True)
class PutLease:
    """A lease as it stands now. Never holds block ids."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class DropLease:
    """A lease is forgotten."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class PutWorker:
    """A boot: its number, its name, whether it was fenced or drained."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class DropWorker:
    """A boot is forgotten."""

    ref: WorkerRef


@dataclass(frozen=True, slots=True)
class PutTerm:
    """The epoch, the lineage of the store and the last incarnation that was issued."""

    epoch: int
    lineage_id: str
    last_incarnation: int
    time_ns: int


Record = PutSession | DropSession | PutLease | DropLease | PutWorker | DropWorker | PutTerm


@dataclass(frozen=True, slots=True)
class SessionChange:
    """A session after a change, with where its KV lies."""

    revision: int
    session: Session
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A lease after a change."""

    revision: int
    lease: Lease


Change = SessionChange | LeaseChange


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A stream is to be ended."""

    ref: WorkerRef
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fact:
    """Something worth a log line or a count: a name, and values. Never a turn token."""

    name: str
    values: dict[str, object]


@dataclass(slots=True)
class Effects:
    """All that one event decided, each list in order."""

    records: list[Record]
    commands: list[tuple[WorkerRef, Command]]
    changes: list[Change]
    facts: list[Fact]
    disconnects: list[Disconnect]


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """An event's answer and its effects."""

    result: T
    effects: Effects
