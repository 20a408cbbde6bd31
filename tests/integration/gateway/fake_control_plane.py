"""A control plane that places turns as told: a real gRPC server with the API's two services."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]
from grpc_status import rpc_status

from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def status(
    code: int, reason: str, message: str = "refused", remedy: str = "", retry_after_s: float = 0
) -> status_pb2.Status:
    """A google.rpc.Status with ErrorInfo, as the control plane sends it."""
    details = [any_pb2.Any(), any_pb2.Any()]
    metadata = {"worker_id": "w1"}
    if remedy:
        metadata["remedy"] = remedy
    details[0].Pack(
        error_details_pb2.ErrorInfo(reason=reason, domain="kvshuttle", metadata=metadata)
    )
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(int(retry_after_s * 1_000))
    details[1].Pack(retry)
    return status_pb2.Status(
        code=code, message=message, details=details if retry_after_s else details[:1]
    )


PERMISSION_DENIED = status(code_pb2.PERMISSION_DENIED, "ROLE_NOT_ALLOWED", "operators only")
NO_WORKER = status(code_pb2.UNAVAILABLE, "NO_WORKER", "no live worker can take the turn")


class FakeControlPlane(session_grpc.SessionServiceServicer, cluster_grpc.ClusterServiceServicer):
    """Answers with `placements`, in order; the last one stays."""

    def __init__(self) -> None:
        self.target = ""
        self.port = 0
        # (prefill worker id and URL or None, decode worker id and URL).
        self.placements: list[tuple[tuple[str, str] | None, tuple[str, str]]] = []
        self.plan = session.Plan(return_mode=session.RETURN_MODE_LAZY, reason="CHEAPER_TO_MOVE")
        self.begins: list[session.BeginTurnRequest] = []
        self.ends: list[session.EndTurnRequest] = []
        # Those that were refused too.
        self.end_tries: list[session.EndTurnRequest] = []
        self.tenants: list[str] = []
        self.authorizations: list[str | None] = []
        self.refuse_begin: status_pb2.Status | None = None
        self.refuse_ends: list[status_pb2.Status] = []
        self.hold_begin: asyncio.Event | None = None
        self.refuse_workers: status_pb2.Status | None = None
        self.workers: list[cluster.Worker] = []
        self.lists = 0
        self.sessions: list[session.Session] = []
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeControlPlane:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serves; after a stop, on the same port."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        session_grpc.add_SessionServiceServicer_to_server(self, self._server)
        cluster_grpc.add_ClusterServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.target = f"127.0.0.1:{self.port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def outcomes(self) -> list[tuple[int, int]]:
        """Turn and outcome of every EndTurn."""
        return [(end.turn, end.outcome) for end in self.ends]

    async def BeginTurn(  # noqa: N802
        self,
        request: session.BeginTurnRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> session.BeginTurnResponse:
        self._note(context)
        self.begins.append(request)
        number = len(self.begins)
        if self.hold_begin is not None:
            await self.hold_begin.wait()
        if self.refuse_begin is not None:
            await _refuse(context, self.refuse_begin)
        prefill, decode = self.placements[min(number, len(self.placements)) - 1]
        turn = session.Turn(
            turn=number,
            state=session.TURN_STATE_RUNNING,
            decode=_placement(*decode),
            prefill=_placement(*prefill) if prefill is not None else None,
            plan=self.plan,
        )
        return session.BeginTurnResponse(turn=turn, turn_token=f"token-{number}")

    async def EndTurn(  # noqa: N802
        self,
        request: session.EndTurnRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> session.EndTurnResponse:
        self._note(context)
        self.end_tries.append(request)
        if self.refuse_ends:
            await _refuse(context, self.refuse_ends.pop(0))
        self.ends.append(request)
        return session.EndTurnResponse(turn=session.Turn(turn=request.turn))

    async def GetSession(  # noqa: N802
        self,
        request: session.GetSessionRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> session.GetSessionResponse:
        self._note(context)
        for one in self.sessions:
            if one.session_id == request.session_id:
                return session.GetSessionResponse(session=one)
        unknown = status(
            code_pb2.NOT_FOUND, "SESSION_NOT_FOUND", "no such session", "Begin a turn."
        )
        return await _refuse(context, unknown)

    async def ListSessions(  # noqa: N802
        self,
        request: session.ListSessionsRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> session.ListSessionsResponse:
        start = int(request.page_token or 0)
        more = start + 1 < len(self.sessions)
        return session.ListSessionsResponse(
            sessions=self.sessions[start : start + 1],
            next_page_token=str(start + 1) if more else "",
        )

    async def UpdateSession(  # noqa: N802
        self,
        request: session.UpdateSessionRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> session.UpdateSessionResponse:
        return session.UpdateSessionResponse(
            session=session.Session(session_id=request.session_id, hints=request.hints)
        )

    async def EndSession(  # noqa: N802
        self,
        request: session.EndSessionRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> session.EndSessionResponse:
        return session.EndSessionResponse(
            session=session.Session(
                session_id=request.session_id, state=session.SESSION_STATE_ENDED
            )
        )

    async def Turns(  # noqa: N802
        self,
        request_iterator: AsyncIterator[session.TurnsRequest],
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[session.TurnsResponse]:
        """As a control plane of before the stream of turns."""
        async for _ in request_iterator:
            await _refuse(context, status(code_pb2.UNIMPLEMENTED, "UNIMPLEMENTED"))
        yield session.TurnsResponse()

    async def WatchSessions(  # noqa: N802
        self,
        request: session.WatchSessionsRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[session.WatchSessionsResponse]:
        if request.resume_token == "old":
            await _refuse(context, status(code_pb2.OUT_OF_RANGE, "WATCH_COMPACTED"))
        yield session.WatchSessionsResponse(
            snapshot=session.SessionSnapshot(sessions=self.sessions, complete=True),
            resume_token="r1",
        )
        await asyncio.Event().wait()

    async def GetWorker(  # noqa: N802
        self,
        request: cluster.GetWorkerRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> cluster.GetWorkerResponse:
        return cluster.GetWorkerResponse(worker=self.workers[0])

    async def ListWorkers(  # noqa: N802
        self,
        request: cluster.ListWorkersRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> cluster.ListWorkersResponse:
        self.lists += 1
        if self.refuse_workers is not None:
            await _refuse(context, self.refuse_workers)
        return cluster.ListWorkersResponse(workers=self.workers)

    async def DrainWorker(  # noqa: N802
        self,
        request: cluster.DrainWorkerRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> cluster.DrainWorkerResponse:
        raise NotImplementedError

    async def FenceWorker(  # noqa: N802
        self,
        request: cluster.FenceWorkerRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> cluster.FenceWorkerResponse:
        raise NotImplementedError

    async def GetStatus(  # noqa: N802
        self,
        request: cluster.GetStatusRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> cluster.GetStatusResponse:
        return cluster.GetStatusResponse(version="0", epoch=1)

    def _note(self, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        metadata = dict(context.invocation_metadata() or ())
        self.tenants.append(str(metadata.get("kvshuttle-tenant")))
        authorization = metadata.get("authorization")
        self.authorizations.append(None if authorization is None else str(authorization))


def worker(worker_id: str, url: str, role: types.WorkerRole.ValueType) -> cluster.Worker:
    """A worker that is connected."""
    return cluster.Worker(
        ref=types.WorkerRef(worker_id=worker_id, incarnation=1),
        role=role,
        state=cluster.WORKER_STATE_READY,
        url=url,
    )


def _placement(worker_id: str, url: str) -> session.Placement:
    return session.Placement(worker=types.WorkerRef(worker_id=worker_id, incarnation=1), url=url)


async def _refuse(context: grpc.aio.ServicerContext, what: status_pb2.Status) -> NoReturn:  # type: ignore[type-arg]
    wire = rpc_status.to_status(what)
    context.set_trailing_metadata(wire.trailing_metadata)
    await context.abort(wire.code, wire.details, wire.trailing_metadata)
    raise AssertionError
