"""What the control plane says of workers, sessions and leases, for demos, tests, benchmarks."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import grpc

from kvshuttle.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    lease_service_pb2,
    lease_service_pb2_grpc,
    session_service_pb2,
    session_service_pb2_grpc,
    types_pb2,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

PAGE_SIZE = 1_000
TIMEOUT_S = 10.0
OPEN_LEASES = (
    lease_service_pb2.LEASE_STATE_PENDING,
    lease_service_pb2.LEASE_STATE_GRANTED,
    lease_service_pb2.LEASE_STATE_ACTIVE,
)


class ControlPlaneView:
    """A blocking client of an insecure control plane on this machine.

    Every method raises grpc.RpcError when the control plane does not answer.
    """

    def __init__(self, target: str) -> None:
        # The control plane is stopped and started in tests: try again soon, not after minutes.
        self._channel = grpc.insecure_channel(
            target,
            options=[
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1_000),
            ],
        )
        self._cluster = cluster_service_pb2_grpc.ClusterServiceStub(self._channel)
        self._leases = lease_service_pb2_grpc.LeaseServiceStub(self._channel)
        self._sessions = session_service_pb2_grpc.SessionServiceStub(self._channel)

    def __enter__(self) -> ControlPlaneView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def status(self) -> cluster_service_pb2.GetStatusResponse:
        """The control plane's own state."""
        return self._cluster.GetStatus(
            cluster_service_pb2.GetStatusRequest(), timeout=TIMEOUT_S, wait_for_ready=True
        )

    def workers(self) -> dict[str, cluster_service_pb2.Worker]:
        """Every listed worker by its id."""
        found: dict[str, cluster_service_pb2.Worker] = {}
        request = cluster_service_pb2.ListWorkersRequest(page_size=PAGE_SIZE)
        while True:
            page = self._cluster.ListWorkers(request, timeout=TIMEOUT_S, wait_for_ready=True)
            found.update((worker.ref.worker_id, worker) for worker in page.workers)
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    def ready_workers(self) -> set[str]:
        """The ids of the workers that take turns."""
        return {
            worker_id
            for worker_id, worker in self.workers().items()
            if worker.state == cluster_service_pb2.WORKER_STATE_READY
        }

    def leases(
        self,
        session_id: str = "",
        states: Iterable[lease_service_pb2.LeaseState.ValueType] = (),
    ) -> list[lease_service_pb2.Lease]:
        """Leases, newest first; those of one session or in some states only, if said."""
        found: list[lease_service_pb2.Lease] = []
        request = lease_service_pb2.ListLeasesRequest(
            page_size=PAGE_SIZE, session_id=session_id, states=list(states)
        )
        while True:
            page = self._leases.ListLeases(request, timeout=TIMEOUT_S, wait_for_ready=True)
            found += page.leases
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    def open_leases(self) -> list[lease_service_pb2.Lease]:
        """Leases that have not ended."""
        return self.leases(states=OPEN_LEASES)

    def sessions(self) -> list[session_service_pb2.Session]:
        """Every listed session."""
        found: list[session_service_pb2.Session] = []
        request = session_service_pb2.ListSessionsRequest(page_size=PAGE_SIZE)
        while True:
            page = self._sessions.ListSessions(request, timeout=TIMEOUT_S, wait_for_ready=True)
            found += page.sessions
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    def session(self, session_id: str) -> session_service_pb2.Session:
        """One session."""
        request = session_service_pb2.GetSessionRequest(session_id=session_id)
        answer = self._sessions.GetSession(request, timeout=TIMEOUT_S, wait_for_ready=True)
        return answer.session

    def end_session(self, session_id: str, tenant: str = "default") -> None:
        """Ends one session: its replicas are released everywhere."""
        request = session_service_pb2.EndSessionRequest(
            session_id=session_id, request_id=uuid.uuid4().hex
        )
        self._sessions.EndSession(
            request,
            timeout=TIMEOUT_S,
            wait_for_ready=True,
            metadata=(("kvshuttle-tenant", tenant),),
        )

    def fence(self, worker: types_pb2.WorkerRef, attestation: str) -> None:
        """Attests that a boot of a worker is dead."""
        request = cluster_service_pb2.FenceWorkerRequest(
            worker=worker, attestation=attestation, request_id=uuid.uuid4().hex
        )
        self._cluster.FenceWorker(request, timeout=TIMEOUT_S, wait_for_ready=True)

    def drain(self, worker_id: str, *, undo: bool = False) -> None:
        """Takes a worker out, or puts it back."""
        request = cluster_service_pb2.DrainWorkerRequest(
            worker_id=worker_id, undo=undo, request_id=uuid.uuid4().hex
        )
        self._cluster.DrainWorker(request, timeout=TIMEOUT_S, wait_for_ready=True)

    def end_all_sessions(self) -> None:
        """Ends every session that is active."""
        for session in self.sessions():
            if session.state == session_service_pb2.SESSION_STATE_ACTIVE:
                self.end_session(session.session_id, session.tenant)
