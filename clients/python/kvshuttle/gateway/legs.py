"""HTTP to the engines: one function a leg, every step with a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

import httpx

from kvshuttle.gateway import limits
from kvshuttle.gateway.dialects import DIALECTS
from kvshuttle.gateway.engine_client import EngineClient
from kvshuttle.gateway.liveness import Liveness
from kvshuttle.gateway.spread import SpreadTransport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvshuttle.gateway.body import Leg
    from kvshuttle.gateway.dialects import Dialect, Route
    from kvshuttle.gateway.liveness import Watch
    from kvshuttle.gateway.metrics import Metrics
    from kvshuttle.gateway.settings import GatewaySettings

# Headers of the client that go on to the engines: what joins logs and traces, nothing else.
# Authorization above all stays here.
_FORWARDED = ("x-request-id", "traceparent", "tracestate")
_OWN_HEADERS = {
    b"content-type": b"application/json",
    # Answers go to the client as they are, and their usage is read: no compression.
    b"accept-encoding": b"identity",
}

# The marks of a stream's lines, such as an event's name, are within so much of its start.
_LINE_START_BYTES = 1_024

Failure = Literal["unreachable", "dropped", "hung", "timeout", "broke_off"]


class LegFailed(Exception):  # noqa: N818 - an outcome that the caller handles, not a defect
    """An engine gave no usable answer.

    `unreachable`: it never had the request; `dropped`: it had it, and the connection ended before
    any byte of the answer's body; `hung`: it had it, and says nothing any more, to nobody;
    `timeout`: it may still be at it; `broke_off`: part of an answer had arrived.
    """

    def __init__(self, failure: Failure, url: str, cause: str) -> None:
        super().__init__(f"{url}: {failure}: {cause}")
        self.failure: Failure = failure
        self.url = url
        self.cause = cause


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """The prefill leg's whole answer."""

    status: int
    headers: httpx.Headers
    body: bytes


class EngineHttp:
    """The connections to all engines."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        key = settings.engine_api_key
        self._liveness = Liveness(lambda url: self.get(url, "/health"), settings.engine_hang_s)
        self._client = EngineClient(
            SpreadTransport(keepalive_expiry_s=settings.engine_keepalive_s, idle_connections=1_024),
            {"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
        )

    async def close(self) -> None:
        """Closes all connections, which aborts what runs on them."""
        await self._client.aclose()

    async def prefill(
        self, url: str, route: Route, body: bytes, headers: Mapping[str, str]
    ) -> PrefillAnswer:
        """Runs the prefill leg to its end. Raises LegFailed."""
        settings = self._settings
        started = time.monotonic()
        result = "cancelled"
        watch: Watch | None = None
        try:
            with self._liveness.watch(url) as watch:
                async with asyncio.timeout(settings.prefill_timeout_s) as watch.scope:
                    response = await self._client.ask(
                        "POST",
                        url + DIALECTS[route].path,
                        httpx.Timeout(
                            settings.prefill_timeout_s, connect=settings.connect_timeout_s
                        ),
                        body=body,
                        headers=_with_own(headers),
                    )
            result = _result(response.status_code)
            return PrefillAnswer(response.status_code, response.headers, response.content)
        except TimeoutError as error:
            failed = _timed_out(url, watch, "the whole leg")
            result = failed.failure
            raise failed from error
        except httpx.HTTPError as error:
            failed = _failed(url, error)
            result = failed.failure
            raise failed from error
        finally:
            self.observe("prefill", result, started)

    async def open_decode(
        self, url: str, route: Route, body: bytes, headers: Mapping[str, str]
    ) -> DecodeStream:
        """Starts the decode leg: returns when its status and headers are there.

        Raises LegFailed. The stream must be closed; closing it early makes vLLM abort the request.
        """
        settings = self._settings
        started = time.monotonic()
        result = "cancelled"
        watch: Watch | None = None
        try:
            with self._liveness.watch(url) as watch:
                async with asyncio.timeout(None) as watch.scope:
                    response = await self._client.open(
                        "POST",
                        url + DIALECTS[route].path,
                        httpx.Timeout(
                            settings.decode_timeout_s, connect=settings.connect_timeout_s
                        ),
                        body=body,
                        headers=_with_own(headers),
                    )
        except TimeoutError as error:
            failed = _timed_out(url, watch, "no headers")
            result = failed.failure
            raise failed from error
        except httpx.HTTPError as error:
            failed = _failed(url, error)
            result = failed.failure
            raise failed from error
        else:
            result = ""
        finally:
            if result:
                self.observe("decode", result, started)
        return DecodeStream(self, self._liveness, url, response, started, settings, DIALECTS[route])

    async def get(self, url: str, path: str) -> httpx.Response:
        """A short read from an engine. Raises httpx.HTTPError."""
        timeout = httpx.Timeout(self._settings.probe_timeout_s)
        return await self._client.ask("GET", url + path, timeout)

    async def ask(self, method: str, url: str, body: bytes = b"") -> httpx.Response:
        """A question that takes an engine little time. Raises httpx.HTTPError."""
        return await self._client.ask(
            method,
            url,
            httpx.Timeout(
                self._settings.probe_timeout_s if not body else self._settings.prefill_timeout_s,
                connect=self._settings.connect_timeout_s,
            ),
            body=body or None,
            headers=_OWN_HEADERS,
        )

    def streamed(
        self, method: str, url: str
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        """An answer that may go on for long. Entering it raises httpx.HTTPError."""
        timeout = httpx.Timeout(
            self._settings.stream_idle_timeout_s, connect=self._settings.connect_timeout_s
        )
        return self._client.streamed(method, url, timeout, headers=_OWN_HEADERS)

    async def holder_of(self, urls: Sequence[str], response_id: str) -> str | None:
        """Which of these engines has stored a response."""

        async def has(url: str) -> bool:
            try:
                path = f"{DIALECTS['responses'].path}/{quote(response_id, safe='')}"
                return (await self.get(url, path)).status_code == 200
            except httpx.HTTPError:
                return False

        answers = await asyncio.gather(*map(has, urls))
        return next((url for url, yes in zip(urls, answers, strict=True) if yes), None)

    async def is_dead(self, url: str) -> bool:
        """Whether an engine says of itself that it is, or does not listen any more."""
        try:
            return (await self.get(url, "/health")).status_code >= 500
        except httpx.TimeoutException:
            return False
        except httpx.HTTPError:
            return True

    def observe(self, leg: Leg, result: str, started: float) -> None:
        """Counts a leg that has ended."""
        self._metrics.leg_duration.labels(leg, result).observe(time.monotonic() - started)


class DecodeStream:
    """The decode leg's answer as it comes."""

    def __init__(
        self,
        http: EngineHttp,
        liveness: Liveness,
        url: str,
        response: httpx.Response,
        started: float,
        settings: GatewaySettings,
        dialect: Dialect,
    ) -> None:
        self._dialect = dialect
        self._http = http
        self._response = response
        self._started = started
        self._idle_s = settings.stream_idle_timeout_s
        self._whole_s = settings.decode_timeout_s
        self._result = "cancelled"
        self._chunks = response.aiter_raw()
        self._watching = contextlib.ExitStack()
        self._watch = self._watching.enter_context(liveness.watch(url))
        self._first: bytes | None = None
        self._any = False
        self.url = url
        self.status = response.status_code
        self.headers = response.headers

    @property
    def is_event_stream(self) -> bool:
        """Whether it is a stream of events, whatever the request had asked for."""
        content_type: str = self.headers.get("content-type", "")
        return content_type.startswith("text/event-stream")

    @property
    def failed(self) -> bool:
        """Whether it begins with an error of the engine's."""
        if self.status >= 500:
            return True
        return self._first is not None and self._dialect.error.search(self._first) is not None

    async def wait_for_first_token(self) -> None:
        """Returns when tokens have begun, so that until then another engine can be asked.

        vLLM sends a stream's headers at once, and its first event with the first token, but for
        events that say no more than the headers. Raises LegFailed.
        """
        try:
            async with asyncio.timeout(self._whole_s) as self._watch.scope:
                self._first = await self._until_begun()
        except TimeoutError as error:
            failed = _timed_out(self.url, self._watch, "no first token")
            self._result = failed.failure
            raise failed from error

    async def _until_begun(self) -> bytes | None:
        """All that comes until tokens have begun, or until the stream's end. However small its
        pieces and however long its lines are, its bytes are not looked at again with each piece."""
        said = bytearray()
        line = 0
        while (chunk := await self._next()) is not None:
            seen = len(said)
            said += chunk
            newline = said.rfind(b"\n", seen)
            # What a line is stands at its start. Once that was looked at, its end is waited for.
            due = newline >= 0 or seen - line < _LINE_START_BYTES
            if due and self._has_begun(said, line):
                break
            if newline >= 0:
                line = newline + 1
            if len(said) > limits.EVENT_BYTES:
                self._result = "broke_off"
                cause = f"more than {limits.EVENT_BYTES} bytes before the first token"
                raise LegFailed("broke_off", self.url, cause)
        return bytes(said) or None

    def _has_begun(self, events: bytearray, start: int) -> bool:
        """Whether tokens have begun in the lines from `start` on."""
        dialect = self._dialect
        marks = (dialect.begun, dialect.error, dialect.end)
        return any(mark.search(events, start) for mark in marks)

    async def next_chunk(self) -> bytes | None:
        """The next bytes as they came, None at the regular end. Raises LegFailed."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            async with asyncio.timeout(self._idle_s) as self._watch.scope:
                return await self._next()
        except TimeoutError as error:
            failed = _timed_out(self.url, self._watch, "silence in the stream")
            self._result = failed.failure
            raise failed from error

    async def read_all(self) -> bytes:
        """The whole body. Raises LegFailed."""
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._whole_s) as self._watch.scope:
                while (chunk := await self._next()) is not None:
                    chunks.append(chunk)
        except TimeoutError as error:
            failed = _timed_out(self.url, self._watch, "the whole answer")
            self._result = failed.failure
            raise failed from error
        return b"".join(chunks)

    async def close(self) -> None:
        """Gives the connection back if the answer was read to its end, else closes it."""
        self._watching.close()
        try:
            await self._response.aclose()
        finally:
            self._http.observe("decode", self._result, self._started)

    async def _next(self) -> bytes | None:
        try:
            chunk = await anext(self._chunks, None)
        except httpx.TimeoutException as error:
            self._result = "timeout"
            raise LegFailed("timeout", self.url, type(error).__name__) from error
        except httpx.HTTPError as error:
            self._result = "broke_off" if self._any else "dropped"
            raise LegFailed(
                "broke_off" if self._any else "dropped", self.url, _cause(error)
            ) from error
        if chunk is None:
            self._result = _result(self.status)
        else:
            self._any = True
            self._watch.heard()
        return chunk


def _with_own(client_headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """As bytes, as they came: httpx would refuse a text that is not ASCII."""
    forwarded = {
        name.encode(): client_headers[name].encode("latin-1")
        for name in _FORWARDED
        if name in client_headers
    }
    return {**forwarded, **_OWN_HEADERS}


def _timed_out(url: str, watch: Watch | None, what: str) -> LegFailed:
    """A leg whose time is over: its own, or its engine's."""
    if watch is not None and watch.hung:
        return LegFailed("hung", url, f"{what}; it does not answer /health either")
    return LegFailed("timeout", url, what)


def _failed(url: str, error: httpx.HTTPError) -> LegFailed:
    """What happened before the answer's headers."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
        return LegFailed("unreachable", url, _cause(error))
    if isinstance(error, httpx.TimeoutException):
        return LegFailed("timeout", url, _cause(error))
    return LegFailed("dropped", url, _cause(error))


def _cause(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _result(status: int) -> str:
    if status < 400:
        return "ok"
    return "client_error" if status < 500 else "error"
