"""The one table from domain errors to gRPC status codes, and how a status is told to clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import (  # type: ignore[import-untyped]
    code_pb2,
    error_details_pb2,
    status_pb2,
)

from kvshuttle.controlplane.model import errors as domain
from kvshuttle.controlplane.store import StoreError

if TYPE_CHECKING:
    from typing import Never

    from google.protobuf.message import Message

__all__ = [
    "DOMAIN",
    "TABLE",
    "DeadlineRequiredError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "abort",
    "status_of",
]

DOMAIN = "kvshuttle"
NO_WORKER_RETRY_S = 1
"""A restarting engine takes longer, a reconnecting agent about a second."""


class UnauthenticatedError(domain.DomainError):
    """Nobody knows who the caller is."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(domain.DomainError):
    """The caller may not do that."""

    reason = "PERMISSION_DENIED"


class DeadlineRequiredError(domain.DomainError):
    """A unary call without a deadline would wait for ever when something hangs."""

    reason = "DEADLINE_REQUIRED"


TABLE: dict[type[BaseException], grpc.StatusCode] = {
    domain.InvalidFieldError: grpc.StatusCode.INVALID_ARGUMENT,
    DeadlineRequiredError: grpc.StatusCode.INVALID_ARGUMENT,
    domain.NotFoundError: grpc.StatusCode.NOT_FOUND,
    domain.NoWorkerError: grpc.StatusCode.UNAVAILABLE,
    StoreError: grpc.StatusCode.UNAVAILABLE,
    domain.BudgetExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    domain.SessionEndedError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.LeaseEndedError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.LeaseNotGrantedError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.FingerprintMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.BootConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.WorkerFencedError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.LineageChangedError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.UnsupportedError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.IncarnationMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.SupersededError: grpc.StatusCode.FAILED_PRECONDITION,
    domain.WatchCompactedError: grpc.StatusCode.OUT_OF_RANGE,
    domain.IllegalTransitionError: grpc.StatusCode.INTERNAL,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
}


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, status_pb2.Status]:
    """Code, text and the rich status with ErrorInfo. What is not in the table is INTERNAL and
    says nothing of itself: a bug's text may hold what clients must not see."""
    code = next(
        (TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), grpc.StatusCode.INTERNAL
    )
    known = any(kind in TABLE for kind in type(error).__mro__)
    message = str(error) if known else "internal error; the control plane's log says more"
    metadata: dict[str, str] = {}
    reason = "STORE_FAILED" if isinstance(error, StoreError) else "INTERNAL"
    if isinstance(error, domain.DomainError) and known:
        reason, metadata = error.reason, error.metadata
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    ]
    if isinstance(error, domain.InvalidFieldError):
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=error.field, description=error.remedy, reason=reason
                    )
                ]
            )
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=NO_WORKER_RETRY_S)))
    if isinstance(error, domain.BudgetExceededError):
        delay = Duration()
        delay.FromNanoseconds(error.retry_ns)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return code, message, status


async def abort(context: grpc.aio.ServicerContext[Message, Message], error: BaseException) -> Never:
    """Ends a call with the error's status."""
    code, message, status = status_of(error)
    await context.abort(
        code,
        message,
        trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),),
    )
    raise AssertionError("abort returned")
