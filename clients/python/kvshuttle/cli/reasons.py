"""Every reason word that kvshuttle uses, in a sentence, with what to do about it.

The words are of three kinds: why a plan is as it is (`Plan.reason`), why a lease ended
(`Lease.end_reason`), and why a leg recomputed (a worker's `fallbacks`). A test compares this table
with the words in the control plane and the agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOTHING: Final = "nothing"


@dataclass(frozen=True, slots=True)
class Reason:
    """One word's meaning. `fine` words name the usual course, not a trouble."""

    meaning: str
    remedy: str
    fine: bool = False


def _fine(meaning: str, remedy: str = NOTHING) -> Reason:
    return Reason(meaning, remedy, fine=True)


_FORWARD = {
    "CONFIGURED": _fine("the control plane is set to this way (--forward)"),
    "OVERLAP_PAYS": _fine("prefill computes for long enough to hide the transfer behind it"),
    "TOO_SHORT_TO_OVERLAP": _fine("prefill computes too little to hide a transfer behind it"),
    "PROMPT_UNKNOWN": _fine("the length of the prompt was not known when the turn began"),
    "NOT_ABLE": Reason(
        "one of the two agents cannot push, or cannot be pushed to",
        "bring both engines' kvshuttle to one version",
    ),
    "SPLIT_DIFFERS": _fine(
        "prefill and decode have other numbers of tensor-parallel ranks, and a push goes rank to "
        "rank",
        "nothing; where pushes matter, start both with the same --tensor-parallel-size",
    ),
    "DESTINATION_FULL": Reason(
        "decode had too few free blocks, or too many in quarantine, for a landing zone",
        "see kvshuttle workers; fence what is dead, or give decode more memory",
    ),
}

_PLANS = {
    "CHEAPER_TO_MOVE": _fine("moving the KV was predicted faster than computing it again"),
    "CHEAPER_TO_RECOMPUTE": _fine(
        "computing again was predicted as fast as moving, or too little could be reused",
        "nothing; where the prediction is wrong, compare with a turn of return policy ALWAYS",
    ),
    "SAME_WORKER": _fine("the turn ran on the one worker that holds its KV: nothing had to move"),
    "NO_REPLICA": Reason(
        "no worker held KV of this session: it is the first turn, or what was left had expired or "
        "was reused",
        "for a later turn: give the gap with expected_idle (SessionHints), or raise --retention of "
        "the control plane, if decode has room",
    ),
    "WORKER_LOST": Reason(
        "the worker that held the KV is gone, or restarted",
        "see kvshuttle workers; if its process is dead, fence it and start it again",
    ),
    "WORKER_EXCLUDED": Reason(
        "the caller asked not to use the worker that held the KV, having just seen it fail",
        "look at that worker's health and at the gateway's log",
    ),
    "DRAINING": Reason(
        "the worker that holds the KV takes no new work",
        "expected during a drain; kvshuttle drain --undo WORKER puts it back",
    ),
    "POLICY_NEVER": Reason(
        "the request asked for no return",
        "leave X-KVShuttle-Return: never (ReturnPolicy NEVER) out, if that was not meant",
    ),
    "POLICY_ALWAYS": _fine("the request asked for a return, whatever the prediction said"),
    "SHORT_PROMPT": _fine(
        "so few tokens were new that decode, which holds the rest, was predicted to compute them "
        "before prefill could have sent anything"
    ),
    "EAGER_HIT": _fine(
        "what the turn before left was brought to prefill's cache when that turn ended"
    ),
    "EAGER_IN_FLIGHT": _fine("what the turn before left is on its way to prefill already"),
    "FORGOTTEN": Reason(
        "the turn ended so long ago that only that is known",
        NOTHING,
    ),
}

# Why what a turn left was not returned before the next one asked for it.
_EAGER = {
    "NO_PREFILL_LEG": _fine("the turn ran on one worker only"),
    "NEXT_TURN_BEGAN": _fine("the next turn was there already, and reads what it wants itself"),
    "ALREADY_UNDER_WAY": _fine("the same, or more, is on its way already"),
    "TOO_SHORT": _fine("so few tokens are computed, not moved"),
    "WORKER_NOT_READY": Reason(
        "one of the two workers is draining, or its connection is lost", "see kvshuttle workers"
    ),
    "NO_PREFILL_WORKER": Reason(
        "no worker that only prefills takes new work", "start one, or end a drain"
    ),
    "NO_PREFIX_CACHE": Reason(
        "prefill's prefix cache is off, so there is no place for it",
        "start it with --enable-prefix-caching",
    ),
    "QUEUE_FULL": Reason(
        "too many returns waited for a place at this worker", "add prefill workers"
    ),
    "WOULD_EVICT": Reason(
        "another lease would have had to give way",
        "add decode workers, or raise leased_share",
    ),
}

_PLACEMENTS = {
    "KV_IS_THERE": _fine("the conversation's KV was there, and nothing much waited there"),
    "LEAST_LOADED": _fine("no KV of the session was anywhere, and it had the least to do"),
    "SHORTER_QUEUE": _fine(
        "so much waited where the KV was that another worker was predicted to be faster, with "
        "the KV moved there"
    ),
    "NOT_WORTH_A_MOVE": _fine(
        "it was predicted to be faster by too little to leave the KV for it", NOTHING
    ),
    "LENGTH_UNKNOWN": _fine(
        "the caller did not say how long the prompt is, so nobody knew how much of it was new",
        "give prompt_tokens_estimate in BeginTurn; the gateway does",
    ),
    "LONG_PROMPT": _fine(
        "more was new than decode computes beside the answers that it generates",
        "--direct-tokens of the control plane is the limit",
    ),
    "HISTORY_CHANGED": _fine(
        "the last turn at decode alone found little of its history there: the client had changed it"
    ),
    "PREFILL_RATE": _fine(
        "nobody has reported yet how fast this worker computes prompts: a slow one was assumed"
    ),
    "LINK_RATE": _fine("nobody has reported yet how fast this link is: 1 GB/s was assumed"),
}

_BUDGETS = {
    "TENANT_BUDGET": Reason(
        "the tenant's leases already hold its share of the source's blocks",
        "raise tenant_leased_share (or the tenant's leased_share), or add decode workers",
    ),
    "WORKER_BUDGET": Reason(
        "leases already hold the share of the source's blocks that they may hold",
        "add decode workers, or raise leased_share",
    ),
    "FAIR_SHARE": Reason(
        "the source is nearly full, and this tenant already has an equal part",
        "add decode workers; the tenant's own budget does not matter then",
    ),
    "WORKER_WATERMARK": Reason(
        "the source has too few free blocks to hold more",
        "its engine is about to preempt requests: add decode workers, or give it more KV memory",
    ),
    "DESTINATION_QUARANTINE": Reason(
        "too many blocks of the destination are in quarantine, so it is given no landing zone",
        "fence the dead worker that may still write to them (kvshuttle fence), or restart the "
        "destination",
    ),
    "EVICTED": Reason(
        "it was granted, not read for a second, and others needed the room",
        "if that happens often, the prefill queue is long: add prefill workers",
    ),
    "TENANT_SESSIONS": Reason(
        "the tenant has as many sessions as it may", "end sessions, or raise tenant_sessions"
    ),
    "ALL_SESSIONS": Reason(
        "the cluster has as many sessions as it may", "end sessions, or raise sessions"
    ),
    "FAIR_SESSIONS": Reason(
        "the cluster is nearly full of sessions, and this tenant has its equal part",
        "end sessions, or raise sessions",
    ),
    "TENANT_TURNS": Reason(
        "the tenant runs as many turns as it may", "send fewer at once, or raise tenant_turns"
    ),
    "ALL_TURNS": Reason(
        "the workers run as many turns as they may", "add workers, or raise worker_turns"
    ),
    "FAIR_TURNS": Reason(
        "the workers are nearly full of turns, and this tenant has its equal part", "add workers"
    ),
    "WORKER_TURNS": Reason(
        "every worker that could take the turn is full", "add workers, or try again"
    ),
}

_LEASES = {
    "NOT_NEEDED": _fine("the destination had it all, or no request came for it"),
    "TURN_ENDED": _fine(
        "the turn ended before the lease was used",
        "nothing, if the request was answered from prefill's own cache or its client left",
    ),
    "OPERATOR": Reason("an operator revoked it", NOTHING),
    "REVOKED": Reason("it was stopped before it was read", "see the control plane's log"),
    "READER_STOPPED": _fine("the reader had finished"),
    "SESSION_ENDED": _fine("the session ended"),
    "DEADLINE": Reason(
        "nobody used it, or its reader said nothing, until its time was up",
        "look whether the destination is connected, and whether its requests queue for long",
    ),
    "EPOCH_CHANGED": Reason(
        "the control plane was restarted while it was open",
        "nothing; if nobody restarted it, see why it stopped",
    ),
    "STALE_EPOCH": Reason(
        "the agent had already heard a later term of the control plane",
        "make sure that one control plane only runs on this store",
    ),
    "UNKNOWN_LEASE": Reason(
        "the agent still had a lease that this control plane does not know",
        "nothing, after a restart or with --store memory",
    ),
    "HARDEN_TIMEOUT": Reason(
        "the source did not answer in time when asked to hold the range",
        "the source's engine step is long or its agent stuck: look at its load and its log",
    ),
    "HARDENED_TOO_LATE": Reason(
        "the source held the range, but only when it was too late to grant it",
        "the source's engine step is long: look at its load; raise --guard if it stays so",
    ),
    "WRONG_RANGE": Reason(
        "the source's agent held other blocks than it was asked to",
        "it has a bug, or another version: use one version of kvshuttle everywhere",
    ),
    "STOPPED_BEFORE_GRANT": Reason("the destination stopped before it was granted", NOTHING),
    "WRITER_STOPPED": Reason(
        "the engine that was to write had stopped",
        "see why its lease ended: kvshuttle leases, and its log",
    ),
    "PREEMPTED": Reason(
        "prefill's engine took the blocks of the request away, which it will compute again later",
        "prefill is short of memory: give it more blocks, or send it less at once",
    ),
    "REQUEST_ABORTED": _fine("prefill's leg was aborted: its client, or the gateway, went away"),
    "PULLED_INSTEAD": _fine(
        "prefill's leg had ended before decode offered its landing zone, so decode read instead",
        "nothing; where it happens often, decode's engine step is long, or prompts are too short "
        "to be pushed: see --forward of the control plane",
    ),
    "DESTINATION_FENCED": Reason(
        "the engine that was written to was attested dead",
        "nothing, if it is; start it again",
    ),
    "DESTINATION_RECONNECTED": Reason(
        "the engine that was written to came back without the lease, or its offer may be lost",
        "see why its connection to the control plane was lost",
    ),
    "SOURCE_LOST": Reason(
        "the source's connection to the control plane was lost",
        "see kvshuttle workers and the source's log",
    ),
    "SOURCE_RECONNECTED": Reason(
        "the source's connection was made anew in the meantime",
        "if that repeats, look at the network between it and the control plane",
    ),
    "RECONNECTED": Reason(
        "the destination's connection was made anew in the meantime",
        "if that repeats, look at the network between it and the control plane",
    ),
    "SOURCE_RESTARTED": Reason("the source's engine was restarted", "see why it ended"),
    "DESTINATION_RESTARTED": Reason("the destination's engine was restarted", "see why it ended"),
    "SUPERSEDED": _fine("a later turn left more, which is brought instead"),
    "SOURCE_FENCED": Reason("the source was attested dead", NOTHING),
    "SOURCE_RELEASED": Reason(
        "the source let go before the reader had finished",
        "the reader was too slow for the lease's time: see --lease-ttl and the load",
    ),
    "DESTINATION_LOST": Reason(
        "the destination's connection to the control plane was lost",
        "see kvshuttle workers and the destination's log",
    ),
    "FENCED": Reason("the reader was attested dead", NOTHING),
    "REPLICA_GONE": Reason(
        "the source no longer had the KV: the engine had reused the blocks",
        "decode is short of KV memory: add decode workers, or hold for shorter (--retention)",
    ),
    "DISCARDED": Reason(
        "what was read could not be shown to be valid, and was thrown away", "see the agents' logs"
    ),
    "POOL_FULL": Reason(
        "no free blocks were left to hold or to read into",
        "the engine is full: add workers, or give it more KV memory",
    ),
}

_LEGS = {
    "LOCAL_HIT": _fine("the engine's own prefix cache already had it"),
    "TOO_FEW_TOKENS": _fine("so few tokens were missing that computing them was faster"),
    "REQUEST_ENDED": _fine("the request ended or was aborted in the meantime"),
    "NO_PREFIX": _fine("no other session of the tenant held anything that it could have used"),
    "PREFIX_FOUND": _fine("another session of the tenant held the same beginning"),
    "TURN_GONE_ON": Reason(
        "its request had gone on without it by the time it was granted",
        "the source's engine step is long: look at its load",
    ),
    "ENGINE_PAUSED": Reason(
        "its engine was paused (vLLM's /pause), and a paused one begins to read nothing: the "
        "weights may be about to change",
        NOTHING,
    ),
    "UNKNOWN_TURN": Reason(
        "the engine got a request whose turn was never announced to it, or is over",
        "its session was ended meanwhile, the agent's stream was down, or the request did not come "
        "from a gateway of this control plane",
    ),
    "CONTROL_PLANE_DOWN": Reason(
        "the agent had no connection to the control plane",
        "run kvshuttle doctor with --agent-target from the engine's machine",
    ),
    "GRANT_TIMEOUT": Reason(
        "the lease was not granted within the time that a lookup waits",
        "the source's engine step is long, or the control plane slow: see "
        "kvshuttle_grant_seconds; --lookup-wait-ms waits longer",
    ),
    "FASTER_TO_COMPUTE": Reason(
        "what of an eager return had yet to land would have been there later than computed",
        "none is needed; if it is common, the link is slow: see kvshuttle_transfer_seconds",
    ),
    "LEASE_USED": Reason(
        "a push was ordered again under a lease that was over",
        "report it: a lease is granted once",
    ),
    "GRANT_MALFORMED": Reason(
        "the agent could not read the grant", "use one version of kvshuttle everywhere"
    ),
    "CLAIMED_BY_ANOTHER": Reason(
        "another sample of the same request (n > 1) uses the lease", NOTHING, fine=True
    ),
    "LEASE_EXPIRED": Reason(
        "the lease's deadline was too near to begin or to finish the read",
        "the request queued for long at its engine: add prefill workers, or raise --lease-ttl",
    ),
    "PEER_UNKNOWN": Reason(
        "the reader was never told how to reach the source's memory",
        "if it stays so after a minute, restart the reader's engine and see its log",
    ),
    "PEER_UNREACHABLE": Reason(
        "the reader could not connect to the source's memory over NIXL",
        "check the network between the engines (ports, security group, UCX_NET_DEVICES or EFA), "
        "and run python -m kvshuttle.dataplane.smoke on both",
    ),
    "PEER_FENCED": Reason("the source was attested dead while it was read", NOTHING),
    "QUARANTINE_FULL": Reason(
        "too many of the reader's blocks are in quarantine",
        "fence the dead worker that may still write to them (kvshuttle fence), or restart the "
        "reader's engine",
    ),
    "NO_COMMON_PREFIX": Reason(
        "the prompt does not begin as the session's KV does: its tokens were changed",
        "the client edits its history (dates, ids or tool lists at the front of the prompt): keep "
        "what varies at the end",
    ),
    "RANGE_STARTS_LATER": Reason(
        "what is offered begins beyond what the engine has", "nothing; it should be rare"
    ),
    "PREFIX_CACHING_OFF": Reason(
        "the engine has no prefix cache to put returned KV in",
        "start it with --enable-prefix-caching",
    ),
    "NO_ROOM": Reason(
        "the engine had too few free blocks to take it in before its request came",
        "nothing; if it is the rule, add prefill workers",
        fine=True,
    ),
    "PRESSURE": Reason(
        "it was given up because requests needed the blocks",
        "the engine is full: add workers, or give it more KV memory",
    ),
    "TRANSFER_FAILED": Reason(
        "NIXL reported an error",
        "see the reader's log; run python -m kvshuttle.dataplane.smoke on both machines",
    ),
    "TRANSFER_STALLED": Reason(
        "the read did not finish in five seconds",
        "the link is slow or blocked: look at the network between the two engines",
    ),
    "LATE": Reason(
        "the read ended after the lease's deadline and was thrown away",
        "the reader was paused or the link slow: look at both machines' load",
    ),
    "SOURCE_LET_GO": Reason(
        "the source no longer held what was read, so it was thrown away",
        "the read took too long for the lease: see the load, and --lease-ttl",
    ),
    "SOURCE_SILENT": Reason(
        "the source did not confirm that it still held what was read, so it was thrown away",
        "the source's process is stuck or gone: see kvshuttle workers",
    ),
    "RELEASE_FAILED": Reason("NIXL did not release a read", "see the reader's log"),
    "MOVER_FAILED": Reason(
        "the process that moves KV has failed", "restart that engine, and see its log"
    ),
    "AGENT_ERROR": Reason("the agent has a bug", "see the engine's log, and report it"),
}

_CALLS = {
    "NO_WORKER": Reason("no worker can take the turn", "start a worker, or end a drain"),
    "INCARNATION_MISMATCH": Reason(
        "another boot of this worker is registered than the one that was named",
        "look at kvshuttle workers again: the worker was restarted in the meantime",
    ),
    "WORKER_FENCED": Reason("this boot was attested dead already", NOTHING),
    "LEASE_ENDED": Reason("the lease has ended already", NOTHING),
    "LEASE_NOT_GRANTED": Reason("the lease is not granted yet", "try again"),
    "WATCH_COMPACTED": Reason(
        "the watch cannot go on from so long ago", "start it again without --resume"
    ),
    "PERMISSION_DENIED": Reason(
        "the caller's role does not allow it",
        "use an operator's certificate or token: see docs/operating.md, Who may call",
    ),
    "UNAUTHENTICATED": Reason(
        "the control plane does not know the caller",
        "give --token-file, or --cert-file and --key-file",
    ),
    "STORE_FAILED": Reason(
        "the control plane could not write its store",
        "look at its disk and its log; it stops by itself",
    ),
}

REASONS: Final[dict[str, Reason]] = (
    _CALLS | _LEASES | _LEGS | _BUDGETS | _EAGER | _FORWARD | _PLACEMENTS | _PLANS
)

_UNKNOWN = Reason(
    "this program does not know the word",
    "look it up in the documentation of the control plane's version",
)


def reason(word: str) -> Reason:
    """What a word means; for a word of a newer server, that it is not known."""
    return REASONS.get(word, _UNKNOWN)
