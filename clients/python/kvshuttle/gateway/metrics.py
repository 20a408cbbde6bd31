"""What the gateway counts. Names and units follow Prometheus' conventions."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

if TYPE_CHECKING:
    from kvshuttle.v1.session_service_pb2 import TurnUsage

CONTENT_TYPE = CONTENT_TYPE_LATEST

_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
# Seconds. From a warm cache on a GPU (10 ms) to a long prompt on a CPU (minutes).
_LATENCY_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0),
)
_RPC_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """One registry a gateway, so that two in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.build = Gauge(
            "kvshuttle_gateway_build_info",
            "Always 1; says what runs.",
            ["version"],
            registry=self.registry,
        )
        self.build.labels(_version()).set(1)
        self.requests = Counter(
            "kvshuttle_gateway_requests",
            "Requests answered, by route and HTTP status (499: the client went away).",
            ["route", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvshuttle_gateway_requests_in_flight",
            "Requests of the generating routes that run.",
            registry=self.registry,
        )
        self.sessions = Counter(
            "kvshuttle_gateway_sessions_named",
            "Requests, by what named their session: docs/gateway.md, Which conversation.",
            ["source"],
            registry=self.registry,
        )
        self.known_conversations = Gauge(
            "kvshuttle_gateway_known_conversations",
            "Conversations without a name that are recognized by what was said in them.",
            registry=self.registry,
        )
        self.turns = Counter(
            "kvshuttle_gateway_turns",
            "Turns ended, by outcome and return mode (unplaced: without the control plane).",
            ["outcome", "mode"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvshuttle_gateway_prompt_tokens",
            "Prompt tokens of turns that ended, by whether prefill had their KV (cached) or not.",
            ["source"],
            registry=self.registry,
        )
        self.output_tokens = Counter(
            "kvshuttle_gateway_output_tokens",
            "Tokens generated in turns that ended, where the engine's answer says how many.",
            registry=self.registry,
        )
        self.time_to_first_token = Histogram(
            "kvshuttle_gateway_time_to_first_token_seconds",
            "From the whole request's arrival to the first token sent to the client.",
            ["stream"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.leg_duration = Histogram(
            "kvshuttle_gateway_leg_duration_seconds",
            "Duration of a leg, by how it ended (ok, client_error, error, unreachable, dropped, "
            "timeout, broke_off, cancelled).",
            ["leg", "result"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.begin_turn_duration = Histogram(
            "kvshuttle_gateway_begin_turn_duration_seconds",
            "Time that a request waited for BeginTurn.",
            buckets=_RPC_BUCKETS,
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "kvshuttle_gateway_fallbacks",
            "Degradations of a request that was answered or tried all the same, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.cancels = Counter(
            "kvshuttle_gateway_client_cancels",
            "Requests whose client went away, by phase (begin, prefill, decode, stream).",
            ["phase"],
            registry=self.registry,
        )
        self.end_turns_pending = Gauge(
            "kvshuttle_gateway_end_turns_pending",
            "Turns whose EndTurn the control plane has not confirmed yet.",
            registry=self.registry,
        )
        self.end_turn_failures = Counter(
            "kvshuttle_gateway_end_turn_failures",
            "Turns whose EndTurn was given up; the control plane ends them by its own timer.",
            registry=self.registry,
        )
        self.dropped_kv_params = Counter(
            "kvshuttle_gateway_dropped_kv_transfer_params",
            "Requests from which kv_transfer_params from outside were dropped.",
            registry=self.registry,
        )
        self.refused = Counter(
            "kvshuttle_gateway_refused",
            "Requests answered 429, by whose limit: GATEWAY_LIMIT, TENANT_LIMIT, OVER_BUDGET.",
            ["reason"],
            registry=self.registry,
        )
        # From 0 on: a counter that is born with its first event shows no increase.
        for reason in ("GATEWAY_LIMIT", "TENANT_LIMIT", "OVER_BUDGET"):
            self.refused.labels(reason)
        self.over_budget = Counter(
            "kvshuttle_gateway_over_budget",
            "Requests for which the control plane's budget had no turn, by what became of them "
            "(served without a turn, refused).",
            ["decision"],
            registry=self.registry,
        )
        for decision in ("served", "refused"):
            self.over_budget.labels(decision)
        self.control_plane_up = Gauge(
            "kvshuttle_gateway_control_plane_up",
            "1 if the control plane answered the last call, else 0.",
            registry=self.registry,
        )

    def identified(self, source: str, known: int) -> None:
        """What named a request's session, and how many are known by what was said."""
        self.sessions.labels(source).inc()
        self.known_conversations.set(known)

    def used(self, usage: TurnUsage) -> None:
        """What a turn cost, as its engines said."""
        self.prompt_tokens.labels("cached").inc(usage.cached_tokens)
        computed = max(0, usage.prompt_tokens - usage.cached_tokens)
        self.prompt_tokens.labels("computed").inc(computed)
        self.output_tokens.inc(usage.output_tokens)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


def _version() -> str:
    try:
        return version("kvshuttle")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"


def reason_label(reason: str) -> str:
    """A reason that came over the wire, as a label: what does not look like one becomes OTHER."""
    return reason if _REASON.fullmatch(reason) else "OTHER"
