"""What is true for every call: who calls, whether they may, its deadline, how errors are told."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from kvshuttle.controlplane.auth import (
    DEFAULT_TENANT,
    TENANT_KEY,
    Caller,
    Role,
    Tokens,
    caller_of_certificate,
    may,
)
from kvshuttle.controlplane.model.errors import DomainError, InvalidFieldError
from kvshuttle.controlplane.services.errors import (
    DeadlineRequiredError,
    PermissionDeniedError,
    UnauthenticatedError,
    abort,
)
from kvshuttle.controlplane.store import StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.observer import Metrics

__all__ = ["Guard", "caller", "note_failure", "tenant", "tenant_or_all"]

log = structlog.get_logger("kvshuttle.controlplane.rpc")

_caller: ContextVar[Caller] = ContextVar("caller")
_tenant: ContextVar[str] = ContextVar("tenant")
"""Empty when the caller is bound to no tenant and has named none."""


def caller() -> Caller:
    """Who makes the call that is being served."""
    return _caller.get()


def tenant() -> str:
    """The tenant that the call is for. UnauthenticatedError when a gateway or an operator has not
    named one."""
    found = _tenant.get()
    if found:
        return found
    if _caller.get().role is Role.ANYONE:
        return DEFAULT_TENANT
    raise InvalidFieldError(
        f"metadata {TENANT_KEY}", "", "name the tenant that this call is for in this metadata key"
    )


def tenant_or_all() -> str | None:
    """The tenant whose things may be listed; None means all, for operators that name none."""
    found = _tenant.get()
    if not found and _caller.get().role in (Role.OPERATOR, Role.ANYONE):
        return None
    return tenant()


def note_failure(metrics: Metrics, method: str, error: BaseException) -> None:
    """Counts and logs that a call, or an operation that might have been one, failed."""
    if isinstance(error, DomainError | StoreError):
        name = str(getattr(error, "reason", "STORE_FAILED"))
        metrics.refused.labels(method, name).inc()
        log.info("rpc_refused", method=method, reason=name, error=str(error))
    else:
        metrics.refused.labels(method, "INTERNAL").inc()
        log.error("rpc_failed", method=method, exc_info=error)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Wraps every handler of a listener."""

    def __init__(
        self, *, insecure: bool, tokens: Tokens | None, limits: Limits, metrics: Metrics
    ) -> None:
        self._insecure = insecure
        self._tokens = tokens
        self._limits = limits
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Finds the handler and wraps its one behaviour."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        _, service, method = handler_call_details.method.split("/")
        package, _, service = service.rpartition(".")
        ours = package == "kvshuttle.v1"
        # Probes have no identity, and say nothing of anyone.
        public = service == "Health"

        def enter(context: Any) -> None:
            if not public:
                self._identify(context, service, method)
            if ours and context.time_remaining() is None and not handler.response_streaming:
                raise DeadlineRequiredError(
                    "this call has no deadline: set one (grpcurl -max-time 5; buf curl "
                    "--timeout 5s)",
                    method=handler_call_details.method,
                )

        def failed(error: BaseException) -> None:
            note_failure(self._metrics, method, error)

        # A message that cannot be read is the caller's mistake; gRPC would call it UNKNOWN and log
        # a stack.
        handler = _replace(handler, "request_deserializer", _lenient(handler))
        if handler.response_streaming:
            inner = handler.unary_stream or handler.stream_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                pace = _Pace(self._limits.stream_stall_ns / 1e9, method)
                try:
                    enter(context)
                    request = _checked(request) if handler.unary_stream else _each(request)
                    async for message in inner(request, context):
                        pace.since = pace.now()
                        yield message
                        pace.since = 0.0
                except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
                    raise
                except Exception as error:
                    failed(error)
                    await abort(context, error)
                finally:
                    pace.close()

            field = "unary_stream" if handler.unary_stream else "stream_stream"
            return _replace(handler, field, stream)
        inner = handler.unary_unary or handler.stream_unary
        calls = self._metrics.calls.labels(method)

        async def unary(request: Any, context: Any) -> Any:
            began = time.perf_counter()
            try:
                enter(context)
                request = _checked(request) if handler.unary_unary else _each(request)
                return await inner(request, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                failed(error)
                await abort(context, error)
            finally:
                calls.observe(time.perf_counter() - began)

        return _replace(handler, "unary_unary" if handler.unary_unary else "stream_unary", unary)

    def _identify(self, context: Any, service: str, method: str) -> None:
        metadata = dict(context.invocation_metadata() or ())
        found = self._find(context, metadata)
        if not may(found.role, service, method):
            raise PermissionDeniedError(
                f"a {found.role.value} may not call {service}.{method}",
                role=found.role.value,
                method=f"{service}.{method}",
            )
        named = metadata.get(TENANT_KEY, "")
        if not isinstance(named, str) or len(named) > self._limits.tenant_chars:
            raise InvalidFieldError(
                f"metadata {TENANT_KEY}", named, f"at most {self._limits.tenant_chars} characters"
            )
        if found.tenant and named and named != found.tenant:
            raise PermissionDeniedError(
                f"this caller is bound to tenant {found.tenant}", tenant=named
            )
        _caller.set(found)
        _tenant.set(found.tenant or named)

    def _find(self, context: Any, metadata: dict[str, str | bytes]) -> Caller:
        pem = context.auth_context().get("x509_pem_cert")
        if pem and (found := caller_of_certificate(pem[0])):
            return found
        presented = metadata.get("authorization")
        if isinstance(presented, str) and self._tokens is not None:
            scheme, _, secret = presented.partition(" ")
            if scheme.lower() == "bearer" and (known := self._tokens.find(secret.strip())):
                return known
            raise UnauthenticatedError("the bearer token is not known here")
        if self._insecure:
            return Caller(Role.ANYONE, "anyone")
        raise UnauthenticatedError(
            "present a client certificate with a kvshuttle:// URI, or a bearer token"
        )


class _Pace:
    """Cancels a stream whose reader takes nothing for too long: flow control would hold the call,
    and what waits for it, for ever. Looks now and then instead of setting a timer a message."""

    def __init__(self, stall_s: float, method: str) -> None:
        self._stall_s = stall_s
        self._method = method
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.now = self._loop.time
        # Since when a message waits to be taken; 0 while none does.
        self.since = 0.0
        self._timer = self._loop.call_later(stall_s / 4, self._look)

    def _look(self) -> None:
        if self.since and self.now() - self.since > self._stall_s:
            log.warning("stream_stalled", method=self._method, seconds=self._stall_s)
            if self._task is not None:
                self._task.cancel()
            return
        self._timer = self._loop.call_later(self._stall_s / 4, self._look)

    def close(self) -> None:
        """The stream has ended."""
        self._timer.cancel()


class _Malformed:
    """Stands for a request that could not be read."""

    def __init__(self, size: int) -> None:
        self.size = size


def _lenient(handler: Any) -> Callable[[bytes], Any]:
    inner = handler.request_deserializer

    def read(raw: bytes) -> Any:
        if inner is None:
            return raw
        try:
            return inner(raw)
        except Exception:
            return _Malformed(len(raw))

    return read


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidFieldError(
            "request", f"{request.size} bytes", "send the message that the API's text describes"
        )
    return request


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _replace(handler: Any, field: str, behaviour: Any) -> Any:
    # gRPC's handlers are a namedtuple; reflection's and health's are made by the same functions.
    if hasattr(handler, "_replace"):
        return handler._replace(**{field: behaviour})
    return dataclasses.replace(handler, **{field: behaviour})
