"""Recorded sessions on a simulated cluster: queues, links and engines are formulas, the planner is
the real one.

What is simulated: every prefill worker computes one prompt after the other at a rate of its own; a
lazy return is moved before the prompt is computed, and what the prompt left is brought to prefill
once the turn has ended (or is awaited); the prompt's KV goes on to decode afterwards. A turn at
decode alone is computed there, one after the other too. What is not: memory (nothing is ever
evicted), the time to generate, what a prompt at decode costs those who are being answered there,
and hits in an engine's own cache that nobody brought.
"""

from __future__ import annotations

import gzip
import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from kvshuttle.controlplane.model.replica import Replica
from kvshuttle.controlplane.model.session import Placement, Plan, Session, Turn, Usage
from kvshuttle.controlplane.model.terms import (
    ReplicaState,
    ReturnMode,
    SessionKey,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
    WorkerState,
)
from kvshuttle.controlplane.model.worker import Worker
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.planner.planner import Choice

__all__ = ["Hardware", "Request", "Run", "load", "replay", "timetable"]

NS = 1_000_000_000
BLOCK = 64
OVERHEAD_NS = 10_000_000
GUESS_SPREAD = 0.2
"""By so much (standard deviation of its logarithm) a gateway's guess of a prompt's length is off,
in the same proportion for all of a session."""


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded turn; tokens. `shared` with the turn before."""

    begin_ns: int
    end_ns: int
    prompt: int
    shared: int
    output: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the cluster truly is."""

    prefills: int
    decodes: int
    tokens_per_s: float
    bytes_per_token: int
    bytes_per_s: float
    spread: float = 0.3
    """Rates of prefill workers lie within this share of `tokens_per_s`."""
    decode_share: float = 0.7
    """Of a prefill worker's rate that a decode worker computes prompts at, beside its answers."""


def load(path: Path, most: int, seed: int) -> list[list[Request]]:
    """A sample of the sessions of a file as `traces/README.md` describes it, gzipped or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line)["turns"] for line in lines]
    if not rows:
        raise ValueError(f"{path} has no session")
    random.Random(seed).shuffle(rows)
    return [
        [
            Request(
                int(t * NS), int((t + busy) * NS), max(1, int(prompt)), int(shared), int(output)
            )
            for t, prompt, shared, output, busy in turns
        ]
        for turns in rows[:most]
    ]


def timetable(
    sessions: list[list[Request]], hardware: Hardware, load_share: float, seed: int
) -> list[tuple[int, int, int]]:
    """(time, session, turn): sessions start at the instants of a Poisson process, so dense that
    new tokens alone keep the prefill workers busy for this share of the time in which they start.
    """
    new = sum(r.prompt - min(r.shared, r.prompt) for turns in sessions for r in turns)
    span_s = new / hardware.tokens_per_s / hardware.prefills / load_share
    dice = random.Random(seed)
    found = []
    start = 0.0
    for number, turns in enumerate(sessions):
        start += dice.expovariate(len(sessions) / span_s)
        found += [(int(start * NS) + r.begin_ns, number, at) for at, r in enumerate(turns)]
    return sorted(found)


@dataclass
class _Client:
    """A session, as the control plane and as its client know it."""

    session: Session
    guess: float
    last_ns: int = 0
    decode: str = ""
    prefill: str = ""
    left: int = 0
    brought_ns: int = 0
    number: int = 0


@dataclass
class Run:
    """What came of it."""

    ttft_ms: list[float] = field(default_factory=list)
    modes: Counter[str] = field(default_factory=Counter)
    moves: int = 0
    decode_tokens: int = 0
    off: list[float] = field(default_factory=list)
    """Predicted by what happened, of the planner's."""


Policy = Callable[["_Cluster", _Client, Request, int], tuple[str, str, ReturnMode, Plan | None]]


class _Cluster:
    """The true state."""

    def __init__(self, hardware: Hardware, seed: int, planner: Planner) -> None:
        dice = random.Random(seed)
        self.hardware = hardware
        self.planner = planner
        self.prefills = [f"p{i}" for i in range(hardware.prefills)]
        self.decodes = [f"d{i}" for i in range(hardware.decodes)]
        low, high = 1 - hardware.spread, 1 + hardware.spread
        self.rate = {p: hardware.tokens_per_s * dice.uniform(low, high) for p in self.prefills}
        share = hardware.decode_share
        self.rate |= dict.fromkeys(self.decodes, hardware.tokens_per_s * share)
        self.free_ns = dict.fromkeys([*self.prefills, *self.decodes], 0)
        self.turns_on: Counter[str] = Counter()
        self.workers = {
            name: Worker(
                ref=WorkerRef(name, 1),
                boot_id=name,
                role=WorkerRole.PREFILL if name in self.prefills else WorkerRole.DECODE,
                url="",
                state=WorkerState.READY,
                register_ns=0,
                heard_ns=0,
                block_size=BLOCK,
                bytes_per_block=hardware.bytes_per_token * BLOCK,
            )
            for name in self.free_ns
        }

    def computes_ns(self, worker: str, tokens: int) -> int:
        return int(tokens * NS / self.rate[worker])

    def moves_ns(self, tokens: int) -> int:
        return OVERHEAD_NS + int(
            tokens * self.hardware.bytes_per_token * NS / self.hardware.bytes_per_s
        )

    def times(
        self, one: _Client, r: Request, now: int, prefill: str, decode: str, mode: ReturnMode
    ) -> tuple[int, int, int, int]:
        """(begin, end of computing, time to the first token, tokens computed), if it ran so."""
        worker = prefill or decode
        shared = min(r.shared, one.left, r.prompt - 1)
        have = 0 if mode is ReturnMode.NONE else shared
        ready = now
        if mode is ReturnMode.LAZY:
            ready += self.moves_ns(shared)
        elif mode is ReturnMode.EAGER:
            ready = max(now, one.brought_ns)
        begin = max(ready, self.free_ns[worker])
        end = begin + self.computes_ns(worker, r.prompt - have)
        first = end
        if prefill:
            there = shared if decode == one.decode else 0
            first += self.moves_ns(r.prompt - there)
        return begin, end, first - now, r.prompt - have


def sticky(
    c: _Cluster, one: _Client, r: Request, now: int
) -> tuple[str, str, ReturnMode, Plan | None]:
    """Where the conversation was before, for ever; at first where fewest turns run."""
    prefill = one.prefill or min(c.prefills, key=lambda name: (c.turns_on[name], name))
    decode = one.decode or min(c.decodes, key=lambda name: (c.turns_on[name], name))
    return prefill, decode, ReturnMode.EAGER if one.left else ReturnMode.NONE, None


def greedy(
    c: _Cluster, one: _Client, r: Request, now: int
) -> tuple[str, str, ReturnMode, Plan | None]:
    """Whatever gives this turn its first token soonest, with the true rates and queues known."""
    ways: list[tuple[int, str, str, ReturnMode]] = []
    decode = one.decode or min(c.decodes, key=lambda name: (c.turns_on[name], name))
    for prefill in c.prefills:
        modes = [ReturnMode.NONE]
        if one.left:
            modes.append(ReturnMode.EAGER if prefill == one.prefill else ReturnMode.LAZY)
        ways += [(c.times(one, r, now, prefill, decode, m)[2], prefill, decode, m) for m in modes]
    if one.left:
        _, _, direct, computed = c.times(one, r, now, "", decode, ReturnMode.DIRECT)
        if computed <= c.planner.direct_tokens:
            ways.append((direct, "", decode, ReturnMode.DIRECT))
    _, prefill, decode, mode = min(ways)
    return prefill, decode, mode, None


def planned(
    c: _Cluster, one: _Client, r: Request, now: int
) -> tuple[str, str, ReturnMode, Plan | None]:
    """The planner, with what it has learned."""
    replicas = []
    if one.left:
        blocks = one.left // BLOCK
        head = b"%d" % one.number
        held = Replica(WorkerRef(one.decode, 1), head, blocks, blocks * BLOCK, ReplicaState.HARD, 0)
        replicas.append(held)
        if one.prefill and now >= one.brought_ns:
            copy = replace(held, worker=WorkerRef(one.prefill, 1), state=ReplicaState.SOFT)
            replicas.append(copy)
    asked = max(1, int(r.prompt * one.guess))
    choice: Choice
    choice, plan = c.planner.decide(
        now_ns=now,
        workers=c.workers,
        session=one.session,
        replicas=replicas,
        turns_on=c.turns_on,
        prompt_tokens=asked,
        arriving=one.prefill if one.left and now < one.brought_ns else "",
    )
    prefill = choice.prefill.ref.worker_id if choice.prefill is not None else ""
    return prefill, choice.decode.ref.worker_id, plan.return_mode, plan


def bound_ms(cluster: _Cluster, one: _Client, r: Request) -> float:
    """As if nothing waited anywhere, all KV were where it is wanted, and the fastest were free."""
    shared = min(r.shared, one.left, r.prompt - 1)
    fastest = max(cluster.rate.values())
    alone = (r.prompt - shared) / fastest * 1e3
    return alone if one.left else alone + cluster.moves_ns(r.prompt) / 1e6


def replay(
    sessions: list[list[Request]],
    events: list[tuple[int, int, int]],
    hardware: Hardware,
    policy: Policy,
    *,
    seed: int,
    direct_tokens: int = 256,
) -> tuple[Run, Run]:
    """The run, and the bound of the same turns."""
    cluster = _Cluster(hardware, seed, Planner(64, direct_tokens))
    dice = random.Random(seed + 1)
    clients = [
        _Client(Session(SessionKey("t", str(n)), 0, 0), dice.lognormvariate(0, GUESS_SPREAD))
        for n in range(len(sessions))
    ]
    run, bound = Run(), Run()
    order = itertools.count()
    reports: list[tuple[int, int, Callable[[], None]]] = []
    for now, number, at in events:
        while reports and reports[0][0] <= now:
            heapq.heappop(reports)[2]()
        one, r = clients[number], sessions[number][at]
        prefill, decode, mode, plan = policy(cluster, one, r, now)
        begin, end, ttft, computed = cluster.times(one, r, now, prefill, decode, mode)
        worker = prefill or decode
        cluster.free_ns[worker] = end
        bound.ttft_ms.append(bound_ms(cluster, one, r))
        run.ttft_ms.append(ttft / 1e6)
        run.modes[mode.name] += 1
        run.moves += bool(one.prefill and prefill and prefill != one.prefill)
        run.decode_tokens += 0 if prefill else computed
        if plan is not None:
            run.off.append(plan.predicted_ttft_us * 1e3 / max(1, ttft))
        _learn(cluster, one, r, plan, (prefill, decode, computed, begin, end), now, reports, order)
        _leave(cluster, one, r, now + ttft, prefill or one.prefill, decode, plan, ttft)
    return run, bound


def _learn(
    cluster: _Cluster,
    one: _Client,
    r: Request,
    plan: Plan | None,
    took: tuple[str, str, int, int, int],
    now: int,
    reports: list[tuple[int, int, Callable[[], None]]],
    order: itertools.count[int],
) -> None:
    """What the agents will report when the prompt has been computed."""
    prefill, decode, computed, begin, end = took
    rates, worker = cluster.planner.rates, prefill or decode
    for name in {prefill, decode} - {""}:
        cluster.turns_on[name] += 1
    token = f"{one.session.key.session_id}/{one.number}"
    if prefill and plan is not None:
        rates.give(token, prefill, plan.candidates[0].compute_tokens, now)

    def report() -> None:
        for name in {prefill, decode} - {""}:
            cluster.turns_on[name] -= 1
        given = rates.done(token, end)
        if given and plan is not None and plan.return_mode is not ReturnMode.NONE:
            rates.observe_miss(computed - given)
        rates.observe_prefill(worker, computed, end - begin)
        if prefill:
            size = r.prompt * cluster.hardware.bytes_per_token
            rates.observe_transfer(prefill, decode, size, cluster.moves_ns(r.prompt))
            rates.observe_transfer(decode, prefill, size, cluster.moves_ns(r.prompt))

    heapq.heappush(reports, (end, next(order), report))


def _leave(
    cluster: _Cluster,
    one: _Client,
    r: Request,
    first_ns: int,
    prefill: str,
    decode: str,
    plan: Plan | None,
    ttft: int,
) -> None:
    """What the turn leaves: at decode, and brought to the prefill worker of its session."""
    one.number += 1
    one.decode, one.prefill = decode, prefill
    one.left = r.prompt + r.output
    end_ns = first_ns + max(0, r.end_ns - r.begin_ns)
    one.brought_ns = end_ns + cluster.moves_ns(r.prompt - min(r.shared, r.prompt) + r.output)
    turn = Turn(
        number=one.session.turn_count + 1,
        token="",
        decode=_place(cluster, decode),
        plan=plan or Plan(ReturnMode.NONE, ""),
        begin_ns=0,
        retention_ns=0,
        prefill=_place(cluster, prefill) if prefill else None,
        asked_tokens=max(1, int(r.prompt * one.guess)),
    )
    usage = Usage(r.prompt, min(r.shared, r.prompt), r.output, ttft)
    session = one.session.with_turn(turn, 0)
    one.session = session.with_turn_ended(turn.number, TurnOutcome.COMPLETED, usage, 0, 1)


def _place(cluster: _Cluster, name: str) -> Placement:
    return Placement(cluster.workers[name].ref, "")
