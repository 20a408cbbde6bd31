"""The HTTP application: routes, and what is checked before a turn begins."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Any

import httpx
import structlog
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from kvshuttle.client import AsyncClient
from kvshuttle.gateway import body as bodies
from kvshuttle.gateway import errors, metrics
from kvshuttle.gateway.auth import Authenticator
from kvshuttle.gateway.control import ControlPlane
from kvshuttle.gateway.conversations import Conversations
from kvshuttle.gateway.dialects import DIALECTS
from kvshuttle.gateway.engines import EngineDirectory
from kvshuttle.gateway.hints import hints_of_headers
from kvshuttle.gateway.identity import identify
from kvshuttle.gateway.inflight import InFlight
from kvshuttle.gateway.legs import EngineHttp
from kvshuttle.gateway.proxied import ProxiedEndpoints
from kvshuttle.gateway.report import wants_comment
from kvshuttle.gateway.request import Services, TurnRequest
from kvshuttle.gateway.sessions import SessionEndpoints
from kvshuttle.gateway.stored import StoredResponses
from kvshuttle.gateway.turn import STATUS_CLIENT_GONE, TurnRun
from kvshuttle.tracing import Tracing
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from kvshuttle.gateway.dialects import Dialect
    from kvshuttle.gateway.engines import Engine
    from kvshuttle.gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

RETURN_HEADER = "x-kvshuttle-return"
_POLICIES = {
    "auto": session.RETURN_POLICY_AUTO,
    "never": session.RETURN_POLICY_NEVER,
    "always": session.RETURN_POLICY_ALWAYS,
}

# /health asks the engines at most so often, seconds: it must not become a load.
_HEALTH_CACHE_S = 1.0
# How long a request that is cut off at the stop may take to say so.
_LAST_WORDS_S = 2.0
# So many engines are asked for a response that went through another gateway.
_MOST_ASKED_FOR_A_RESPONSE = 16


class _ClientGone(Exception):  # noqa: N818
    """The client left before its request was whole."""


class Gateway:
    """All that a running gateway has. `start` and `stop` are called by the ASGI lifespan."""

    def __init__(self, settings: GatewaySettings, tracing: Tracing | None = None) -> None:
        self.settings = settings
        if tracing is None and settings.traces:
            tracing = Tracing.from_environment("kvshuttle-gateway")
        self.tracing = tracing
        self.metrics = metrics.Metrics()
        self.auth = Authenticator.from_file(settings.api_keys_file)
        self.engines = EngineDirectory(settings.prefill_url, settings.decode_url)
        self.in_flight = InFlight(settings.max_requests, settings.tenant_limit, self.metrics)
        # Set once the gateway is to be stopped.
        self.draining = False
        self._services: Services | None = None
        self._health: tuple[float, int, dict[str, Any]] | None = None
        self._health_lock = asyncio.Lock()

    async def start(self) -> None:
        """Opens the connections; nothing is waited for."""
        settings = self.settings
        client = AsyncClient(settings.control_plane, settings.client_options())
        control = ControlPlane(settings, self.metrics, self.engines, client)
        http = EngineHttp(settings, self.metrics)
        self._services = Services(
            settings,
            self.metrics,
            self.engines,
            control,
            http,
            self._stored(http),
            Conversations(lambda: secrets.token_hex(4)),
            self.tracing,
        )
        control.start()

    def _stored(self, http: EngineHttp) -> StoredResponses:
        if not self.auth.is_open:
            return StoredResponses()

        async def find(response_id: str) -> str | None:
            urls = [engine.url for engine in self.engines.known()[:_MOST_ASKED_FOR_A_RESPONSE]]
            return await http.holder_of(urls, response_id)

        return StoredResponses(find)

    async def stop(self) -> None:
        """Ends what is open. Requests have ended by now, or are being ended; their EndTurns are
        waited for."""
        if not await self.in_flight.all_ended(_LAST_WORDS_S):
            log.warning("requests_left_at_stop")
        if self._services is not None:
            await self._services.control.close()
            await self._services.http.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    @property
    def services(self) -> Services:
        """What requests share."""
        assert self._services is not None, "the gateway has not been started"
        return self._services

    # Reads

    async def get_metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self.metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    async def get_health(self, _request: Request) -> Response:
        """What can be reached; 503 if there is nowhere to send a request, or if it is to stop."""
        if self.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        async with self._health_lock:
            now = time.monotonic()
            if self._health is None or now - self._health[0] >= _HEALTH_CACHE_S:
                self._health = (now, *await self._look())
            _, status, report = self._health
        return JSONResponse(report, status_code=status)

    async def _look(self) -> tuple[int, dict[str, Any]]:
        engines = self.engines.known()
        reachable = await asyncio.gather(*(self._is_reachable(engine) for engine in engines))
        control = self.services.control
        if not engines:
            status, word = 503, "unavailable"
        elif control.state == "ok" and all(reachable):
            status, word = 200, "ok"
        else:
            status, word = 200, "degraded"
        report = {
            "status": word,
            "control_plane": control.describe(),
            "engines": [
                {
                    "worker_id": engine.worker_id or None,
                    "kind": engine.kind,
                    # Addresses inside are not for everyone outside.
                    **({"url": engine.url} if self.auth.is_open else {}),
                    "reachable": ok,
                }
                for engine, ok in zip(engines, reachable, strict=True)
            ],
        }
        return status, report

    async def _is_reachable(self, engine: Engine) -> bool:
        try:
            answer = await self.services.http.get(engine.url, "/health")
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


class CompletionEndpoint:
    """A completion route, as a bare ASGI application: it must hear of a disconnect at any time."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self._gateway = gateway
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        gateway.metrics.in_flight.inc()
        status = 500
        try:
            status = await self._serve(Headers(scope=scope), receive, send)
        except _ClientGone:
            status = STATUS_CLIENT_GONE
        finally:
            gateway.metrics.in_flight.dec()
            gateway.metrics.requests.labels(self._dialect.route, str(status)).inc()

    async def _serve(self, headers: Headers, receive: Receive, send: Send) -> int:
        gateway = self._gateway
        try:
            tenant = gateway.auth.tenant(headers)
            with gateway.in_flight.one(tenant):
                request = await self._read(tenant, headers, receive)
                try:
                    return await self._run(request, receive, send)
                finally:
                    if request.identity.place is not None:
                        request.identity.place.close()
        except errors.ApiError as error:
            await _send_error(error, self._dialect, send)
            return error.status

    async def _run(self, request: TurnRequest, receive: Receive, send: Send) -> int:
        run = TurnRun(self._gateway.services, request, send)
        work = asyncio.create_task(run.run(), name="turn")
        watch = asyncio.create_task(_disconnected(receive), name="watch-client")
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not run.answered:
                run.client_gone = True
                work.cancel()
            await asyncio.wait({work})
        except asyncio.CancelledError:
            # The server gives up waiting for this request. The run tells its client.
            work.cancel()
            await asyncio.wait({work})
            if not self._gateway.draining:
                raise
            # A stop that takes its time is no error, of which the server would log a traceback.
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        finally:
            watch.cancel()
        if not run.client_gone and not work.cancelled():
            work.result()
        return run.status

    async def _read(self, tenant: str, headers: Headers, receive: Receive) -> TurnRequest:
        """Checks all that can be checked without asking anyone. Raises ApiError."""
        gateway = self._gateway
        settings = gateway.settings
        policy = _return_policy(headers.get(RETURN_HEADER))
        hints = hints_of_headers(headers)
        comment = wants_comment(headers)
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                raw = await _read_body(headers, receive, settings.max_body_bytes)
        except TimeoutError:
            raise errors.body_too_slow() from None
        started = time.monotonic()
        body = bodies.parse(self._dialect.route, raw)
        if body.route == "responses" and not gateway.auth.is_open:
            # Who chose the names of stored responses could write over another tenant's.
            body.drop("request_id")
        if body.dropped_kv_params:
            gateway.metrics.dropped_kv_params.inc()
        services = gateway.services
        identity = identify(tenant, headers, body, services.stored, services.conversations)
        gateway.metrics.identified(identity.source, len(services.conversations))
        return TurnRequest(tenant, identity, body, headers, policy, started, hints, comment)


def create_app(settings: GatewaySettings, tracing: Tracing | None = None) -> Starlette:
    """The ASGI application. Raises KeyFileError where the API keys cannot be read."""
    gateway = Gateway(settings, tracing)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    app = Starlette(
        lifespan=lifespan,
        routes=[
            *(
                HttpRoute(dialect.path, CompletionEndpoint(gateway, dialect), methods=["POST"])
                for dialect in DIALECTS.values()
            ),
            *ProxiedEndpoints(gateway).routes(),
            *SessionEndpoints(gateway).routes(),
            HttpRoute("/health", gateway.get_health),
            HttpRoute("/metrics", gateway.get_metrics),
        ],
        exception_handlers={HTTPException: _http_exception},
    )
    app.state.gateway = gateway
    return app


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    return _error_response(
        errors.ApiError(
            error.status_code,
            f"{error.detail}: {what} is not served here. See the gateway's documentation for the "
            "routes.",
            kind="invalid_request_error",
            headers=dict(error.headers or {}),
        )
    )


def _error_response(error: errors.ApiError) -> Response:
    return Response(
        error.body(),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _send_error(error: errors.ApiError, dialect: Dialect, send: Send) -> None:
    body = dialect.error_body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **error.headers,
    }
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


def _return_policy(value: str | None) -> session.ReturnPolicy.ValueType:
    if value is None:
        return session.RETURN_POLICY_AUTO
    policy = _POLICIES.get(value.strip().lower())
    if policy is None:
        raise errors.bad_request(
            "X-KVShuttle-Return must be auto, never or always. Send one of them, or leave the "
            "header out.",
            param="X-KVShuttle-Return",
        )
    return policy


async def _read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises a 413 ApiError as soon as it is known to be too large."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise errors.body_too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise errors.body_too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
