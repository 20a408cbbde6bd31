"""The run: groups of arms side by side, conversations turn about, everything noted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import httpx

from benchmarks.idle_cpu import measure, totals
from benchmarks.ttft import raw_nixl
from benchmarks.ttft.arms import ARMS, Arm, ArmKind, Pool, Scenario, open_arm
from benchmarks.ttft.counters import Snapshot, held_blocks
from benchmarks.ttft.groups import RESERVE_BYTES, available_bytes, plan_groups, used_bytes
from benchmarks.ttft.oracles import free_at_first, leaks
from benchmarks.ttft.schedule import Plan, alone
from benchmarks.ttft.texts import History
from benchmarks.ttft.turns import SPIN_S, Client, Moved, Sample
from kvshuttle.localstack import (
    Answer,
    ManagedProcess,
    Message,
    ProcessError,
    Stack,
    local_http,
    user,
)

__all__ = ["Options", "Results", "Run"]

# Two short turns in each arm: handshakes, what compiles at first use, connections.
WARM_UP_WORDS = (400, 120)
SETTLE_S = 5.0
# The words of the conversation that returns while engines do nothing else.
QUIET_WORDS = 1_500
# A prompt whose prefill is compared: as long as what a recorded agent's turn adds, and some.
PAIR_TOKENS = 1_000
IDEAL = "a"
# How far apart two logprobs of the same token may be in float32; bfloat16 differs by 0.1 between
# any two ways to compute a prompt, in plain vLLM too.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Options:
    """What to run."""

    pool: Pool
    plans: Sequence[Plan]
    scenarios: Sequence[Scenario]
    arms: Sequence[str]
    directory: Path
    idle_seconds: float
    idle_sessions: int
    # A group is not begun when one may not fit any more, and what is left is divided among the
    # groups that are to come: all arms with few conversations rather than few arms. None: no limit.
    budget_s: float | None
    # How long a turn waits for other programs to leave the machine alone.
    patience_s: float = 0.0
    # Prompts that push and pull compute side by side, beyond those of the conversations.
    pairs: int = 0
    # Returns of ours while its engines do nothing else.
    quiet_returns: int = 9
    # Memory that is left to the rest of the machine.
    reserve_bytes: int = RESERVE_BYTES


@dataclass
class QuietReturn:
    """A return between engines that do nothing else, and raw NIXL's time for as many bytes in as
    many pieces, a moment later, on the same machine in the same state."""

    moved: Moved
    raw_ms: float

    @property
    def ratio_to_raw(self) -> float:
        """Of the two speeds."""
        return self.raw_ms / self.moved.transfer_ms


@dataclass
class Results:
    """What was measured, growing while it runs."""

    samples: list[Sample] = field(default_factory=list)
    # Why an arm is not in a scenario: {scenario: {arm: reason}}.
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    idle: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Returns of each arm of ours while its engines did nothing else.
    quiet: dict[str, list[QuietReturn]] = field(default_factory=dict)
    # What each arm of ours left behind: {scenario: {arm: in words, None if nothing}}.
    leaked: dict[str, dict[str, str | None]] = field(default_factory=dict)
    engine_bytes: int = 0


class Run:
    """One run. `say` gets lines for a person; `save` is called after every turn."""

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None],
        save: Callable[[Results], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._say = say
        self._save = save
        self._started = time.monotonic()
        self._group = 0
        # The longest that a group took to be ready, and a conversation to be over.
        self._group_s = 0.0
        self._conversation_s = 0.0
        self._postponed: list[tuple[Scenario, list[ArmKind]]] = []
        self.results = Results()

    def run(self) -> Results:
        """Everything. Raises ProcessError if the plain engine does not start."""
        wanted = [kind for kind in ARMS if kind.key in self._options.arms]
        ideal = next(kind for kind in ARMS if kind.key == IDEAL)
        with self._opened(ideal, self._options.scenarios[0], "plain") as plain:
            self.results.engine_bytes = used_bytes(plain.prefill)
            others = [kind for kind in wanted if kind is not ideal]
            groups = [
                (scenario, group)
                for scenario in self._options.scenarios
                for group in plan_groups(
                    others,
                    self.results.engine_bytes,
                    available_bytes(),
                    self._options.reserve_bytes,
                )
            ]
            while groups:
                share = self._left_s() / len(groups)
                scenario, group = groups.pop(0)
                self._run_group(plain, group, scenario, time.monotonic() + share)
                if not groups:
                    # Those for which memory was short are tried again, alone.
                    groups, self._postponed = self._postponed, []
        return self.results

    # Groups

    def _run_group(
        self, plain: Arm, group: list[ArmKind], scenario: Scenario, until: float
    ) -> None:
        if self._left_s() < self._group_s:
            self._leave_out(scenario, group, "no time left for it in this run")
            return
        self._group += 1
        start = time.monotonic()
        names = ", ".join(kind.key for kind in group)
        self._say(f"\n{scenario}, group {self._group}: {names} beside the plain engine")
        with contextlib.ExitStack() as stack:
            arms = [plain]
            for kind in group:
                if missing := self._missing_memory(kind):
                    if len(group) > 1:
                        self._say(f"  {kind.key} {kind.name} is postponed: {missing}")
                        self._postponed.append((scenario, [kind]))
                    else:
                        self._leave_out(scenario, [kind], missing)
                    continue
                directory = self._options.directory / f"{scenario}-{kind.key}"
                try:
                    arms.append(stack.enter_context(self._opened(kind, scenario, directory.name)))
                except ProcessError as error:
                    self._leave_out(scenario, [kind], f"it does not start: {error}")
                    continue
                # Or the next one would have to start beside threads that spin on both cores.
                arms[-1].rest()
            self.results.groups.append(
                {"group": self._group, "scenario": scenario, "arms": [a.kind.key for a in arms]}
            )
            # It has heard these conversations in the group before.
            plain.prefill.reset_prefix_cache()
            patience = self._options.patience_s
            clients = [
                Client(arm, scenario, self._options.pool, self._group, patience) for arm in arms
            ]
            for client in clients:
                stack.callback(client.close)
            free = {arm.kind.key: free_at_first(arm) for arm in arms}
            for client in clients:
                _warm_up(client)
                client.arm.rest()
            self._group_s = max(self._group_s, time.monotonic() - start)
            for number, plan in enumerate(self._options.plans):
                start = time.monotonic()
                if number and start + self._conversation_s > until:
                    self._say(f"  {plan.name}: no time left")
                    break
                self._conversation(clients, plan)
                self._conversation_s = max(self._conversation_s, time.monotonic() - start)
            self._pairs(clients)
            for client in clients:
                if client.arm.kind.push:
                    self._quiet_returns(client)
            self._idle(scenario, clients)
            for arm in arms:
                if arm.kind.ours:
                    left = leaks(arm, free[arm.kind.key])
                    self.results.leaked.setdefault(scenario, {})[arm.kind.key] = left
                    self._say(f"  {arm.kind.key}: {left or 'nothing left behind'}")
        self._save(self.results)

    @contextlib.contextmanager
    def _opened(self, kind: ArmKind, scenario: Scenario, name: str) -> Iterator[Arm]:
        start = time.monotonic()
        with Stack(self._progress) as stack:
            arm = open_arm(
                kind, scenario, self._options.pool, self._options.directory / name, stack
            )
            self._say(f"  {kind.key} {kind.name}: up after {time.monotonic() - start:.0f} s")
            try:
                yield arm
            finally:
                arm.close()

    def _progress(self, process: ManagedProcess, phase: str) -> None:
        if phase == "starting":
            self._say(f"  {process.name}: starting")

    def _left_s(self) -> float:
        budget = self._options.budget_s
        return inf if budget is None else self._started + budget - time.monotonic()

    def _missing_memory(self, kind: ArmKind) -> str | None:
        """Others may have taken memory since the groups were made: the machine must not swap."""
        need = kind.engines * self.results.engine_bytes + self._options.reserve_bytes
        if (available := available_bytes()) >= need:
            return None
        return f"needs {need / 2**30:.1f} GiB of memory, {available / 2**30:.1f} are available"

    def _leave_out(self, scenario: str, kinds: Sequence[ArmKind], reason: str) -> None:
        for kind in kinds:
            self._say(f"  {kind.key} {kind.name} is left out: {reason.splitlines()[0]}")
            self.results.left_out.setdefault(scenario, {})[kind.key] = reason

    # Conversations

    def _conversation(self, clients: list[Client], plan: Plan) -> None:
        """One conversation on every arm of the group, turn by turn, who goes first changing."""
        if plan.tokens > self._options.pool.tokens:
            raise ValueError(f"{plan.name} needs {plan.tokens} tokens of KV: the pool is too small")
        history = History(plan, self._count(clients[0].arm))
        active = list(clients)
        for number, turn in enumerate(plan.turns, start=1):
            messages = history.ask(number)
            answers: dict[str, Answer] = {}
            made: list[Sample] = []
            shift = number % len(active)
            for client in [*active[shift:], *active[:shift]]:
                name = f"{plan.name}-{client.arm.kind.key}-{self._group}"
                try:
                    client.settle(name)
                    sample, answer = client.turn(
                        name, number, messages, turn.prompt_tokens, turn.output_tokens, turn.gap_s
                    )
                except httpx.HTTPError as error:
                    self._say(
                        f"  {client.arm.kind.key} failed in {plan.name} turn {number}: {error!r}"
                    )
                    if client.arm.kind.key == IDEAL:
                        raise
                    active.remove(client)
                    continue
                finally:
                    client.arm.rest()
                    time.sleep(SPIN_S)
                sample.conversation = plan.name
                answers[client.arm.kind.key] = answer
                made.append(sample)
            expected = answers[IDEAL]
            for sample in made:
                sample.differences = _differences(answers[sample.arm], expected)
            self.results.samples += made
            self._save(self.results)
            self._say(_line(plan, number, made))
            history.heard(expected.message())
        for client in clients:
            client.arm.wake()
            client.end(f"{plan.name}-{client.arm.kind.key}-{self._group}")
            client.arm.rest()

    @staticmethod
    def _count(arm: Arm) -> Callable[[Sequence[Message]], int]:
        def count(messages: Sequence[Message]) -> int:
            body = {
                "model": "model",
                "messages": list(messages),
                "add_generation_prompt": not messages or messages[-1]["role"] == "user",
            }
            if not messages:
                return 0
            answer = local_http.post(f"{arm.prefill.url}/tokenize", json=body, timeout=30)
            answer.raise_for_status()
            return int(answer.json()["count"])

        return count

    # Prefill's throughput, transfers, and idle

    def _pairs(self, clients: list[Client]) -> None:
        """Prompts that nobody has seen, one after the other on push's engines and on pull's, who
        goes first changing: what push costs prefill's computation."""
        both = [x for x in clients if x.arm.kind.eager]
        if {x.arm.kind.push for x in both} != {False, True}:
            return
        for number in range(self._options.pairs):
            plan = alone(number, PAIR_TOKENS)
            messages = History(plan, self._count(both[0].arm)).ask(1)
            made: list[Sample] = []
            for client in both if number % 2 else both[::-1]:
                name = f"{plan.name}-{client.arm.kind.key}-{self._group}"
                (turn,) = plan.turns
                sample, _ = client.turn(
                    name, 1, messages, turn.prompt_tokens, turn.output_tokens, 0.0, drops=False
                )
                sample.conversation = plan.name
                made.append(sample)
                client.settle(name)
                client.end(name)
                time.sleep(SPIN_S)
            self.results.samples += made
            self._say(_line(plan, 1, made))
        self._save(self.results)

    def _quiet_returns(self, client: Client) -> None:
        """How fast a conversation comes back while neither engine does anything else."""
        key = client.arm.kind.key
        if key in self.results.quiet:
            return
        name = f"quiet-{key}-{self._group}"
        messages: list[Message] = [user("The tide comes in. " * (QUIET_WORDS // 4) + "What then?")]
        found: list[QuietReturn] = []
        with contextlib.ExitStack() as stack:
            pair: raw_nixl.Pair | None = None
            for _ in range(self._options.quiet_returns):
                answer, moved = client.quiet_return(name, messages)
                messages += [answer.message(), user("And then?")]
                if not moved.is_whole_return or not moved.descriptors:
                    continue
                if pair is None:
                    # It grows by some blocks, turn by turn.
                    most = moved.bytes * 3 // 2
                    pair = stack.enter_context(raw_nixl.Pair(most))
                    for _ in range(raw_nixl.WARM_UP + raw_nixl.SLOTS):
                        pair.read(most, moved.descriptors)
                time.sleep(SPIN_S)
                took_s = pair.read(moved.bytes, moved.descriptors)
                found.append(QuietReturn(moved, took_s * 1e3))
        self.results.quiet[key] = found
        client.end(name)

    def _idle(self, scenario: str, clients: list[Client]) -> None:
        """CPU of engines that hold sessions and are asked nothing."""
        if not self._options.idle_seconds:
            return
        for client in clients:
            arm = client.arm
            key = arm.kind.key
            if key in self.results.idle:
                continue
            arm.wake()
            # Upstream cannot be told that a conversation is over: c holds those of the run too,
            # all for 480 s. b and d hold nothing once decode has read.
            wanted = self._options.idle_sessions if arm.kind.connector else 0
            try:
                for number in range(wanted):
                    client.touch(f"idle-{number}", f"Session {number}. Name a colour and a bird.")
            except httpx.HTTPError as error:
                self._say(f"  idle {key}: not measured, a session could not begin: {error!r}")
                arm.rest()
                continue
            time.sleep(SETTLE_S)
            held = held_blocks(arm, Snapshot.of(arm), self._options.pool.blocks)
            usages = measure(arm.engines, self._options.idle_seconds)
            self.results.idle[key] = {
                "scenario": scenario,
                "sessions": wanted,
                "seconds": self._options.idle_seconds,
                "percent_by_engine": totals(usages),
                "held_blocks": held,
                "percent": max(totals(usages).values()),
            }
            self._say(f"  idle {key}: {self.results.idle[key]['percent_by_engine']} % of a core")
            arm.rest()


def _warm_up(client: Client) -> None:
    messages: list[Message] = []
    for turn, words in enumerate(WARM_UP_WORDS, start=1):
        messages.append(user("The tide comes in and goes out. " * (words // 7) + "What then?"))
        _, answer = client.turn("warm-up", turn, messages, 0, 24, 0.5)
        messages.append(answer.message())
        client.settle("warm-up")
    client.end("warm-up")


def _differences(answer: Answer, expected: Answer) -> list[str]:
    found = []
    if answer.token_ids != expected.token_ids or not answer.token_ids:
        pairs = zip(answer.token_ids, expected.token_ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        same = min(len(answer.token_ids), len(expected.token_ids)) if same is None else same
        found.append(f"tokens differ from number {same} of {len(expected.token_ids)}")
    elif len(answer.logprobs) == len(expected.logprobs) and answer.logprobs:
        off = max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True))
        if off > LOGPROB_TOLERANCE:
            found.append(f"a logprob is off by {off:.4f}")
    return found


def _line(plan: Plan, number: int, made: Sequence[Sample]) -> str:
    parts = [f"{s.arm} {s.ttft_ms:7.0f}" for s in sorted(made, key=lambda s: s.arm)]
    odd = [f"{s.arm}: {'; '.join(s.differences)}" for s in made if s.differences]
    odd += [f"{s.arm}: cache was not dropped in time" for s in made if s.cache_dropped is False]
    text = f"  {plan.name} turn {number}, {made[0].prompt_tokens:5} tokens, TTFT ms: " + "  ".join(
        parts
    )
    return text + ("   (" + ", ".join(odd) + ")" if odd else "")
