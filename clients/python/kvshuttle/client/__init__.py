"""Python client of kvshuttle"s control plane."""

from kvshuttle.client.aio import AsyncClient
from kvshuttle.client.calls import new_request_id
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
from kvshuttle.client.options import ClientOptions, Timeouts, TlsOptions
from kvshuttle.client.retries import NO_RETRIES, RetryPolicy
from kvshuttle.client.sessions import AsyncSession, AsyncTurn, SyncSession, SyncTurn, Value, hints
from kvshuttle.client.sync import Client

__all__ = [
    "NO_RETRIES",
    "AbortedError",
    "AsyncClient",
    "AsyncSession",
    "AsyncTurn",
    "CallCancelledError",
    "Client",
    "ClientOptions",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "KVShuttleError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "SyncSession",
    "SyncTurn",
    "Timeouts",
    "TlsOptions",
    "UnauthenticatedError",
    "UnavailableError",
    "Value",
    "hints",
    "new_request_id",
]
