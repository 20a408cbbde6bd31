"""The lease: the right to move a range of a chain from one worker to one other, once.

PENDING → GRANTED → ACTIVE → COMPLETED | FAILED | EXPIRED | REVOKED. Every step is a method; a step
that the table does not have raises IllegalTransitionError.

An open lease that was granted is never ended by asking: the destination is told to stop (`stop`)
and the lease ends when it has said so, or at its deadline. Only `reader_stopped` lets the source's
hold go early, and only these set it: the destination's LeaseStopped, an inventory of the
destination that lacks the lease, a fence, or that it was never granted at all.

A push turns this round. The destination offers its blocks as landing zone and holds them; the
source is granted to write there, and `reader_stopped` says that it writes no more, which only the
source, its inventory or a fence can say. No deadline does.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kvshuttle.controlplane.model.errors import IllegalTransitionError
from kvshuttle.controlplane.model.requests import remember
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    LeaseState,
    SessionKey,
    TransferStats,
    WorkerRef,
)

__all__ = ["TRANSITIONS", "Lease", "Renewal", "Stop"]

_ENDS = frozenset({LeaseState.COMPLETED, LeaseState.FAILED, LeaseState.EXPIRED, LeaseState.REVOKED})
TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    # Nothing was granted, so nothing can have been moved, and no deadline runs yet.
    LeaseState.PENDING: frozenset({LeaseState.GRANTED, LeaseState.FAILED, LeaseState.REVOKED}),
    LeaseState.GRANTED: frozenset({LeaseState.ACTIVE}) | _ENDS,
    LeaseState.ACTIVE: _ENDS,
    LeaseState.COMPLETED: frozenset(),
    LeaseState.FAILED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
    LeaseState.REVOKED: frozenset(),
}


class Stop(Struct, frozen=True, array_like=True, gc=False):
    """The destination was asked to stop: what the lease becomes then, and why."""

    final: LeaseState
    reason: str


class Renewal(Struct, frozen=True, array_like=True, gc=False):
    """An extension under way: the source first, then the destination."""

    ttl_ns: int
    asked_ns: int
    version: int
    source_done: bool = False


class Lease(Struct, frozen=True, array_like=True, gc=False):
    """See the module. `ask_head` and `ask_range` are what the source is asked to harden;
    `range` and `head_hash` are what it holds, once it does."""

    lease_id: str
    seq: int
    key: SessionKey
    turn: int
    turn_token: str
    direction: Direction
    source: WorkerRef
    destination: WorkerRef
    epoch: int
    ttl_ns: int
    create_ns: int
    ask_head: bytes
    ask_range: BlockRange
    state: LeaseState = LeaseState.PENDING
    version: int = 1
    range: BlockRange | None = None
    head_hash: bytes = b""
    grant_ns: int = 0
    deadline_ns: int = 0
    end_ns: int = 0
    end_reason: str = ""
    stats: TransferStats | None = None
    stop: Stop | None = None
    reader_stopped: bool = False
    renewal: Renewal | None = None
    requests: tuple[str, ...] = ()
    push: bool = False
    source_key: SessionKey | None = None
    """Whose replica is moved, where it is another session's of the tenant."""

    @property
    def mover(self) -> WorkerRef:
        """The boot that is granted the right: it reads, or writes where this is a push."""
        return self.source if self.push else self.destination

    @property
    def keeper(self) -> WorkerRef:
        """The boot whose memory is held until the mover has stopped."""
        return self.destination if self.push else self.source

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.state <= LeaseState.ACTIVE

    @property
    def eager(self) -> bool:
        """Whether no turn waits for it: it brings back what an ended turn left."""
        return not self.turn_token

    @property
    def order(self) -> tuple[int, int]:
        """Age: grows with every lease made, over restarts too."""
        return (self.epoch, self.seq)

    def _to(self, state: LeaseState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"lease {self.lease_id} is {self.state.name} and cannot become {state.name}",
                lease_id=self.lease_id,
            )

    def granted(self, blocks: BlockRange, head_hash: bytes, now_ns: int) -> Lease:
        """The source holds `blocks`; the destination may read until `deadline_ns` at most (it
        counts from a heartbeat that was earlier than now)."""
        self._to(LeaseState.GRANTED)
        return replace(
            self,
            state=LeaseState.GRANTED,
            version=self.version + 1,
            range=blocks,
            head_hash=head_hash,
            grant_ns=now_ns,
            deadline_ns=now_ns + self.ttl_ns,
        )

    def active(self) -> Lease:
        """The destination has posted its transfer."""
        self._to(LeaseState.ACTIVE)
        return replace(self, state=LeaseState.ACTIVE)

    def ended(
        self, state: LeaseState, reason: str, now_ns: int, stats: TransferStats | None = None
    ) -> Lease:
        """The lease at one of its four ends. Says nothing of the reader: see `reader_stopped`."""
        self._to(state)
        return replace(
            self,
            state=state,
            end_reason=reason,
            end_ns=now_ns,
            stats=stats if stats is not None else self.stats,
            stop=None,
            renewal=None,
        )

    def ended_because(self, reason: str) -> Lease:
        """The ended lease, of which more is known now."""
        return replace(self, end_reason=reason)

    def stopping(self, final: LeaseState, reason: str) -> Lease:
        """The destination is told to stop. A second asking keeps the first reason."""
        self._to(final)
        stop = self.stop or Stop(final, reason)
        return replace(self, version=self.version + 1, stop=stop, renewal=None)

    def with_reader_stopped(self) -> Lease:
        """Nobody reads any more; the source may be told (with the new version)."""
        return replace(self, reader_stopped=True, version=self.version + 1)

    def with_replica(self, head_hash: bytes) -> Lease:
        """The source of a push has offered what its leg left: it is let go with the lease."""
        return replace(self, ask_head=head_hash)

    def with_stats(self, stats: TransferStats) -> Lease:
        """What was moved, reported after the lease had ended in the books."""
        return replace(self, stats=stats)

    def at_version(self, version: int) -> Lease:
        """The lease, if it was said to be at that version."""
        return replace(self, version=max(self.version, version))

    def asked(self, request: str) -> Lease:
        """The lease with a request remembered."""
        return replace(self, requests=remember(self.requests, request))

    def renewing(self, ttl_ns: int, now_ns: int) -> Lease:
        """The source is asked to hold longer."""
        if self.state not in (LeaseState.GRANTED, LeaseState.ACTIVE) or self.stop:
            raise IllegalTransitionError(
                f"lease {self.lease_id} is {self.state.name} and cannot be renewed",
                lease_id=self.lease_id,
            )
        version = self.version + 1
        return replace(self, version=version, renewal=Renewal(ttl_ns, now_ns, version))

    def renewed_at_source(self, now_ns: int) -> Lease:
        """The source holds longer; the destination is told, and counts to `deadline_ns` at
        most."""
        if self.renewal is None or self.renewal.source_done:
            raise IllegalTransitionError(
                f"lease {self.lease_id} is not being renewed", lease_id=self.lease_id
            )
        version = self.version + 1
        return replace(
            self,
            version=version,
            ttl_ns=now_ns + self.renewal.ttl_ns - self.grant_ns,
            # A renewal never shortens what the destination already believes.
            deadline_ns=max(self.deadline_ns, now_ns + self.renewal.ttl_ns),
            renewal=replace(self.renewal, version=version, source_done=True),
        )

    def renewal_over(self) -> Lease:
        """Both sides have confirmed, or the guard has passed."""
        return replace(self, renewal=None)
