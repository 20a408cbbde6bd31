"""What the Grafana dashboards show: queries and words. `dashboards.py` makes their JSON of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BOARDS", "Board", "Panel", "Row"]

Kind = Literal["lines", "stack", "stat", "states"]
RATE = "[$__rate_interval]"
BY_WORKER = 'worker_id=~"$worker"'


@dataclass(frozen=True)
class Panel:
    """`queries` are pairs of PromQL and legend; `span` of 24; `unit` is Grafana's."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Kind = "lines"
    span: int = 8
    most: float | None = None
    warn: float | None = None


@dataclass(frozen=True)
class Row:
    """A titled group."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard; `workers`: with a choice of workers."""

    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]
    workers: bool = False


def quantiles(metric: str, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p95 and p99 of a histogram, for each value of a label."""
    group = f"le, {by}" if by else "le"
    tail = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket{where}{RATE})))",
            f"p{round(q * 100)}{tail}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def rate(
    metric: str, by: str, where: str = "", *, zeros: bool = True
) -> tuple[tuple[str, str], ...]:
    """A counter's rate by labels; `zeros`: also where it stands still."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    query = f"sum by ({by}) (rate({metric}{where}{RATE}))"
    return ((query if zeros else f"{query} > 0", legend),)


PREFILL = '{leg="PREFILL"}'
SAVED = '{leg="PREFILL",source!="recomputed"}'

OVERVIEW = Board(
    "kvshuttle-overview",
    "kvshuttle / overview",
    "Is it up, what does it save, what goes wrong.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Ready workers",
                    "Workers with a live stream that take turns.",
                    "short",
                    (('sum(kvshuttle_workers{state="ready"})', ""),),
                    "stat",
                    4,
                ),
                Panel(
                    "Lost or fenced",
                    "Workers that are listed and take none.",
                    "short",
                    (('sum(kvshuttle_workers{state=~"lost|fenced"})', ""),),
                    "stat",
                    4,
                    warn=1,
                ),
                Panel(
                    "Turns that run",
                    "Begun and not ended.",
                    "short",
                    (("sum(kvshuttle_turns_running)", ""),),
                    "stat",
                    4,
                ),
                Panel(
                    "Sessions",
                    "Active conversations.",
                    "short",
                    (('sum(kvshuttle_sessions{state="active"})', ""),),
                    "stat",
                    4,
                ),
                Panel(
                    "Prompt not computed",
                    "Share of prefill's prompt tokens that came back or lay in its cache.",
                    "percentunit",
                    (
                        (
                            f"sum(rate(kvshuttle_prompt_tokens_total{SAVED}{RATE}))"
                            f" / sum(rate(kvshuttle_prompt_tokens_total{PREFILL}{RATE}))",
                            "",
                        ),
                    ),
                    "stat",
                    4,
                ),
                Panel(
                    "Term",
                    "The epoch: each start of the control plane has a higher one.",
                    "none",
                    (("max(kvshuttle_epoch)", ""),),
                    "stat",
                    4,
                ),
            ),
        ),
        Row(
            "What it saves",
            (
                Panel(
                    "Prefill's prompt tokens",
                    "By where their KV came from. Eager returns are found in the cache: reused.",
                    "short",
                    rate("kvshuttle_prompt_tokens_total", "source", PREFILL),
                    "stack",
                    12,
                ),
                Panel(
                    "Time to first token",
                    "As gateways measured it, from the whole request's arrival.",
                    "s",
                    quantiles("kvshuttle_gateway_time_to_first_token_seconds"),
                    span=12,
                ),
                Panel(
                    "Turns by how KV came back",
                    "What was decided.",
                    "ops",
                    rate("kvshuttle_turns_begun_total", "return_mode"),
                    "stack",
                ),
                Panel(
                    "... and why",
                    "kvshuttle explain SESSION has each reason in a sentence.",
                    "ops",
                    rate("kvshuttle_turns_begun_total", "reason"),
                    "stack",
                ),
                Panel(
                    "Bytes moved",
                    "Counted by NIXL.",
                    "Bps",
                    rate("kvshuttle_transfer_bytes_total", "direction"),
                ),
                Panel(
                    "Which side moves KV forward",
                    "Pull: decode reads when prefill is done. Push: prefill writes meanwhile.",
                    "ops",
                    rate("kvshuttle_turns_forward_total", "forward_mode, reason"),
                    "stack",
                    24,
                ),
            ),
        ),
        Row(
            "What goes wrong",
            (
                Panel(
                    "Legs that recomputed",
                    "Although a transfer was hoped for, by reason.",
                    "ops",
                    rate("kvshuttle_fallbacks_total", "reason"),
                    "stack",
                ),
                Panel(
                    "Requests that failed, or were served in spite of something",
                    "Gateways' answers of 5xx, and their fallbacks.",
                    "ops",
                    (
                        *rate("kvshuttle_gateway_requests_total", "status", '{status=~"5.."}'),
                        *rate("kvshuttle_gateway_fallbacks_total", "reason"),
                    ),
                    "stack",
                ),
                Panel(
                    "Calls refused",
                    "By the control plane, by reason.",
                    "ops",
                    # Every method begins with a zero for each of two reasons.
                    rate("kvshuttle_rpc_errors_total", "method, reason", zeros=False),
                    "stack",
                ),
            ),
        ),
        Row(
            "The control plane",
            (
                Panel(
                    "Calls until their answer",
                    "Durable by then.",
                    "s",
                    (
                        (
                            "histogram_quantile(0.95, sum by (le, method) "
                            f"(rate(kvshuttle_rpc_seconds_bucket{RATE})))",
                            "p95 {{method}}",
                        ),
                    ),
                    span=6,
                ),
                Panel(
                    "Commits and the event loop's lag",
                    "Every grant waits for both.",
                    "s",
                    (
                        *(
                            (query, f"commit {legend}")
                            for query, legend in quantiles("kvshuttle_store_commit_seconds")[1:]
                        ),
                        *(
                            (query, f"lag {legend}")
                            for query, legend in quantiles("kvshuttle_loop_lag_seconds")[1:]
                        ),
                    ),
                    span=6,
                ),
                Panel(
                    "CPU and memory",
                    "CPU as seconds a second; memory in GiB.",
                    "none",
                    (
                        (
                            'rate(process_cpu_seconds_total{job="kvshuttle-controlplane"}'
                            f"{RATE})",
                            "CPU {{instance}}",
                        ),
                        (
                            'process_resident_memory_bytes{job="kvshuttle-controlplane"} / 2^30',
                            "GiB {{instance}}",
                        ),
                    ),
                    span=6,
                ),
                Panel(
                    "The store",
                    "The file and its log, and what is free on their device.",
                    "bytes",
                    (
                        ("kvshuttle_store_size_bytes", "{{file}}"),
                        ("kvshuttle_store_free_bytes", "free"),
                    ),
                    span=6,
                ),
            ),
        ),
    ),
)

WORKERS = Board(
    "kvshuttle-workers",
    "kvshuttle / workers and pools",
    "Each engine: its state, its memory, its share of the work.",
    (
        Row(
            "State",
            (
                Panel(
                    "State",
                    "Ready and draining have a live stream; lost is not dead.",
                    "none",
                    (
                        (
                            "max by (worker_id) (kvshuttle_worker_state"
                            f'{{{BY_WORKER},state="ready"}} * 1'
                            f' or kvshuttle_worker_state{{{BY_WORKER},state="draining"}} * 2'
                            f' or kvshuttle_worker_state{{{BY_WORKER},state="lost"}} * 3)',
                            "{{worker_id}}",
                        ),
                    ),
                    "states",
                    12,
                ),
                Panel(
                    "Streams lost",
                    "In five minutes, by worker and reason.",
                    "short",
                    (
                        (
                            "sum by (worker_id, reason) "
                            f"(increase(kvshuttle_workers_lost_total{{{BY_WORKER}}}[5m]))",
                            "{{worker_id}} {{reason}}",
                        ),
                    ),
                    span=6,
                ),
                Panel(
                    "Since it was heard",
                    "A heartbeat comes each second.",
                    "s",
                    (
                        (
                            f"time() - kvshuttle_worker_heard_timestamp_seconds{{{BY_WORKER}}}",
                            "{{worker_id}}",
                        ),
                    ),
                    span=6,
                    warn=5,
                ),
            ),
        ),
        Row(
            "Pools",
            (
                Panel(
                    "Free",
                    "Share of the pool that is free: below a few percent requests are preempted.",
                    "percentunit",
                    (
                        (
                            f'kvshuttle_pool_blocks{{{BY_WORKER},kind="free"}} / on (worker_id) '
                            'kvshuttle_pool_blocks{kind="total"}',
                            "{{worker_id}}",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Held",
                    "Share of the pool that is held for sessions that are away, and for leases.",
                    "percentunit",
                    (
                        (
                            f'kvshuttle_pool_blocks{{{BY_WORKER},kind="held"}} / on (worker_id) '
                            'kvshuttle_pool_blocks{kind="total"}',
                            "{{worker_id}} held",
                        ),
                        (
                            f"kvshuttle_leased_blocks{{{BY_WORKER}}} / on (worker_id) "
                            'kvshuttle_pool_blocks{kind="total"}',
                            "{{worker_id}} leased",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Quarantined",
                    "Blocks that somebody may still write to. From 10 % on nothing is granted.",
                    "percentunit",
                    (
                        (
                            f'kvshuttle_pool_blocks{{{BY_WORKER},kind="quarantined"}} '
                            '/ on (worker_id) kvshuttle_pool_blocks{kind="total"}',
                            "{{worker_id}}",
                        ),
                    ),
                    warn=0.1,
                ),
                Panel(
                    "Memory held",
                    "Held blocks in bytes.",
                    "bytes",
                    (
                        (
                            f'kvshuttle_pool_blocks{{{BY_WORKER},kind="held"}} * on (worker_id) '
                            "kvshuttle_block_bytes",
                            "{{worker_id}}",
                        ),
                    ),
                ),
                Panel(
                    "Replicas and holds",
                    "Conversations whose KV it has, and references on its blocks.",
                    "short",
                    (
                        (f"kvshuttle_replicas{{{BY_WORKER}}}", "{{worker_id}} replicas"),
                        (f"kvshuttle_holds{{{BY_WORKER}}}", "{{worker_id}} holds"),
                    ),
                ),
                Panel(
                    "Blocks given up early",
                    "Because the worker held too many, or had hardly one free.",
                    "ops",
                    rate("kvshuttle_relieved_blocks_total", "worker_id", f"{{{BY_WORKER}}}"),
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Requests",
                    "In the engine, as heartbeats say.",
                    "short",
                    (
                        (
                            f"kvshuttle_worker_requests{{{BY_WORKER}}}",
                            "{{worker_id}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Turns placed on it",
                    "That run.",
                    "short",
                    ((f"kvshuttle_worker_turns{{{BY_WORKER}}}", "{{worker_id}}"),),
                ),
                Panel(
                    "Prefill rate",
                    "Learned: what the planner compares moving with.",
                    "short",
                    ((f"kvshuttle_prefill_tokens_per_second{{{BY_WORKER}}}", "{{worker_id}}"),),
                ),
                Panel(
                    "Prompt tokens by where their KV came from",
                    "As agents count.",
                    "short",
                    rate(
                        "kvshuttle_worker_prompt_tokens_total",
                        "worker_id, source",
                        f'{{{BY_WORKER},source!~"eager|pushed"}}',
                    ),
                    "stack",
                    12,
                ),
                Panel(
                    "Bytes read",
                    "Counted by NIXL.",
                    "Bps",
                    rate(
                        "kvshuttle_worker_transfer_bytes_total",
                        "worker_id, direction",
                        f"{{{BY_WORKER}}}",
                    ),
                    span=6,
                ),
                Panel(
                    "Legs that recomputed",
                    "Although a transfer was hoped for.",
                    "ops",
                    rate("kvshuttle_fallbacks_total", "worker_id, reason", f"{{{BY_WORKER}}}"),
                    "stack",
                    6,
                ),
            ),
        ),
    ),
    workers=True,
)

MOVEMENT = Board(
    "kvshuttle-movement",
    "kvshuttle / transfers and leases",
    "What moves, how fast, and what becomes of the right to move it.",
    (
        Row(
            "Leases",
            (
                Panel(
                    "Open",
                    "Pending: the source has not said yet that it holds.",
                    "short",
                    (("sum by (state) (kvshuttle_leases)", "{{state}}"),),
                    "stack",
                ),
                Panel(
                    "Made, granted",
                    "By direction.",
                    "ops",
                    (
                        *(
                            (query, f"made {legend}")
                            for query, legend in rate("kvshuttle_leases_made_total", "direction")
                        ),
                        *(
                            (query, f"granted {legend}")
                            for query, legend in rate("kvshuttle_leases_granted_total", "direction")
                        ),
                    ),
                ),
                Panel(
                    "From asking the source to the grant",
                    "The source answers between two steps of its engine.",
                    "s",
                    quantiles("kvshuttle_grant_seconds", "direction"),
                ),
                Panel(
                    "How they ended",
                    "Completed ones are as they should be.",
                    "ops",
                    rate("kvshuttle_leases_ended_total", "direction, state"),
                    "stack",
                ),
                Panel(
                    "Why they ended otherwise",
                    "kvshuttle lease ID explains the words.",
                    "ops",
                    rate(
                        "kvshuttle_leases_ended_total", "reason", '{state!="COMPLETED",reason!=""}'
                    ),
                    "stack",
                ),
                Panel(
                    "Not made",
                    "For want of room, by reason.",
                    "ops",
                    rate("kvshuttle_leases_denied_total", "direction, reason"),
                    "stack",
                ),
                Panel(
                    "Ended, but a reader has not said so",
                    "It may still read, so its source holds to its own deadline.",
                    "short",
                    (("kvshuttle_unstopped_leases", "{{worker_id}}"),),
                    span=12,
                ),
                Panel(
                    "Extended",
                    "Because a reader needs them longer.",
                    "ops",
                    rate("kvshuttle_leases_extended_total", "worker_id"),
                    span=12,
                ),
            ),
        ),
        Row(
            "Transfers",
            (
                Panel(
                    "Outcome",
                    "Published is a success; unused had nothing to read.",
                    "ops",
                    rate("kvshuttle_transfers_total", "direction, outcome"),
                    "stack",
                ),
                Panel(
                    "Bytes",
                    "Counted by NIXL.",
                    "Bps",
                    rate("kvshuttle_transfer_bytes_total", "direction"),
                ),
                Panel(
                    "Speed while moving",
                    "Bytes by the seconds from posting to completion.",
                    "Bps",
                    (
                        (
                            f"sum by (direction) (rate(kvshuttle_transfer_bytes_total{RATE}))"
                            " / sum by (direction) "
                            f"(rate(kvshuttle_transfer_seconds_sum{RATE}))",
                            "{{direction}}",
                        ),
                    ),
                ),
                Panel(
                    "From posting to completion",
                    "A READ of more than 5 s is given up.",
                    "s",
                    quantiles("kvshuttle_transfer_seconds", "direction"),
                ),
                Panel(
                    "What requests waited",
                    "From the first look for a lease until the request could run.",
                    "s",
                    quantiles("kvshuttle_transfer_wait_seconds", "direction"),
                ),
                Panel(
                    "Size",
                    "Bytes of one transfer.",
                    "bytes",
                    quantiles("kvshuttle_transfer_size_bytes", "direction"),
                ),
            ),
        ),
        Row(
            "Eager returns",
            (
                Panel(
                    "Begun, and not begun by reason",
                    "A turn's KV goes back as soon as the turn has ended, where that pays.",
                    "ops",
                    (
                        (f"sum(rate(kvshuttle_eager_returns_begun_total{RATE}))", "begun"),
                        *rate("kvshuttle_eager_returns_skipped_total", "reason"),
                    ),
                    "stack",
                    12,
                ),
                Panel(
                    "Under way and waiting",
                    "By the worker that reads.",
                    "short",
                    (
                        ("kvshuttle_eager_returns_open", "{{worker_id}} open"),
                        ("kvshuttle_eager_returns_waiting", "{{worker_id}} waiting"),
                    ),
                    span=12,
                ),
            ),
        ),
        Row(
            "Placement",
            (
                Panel(
                    "Why turns run where they do",
                    "SHORTER_QUEUE: moved by load; SHORT_PROMPT: at decode alone.",
                    "ops",
                    rate("kvshuttle_turns_placed_total", "placement"),
                    "stack",
                ),
                Panel(
                    "Prefixes of other sessions",
                    "Requests that looked for one, by what came of it.",
                    "ops",
                    rate("kvshuttle_prefixes_wanted_total", "reason"),
                    "stack",
                ),
                Panel(
                    "Hashes in their index",
                    "At most --prefix-index of the control plane.",
                    "short",
                    (("kvshuttle_prefix_hashes", "hashes"),),
                ),
            ),
        ),
    ),
)

GATEWAY = Board(
    "kvshuttle-gateway",
    "kvshuttle / gateway",
    "Requests: how many, how fast, what became of them.",
    (
        Row(
            "Requests",
            (
                Panel(
                    "Answers",
                    "By route and status; 499: the client went away.",
                    "reqps",
                    rate("kvshuttle_gateway_requests_total", "route, status"),
                    "stack",
                ),
                Panel(
                    "In flight",
                    "By gateway.",
                    "short",
                    (("kvshuttle_gateway_requests_in_flight", "{{instance}}"),),
                ),
                Panel(
                    "Control plane reached",
                    "1: it answered the last call.",
                    "none",
                    (("kvshuttle_gateway_control_plane_up", "{{instance}}"),),
                    most=1,
                ),
                Panel(
                    "Time to first token",
                    "From the whole request's arrival.",
                    "s",
                    quantiles("kvshuttle_gateway_time_to_first_token_seconds"),
                ),
                Panel(
                    "Legs",
                    "p95 of their duration, by how they ended.",
                    "s",
                    (
                        (
                            "histogram_quantile(0.95, sum by (le, leg, result) "
                            f"(rate(kvshuttle_gateway_leg_duration_seconds_bucket{RATE})))",
                            "{{leg}} {{result}}",
                        ),
                    ),
                ),
                Panel(
                    "Waiting for the placement",
                    "BeginTurn.",
                    "s",
                    quantiles("kvshuttle_gateway_begin_turn_duration_seconds"),
                ),
                Panel(
                    "Refused",
                    "429s by whose limit; requests over the control plane's budget.",
                    "ops",
                    (
                        *rate("kvshuttle_gateway_refused_total", "reason"),
                        *rate("kvshuttle_gateway_over_budget_total", "decision"),
                    ),
                ),
            ),
        ),
        Row(
            "Turns",
            (
                Panel(
                    "Turns",
                    "By outcome and mode; unplaced: without the control plane.",
                    "ops",
                    rate("kvshuttle_gateway_turns_total", "outcome, mode"),
                    "stack",
                ),
                Panel(
                    "Sessions",
                    "By what named them: docs/gateway.md, Which conversation.",
                    "ops",
                    rate("kvshuttle_gateway_sessions_named_total", "source"),
                    "stack",
                ),
                Panel(
                    "Prompt tokens",
                    "Cached: prefill had their KV.",
                    "short",
                    rate("kvshuttle_gateway_prompt_tokens_total", "source"),
                    "stack",
                ),
                Panel(
                    "Tokens generated",
                    "Where the engine's answer says how many.",
                    "short",
                    ((f"sum(rate(kvshuttle_gateway_output_tokens_total{RATE}))", "tokens/s"),),
                ),
                Panel(
                    "Served in spite of",
                    "docs/gateway.md explains the reasons.",
                    "ops",
                    rate("kvshuttle_gateway_fallbacks_total", "reason"),
                    "stack",
                ),
                Panel(
                    "Clients that went away",
                    "By phase.",
                    "ops",
                    rate("kvshuttle_gateway_client_cancels_total", "phase"),
                    "stack",
                ),
                Panel(
                    "Ends of turns not confirmed",
                    "Pending, and given up in five minutes.",
                    "short",
                    (
                        ("kvshuttle_gateway_end_turns_pending", "{{instance}} pending"),
                        (
                            "increase(kvshuttle_gateway_end_turn_failures_total[5m])",
                            "{{instance}} given up",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "The process",
            (
                Panel(
                    "CPU",
                    "Seconds a second.",
                    "none",
                    (
                        (
                            f'rate(process_cpu_seconds_total{{job="kvshuttle-gateway"}}{RATE})',
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "Memory",
                    "Resident.",
                    "bytes",
                    (
                        (
                            'process_resident_memory_bytes{job="kvshuttle-gateway"}',
                            "{{instance}}",
                        ),
                    ),
                ),
                Panel(
                    "File descriptors",
                    "Of those that it may have.",
                    "percentunit",
                    (
                        (
                            'process_open_fds{job="kvshuttle-gateway"} / '
                            'process_max_fds{job="kvshuttle-gateway"}',
                            "{{instance}}",
                        ),
                    ),
                    most=1,
                    warn=0.8,
                ),
            ),
        ),
    ),
)

BOARDS = {
    "overview": OVERVIEW,
    "workers": WORKERS,
    "transfers": MOVEMENT,
    "gateway": GATEWAY,
}
