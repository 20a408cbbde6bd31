"""Python client of kvshuttle's control plane."""

from kvshuttle.client.aio import AsyncClient, new_request_id
from kvshuttle.client.errors import (
    AbortedError,
    CallCancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVShuttleError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvshuttle.client.options import ClientOptions, Timeouts, TlsOptions, is_loopback_target

__all__ = [
    "AbortedError",
    "AsyncClient",
    "CallCancelledError",
    "ClientOptions",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "KVShuttleError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "Timeouts",
    "TlsOptions",
    "UnauthenticatedError",
    "UnavailableError",
    "is_loopback_target",
    "new_request_id",
]
