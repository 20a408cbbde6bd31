"""Where a request runs: its turn is placed, its legs are sent, and another engine is asked where
one does not answer; never once a byte of an answer has gone to the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import structlog

from kvshuttle.gateway import errors
from kvshuttle.gateway.body import estimate_prompt_tokens, is_disaggregable, leg_body
from kvshuttle.gateway.control import PlacementFailedError
from kvshuttle.gateway.legs import LegFailed
from kvshuttle.gateway.together import BothLegs, PrefillFailed
from kvshuttle.gateway.traces import RequestTrace
from kvshuttle.gateway.usage import TurnCost, usage_of
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from kvshuttle.client import ResourceExhaustedError
    from kvshuttle.gateway.control import BegunTurn
    from kvshuttle.gateway.dialects import Usage
    from kvshuttle.gateway.legs import DecodeStream, PrefillAnswer
    from kvshuttle.gateway.request import Services, TurnRequest

__all__ = ["OUTCOMES", "Phase", "Placing", "PrefillRefused"]

log = structlog.get_logger(__name__)

# A turn whose decode engine cannot be reached is placed once more, without that engine.
_PLACED_TRIES = 2
# After that, and without a control plane, so many engines are tried.
_UNPLACED_TRIES = 3
# A request that ends two engines without a word is not given to a third.
_MAX_DROPPED = 2

_PREFILL_FAILURES = {"timeout": "PREFILL_TIMEOUT", "hung": "PREFILL_HUNG"}

_MODES: dict[int, str] = {
    session.RETURN_MODE_LAZY: "lazy",
    session.RETURN_MODE_EAGER: "eager",
    session.RETURN_MODE_DIRECT: "direct",
}

OUTCOMES: dict[int, str] = {
    session.TURN_OUTCOME_COMPLETED: "completed",
    session.TURN_OUTCOME_CANCELLED: "cancelled",
    session.TURN_OUTCOME_FAILED: "failed",
}

# Why a request that goes on from a stored response has no turn.
STORED_RESPONSE = "STORED_RESPONSE"

Phase = Literal["begin", "prefill", "decode", "stream"]


class PrefillRefused(Exception):  # noqa: N818 - an answer for the client, not a defect
    """The prefill engine found the request wrong: its answer is the client's."""

    def __init__(self, answer: PrefillAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


@dataclass(slots=True)
class Placing:
    """The turns and legs of one request. `close` whatever happens."""

    services: Services
    request: TurnRequest
    phase: Phase = "begin"
    fallbacks: list[str] = field(default_factory=list)
    cost: TurnCost = field(default_factory=TurnCost)
    turn: session.Turn | None = None
    # Why there is no turn, if no turn was asked for.
    reason: str = ""
    _begun: BegunTurn | None = None
    _excluded: list[str] = field(default_factory=list)
    _failed_urls: list[str] = field(default_factory=list)
    _dropped: int = 0
    _both: BothLegs | None = None
    trace: RequestTrace = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.trace = RequestTrace(
            self.services.tracing,
            request.headers,
            route=request.body.route,
            tenant=request.tenant,
            session_id=request.identity.session_id,
        )

    async def open(self) -> DecodeStream:
        """The decode leg's answer, from wherever it can be had. Raises ApiError and
        PrefillRefused; the caller closes it."""
        if (previous := self.request.body.previous_response_id) is not None:
            return await self._where_stored(previous)
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
        self.cost.prefill = None
        request = self.request
        try:
            with self.trace.step("begin_turn") as step:
                begun = await self.services.control.begin(
                    request.tenant,
                    request.identity.session_id,
                    return_policy=request.return_policy,
                    prompt_tokens_estimate=estimate_prompt_tokens(request.body),
                    exclude_worker_ids=self._excluded,
                    traceparent=step.traceparent,
                )
        except PlacementFailedError as failed:
            if failed.over_budget is not None:
                self._note_over_budget(failed.reason, failed.over_budget)
            self._fall_back(failed.reason)
            return False
        self._begun = begun
        self.turn = begun.response.turn
        return True

    def _note_over_budget(self, reason: str, error: ResourceExhaustedError) -> None:
        """Raises a 429 ApiError where the operator wants no request without a turn."""
        metrics = self.services.metrics
        if self.services.settings.over_budget == "serve":
            metrics.over_budget.labels("served").inc()
            return
        metrics.over_budget.labels("refused").inc()
        metrics.refused.labels("OVER_BUDGET").inc()
        raise errors.over_budget(reason, error.message, error.retry_after_s or 1.0)

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
        url = placement.url.rstrip("/")
        if url in self._failed_urls:
            return
        try:
            answer = await self._prefill_leg(placement, token)
        except LegFailed as failed:
            reason = _PREFILL_FAILURES.get(failed.failure, "PREFILL_UNREACHABLE")
            self._fall_back(reason, cause=str(failed))
            self._excluded.append(placement.worker.worker_id)
            self._failed_urls.append(url)
            return
        if 400 <= answer.status < 500:
            raise PrefillRefused(answer)
        if answer.status != 200:
            self._fall_back("PREFILL_ERROR", cause=f"{url}: status {answer.status}")
            return
        self.cost.prefill = usage_of(answer.body, self.request.body.dialect)

    async def _prefill_leg(self, placement: session.Placement, token: str) -> PrefillAnswer:
        request = self.request
        with self.trace.step("prefill", worker_id=placement.worker.worker_id) as step:
            return await self.services.http.prefill(
                placement.url.rstrip("/"),
                request.body.route,
                leg_body(request.body, "prefill", token),
                step.headers(request.headers),
            )

    async def _placed_together(self, turn: session.Turn, token: str) -> DecodeStream | None:
        """Runs both legs at once; None if one of them failed, and another placement is to be
        tried: decode waits for what prefill will not write."""
        self.phase = "prefill"
        url = turn.prefill.url.rstrip("/")
        if url in self._failed_urls:
            return None
        await self._end_both()
        both = self._both = BothLegs.start(
            self._prefill_leg(turn.prefill, token),
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
                raise PrefillRefused(answer) from failed
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
        self.cost.prefill = None
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

    async def _where_stored(self, response_id: str) -> DecodeStream:
        """A request that goes on from a stored response can be served only where that is."""
        self.phase = "decode"
        url = await self.services.stored.holder(self.request.tenant, response_id)
        if url is None:
            raise errors.response_not_found(response_id)
        self.reason = STORED_RESPONSE
        try:
            return await self._decode(url, None)
        except LegFailed as failed:
            raise errors.engine_broke_off(504 if failed.failure == "timeout" else 502) from failed

    async def _decode(self, url: str, token: str | None) -> DecodeStream:
        request = self.request
        step = self.trace.decode(url=url)
        stream = await self.services.http.open_decode(
            url,
            request.body.route,
            leg_body(request.body, "decode", token),
            step.headers(request.headers),
        )
        if stream.is_event_stream:
            try:
                await stream.wait_for_first_token()
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
            turn=self.turn.turn if self.turn is not None else None,
            **self.trace.trace_id,
        )

    def found(self) -> Usage | None:
        """What the prefill leg said that the prompt cost, once it has; None without such a leg."""
        if self.cost.prefill is None and self._both is not None:
            answer = self._both.prefill_answer()
            if answer is not None:
                self.cost.prefill = usage_of(answer.body, self.request.body.dialect)
        return self.cost.prefill

    @property
    def mode(self) -> str:
        """How earlier KV was meant to reach prefill, in one word."""
        if self.turn is None:
            return "none"
        return _MODES.get(self.turn.plan.return_mode, "none")

    async def close(self, outcome: session.TurnOutcome.ValueType) -> None:
        """Ends the turn first: what still runs of it is stopped under a turn that is over."""
        if self._begun is not None:
            self._end_turn(outcome)
        else:
            self.services.metrics.turns.labels(OUTCOMES[outcome], "unplaced").inc()
        await self._end_both()

    def _end_turn(self, outcome: session.TurnOutcome.ValueType) -> None:
        if self._begun is None:
            return
        self.found()
        self.services.metrics.turns.labels(OUTCOMES[outcome], self.mode).inc()
        usage = self.cost.message()
        self.services.metrics.used(usage)
        self.services.control.end(self._begun, outcome, usage, hints=self.request.hints)
        self._begun = None
        self.turn = None
