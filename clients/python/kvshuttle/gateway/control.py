"""The gateway's side of the control plane: turns are begun in time or not at all, and ended surely.

A request never waits for the control plane longer than `begin_turn_timeout_s`. The call itself goes
on for a while after that, and after a client has gone: if its answer comes late, the turn that it
began is ended too, and no lease waits for a request that nobody sends.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Literal

import structlog

from kvshuttle.client import (
    AbortedError,
    AsyncClient,
    DeadlineExceededError,
    KVShuttleError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    new_request_id,
)
from kvshuttle.gateway.metrics import reason_label
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.gateway.engines import EngineDirectory
    from kvshuttle.gateway.metrics import Metrics
    from kvshuttle.gateway.settings import GatewaySettings
    from kvshuttle.v1 import types_pb2 as types

log = structlog.get_logger(__name__)

CONTROL_PLANE_DOWN = "CONTROL_PLANE_DOWN"
CONTROL_PLANE_SLOW = "CONTROL_PLANE_SLOW"
CONTROL_PLANE_ERROR = "CONTROL_PLANE_ERROR"

# After so many answers in a row that came too late, requests go without asking for a while: a
# control plane that hangs must not cost every request its whole timeout.
_SLOW_STREAK = 3
_SLOW_PAUSE_S = 2.0

# Pauses between tries of EndTurn, seconds: doubled from the first up to the last.
_BACKOFF_FIRST_S = 0.1
_BACKOFF_LAST_S = 5.0

_RETRIABLE = (UnavailableError, DeadlineExceededError, AbortedError, ResourceExhaustedError)

# Without a reason these are no word of the control plane's: a connection that broke, or was so busy
# that gRPC gave the call up.
_BROKEN = ("CANCELLED", "INTERNAL", "UNKNOWN")

State = Literal["unknown", "ok", "down"]


class PlacementFailedError(Exception):
    """There is no placement for this turn; `reason` is the one to count."""

    def __init__(self, reason: str, over_budget: ResourceExhaustedError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        # The control plane's own words, where its budget has no room for this turn.
        self.over_budget = over_budget


class BegunTurn:
    """A turn that was asked for. Whoever has one must pass it to `ControlPlane.end` once."""

    def __init__(
        self, tenant: str, session_id: str, call: asyncio.Task[session.BeginTurnResponse]
    ) -> None:
        self.tenant = tenant
        self.session_id = session_id
        self.call = call

    @property
    def response(self) -> session.BeginTurnResponse:
        """The answer; only for a turn that `begin` returned."""
        return self.call.result()


def _may_be_repeated(error: KVShuttleError) -> bool:
    return isinstance(error, _RETRIABLE) or (not error.reason and error.code.name in _BROKEN)


class ControlPlane:
    """Begins and ends turns, and keeps the directory of engines fresh."""

    def __init__(
        self,
        settings: GatewaySettings,
        metrics: Metrics,
        engines: EngineDirectory,
        client: AsyncClient,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._engines = engines
        self._client = client
        self._ends: set[asyncio.Task[None]] = set()
        self._refresher: asyncio.Task[None] | None = None
        self._slow_streak = 0
        self._slow_until = 0.0
        self._state: State = "unknown"
        self._last_reason = ""
        self._answered_at: float | None = None

    @property
    def client(self) -> AsyncClient:
        """For what is no part of a turn."""
        return self._client

    def start(self) -> None:
        """Starts reading the list of workers, now and then at its interval."""
        self._refresher = asyncio.create_task(self._refresh_forever(), name="refresh-workers")

    async def close(self) -> None:
        """Waits for the EndTurns under way, at most `flush_timeout_s`, and closes the client."""
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)
        if self._ends:
            _, late = await asyncio.wait(self._ends, timeout=self._settings.flush_timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            if late:
                self._metrics.end_turn_failures.inc(len(late))
                log.warning("end_turns_dropped_at_stop", turns=len(late))
        await self._client.close()

    def describe(self) -> dict[str, object]:
        """What is known of the control plane, for /health."""
        age = None if self._answered_at is None else time.monotonic() - self._answered_at
        return {
            "target": self._settings.control_plane,
            "state": self._state,
            "reason": self._last_reason,
            "seconds_since_answer": None if age is None else round(age, 3),
        }

    @property
    def state(self) -> State:
        """Whether the last call was answered."""
        return self._state

    async def begin(
        self,
        tenant: str,
        session_id: str,
        *,
        return_policy: session.ReturnPolicy.ValueType,
        prompt_tokens_estimate: int,
        exclude_worker_ids: Sequence[str],
        traceparent: str = "",
    ) -> BegunTurn:
        """Places a turn. Raises PlacementFailedError, in time whatever the control plane does."""
        if time.monotonic() < self._slow_until:
            raise PlacementFailedError(CONTROL_PLANE_SLOW)
        begun = BegunTurn(
            tenant,
            session_id,
            asyncio.create_task(
                self._client.begin_turn(
                    session_id,
                    request_id=new_request_id(),
                    prompt_tokens_estimate=prompt_tokens_estimate,
                    return_policy=return_policy,
                    exclude_worker_ids=exclude_worker_ids,
                    traceparent=traceparent,
                    tenant=tenant,
                    timeout=max(
                        self._settings.begin_turn_settle_s, self._settings.begin_turn_timeout_s
                    ),
                ),
                name="begin-turn",
            ),
        )
        started = time.monotonic()
        try:
            done, _ = await asyncio.wait({begun.call}, timeout=self._settings.begin_turn_timeout_s)
        except asyncio.CancelledError:
            self.end(begun, session.TURN_OUTCOME_CANCELLED, None)
            raise
        self._metrics.begin_turn_duration.observe(time.monotonic() - started)
        if not done:
            self._slow_streak += 1
            if self._slow_streak >= _SLOW_STREAK:
                self._slow_until = time.monotonic() + _SLOW_PAUSE_S
            self._note_failure(CONTROL_PLANE_SLOW)
            self.end(begun, session.TURN_OUTCOME_FAILED, None)
            raise PlacementFailedError(CONTROL_PLANE_SLOW)
        self._slow_streak = 0
        try:
            response = begun.response
        except KVShuttleError as error:
            reason = self._note_error(error)
            exhausted = error if isinstance(error, ResourceExhaustedError) else None
            raise PlacementFailedError(reason, exhausted) from error
        self._note_answer()
        if not response.turn.decode.url:
            self.end(begun, session.TURN_OUTCOME_FAILED, None)
            raise PlacementFailedError("NO_DECODE_URL")
        self._engines.learn_placements(tenant, session_id, response.turn)
        return begun

    def end(
        self,
        begun: BegunTurn,
        outcome: session.TurnOutcome.ValueType,
        usage: session.TurnUsage | None,
        *,
        hints: types.SessionHints | None = None,
    ) -> None:
        """Ends a turn in the background, with retries."""
        task = asyncio.create_task(self._end(begun, outcome, usage, hints), name="end-turn")
        self._ends.add(task)
        self._metrics.end_turns_pending.set(len(self._ends))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ends.discard(task)
        self._metrics.end_turns_pending.set(len(self._ends))

    async def _end(
        self,
        begun: BegunTurn,
        outcome: session.TurnOutcome.ValueType,
        usage: session.TurnUsage | None,
        hints: types.SessionHints | None,
    ) -> None:
        try:
            answer = await begun.call
        except KVShuttleError:
            # No turn that this gateway knows of. If it was begun all the same, the control plane
            # gives it up by its own timer.
            return
        turn = answer.turn.turn
        request_id = new_request_id()
        pause_s = _BACKOFF_FIRST_S
        bound = log.bind(tenant=begun.tenant, session=begun.session_id, turn=turn)
        for attempt in range(1, self._settings.end_turn_attempts + 1):
            try:
                await self._client.end_turn(
                    begun.session_id,
                    turn,
                    outcome,
                    turn_token=answer.turn_token,
                    usage=usage,
                    hints=hints,
                    request_id=request_id,
                    tenant=begun.tenant,
                    timeout=self._settings.end_turn_timeout_s,
                )
            except KVShuttleError as error:
                last = attempt == self._settings.end_turn_attempts
                if last or not _may_be_repeated(error):
                    self._metrics.end_turn_failures.inc()
                    bound.warning(
                        "end_turn_failed", code=error.code.name, reason=error.reason, tries=attempt
                    )
                    return
                wait_s = min(max(pause_s, error.retry_after_s or 0.0), _BACKOFF_LAST_S)
                # Jitter: a control plane that comes back is not met by all turns at once.
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311
                pause_s *= 2
            else:
                return

    async def _refresh_forever(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(self._settings.refresh_interval_s)

    async def _refresh(self) -> None:
        try:
            workers = [
                worker
                async for worker in self._client.list_workers(
                    timeout=self._settings.end_turn_timeout_s
                )
            ]
        except PermissionDeniedError:
            # The role of a gateway may not list workers; placements teach the same, later.
            self._note_answer()
        except KVShuttleError as error:
            self._note_error(error)
        else:
            self._note_answer()
            self._engines.learn_workers(workers)

    def _note_answer(self) -> None:
        if self._state == "down":
            log.info("control_plane_back", target=self._settings.control_plane)
        self._state = "ok"
        self._last_reason = ""
        self._answered_at = time.monotonic()
        self._metrics.control_plane_up.set(1)

    def _note_failure(self, reason: str) -> None:
        if self._state != "down":
            log.warning("control_plane_down", target=self._settings.control_plane, reason=reason)
        self._state = "down"
        self._last_reason = reason
        self._metrics.control_plane_up.set(0)

    def _note_error(self, error: KVShuttleError) -> str:
        """Counts an error as an answer or as silence; the reason to count for the request."""
        if isinstance(error, UnauthenticatedError):
            # It answers everyone so, whatever is asked: no turn will be placed until that changes.
            reason = reason_label(error.reason or "UNAUTHENTICATED")
            self._note_failure(reason)
            return reason
        if error.reason:
            self._note_answer()
            return reason_label(error.reason)
        if isinstance(error, UnavailableError):
            reason = CONTROL_PLANE_DOWN
        elif isinstance(error, DeadlineExceededError):
            reason = CONTROL_PLANE_SLOW
        else:
            # It answers, but not as it should: a wrong token, another version, a defect.
            reason = CONTROL_PLANE_ERROR
            log.warning("control_plane_error", code=error.code.name, message=error.message)
        self._note_failure(reason)
        return reason
