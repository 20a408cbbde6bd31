"""Nothing may be left behind: no lease, no hold, no block, no process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvshuttle.v1 import lease_service_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.localstack import ControlPlaneView
    from kvshuttle.v1 import cluster_service_pb2

# Ends of sessions travel to the agents at once; what agents say back comes with their next
# heartbeat. A lease whose reader is dead ends at its deadline.
SETTLE_TIMEOUT_S = 45.0
POLL_S = 0.1


def free_blocks(view: ControlPlaneView) -> dict[str, int]:
    """The workers' free blocks by worker id, as heartbeats have them in which nothing runs: the
    last one may be of when an engine warmed up. AssertionError while something goes on running."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        pools = {
            worker_id: worker.pool
            for worker_id, worker in view.workers().items()
            if worker.pool.total_blocks
        }
        busy = [x for x, pool in pools.items() if pool.running_requests or pool.waiting_requests]
        if not busy:
            return {worker_id: pool.free_blocks for worker_id, pool in pools.items()}
        assert time.monotonic() < deadline, f"still running: {', '.join(busy)}"
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

    Only a heartbeat that is newer than the asking counts. Raises AssertionError with what is left
    after `timeout_s`.
    """
    if end_sessions:
        view.end_all_sessions()
    asked = {
        worker_id: worker.heartbeat_time.ToNanoseconds()
        for worker_id, worker in view.workers().items()
    }
    deadline = time.monotonic() + timeout_s
    while True:
        fresh = all(
            view.workers()[worker_id].heartbeat_time.ToNanoseconds() > asked.get(worker_id, 0)
            for worker_id in baseline
        )
        found = leaks(view, baseline)
        if fresh and not found:
            return
        if time.monotonic() > deadline:
            raise AssertionError("left behind: " + ("; ".join(found) or "no heartbeat since"))
        time.sleep(POLL_S)
