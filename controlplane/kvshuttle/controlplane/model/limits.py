"""The one place for limits and defaults, each with its reason. Times are in nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

__all__ = ["MS", "SECOND", "Budget", "Limits", "TenantLimits"]

MICROSECOND = 1_000
MS = 1_000_000
SECOND = 1_000 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have, where it differs from what everybody may; None: as everybody."""

    sessions: int | None = None
    running_turns: int | None = None
    leased_share: float | None = None
    held_share: float | None = None


_AS_EVERYBODY = TenantLimits()


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tenant may have: numbers, and shares of each worker's pool. A share of 0: no limit."""

    sessions: int
    running_turns: int
    leased_share: float
    held_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every number that the control plane goes by."""

    # -- leases --------------------------------------------------------------------------------
    lease_ttl_ns: int = 30 * SECOND
    """A read takes milliseconds, but the prefill request that uses it may queue at its engine
    first. 30 s covers a deep queue; a hold that nobody uses costs its blocks for as long."""
    lease_ttl_max_ns: int = 600 * SECOND
    """Cap of RenewLease: no lease pins memory for longer without being asked for again."""
    lease_lifetime_max_ns: int = 3_600 * SECOND
    """Absolute cap over all renewals, so that extensions over reconnects end."""
    guard_ns: int = 5 * SECOND
    """Longest time from asking the source to harden until the grant. The source keeps the range
    for this much longer than the TTL; longer means memory, shorter means lost grants when an
    engine's step is long (a harden waits for the running prefill step)."""
    clock_drift_ppm: int = 200
    """Bound on the rate difference of two machines' clocks; quartz is within 100 ppm each."""
    ended_lease_kept_ns: int = 600 * SECOND
    """How long an ended lease stays listed."""
    ended_leases_max: int = 20_000
    """At most this many ended leases stay listed; the oldest go first. Bounds memory and disk."""

    # -- budgets -------------------------------------------------------------------------------
    leased_share_worker: float = 0.5
    """Share of a source's pool that leases may hold. A lease pins blocks that running requests
    could otherwise take back from replicas, so half stays out of reach of them. 0: no limit."""
    leased_share_tenant: float = 0.4
    """The same for one tenant: what is left is there for another at once. 0: no limit."""
    held_share_tenant: float = 0.0
    """Share of a worker's pool that one tenant's replicas may hold hard. 0: no limit, since those
    who hold most give up first as soon as a worker holds too much."""
    contended_share: float = 0.75
    """Up to this share of a budget a tenant may have as much as its cap allows; beyond, no more
    than an equal part. The last quarter is for those who have little or come new."""
    leaving_share: float = 0.1
    """Share of a pool that counts as free because its readers were told to stop: they answer
    within a round trip. Readers that do not answer must not make more of it than this."""
    lease_unread_ns: int = 1 * SECOND
    """A granted lease may be stopped in favour of another only when nobody has read it for so
    long: before, its request is likely on its way (a lookup waits 0.3 s at most)."""
    free_share_min: float = 0.05
    """Watermark: with less of its pool free, a worker is asked to hold nothing more. vLLM's free
    blocks include cached ones, so so few mean that it is about to preempt requests."""
    quarantine_share: float = 0.1
    """Share of its pool in quarantine beyond which a worker is granted nothing to read; the agent
    has the same limit for its landing zones (`kvshuttle.dataplane.limits.QUARANTINE_SHARE`)."""
    turns_per_worker: int = 1_024
    """Four times what vLLM runs at once by default (`max_num_seqs` 256): the rest queues there."""
    turns_per_tenant: int = 4_096
    sessions_max: int = 2_000_000
    """A session takes about a KiB: this bounds the process at a few GiB."""
    sessions_per_tenant: int = 1_500_000
    """Leaves a quarter to others."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))
    """Tenants whose limits are their own."""

    # -- agents --------------------------------------------------------------------------------
    heartbeat_ns: int = SECOND
    """Also the age of a grant's `as_of`: what a grant loses of its TTL at most."""
    silence_ns: int = 5 * SECOND
    """Five heartbeats: one long engine step or a lost packet is not a loss."""
    hello_wait_ns: int = 10 * SECOND
    """A stream that does not say who it is in this time is ended."""
    epoch_max: int = 1 << 23
    """The highest epoch that an agent is believed. Each start of a control plane is one, so no
    real one comes near; above 2^24 the numbers of changes (`state.REVISIONS_PER_EPOCH`) would not
    fit into 64 bits."""
    block_bytes_max: int = 1 << 34
    """Bytes of KV in one block: 16 GiB is more than any engine's whole layer cache."""
    fingerprint_fields: int = 64
    ranks_max: int = 1_024
    lost_worker_kept_ns: int = 3_600 * SECOND
    """How long a lost or fenced worker stays listed."""
    events_per_message: int = 1_000
    commands_per_message: int = 1_000
    extensions_per_message: int = 100_000
    """All are in the API's text."""
    commands_bytes: int = 2 << 20
    """Bytes of commands in one message to an agent, unless one command has more: a grant over 100k
    tokens has some 220 KB, an agent takes messages of 32 MiB, and writing this much takes ms."""
    command_queue_max: int = 20_000
    """Commands waiting on one stream; a stream beyond it has stalled and is ended."""
    agent_message_bytes: int = 32 << 20
    """A hello carries NIXL metadata and the whole inventory."""

    # -- turns and sessions --------------------------------------------------------------------
    lookup_wait_ns: int = 300 * MS
    """Shortest limit of the time for which a lookup holds a request back, waiting for its grant: a
    harden and a grant take some ms on idle engines and one step on a busy one. Where computing the
    range is predicted to take longer, the limit is that: who waits as long as the alternative
    takes loses at most a factor of two, whatever happens."""
    lookup_wait_max_ns: int = 10 * SECOND
    """However long computing would take: a grant that is not there by now will not come."""
    min_tokens: int = 64
    """Fewer missing tokens than this are never loaded: a step costs more than it spares."""
    direct_tokens: int = 256
    """A turn with no more new tokens than this may run at decode alone, where its KV is: one chunk
    of vLLM's default budget of 2,048 tokens a step has room for it beside the answers that decode
    generates, which it holds up for that step. 0: never."""
    turn_timeout_ns: int = 600 * SECOND
    """A turn that nobody ends is abandoned after this: its gateway has died."""
    retention_ns: int = 1_800 * SECOND
    """How long decode holds what a turn leaves, at least. Long, because a hold takes nothing from
    anybody while memory is ample, and when it is not, the replicas that are worth least go,
    whatever was promised them: it is there for when nobody rules over the worker. In replays of
    recorded sessions on ample memory 30 min and more did as well as any."""
    retention_share: float = 0.99
    """Longer, until this share of the returns has come that the session's own gaps promise."""
    retention_slack: float = 0.5
    """A hold that differs from the announced one by less than this share of it is left as it is:
    the difference is not worth a message a turn."""
    retention_max_ns: int = 3_600 * SECOND
    """No hold outlasts an hour without being asked for again."""
    gap_prior: float = 0.3
    """Chance that a session comes back within the time for which it has been away already, before
    any gap was seen. Any constant makes the order LRU."""
    gap_prior_weight: float = 10.0
    """Seen gaps that the prior counts as much as."""
    gap_kind_weight: float = 200.0
    """Gaps of one kind that those of all kinds count as much as."""
    gap_own_weight: float = 8.0
    """Gaps of a session's own that its kind counts as much as. This and the two above were chosen
    on one half of the recorded sessions, after trials on all; half or twice as much differs
    little."""
    gaps_watched: int = 4_096
    """Open gaps that are watched at once to learn from: 0.5 MB, and a look takes some ms."""
    gaps_remembered: float = 20_000.0
    """When so many gaps are in the tables, all counts are halved: what is learned follows what
    the clients do."""
    gaps_look_ns: int = 30 * SECOND
    """How often those that are still away are counted."""
    held_share_worker: float = 0.75
    """Share of a worker's pool that may be held. Beyond it the replicas that are worth least turn
    soft, so that a request finds room without waiting for the agent to make it."""
    free_share_relief: float = 0.10
    """Below this share of free blocks replicas turn soft too: running requests have taken what
    holds had left, and go first. Above `free_share_min`, so that leases need not stop."""
    relief_candidates: int = 256
    """Sessions of a worker that are compared at once: some ms."""
    relief_settle_ns: int = 2 * SECOND
    """After replicas of a worker were turned soft its heartbeats need this long to show it."""
    prefill_retention_ns: int = 10 * SECOND
    """How long prefill holds what the forward lease is about to take."""
    session_idle_ns: int = 24 * 3_600 * SECOND
    """A session without a turn for a day is ended: its KV is long gone, only the row is left."""
    ended_session_kept_ns: int = 600 * SECOND
    """How long an ended session stays listed."""
    ended_turns_kept: int = 4
    """Ended turns that a session remembers, so that a late retry finds its turn."""
    forward: Literal["pull", "push", "auto"] = "pull"
    """Which side moves a running turn's KV forward; auto: `forwarding` decides."""
    push_min_compute_ns: int = 100 * MS
    """auto: what prefill must be predicted to compute for a push. Below it there is little to hide
    a transfer behind, and decode's landing zone, which takes two messages and a step of decode's
    engine, may come too late anyway."""
    push_free_share: float = 0.25
    """auto: share of decode's pool that must be free: a landing zone is taken for the whole of the
    computation, and must not make others wait."""
    eager: bool = True
    """Whether what a turn leaves is returned at once."""
    eager_leases_per_worker: int = 8
    """Eager returns open at once a reader: enough to keep a link busy through their round trips,
    few enough that one more request's own read is not long in the same queue."""
    eager_waiting_per_worker: int = 1_000
    """Sessions that wait for such a place; beyond it they come back lazily."""
    hot_sessions: int = 10_000
    hot_leases: int = 50_000
    """Sessions and leases that are kept as objects; those touched longer ago are packed, which
    takes a fifth of the memory and some µs to read again. Some seconds of a busy control plane; of
    leases so many that those that have ended (`ended_leases_max`) and as many open ones are not
    packed one a turn, for 30 MB more."""
    prefix_index_hashes: int = 250_000
    """Hashes by which sessions find what others of their tenant hold, of all tenants together. A
    conversation of 100k tokens has 21 of them. Each takes 0.14 KB with all that belongs to it
    (measured in test_prefixes.py), so this is 35 MB at most; what was of no use for longest goes.
    0: sessions find only their own.
    """
    checkpoint_tokens: int = 64
    """The shortest prefix that is found: fewer tokens are never loaded (`min_tokens`)."""
    replicas_per_session: int = 32
    """More branches than this on one worker: the shortest is released."""

    # -- requests ------------------------------------------------------------------------------
    session_id_chars: int = 256
    request_id_chars: int = 128
    turn_token_chars: int = 128
    """In the API's text; they have 22."""
    worker_id_chars: int = 128
    tenant_chars: int = 128
    text_chars: int = 200
    """Reasons and attestations."""
    url_chars: int = 2_048
    excluded_workers: int = 64
    page_size_default: int = 100
    page_size_max: int = 1_000
    api_message_bytes: int = 1 << 20
    """No request of a client carries more than some ids."""

    operations_per_message: int = 1_000
    """In the API's text."""
    operations_unanswered_max: int = 10_000
    """In the API's text: some seconds of the busiest gateway."""

    # -- connections ---------------------------------------------------------------------------
    streams_per_connection: int = 1_024
    """Calls at once on one connection; more wait at the client. A gateway has at most one for each
    request that it serves."""
    calls_max: int = 10_000
    """Calls at once on one listener; more are refused with RESOURCE_EXHAUSTED. At 0.3 ms a call
    this many are three seconds of work already."""
    stream_stall_ns: int = 60 * SECOND
    """A reader of a stream that takes nothing for so long is let go: six progress messages' time.
    For agents it is `silence_ns`."""
    handshake_timeout_ns: int = 10 * SECOND
    """A connection that has not said that it speaks HTTP/2 (and TLS) by then is closed."""
    connection_idle_ns: int = 300 * SECOND
    """A connection without a call for so long is closed; clients open another by themselves."""

    # -- watches -------------------------------------------------------------------------------
    watch_history: int = 32_768
    """Changes kept for resuming, of sessions and of leases each: some seconds of a busy control
    plane, a reconnection's time. A change keeps its image, 1 to 2 KB."""
    watch_buffer: int = 4_096
    """Changes that wait for one slow reader; beyond it the reader gets a new snapshot."""
    watches_max: int = 512
    watches_per_tenant: int = 64
    """Each costs its buffer and, at its start, a look at all objects."""
    told_per_tick: int = 100
    """Leases that were extended among many, of which watchers are told in one tick: 1,000 a second,
    which leaves the history of changes half a minute, and costs under one percent of a core."""
    watch_progress_ns: int = 10 * SECOND
    snapshot_piece: int = 100
    """Objects in one message of a snapshot: some milliseconds of work, in which nothing is granted,
    and well below the message size of any client."""

    # -- housekeeping --------------------------------------------------------------------------
    tick_ns: int = 100 * MS
    tick_behind_ns: int = 1 * MS
    due_per_tick: int = 25
    """Deadlines handled in one tick, and the pause before the next one while more are due: a burst
    of expirations must not hold up grants. Twenty-five take a millisecond or two, and the next wait
    until these are durable; 25,000 a second are the most."""

    def tenant(self, name: str) -> Budget:
        """What a tenant may have."""
        own = self.tenants.get(name, _AS_EVERYBODY)
        return Budget(
            self.sessions_per_tenant if own.sessions is None else own.sessions,
            self.turns_per_tenant if own.running_turns is None else own.running_turns,
            self.leased_share_tenant if own.leased_share is None else own.leased_share,
            self.held_share_tenant if own.held_share is None else own.held_share,
        )
