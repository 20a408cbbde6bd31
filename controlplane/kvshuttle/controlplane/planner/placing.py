"""Where a conversation's KV is, and who could take a turn: candidates, before any prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from kvshuttle.controlplane.model.errors import NoWorkerError
from kvshuttle.controlplane.model.terms import ReplicaState, WorkerRole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.worker import Worker
    from kvshuttle.controlplane.planner.rates import Rates

__all__ = ["Choice", "Fleet", "able", "decoders", "place", "prefills"]

QUEUE_STEP_NS = 10_000_000
"""Queues of a new session's candidates that differ by less than this count as equal."""


class Fleet(Struct, frozen=True):
    """The workers by name, and how many turns and replicas each has."""

    workers: Mapping[str, Worker]
    turns_on: Mapping[str, int]
    replicas_on: Mapping[str, int]


class Choice(Struct, frozen=True):
    """A placement. `prefill` is None for a turn that runs on one worker; `replica` is the best one
    of the session, on `holder`; `lack` says why there is none; `placement` why it is here.
    `runner_up` is the next best prefill worker of a session that has been nowhere yet."""

    decode: Worker
    prefill: Worker | None
    replica: Replica | None
    lack: str
    source: Worker | None = None
    placement: str = ""
    runner_up: Worker | None = None

    @property
    def holder(self) -> Worker:
        """Who has the replica: decode, unless the turn has left it."""
        return self.source or self.decode


def place(
    rates: Rates,
    fleet: Fleet,
    session: Session,
    replicas: Collection[Replica],
    excluded: Collection[str],
    now_ns: int,
) -> Choice:
    """Decode stays where the longest replica lies, prefill where it was; else the least loaded.
    NoWorkerError when nothing is left. A turn that stays where the one before ran is placed without
    a look at all workers."""
    if replicas:
        stays = _stay(fleet.workers, session, replicas, excluded)
        if stays is not None:
            return stays
    ready = able(fleet, excluded)
    if not ready:
        raise NoWorkerError(
            "no worker can take this turn: start one, or end a drain",
            known=len(fleet.workers),
            excluded=len(excluded),
        )

    def load(worker: Worker) -> tuple[int, int, int, str]:
        name = worker.ref.worker_id
        return (
            rates.queue_ns(worker, now_ns) // QUEUE_STEP_NS,
            fleet.turns_on.get(name, 0),
            fleet.replicas_on.get(name, 0),
            name,
        )

    def decode_load(worker: Worker) -> tuple[int, ...]:
        queue = rates.decode_queue_ns(worker) // QUEUE_STEP_NS
        return (queue, *load(worker))  # type: ignore[return-value]

    can_decode = decoders(ready)
    best = _best(fleet.workers, replicas, excluded, {w.ref.worker_id for w in can_decode})
    if best is not None:
        decode = fleet.workers[best.worker.worker_id]
    else:
        decode = min(can_decode, key=decode_load)
    lack = "" if best else _lack(fleet.workers, replicas, excluded)
    prefill, runner_up = _place_prefill(ready, decode, session, load)
    if best is not None:
        placement = "KV_IS_THERE"
    else:
        placement = lack if replicas and lack != "NO_REPLICA" else "LEAST_LOADED"
    return Choice(decode, prefill, best, lack, None, placement, runner_up)


def able(fleet: Fleet, excluded: Collection[str]) -> list[Worker]:
    """Workers that take turns."""
    return [w for w in fleet.workers.values() if w.ready and w.ref.worker_id not in excluded]


def decoders(ready: list[Worker]) -> list[Worker]:
    """Who may generate. A worker whose role is only to prefill decodes when nothing else is left: a
    slow answer is better than none."""
    return [w for w in ready if w.role is not WorkerRole.PREFILL] or ready


def prefills(ready: list[Worker], decode: Worker) -> list[Worker]:
    """Who may compute a prompt for this decode worker; nobody where it does both."""
    if decode.role is WorkerRole.PREFILL:
        return []
    others = [w for w in ready if w is not decode]
    found = [w for w in others if w.role is WorkerRole.PREFILL]
    if not found and decode.role is WorkerRole.DECODE:
        found = [w for w in others if w.role is WorkerRole.BOTH]
    return found


def _stay(
    known: Mapping[str, Worker],
    session: Session,
    replicas: Collection[Replica],
    excluded: Collection[str],
) -> Choice | None:
    prefill = known.get(session.last_prefill)
    if (
        prefill is None
        or not prefill.ready
        or prefill.role is not WorkerRole.PREFILL
        or session.last_prefill in excluded
    ):
        return None
    best = _best(known, replicas, excluded)
    if best is None:
        return None
    return Choice(known[best.worker.worker_id], prefill, best, "", None, "KV_IS_THERE")


def _best(
    known: Mapping[str, Worker],
    replicas: Collection[Replica],
    excluded: Collection[str],
    among: Collection[str] | None = None,
) -> Replica | None:
    """The longest replica on a worker that may decode (`among`; None: any that does not only
    prefill), a hard one of two that are as long."""
    best = None
    for replica in replicas:
        name = replica.worker.worker_id
        at = known.get(name)
        if (
            at is None
            or at.ref != replica.worker
            or replica.state is ReplicaState.GONE
            or not replica.num_blocks
            or not at.ready
            or (at.role is WorkerRole.PREFILL if among is None else name not in among)
            or name in excluded
        ):
            continue
        if best is None or (replica.num_blocks, replica.state is ReplicaState.HARD) > (
            best.num_blocks,
            best.state is ReplicaState.HARD,
        ):
            best = replica
    return best


def _place_prefill(
    ready: list[Worker],
    decode: Worker,
    session: Session,
    load: Callable[[Worker], tuple[int, int, int, str]],
) -> tuple[Worker | None, Worker | None]:
    """Who computes the prompt, and who would be next."""
    candidates = prefills(ready, decode)
    if not candidates:
        return None, None
    for worker in candidates:
        if worker.ref.worker_id == session.last_prefill:
            return worker, None
    first = min(candidates, key=load)
    second = min((w for w in candidates if w is not first), key=load, default=None)
    return first, second


def _lack(
    known: Mapping[str, Worker],
    replicas: Collection[Replica],
    excluded: Collection[str],
) -> str:
    """Why none of a session's replicas can be used, in one word."""
    words = set()
    for replica in replicas:
        worker = known.get(replica.worker.worker_id)
        if worker is not None and worker.role is WorkerRole.PREFILL:
            continue
        if worker is None or worker.ref != replica.worker or not worker.connected:
            words.add("WORKER_LOST")
        elif not worker.ready:
            words.add("DRAINING")
        elif replica.worker.worker_id in excluded:
            words.add("WORKER_EXCLUDED")
    for word in ("WORKER_LOST", "DRAINING", "WORKER_EXCLUDED"):
        if word in words:
            return word
    return "NO_REPLICA"
