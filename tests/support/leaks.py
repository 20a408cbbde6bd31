"""Nothing may be left behind: no lease, no hold, no block, no process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvshuttle.dataplane.clock import boottime_ns
from kvshuttle.v1 import cluster_service_pb2, lease_service_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.localstack import ControlPlaneView

# Ends of sessions travel to the agents at once; what agents say back comes with their next
# heartbeat. A lease whose reader is dead ends at its deadline.
SETTLE_TIMEOUT_S = 45.0
POLL_S = 0.1

_CONNECTED = (cluster_service_pb2.WORKER_STATE_READY, cluster_service_pb2.WORKER_STATE_DRAINING)


def free_blocks(view: ControlPlaneView) -> dict[str, int]:
    """The free blocks of all connected workers by worker id, counted from now on and while nothing
    runs: the last heartbeat may be of when an engine warmed up. AssertionError while something goes
    on running, or does not say."""
    asked = boottime_ns()
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        workers = {
            worker_id: worker
            for worker_id, worker in view.workers().items()
            if worker.state in _CONNECTED
        }
        busy = [
            worker_id
            for worker_id, worker in workers.items()
            if worker.pool_clock <= asked
            or worker.pool.running_requests
            or worker.pool.waiting_requests
        ]
        if workers and not busy:
            return {worker_id: worker.pool.free_blocks for worker_id, worker in workers.items()}
        assert time.monotonic() < deadline, f"still running: {', '.join(busy) or 'no worker'}"
        time.sleep(POLL_S)


def leaks(view: ControlPlaneView, baseline: Mapping[str, int]) -> list[str]:
    """What is still held on the workers of `baseline`, in words."""
    found = [
        f"lease {lease.lease_id} of {lease.session_id} turn {lease.turn} is "
        f"{lease_service_pb2.LeaseState.Name(lease.state)}"
        for lease in view.open_leases()
    ]
    workers = view.workers()
    for worker_id in sorted(baseline):
        worker = workers.get(worker_id)
        if worker is None:
            found.append(f"{worker_id} is not listed")
            continue
        found += _pool_leaks(worker, baseline[worker_id])
    return found


def _pool_leaks(worker: cluster_service_pb2.Worker, free: int) -> list[str]:
    pool = worker.pool
    name = worker.ref.worker_id
    found = [
        f"{name} has {count} {what}"
        for what, count in (
            ("held blocks", pool.held_blocks),
            ("holds", pool.holds),
            ("blocks in quarantine", pool.quarantined_blocks),
            ("open leases", pool.open_leases),
            ("running requests", pool.running_requests),
            ("waiting requests", pool.waiting_requests),
        )
        if count
    ]
    if pool.free_blocks != free:
        found.append(f"{name} has {pool.free_blocks} free blocks, had {free}")
    return found


def assert_nothing_leaked(
    view: ControlPlaneView,
    baseline: Mapping[str, int],
    *,
    timeout_s: float = SETTLE_TIMEOUT_S,
    end_sessions: bool = True,
) -> None:
    """Ends all sessions, then waits until nothing is held and the pools are as before.

    Only what a worker has counted since the asking counts: a heartbeat may lie a while, and any
    event renews `heartbeat_time` but not the counts. The workers are of this machine, and so is
    their clock. Raises AssertionError with what is left after `timeout_s`.
    """
    if end_sessions:
        view.end_all_sessions()
    asked = boottime_ns()
    deadline = time.monotonic() + timeout_s
    while True:
        workers = view.workers()
        fresh = all(
            worker_id in workers and workers[worker_id].pool_clock > asked for worker_id in baseline
        )
        found = leaks(view, baseline)
        if fresh and not found:
            return
        if time.monotonic() > deadline:
            raise AssertionError("left behind: " + ("; ".join(found) or "no heartbeat since"))
        time.sleep(POLL_S)
