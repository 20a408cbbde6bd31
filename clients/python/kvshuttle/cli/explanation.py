"""Why a session's last turns were placed and planned as they were, and what came of it.

Pure: what the control plane says goes in, sentences and figures come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvshuttle.cli import human
from kvshuttle.cli.predictions import Actual, Compared, actual, compared
from kvshuttle.cli.reasons import NOTHING, reason
from kvshuttle.cli.shape import seconds
from kvshuttle.v1 import lease_service_pb2 as lease_pb
from kvshuttle.v1 import session_service_pb2 as pb
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvshuttle.v1 import cluster_service_pb2 as cluster_pb

Verdict = Literal["good", "neutral", "bad", "open"]

# More than this over its prediction is worth a word: below, it is the noise of a busy machine.
OVER_PREDICTION = 3.0
OVER_PREDICTION_LEAST_S = 0.05
# Of what was brought ahead; the last block of a prompt is computed in any case.
USED_SHARE = 0.5
_NOT_FOUND = (
    "the turn found little of what was brought: its client edits its history (or the template "
    "renders answers otherwise than they were generated), or prefill's engine is short of KV "
    "memory and reused the blocks first"
)


@dataclass(frozen=True, slots=True)
class Story:
    """One turn, told."""

    turn: pb.Turn
    leases: Sequence[lease_pb.Lease]
    placement: str
    plan: str
    remedy: str
    outcome: str
    verdict: Verdict
    advice: str = ""
    """What to do about `outcome`; empty where there is nothing to do."""
    first_token: str = ""
    compared: Sequence[Compared] = ()
    """What the planner compared, the chosen one first."""
    actual: Actual | None = None
    """What happened, beside what was predicted."""

    @property
    def returned_tokens(self) -> int:
        """Tokens that returns under this turn spared prefill."""
        return sum(one.stats.tokens for one in self.returns)

    @property
    def returns(self) -> list[lease_pb.Lease]:
        """Leases that bring KV back."""
        return [one for one in self.leases if one.direction == types.DIRECTION_RETURN]


def explain(
    session: pb.Session,
    leases: Iterable[lease_pb.Lease],
    workers: Mapping[str, cluster_pb.Worker],
) -> list[Story]:
    """The session's listed turns, the newest first."""
    of_turn: dict[int, list[lease_pb.Lease]] = {}
    for lease in leases:
        of_turn.setdefault(serves(lease), []).append(lease)
    return [
        _story(turn, sorted(of_turn.get(turn.turn, ()), key=_made), workers)
        for turn in sorted(session.turns, key=lambda turn: -turn.turn)
    ]


def serves(lease: lease_pb.Lease) -> int:
    """The turn that has something of it: an eager one is made when its turn has ended."""
    return lease.turn + 1 if lease.eager else lease.turn


def next_turn(session: pb.Session, leases: Iterable[lease_pb.Lease]) -> str:
    """What is ready for a turn that has not begun; empty where nothing is known of it."""
    coming = [one for one in leases if one.eager and serves(one) > session.turn_count]
    if not coming or session.state == pb.SESSION_STATE_ENDED:
        return ""
    last = max(coming, key=_made)
    where = last.destination.worker_id
    if last.state <= lease_pb.LEASE_STATE_ACTIVE:
        return f"what the last turn left is on its way to {where}"
    if last.stats.tokens:
        size, took = last.stats.bytes, seconds(last.stats.transfer_time)
        return (
            f"{human.count(last.stats.tokens)} tokens lie in {where}'s cache already "
            f"({human.size(size)} in {human.span(took)})"
        )
    if last.state == lease_pb.LEASE_STATE_COMPLETED:
        return f"nothing had to be brought to {where}: {reason(last.end_reason).meaning}"
    return (
        f"nothing was brought to {where} ahead of it ({last.end_reason}: "
        f"{reason(last.end_reason).meaning}); it comes back when the turn begins"
    )


def _made(lease: lease_pb.Lease) -> tuple[int, int, str]:
    return (lease.create_time.seconds, lease.create_time.nanos, lease.lease_id)


def _story(
    turn: pb.Turn, leases: Sequence[lease_pb.Lease], workers: Mapping[str, cluster_pb.Worker]
) -> Story:
    returns = [one for one in leases if one.direction == types.DIRECTION_RETURN]
    outcome, verdict, advice = _outcome(turn, returns)
    return Story(
        turn=turn,
        leases=leases,
        placement=_placement(turn),
        plan=_plan(turn.plan),
        remedy=reason(turn.plan.reason).remedy,
        outcome=outcome,
        verdict=verdict,
        advice=advice,
        first_token=_first_token(turn, workers),
        compared=compared(turn.plan),
        actual=actual(turn, returns),
    )


def _placement(turn: pb.Turn) -> str:
    decode = turn.decode.worker.worker_id
    if not decode:
        return "where it ran is not remembered"
    if turn.plan.placement:
        prefill = turn.prefill.worker.worker_id
        where = f"prefill on {prefill}, decode on {decode}" if prefill else f"all of it on {decode}"
        why = f"{turn.plan.placement}: {reason(turn.plan.placement).meaning}"
        if turn.plan.reusable_tokens:
            why += f" ({human.count(turn.plan.reusable_tokens)} tokens of KV)"
        return f"{where}: {why}"
    holds = turn.plan.reusable_tokens > 0
    why = (
        f"it held the longest copy of the conversation ({human.count(turn.plan.reusable_tokens)} "
        "tokens)"
        if holds
        else "no usable copy was anywhere, and it was the least loaded"
    )
    if not turn.HasField("prefill"):
        return f"all of it on {decode}: {why}"
    prefill = turn.prefill.worker.worker_id
    return (
        f"decode on {decode}: {why}; prefill on {prefill}: where the session's prompts were "
        "computed before, or else the least loaded"
    )


_MODES = {
    pb.RETURN_MODE_NONE: "nothing is returned",
    pb.RETURN_MODE_LAZY: "prefill reads what it lacks when its request arrives",
    pb.RETURN_MODE_EAGER: "prefill has it before the turn begins",
    pb.RETURN_MODE_DIRECT: "runs where its KV is",
}


def _plan(plan: pb.Plan) -> str:
    said = _MODES.get(plan.return_mode, "of a kind that this program does not know")
    text = f"{said}: {reason(plan.reason).meaning}"
    recompute, transfer = seconds(plan.predicted_recompute), seconds(plan.predicted_transfer)
    if recompute or transfer:
        text += (
            f"; predicted: {human.span(recompute)} to compute again, {human.span(transfer)} to move"
        )
    return text + _forward(plan)


def _forward(plan: pb.Plan) -> str:
    """How the prompt's KV reaches decode; nothing where that is as it always was."""
    why = reason(plan.forward_reason).meaning
    if plan.forward_mode == types.FORWARD_MODE_PUSH:
        return f"; pushed to decode while prefill computes: {why}"
    if plan.forward_reason in ("", "CONFIGURED", "SAME_WORKER"):
        return ""
    return f"; decode reads when prefill has ended: {why}"


def _outcome(turn: pb.Turn, returns: Sequence[lease_pb.Lease]) -> tuple[str, Verdict, str]:
    """What came of the plan, whether that is good, and what to do if not."""
    plan = turn.plan
    moved = [one for one in returns if one.stats.tokens]
    if moved:
        return _moved(turn, moved)
    if any(one.state <= lease_pb.LEASE_STATE_ACTIVE for one in returns):
        return "the return is under way", "open", ""
    if plan.return_mode == pb.RETURN_MODE_NONE:
        return _not_planned(turn)
    if plan.return_mode == pb.RETURN_MODE_DIRECT:
        return _cached(turn)
    if plan.return_mode == pb.RETURN_MODE_EAGER and turn.usage.prompt_tokens:
        return _eager(turn)
    if returns:
        last = returns[-1]
        known = reason(last.end_reason)
        if known.fine:
            return f"nothing had to be returned: {known.meaning}", "good", ""
        return (
            f"planned, and nothing came back: {last.end_reason or 'no reason was given'}: "
            f"{known.meaning}; prefill computed it again",
            "bad",
            "" if known.remedy == NOTHING else known.remedy,
        )
    if turn.state == pb.TURN_STATE_RUNNING:
        return "the turn runs, and no lease is listed for it yet", "open", ""
    if turn.usage.cached_tokens:
        return f"its lease is no longer listed; {_cached_share(turn)}", "neutral", ""
    return (
        "its lease is no longer listed, so what came of it is not known (leases stay listed for "
        "ten minutes)",
        "neutral",
        "",
    )


def _moved(turn: pb.Turn, moved: Sequence[lease_pb.Lease]) -> tuple[str, Verdict, str]:
    tokens = sum(one.stats.tokens for one in moved)
    size = sum(one.stats.bytes for one in moved)
    took = max(seconds(one.stats.transfer_time) for one in moved)
    waited = max(seconds(one.stats.wait_time) for one in moved)
    text = (
        f"{human.count(tokens)} tokens came back: {human.size(size)} in {human.span(took)} "
        f"({human.throughput(size, took)})"
    )
    owners = sorted({one.source_session_id for one in moved if one.source_session_id})
    if owners:
        text += f"; the session had none, and {', '.join(owners)} of its tenant began the same way"
    if all(one.eager for one in moved):
        return _used_ahead(turn, f"{text}, before the turn began", tokens)
    if waited:
        text += f"; the request waited {human.span(waited)}"
    predicted = seconds(turn.plan.predicted_transfer)
    if predicted and waited > max(OVER_PREDICTION * predicted, OVER_PREDICTION_LEAST_S):
        return (
            f"{text}, {waited / predicted:.0f} times what was predicted",
            "neutral",
            "look at the load of both engines and the link between them; the rates that "
            "predictions are made from follow within about eight transfers",
        )
    return text, "good", ""


def _not_planned(turn: pb.Turn) -> tuple[str, Verdict, str]:
    known = reason(turn.plan.reason)
    text = "prefill computed what its own cache did not have"
    if turn.usage.prompt_tokens:
        text += f"; {_cached_share(turn)}"
    first = turn.turn == 1 and turn.plan.reason == "NO_REPLICA"
    if known.fine or first:
        return text, "good", ""
    return text, "bad", "" if known.remedy == NOTHING else known.remedy


def _used_ahead(turn: pb.Turn, text: str, tokens: int) -> tuple[str, Verdict, str]:
    """What was brought ahead, and how much of it the turn found."""
    usage = turn.usage
    if not usage.prompt_tokens:
        return text, "good", ""
    text += f"; {_cached_share(turn)}"
    if usage.cached_tokens >= USED_SHARE * min(tokens, usage.prompt_tokens):
        return text, "good", ""
    return text, "bad", _NOT_FOUND


def _eager(turn: pb.Turn) -> tuple[str, Verdict, str]:
    """What was in prefill's cache, or should have been."""
    if turn.usage.cached_tokens:
        return _cached_share(turn), "good", ""
    return (
        "brought to prefill's cache ahead of the turn, and not found there by it",
        "bad",
        _NOT_FOUND,
    )


def _cached(turn: pb.Turn) -> tuple[str, Verdict, str]:
    if not turn.usage.prompt_tokens:
        waiting = turn.state == pb.TURN_STATE_RUNNING
        return "its usage was not reported", "open" if waiting else "neutral", ""
    return _cached_share(turn), "good" if turn.usage.cached_tokens else "neutral", ""


def _cached_share(turn: pb.Turn) -> str:
    usage = turn.usage
    return (
        f"{human.count(usage.cached_tokens)} of {human.count(usage.prompt_tokens)} prompt tokens "
        f"({human.share(usage.cached_tokens, usage.prompt_tokens)}) were found or returned"
    )


def _first_token(turn: pb.Turn, workers: Mapping[str, cluster_pb.Worker]) -> str:
    usage = turn.usage
    ttft = seconds(usage.time_to_first_token)
    if not ttft:
        return ""
    text = f"first token after {human.span(ttft)}"
    place = turn.prefill if turn.HasField("prefill") else turn.decode
    worker = workers.get(place.worker.worker_id)
    rate = worker.prefill_tokens_per_second if worker is not None else 0.0
    computed = usage.prompt_tokens - min(usage.cached_tokens, usage.prompt_tokens)
    if rate and computed:
        # The rate is the worker's of now: then it may have been faster.
        part = "; of it" if computed / rate <= ttft else "; at the worker's rate of now"
        text += (
            f"{part} about {human.span(computed / rate)} for computing "
            f"{human.count(computed)} tokens at {human.short(rate)} a second"
        )
    return text
