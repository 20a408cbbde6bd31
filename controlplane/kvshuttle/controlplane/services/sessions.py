"""SessionService."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvshuttle.controlplane.model.terms import (
    SessionKey,
    SessionState,
)
from kvshuttle.controlplane.services.guard import tenant_or_all
from kvshuttle.controlplane.services.watch_sources import Sessions
from kvshuttle.controlplane.services.watching import SESSIONS, watch
from kvshuttle.v1 import session_service_pb2 as pb
from kvshuttle.v1 import session_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from kvshuttle.controlplane.model.effects import SessionChange, SessionDropped
    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.checks import Checks
    from kvshuttle.controlplane.services.operations import Operation, Operations
    from kvshuttle.controlplane.services.turns import TurnStreams
    from kvshuttle.controlplane.services.watch import Hub

__all__ = ["SessionService"]

LIST_SCAN = 20_000
"""Sessions that one page looks at: some ms of the event loop."""

T = TypeVar("T")
R = TypeVar("R")


class SessionService(pb_grpc.SessionServiceServicer):
    """Each method: check, call, convert."""

    def __init__(
        self,
        runtime: Runtime,
        checks: Checks,
        hub: Hub[SessionChange | SessionDropped],
        operations: Operations,
        streams: TurnStreams,
    ) -> None:
        self._runtime = runtime
        self._checks = checks
        self._hub = hub
        self._operations = operations
        self._streams = streams
        self._source = Sessions(lambda: runtime.registry.state)

    @property
    def _state(self) -> Any:
        return self._runtime.registry.state

    async def _call(self, operation: Operation[T, R]) -> R:
        return operation.answer(await self._runtime.apply(operation.event))

    async def BeginTurn(  # noqa: N802
        self, request: pb.BeginTurnRequest, context: Any
    ) -> pb.BeginTurnResponse:
        """Places a turn."""
        return await self._call(self._operations.begin(request))

    async def EndTurn(  # noqa: N802
        self, request: pb.EndTurnRequest, context: Any
    ) -> pb.EndTurnResponse:
        """Ends a turn."""
        return await self._call(self._operations.end(request))

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Any
    ) -> pb.GetSessionResponse:
        """Reads one session."""
        session = self._operations.session(self._operations.key(request.session_id))
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
        after = checks.page_token(request.page_token, str, str)
        only = tenant_or_all()
        floor = SessionKey(*after) if after else SessionKey(only or "", "")
        keys, last = self._page(floor, size, only, state, worker_id)
        page = [self._operations.session(key) for key in keys]
        await self._runtime.settled()
        return pb.ListSessionsResponse(
            sessions=page, next_page_token=checks.next_page(*last) if last is not None else ""
        )

    def _page(
        self,
        floor: SessionKey,
        size: int,
        only: str | None,
        state: SessionState | None,
        worker_id: str,
    ) -> tuple[list[SessionKey], SessionKey | None]:
        """Keys beyond `floor`, and the one after which the next page begins, if there is more.
        Keys lie in order, so a page costs its own length. One that few sessions match ends after
        so many were looked at, and is shorter than asked."""
        sessions = self._state.sessions
        here = self._state.replicas.of_worker.get(worker_id, {}) if worker_id else None
        keys: list[SessionKey] = []
        last = None
        for looked, key in enumerate(sessions.after(floor)):
            if only is not None and key.tenant != only:
                break
            if len(keys) == size or looked == LIST_SCAN:
                return keys, last
            last = key
            if (here is None or key in here) and (
                state is None or sessions.active(key) is (state is SessionState.ACTIVE)
            ):
                keys.append(key)
        return keys, None

    async def UpdateSession(  # noqa: N802
        self, request: pb.UpdateSessionRequest, context: Any
    ) -> pb.UpdateSessionResponse:
        """Changes hints."""
        return await self._call(self._operations.update(request))

    async def EndSession(  # noqa: N802
        self, request: pb.EndSessionRequest, context: Any
    ) -> pb.EndSessionResponse:
        """Ends a session."""
        key = self._operations.key(request.session_id)
        self._checks.request_id(request.request_id)
        await self._runtime.apply(
            lambda now: self._runtime.registry.end_session(now, key, request.request_id)
        )
        return pb.EndSessionResponse(session=self._operations.session(key))

    async def Turns(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.TurnsRequest], context: Any
    ) -> AsyncIterator[pb.TurnsResponse]:
        """Many operations on one stream."""
        async for response in self._streams.serve(request_iterator):
            yield response

    async def WatchSessions(  # noqa: N802
        self, request: pb.WatchSessionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchSessionsResponse]:
        """A snapshot, then changes."""
        async for message in watch(
            SESSIONS, self._hub, self._source, self._runtime, self._checks, request
        ):
            yield message
