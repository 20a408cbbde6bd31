"""What agents report, as plain data. Times in ns.

Fields typed `object` are passed on as they came (NIXL metadata, block ids): the control plane has
no business with them, never stores them and never shows them to a client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
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

__all__ = [
    "Counters",
    "Descriptors",
    "Heartbeat",
    "Hello",
    "LeaseReport",
    "LegReport",
    "PoolStats",
    "PrefixReport",
    "ReplicaReport",
    "StopReport",
]


class PoolStats(Struct, frozen=True, gc=False):
    """A worker's block pool."""

    total_blocks: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    holds: int = 0
    quarantined_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    open_leases: int = 0


class Counters(Struct, frozen=True, gc=False):
    """What a worker counted since its boot."""

    transfers_completed: int = 0
    forward_bytes: int = 0
    return_bytes: int = 0
    forward_tokens: int = 0
    returned_tokens: int = 0
    computed_tokens: int = 0
    local_hit_tokens: int = 0
    eager_tokens: int = 0
    pushed_tokens: int = 0
    fallbacks: tuple[tuple[str, int], ...] = ()


class ReplicaReport(Struct, frozen=True, gc=False):
    """A replica that is offered, or part of an inventory (`turn_token` empty)."""

    key: SessionKey
    head_hash: bytes
    num_blocks: int
    num_tokens: int
    state: ReplicaState
    hold_remaining_ns: int
    turn_token: str = ""
    leg: Leg | None = None
    checkpoints: tuple[bytes, ...] = ()


class PrefixReport(Struct, frozen=True, gc=False):
    """A request looks for KV of other sessions, with the checkpoints of its own chain."""

    turn_token: str
    leg: Leg
    checkpoints: tuple[bytes, ...]
    have_blocks: int
    usable_blocks: int


class LeaseReport(Struct, frozen=True, gc=False):
    """A lease as an agent knows it."""

    lease_id: str
    version: int
    is_source: bool
    transferring: bool = False
    # Of a landing zone: who was to write.
    writer: WorkerRef | None = None


class Hello(Struct, frozen=True, gc=False):
    """Who an agent is and everything that it holds."""

    worker_id: str
    boot_id: str
    role: WorkerRole
    url: str
    fingerprint: tuple[tuple[str, str], ...]
    block_size: int
    num_blocks: int
    bytes_per_block: int
    prefix_caching: bool
    num_ranks: int
    ranks: object
    highest_epoch: int
    lineage_id: str
    clock: int
    vllm_version: str = ""
    agent_version: str = ""
    nixl_backend: str = ""
    push: bool = False
    past: tuple[int, ...] = ()
    # The KV heads of each rank: (first, how many); 0: not to be taken apart by heads.
    heads: tuple[tuple[int, int], ...] = ()
    replicas: tuple[ReplicaReport, ...] = ()
    leases: tuple[LeaseReport, ...] = ()


class Heartbeat(Struct, frozen=True, gc=False):
    """A sign of life; `clock` is the agent's own and opaque here."""

    clock: int
    pool: PoolStats = field(default_factory=PoolStats)
    counters: Counters = field(default_factory=Counters)


class Descriptors(Struct, frozen=True, gc=False):
    """What a source holds for a lease. Only range and head are looked at."""

    range: BlockRange
    head_hash: bytes
    payload: object


class StopReport(Struct, frozen=True, gc=False):
    """How a destination's use of a lease ended."""

    outcome: TransferOutcome
    reason: str
    stats: TransferStats
    is_source: bool = False


class LegReport(Struct, frozen=True, gc=False):
    """A leg's prompt was computed."""

    turn_token: str
    leg: Leg
    prompt_tokens: int
    local_hit_tokens: int
    external_tokens: int
    computed_tokens: int
    compute_ns: int
