"""ClusterService."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.controlplane import __version__
from kvshuttle.controlplane.model.errors import InvalidFieldError, NotFoundError
from kvshuttle.controlplane.model.terms import WorkerRef
from kvshuttle.controlplane.services.convert import duration, worker_out
from kvshuttle.v1 import cluster_service_pb2 as pb
from kvshuttle.v1 import cluster_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from typing import Any

    from kvshuttle.controlplane.model.worker import Worker
    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.checks import Checks

__all__ = ["About", "ClusterService"]


@dataclass(frozen=True, slots=True)
class About:
    """What GetStatus says of the process."""

    start_ns: int
    store: str
    insecure_agents: bool


class ClusterService(pb_grpc.ClusterServiceServicer):
    """Each method: check, call, convert."""

    def __init__(self, runtime: Runtime, checks: Checks, about: About) -> None:
        self._runtime = runtime
        self._checks = checks
        self._about = about

    def _out(self, worker: Worker) -> pb.Worker:
        rate = self._runtime.registry.planner.rates.prefill_rate(worker.ref.worker_id)
        return worker_out(worker, rate)

    async def GetWorker(  # noqa: N802
        self, request: pb.GetWorkerRequest, context: Any
    ) -> pb.GetWorkerResponse:
        """Reads one worker."""
        name = self._checks.worker_id("worker_id", request.worker_id)
        worker = self._runtime.registry.state.workers.get(name)
        if worker is None:
            raise NotFoundError("worker", name)
        message = self._out(worker)
        await self._runtime.settled()
        return pb.GetWorkerResponse(worker=message)

    async def ListWorkers(  # noqa: N802
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersResponse:
        """A page of workers, by id."""
        size = self._checks.page_size(request.page_size)
        after = self._checks.page_token(request.page_token, str)
        workers = self._runtime.registry.state.workers
        names = sorted(name for name in workers if after is None or name > after[0])
        page = [self._out(workers[name]) for name in names[:size]]
        await self._runtime.settled()
        return pb.ListWorkersResponse(
            workers=page,
            next_page_token=self._checks.next_page(names[size - 1]) if len(names) > size else "",
        )

    async def DrainWorker(  # noqa: N802
        self, request: pb.DrainWorkerRequest, context: Any
    ) -> pb.DrainWorkerResponse:
        """Drains a worker, or puts it back."""
        self._checks.request_id(request.request_id)
        name = self._checks.worker_id("worker_id", request.worker_id)
        worker = await self._runtime.apply(
            lambda now: self._runtime.registry.drain(now, name, request.undo, request.request_id)
        )
        return pb.DrainWorkerResponse(worker=self._out(worker))

    async def FenceWorker(  # noqa: N802
        self, request: pb.FenceWorkerRequest, context: Any
    ) -> pb.FenceWorkerResponse:
        """Attests that a boot is dead."""
        self._checks.request_id(request.request_id)
        name = self._checks.worker_id("worker.worker_id", request.worker.worker_id)
        if request.worker.incarnation == 0:
            raise InvalidFieldError(
                "worker.incarnation", 0, "say which boot is known to be dead (see GetWorker)"
            )
        attestation = self._checks.text(
            "attestation", request.attestation, self._checks.limits.text_chars
        )
        ref = WorkerRef(name, request.worker.incarnation)
        worker = await self._runtime.apply(
            lambda now: self._runtime.registry.fence(now, ref, attestation, request.request_id)
        )
        return pb.FenceWorkerResponse(worker=self._out(worker))

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Any
    ) -> pb.GetStatusResponse:
        """The control plane's own state."""
        state = self._runtime.registry.state
        message = pb.GetStatusResponse(
            version=__version__,
            epoch=state.epoch,
            lineage_id=state.lineage_id,
            uptime=duration(self._runtime.clock.now_ns() - self._about.start_ns),
            ready_workers=sum(worker.ready for worker in state.workers.values()),
            active_sessions=state.active_sessions,
            running_turns=len(state.turns),
            open_leases=state.leases.open_count,
            store=self._about.store,
            insecure_agents=self._about.insecure_agents,
        )
        await self._runtime.settled()
        return message
