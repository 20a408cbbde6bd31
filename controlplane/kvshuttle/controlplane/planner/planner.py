"""Where a turn runs, and how its KV gets there: predicted times compared.

A turn stays where its conversation's KV is unless what waits there makes another place faster by
more than a margin, so that a session does not go to and fro with every small difference. A turn
that stays is planned without a look at all workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nsmallest
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from kvshuttle.controlplane.model.session import Candidate, Plan
from kvshuttle.controlplane.model.terms import (
    ReturnMode,
    ReturnPolicy,
    WorkerRole,
)
from kvshuttle.controlplane.planner import history, placing
from kvshuttle.controlplane.planner.placing import Choice, Fleet
from kvshuttle.controlplane.planner.rates import Rates

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["Choice", "Planner"]

_NOBODY: Mapping[str, int] = MappingProxyType({})
TRIED = 4
"""Workers of each role for which a move is predicted in full: among sixty-four, all of them would
cost a turn as much as all else that is done for it. Links may differ; queues differ more."""
FEW = 4 * TRIED
"""So many workers are looked at each time."""
SHORTLIST_NS = 10_000_000
"""How long a shortlist holds: some turns of a busy control plane, a fifth of what a queue must
differ by for a turn to move."""
MOVE_LEAST_US = 50_000
"""A session does not leave its KV to spare less than this: a tenth of what a person notices, and
what a prediction is off by on a busy machine."""
MOVE_SHARE = 0.25
"""Nor to spare less than this share of the time to its first token."""
AHEAD_NS = 1_000_000_000
"""By the time that a session's next turn comes its queue will be another one: what lasts longer
than this may still be there."""
DIRECT_TOKENS = 256
"""Default of `Limits.direct_tokens`."""
MOST_SHOWN = 4
"""Candidates that a plan keeps."""


class _Ask(Struct, frozen=True):
    """What is known of a turn that wants a place."""

    session: Session
    replicas: Collection[Replica]
    policy: ReturnPolicy
    excluded: Collection[str]
    arriving: str
    now_ns: int


@dataclass(slots=True)
class Planner:
    """Learns rates and decides. `min_tokens` and `direct_tokens` as in Limits."""

    min_tokens: int = 64
    direct_tokens: int = DIRECT_TOKENS
    rates: Rates = field(default_factory=Rates)
    # The last shortlist: see `_shortlist`.
    _short_name: tuple[int, int, int] = (0, 0, 0)
    _short: list[list[str]] = field(default_factory=list)

    # -- the whole -----------------------------------------------------------------------------
    def decide(
        self,
        *,
        now_ns: int,
        workers: Mapping[str, Worker],
        session: Session,
        replicas: Collection[Replica] = (),
        turns_on: Mapping[str, int] = _NOBODY,
        replicas_on: Mapping[str, int] = _NOBODY,
        policy: ReturnPolicy = ReturnPolicy.AUTO,
        prompt_tokens: int = 0,
        excluded: Collection[str] = (),
        arriving: str = "",
    ) -> tuple[Choice, Plan]:
        """Where a turn runs, and how its KV gets there. NoWorkerError when nobody can take it.
        `turns_on` and `replicas_on` count by worker; `prompt_tokens` is the caller's guess, 0 for
        none; `excluded` workers are not used; `arriving` is the one to which the session's KV is on
        its way, or empty."""
        fleet = Fleet(workers, turns_on, replicas_on)
        ask = _Ask(session, replicas, policy, excluded, arriving, now_ns)
        choice = placing.place(self.rates, fleet, session, replicas, excluded, now_ns)
        prompt = history.expected_tokens(session, prompt_tokens)
        plan = self.plan(choice, policy, prompt, replicas, arriving)
        first = self.predict(choice, plan, prompt, ask.now_ns)
        others: list[Candidate] = []
        if first.queue_us > MOVE_LEAST_US or first.decode_queue_us > MOVE_LEAST_US:
            elsewhere = self._elsewhere(fleet, ask, choice, prompt)
            if elsewhere is not None:
                moved, its_plan, its = elsewhere
                least_us = max(MOVE_LEAST_US, int(MOVE_SHARE * first.ttft_us))
                if its.ttft_us + least_us < first.ttft_us:
                    others.append(first)
                    choice, plan, first = moved, its_plan, its
                else:
                    slower = its.ttft_us >= first.ttft_us
                    others.append(its if slower else replace(its, rejected="NOT_WORTH_A_MOVE"))
        elif choice.runner_up is not None:
            second = replace(choice, prefill=choice.runner_up)
            others.append(self.predict(second, plan, prompt, now_ns))
        placement = choice.placement
        if choice.prefill is not None and choice.replica is not None:
            direct = self._direct(choice, ask, plan.reusable_tokens, prompt)
            if direct is not None and not direct.rejected and direct.ttft_us < first.ttft_us:
                others.insert(0, first)
                choice = replace(choice, prefill=None)
                first, placement = direct, "SHORT_PROMPT"
            elif direct is not None:
                others.append(direct)
        direct_chosen = placement == "SHORT_PROMPT"
        return choice, Plan(
            ReturnMode.DIRECT if direct_chosen else plan.return_mode,
            placement if direct_chosen else plan.reason,
            plan.reusable_tokens,
            plan.predicted_recompute_ns,
            plan.predicted_transfer_ns,
            placement=placement,
            candidates=(first, *others[: MOST_SHOWN - 1]),
        )

    # -- how -----------------------------------------------------------------------------------
    def plan(
        self,
        choice: Choice,
        policy: ReturnPolicy,
        prompt_tokens: int,
        copies: Collection[Replica] = (),
        arriving: str = "",
    ) -> Plan:
        """How the KV reaches the worker that computes the prompt: moved where that is predicted
        cheaper than computing again. What that worker has in its own cache by chance is not known
        here, so this compares for the whole replica; it reads only what it misses."""
        replica = choice.replica
        reusable = replica.num_tokens if replica else 0
        destination = choice.prefill or choice.decode
        source = choice.holder
        if choice.prefill is None and (replica is None or source is destination):
            return Plan(ReturnMode.DIRECT, "SAME_WORKER", reusable)
        if replica is None:
            return Plan(ReturnMode.NONE, choice.lack)
        # A prompt that is known to be short cannot use more than itself.
        useful = min(reusable, prompt_tokens) if prompt_tokens else reusable
        name = destination.ref.worker_id
        recompute_ns = self.rates.computes_ns(name, useful)
        share = useful / max(reusable, 1)
        transfer_ns = self.rates.moves_ns(source, name, replica.num_blocks * share)
        if policy is ReturnPolicy.NEVER:
            mode, reason = ReturnMode.NONE, "POLICY_NEVER"
        elif policy is not ReturnPolicy.ALWAYS and (
            useful < self.min_tokens or recompute_ns <= transfer_ns
        ):
            mode, reason = ReturnMode.NONE, "CHEAPER_TO_RECOMPUTE"
        elif history.has(copies, destination, replica):
            mode, reason = ReturnMode.EAGER, "EAGER_HIT"
        elif arriving == name:
            mode, reason = ReturnMode.EAGER, "EAGER_IN_FLIGHT"
        elif policy is ReturnPolicy.ALWAYS:
            mode, reason = ReturnMode.LAZY, "POLICY_ALWAYS"
        else:
            mode, reason = ReturnMode.LAZY, "CHEAPER_TO_MOVE"
        return Plan(mode, reason, reusable, recompute_ns, transfer_ns)

    def cheaper_to_move(
        self, num_tokens: int, num_blocks: int, source: Worker, destination: Worker
    ) -> bool:
        """Whether moving so much is faster than computing it."""
        name = destination.ref.worker_id
        recompute = self.rates.computes_ns(name, num_tokens)
        return self.rates.moves_ns(source, name, num_blocks) < recompute

    # -- how long ------------------------------------------------------------------------------
    def predict(self, choice: Choice, plan: Plan, prompt: int, now_ns: int) -> Candidate:
        """What a placement with a plan is predicted to take. Of a prompt whose length nobody said
        the part that was not there before is guessed."""
        mode = plan.return_mode
        moved = mode is ReturnMode.LAZY or plan.reason == "EAGER_IN_FLIGHT"
        return self._predict(
            choice.prefill,
            choice.decode,
            mode,
            plan.reusable_tokens,
            plan.reusable_tokens if choice.holder is choice.decode else 0,
            plan.predicted_transfer_ns // 1_000 if moved else 0,
            prompt,
            now_ns,
        )

    def _predict(
        self,
        prefill: Worker | None,
        decode: Worker,
        mode: ReturnMode,
        reusable: int,
        at_decode: int,
        transfer_us: int,
        prompt: int,
        now_ns: int,
        rejected: str = "",
    ) -> Candidate:
        rates = self.rates
        worker = prefill or decode
        name = worker.ref.worker_id
        kept = 0 if mode is ReturnMode.NONE else reusable
        whole = prompt or reusable + int(rates.leg_tokens)
        computes = max(1, whole - kept + (int(rates.missed) if kept and prompt else 0))
        assumed: tuple[str, ...] = () if rates.prefill_rate(name) else ("PREFILL_RATE",)
        forward_us = 0
        if prefill is not None:
            decode_name = decode.ref.worker_id
            blocks = max(0, whole - at_decode) / (decode.block_size or 32)
            forward_us = rates.moves_ns(prefill, decode_name, blocks) // 1_000
            if not rates.link_rate(name, decode_name):
                assumed = (*assumed, "LINK_RATE")
        return Candidate(
            prefill.ref.worker_id if prefill is not None else "",
            decode.ref.worker_id,
            mode,
            rates.queue_ns(worker, now_ns) // 1_000,
            transfer_us,
            rates.computes_ns(name, computes) // 1_000,
            rates.decode_queue_ns(decode) // 1_000,
            forward_us,
            computes if prompt else 0,
            assumed,
            rejected,
        )

    def _direct(self, choice: Choice, ask: _Ask, reusable: int, prompt: int) -> Candidate | None:
        """The same turn at decode alone; None where it has no cache that could be found again, or
        where that much is new that nobody would think of it."""
        decode = choice.decode
        if choice.holder is not decode or not decode.prefix_caching:
            return None
        if prompt - reusable > 4 * self.direct_tokens or not self.direct_tokens:
            return None
        rejected = self._why_not_direct(ask, reusable, prompt)
        return self._predict(
            None, decode, ReturnMode.DIRECT, reusable, 0, 0, prompt, ask.now_ns, rejected
        )

    def _why_not_direct(self, ask: _Ask, reusable: int, prompt: int) -> str:
        if ask.policy is not ReturnPolicy.AUTO:
            return "POLICY_NEVER" if ask.policy is ReturnPolicy.NEVER else "POLICY_ALWAYS"
        if not prompt:
            return "LENGTH_UNKNOWN"
        if prompt - reusable + self.rates.missed > self.direct_tokens:
            # It would hold up the answers that decode is generating.
            return "LONG_PROMPT"
        return "HISTORY_CHANGED" if history.missed(ask.session) else ""

    # -- ahead ---------------------------------------------------------------------------------
    def next_prefill(self, workers: Mapping[str, Worker], last: str, now_ns: int) -> Worker | None:
        """The prefill worker that will probably get a session's next turn: the one that had its
        last, unless so much waits there that the turn would be placed elsewhere. None where no
        worker only prefills."""
        stays = workers.get(last)
        if stays is not None and stays.ready and stays.role is WorkerRole.PREFILL:
            if self.rates.queue_ns(stays, now_ns) <= MOVE_LEAST_US * 1_000:
                return stays
        else:
            stays = None
        found = [w for w in workers.values() if w.ready and w.role is WorkerRole.PREFILL]
        least = min(
            found, key=lambda w: (self.rates.queue_ns(w, now_ns), w.ref.worker_id), default=None
        )
        if stays is None or least is None:
            return least
        spared_ns = self.rates.queue_ns(stays, now_ns) - self.rates.queue_ns(least, now_ns)
        return least if spared_ns > AHEAD_NS else stays

    # -- elsewhere -----------------------------------------------------------------------------
    def _shortlist(self, fleet: Fleet, ask: _Ask, prompt: int) -> list[Worker]:
        """Workers that a turn may move to. Where there are many, those with the shortest queues as
        they were some ms ago: to look at all of them costs more than all else that is decided, and
        where everybody waits every turn would."""
        workers = fleet.workers
        if len(workers) <= FEW:
            return placing.able(fleet, ask.excluded)
        computes = prompt or int(self.rates.leg_tokens)
        name = (len(workers), ask.now_ns // SHORTLIST_NS, computes.bit_length())
        if name != self._short_name:
            able = placing.able(fleet, ())
            queues = nsmallest(
                2 * TRIED,
                [one for one in able if one.role is WorkerRole.PREFILL] or able,
                key=lambda one: (
                    self.rates.queue_ns(one, ask.now_ns)
                    + self.rates.computes_ns(one.ref.worker_id, computes),
                    one.ref.worker_id,
                ),
            )
            places = nsmallest(
                2 * TRIED,
                placing.decoders(able),
                key=lambda one: (self.rates.decode_queue_ns(one), one.ref.worker_id),
            )
            self._short_name = name
            self._short = [[one.ref.worker_id for one in some] for some in (queues, places)]
        found: dict[str, Worker] = {}
        for names in self._short:
            known = [workers[x] for x in names if x in workers and x not in ask.excluded]
            still = {one.ref.worker_id: one for one in known if one.ready}
            if len(still) < min(len(names), TRIED):
                return placing.able(fleet, ask.excluded)
            found |= still
        return list(found.values())

    def _elsewhere(
        self, fleet: Fleet, ask: _Ask, stays: Choice, prompt: int
    ) -> tuple[Choice, Plan, Candidate] | None:
        """The best placement on other workers: another prefill with the same decode, then another
        decode with the better of the two. Of many workers only those with the shortest queues are
        tried. None when there is none."""

        def tried(choice: Choice) -> tuple[Choice, Plan, Candidate]:
            plan = self.plan(choice, ask.policy, prompt, ask.replicas, ask.arriving)
            return choice, plan, self.predict(choice, plan, prompt, ask.now_ns)

        def cost(one: tuple[Choice, Plan, Candidate]) -> tuple[int, str, str]:
            return one[2].ttft_us, one[2].prefill, one[2].decode

        able = self._shortlist(fleet, ask, prompt)
        base = replace(stays, source=stays.holder, placement="SHORTER_QUEUE", runner_up=None)
        best = None
        if stays.prefill is not None:
            computes = prompt or int(self.rates.leg_tokens)
            shortest = nsmallest(
                TRIED,
                (one for one in placing.prefills(able, stays.decode) if one is not stays.prefill),
                key=lambda one: (
                    self.rates.queue_ns(one, ask.now_ns)
                    + self.rates.computes_ns(one.ref.worker_id, computes),
                    one.ref.worker_id,
                ),
            )
            others = [tried(replace(base, prefill=one)) for one in shortest]
            best = min(others, key=cost, default=None)
        computing = [stays.prefill]
        if best is not None:
            computing.append(best[0].prefill)
        free = nsmallest(
            TRIED,
            (one for one in placing.decoders(able) if one is not stays.decode),
            key=lambda one: (self.rates.decode_queue_ns(one), one.ref.worker_id),
        )
        for prefill in computing:
            for decode in free:
                if decode is stays.decode or decode is prefill:
                    continue
                if prefill is None and placing.prefills(able, decode):
                    continue
                one = tried(replace(base, prefill=prefill, decode=decode))
                if best is None or cost(one) < cost(best):
                    best = one
        return best
