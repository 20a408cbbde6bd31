"""What an engine answers without a turn: its models, counts of tokens, stored responses."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvshuttle.gateway import errors
from kvshuttle.gateway.body import without_kv_params
from kvshuttle.gateway.dialects import DIALECTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request

    from kvshuttle.gateway.app import Gateway
    from kvshuttle.gateway.dialects import Dialect

__all__ = ["ProxiedEndpoints"]

# An engine that does not answer is no reason not to ask another; one that answers is believed.
_TRIES = 3


class ProxiedEndpoints:
    """Routes whose answer is an engine's own."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """To be added to the application's."""
        responses, messages = DIALECTS["responses"], DIALECTS["messages"]
        one = responses.path + "/{response_id}"
        return [
            Route("/v1/models", self._answered("models", DIALECTS["chat"], self._models)),
            Route(
                messages.path + "/count_tokens",
                self._answered("count_tokens", messages, self._count_tokens),
                methods=["POST"],
            ),
            Route(one, self._answered("responses", responses, self._response)),
            Route(
                one + "/cancel",
                self._answered("responses", responses, self._response),
                methods=["POST"],
            ),
        ]

    def _answered(
        self,
        route: str,
        dialect: Dialect,
        ask: Callable[[Request, str], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                response = await ask(request, self._gateway.auth.tenant(request.headers))
            except errors.ApiError as error:
                response = Response(
                    dialect.error_body(error),
                    error.status,
                    error.headers,
                    media_type="application/json",
                )
            self._gateway.metrics.requests.labels(route, str(response.status_code)).inc()
            return response

        return endpoint

    async def _models(self, request: Request, tenant: str) -> Response:
        return await self._anywhere(request, tenant, b"")

    async def _count_tokens(self, request: Request, tenant: str) -> Response:
        limit = self._gateway.settings.max_body_bytes
        raw = bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > limit:
                raise errors.body_too_large(limit)
        answer = await self._anywhere(request, tenant, bytes(raw))
        if answer.status_code >= 400:
            body = DIALECTS["messages"].engine_error(answer.status_code, bytes(answer.body))
            return Response(body, answer.status_code, media_type=answer.media_type)
        return answer

    async def _anywhere(self, request: Request, tenant: str, body: bytes) -> Response:
        services = self._gateway.services
        candidates = services.engines.candidates(tenant, "")[:_TRIES]
        if not candidates:
            raise errors.no_engine_known()
        failed: httpx.Response | None = None
        for engine in candidates:
            try:
                answer = await services.http.ask(
                    request.method, engine.url + request.url.path, body
                )
            except httpx.HTTPError:
                continue
            if answer.status_code < 500:
                return _copy(answer)
            failed = answer
        if failed is not None:
            raise errors.engine_answered(failed.status_code, _message(failed))
        raise errors.engines_unreachable(len(candidates))

    async def _response(self, request: Request, tenant: str) -> Response:
        """A stored response, read or cancelled, where it is kept."""
        services = self._gateway.services
        response_id = request.path_params["response_id"]
        url = await services.stored.holder(tenant, response_id)
        if url is None:
            raise errors.response_not_found(response_id)
        path = f"{DIALECTS['responses'].path}/{quote(response_id, safe='')}"
        if request.method == "POST":
            path += "/cancel"
        query = f"?{request.url.query}" if request.url.query else ""
        opened = contextlib.AsyncExitStack()
        try:
            answer = await opened.enter_async_context(
                services.http.streamed(request.method, url + path + query)
            )
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await answer.aread()
                await opened.aclose()
                return _copy(answer)
        except httpx.HTTPError:
            await opened.aclose()
            raise errors.engines_unreachable(1) from None
        except BaseException:
            await opened.aclose()
            raise

        async def events() -> AsyncIterator[bytes]:
            async with opened:
                with contextlib.suppress(httpx.HTTPError):
                    async for chunk in answer.aiter_raw():
                        yield chunk

        return StreamingResponse(
            events(), answer.status_code, media_type=answer.headers["content-type"]
        )


def _message(answer: httpx.Response) -> str:
    """What an engine says of its error: OpenAI's field, or else its text."""
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, RecursionError, LookupError, TypeError):
        said = None
    return said if isinstance(said, str) else answer.text


def _copy(answer: httpx.Response) -> Response:
    return Response(
        without_kv_params(answer.content),
        status_code=answer.status_code,
        media_type=answer.headers.get("content-type", "application/json"),
    )
