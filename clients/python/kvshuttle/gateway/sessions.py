"""Sessions over HTTP, for agents that reach the gateway only: what is known of one, hints, its end.

They are the control plane's; nothing is kept here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvshuttle.client import (
    DeadlineExceededError,
    InvalidArgumentError,
    KVShuttleError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvshuttle.gateway import errors
from kvshuttle.gateway.hints import hints_of_body
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from kvshuttle.client import AsyncClient
    from kvshuttle.gateway.app import Gateway

__all__ = ["SESSIONS_PATH", "SessionEndpoints"]

SESSIONS_PATH = "/v1/kvshuttle/sessions"
# A hint is two short fields.
_MOST_BODY_BYTES = 4_096


class SessionEndpoints:
    """A caller sees and changes its own tenant's sessions only."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """To be added to the application's."""
        one = SESSIONS_PATH + "/{session_id:path}"
        return [
            Route(one + "/hint", self._answered(self._hint), methods=["POST"]),
            Route(one, self._answered(self._get), methods=["GET"]),
            Route(one, self._answered(self._end), methods=["DELETE"]),
        ]

    def _answered(
        self, ask: Callable[[Request, str, str], Awaitable[session.Session]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            response: Response
            try:
                tenant = self._gateway.auth.tenant(request.headers)
                try:
                    found = await ask(request, tenant, request.path_params["session_id"])
                except KVShuttleError as error:
                    raise _refusal(error) from error
                response = JSONResponse(describe(found))
            except errors.ApiError as error:
                response = Response(
                    error.body(), error.status, error.headers, media_type="application/json"
                )
            self._gateway.metrics.requests.labels("sessions", str(response.status_code)).inc()
            return response

        return endpoint

    async def _get(self, _request: Request, tenant: str, session_id: str) -> session.Session:
        return await self._client.get_session(session_id, tenant=tenant)

    async def _hint(self, request: Request, tenant: str, session_id: str) -> session.Session:
        said = hints_of_body(await self._body(request))
        return await self._client.update_session(session_id, said, tenant=tenant)

    async def _end(self, _request: Request, tenant: str, session_id: str) -> session.Session:
        return await self._client.end_session(session_id, tenant=tenant)

    async def _body(self, request: Request) -> bytes:
        raw = b""
        try:
            async with asyncio.timeout(self._gateway.settings.body_timeout_s):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > _MOST_BODY_BYTES:
                        raise errors.bad_request(
                            f"The body is larger than {_MOST_BODY_BYTES} bytes. Send "
                            "expected_idle_s or value.",
                            param="body",
                        )
        except TimeoutError:
            raise errors.body_too_slow() from None
        return raw

    @property
    def _client(self) -> AsyncClient:
        return self._gateway.services.control.client


def _refusal(error: KVShuttleError) -> errors.ApiError:
    """The control plane's answer, with its own reason and remedy."""
    status, kind = 502, "bad_gateway_error"
    headers = {}
    if isinstance(error, NotFoundError):
        status, kind = 404, "invalid_request_error"
    elif isinstance(error, InvalidArgumentError):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, ResourceExhaustedError):
        status, kind = 429, "rate_limit_error"
    elif isinstance(error, UnavailableError):
        status, kind = 503, "service_unavailable_error"
        headers = {"retry-after": "1"}
    elif isinstance(error, DeadlineExceededError):
        status, kind = 504, "timeout_error"
    elif isinstance(error, UnauthenticatedError | PermissionDeniedError):
        # The gateway's own rights, not the caller's.
        return errors.ApiError(
            502,
            "The control plane does not let the gateway do this. Ask the operator to check the "
            "gateway's certificate or token.",
            kind=kind,
            code=error.reason or error.code.name,
        )
    elif error.code.name == "FAILED_PRECONDITION":
        status, kind = 409, "invalid_request_error"
    if not error.reason and status >= 500:
        text = "The control plane cannot be asked now. Requests go on without it; try again."
    else:
        text = error.explanation
    return errors.ApiError(
        status, text, kind=kind, code=error.reason or error.code.name, headers=headers
    )


def describe(found: session.Session) -> dict[str, Any]:
    """A session as JSON; who holds its KV inside is not the client's business."""
    hints: dict[str, Any] = {}
    if found.hints.HasField("expected_idle"):
        hints["expected_idle_s"] = found.hints.expected_idle.ToNanoseconds() / 1e9
    if found.hints.value:
        hints["value"] = _word(types.SessionValue, "SESSION_VALUE_", found.hints.value)
    kept = [
        replica.num_tokens
        for replica in found.replicas
        if replica.state in (session.REPLICA_STATE_HARD, session.REPLICA_STATE_SOFT)
    ]
    return {
        "session_id": found.session_id,
        "state": _word(session.SessionState, "SESSION_STATE_", found.state),
        "turn_count": found.turn_count,
        "hints": hints,
        "kept_tokens": max(kept, default=0),
        "turns": [_turn(turn) for turn in found.turns],
    }


def _turn(turn: session.Turn) -> dict[str, Any]:
    usage = turn.usage
    first = usage.time_to_first_token
    return {
        "turn": turn.turn,
        "state": _word(session.TurnState, "TURN_STATE_", turn.state),
        "outcome": _word(session.TurnOutcome, "TURN_OUTCOME_", turn.outcome)
        if turn.outcome
        else None,
        "mode": _word(session.ReturnMode, "RETURN_MODE_", turn.plan.return_mode),
        "reason": turn.plan.reason,
        "reusable_tokens": turn.plan.reusable_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "time_to_first_token_s": first.ToNanoseconds() / 1e9
        if usage.HasField("time_to_first_token")
        else None,
    }


def _word(kind: Any, prefix: str, value: int) -> str:
    """An enum's value as a word; one that is newer than this gateway as its number."""
    try:
        name: str = kind.Name(value)
    except ValueError:
        return str(value)
    return name.removeprefix(prefix).lower()
