"""The methods of the public API: their names, and the types of what they take and give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as lease
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["RPCS", "Rpc"]

_Q = TypeVar("_Q", bound="Message")
_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class Rpc(Generic[_Q, _A]):
    """One method of a service."""

    path: str
    request: type[_Q]
    response: type[_A]


def _session(name: str, request: type[_Q], response: type[_A]) -> Rpc[_Q, _A]:
    return Rpc(f"/kvshuttle.v1.SessionService/{name}", request, response)


def _lease(name: str, request: type[_Q], response: type[_A]) -> Rpc[_Q, _A]:
    return Rpc(f"/kvshuttle.v1.LeaseService/{name}", request, response)


def _cluster(name: str, request: type[_Q], response: type[_A]) -> Rpc[_Q, _A]:
    return Rpc(f"/kvshuttle.v1.ClusterService/{name}", request, response)


class RPCS:
    """All of them but `SessionService.Turns`, which is a transport for three of these."""

    begin_turn = _session("BeginTurn", session.BeginTurnRequest, session.BeginTurnResponse)
    end_turn = _session("EndTurn", session.EndTurnRequest, session.EndTurnResponse)
    get_session = _session("GetSession", session.GetSessionRequest, session.GetSessionResponse)
    list_sessions = _session(
        "ListSessions", session.ListSessionsRequest, session.ListSessionsResponse
    )
    update_session = _session(
        "UpdateSession", session.UpdateSessionRequest, session.UpdateSessionResponse
    )
    end_session = _session("EndSession", session.EndSessionRequest, session.EndSessionResponse)
    watch_sessions = _session(
        "WatchSessions", session.WatchSessionsRequest, session.WatchSessionsResponse
    )
    get_lease = _lease("GetLease", lease.GetLeaseRequest, lease.GetLeaseResponse)
    list_leases = _lease("ListLeases", lease.ListLeasesRequest, lease.ListLeasesResponse)
    renew_lease = _lease("RenewLease", lease.RenewLeaseRequest, lease.RenewLeaseResponse)
    revoke_lease = _lease("RevokeLease", lease.RevokeLeaseRequest, lease.RevokeLeaseResponse)
    watch_leases = _lease("WatchLeases", lease.WatchLeasesRequest, lease.WatchLeasesResponse)
    get_worker = _cluster("GetWorker", cluster.GetWorkerRequest, cluster.GetWorkerResponse)
    list_workers = _cluster("ListWorkers", cluster.ListWorkersRequest, cluster.ListWorkersResponse)
    drain_worker = _cluster("DrainWorker", cluster.DrainWorkerRequest, cluster.DrainWorkerResponse)
    fence_worker = _cluster("FenceWorker", cluster.FenceWorkerRequest, cluster.FenceWorkerResponse)
    get_status = _cluster("GetStatus", cluster.GetStatusRequest, cluster.GetStatusResponse)
