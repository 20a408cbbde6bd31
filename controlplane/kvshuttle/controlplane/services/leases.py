"""LeaseService."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.errors import NotFoundError
from kvshuttle.controlplane.model.terms import LeaseState
from kvshuttle.controlplane.services.convert import lease_out
from kvshuttle.controlplane.services.guard import tenant_or_all
from kvshuttle.controlplane.services.watch_sources import Leases
from kvshuttle.controlplane.services.watching import LEASES, watch
from kvshuttle.v1 import lease_service_pb2 as pb
from kvshuttle.v1 import lease_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from kvshuttle.controlplane.model.effects import LeaseChange, LeaseDropped
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.checks import Checks
    from kvshuttle.controlplane.services.watch import Hub

__all__ = ["LeaseService"]

RENEW_LEAST_NS = 1_000_000_000
"""Below a heartbeat's interval a renewal could not lengthen anything."""


class LeaseService(pb_grpc.LeaseServiceServicer):
    """Each method: check, call, convert."""

    def __init__(
        self, runtime: Runtime, checks: Checks, hub: Hub[LeaseChange | LeaseDropped]
    ) -> None:
        self._runtime = runtime
        self._checks = checks
        self._hub = hub
        self._source = Leases(lambda: runtime.registry.state)

    def _lease(self, lease_id: str) -> Lease:
        self._checks.text("lease_id", lease_id, 128, required=True)
        lease = self._runtime.registry.state.leases.get(lease_id)
        only = tenant_or_all()
        # Another tenant's lease is not there, rather than forbidden: its name says too much.
        if lease is None or (only is not None and lease.key.tenant != only):
            raise NotFoundError("lease", lease_id)
        return lease

    async def GetLease(  # noqa: N802
        self, request: pb.GetLeaseRequest, context: Any
    ) -> pb.GetLeaseResponse:
        """Reads one lease."""
        lease = lease_out(self._lease(request.lease_id))
        await self._runtime.settled()
        return pb.GetLeaseResponse(lease=lease)

    async def ListLeases(  # noqa: N802
        self, request: pb.ListLeasesRequest, context: Any
    ) -> pb.ListLeasesResponse:
        """A page of leases, newest first."""
        checks = self._checks
        size = checks.page_size(request.page_size)
        states = {checks.enum("states", state, LeaseState) for state in request.states}
        session_id = checks.text("session_id", request.session_id, checks.limits.session_id_chars)
        worker_id = checks.worker_id("worker_id", request.worker_id, required=False)
        after = checks.page_token(request.page_token, int, int)
        floor = tuple(after) if after else None
        only = tenant_or_all()
        page: list[Lease] = []
        for lease in self._runtime.registry.state.leases.newest():
            if (
                (floor is None or lease.order < floor)
                and (only is None or lease.key.tenant == only)
                and (not states or lease.state in states)
                and (not session_id or lease.key.session_id == session_id)
                and (
                    not worker_id
                    or worker_id in (lease.source.worker_id, lease.destination.worker_id)
                )
            ):
                page.append(lease)
                if len(page) > size:
                    break
        shown = [lease_out(lease) for lease in page[:size]]
        await self._runtime.settled()
        return pb.ListLeasesResponse(
            leases=shown,
            next_page_token=checks.next_page(*page[size - 1].order) if len(page) > size else "",
        )

    async def RenewLease(  # noqa: N802
        self, request: pb.RenewLeaseRequest, context: Any
    ) -> pb.RenewLeaseResponse:
        """Starts an extension."""
        self._checks.request_id(request.request_id)
        self._lease(request.lease_id)
        ttl_ns = self._checks.duration("ttl", request.ttl, RENEW_LEAST_NS)
        lease = await self._runtime.apply(
            lambda now: self._runtime.registry.renew(
                now, request.lease_id, ttl_ns, request.request_id
            )
        )
        return pb.RenewLeaseResponse(lease=lease_out(lease))

    async def RevokeLease(  # noqa: N802
        self, request: pb.RevokeLeaseRequest, context: Any
    ) -> pb.RevokeLeaseResponse:
        """Stops a lease."""
        self._checks.request_id(request.request_id)
        reason = self._checks.text("reason", request.reason, self._checks.limits.text_chars)
        self._lease(request.lease_id)
        lease = await self._runtime.apply(
            lambda now: self._runtime.registry.revoke(now, request.lease_id, reason)
        )
        return pb.RevokeLeaseResponse(lease=lease_out(lease))

    async def WatchLeases(  # noqa: N802
        self, request: pb.WatchLeasesRequest, context: Any
    ) -> AsyncIterator[pb.WatchLeasesResponse]:
        """A snapshot of the open leases, then changes."""
        async for message in watch(
            LEASES, self._hub, self._source, self._runtime, self._checks, request
        ):
            yield message
