"""The agent's limits and defaults, each with its reason. Times in ns unless the name says so."""

from __future__ import annotations

from kvshuttle.dataplane.clock import NS

__all__ = [
    "ASK_AGAIN_NS",
    "COMPANY_S",
    "CONFIRM_TIMEOUT_NS",
    "CONNECT_LINGER_NS",
    "DEADLINE_MARGIN_NS",
    "EAGER_FREE_SHARE",
    "EAGER_PIECE_BLOCKS",
    "EAGER_PIECE_NS",
    "EAGER_PIECE_SHARE",
    "EAGER_REMEMBERED",
    "EVENTS_BYTES",
    "HUGE_PAGES_NS",
    "LANDING_WAIT_NS",
    "LONG_REST_NS",
    "MAX_CLOSED_PUSHES",
    "MAX_EVENTS_A_MESSAGE",
    "MAX_MESSAGE_BYTES",
    "MAX_PAST_TURNS",
    "MAX_PENDING_EVENTS",
    "MAX_PREPARED",
    "MAX_SOFT_REPLICAS",
    "MAX_TURNS",
    "POLL_MAX_LANDING_NS",
    "POLL_MAX_READING_NS",
    "POLL_MAX_SERVING_NS",
    "POLL_MIN_NS",
    "QUARANTINE_SHARE",
    "READ_STALL_NS",
    "RECONNECT_MAX_S",
    "RECONNECT_MIN_S",
    "REST_LOOK_NS",
    "REST_NS",
    "SLOWEST_BYTES_A_SECOND",
    "STOPPED_LOOK_NS",
    "STOPPED_POLLING_NS",
    "UNHURRIED_EVENTS",
    "UNKNOWN_TURN_WAIT_NS",
    "WRITE_STALL_NS",
]

ASK_AGAIN_NS = 1 * NS
"""Shortest time between two requests to extend one lease: some round trips to the control plane and
the source."""

DEADLINE_MARGIN_NS = NS // 4
"""A destination posts nothing later than this before its deadline: far more than one scheduler
step, so that what is posted has a chance to be published."""

READ_STALL_NS = 5 * NS
"""A posted READ that takes longer than this, and what its bytes take at the slowest speed of any
use, is given up, and the request recomputes."""

SLOWEST_BYTES_A_SECOND = 500_000_000
"""The slowest speed of any use: TCP between two GPUs of one machine. 100,000 tokens of a model of
8B (13 GB) take 26 s at that, as long as prefill would compute them."""

CONFIRM_TIMEOUT_NS = 1 * NS
"""Longest wait for the source's answer after completion; a live source answers within its polling
interval, a few ms."""

CONNECT_LINGER_NS = 2 * NS
"""How long both ends keep calling into NIXL after they learnt of each other: UCX's wire-up takes
14 to 21 ms between two processes here, when both progress."""

HUGE_PAGES_NS = 5 * NS
"""How much longer a start may take for huge pages: 2 to 20 GB of a pool in host memory."""

POLL_MIN_NS = 50_000
"""First interval between polls after something happened: a 13 MB READ takes about 3 ms."""

POLL_MAX_READING_NS = 500_000
"""Longest interval while a READ of ours is posted; measured 2.4 to 4.4 GB/s at this rate."""

POLL_MAX_LANDING_NS = 1_000_000
"""Longest interval while a landing zone is written to: the writer computes for longer between two
layers, so nothing but its notice waits for it."""

WRITE_STALL_NS = 5 * NS
"""As READ_STALL_NS, of a WRITE and all that shares its way to the same peer: a chunk that is
granted late goes whole, and may be as long as a prompt."""

REST_NS = 25_000_000
"""Longest pause of an engine that has nothing to compute and waits for KV. Without one it steps
some hundred times a second and takes two cores. What it waits for ends the pause at once."""

LONG_REST_NS = 10 * NS
"""The same where nothing but KV is waited for: vLLM's workers look for their next step in a tight
loop for a second after each, so only fewer steps than that let them rest too."""

REST_LOOK_NS = 1_000_000
"""How often it looks for input of its engine meanwhile: the longest that a new request waits."""

PAUSE_WAIT_NS = 30 * NS
"""Longest that vLLM's pause waits for what is read from, or written to, this engine's blocks. What
nobody reads yet is given back at once. A READ may take longer (SLOWEST_BYTES_A_SECOND), and a
quarantine lasts until its writer is attested dead: vLLM answers 500 then, and is asked again."""

WORKER_LOOK_NS = 10_000_000
"""How often a worker that rests looks for its next step, for a second: the longest that a lost
notice costs. A look takes 0.15 ms of the core, so this is 1.5 % of it for that second."""

STOPPED_POLLING_NS = 10 * NS
"""How long after a push's deadline a WRITE that does not end is asked after often: its destination
is dead then, or hangs."""

STOPPED_LOOK_NS = 1 * NS
"""How often it is asked after from then on. One that has come to life again keeps its landing zone
in quarantine until it hears that the WRITE has ended."""

LANDING_WAIT_NS = 3 * NS
"""How long an offered landing zone waits for a word on it at least, while there is a stream to the
control plane: the answer takes some ms, and giving up means to compute, and to keep the blocks."""

MAX_CLOSED_PUSHES = 4_096
"""Ended pushes that a mover remembers, so that a step which was on its way posts nothing."""

POLL_MAX_SERVING_NS = 4_000_000
"""Longest interval while a peer may read from us: adds at most this to its wire-up, and costs
under 1 % of a core."""

UNKNOWN_TURN_WAIT_NS = 50_000_000
"""How long a request whose turn token nobody announced waits for the announcement, which was sent
before the gateway had the token and so is at most a stream's delay behind."""

MAX_TURNS = 65_536
"""Turn legs remembered at once; the oldest go first. A leg is forgotten at its turn's end, so this
bounds what a broken control plane can make the engine remember."""

MAX_PAST_TURNS = 1_024
"""Turn legs remembered after their turns: a request whose stop words the server found ends in the
engine only after its client has had the whole answer, some ms later."""

MAX_SOFT_REPLICAS = 4_096
"""Soft replicas remembered at once: 3,000 hashes of 32 bytes each at 100k tokens, so about 400 MB
at the very most and a few MB as a rule."""

MAX_PREPARED = 2_000_000
"""Blocks, times layers, of a pool whose descriptors are prepared once for all READs (80 layers of
25,000 blocks, say). NIXL took 0.2 to 0.6 s for four million, in which the mover does nothing else,
and about 8 bytes each. Beyond it each READ makes its own."""

QUARANTINE_SHARE = 0.10
"""Largest share of the pool in quarantines; beyond it no new landing zone is taken."""

EAGER_FREE_SHARE = 0.10
"""Share of the pool that eager returns leave free (in vLLM's sense: without a reference): room for
the requests that come meanwhile, so that a guess about the next turn makes no present one wait."""

EAGER_PIECE_BLOCKS = 64
"""Blocks that an eager return's first READ moves, and each at least: some ms, so that a turn which
arrives in the midst finds most of its prefix landed, and long enough that asking the source after
each piece costs little."""

EAGER_PIECE_NS = 20_000_000
"""What a READ after the first may take at the speed of those before it. An engine that computes
orders one a step, of some 20 ms where a link moves 64 blocks in 3."""

EAGER_PIECE_SHARE = 0.03
"""Share of the pool that one such READ may take: a quarantine, if it fails, of a third of what may
be in quarantine at all."""

EAGER_REMEMBERED = 4_096
"""Ended eager leases remembered, so that a request which was told to wait for one knows that it is
over; a request comes within seconds of its turn's beginning."""

MAX_PENDING_EVENTS = 100_000
"""Events kept for the control plane while its stream is down; the oldest go first. The next hello
carries the whole inventory, so a lost event delays a release until its deadline and no more."""

UNHURRIED_EVENTS = frozenset({"active", "leg_computed", "source_released"})
"""What the control plane only notes: it may wait `COMPANY_S` for an event that somebody waits for.
A message costs the control plane about as much as what it says, and a read of some milliseconds is
begun and done in one."""

COMPANY_S = 0.005
"""Less than an engine's step, and as long as a read takes."""

MAX_EVENTS_A_MESSAGE = 1_000
"""The API's limit on events in one message."""

EVENTS_BYTES = 2 * 1024 * 1024
"""Bytes of events in one message, unless one event has more: a lease over 100k tokens is answered
with some 220 KB of hashes, so a thousand such answers would be far beyond what a message may have;
and parsing this much holds up the other end for some ms only."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Largest message on the stream: a grant over 1M tokens in blocks of 16 is 2.5 MB."""

RECONNECT_MIN_S = 0.1
"""First pause before a new try to connect; doubles, with jitter, up to RECONNECT_MAX_S."""

RECONNECT_MAX_S = 5.0
"""Longest pause: a returning control plane has all agents back within this."""
