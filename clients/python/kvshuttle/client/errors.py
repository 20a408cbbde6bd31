"""What a call to kvshuttle may raise.

The server explains a refusal in `google.rpc.ErrorInfo`; an exception here carries it, so that a
caller can tell NO_WORKER from a broken network without reading texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]
from grpc_status import rpc_status

if TYPE_CHECKING:
    from collections.abc import Mapping

# Where the server puts what the caller can do about it.
REMEDY_KEY = "remedy"


class KVShuttleError(Exception):
    """A call failed.

    `reason` is the server's word (`NO_WORKER`, …), empty when no server answered; `remedy` says
    what to do, where the server knows; `retry_after_s` is its wish for the pause before a retry.
    Some messages end with their remedy: `problem` is the message without it, `explanation` has it
    once.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        domain: str = "",
        metadata: Mapping[str, str] | None = None,
        remedy: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.problem = message.removesuffix(remedy).rstrip(": ") if remedy else message
        self.explanation = message if remedy in message else f"{message} {remedy}".strip()
        where = f"{code.name} ({reason})" if reason else code.name
        super().__init__(f"{where}: {self.explanation}".rstrip())
        self.message = message
        self.code = code
        self.reason = reason
        self.domain = domain
        self.metadata: dict[str, str] = dict(metadata or {})
        self.remedy = remedy
        self.retry_after_s = retry_after_s


class InvalidArgumentError(KVShuttleError):
    """A field of the request cannot be meant as it is."""


class NotFoundError(KVShuttleError):
    """There is no such session, lease or worker."""


class FailedPreconditionError(KVShuttleError):
    """The state forbids it, for example a stale incarnation."""


class AbortedError(KVShuttleError):
    """A race was lost; the whole operation may be tried again."""


class OutOfRangeError(KVShuttleError):
    """A resume token or page token is too old."""


class ResourceExhaustedError(KVShuttleError):
    """A quota is used up; `retry_after_s` says for how long."""


class PermissionDeniedError(KVShuttleError):
    """The caller's role does not allow it."""


class UnauthenticatedError(KVShuttleError):
    """The server does not know the caller."""


class UnavailableError(KVShuttleError):
    """No server answered, or it cannot serve now (`reason` is set only if it answered)."""


class DeadlineExceededError(KVShuttleError):
    """The answer did not come in time; whether the call took effect is unknown."""


class CallCancelledError(KVShuttleError):
    """The call was cancelled by the server or by closing the client."""


_BY_CODE: dict[grpc.StatusCode, type[KVShuttleError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
}


def from_rpc_error(error: grpc.RpcError) -> KVShuttleError:
    """The exception for a failed RPC. Details that cannot be read are left out, never raised."""
    # A failed synchronous call raises itself; an AioRpcError has the same accessors.
    call: Any = error
    try:
        status = rpc_status.from_call(call)
    except ValueError:
        status = None
    return _made(call.code(), call.details(), status)


def from_status(status: status_pb2.Status) -> KVShuttleError:
    """The exception for an operation of a stream that failed."""
    code = next(
        (code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN
    )
    return _made(code, status.message, status)


def _made(
    code: grpc.StatusCode, message: str | None, status: status_pb2.Status | None
) -> KVShuttleError:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    help_ = error_details_pb2.Help()
    retry_after_s: float | None = None
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.Help.DESCRIPTOR):
            detail.Unpack(help_)
    metadata = dict(info.metadata)
    remedy = metadata.get(REMEDY_KEY) or (help_.links[0].description if help_.links else "")
    return _BY_CODE.get(code, KVShuttleError)(
        message or "no details",
        code=code,
        reason=info.reason,
        domain=info.domain,
        metadata=metadata,
        remedy=remedy,
        retry_after_s=retry_after_s,
    )
