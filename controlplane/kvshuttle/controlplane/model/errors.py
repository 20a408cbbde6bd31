"""Errors of the domain. Each has a reason word, and metadata that a program can read.

How each becomes a gRPC status is one table: `kvshuttle.controlplane.services.errors`.
"""

from __future__ import annotations

__all__ = [
    "BootConflictError",
    "BudgetExceededError",
    "DomainError",
    "FingerprintMismatchError",
    "IllegalTransitionError",
    "IncarnationMismatchError",
    "InvalidFieldError",
    "LeaseEndedError",
    "LeaseNotGrantedError",
    "LineageChangedError",
    "NoWorkerError",
    "NotFoundError",
    "SessionEndedError",
    "SupersededError",
    "UnsupportedError",
    "WatchCompactedError",
    "WorkerFencedError",
]


class DomainError(Exception):
    """Something that the caller asked for cannot be done; `reason` is one word for programs."""

    reason = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {name: str(value) for name, value in metadata.items()}


class InvalidFieldError(DomainError):
    """A request's field has a value that it must not have."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, value: object, remedy: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field} is {shown}: {remedy}", field=field, value=shown, remedy=remedy)
        self.field = field
        self.remedy = remedy


class NotFoundError(DomainError):
    """No such thing (or not the caller's)."""

    def __init__(self, kind: str, name: object) -> None:
        super().__init__(f"there is no {kind} {name}", kind=kind, name=name)
        self.reason = f"{kind.upper()}_NOT_FOUND"


class NoWorkerError(DomainError):
    """No live worker can take a turn."""

    reason = "NO_WORKER"


class SessionEndedError(DomainError):
    """The session has ended and takes no change."""

    reason = "SESSION_ENDED"


class LeaseEndedError(DomainError):
    """The lease has ended."""

    reason = "LEASE_ENDED"


class LeaseNotGrantedError(DomainError):
    """The lease cannot be renewed yet, or not now."""

    reason = "LEASE_NOT_GRANTED"


class IllegalTransitionError(DomainError):
    """A state machine was asked for a step that it does not have: a bug, never a client's fault."""

    reason = "ILLEGAL_TRANSITION"


class FingerprintMismatchError(DomainError):
    """A worker's KV would not be the same bytes as that of the workers that are here."""

    reason = "FINGERPRINT_MISMATCH"


class BootConflictError(DomainError):
    """Another boot of this worker lives."""

    reason = "BOOT_CONFLICT"


class WorkerFencedError(DomainError):
    """This boot was attested dead and must not come back."""

    reason = "WORKER_FENCED"


class LineageChangedError(DomainError):
    """The agent belongs to another store."""

    reason = "LINEAGE_CHANGED"


class UnsupportedError(DomainError):
    """The agent is set up in a way that cannot work here."""

    reason = "UNSUPPORTED"


class IncarnationMismatchError(DomainError):
    """Another boot is registered than the one that the caller named."""

    reason = "INCARNATION_MISMATCH"


class WatchCompactedError(DomainError):
    """A watch cannot be resumed from so long ago."""

    reason = "WATCH_COMPACTED"


class BudgetExceededError(DomainError):
    """The caller, its tenant or a worker has as much as it may. `retry_ns`: when to try again."""

    def __init__(self, reason: str, message: str, retry_ns: int, **metadata: object) -> None:
        super().__init__(message, **metadata)
        self.reason = reason
        self.retry_ns = retry_ns


class SupersededError(DomainError):
    """Another control plane of this lineage has taken over; this one stops."""

    reason = "SUPERSEDED"
