"""Operations of SessionService, apart from how they are called: each is checked here, decided by
the registry, and answered here, whether it came as a call of its own or on a stream of turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from kvshuttle.controlplane.model.errors import InvalidFieldError, NotFoundError
from kvshuttle.controlplane.model.session import Usage
from kvshuttle.controlplane.model.terms import ReturnPolicy, SessionKey, TurnOutcome
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.controlplane.services.convert import session_out, turn_out
from kvshuttle.controlplane.services.guard import tenant
from kvshuttle.v1 import session_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.controlplane.model.effects import Decision
    from kvshuttle.controlplane.model.session import Session, Turn
    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.checks import Checks
    from kvshuttle.controlplane.traces import ControlTraces

__all__ = ["Operation", "Operations"]

T = TypeVar("T")
R = TypeVar("R")


class Operation(Struct, Generic[T, R]):
    """A checked request: the event that decides it, and its answer."""

    event: Callable[[int], Decision[T]]
    answer: Callable[[T], R]


class Operations:
    """One method an operation; DomainError when a field is wrong. Each must be called where the
    caller is known (`guard.tenant`)."""

    def __init__(
        self,
        runtime: Runtime,
        checks: Checks,
        new_token: Callable[[], str],
        traces: ControlTraces | None = None,
    ) -> None:
        self._traces = traces
        self._runtime = runtime
        self._checks = checks
        self._new_token = new_token

    def key(self, session_id: str) -> SessionKey:
        """The caller's session of this name."""
        return SessionKey(tenant(), self._checks.session_id(session_id))

    def session(self, key: SessionKey) -> pb.Session:
        """A session as it stands now. NotFoundError."""
        state = self._runtime.registry.state
        session = state.sessions.get(key)
        if session is None:
            raise NotFoundError("session", key.session_id)
        return session_out(state.as_shown(session), state.replicas_of_session(key))

    def begin(self, request: pb.BeginTurnRequest) -> Operation[Turn, pb.BeginTurnResponse]:
        """Places a turn."""
        checks = self._checks
        excluded = tuple(
            checks.worker_id("exclude_worker_ids", worker) for worker in request.exclude_worker_ids
        )
        if len(excluded) > checks.limits.excluded_workers:
            raise InvalidFieldError(
                "exclude_worker_ids",
                len(excluded),
                f"name at most {checks.limits.excluded_workers} workers",
            )
        ask = BeginTurn(
            key=self.key(request.session_id),
            token=self._new_token(),
            request_id=checks.request_id(request.request_id),
            prompt_tokens=checks.count("prompt_tokens_estimate", request.prompt_tokens_estimate),
            policy=checks.enum(
                "return_policy", request.return_policy, ReturnPolicy, ReturnPolicy.AUTO
            ),
            excluded=excluded,
            hints=checks.hints(request.hints),
        )
        registry = self._runtime.registry
        made: Operation[Turn, pb.BeginTurnResponse] = Operation(
            lambda now: registry.begin_turn(now, ask),
            lambda turn: pb.BeginTurnResponse(turn=turn_out(turn), turn_token=turn.token),
        )
        if self._traces is None:
            return made
        return _traced(self._traces, request.traceparent, ask.key, made)

    def end(self, request: pb.EndTurnRequest) -> Operation[Turn, pb.EndTurnResponse]:
        """Ends a turn."""
        checks = self._checks
        key = self.key(request.session_id)
        checks.request_id(request.request_id)
        if request.turn == 0:
            raise InvalidFieldError("turn", 0, "give the number that BeginTurn gave")
        number = request.turn
        outcome = checks.enum("outcome", request.outcome, TurnOutcome, never=TurnOutcome.ABANDONED)
        usage = self._usage(request.usage) if request.HasField("usage") else None
        hints = checks.hints(request.hints) if request.HasField("hints") else None
        token = checks.turn_token(request.turn_token)
        registry = self._runtime.registry
        return Operation(
            lambda now: registry.end_turn(now, key, number, outcome, usage, hints, token),
            lambda turn: pb.EndTurnResponse(turn=turn_out(turn)),
        )

    def _usage(self, said: pb.TurnUsage) -> Usage:
        checks = self._checks
        prompt = checks.count("usage.prompt_tokens", said.prompt_tokens)
        cached = checks.count("usage.cached_tokens", said.cached_tokens)
        return Usage(
            prompt,
            # Cut, not refused: gateways pass on what an engine says, and the turn has to end.
            min(cached, prompt),
            checks.count("usage.output_tokens", said.output_tokens),
            checks.duration("usage.time_to_first_token", said.time_to_first_token),
        )

    def update(
        self, request: pb.UpdateSessionRequest
    ) -> Operation[Session, pb.UpdateSessionResponse]:
        """Changes hints."""
        key = self.key(request.session_id)
        request_id = self._checks.request_id(request.request_id)
        session = self._runtime.registry.state.sessions.get(key)
        if session is None:
            raise NotFoundError("session", key.session_id)
        hints = self._checks.hints_masked(session.hints, request.hints, request.update_mask.paths)
        asked = (
            request.hints.SerializeToString(deterministic=True),
            sorted(request.update_mask.paths),
        )
        registry = self._runtime.registry
        return Operation(
            lambda now: registry.update_session(now, key, hints, request_id, asked),
            lambda _: pb.UpdateSessionResponse(session=self.session(key)),
        )


def _traced(
    traces: ControlTraces,
    traceparent: str,
    key: SessionKey,
    made: Operation[Turn, pb.BeginTurnResponse],
) -> Operation[Turn, pb.BeginTurnResponse]:
    """The same, with a span from its beginning to its answer."""
    span = traces.begin(traceparent)

    def event(now: int) -> Decision[Turn]:
        try:
            decision = made.event(now)
        except BaseException as error:
            traces.refused(span, error)
            raise
        traces.begun(span, key, decision.result)
        return decision

    def answer(turn: Turn) -> pb.BeginTurnResponse:
        span.end()
        return made.answer(turn)

    return Operation(event, answer)
