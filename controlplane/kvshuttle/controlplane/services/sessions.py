"""SessionService."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.errors import InvalidFieldError, NotFoundError, SessionEndedError
from kvshuttle.controlplane.model.session import Usage
from kvshuttle.controlplane.model.terms import (
    ReturnPolicy,
    SessionKey,
    SessionState,
    TurnOutcome,
)
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.controlplane.services.convert import session_out, turn_out
from kvshuttle.controlplane.services.guard import tenant, tenant_or_all
from kvshuttle.controlplane.services.watch import Changed, Piece, token
from kvshuttle.v1 import session_service_pb2 as pb
from kvshuttle.v1 import session_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Any

    from kvshuttle.controlplane.model.effects import SessionChange
    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.checks import Checks
    from kvshuttle.controlplane.services.watch import Hub

__all__ = ["SessionService"]


class SessionService(pb_grpc.SessionServiceServicer):
    """Each method: check, call, convert."""

    def __init__(
        self,
        runtime: Runtime,
        checks: Checks,
        hub: Hub[SessionChange],
        new_token: Callable[[], str],
    ) -> None:
        self._runtime = runtime
        self._checks = checks
        self._hub = hub
        self._new_token = new_token

    @property
    def _state(self) -> Any:
        return self._runtime.registry.state

    def _key(self, session_id: str) -> SessionKey:
        return SessionKey(tenant(), self._checks.session_id(session_id))

    def _session(self, key: SessionKey) -> pb.Session:
        session = self._state.sessions.get(key)
        if session is None:
            raise NotFoundError("session", key.session_id)
        return session_out(session, self._state.replicas_of_session(key))

    async def BeginTurn(  # noqa: N802
        self, request: pb.BeginTurnRequest, context: Any
    ) -> pb.BeginTurnResponse:
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
            key=self._key(request.session_id),
            token=self._new_token(),
            request_id=checks.request_id(request.request_id),
            prompt_tokens=request.prompt_tokens_estimate,
            policy=checks.enum(
                "return_policy", request.return_policy, ReturnPolicy, ReturnPolicy.AUTO
            ),
            excluded=excluded,
            hints=checks.hints(request.hints),
        )
        turn = await self._runtime.apply(lambda now: self._runtime.registry.begin_turn(now, ask))
        return pb.BeginTurnResponse(turn=turn_out(turn), turn_token=turn.token)

    async def EndTurn(  # noqa: N802
        self, request: pb.EndTurnRequest, context: Any
    ) -> pb.EndTurnResponse:
        """Ends a turn."""
        checks = self._checks
        key = self._key(request.session_id)
        checks.request_id(request.request_id)
        if request.turn == 0:
            raise InvalidFieldError("turn", 0, "give the number that BeginTurn gave")
        outcome = checks.enum("outcome", request.outcome, TurnOutcome)
        if outcome is TurnOutcome.ABANDONED:
            raise InvalidFieldError("outcome", outcome.name, "use COMPLETED, CANCELLED or FAILED")
        usage = None
        if request.HasField("usage"):
            usage = Usage(
                request.usage.prompt_tokens,
                request.usage.cached_tokens,
                request.usage.output_tokens,
                checks.duration("usage.time_to_first_token", request.usage.time_to_first_token),
            )
        hints = checks.hints(request.hints) if request.HasField("hints") else None
        turn = await self._runtime.apply(
            lambda now: self._runtime.registry.end_turn(
                now, key, request.turn, outcome, usage, hints
            )
        )
        return pb.EndTurnResponse(turn=turn_out(turn))

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Any
    ) -> pb.GetSessionResponse:
        """Reads one session."""
        session = self._session(self._key(request.session_id))
        await self._runtime.settled()
        return pb.GetSessionResponse(session=session)

    async def ListSessions(  # noqa: N802
        self, request: pb.ListSessionsRequest, context: Any
    ) -> pb.ListSessionsResponse:
        """A page of sessions, by tenant and id."""
        checks = self._checks
        size = checks.page_size(request.page_size)
        state = None
        if request.state:
            state = checks.enum("state", request.state, SessionState)
        worker_id = checks.worker_id("worker_id", request.worker_id, required=False)
        after = checks.page_token(request.page_token, 2)
        only = tenant_or_all()
        # With a worker, the sessions that have a replica there; else all. Both are scanned: a
        # list is an operator's call, and the order need not be kept for it on every turn.
        names = (
            {key for key, _ in self._state.replicas_of.get(worker_id, ())}
            if worker_id
            else self._state.sessions
        )
        floor = SessionKey(*map(str, after)) if after else None
        sessions = self._state.sessions
        keys = heapq.nsmallest(
            size + 1,
            (
                key
                for key in names
                if (only is None or key.tenant == only)
                and (floor is None or key > floor)
                and key in sessions
                and (state is None or sessions[key].state is state)
            ),
        )
        page = [self._session(key) for key in keys[:size]]
        await self._runtime.settled()
        return pb.ListSessionsResponse(
            sessions=page,
            next_page_token=checks.next_page(*keys[size - 1]) if len(keys) > size else "",
        )

    async def UpdateSession(  # noqa: N802
        self, request: pb.UpdateSessionRequest, context: Any
    ) -> pb.UpdateSessionResponse:
        """Changes hints."""
        key = self._key(request.session_id)
        self._checks.request_id(request.request_id)
        session = self._state.sessions.get(key)
        if session is None:
            raise NotFoundError("session", key.session_id)
        if not session.active:
            raise SessionEndedError(
                f"session {key.session_id} has ended", session_id=key.session_id
            )
        hints = self._checks.hints_masked(session.hints, request.hints, request.update_mask.paths)
        await self._runtime.apply(
            lambda now: self._runtime.registry.update_session(now, key, hints)
        )
        return pb.UpdateSessionResponse(session=self._session(key))

    async def EndSession(  # noqa: N802
        self, request: pb.EndSessionRequest, context: Any
    ) -> pb.EndSessionResponse:
        """Ends a session."""
        key = self._key(request.session_id)
        self._checks.request_id(request.request_id)
        await self._runtime.apply(lambda now: self._runtime.registry.end_session(now, key))
        return pb.EndSessionResponse(session=self._session(key))

    async def WatchSessions(  # noqa: N802
        self, request: pb.WatchSessionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchSessionsResponse]:
        """A snapshot, then changes."""
        from kvshuttle.controlplane.model.effects import SessionChange

        only = tenant_or_all()
        wanted = self._checks.text(
            "session_id", request.session_id, self._checks.limits.session_id_chars
        )

        def wants(change: SessionChange) -> bool:
            key = change.session.key
            return (only is None or key.tenant == only) and (not wanted or key.session_id == wanted)

        def snapshot() -> tuple[int, list[SessionChange]]:
            state = self._state
            items = (
                SessionChange(session.version, session, state.replicas_of_session(key))
                for key, session in state.sessions.items()
            )
            return state.revision, [item for item in items if wants(item)]

        async for event in self._hub.watch(
            request.resume_token, wants, snapshot, self._runtime.settled
        ):
            if isinstance(event, Piece):
                yield pb.WatchSessionsResponse(
                    snapshot=pb.SessionSnapshot(
                        sessions=[session_out(i.session, i.replicas) for i in event.items],
                        complete=event.complete,
                    ),
                    resume_token=token(event.revision) if event.complete else "",
                )
            elif isinstance(event, Changed):
                yield pb.WatchSessionsResponse(
                    changed=session_out(event.item.session, event.item.replicas),
                    resume_token=token(event.item.revision),
                )
            else:
                progress = pb.WatchProgress()
                progress.time.FromNanoseconds(self._runtime.clock.now_ns())
                yield pb.WatchSessionsResponse(
                    progress=progress, resume_token=token(event.revision)
                )
