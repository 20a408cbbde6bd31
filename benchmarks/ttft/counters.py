"""What engines and gateway count, around one turn."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ttft.arms import Arm
from kvshuttle.localstack.metrics import EXTERNAL_HITS, LOCAL_HITS, PROMPT_TOKENS, Metrics, scrape

__all__ = ["Legs", "Snapshot", "held_blocks", "legs"]

# Sums of vLLM's histograms, in seconds; with one request between two scrapes the difference is that
# request's. Queue time runs until the request is first scheduled, so a transfer that it waits for
# is in it; prefill time runs from there to the first token.
_QUEUE = "vllm:request_queue_time_seconds_sum"
_PREFILL = "vllm:request_prefill_time_seconds_sum"
_USAGE = "vllm:kv_cache_usage_perc"
_XFER_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
_XFER_BYTES = "vllm:nixl_bytes_transferred_sum"
_XFER_DESCRIPTORS = "vllm:nixl_num_descriptors_sum"
_LEG = "kvshuttle_gateway_leg_duration_seconds_sum"
_BEGIN = "kvshuttle_gateway_begin_turn_duration_seconds_sum"


@dataclass(frozen=True)
class Snapshot:
    """One look at an arm's counters."""

    prefill: Metrics
    decode: Metrics
    gateway: Metrics | None

    @classmethod
    def of(cls, arm: Arm) -> Snapshot:
        """Asks all of the arm's programs. Raises httpx.HTTPError."""
        prefill = arm.prefill.metrics()
        decode = prefill if arm.decode is arm.prefill else arm.decode.metrics()
        gateway = scrape(arm.gateway.url) if arm.gateway is not None else None
        return cls(prefill, decode, gateway)


@dataclass(frozen=True)
class Legs:
    """Where one turn's time went, in ms, and what was moved. None: not counted in this arm."""

    prefill_queue_ms: float
    prefill_compute_ms: float
    decode_queue_ms: float | None
    decode_first_step_ms: float | None
    begin_turn_ms: float | None
    prefill_leg_ms: float | None
    # Tokens of the prompt that prefill had, got, and computed.
    local_tokens: int
    returned_tokens: int
    computed_tokens: int
    # Upstream's own counters; ours come with the leases.
    return_ms: float | None
    return_bytes: int | None
    return_descriptors: int | None
    forward_ms: float | None
    forward_bytes: int | None


def legs(arm: Arm, before: Snapshot, after: Snapshot) -> Legs:
    """The differences, for one request in between."""

    def over(name: str, side: str, **labels: str) -> float:
        first, last = getattr(before, side), getattr(after, side)
        return float(last.total(name, **labels) - first.total(name, **labels))

    two = arm.decode is not arm.prefill
    upstream = arm.kind.proxy is not None
    local = int(over(LOCAL_HITS, "prefill"))
    returned = int(over(EXTERNAL_HITS, "prefill"))
    prompt = int(over(PROMPT_TOKENS, "prefill"))
    # Upstream's push counts WRITEs at prefill: they are the way to decode, not back.
    back, forth = ("decode", "prefill") if arm.kind.proxy == "push" else ("prefill", "decode")
    return Legs(
        prefill_queue_ms=over(_QUEUE, "prefill") * 1e3,
        prefill_compute_ms=over(_PREFILL, "prefill") * 1e3,
        decode_queue_ms=over(_QUEUE, "decode") * 1e3 if two else None,
        decode_first_step_ms=over(_PREFILL, "decode") * 1e3 if two else None,
        begin_turn_ms=over(_BEGIN, "gateway") * 1e3 if arm.gateway else None,
        prefill_leg_ms=over(_LEG, "gateway", leg="prefill") * 1e3 if arm.gateway else None,
        local_tokens=local,
        returned_tokens=returned,
        computed_tokens=prompt - local - returned,
        return_ms=over(_XFER_SECONDS, back) * 1e3 if upstream else None,
        return_bytes=int(over(_XFER_BYTES, back)) if upstream else None,
        return_descriptors=int(over(_XFER_DESCRIPTORS, back)) if upstream else None,
        forward_ms=over(_XFER_SECONDS, forth) * 1e3 if upstream else None,
        forward_bytes=int(over(_XFER_BYTES, forth)) if upstream else None,
    )


def held_blocks(arm: Arm, found: Snapshot, blocks: int) -> dict[str, float]:
    """Blocks of each engine that nobody else may have though no request runs; `blocks`: of a pool.

    Ours say so in their heartbeats; of upstream's engines it is what vLLM counts as in use after
    its last step, which changes only in a step.
    """
    names = [engine.name for engine in arm.engines]
    if arm.view is not None:
        workers = arm.view.workers()
        return {name: float(workers[name].pool.held_blocks) for name in names}
    sides = (found.prefill, found.decode)
    return {name: side.total(_USAGE) * blocks for name, side in zip(names, sides, strict=False)}
