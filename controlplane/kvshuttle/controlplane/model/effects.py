"""What an event decides: records to store, commands for agents, changes for watchers, facts for
logs and metrics. Effects leave the control plane only after their records are durable, but for
what only asks (`runtime.ahead`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

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
    "LeaseDropped",
    "PutLease",
    "PutSession",
    "PutTerm",
    "PutWorker",
    "Record",
    "SessionChange",
    "SessionDropped",
]

T = TypeVar("T")


class PutSession(Struct, frozen=True, gc=False):
    """A session as it stands now."""

    session: Session


class DropSession(Struct, frozen=True, gc=False):
    """A session is forgotten."""

    key: SessionKey


class PutLease(Struct, frozen=True, gc=False):
    """A lease as it stands now. Never holds block ids."""

    lease: Lease


class DropLease(Struct, frozen=True, gc=False):
    """A lease is forgotten."""

    lease_id: str


class PutWorker(Struct, frozen=True, gc=False):
    """A boot: its number, its name, whether it was fenced or drained."""

    worker: Worker


class DropWorker(Struct, frozen=True, gc=False):
    """A boot is forgotten."""

    ref: WorkerRef


class PutTerm(Struct, frozen=True, gc=False):
    """The epoch, the lineage of the store and the last incarnation that was issued."""

    epoch: int
    lineage_id: str
    last_incarnation: int
    time_ns: int


Record = PutSession | DropSession | PutLease | DropLease | PutWorker | DropWorker | PutTerm


class SessionChange(Struct, frozen=True, gc=False):
    """A session after a change, with where its KV lies."""

    revision: int
    session: Session
    replicas: tuple[Replica, ...]

    @property
    def key(self) -> SessionKey:
        """Whose and which session it concerns."""
        return self.session.key

    @property
    def name(self) -> SessionKey:
        """What tells its object from others of the kind."""
        return self.session.key


class SessionDropped(Struct, frozen=True, gc=False):
    """A session is no longer listed."""

    revision: int
    key: SessionKey

    @property
    def name(self) -> SessionKey:
        """As in SessionChange."""
        return self.key


class LeaseChange(Struct, frozen=True, gc=False):
    """A lease after a change."""

    revision: int
    lease: Lease

    @property
    def key(self) -> SessionKey:
        """Whose and which session it concerns."""
        return self.lease.key

    @property
    def name(self) -> str:
        """What tells its object from others of the kind."""
        return self.lease.lease_id


class LeaseDropped(Struct, frozen=True, gc=False):
    """A lease is no longer listed."""

    revision: int
    key: SessionKey
    name: str


Change = SessionChange | SessionDropped | LeaseChange | LeaseDropped


class Disconnect(Struct, frozen=True, gc=False):
    """A stream is to be ended."""

    ref: WorkerRef
    generation: int
    reason: str


class Fact(Struct, frozen=True, gc=False):
    """Something worth a log line or a count: a name, and values. Never a turn token."""

    name: str
    values: dict[str, object]


class Effects(Struct):
    """All that one event decided, each list in order."""

    records: list[Record]
    commands: list[tuple[WorkerRef, Command]]
    changes: list[Change]
    facts: list[Fact]
    disconnects: list[Disconnect]


class Decision(Struct, Generic[T], frozen=True, gc=False):
    """An event's answer and its effects."""

    result: T
    effects: Effects
