"""What was predicted of the ways in which a turn could have run, and what happened. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.cli import human
from kvshuttle.cli.reasons import reason
from kvshuttle.cli.shape import seconds
from kvshuttle.v1 import session_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.v1 import lease_service_pb2 as lease_pb

__all__ = ["Actual", "Compared", "actual", "compared"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One way in which the turn could have run. Times in seconds."""

    where: str
    how: str
    first_token_s: float
    parts: str
    note: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class Actual:
    """What a turn really took, in seconds; None for what nobody has reported."""

    first_token_s: float
    off: float
    """By which factor the prediction was missed: 2.0 is twice as long as predicted."""
    moved_s: float | None
    computed_tokens: int | None


_WAYS = {
    pb.RETURN_MODE_NONE: "compute it all",
    pb.RETURN_MODE_LAZY: "move, then compute",
    pb.RETURN_MODE_EAGER: "use what was brought",
    pb.RETURN_MODE_DIRECT: "compute where the KV is",
}


def _compared(one: pb.Candidate, *, chosen: bool) -> Compared:
    names = [name for name in (one.prefill_worker_id, one.decode_worker_id) if name]
    parts = [
        f"{human.span(us / 1e6)} {what}"
        for us, what in (
            (one.queue_us, "queue"),
            (one.transfer_us, "move"),
            (one.compute_us, "compute"),
            (one.decode_queue_us, "wait at decode"),
            (one.forward_us, "on to decode"),
        )
        if us
    ]
    if one.compute_tokens:
        parts.append(f"{human.count(one.compute_tokens)} tokens to compute")
    notes = [f"not chosen: {one.rejected}: {reason(one.rejected).meaning}"] if one.rejected else []
    notes += [f"{word}: {reason(word).meaning}" for word in one.assumed]
    return Compared(
        " → ".join(names),
        _WAYS.get(one.return_mode, "of a kind that this program does not know"),
        one.ttft_us / 1e6,
        ", ".join(parts),
        "; ".join(notes),
        chosen,
    )


def compared(plan: pb.Plan) -> list[Compared]:
    """What the planner compared, the chosen one first. Where it moves, computing again instead
    follows from what the plan says of both."""
    found = [_compared(one, chosen=at == 0) for at, one in enumerate(plan.candidates)]
    if found and plan.return_mode in (pb.RETURN_MODE_LAZY, pb.RETURN_MODE_EAGER):
        again = pb.Candidate()
        again.CopyFrom(plan.candidates[0])
        again.return_mode = pb.RETURN_MODE_NONE
        again.compute_us += int(seconds(plan.predicted_recompute) * 1e6)
        again.ttft_us = again.queue_us + again.compute_us + again.decode_queue_us + again.forward_us
        again.transfer_us = 0
        if again.compute_tokens:
            again.compute_tokens += plan.reusable_tokens
        del again.assumed[:]
        found.append(_compared(again, chosen=False))
    return found


def actual(turn: pb.Turn, returns: Sequence[lease_pb.Lease]) -> Actual | None:
    """What happened, where both it and a prediction are known."""
    took = seconds(turn.usage.time_to_first_token)
    predicted = seconds(turn.plan.predicted_ttft)
    if not took or not predicted:
        return None
    moved = [seconds(one.stats.transfer_time) for one in returns if one.stats.tokens]
    usage = turn.usage
    computed = usage.prompt_tokens - min(usage.cached_tokens, usage.prompt_tokens)
    return Actual(
        took,
        took / predicted,
        max(moved) if moved else None,
        computed if usage.prompt_tokens else None,
    )
