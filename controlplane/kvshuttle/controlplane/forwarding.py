"""Which side moves a running turn's KV from prefill to decode: a pure rule, without I/O.

Pushed, a prompt's KV is written layer by layer while it is computed, so that nothing of the
transfer is left when the computation ends; and decode's request is there already. What it costs is
decode's blocks, which are taken for the whole of the computation instead of for the transfer alone.
So push where there is something to hide behind and where decode has blocks to spare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvshuttle.controlplane.model import splits
from kvshuttle.controlplane.model.terms import ForwardMode, ReturnMode

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.session import Plan
    from kvshuttle.controlplane.model.worker import Worker
    from kvshuttle.controlplane.planner import Planner

__all__ = ["with_forward"]


def with_forward(
    limits: Limits,
    planner: Planner,
    plan: Plan,
    prefill: Worker | None,
    decode: Worker,
    prompt_tokens: int,
) -> Plan:
    """The plan with the way forward and one word on why."""
    mode, reason = _choose(limits, planner, plan, prefill, decode, prompt_tokens)
    return replace(plan, forward_mode=mode, forward_reason=reason)


def _choose(
    limits: Limits,
    planner: Planner,
    plan: Plan,
    prefill: Worker | None,
    decode: Worker,
    prompt_tokens: int,
) -> tuple[ForwardMode, str]:
    if prefill is None or prefill.ref.worker_id == decode.ref.worker_id:
        return ForwardMode.PULL, "SAME_WORKER"
    if limits.forward == "pull":
        return ForwardMode.PULL, "CONFIGURED"
    if not prefill.push or not decode.push:
        return ForwardMode.PULL, "NOT_ABLE"
    if not splits.same(prefill, decode):
        # Each layer is written rank to rank, by whole blocks.
        return ForwardMode.PULL, "SPLIT_DIFFERS"
    pool = decode.pool
    if pool.quarantined_blocks > limits.quarantine_share * pool.total_blocks:
        return ForwardMode.PULL, "DESTINATION_FULL"
    if 0 < prompt_tokens < limits.min_tokens:
        return ForwardMode.PULL, "TOO_SHORT_TO_OVERLAP"
    if limits.forward == "push":
        return ForwardMode.PUSH, "CONFIGURED"
    if not prompt_tokens:
        return ForwardMode.PULL, "PROMPT_UNKNOWN"
    if pool.free_blocks < limits.push_free_share * pool.total_blocks:
        return ForwardMode.PULL, "DESTINATION_FULL"
    here = plan.return_mode in (ReturnMode.LAZY, ReturnMode.EAGER)
    computed = max(0, prompt_tokens - (plan.reusable_tokens if here else 0))
    if planner.rates.computes_ns(prefill.ref.worker_id, computed) < limits.push_min_compute_ns:
        return ForwardMode.PULL, "TOO_SHORT_TO_OVERLAP"
    return ForwardMode.PUSH, "OVERLAP_PAYS"
