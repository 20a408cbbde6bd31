"""The asynchronous client: one channel, one method an RPC, typed messages of `kvshuttle.v1`."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
from google.protobuf.field_mask_pb2 import FieldMask

from kvshuttle.client.errors import from_rpc_error
from kvshuttle.client.options import ClientOptions
from kvshuttle.client.turns import NoTurnStreamError, TurnStreams
from kvshuttle.v1 import (
    cluster_service_pb2 as cluster,
)
from kvshuttle.v1 import (
    lease_service_pb2 as lease,
)
from kvshuttle.v1 import (
    session_service_pb2 as session,
)
from kvshuttle.v1.cluster_service_pb2_grpc import ClusterServiceStub
from kvshuttle.v1.lease_service_pb2_grpc import LeaseServiceStub
from kvshuttle.v1.session_service_pb2_grpc import SessionServiceStub

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence
    from types import TracebackType

    from kvshuttle.v1 import types_pb2 as types

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")

PAGE_SIZE = 500


def new_request_id() -> str:
    """An id that makes the retry of a mutation safe."""
    return uuid.uuid4().hex


class AsyncClient:
    """Talks to one control plane over one channel, which is shared by all calls.

    Every call has a deadline (`timeout`, in seconds, or the default of its kind in
    `ClientOptions.timeouts`) and raises a `KVShuttleError`. Nothing is retried here: a mutation
    takes a `request_id`, with which its caller may repeat it safely.
    """

    def __init__(self, target: str, options: ClientOptions | None = None) -> None:
        self._options = options if options is not None else ClientOptions()
        self._timeouts = self._options.timeouts
        self._channel = self._options.channel(target)
        self._sessions = SessionServiceStub(self._channel)
        self._turns: TurnStreams | None = None
        if self._options.turn_stream:
            self._turns = TurnStreams(self._sessions, self._metadata)
        self._leases = LeaseServiceStub(self._channel)
        self._cluster = ClusterServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the channel and whatever still runs on it."""
        if self._turns is not None:
            await self._turns.close()
        await self._channel.close()

    async def begin_turn(
        self,
        session_id: str,
        *,
        request_id: str | None = None,
        prompt_tokens_estimate: int = 0,
        return_policy: session.ReturnPolicy.ValueType = session.RETURN_POLICY_AUTO,
        exclude_worker_ids: Sequence[str] = (),
        hints: types.SessionHints | None = None,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the RPC's deadline
    ) -> session.BeginTurnResponse:
        """Says where the next turn of a session runs."""
        request = session.BeginTurnRequest(
            session_id=session_id,
            request_id=request_id or new_request_id(),
            prompt_tokens_estimate=prompt_tokens_estimate,
            return_policy=return_policy,
            exclude_worker_ids=exclude_worker_ids,
            hints=hints,
        )
        return await self._turn(
            "begin",
            self._sessions.BeginTurn,
            request,
            session.BeginTurnResponse,
            tenant,
            timeout if timeout is not None else self._timeouts.begin_turn_s,
        )

    async def end_turn(
        self,
        session_id: str,
        turn: int,
        outcome: session.TurnOutcome.ValueType,
        *,
        turn_token: str = "",
        usage: session.TurnUsage | None = None,
        request_id: str | None = None,
        hints: types.SessionHints | None = None,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> session.Turn:
        """Ends a turn. Repeating it is safe, with or without the same `request_id`; with the
        `turn_token` of `begin_turn` it cannot end a turn of a later session of the same name."""
        request = session.EndTurnRequest(
            session_id=session_id,
            turn=turn,
            outcome=outcome,
            usage=usage,
            request_id=request_id or new_request_id(),
            hints=hints,
            turn_token=turn_token,
        )
        response = await self._turn(
            "end",
            self._sessions.EndTurn,
            request,
            session.EndTurnResponse,
            tenant,
            timeout if timeout is not None else self._timeouts.end_turn_s,
        )
        return response.turn

    async def get_session(
        self,
        session_id: str,
        *,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> session.Session:
        """Reads one session. Raises NotFoundError if there is none."""
        response = await self._unary(
            self._sessions.GetSession,
            session.GetSessionRequest(session_id=session_id),
            tenant,
            timeout,
            self._timeouts.read_s,
        )
        return response.session

    async def list_sessions(
        self,
        *,
        state: session.SessionState.ValueType = session.SESSION_STATE_UNSPECIFIED,
        worker_id: str = "",
        page_size: int = PAGE_SIZE,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncIterator[session.Session]:
        """All sessions that match, page by page; `timeout` is for one page."""
        request = session.ListSessionsRequest(page_size=page_size, state=state, worker_id=worker_id)
        while True:
            page = await self._unary(
                self._sessions.ListSessions, request, tenant, timeout, self._timeouts.read_s
            )
            for one in page.sessions:
                yield one
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def update_session(
        self,
        session_id: str,
        hints: types.SessionHints,
        *,
        fields: Sequence[str] = (),
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> session.Session:
        """Sets a session's hints: those named in `fields`, or else those that are set."""
        request = session.UpdateSessionRequest(
            session_id=session_id,
            hints=hints,
            update_mask=FieldMask(paths=fields) if fields else None,
            request_id=request_id or new_request_id(),
        )
        response = await self._turn(
            "update",
            self._sessions.UpdateSession,
            request,
            session.UpdateSessionResponse,
            tenant,
            timeout if timeout is not None else self._timeouts.write_s,
        )
        return response.session

    async def end_session(
        self,
        session_id: str,
        *,
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> session.Session:
        """Ends a session: its KV is released everywhere."""
        request = session.EndSessionRequest(
            session_id=session_id, request_id=request_id or new_request_id()
        )
        response = await self._unary(
            self._sessions.EndSession, request, tenant, timeout, self._timeouts.write_s
        )
        return response.session

    async def watch_sessions(
        self,
        *,
        session_id: str = "",
        resume_token: str = "",
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncGenerator[session.WatchSessionsResponse, None]:
        """A snapshot, then changes, until the caller stops or the stream breaks.

        A broken stream raises UnavailableError: go on with the last piece's `resume_token`.
        OutOfRangeError means that it is too old: start again without it.
        """
        call = self._sessions.WatchSessions(
            session.WatchSessionsRequest(session_id=session_id, resume_token=resume_token),
            timeout=timeout,
            metadata=self._metadata(tenant),
        )
        try:
            async for piece in call:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def watch_leases(
        self,
        *,
        session_id: str = "",
        resume_token: str = "",
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncGenerator[lease.WatchLeasesResponse, None]:
        """As `watch_sessions`, for leases."""
        call = self._leases.WatchLeases(
            lease.WatchLeasesRequest(session_id=session_id, resume_token=resume_token),
            timeout=timeout,
            metadata=self._metadata(tenant),
        )
        try:
            async for piece in call:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def get_lease(
        self,
        lease_id: str,
        *,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> lease.Lease:
        """Reads one lease. Raises NotFoundError if there is none."""
        response = await self._unary(
            self._leases.GetLease,
            lease.GetLeaseRequest(lease_id=lease_id),
            tenant,
            timeout,
            self._timeouts.read_s,
        )
        return response.lease

    async def list_leases(
        self,
        *,
        states: Sequence[lease.LeaseState.ValueType] = (),
        session_id: str = "",
        worker_id: str = "",
        page_size: int = PAGE_SIZE,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncIterator[lease.Lease]:
        """All leases that match, newest first; `timeout` is for one page."""
        request = lease.ListLeasesRequest(
            page_size=page_size, states=states, session_id=session_id, worker_id=worker_id
        )
        while True:
            page = await self._unary(
                self._leases.ListLeases, request, tenant, timeout, self._timeouts.read_s
            )
            for one in page.leases:
                yield one
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def revoke_lease(
        self,
        lease_id: str,
        reason: str = "",
        *,
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> lease.Lease:
        """Stops a lease; it ends when its reader has said so, or at its deadline."""
        request = lease.RevokeLeaseRequest(
            lease_id=lease_id, reason=reason, request_id=request_id or new_request_id()
        )
        response = await self._unary(
            self._leases.RevokeLease, request, tenant, timeout, self._timeouts.write_s
        )
        return response.lease

    async def get_worker(
        self,
        worker_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> cluster.Worker:
        """Reads one worker. Raises NotFoundError if there is none."""
        response = await self._unary(
            self._cluster.GetWorker,
            cluster.GetWorkerRequest(worker_id=worker_id),
            None,
            timeout,
            self._timeouts.read_s,
        )
        return response.worker

    async def list_workers(
        self,
        *,
        page_size: int = PAGE_SIZE,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncIterator[cluster.Worker]:
        """All workers, ordered by id; `timeout` is for one page."""
        request = cluster.ListWorkersRequest(page_size=page_size)
        while True:
            page = await self._unary(
                self._cluster.ListWorkers, request, None, timeout, self._timeouts.read_s
            )
            for one in page.workers:
                yield one
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def drain_worker(
        self,
        worker_id: str,
        *,
        undo: bool = False,
        request_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> cluster.Worker:
        """Stops new turns and leases on a worker, or with `undo` puts it back into service."""
        request = cluster.DrainWorkerRequest(
            worker_id=worker_id, undo=undo, request_id=request_id or new_request_id()
        )
        response = await self._unary(
            self._cluster.DrainWorker, request, None, timeout, self._timeouts.write_s
        )
        return response.worker

    async def fence_worker(
        self,
        worker: types.WorkerRef,
        attestation: str,
        *,
        request_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> cluster.Worker:
        """Attests that a boot of a worker is dead. Only for who knows it: its leases end at once.

        Raises FailedPreconditionError (INCARNATION_MISMATCH) if another boot is registered.
        """
        request = cluster.FenceWorkerRequest(
            worker=worker, attestation=attestation, request_id=request_id or new_request_id()
        )
        response = await self._unary(
            self._cluster.FenceWorker, request, None, timeout, self._timeouts.write_s
        )
        return response.worker

    async def get_status(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> cluster.GetStatusResponse:
        """The control plane's own state."""
        return await self._unary(
            self._cluster.GetStatus,
            cluster.GetStatusRequest(),
            None,
            timeout,
            self._timeouts.read_s,
        )

    def _metadata(self, tenant: str | None) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*self._options.call_metadata(tenant))

    async def _turn(
        self,
        kind: str,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        answer: type[_Response],
        tenant: str | None,
        timeout: float,  # noqa: ASYNC109
    ) -> _Response:
        """Over the tenant's stream, or else as a call."""
        if self._turns is not None:
            try:
                return await self._turns.ask(tenant, kind, request, answer, timeout)
            except NoTurnStreamError:
                pass
        return await self._unary(method, request, tenant, timeout, timeout)

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        tenant: str | None,
        timeout: float | None,  # noqa: ASYNC109
        default_timeout_s: float,
    ) -> _Response:
        try:
            return await method(
                request,
                timeout=timeout if timeout is not None else default_timeout_s,
                metadata=self._metadata(tenant),
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
