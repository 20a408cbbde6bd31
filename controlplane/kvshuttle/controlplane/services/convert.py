"""Model to message."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Candidate, Placement, Session, Turn
    from kvshuttle.controlplane.model.terms import Hints, TransferStats, WorkerRef
    from kvshuttle.controlplane.model.worker import Worker

__all__ = [
    "duration",
    "duration_ns",
    "lease_out",
    "ref_out",
    "session_out",
    "timestamp",
    "turn_out",
    "worker_out",
]

SECOND = 1_000_000_000
_MOST_NS = 250_000_000_000 * SECOND
"""Within what Duration (10,000 years) and Timestamp (the year 9999) may say."""


@lru_cache(maxsize=1_024)
def duration(ns: int) -> Duration:
    """Nanoseconds as a message; more than it can say is cut to the most that it can. Shared, since
    most are the same few: not to be changed."""
    ns = min(max(ns, -_MOST_NS), _MOST_NS)
    return Duration(seconds=ns // SECOND, nanos=ns % SECOND)


def duration_ns(message: Duration) -> int:
    """A message as nanoseconds."""
    return message.seconds * SECOND + message.nanos


def timestamp(ns: int) -> Timestamp | None:
    """A time; None where there is none. Cut as `duration` cuts."""
    ns = min(max(ns, -_MOST_NS), _MOST_NS)
    return Timestamp(seconds=ns // SECOND, nanos=ns % SECOND) if ns else None


@lru_cache(maxsize=1_024)
def ref_out(ref: WorkerRef) -> types.WorkerRef:
    """A boot. Shared, as durations are: not to be changed."""
    return types.WorkerRef(worker_id=ref.worker_id, incarnation=ref.incarnation)


@lru_cache(maxsize=1_024)
def _placement(placement: Placement | None) -> sessions.Placement | None:
    if placement is None or not placement.worker.worker_id:
        return None
    return sessions.Placement(worker=ref_out(placement.worker), url=placement.url)


def _compared(out: sessions.Plan, candidates: Iterable[Candidate]) -> None:
    """What a plan compared. Field by field and in place: several are made for each turn, and most
    of their fields are 0."""
    for one in candidates:
        to = out.candidates.add()
        to.prefill_worker_id = one.prefill
        to.decode_worker_id = one.decode
        to.return_mode = sessions.ReturnMode.ValueType(one.return_mode)
        to.ttft_us = one.ttft_us
        to.compute_us = one.compute_us
        to.forward_us = one.forward_us
        to.compute_tokens = one.compute_tokens
        if one.queue_us:
            to.queue_us = one.queue_us
        if one.transfer_us:
            to.transfer_us = one.transfer_us
        if one.decode_queue_us:
            to.decode_queue_us = one.decode_queue_us
        if one.assumed:
            to.assumed.extend(one.assumed)
        if one.rejected:
            to.rejected = one.rejected


def turn_out(turn: Turn) -> sessions.Turn:
    """A turn, without its token."""
    plan, usage = turn.plan, turn.usage
    out = sessions.Turn(
        turn=turn.number,
        state=sessions.TurnState.ValueType(turn.state),
        outcome=sessions.TurnOutcome.ValueType(turn.outcome),
        prefill=_placement(turn.prefill),
        decode=_placement(turn.decode),
        plan=sessions.Plan(
            return_mode=sessions.ReturnMode.ValueType(plan.return_mode),
            reason=plan.reason,
            reusable_tokens=plan.reusable_tokens,
            predicted_recompute=duration(plan.predicted_recompute_ns),
            predicted_transfer=duration(plan.predicted_transfer_ns),
            forward_mode=types.ForwardMode.ValueType(plan.forward_mode),
            forward_reason=plan.forward_reason,
            predicted_ttft=duration(plan.predicted_ttft_us * 1_000) if plan.candidates else None,
            placement=plan.placement,
        ),
        begin_time=timestamp(turn.begin_ns),
        end_time=timestamp(turn.end_ns),
        usage=sessions.TurnUsage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            # Of an answer that was not streamed nobody knows it.
            time_to_first_token=duration(usage.ttft_ns) if usage.ttft_ns else None,
        )
        if usage is not None
        else None,
    )
    _compared(out.plan, plan.candidates)
    return out


def _hints(hints: Hints) -> types.SessionHints | None:
    if hints.expected_idle_ns is None and hints.value is None:
        return None
    return types.SessionHints(
        expected_idle=None if hints.expected_idle_ns is None else duration(hints.expected_idle_ns),
        value=types.SessionValue.ValueType(hints.value or 0),
    )


def _replica(replica: Replica) -> sessions.Replica:
    return sessions.Replica(
        worker=ref_out(replica.worker),
        head_hash=replica.head_hash,
        num_blocks=replica.num_blocks,
        num_tokens=replica.num_tokens,
        state=sessions.ReplicaState.ValueType(replica.state),
        expire_time=timestamp(replica.expire_ns),
    )


def session_out(session: Session, replicas: Iterable[Replica]) -> sessions.Session:
    """A session: the turns that run, and the last one that ended."""
    turns = list(session.running())
    if (last := session.last_ended()) is not None:
        turns.append(last)
    turns.sort(key=lambda turn: turn.number)
    return sessions.Session(
        tenant=session.key.tenant,
        session_id=session.key.session_id,
        state=sessions.SessionState.ValueType(session.state),
        create_time=timestamp(session.create_ns),
        update_time=timestamp(session.update_ns),
        turn_count=session.turn_count,
        turns=[turn_out(turn) for turn in turns],
        replicas=[_replica(replica) for replica in replicas],
        hints=_hints(session.hints),
        version=session.version,
    )


def _stats(stats: TransferStats) -> leases.TransferStats:
    return leases.TransferStats(
        blocks=stats.blocks,
        tokens=stats.tokens,
        bytes=stats.bytes,
        transfer_time=duration(stats.transfer_ns),
        wait_time=duration(stats.wait_ns),
        descriptors=stats.descriptors,
    )


def lease_out(lease: Lease) -> leases.Lease:
    """A lease, without its turn's token."""
    return leases.Lease(
        lease_id=lease.lease_id,
        tenant=lease.key.tenant,
        session_id=lease.key.session_id,
        turn=lease.turn,
        direction=types.Direction.ValueType(lease.direction),
        state=leases.LeaseState.ValueType(lease.state),
        source=ref_out(lease.source),
        destination=ref_out(lease.destination),
        range=types.BlockRange(start=lease.range.start, end=lease.range.end)
        if lease.range is not None
        else None,
        head_hash=lease.head_hash,
        epoch=lease.epoch,
        version=lease.version,
        ttl=duration(lease.ttl_ns),
        create_time=timestamp(lease.create_ns),
        grant_time=timestamp(lease.grant_ns),
        end_time=timestamp(lease.end_ns),
        end_reason=lease.end_reason,
        stats=_stats(lease.stats) if lease.stats is not None else None,
        eager=lease.eager,
        push=lease.push,
        source_session_id=lease.source_key.session_id if lease.source_key is not None else "",
    )


def worker_out(worker: Worker, prefill_rate: float) -> cluster.Worker:
    """A worker."""
    pool, counters = worker.pool, worker.counters
    return cluster.Worker(
        ref=ref_out(worker.ref),
        role=types.WorkerRole.ValueType(worker.role),
        state=cluster.WorkerState.ValueType(worker.state),
        url=worker.url,
        fingerprint=[
            cluster.FingerprintField(name=name, value=value) for name, value in worker.fingerprint
        ],
        block_size=worker.block_size,
        bytes_per_block=worker.bytes_per_block,
        pool=cluster.PoolStats(
            total_blocks=pool.total_blocks,
            free_blocks=pool.free_blocks,
            held_blocks=pool.held_blocks,
            holds=pool.holds,
            quarantined_blocks=pool.quarantined_blocks,
            running_requests=pool.running_requests,
            waiting_requests=pool.waiting_requests,
            open_leases=pool.open_leases,
        ),
        counters=cluster.WorkerCounters(
            transfers_completed=counters.transfers_completed,
            forward_bytes=counters.forward_bytes,
            return_bytes=counters.return_bytes,
            forward_tokens=counters.forward_tokens,
            returned_tokens=counters.returned_tokens,
            computed_tokens=counters.computed_tokens,
            local_hit_tokens=counters.local_hit_tokens,
            eager_tokens=counters.eager_tokens,
            pushed_tokens=counters.pushed_tokens,
            fallbacks=dict(counters.fallbacks),
        ),
        register_time=timestamp(worker.register_ns),
        heartbeat_time=timestamp(worker.heard_ns),
        prefill_tokens_per_second=prefill_rate,
        vllm_version=worker.vllm_version,
        agent_version=worker.agent_version,
        nixl_backend=worker.nixl_backend,
        prefix_caching=worker.prefix_caching,
        num_ranks=worker.num_ranks,
        push=worker.push,
        pool_clock=worker.pool_clock,
    )
