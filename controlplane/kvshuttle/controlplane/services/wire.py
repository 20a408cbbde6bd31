"""Agents' messages to reports, and commands to messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.reports import (
    Counters,
    Descriptors,
    Heartbeat,
    Hello,
    LeaseReport,
    LegReport,
    PoolStats,
    PrefixReport,
    ReplicaReport,
    StopReport,
)
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Leg,
    ReplicaState,
    SessionKey,
    TransferOutcome,
    TransferStats,
    WorkerRef,
    WorkerRole,
)
from kvshuttle.controlplane.services.convert import duration, duration_ns, ref_out
from kvshuttle.v1 import agent_service_pb2 as pb
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt
    from google.protobuf.duration_pb2 import Duration

    from kvshuttle.controlplane.model.registry import AgentBatch
    from kvshuttle.v1 import cluster_service_pb2 as cluster
    from kvshuttle.v1 import lease_service_pb2 as leases

__all__ = ["COUNT_MAX", "apply_event", "command_out", "heartbeat_in", "hello_in", "peer_out"]

# What an agent says is kept, summed, stored and shown to callers, so one that is broken must not be
# able to say what cannot be told again.
SPAN_MAX_NS = 366 * 24 * 3_600 * 1_000_000_000
"""A year: as for callers' durations."""
COUNT_MAX = 1 << 40
"""Of tokens and bytes, for callers' too: sums of a million such fit into 64 bits."""
HASH_BYTES = 64
"""The longest hash that vLLM could be set to is 32 bytes."""
CHECKPOINTS = 64
"""Two an octave: no chain of 2^32 blocks has more."""
WORD_CHARS = 64
PAST_INCARNATIONS = 64
"""A process loses its place once in a while, not again and again."""
FALLBACK_REASONS = 64
"""Each is a label of a metric; agents know about twenty."""


def _span(message: Duration) -> int:
    """A duration in ns; nonsense is cut."""
    return min(max(duration_ns(message), 0), SPAN_MAX_NS)


def _count(value: int) -> int:
    return min(value, COUNT_MAX)


def _hash(value: bytes) -> bytes:
    if not 0 < len(value) <= HASH_BYTES:
        raise ValueError(f"a hash has {len(value)} bytes, not 1 to {HASH_BYTES}")
    return value


def _checkpoints(hashes: Sequence[bytes]) -> tuple[bytes, ...]:
    """Of a chain, from its start on."""
    if len(hashes) > CHECKPOINTS:
        raise ValueError(f"{len(hashes)} checkpoints, more than {CHECKPOINTS}")
    found = tuple(hashes)
    if found and not 0 < min(map(len, found)) <= max(map(len, found)) <= HASH_BYTES:
        raise ValueError(f"a checkpoint has not 1 to {HASH_BYTES} bytes")
    return found


def _word(text: str) -> str:
    """A reason: kept in the books and shown; only its start if it is none."""
    return text[:WORD_CHARS]


def _replica_in(message: pb.ReplicaOffered) -> ReplicaReport:
    state = int(message.state) or ReplicaState.HARD
    return ReplicaReport(
        key=SessionKey(message.tenant, message.session_id),
        head_hash=_hash(message.head_hash),
        num_blocks=message.num_blocks,
        num_tokens=_count(message.num_tokens),
        state=ReplicaState(state),
        hold_remaining_ns=_span(message.hold_remaining),
        turn_token=message.turn_token,
        leg=Leg(message.leg) if message.leg else None,
        checkpoints=_checkpoints(message.checkpoints),
    )


def hello_in(message: pb.AgentHello) -> Hello:
    """ValueError for an enum value that is not known."""
    return Hello(
        worker_id=message.worker_id,
        boot_id=message.boot_id,
        role=WorkerRole(message.role),
        url=message.url,
        fingerprint=tuple(sorted((f.name, f.value) for f in message.fingerprint)),
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        bytes_per_block=message.bytes_per_block,
        prefix_caching=message.prefix_caching,
        num_ranks=len(message.ranks),
        ranks=tuple(message.ranks),
        highest_epoch=message.highest_epoch,
        lineage_id=message.lineage_id,
        clock=message.clock,
        vllm_version=message.vllm_version,
        agent_version=message.agent_version,
        nixl_backend=message.nixl_backend,
        push=message.push,
        past=tuple(message.past_incarnations[-PAST_INCARNATIONS:]),
        heads=tuple(
            (x.first_head, x.num_heads) for x in sorted(message.ranks, key=lambda x: x.rank)
        ),
        replicas=tuple(_replica_in(replica) for replica in message.replicas),
        leases=tuple(
            LeaseReport(
                lease.lease_id,
                lease.version,
                lease.is_source,
                lease.transferring,
                WorkerRef(lease.writer.worker_id, lease.writer.incarnation)
                if lease.HasField("writer")
                else None,
            )
            for lease in message.leases
        ),
    )


def _pool_in(message: cluster.PoolStats) -> PoolStats:
    total = message.total_blocks
    return PoolStats(
        total_blocks=total,
        # No part is more than the whole: shares of the pool are decided by, and shown.
        free_blocks=min(message.free_blocks, total),
        held_blocks=min(message.held_blocks, total),
        holds=message.holds,
        quarantined_blocks=min(message.quarantined_blocks, total),
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        open_leases=message.open_leases,
    )


def heartbeat_in(message: pb.AgentHeartbeat) -> Heartbeat:
    """A heartbeat."""
    counters = message.counters
    return Heartbeat(
        clock=message.clock,
        pool=_pool_in(message.pool),
        counters=Counters(
            transfers_completed=counters.transfers_completed,
            forward_bytes=counters.forward_bytes,
            return_bytes=counters.return_bytes,
            forward_tokens=counters.forward_tokens,
            returned_tokens=counters.returned_tokens,
            computed_tokens=counters.computed_tokens,
            local_hit_tokens=counters.local_hit_tokens,
            eager_tokens=counters.eager_tokens,
            pushed_tokens=counters.pushed_tokens,
            fallbacks=tuple(
                (_word(reason), count)
                for reason, count in sorted(counters.fallbacks.items())[:FALLBACK_REASONS]
            ),
        ),
    )


def _stats_in(message: leases.TransferStats) -> TransferStats:
    return TransferStats(
        blocks=message.blocks,
        tokens=_count(message.tokens),
        bytes=_count(message.bytes),
        transfer_ns=_span(message.transfer_time),
        wait_ns=_span(message.wait_time),
        descriptors=_count(message.descriptors),
    )


def _descriptors_in(message: types.BlockDescriptors) -> Descriptors:
    size = message.hash_size or 32
    if size > HASH_BYTES:
        raise ValueError(f"hash_size is {size}, more than {HASH_BYTES}")
    return Descriptors(
        range=BlockRange(message.range.start, message.range.end),
        head_hash=message.hashes[-size:],
        payload=message,
    )


def _seqs_in(seqs: Collection[int]) -> npt.NDArray[np.uint64]:
    return np.fromiter(seqs, np.uint64, len(seqs))


def apply_event(batch: AgentBatch, event: pb.AgentEvent) -> None:
    """One event, as a call. ValueError for an enum value that is not known."""
    match event.WhichOneof("event"):
        case "offered":
            batch.offered(_replica_in(event.offered))
        case "replica_changed":
            changed = event.replica_changed
            batch.replica_changed(
                SessionKey(changed.tenant, changed.session_id),
                _hash(changed.head_hash),
                ReplicaState(changed.state),
                changed.num_blocks,
                _word(changed.reason),
            )
        case "hardened":
            hardened = event.hardened
            batch.hardened(hardened.lease_id, hardened.version, _descriptors_in(hardened.blocks))
        case "refused":
            batch.refused(event.refused.lease_id, _word(event.refused.reason) or "REFUSED")
        case "extended":
            extended = event.extended
            batch.extended(extended.lease_id, extended.version, extended.is_source)
        case "leases_needed":
            needed = event.leases_needed
            batch.leases_needed(needed.lease_epoch, _seqs_in(needed.lease_seqs))
        case "leases_extended":
            done = event.leases_extended
            batch.leases_extended(done.extension, _seqs_in(done.missing_seqs))
        case "active":
            batch.active(event.active.lease_id)
        case "stopped":
            stopped = event.stopped
            batch.stopped(
                stopped.lease_id,
                StopReport(
                    TransferOutcome(stopped.outcome),
                    _word(stopped.reason),
                    _stats_in(stopped.stats),
                    stopped.is_source,
                ),
            )
        case "source_released":
            released = event.source_released
            batch.source_released(released.lease_id, _word(released.reason))
        case "prefix_wanted":
            wanted = event.prefix_wanted
            batch.prefix_wanted(
                PrefixReport(
                    turn_token=wanted.turn_token,
                    leg=Leg(wanted.leg),
                    checkpoints=_checkpoints(wanted.checkpoints),
                    have_blocks=wanted.have_blocks,
                    usable_blocks=wanted.usable_blocks,
                )
            )
        case "leg_computed":
            leg = event.leg_computed
            batch.computed(
                LegReport(
                    turn_token=leg.turn_token,
                    leg=Leg(leg.leg),
                    prompt_tokens=_count(leg.prompt_tokens),
                    local_hit_tokens=_count(leg.local_hit_tokens),
                    external_tokens=_count(leg.external_tokens),
                    computed_tokens=_count(leg.computed_tokens),
                    compute_ns=_span(leg.compute_time),
                )
            )
        case None:
            raise ValueError("an event without a kind that this version knows")


def peer_out(peer: c.AnnouncePeer) -> pb.Peer:
    """Another worker's memory."""
    return pb.Peer(
        worker=ref_out(peer.worker),
        ranks=cast("tuple[pb.RankEndpoint, ...]", peer.ranks or ()),
        num_blocks=peer.num_blocks,
    )


def _push_out(push: c.PushPlan | None) -> pb.PushPlan | None:
    if push is None:
        return None
    return pb.PushPlan(
        lease_id=push.lease_id,
        version=push.version,
        peer=ref_out(push.peer),
        ttl=duration(push.ttl_ns),
        lease_epoch=push.epoch,
        lease_seq=push.seq,
    )


def command_out(command: c.Command) -> pb.AgentCommand:
    """An order, as a message."""
    match command:
        case c.ExpectTurn():
            return pb.AgentCommand(
                expect_turn=pb.ExpectTurn(
                    turn_token=command.turn_token,
                    tenant=command.key.tenant,
                    session_id=command.key.session_id,
                    turn=command.turn,
                    leg=types.Leg.ValueType(command.leg),
                    lease_id=command.lease_id,
                    lease_follows=command.lease_follows,
                    lookup_wait=duration(command.lookup_wait_ns),
                    retention=duration(command.retention_ns),
                    min_tokens=command.min_tokens,
                    replica_blocks=command.replica_blocks,
                    push=_push_out(command.push),
                    may_ask=command.may_ask,
                    block_compute_time=duration(command.block_compute_ns),
                )
            )
        case c.ForgetTurn(turn_token, leg):
            return pb.AgentCommand(
                forget_turn=pb.ForgetTurn(turn_token=turn_token, leg=types.Leg.ValueType(leg))
            )
        case c.Harden():
            return pb.AgentCommand(
                harden=pb.Harden(
                    lease_id=command.lease_id,
                    version=command.version,
                    tenant=command.key.tenant,
                    session_id=command.key.session_id,
                    head_hash=command.head_hash,
                    range=types.BlockRange(start=command.range.start, end=command.range.end),
                    ttl=duration(command.ttl_ns),
                    guard=duration(command.guard_ns),
                    destination=ref_out(command.destination),
                    lease_epoch=command.epoch,
                    lease_seq=command.seq,
                )
            )
        case c.Grant():
            return pb.AgentCommand(
                grant=pb.Grant(
                    lease_id=command.lease_id,
                    version=command.version,
                    turn_token=command.turn_token,
                    direction=types.Direction.ValueType(command.direction),
                    source=ref_out(command.source),
                    blocks=cast("types.BlockDescriptors", command.blocks.payload),
                    ttl=duration(command.ttl_ns),
                    as_of=command.as_of,
                    lease_epoch=command.epoch,
                    lease_seq=command.seq,
                    eager=command.eager_for is not None,
                    tenant=command.eager_for.tenant if command.eager_for else "",
                    session_id=command.eager_for.session_id if command.eager_for else "",
                    push=command.push_to is not None,
                    destination=ref_out(command.push_to) if command.push_to else None,
                    landing_version=command.landing_version,
                )
            )
        case c.Extend():
            return pb.AgentCommand(
                extend=pb.Extend(
                    lease_id=command.lease_id,
                    version=command.version,
                    ttl=duration(command.ttl_ns),
                    guard=duration(command.guard_ns),
                    as_of=command.as_of,
                    is_source=command.is_source,
                )
            )
        case c.ExtendLeases():
            return pb.AgentCommand(
                extend_leases=pb.ExtendLeases(
                    extension=command.extension,
                    lease_epoch=command.epoch,
                    lease_seqs=command.seqs.tolist(),
                    ttl=duration(command.ttl_ns),
                    guard=duration(command.guard_ns),
                    as_of=command.as_of,
                    is_source=command.is_source,
                )
            )
        case c.Revoke(lease_id, version, reason, turn_token, is_source):
            return pb.AgentCommand(
                revoke=pb.Revoke(
                    lease_id=lease_id,
                    version=version,
                    reason=reason,
                    turn_token=turn_token,
                    is_source=is_source,
                )
            )
        case c.LandingGranted(lease_id, version):
            return pb.AgentCommand(
                landing_granted=pb.LandingGranted(lease_id=lease_id, version=version)
            )
        case c.WriterStopped(lease_id, version, reason, pull_follows):
            return pb.AgentCommand(
                writer_stopped=pb.WriterStopped(
                    lease_id=lease_id, version=version, reason=reason, pull_follows=pull_follows
                )
            )
        case c.ReaderStopped(lease_id, version):
            return pb.AgentCommand(
                reader_stopped=pb.ReaderStopped(lease_id=lease_id, version=version)
            )
        case c.ReleaseReplica(key, head_hash):
            return pb.AgentCommand(
                release_replica=pb.ReleaseReplica(
                    tenant=key.tenant, session_id=key.session_id, head_hash=head_hash
                )
            )
        case c.RetainReplica(key, head_hash, retention_ns, keep_blocks):
            return pb.AgentCommand(
                retain_replica=pb.RetainReplica(
                    tenant=key.tenant,
                    session_id=key.session_id,
                    head_hash=head_hash,
                    retention=duration(retention_ns),
                    keep_blocks=keep_blocks,
                )
            )
        case c.AnnouncePeer():
            return pb.AgentCommand(peer=peer_out(command))
        case c.PeerFenced(worker):
            return pb.AgentCommand(peer_fenced=pb.PeerFenced(worker=ref_out(worker)))
        case c.Drain(undo):
            return pb.AgentCommand(drain=pb.Drain(undo=undo))
        case c.Fenced(reason):
            return pb.AgentCommand(fenced=pb.Fenced(reason=reason))
