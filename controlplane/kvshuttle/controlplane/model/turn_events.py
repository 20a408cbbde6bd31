"""Events about sessions and turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from kvshuttle.controlplane import forwarding
from kvshuttle.controlplane.model import (
    admission,
    eager_events,
    lease_events,
    push_events,
    retention_events,
)
from kvshuttle.controlplane.model.agenda import Due
from kvshuttle.controlplane.model.commands import (
    ExpectTurn,
    ForgetTurn,
    ReleaseReplica,
)
from kvshuttle.controlplane.model.errors import NotFoundError, NoWorkerError, SessionEndedError
from kvshuttle.controlplane.model.requests import repeated
from kvshuttle.controlplane.model.session import Placement, Plan, Session, Turn
from kvshuttle.controlplane.model.terms import (
    Direction,
    ForwardMode,
    Hints,
    LeaseState,
    Leg,
    ReturnMode,
    ReturnPolicy,
    SessionKey,
    TurnOutcome,
    TurnState,
    WorkerRef,
)

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.reports import LegReport
    from kvshuttle.controlplane.model.session import Usage
    from kvshuttle.controlplane.model.work import Work

__all__ = [
    "BeginTurn",
    "abandon",
    "begin",
    "computed",
    "end",
    "end_session",
    "expect_again",
    "session_due",
    "session_due_ns",
    "session_kept_ns",
    "update",
]


PROMPT_TOKENS_MAX = 1 << 32
"""A guess beyond this is none; and it must be stored."""
_RETURNS = (ReturnMode.LAZY, ReturnMode.EAGER)


class BeginTurn(Struct, frozen=True):
    """What a gateway asks. `token` was drawn for the turn that may come of it."""

    key: SessionKey
    token: str
    request_id: str = ""
    prompt_tokens: int = 0
    policy: ReturnPolicy = ReturnPolicy.AUTO
    excluded: tuple[str, ...] = ()
    hints: Hints = field(default_factory=Hints)


def begin(w: Work, ask: BeginTurn) -> Turn:
    """Places a turn and tells both agents. Creates the session, or starts an ended one afresh."""
    state = w.state
    if ask.prompt_tokens > PROMPT_TOKENS_MAX:
        ask = replace(ask, prompt_tokens=PROMPT_TOKENS_MAX)
    session = state.sessions.get(ask.key)
    if session is not None and (again := session.find_request(ask.request_id)) is not None:
        return again
    if session is None:
        session = Session(ask.key, w.now_ns, w.now_ns)
    elif not session.active:
        session = session.restarted(w.now_ns)
    session = session.with_gap(w.now_ns)
    session = session.with_hints(session.hints.merged(ask.hints), w.now_ns)
    before = state.sessions.get(ask.key)
    admission.turn(w, ask.key, new_session=before is None or not before.active)
    full = admission.full_workers(w)
    try:
        choice, plan = w.planner.decide(
            now_ns=w.now_ns,
            workers=state.workers,
            turns_on=state.turns_on,
            replicas_on=state.replicas.count_of,
            session=session,
            replicas=state.replicas_of_session(ask.key),
            policy=ask.policy,
            prompt_tokens=ask.prompt_tokens,
            excluded=(*ask.excluded, *full),
            arriving=eager_events.arriving(w, ask.key),
        )
    except NoWorkerError:
        if full:
            raise admission.no_worker_has_room(w, full) from None
        raise
    prefill = choice.prefill
    # Who computes the prompt reads what it lacks of the earlier turns.
    reader, direction = prefill or choice.decode, Direction.RETURN if prefill else Direction.FORWARD
    if plan.return_mode is ReturnMode.LAZY and choice.replica is not None:
        why_not = lease_events.admit(w, ask.key, direction, choice.replica, choice.holder, reader)
        if why_not:
            plan = replace(plan, return_mode=ReturnMode.NONE, reason=why_not)
    plan = forwarding.with_forward(
        w.limits, w.planner, plan, prefill, choice.decode, ask.prompt_tokens
    )
    turn = Turn(
        number=session.turn_count + 1,
        token=ask.token,
        decode=Placement(choice.decode.ref, choice.decode.url),
        prefill=Placement(prefill.ref, prefill.url) if prefill is not None else None,
        plan=plan,
        begin_ns=w.now_ns,
        retention_ns=retention_events.hold_ns(w, session),
        request_id=ask.request_id,
        asked_tokens=ask.prompt_tokens,
        always=ask.policy is ReturnPolicy.ALWAYS,
    )
    rates = w.planner.rates
    if prefill is not None:
        # What decode computes alone is reported only when its answer has ended: no queue is known
        # by that, only by heartbeats.
        tokens = plan.candidates[0].compute_tokens or rates.leg_tokens
        rates.give(turn.token, prefill.ref.worker_id, tokens, w.now_ns)
    w.gaps.back(ask.key, w.now_ns)
    w.put_session(session.with_turn(turn, w.now_ns))
    # One object for all indexes: there are as many as turns that run.
    own = state.sessions.own(ask.key)
    state.turns[turn.token] = own
    state.ledger.turns.add(ask.key.tenant, 1)
    for placement in turn.placements():
        state.turns_on[placement.worker.worker_id] += 1
    state.agenda.add(w.now_ns + w.limits.turn_timeout_ns, Due.TURN, own)
    lease_id = eager_events.awaited(w, ask.key, plan)
    if plan.return_mode is ReturnMode.LAZY and choice.replica is not None:
        lease = lease_events.make(
            w, ask.key, turn.number, turn.token, direction, choice.replica, reader
        )
        lease_id = lease.lease_id
    push = None
    if plan.forward_mode is ForwardMode.PUSH:
        push = push_events.make(w, ask.key, turn)
    returned = choice.replica if plan.return_mode in _RETURNS else None
    # Nothing of its own could be moved; another session of the tenant may have the same beginning.
    may_ask = (
        choice.replica is None
        and ask.policy is not ReturnPolicy.NEVER
        and state.prefixes.knows(ask.key.tenant)
    )
    spares_ns = plan.predicted_recompute_ns
    if may_ask:
        spares_ns = rates.computes_ns(reader.ref.worker_id, ask.prompt_tokens or rates.leg_tokens)
    expect(
        w,
        ask.key,
        turn,
        Leg.PREFILL if prefill is not None else Leg.DECODE,
        lease_id=lease_id,
        replica_blocks=returned.num_blocks if returned is not None else 0,
        spares_ns=spares_ns,
        may_ask=may_ask,
        push=push,
    )
    if prefill is not None:
        # Nothing is loaded for a prompt that is known to be shorter than that.
        short = 0 < ask.prompt_tokens < w.limits.min_tokens
        expect(
            w,
            ask.key,
            turn,
            Leg.DECODE,
            follows=not short,
            spares_ns=rates.computes_ns(
                choice.decode.ref.worker_id, max(ask.prompt_tokens, plan.reusable_tokens)
            ),
            push=push,
        )
    w.fact(
        "turn_begun",
        tenant=ask.key.tenant,
        session_id=ask.key.session_id,
        turn=turn.number,
        prefill=prefill.ref.worker_id if prefill else "",
        decode=choice.decode.ref.worker_id,
        return_mode=plan.return_mode.name,
        reason=plan.reason,
        placement=plan.placement,
        reusable_tokens=plan.reusable_tokens,
        predicted_ttft_us=plan.predicted_ttft_us,
        lease_id=lease_id,
        forward_mode=plan.forward_mode.name,
        forward_reason=plan.forward_reason,
    )
    return turn


def expect(
    w: Work,
    key: SessionKey,
    turn: Turn,
    leg: Leg,
    lease_id: str = "",
    follows: bool = False,
    replica_blocks: int = 0,
    spares_ns: int = 0,
    push: Lease | None = None,
    may_ask: bool = False,
) -> None:
    """Tells a leg's agent what it may read. `spares_ns` is what computing it would take: waiting
    longer than that for it cannot pay."""
    placement = turn.prefill if leg is Leg.PREFILL else turn.decode
    assert placement is not None
    w.command(
        placement.worker,
        ExpectTurn(
            turn_token=turn.token,
            key=key,
            turn=turn.number,
            leg=leg,
            lease_id=lease_id,
            lease_follows=follows,
            lookup_wait_ns=min(
                max(spares_ns, w.limits.lookup_wait_ns), w.limits.lookup_wait_max_ns
            ),
            # Prefill holds only until decode has read; what decode leaves is the session's.
            retention_ns=(
                w.limits.prefill_retention_ns if leg is Leg.PREFILL else turn.retention_ns
            ),
            min_tokens=w.limits.min_tokens,
            replica_blocks=replica_blocks,
            push=push_events.plan_for(push, placement.worker),
            may_ask=may_ask,
            block_compute_ns=_block_compute_ns(w, placement.worker),
        ),
    )


def _block_compute_ns(w: Work, ref: WorkerRef) -> int:
    worker = w.state.workers.get(ref.worker_id)
    if worker is None:
        return 0
    return w.planner.rates.computes_ns(ref.worker_id, worker.block_size)


def expect_again(w: Work, worker_id: str) -> None:
    """A worker reconnected: what its old stream had queued was dropped, so its running turns are
    named again."""
    for token, key in list(w.state.turns.items()):
        # There may be many, of which few run here: they are not kept unpacked.
        session = w.state.sessions.peek(key)
        turn = session.find_token(token) if session is not None else None
        if turn is None or not turn.running:
            continue
        leases = [w.state.leases[i] for i in w.state.turn_leases(token)]
        for leg in (Leg.PREFILL, Leg.DECODE):
            placement = turn.prefill if leg is Leg.PREFILL else turn.decode
            if placement is None or placement.worker.worker_id != worker_id:
                continue
            if w.worker(placement.worker) is None:
                continue  # the turn was placed on an older boot
            lease = next(
                (i for i in leases if i.destination == placement.worker and not i.push), None
            )
            follows = leg is Leg.DECODE and turn.prefill is not None and lease is None
            push = push_events.open_of_turn(w, token)
            expect(w, key, turn, leg, lease.lease_id if lease else "", follows, push=push)


def end(
    w: Work,
    key: SessionKey,
    number: int,
    outcome: TurnOutcome,
    usage: Usage | None = None,
    hints: Hints | None = None,
    token: str = "",
) -> Turn:
    """Ends a turn: both agents forget it, its open leases stop. Ending it again changes nothing.
    Where `token` is given, it is the turn of this token or none: numbers begin anew once a session
    was forgotten, and two control planes on copies of one store give the same ones."""
    session = w.state.sessions.get(key)
    if session is None:
        raise NotFoundError("session", key.session_id)
    turn = session.find(number)
    if turn is None:
        if not 0 < number <= session.turn_count:
            raise NotFoundError("turn", number)
        return _forgotten(number)
    if token and token != turn.token:
        raise NotFoundError("turn", number)
    if not turn.running:
        return turn
    if hints is not None and session.active:
        session = session.with_hints(session.hints.merged(hints), w.now_ns)
    session = session.with_turn_ended(number, outcome, usage, w.now_ns, w.limits.ended_turns_kept)
    w.put_session(session)
    if not session.running():
        w.gaps.away(key, session.absence(w.now_ns))
    if hints is not None:
        retention_events.retain(w, session)
    w.state.push_declined.discard(turn.token)
    if w.state.turns.pop(turn.token, None) is not None:
        w.state.ledger.turns.add(key.tenant, -1)
    _learn(w, turn, outcome, usage)
    for leg, placement in ((Leg.PREFILL, turn.prefill), (Leg.DECODE, turn.decode)):
        if placement is None:
            continue
        w.state.turns_on[placement.worker.worker_id] -= 1
        w.command(placement.worker, ForgetTurn(turn.token, leg))
    for lease_id in sorted(w.state.turn_leases(turn.token)):
        lease_events.stop(w, w.state.leases[lease_id], LeaseState.REVOKED, "TURN_ENDED")
    w.fact(
        "turn_ended",
        tenant=key.tenant,
        session_id=key.session_id,
        turn=number,
        outcome=outcome.name,
        return_mode=turn.plan.return_mode.name,
        duration_ns=w.now_ns - turn.begin_ns,
        usage=usage,
    )
    ended = session.find(number)
    assert ended is not None
    return ended


def _learn(w: Work, turn: Turn, outcome: TurnOutcome, usage: Usage | None) -> None:
    """What a turn's end says about rates."""
    rates = w.planner.rates
    rates.done(turn.token, w.now_ns)
    if outcome is not TurnOutcome.COMPLETED:
        return
    decode = turn.decode.worker.worker_id
    rates.observe_turn(decode, w.now_ns - turn.begin_ns)
    if turn.prefill is not None or usage is None or not turn.plan.candidates:
        return
    if not usage.ttft_ns:
        return  # the answer was not streamed: nobody knows when its first token came
    # Decode's agent cannot tell computing the prompt from generating; the gateway can.
    waited_ns = (turn.plan.predicted_ttft_us - turn.plan.candidates[0].compute_us) * 1_000
    computed = usage.prompt_tokens - min(usage.cached_tokens, usage.prompt_tokens)
    rates.observe_prefill(decode, computed, max(usage.ttft_ns // 2, usage.ttft_ns - waited_ns))


def _measured(w: Work, turn: Turn | None, report: LegReport) -> None:
    """A prefill leg was computed: nobody waits for it any more, and it shows by how much its
    prediction was off."""
    predicted = w.planner.rates.done(report.turn_token, w.now_ns)
    if predicted and turn is not None and turn.asked_tokens and turn.plan.return_mode in _RETURNS:
        w.planner.rates.observe_miss(report.computed_tokens - predicted)


def _forgotten(number: int) -> Turn:
    """A turn that ended too long ago to be remembered: all that is known is that it ended."""
    return Turn(
        number=number,
        token="",
        decode=Placement(WorkerRef("", 0), ""),
        plan=Plan(ReturnMode.NONE, "FORGOTTEN"),
        begin_ns=0,
        retention_ns=0,
        state=TurnState.ENDED,
    )


def abandon(w: Work, key: SessionKey) -> None:
    """Nobody ended a session's turns in time."""
    session = w.state.sessions.get(key)
    for turn in session.running() if session is not None else ():
        if w.now_ns - turn.begin_ns >= w.limits.turn_timeout_ns:
            end(w, key, turn.number, TurnOutcome.ABANDONED)


def update(w: Work, key: SessionKey, hints: Hints, request: str = "") -> Session:
    """Replaces the hints, and tells decode how long to hold what it has. A request that was made
    before changes nothing: other hints may have come since."""
    session = w.state.sessions.get(key)
    if session is None:
        raise NotFoundError("session", key.session_id)
    if repeated(session.requests, request):
        return session
    if not session.active:
        raise SessionEndedError(f"session {key.session_id} has ended", session_id=key.session_id)
    if request or session.hints != hints or hints.expected_idle_ns is not None:
        session = session.with_hints(hints, w.now_ns).asked(request)
        w.put_session(session)
        if not session.running():
            w.gaps.away(key, session.absence(w.now_ns))
        retention_events.retain(w, session)
    return session


def end_session(w: Work, key: SessionKey, request: str = "") -> Session:
    """Ends a session: its turns are cancelled, its leases stop, its replicas are released. They
    stay listed until their workers say that they went. A request that was made before changes
    nothing: the session may live again."""
    session = w.state.sessions.get(key)
    if session is None:
        raise NotFoundError("session", key.session_id)
    if not session.active or repeated(session.requests, request):
        return session
    workers = {r.worker for r in w.state.replicas_of_session(key)}
    for turn in session.running():
        workers |= {p.worker for p in turn.placements()}
        end(w, key, turn.number, TurnOutcome.CANCELLED)
    eager_events.end_session(w, key)
    session = w.state.sessions[key].ended(w.now_ns).asked(request)
    w.gaps.over(key, w.now_ns)
    w.put_session(session)
    w.state.agenda.add(w.now_ns + w.limits.ended_session_kept_ns, Due.SESSION, key)
    for ref in sorted(workers):
        w.command(ref, ReleaseReplica(key, b""))
    w.fact("session_ended", tenant=key.tenant, session_id=key.session_id)
    return session


def session_due_ns(w: Work, update_ns: int, *, active: bool) -> int:
    """When a session has been idle for too long, or listed for long enough after its end.

    Nobody knows how long the time before a start really was: the wall clock may have been set
    forward while the process was down. So whatever it says, a session whose KV may still be held
    lives on for as long as that can be.
    """
    kept_ns, least_ns = session_kept_ns(w, active=active)
    return max(update_ns + kept_ns, least_ns)


def session_kept_ns(w: Work, *, active: bool) -> tuple[int, int]:
    """For how long after its last change a session is kept, and until when at least."""
    kept_ns = w.limits.session_idle_ns if active else w.limits.ended_session_kept_ns
    return kept_ns, w.state.start_ns + min(kept_ns, w.limits.retention_max_ns)


def session_due(w: Work, key: SessionKey) -> None:
    """A session may have been idle for too long, or listed for long enough after its end."""
    session = w.state.sessions.get(key)
    if session is None:
        return
    due_ns = session_due_ns(w, session.update_ns, active=session.active)
    if session.running() or due_ns > w.now_ns:
        soon_ns = w.now_ns + w.limits.session_idle_ns // 16 + 1
        w.state.agenda.add(due_ns if due_ns > w.now_ns else soon_ns, Due.SESSION, key)
    elif session.active:
        end_session(w, key)
    else:
        for replica in w.state.replicas_of_session(key):
            w.drop_replica(key, replica)
        w.drop_session(key)


def computed(w: Work, worker_id: str, report: LegReport) -> None:
    """A leg's prompt was computed: feeds the planner and the counters."""
    w.planner.rates.observe_prefill(worker_id, report.computed_tokens, report.compute_ns)
    key = w.state.turns.get(report.turn_token)
    session = w.state.sessions.peek(key) if key is not None else None
    turn = session.find_token(report.turn_token) if session is not None else None
    if report.leg is Leg.PREFILL:
        _measured(w, turn, report)
    w.fact(
        "leg_computed",
        worker_id=worker_id,
        session_id=key.session_id if key else "",
        turn=turn.number if turn is not None else 0,
        leg=report.leg.name,
        prompt_tokens=report.prompt_tokens,
        local_hit_tokens=report.local_hit_tokens,
        external_tokens=report.external_tokens,
        computed_tokens=report.computed_tokens,
        compute_ns=report.compute_ns,
    )
