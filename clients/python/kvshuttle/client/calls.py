"""Every call of the public API, said once: its parameters, its message, what is taken from the
answer. The two clients run what is built here; neither has a method of its own for a call."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from kvshuttle.client.rpcs import RPCS
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as lease
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from google.protobuf.message import Message

    from kvshuttle.client.rpcs import Rpc
    from kvshuttle.v1 import types_pb2 as types

__all__ = ["PAGE_SIZE", "Call", "ClientCalls", "Listing", "Watching", "new_request_id"]

_Q = TypeVar("_Q", bound="Message")
_A = TypeVar("_A", bound="Message")
_R = TypeVar("_R")

PAGE_SIZE = 500

DefaultTimeout = Literal["begin_turn_s", "end_turn_s", "read_s", "write_s"]
TurnOperation = Literal["begin", "end", "update"]


def new_request_id() -> str:
    """An id that makes the retry of a mutation safe."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Call(Generic[_R]):
    """One unary call: the message, and what its caller wants of the answer."""

    rpc: Rpc[Any, Any]
    request: Message
    take: Callable[[Any], _R]
    default: DefaultTimeout
    timeout: float | None
    tenant: str | None
    operation: TurnOperation | None = None
    """What it is called on the stream of turns; None: it is a call only."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[_R]):
    """A list, page by page."""

    rpc: Rpc[Any, Any]
    request: Any
    take: Callable[[Any], Sequence[_R]]
    timeout: float | None
    tenant: str | None

    def page(self) -> Call[Any]:
        """The next page's call."""
        return Call(self.rpc, self.request, lambda page: page, "read_s", self.timeout, self.tenant)

    def items(self, page: Any) -> tuple[Sequence[_R], bool]:
        """What is on a page, and whether there is another."""
        self.request.page_token = page.next_page_token
        return self.take(page), bool(page.next_page_token)


@dataclass(frozen=True, slots=True)
class Watching(Generic[_R]):
    """A stream of answers of type R."""

    rpc: Rpc[Any, _R]
    request: Message
    timeout: float | None
    tenant: str | None


def _call(
    rpc: Rpc[_Q, _A],
    request: _Q,
    take: Callable[[_A], _R],
    default: DefaultTimeout,
    timeout: float | None,
    tenant: str | None = None,
    operation: TurnOperation | None = None,
) -> Call[_R]:
    return Call(rpc, request, take, default, timeout, tenant, operation)


def _list(
    rpc: Rpc[_Q, _A],
    request: _Q,
    take: Callable[[_A], Sequence[_R]],
    timeout: float | None,
    tenant: str | None = None,
) -> Listing[_R]:
    return Listing(rpc, request, take, timeout, tenant)


class ClientCalls:
    """What both clients can ask.

    `timeout`, in seconds, is a call's deadline over all its tries, or a page's; without it the
    default of its kind in `ClientOptions.timeouts` counts. `tenant` is the one that a gateway or an
    operator acts for. A mutation carries a `request_id`, the caller's or a new one.
    """

    def begin_turn(
        self,
        session_id: str,
        *,
        request_id: str | None = None,
        prompt_tokens_estimate: int = 0,
        return_policy: session.ReturnPolicy.ValueType = session.RETURN_POLICY_AUTO,
        exclude_worker_ids: Sequence[str] = (),
        hints: types.SessionHints | None = None,
        traceparent: str = "",
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Call[session.BeginTurnResponse]:
        """Says where the next turn of a session runs. `traceparent`: W3C's, of the request that
        the turn serves."""
        request = session.BeginTurnRequest(
            session_id=session_id,
            request_id=request_id or new_request_id(),
            prompt_tokens_estimate=prompt_tokens_estimate,
            return_policy=return_policy,
            exclude_worker_ids=exclude_worker_ids,
            hints=hints,
            traceparent=traceparent,
        )
        return _call(
            RPCS.begin_turn, request, lambda a: a, "begin_turn_s", timeout, tenant, "begin"
        )

    def end_turn(
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
        timeout: float | None = None,
    ) -> Call[session.Turn]:
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
        return _call(RPCS.end_turn, request, lambda a: a.turn, "end_turn_s", timeout, tenant, "end")

    def get_session(
        self, session_id: str, *, tenant: str | None = None, timeout: float | None = None
    ) -> Call[session.Session]:
        """Reads one session. Raises NotFoundError if there is none."""
        request = session.GetSessionRequest(session_id=session_id)
        return _call(RPCS.get_session, request, lambda a: a.session, "read_s", timeout, tenant)

    def list_sessions(
        self,
        *,
        state: session.SessionState.ValueType = session.SESSION_STATE_UNSPECIFIED,
        worker_id: str = "",
        page_size: int = PAGE_SIZE,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Listing[session.Session]:
        """All sessions that match, page by page; `timeout` is for one page."""
        request = session.ListSessionsRequest(page_size=page_size, state=state, worker_id=worker_id)
        return _list(RPCS.list_sessions, request, lambda a: a.sessions, timeout, tenant)

    def update_session(
        self,
        session_id: str,
        hints: types.SessionHints,
        *,
        fields: Sequence[str] = (),
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Call[session.Session]:
        """Sets a session's hints: those named in `fields`, or else those that are set."""
        request = session.UpdateSessionRequest(
            session_id=session_id,
            hints=hints,
            update_mask=FieldMask(paths=fields) if fields else None,
            request_id=request_id or new_request_id(),
        )
        return _call(
            RPCS.update_session, request, lambda a: a.session, "write_s", timeout, tenant, "update"
        )

    def end_session(
        self,
        session_id: str,
        *,
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Call[session.Session]:
        """Ends a session: its KV is released everywhere."""
        request = session.EndSessionRequest(
            session_id=session_id, request_id=request_id or new_request_id()
        )
        return _call(RPCS.end_session, request, lambda a: a.session, "write_s", timeout, tenant)

    def watch_sessions(
        self,
        *,
        session_id: str = "",
        resume_token: str = "",
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Watching[session.WatchSessionsResponse]:
        """A snapshot, then changes, until the caller stops or the stream breaks.

        A broken stream raises UnavailableError: go on with the last piece's `resume_token`.
        OutOfRangeError means that it is too old: start again without it.
        """
        request = session.WatchSessionsRequest(session_id=session_id, resume_token=resume_token)
        return Watching(RPCS.watch_sessions, request, timeout, tenant)

    def watch_leases(
        self,
        *,
        session_id: str = "",
        resume_token: str = "",
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Watching[lease.WatchLeasesResponse]:
        """As `watch_sessions`, for leases."""
        request = lease.WatchLeasesRequest(session_id=session_id, resume_token=resume_token)
        return Watching(RPCS.watch_leases, request, timeout, tenant)

    def get_lease(
        self, lease_id: str, *, tenant: str | None = None, timeout: float | None = None
    ) -> Call[lease.Lease]:
        """Reads one lease. Raises NotFoundError if there is none."""
        request = lease.GetLeaseRequest(lease_id=lease_id)
        return _call(RPCS.get_lease, request, lambda a: a.lease, "read_s", timeout, tenant)

    def list_leases(
        self,
        *,
        states: Sequence[lease.LeaseState.ValueType] = (),
        session_id: str = "",
        worker_id: str = "",
        page_size: int = PAGE_SIZE,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Listing[lease.Lease]:
        """All leases that match, newest first; `timeout` is for one page."""
        request = lease.ListLeasesRequest(
            page_size=page_size, states=states, session_id=session_id, worker_id=worker_id
        )
        return _list(RPCS.list_leases, request, lambda a: a.leases, timeout, tenant)

    def renew_lease(
        self,
        lease_id: str,
        ttl_s: float,
        *,
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Call[lease.Lease]:
        """Extends a lease to `ttl_s` seconds from now, within the server's limit.

        Raises FailedPreconditionError (LEASE_ENDED) when it has ended.
        """
        ttl = Duration()
        ttl.FromNanoseconds(int(ttl_s * 1e9))
        request = lease.RenewLeaseRequest(
            lease_id=lease_id, ttl=ttl, request_id=request_id or new_request_id()
        )
        return _call(RPCS.renew_lease, request, lambda a: a.lease, "write_s", timeout, tenant)

    def revoke_lease(
        self,
        lease_id: str,
        reason: str = "",
        *,
        request_id: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
    ) -> Call[lease.Lease]:
        """Stops a lease; it ends when its reader has said so, or at its deadline."""
        request = lease.RevokeLeaseRequest(
            lease_id=lease_id, reason=reason, request_id=request_id or new_request_id()
        )
        return _call(RPCS.revoke_lease, request, lambda a: a.lease, "write_s", timeout, tenant)

    def get_worker(self, worker_id: str, *, timeout: float | None = None) -> Call[cluster.Worker]:
        """Reads one worker. Raises NotFoundError if there is none."""
        request = cluster.GetWorkerRequest(worker_id=worker_id)
        return _call(RPCS.get_worker, request, lambda a: a.worker, "read_s", timeout)

    def list_workers(
        self, *, page_size: int = PAGE_SIZE, timeout: float | None = None
    ) -> Listing[cluster.Worker]:
        """All workers, ordered by id; `timeout` is for one page."""
        request = cluster.ListWorkersRequest(page_size=page_size)
        return _list(RPCS.list_workers, request, lambda a: a.workers, timeout)

    def drain_worker(
        self,
        worker_id: str,
        *,
        undo: bool = False,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Call[cluster.Worker]:
        """Stops new turns and leases on a worker, or with `undo` puts it back into service."""
        request = cluster.DrainWorkerRequest(
            worker_id=worker_id, undo=undo, request_id=request_id or new_request_id()
        )
        return _call(RPCS.drain_worker, request, lambda a: a.worker, "write_s", timeout)

    def fence_worker(
        self,
        worker: types.WorkerRef,
        attestation: str,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Call[cluster.Worker]:
        """Attests that a boot of a worker is dead. Only for who knows it: its leases end at once.

        Raises FailedPreconditionError (INCARNATION_MISMATCH) if another boot is registered.
        """
        request = cluster.FenceWorkerRequest(
            worker=worker, attestation=attestation, request_id=request_id or new_request_id()
        )
        return _call(RPCS.fence_worker, request, lambda a: a.worker, "write_s", timeout)

    def get_status(self, *, timeout: float | None = None) -> Call[cluster.GetStatusResponse]:
        """The control plane's own state."""
        return _call(RPCS.get_status, cluster.GetStatusRequest(), lambda a: a, "read_s", timeout)
