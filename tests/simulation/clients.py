"""Conversations: what gateways and people do, turn by turn, each with a fallback for everything."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvshuttle.controlplane.model.terms import (
    ForwardMode,
    Hints,
    ReturnPolicy,
    SessionKey,
    SessionValue,
    TurnOutcome,
)
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.v1 import types_pb2
from tests.simulation.engine import BLOCK_TOKENS, EngineRequest
from tests.simulation.kernel import MS, SECOND, Violation, between

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.effects import Decision
    from kvshuttle.controlplane.model.registry import Registry
    from kvshuttle.controlplane.model.session import Turn
    from kvshuttle.dataplane.turns import LegKey
    from tests.simulation.kernel import Kernel
    from tests.simulation.worker import Boot

__all__ = ["Behaviour", "Cluster", "Conversation", "chain_hash"]

PREFILL, DECODE = types_pb2.LEG_PREFILL, types_pb2.LEG_DECODE
CALL_TIMEOUT_NS = 1_500 * MS


def chain_hash(parent: bytes, content: int) -> bytes:
    """Of a block after its parent, as every engine computes it."""
    return hashlib.blake2b(parent + content.to_bytes(8, "big"), digest_size=8).digest()


@dataclass
class Behaviour:
    """What the people of a schedule do, as probabilities a turn unless it says otherwise."""

    abort: float = 0.0
    concurrent: float = 0.0
    end_session: float = 0.0
    duplicate: float = 0.0
    siblings: float = 0.0
    # A new session goes on from where this one is: a forked agent. Now and then of another tenant,
    # which has the same text by chance and must get nothing of it.
    fork: float = 0.0
    # A leg's request comes seconds after its turn was announced, or never.
    late_request: float = 0.0
    forget_end: float = 0.05
    hints: float = 0.1
    think_ms: float = 400.0
    longest: int = 10


@dataclass
class Cluster:
    """What conversations need of the world."""

    kernel: Kernel
    behaviour: Behaviour
    # Calls the control plane: (event, done, failed); neither may ever be called.
    call: Callable[
        [
            Callable[[Registry, int], Decision[Any]],
            Callable[[Any], None],
            Callable[[str], None],
        ],
        None,
    ]
    # The live boot at a worker's address.
    boot: Callable[[str], Boot | None]
    workers: list[str]
    # Begins another conversation: (tenant, session, history).
    spawn: Callable[[str, str, list[bytes]], None]
    # Requests that engines have and have not finished.
    open_requests: dict[str, tuple[EngineRequest, Boot]] = field(default_factory=dict)
    contents: int = 0
    numbers: int = 0
    finished: int = 0
    aborted: int = 0
    errors: int = 0

    def number(self) -> int:
        """A fresh one."""
        self.numbers += 1
        return self.numbers

    def submit(
        self,
        worker_id: str,
        key: LegKey | None,
        hashes: tuple[bytes, ...],
        prompt_tokens: int,
        output_tokens: int,
        done: Callable[[str], None],
    ) -> str:
        """Sends a request to an engine; `done` hears finished, aborted or error. Its id."""
        request_id = f"req{self.number()}"
        kernel = self.kernel
        boot = self.boot(worker_id)
        if boot is None:
            kernel.at(between(kernel.rng, 1, 50), None, done, "error")
            return request_id

        def over(request: EngineRequest, how: str) -> None:
            if self.open_requests.pop(request_id, None) is None:
                raise Violation("engine", f"{request_id} ended twice")
            if how == "finished":
                self.finished += 1
            else:
                self.aborted += 1
            kernel.log(boot.name, how, request=request_id)
            kernel.at(between(kernel.rng, 0.2, 10), None, done, how)

        request = EngineRequest(
            request_id,
            key,
            hashes,
            prompt_tokens,
            output_tokens,
            over,
            known_end=output_tokens == 1 or kernel.rng.random() < 0.5,
        )
        self.open_requests[request_id] = (request, boot)
        kernel.log(boot.name, "request", id=request_id, leg=key, tokens=prompt_tokens)
        kernel.at(between(kernel.rng, 0.2, 10), boot.engine_thread, boot.engine.add, request)
        self._on_error[request_id] = done
        return request_id

    _on_error: dict[str, Callable[[str], None]] = field(default_factory=dict)

    def abort(self, request_id: str) -> None:
        """Hangs up."""
        entry = self.open_requests.get(request_id)
        if entry is not None:
            _, boot = entry
            # Later than the request itself, on the same connection.
            self.kernel.at(
                between(self.kernel.rng, 10, 20),
                boot.engine_thread,
                boot.engine.abort,
                request_id,
            )

    def boot_died(self, dead: Boot) -> None:
        """Its clients see their connections break."""
        for request_id, (_, boot) in list(self.open_requests.items()):
            if boot is dead:
                del self.open_requests[request_id]
                self.errors += 1
                self.kernel.at(
                    between(self.kernel.rng, 1, 50), None, self._on_error[request_id], "error"
                )


@dataclass(eq=False)
class _TurnInProgress:
    """One turn, from its client's side."""

    request_id: str
    hashes: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    tries: int = 0
    answered: bool = False
    over: bool = False
    turn: Turn | None = None
    leg_request: str = ""
    legs: list[str] = field(default_factory=list)


class Conversation:
    """One session's client."""

    def __init__(
        self,
        cluster: Cluster,
        tenant: str,
        session_id: str,
        turns: int,
        chain: Sequence[bytes] = (),
    ) -> None:
        self.cluster = cluster
        self.kernel = cluster.kernel
        self.rng: random.Random = cluster.kernel.rng
        self.key = SessionKey(tenant, session_id)
        self.chain = list(chain)
        self.turns_left = turns
        self.running = 0
        self.ended = False
        delay = between(self.rng, 0, 50 if chain else 2_000)
        self.kernel.at(delay, None, self._next_turn)

    @property
    def quiet(self) -> bool:
        """Whether it will do nothing more by itself."""
        return self.running == 0 and self.turns_left <= 0

    # Turns.

    def _next_turn(self) -> None:
        if self.turns_left <= 0:
            return
        self.turns_left -= 1
        self._start_turn()
        if self.turns_left > 0 and self.rng.random() < self.cluster.behaviour.concurrent:
            self.kernel.fault("concurrent_turns", self.key.session_id)
            self.turns_left -= 1
            self._start_turn()

    def _start_turn(self) -> None:
        self.running += 1
        hashes = list(self.chain)
        if len(hashes) > 2 and (
            len(hashes) >= self.cluster.behaviour.longest or self.rng.random() < 0.15
        ):
            # An edit: the conversation goes on from an earlier point.
            del hashes[self.rng.randint(1, len(hashes) - 1) :]
        for _ in range(self.rng.randint(1, 3)):
            hashes.append(self._block(hashes))
        prompt_tokens = len(hashes) * BLOCK_TOKENS + self.rng.choice([0, 1, 17, 31])
        output_tokens = self.rng.choice([1, 2, 20, 40])
        while len(hashes) * BLOCK_TOKENS < prompt_tokens + output_tokens:
            hashes.append(self._block(hashes))
        progress = _TurnInProgress(
            f"begin{self.cluster.number()}", tuple(hashes), prompt_tokens, output_tokens
        )
        self._begin(progress)

    def _block(self, hashes: list[bytes]) -> bytes:
        self.cluster.contents += 1
        parent = hashes[-1] if hashes else b"root" + self.key.session_id.encode()
        return chain_hash(parent, self.cluster.contents)

    def _begin(self, progress: _TurnInProgress) -> None:
        progress.tries += 1
        policy = self.rng.choice([ReturnPolicy.ALWAYS, ReturnPolicy.ALWAYS, ReturnPolicy.AUTO])
        hints = Hints()
        if self.rng.random() < self.cluster.behaviour.hints:
            hints = Hints(
                self.rng.choice([None, SECOND, 5 * SECOND]), self.rng.choice(list(SessionValue))
            )
        ask = BeginTurn(
            key=self.key,
            token=f"token{self.cluster.number()}",
            request_id=progress.request_id,
            prompt_tokens=progress.prompt_tokens,
            policy=policy,
            hints=hints,
        )
        copies = 1
        if self.rng.random() < self.cluster.behaviour.duplicate:
            self.kernel.fault("duplicate", self.key.session_id, call="BeginTurn")
            copies = 2
        for _ in range(copies):
            self.cluster.call(
                lambda registry, now: registry.begin_turn(now, ask),
                lambda turn: self._begun(progress, turn),
                lambda why: self._not_begun(progress, why),
            )
        self.kernel.at(CALL_TIMEOUT_NS, None, self._begin_timed_out, progress, progress.tries)

    def _begin_timed_out(self, progress: _TurnInProgress, tries: int) -> None:
        if progress.answered or progress.tries != tries:
            return
        if tries < 3:
            self._begin(progress)
        else:
            self._not_begun(progress, "timeout")

    def _not_begun(self, progress: _TurnInProgress, why: str) -> None:
        """The gateway goes on without the control plane."""
        if progress.answered:
            return
        progress.answered = True
        self.kernel.log(self.key.session_id, "goes on without a turn", why=why)
        worker_id = self.rng.choice(self.cluster.workers)
        self._leg(progress, worker_id, None, progress.output_tokens, self._decoded)

    def _begun(self, progress: _TurnInProgress, turn: Turn) -> None:
        if progress.answered:
            if progress.turn is not None and progress.turn.token != turn.token:
                raise Violation("single use", f"{progress.request_id} began two turns")
            return
        progress.answered = True
        progress.turn = turn
        self.kernel.log(
            self.key.session_id,
            "turn",
            number=turn.number,
            token=turn.token,
            mode=turn.plan.return_mode.name,
        )
        if turn.prefill is not None and turn.plan.forward_mode is ForwardMode.PUSH:
            self._together(progress, turn.prefill.worker.worker_id)
        elif turn.prefill is not None:
            key = (turn.token, PREFILL)
            self._leg(progress, turn.prefill.worker.worker_id, key, 1, self._prefilled)
        else:
            self._decode(progress)

    def _leg(
        self,
        progress: _TurnInProgress,
        worker_id: str,
        key: LegKey | None,
        output_tokens: int,
        then: Callable[[_TurnInProgress, str], None],
        *,
        late: bool = False,
    ) -> None:
        cluster, rng = self.cluster, self.rng
        if key is not None and not late and rng.random() < cluster.behaviour.late_request:
            self.kernel.fault("late_request", self.key.session_id)
            if rng.random() < 0.2:
                # Its gateway died: nobody ends the turn either.
                self.kernel.at(between(rng, 500, 9_000), None, self._given_up)
                return
            self.kernel.at(
                between(rng, 200, 11_000),
                None,
                lambda: self._leg(progress, worker_id, key, output_tokens, then, late=True),
            )
            return
        request_id = cluster.submit(
            worker_id,
            key,
            progress.hashes,
            progress.prompt_tokens,
            output_tokens,
            lambda how: then(progress, how),
        )
        progress.leg_request = request_id
        progress.legs.append(request_id)
        if rng.random() < cluster.behaviour.abort:
            self.kernel.at(between(rng, 0, 400), None, self._hang_up, progress, request_id)
        if key is not None and rng.random() < cluster.behaviour.siblings:
            # n > 1: another request with the same token.
            self.kernel.fault("sibling", self.key.session_id, token=key[0])
            cluster.submit(
                worker_id,
                key,
                progress.hashes,
                progress.prompt_tokens,
                output_tokens,
                lambda _: None,
            )

    def _hang_up(self, progress: _TurnInProgress, request_id: str) -> None:
        if not progress.over and progress.leg_request == request_id:
            entry = self.cluster.open_requests.get(request_id)
            if entry is not None:
                self.kernel.fault("abort", self.key.session_id, state=entry[0].status.value)
                if entry[0].status.value == "loading":
                    self.kernel.fault("abort_during_load", self.key.session_id)
                self.cluster.abort(request_id)

    def _together(self, progress: _TurnInProgress, prefill: str) -> None:
        """A push: both legs at once, in any order."""
        assert progress.turn is not None
        key = (progress.turn.token, PREFILL)

        def prefills() -> None:
            self._leg(progress, prefill, key, 1, self._pushed, late=True)

        def decodes() -> None:
            self._decode(progress, late=True)

        legs = [prefills, decodes]
        self.rng.shuffle(legs)
        legs[0]()
        if self.rng.random() < self.cluster.behaviour.late_request:
            self.kernel.fault("late_request", self.key.session_id)
            self.kernel.at(between(self.rng, 200, 11_000), None, legs[1])
        else:
            legs[1]()

    def _pushed(self, progress: _TurnInProgress, how: str) -> None:
        """Prefill's leg of a push has ended. If not well, its gateway takes decode's away."""
        if how != "finished" and not progress.over:
            for request_id in progress.legs:
                self.cluster.abort(request_id)

    def _prefilled(self, progress: _TurnInProgress, how: str) -> None:
        if how == "aborted":
            self._over(progress, TurnOutcome.CANCELLED)
        else:
            # After an error too: decode computes the prompt itself.
            self._decode(progress)

    def _decode(self, progress: _TurnInProgress, *, late: bool = False) -> None:
        assert progress.turn is not None
        worker_id = progress.turn.decode.worker.worker_id
        key = (progress.turn.token, DECODE)
        self._leg(progress, worker_id, key, progress.output_tokens, self._decoded, late=late)

    def _decoded(self, progress: _TurnInProgress, how: str) -> None:
        if how == "finished":
            full = (progress.prompt_tokens + progress.output_tokens) // BLOCK_TOKENS
            # Most answers read the same when they come back as text, to their last, partial block.
            self.chain = list(progress.hashes[: full + (self.rng.random() < 0.7)])
            if self.turns_left and self.rng.random() < self.cluster.behaviour.fork:
                self.fork()
            self._over(progress, TurnOutcome.COMPLETED)
        elif how == "aborted":
            self._over(progress, TurnOutcome.CANCELLED)
        else:
            self._over(progress, TurnOutcome.FAILED)

    def fork(self) -> None:
        number = self.cluster.number()
        tenant = self.key.tenant if self.rng.random() < 0.8 else "stranger"
        self.kernel.fault("fork", self.key.session_id, tenant=tenant)
        self.cluster.spawn(tenant, f"{self.key.session_id}f{number}", self.chain)

    def _over(self, progress: _TurnInProgress, outcome: TurnOutcome) -> None:
        progress.over = True
        for request_id in progress.legs:
            # A push's other leg, if it still runs.
            self.cluster.abort(request_id)
        self.running -= 1
        turn = progress.turn
        if turn is not None and self.rng.random() >= self.cluster.behaviour.forget_end:
            copies = 2 if self.rng.random() < self.cluster.behaviour.duplicate else 1
            for _ in range(copies):
                self.cluster.call(
                    lambda registry, now: registry.end_turn(now, self.key, turn.number, outcome),
                    lambda _: None,
                    lambda _: None,
                )
        if self.rng.random() < self.cluster.behaviour.end_session:
            self.kernel.fault("session_end", self.key.session_id)
            self.end_session()
        if self.running == 0:
            delay = between(self.rng, 5, self.cluster.behaviour.think_ms)
            self.kernel.at(delay, None, self._next_turn)

    def _given_up(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._next_turn()

    def end_session(self) -> None:
        """The client is done with it; a later turn starts it afresh."""
        self.cluster.call(
            lambda registry, now: registry.end_session(now, self.key),
            lambda _: None,
            lambda _: None,
        )
