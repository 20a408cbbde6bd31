"""One request from its placement to its last byte."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import structlog

from kvshuttle.gateway import errors
from kvshuttle.gateway.body import (
    estimate_prompt_tokens,
    is_disaggregable,
    leg_body,
    without_kv_params,
)
from kvshuttle.gateway.control import PlacementFailedError
from kvshuttle.gateway.legs import LegFailed
from kvshuttle.gateway.metrics import reason_label
from kvshuttle.gateway.sse import EventPassthrough, error_event, usage_of
from kvshuttle.gateway.together import BothLegs, PrefillFailed
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Send

    from kvshuttle.gateway.body import RequestBody
    from kvshuttle.gateway.control import BegunTurn, ControlPlane
    from kvshuttle.gateway.engines import EngineDirectory
    from kvshuttle.gateway.identity import Identity
    from kvshuttle.gateway.legs import DecodeStream, EngineHttp, PrefillAnswer
    from kvshuttle.gateway.metrics import Metrics
    from kvshuttle.gateway.settings import GatewaySettings
    from kvshuttle.v1 import types_pb2 as types

log = structlog.get_logger(__name__)

# A turn whose decode engine cannot be reached is placed once more, without that engine.
_PLACED_TRIES = 2
# After that, and without a control plane, so many engines are tried.
_UNPLACED_TRIES = 3
# A request that ends two engines without a word is not given to a third.
_MAX_DROPPED = 2

_PREFILL_FAILURES = {"timeout": "PREFILL_TIMEOUT", "hung": "PREFILL_HUNG"}

# Statuses that no client sees, for the log and the counter.
STATUS_CLIENT_GONE = 499

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "date",
        "server",
    }
)

_MODES: dict[int, str] = {
    session.RETURN_MODE_LAZY: "lazy",
    session.RETURN_MODE_EAGER: "eager",
    session.RETURN_MODE_DIRECT: "direct",
}

_OUTCOMES: dict[int, str] = {
    session.TURN_OUTCOME_COMPLETED: "completed",
    session.TURN_OUTCOME_CANCELLED: "cancelled",
    session.TURN_OUTCOME_FAILED: "failed",
}

Phase = Literal["begin", "prefill", "decode", "stream"]


@dataclass(frozen=True, slots=True)
class Services:
    """What all requests share."""

    settings: GatewaySettings
    metrics: Metrics
    engines: EngineDirectory
    control: ControlPlane
    http: EngineHttp


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a client asked for. `started` is the monotonic time of the whole request's arrival."""

    tenant: str
    identity: Identity
    body: RequestBody
    headers: Mapping[str, str]
    return_policy: session.ReturnPolicy.ValueType
    started: float
    # Told at the turn's end: what is expected of the time after it counts from there.
    hints: types.SessionHints | None = None


class _PrefillRefused(Exception):  # noqa: N818 - an answer for the client, not a defect
    """The prefill engine found the request wrong: its answer is the client's."""

    def __init__(self, answer: PrefillAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class _ClientStalled(Exception):  # noqa: N818
    """The client reads nothing any more."""


@dataclass(slots=True)
class _Usage:
    """What the engines said the turn cost."""

    # The prefill engine's, if there was a prefill leg: only it knows what the prompt really found.
    prefill: dict[str, Any] | None = None
    decode: dict[str, Any] | None = None
    time_to_first_token_s: float | None = None

    def message(self) -> session.TurnUsage:
        usage = session.TurnUsage()
        prompt = self.prefill or self.decode or {}
        usage.prompt_tokens = _count(prompt.get("prompt_tokens"))
        details = prompt.get("prompt_tokens_details")
        if isinstance(details, dict):
            usage.cached_tokens = _count(details.get("cached_tokens"))
        usage.output_tokens = _count((self.decode or {}).get("completion_tokens"))
        if self.time_to_first_token_s is not None:
            usage.time_to_first_token.FromNanoseconds(int(self.time_to_first_token_s * 1e9))
        return usage


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


@dataclass(slots=True)
class TurnRun:
    """Serves one request. `run` is called once; cancelling it is how a client's leaving is told."""

    services: Services
    request: TurnRequest
    send: Send
    phase: Phase = "begin"
    # Set by the caller before it cancels because the client left.
    client_gone: bool = False
    # True once the last byte was handed over: from then on a disconnect means nothing.
    answered: bool = False
    status: int = 0
    fallbacks: list[str] = field(default_factory=list)
    _begun: BegunTurn | None = None
    _turn: session.Turn | None = None
    _started_response: bool = False
    _usage: _Usage = field(default_factory=_Usage)
    _excluded: list[str] = field(default_factory=list)
    _failed_urls: list[str] = field(default_factory=list)
    _dropped: int = 0
    _both: BothLegs | None = None

    async def run(self) -> None:
        """Answers the request, whatever happens, and ends its turn."""
        outcome = session.TURN_OUTCOME_FAILED
        try:
            stream = await self._open()
            try:
                outcome = await self._relay(stream)
            finally:
                await stream.close()
        except _PrefillRefused as refused:
            answer = refused.answer
            await self._respond(answer.status, answer.headers, without_kv_params(answer.body))
        except errors.ApiError as error:
            await self._respond_error(error)
        except asyncio.CancelledError:
            if self.client_gone:
                outcome = self._cancelled()
            raise
        except _ClientStalled:
            # Returning without a whole answer makes the server close the connection.
            outcome = self._cancelled()
        except Exception:
            log.exception("request_failed", session=self.request.identity.session_id)
            await self._respond_error(errors.internal_error())
        finally:
            # First the end of the turn: what still runs of it is stopped under a turn that is over.
            self._close(outcome)
            await self._end_both()

    def _cancelled(self) -> session.TurnOutcome.ValueType:
        self.status = STATUS_CLIENT_GONE
        self.services.metrics.cancels.labels(self.phase).inc()
        return session.TURN_OUTCOME_CANCELLED

    # Placement and legs

    async def _open(self) -> DecodeStream:
        """The decode leg's answer, from wherever it can be had. Raises ApiError."""
        for _ in range(_PLACED_TRIES):
            if not await self._begin():
                break
            stream = await self._placed()
            if stream is not None:
                return stream
            # The next try is a turn of its own: the engines know a token once only.
            self._end_turn(session.TURN_OUTCOME_FAILED)
        return await self._unplaced()

    async def _begin(self) -> bool:
        self.phase = "begin"
        request = self.request
        try:
            begun = await self.services.control.begin(
                request.tenant,
                request.identity.session_id,
                return_policy=request.return_policy,
                prompt_tokens_estimate=estimate_prompt_tokens(request.body),
                exclude_worker_ids=self._excluded,
            )
        except PlacementFailedError as failed:
            self._fall_back(failed.reason)
            return False
        self._begun = begun
        self._turn = begun.response.turn
        return True

    async def _placed(self) -> DecodeStream | None:
        """Runs the legs where the control plane put them; None if decode cannot be reached."""
        assert self._begun is not None
        response = self._begun.response
        turn = response.turn
        token: str | None = response.turn_token
        if not is_disaggregable(self.request.body):
            token = None
        elif turn.HasField("prefill") and turn.prefill.url:
            if turn.plan.forward_mode == types.FORWARD_MODE_PUSH:
                return await self._placed_together(turn, response.turn_token)
            await self._prefill(turn.prefill, response.turn_token)
        url = turn.decode.url.rstrip("/")
        self.phase = "decode"
        try:
            return await self._decode(url, token)
        except LegFailed as failed:
            self._decode_failed(failed, turn.decode.worker.worker_id)
            return None

    async def _prefill(self, placement: session.Placement, token: str) -> None:
        """Runs the prefill leg. Whatever it lacks, the decode leg computes."""
        self.phase = "prefill"
        request = self.request
        url = placement.url.rstrip("/")
        if url in self._failed_urls:
            return
        try:
            answer = await self.services.http.prefill(
                url,
                request.body.route,
                leg_body(request.body, "prefill", token),
                request.headers,
            )
        except LegFailed as failed:
            reason = _PREFILL_FAILURES.get(failed.failure, "PREFILL_UNREACHABLE")
            self._fall_back(reason, cause=str(failed))
            self._excluded.append(placement.worker.worker_id)
            self._failed_urls.append(url)
            return
        if 400 <= answer.status < 500:
            raise _PrefillRefused(answer)
        if answer.status != 200:
            self._fall_back("PREFILL_ERROR", cause=f"{url}: status {answer.status}")
            return
        self._usage.prefill = usage_of(answer.body)

    async def _placed_together(self, turn: session.Turn, token: str) -> DecodeStream | None:
        """Runs both legs at once; None if one of them failed, and another placement is to be
        tried: decode waits for what prefill will not write."""
        self.phase = "prefill"
        request = self.request
        url = turn.prefill.url.rstrip("/")
        if url in self._failed_urls:
            return None
        await self._end_both()
        both = self._both = BothLegs.start(
            self.services.http.prefill(
                url, request.body.route, leg_body(request.body, "prefill", token), request.headers
            ),
            self._decode(turn.decode.url.rstrip("/"), token),
        )
        try:
            await both.prefilled()
            self.phase = "decode"
            return await both.answered()
        except PrefillFailed as failed:
            await self._end_both()
            answer = failed.answer
            if answer is not None and 400 <= answer.status < 500:
                raise _PrefillRefused(answer) from failed
            reason = "PREFILL_ERROR"
            if failed.failed is not None:
                reason = _PREFILL_FAILURES.get(failed.failed.failure, "PREFILL_UNREACHABLE")
                self._failed_urls.append(url)
            self._fall_back(reason, cause=str(failed.failed or f"{url}: status {failed}"))
            self._excluded.append(turn.prefill.worker.worker_id)
            return None
        except LegFailed as failed:
            await self._end_both()
            self._decode_failed(failed, turn.decode.worker.worker_id)
            return None

    async def _end_both(self) -> None:
        both, self._both = self._both, None
        if both is not None:
            await both.close()

    async def _unplaced(self) -> DecodeStream:
        """The request as a plain one, to an engine that is known from before."""
        self.phase = "decode"
        request = self.request
        candidates = self.services.engines.candidates(
            request.tenant, request.identity.session_id, self._failed_urls
        )
        for engine in candidates[:_UNPLACED_TRIES]:
            try:
                stream = await self._decode(engine.url, None)
            except LegFailed as failed:
                self._decode_failed(failed, engine.worker_id)
            else:
                self.services.engines.learn_session(
                    request.tenant, request.identity.session_id, engine.url
                )
                return stream
        if not self._failed_urls:
            raise errors.no_engine_known()
        raise errors.engines_unreachable(len(set(self._failed_urls)))

    async def _decode(self, url: str, token: str | None) -> DecodeStream:
        request = self.request
        stream = await self.services.http.open_decode(
            url, request.body.route, leg_body(request.body, "decode", token), request.headers
        )
        if stream.is_event_stream:
            try:
                await stream.wait_for_first_chunk()
            except BaseException:
                await stream.close()
                raise
        if stream.failed:
            try:
                dead = await self.services.http.is_dead(url)
            except BaseException:
                await stream.close()
                raise
            if dead:
                # Its server outlives its core by a moment, and has an error for everyone.
                await stream.close()
                raise LegFailed("dropped", url, f"status {stream.status} of a dead engine")
        return stream

    def _decode_failed(self, failed: LegFailed, worker_id: str) -> None:
        """Notes an engine that did not answer. Raises ApiError if no other may be asked."""
        if failed.failure == "timeout":
            raise errors.engine_broke_off(504) from failed
        if failed.failure in ("dropped", "hung"):
            self._dropped += 1
            if self._dropped >= _MAX_DROPPED:
                raise errors.engine_broke_off() from failed
        reason = "DECODE_HUNG" if failed.failure == "hung" else "DECODE_UNREACHABLE"
        self._fall_back(reason, cause=str(failed))
        self._failed_urls.append(failed.url)
        if worker_id:
            self._excluded.append(worker_id)

    def _fall_back(self, reason: str, cause: str = "") -> None:
        self.fallbacks.append(reason)
        self.services.metrics.fallbacks.labels(reason).inc()
        request = self.request
        log.warning(
            "fallback",
            reason=reason,
            cause=cause,
            tenant=request.tenant,
            session=request.identity.session_id,
            turn=self._turn.turn if self._turn is not None else None,
        )

    # The answer

    async def _relay(self, stream: DecodeStream) -> session.TurnOutcome.ValueType:
        self.phase = "stream"
        if stream.is_event_stream:
            return await self._relay_events(stream)
        try:
            body = await stream.read_all()
        except LegFailed as failed:
            raise errors.engine_broke_off(504 if failed.failure == "timeout" else 502) from failed
        if stream.status == 200:
            self._usage.decode = usage_of(body)
            self._note_first_token(stream=False)
        await self._respond(stream.status, stream.headers, without_kv_params(body))
        if stream.status < 400:
            return session.TURN_OUTCOME_COMPLETED
        return session.TURN_OUTCOME_FAILED

    async def _relay_events(self, stream: DecodeStream) -> session.TurnOutcome.ValueType:
        events = EventPassthrough()
        await self._start_response(stream.status, stream.headers)
        broken: LegFailed | None = None
        try:
            while (chunk := await stream.next_chunk()) is not None:
                if ready := events.feed(chunk):
                    await self._send_body(ready, more=True)
                    if events.saw_data and self._usage.time_to_first_token_s is None:
                        self._note_first_token(stream=True)
        except LegFailed as failed:
            broken = failed
        self._usage.decode = events.usage
        if broken is None:
            rest = events.finish()
            if events.saw_done:
                await self._send_body(rest, more=False)
                if events.saw_error:
                    return session.TURN_OUTCOME_FAILED
                return session.TURN_OUTCOME_COMPLETED
            if rest:
                await self._send_body(rest, more=True)
        log.warning(
            "stream_broke_off",
            cause=str(broken) if broken is not None else "ended without [DONE]",
            tenant=self.request.tenant,
            session=self.request.identity.session_id,
            turn=self._turn.turn if self._turn is not None else None,
        )
        await self._send_body(error_event(errors.engine_broke_off().body()), more=False)
        return session.TURN_OUTCOME_FAILED

    def _note_first_token(self, *, stream: bool) -> None:
        elapsed = time.monotonic() - self.request.started
        self._usage.time_to_first_token_s = elapsed
        label = "true" if stream else "false"
        self.services.metrics.time_to_first_token.labels(label).observe(elapsed)

    async def _respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self._start_response(status, headers, length=len(body))
        await self._send_body(body, more=False)

    async def _respond_error(self, error: errors.ApiError) -> None:
        if self._started_response:
            # A defect in the middle of a stream: the connection's end without the last chunk tells
            # the client that the answer is not whole.
            raise error
        headers = {"content-type": "application/json", **error.headers}
        await self._respond(error.status, headers, error.body())

    async def _start_response(
        self, status: int, headers: Mapping[str, str], length: int | None = None
    ) -> None:
        self.status = status
        self._started_response = True
        raw = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in headers.items()
            if name.lower() not in _HOP_BY_HOP
        ]
        if length is not None:
            raw.append((b"content-length", str(length).encode()))
        raw.extend(
            (name.encode(), value.encode("utf-8")) for name, value in self._own_headers().items()
        )
        await self._send_message({"type": "http.response.start", "status": status, "headers": raw})

    def _own_headers(self) -> dict[str, str]:
        """What happened, for the client to see."""
        headers = {"x-kvshuttle-session": self.request.identity.session_id}
        if self._turn is not None:
            headers["x-kvshuttle-turn"] = str(self._turn.turn)
            headers["x-kvshuttle-mode"] = self._mode()
            headers["x-kvshuttle-reason"] = reason_label(self._turn.plan.reason)
        else:
            headers["x-kvshuttle-mode"] = "none"
            headers["x-kvshuttle-reason"] = self.fallbacks[-1] if self.fallbacks else ""
        if self.fallbacks:
            headers["x-kvshuttle-fallback"] = ",".join(dict.fromkeys(self.fallbacks))
        return headers

    def _mode(self) -> str:
        if self._turn is None:
            return "none"
        return _MODES.get(self._turn.plan.return_mode, "none")

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        if not more:
            self.answered = True
        await self._send_message({"type": "http.response.body", "body": body, "more_body": more})

    async def _send_message(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.services.settings.client_stall_timeout_s):
                await self.send(message)
        except TimeoutError as error:
            raise _ClientStalled from error

    # The end

    def _end_turn(self, outcome: session.TurnOutcome.ValueType) -> None:
        if self._begun is None:
            return
        answer = self._both.prefill_answer() if self._both is not None else None
        if answer is not None:
            self._usage.prefill = usage_of(answer.body)
        self.services.metrics.turns.labels(_OUTCOMES[outcome], self._mode()).inc()
        usage = self._usage.message()
        self.services.metrics.used(usage)
        self.services.control.end(self._begun, outcome, usage, hints=self.request.hints)
        self._begun = None
        self._turn = None

    def _close(self, outcome: session.TurnOutcome.ValueType) -> None:
        request = self.request
        log.info(
            "request",
            route=request.body.route,
            tenant=request.tenant,
            session=request.identity.session_id,
            session_source=request.identity.source,
            turn=self._turn.turn if self._turn is not None else None,
            mode=self._mode(),
            status=self.status,
            outcome=_OUTCOMES[outcome],
            phase=self.phase,
            fallbacks=self.fallbacks,
            ttft_ms=_ms(self._usage.time_to_first_token_s),
            duration_ms=_ms(time.monotonic() - request.started),
        )
        if self._begun is not None:
            self._end_turn(outcome)
        else:
            self.services.metrics.turns.labels(_OUTCOMES[outcome], "unplaced").inc()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
