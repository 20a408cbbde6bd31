"""One request from its placement to its last byte."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from kvshuttle.gateway import errors, limits, report
from kvshuttle.gateway.answer import ClientAnswer, ClientStalled
from kvshuttle.gateway.body import without_kv_params
from kvshuttle.gateway.dialects.responses import response_id
from kvshuttle.gateway.legs import LegFailed
from kvshuttle.gateway.placing import OUTCOMES, Placing, PrefillRefused
from kvshuttle.gateway.sse import EventPassthrough, EventTooLongError
from kvshuttle.gateway.stored import StoredResponse
from kvshuttle.gateway.usage import with_true_usage
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Send

    from kvshuttle.gateway.legs import DecodeStream
    from kvshuttle.gateway.request import Services, TurnRequest

__all__ = ["STATUS_CLIENT_GONE", "TurnRun"]

log = structlog.get_logger(__name__)

# A status that no client sees, for the log and the counter.
STATUS_CLIENT_GONE = 499
# How long a client may take to read that its answer is cut off, seconds.
_LAST_WORDS_S = 1.0


class TurnRun:
    """Serves one request. `run` is called once; cancelling it is how a client's leaving is told."""

    def __init__(self, services: Services, request: TurnRequest, send: Send) -> None:
        self.services = services
        self.request = request
        # Set by the caller before it cancels because the client left.
        self.client_gone = False
        self._placing = Placing(services, request)
        self._events: EventPassthrough | None = None
        # What the answer says is of use only where the conversation is known by it.
        self._listener = (
            request.body.dialect.listener(request.body.fields)
            if request.identity.place is not None
            else None
        )
        self._answer = ClientAnswer(
            send,
            request.body.dialect,
            services.settings.client_stall_timeout_s,
            lambda: report.headers(request, self._placing),
        )

    @property
    def status(self) -> int:
        """The answer's, once it has begun; 499 for a client that left."""
        return self._answer.status

    @property
    def answered(self) -> bool:
        """True once all of the answer was handed over: from then on a disconnect means nothing."""
        return self._answer.ended

    async def run(self) -> None:
        """Answers the request, whatever happens, and ends its turn."""
        outcome = session.TURN_OUTCOME_FAILED
        try:
            stream = await self._placing.open()
            try:
                outcome = await self._relay(stream)
            finally:
                await stream.close()
                self._placing.trace.leg_ended()
        except PrefillRefused as refused:
            answer = refused.answer
            await self._whole(answer.status, answer.headers, answer.body)
        except errors.ApiError as error:
            await self._answer.error(error)
        except asyncio.CancelledError:
            if self.client_gone:
                outcome = self._cancelled()
            else:
                await self._cut_off()
            raise
        except ClientStalled:
            # Returning without a whole answer makes the server close the connection.
            outcome = self._cancelled()
        except Exception:
            log.exception("request_failed", session=self.request.identity.session_id)
            await self._answer.error(errors.internal_error())
        finally:
            self._log(outcome)
            await self._placing.close(outcome)

    async def _cut_off(self) -> None:
        """Says that the gateway stops, to a client whose answer is not whole."""
        answer, error = self._answer, errors.stopping()
        if answer.ended:
            return
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if not answer.started:
                    await answer.error(error)
                elif self._events is not None:
                    event = self.request.body.dialect.error_event(error, self._events.last)
                    await answer.body(event, more=False)
        except (TimeoutError, ClientStalled):
            log.warning("client_not_told", session=self.request.identity.session_id)

    def _cancelled(self) -> session.TurnOutcome.ValueType:
        self._answer.status = STATUS_CLIENT_GONE
        self.services.metrics.cancels.labels(self._placing.phase).inc()
        return session.TURN_OUTCOME_CANCELLED

    async def _relay(self, stream: DecodeStream) -> session.TurnOutcome.ValueType:
        self._placing.phase = "stream"
        if stream.is_event_stream:
            return await self._relay_events(stream)
        try:
            body = await stream.read_all()
        except LegFailed as failed:
            raise errors.engine_broke_off(504 if failed.failure == "timeout" else 502) from failed
        if stream.status == 200:
            self._note_response(body, stream.url)
            body, self._placing.cost.decode = with_true_usage(
                body, self.request.body.dialect, self._placing.found()
            )
            self._note_first_token(stream=False)
            if self._listener is not None:
                self._listener.whole(body)
                self._note_answer()
        await self._whole(stream.status, stream.headers, body)
        if stream.status < 400:
            return session.TURN_OUTCOME_COMPLETED
        return session.TURN_OUTCOME_FAILED

    async def _whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        body = without_kv_params(body)
        if status >= 400:
            body = self.request.body.dialect.engine_error(status, body)
        await self._answer.whole(status, headers, body)

    async def _relay_events(self, stream: DecodeStream) -> session.TurnOutcome.ValueType:
        dialect = self.request.body.dialect
        events = self._events = EventPassthrough(dialect, self._placing.found)
        await self._answer.start(stream.status, stream.headers)
        broken: LegFailed | EventTooLongError | None = None
        error = errors.engine_broke_off()
        named = commented = False
        try:
            while (chunk := await stream.next_chunk()) is not None:
                if ready := events.feed(chunk):
                    if not named:
                        named = self._note_response(ready, stream.url)
                    self._hear(events, ready)
                    if events.ended and self.request.wants_comment and not commented:
                        self._placing.cost.decode = events.usage
                        ready, commented = (
                            report.last_comment(self.request, self._placing) + ready,
                            True,
                        )
                    await self._answer.body(ready, more=True, says_all=events.ended)
                    if events.saw_data and self._placing.cost.time_to_first_token_s is None:
                        self._note_first_token(stream=True)
        except LegFailed as failed:
            broken = failed
        except EventTooLongError as failed:
            broken, error = failed, errors.event_too_long(limits.EVENT_BYTES)
        self._placing.cost.decode = events.usage
        if broken is None or events.ended:
            rest = events.finish() if broken is None else b""
            if events.ended:
                if rest:
                    self._hear(events, rest)
                await self._answer.body(rest, more=False)
                if events.saw_error:
                    return session.TURN_OUTCOME_FAILED
                return session.TURN_OUTCOME_COMPLETED
            if rest:
                await self._answer.body(rest, more=True)
        log.warning(
            "stream_broke_off",
            cause=str(broken) if broken is not None else "ended without an end",
            tenant=self.request.tenant,
            session=self.request.identity.session_id,
            turn=self._placing.turn.turn if self._placing.turn is not None else None,
        )
        await self._answer.body(dialect.error_event(error, events.last), more=False)
        return session.TURN_OUTCOME_FAILED

    def _hear(self, events: EventPassthrough, ready: bytes) -> None:
        if self._listener is not None:
            self._listener.events(ready)
            if events.ended and not events.saw_error:
                self._note_answer()

    def _note_answer(self) -> None:
        """Before its end goes out: the next turn may come with it."""
        place = self.request.identity.place
        if place is not None and self._listener is not None:
            place.answered(self._listener.said())

    def _note_response(self, answer: bytes, url: str) -> bool:
        """Remembers where a response is kept, by its first bytes; true if nothing is left to do."""
        request = self.request
        if request.body.route != "responses" or request.body.fields.get("store") is False:
            return True
        name = response_id(answer)
        if name is not None:
            stored = StoredResponse(request.identity.session_id, url)
            self.services.stored.note(request.tenant, name, stored)
        return name is not None

    def _note_first_token(self, *, stream: bool) -> None:
        elapsed = time.monotonic() - self.request.started
        label = "true" if stream else "false"
        if stream:
            # Else it is what the whole answer took, which is no time to a first token: nothing that
            # is predicted or compared is about that.
            self._placing.cost.time_to_first_token_s = elapsed
        self.services.metrics.time_to_first_token.labels(label).observe(elapsed)

    def _log(self, outcome: session.TurnOutcome.ValueType) -> None:
        request = self.request
        log.info(
            "request",
            route=request.body.route,
            tenant=request.tenant,
            session=request.identity.session_id,
            session_source=request.identity.source,
            turn=self._placing.turn.turn if self._placing.turn is not None else None,
            mode=self._placing.mode,
            status=self.status,
            outcome=OUTCOMES[outcome],
            phase=self._placing.phase,
            fallbacks=self._placing.fallbacks,
            ttft_ms=_ms(self._placing.cost.time_to_first_token_s),
            duration_ms=_ms(time.monotonic() - request.started),
            **self._placing.trace.trace_id,
        )
        self._placing.trace.end(
            self.status,
            OUTCOMES[outcome],
            mode=self._placing.mode,
            turn=self._placing.turn.turn if self._placing.turn is not None else 0,
            fallbacks=",".join(self._placing.fallbacks),
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
