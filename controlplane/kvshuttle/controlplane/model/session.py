"""Sessions and their turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from kvshuttle.controlplane.model.errors import IllegalTransitionError
from kvshuttle.controlplane.model.gaps import NO_GAPS, Absence, noted
from kvshuttle.controlplane.model.requests import remember
from kvshuttle.controlplane.model.terms import (
    ForwardMode,
    Hints,
    ReturnMode,
    SessionKey,
    SessionState,
    TurnOutcome,
    TurnState,
    WorkerRef,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Candidate", "Placement", "Plan", "Session", "Turn", "Usage"]


class Placement(Struct, frozen=True, array_like=True, gc=False):
    """A worker chosen for a leg."""

    worker: WorkerRef
    url: str


class Candidate(Struct, frozen=True, array_like=True, gc=False):
    """One way to run a turn, and the microseconds that it was predicted to take; see the API."""

    prefill: str
    decode: str
    return_mode: ReturnMode
    queue_us: int = 0
    transfer_us: int = 0
    compute_us: int = 0
    decode_queue_us: int = 0
    forward_us: int = 0
    compute_tokens: int = 0
    assumed: tuple[str, ...] = ()
    rejected: str = ""

    @property
    def ttft_us(self) -> int:
        """Until the first token."""
        return (
            self.queue_us
            + self.transfer_us
            + self.compute_us
            + self.decode_queue_us
            + self.forward_us
        )


class Plan(Struct, frozen=True, array_like=True, gc=False):
    """How the KV of earlier turns reaches prefill, and that of this one decode, and why; each
    reason is one word, and so is `placement`, why the turn runs where it does. Of `candidates` the
    chosen one is the first."""

    return_mode: ReturnMode
    reason: str
    reusable_tokens: int = 0
    predicted_recompute_ns: int = 0
    predicted_transfer_ns: int = 0
    forward_mode: ForwardMode = ForwardMode.PULL
    forward_reason: str = ""
    placement: str = ""
    candidates: tuple[Candidate, ...] = ()

    @property
    def predicted_ttft_us(self) -> int:
        """Of what was chosen."""
        return self.candidates[0].ttft_us if self.candidates else 0


class Usage(Struct, frozen=True, array_like=True, gc=False):
    """What a turn cost, as its gateway saw it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_ns: int = 0


class Turn(Struct, frozen=True, array_like=True, gc=False):
    """One request of a conversation; `prefill` is None when it runs on one worker alone."""

    number: int
    token: str
    decode: Placement
    plan: Plan
    begin_ns: int
    retention_ns: int
    prefill: Placement | None = None
    state: TurnState = TurnState.RUNNING
    outcome: TurnOutcome = TurnOutcome.UNSPECIFIED
    end_ns: int = 0
    usage: Usage | None = None
    request_id: str = ""
    asked_tokens: int = 0
    """The caller's guess of the prompt's length; 0 for none."""
    always: bool = False
    """The caller wants what can be moved moved, whether it pays or not."""

    @property
    def running(self) -> bool:
        """Whether nobody has ended it."""
        return self.state is TurnState.RUNNING

    def placements(self) -> Iterator[Placement]:
        """The one or two workers it runs on."""
        if self.prefill is not None:
            yield self.prefill
        yield self.decode


class Session(Struct, frozen=True, array_like=True, gc=False):
    """One conversation. Several of its turns may run at once; numbers are never used twice."""

    key: SessionKey
    create_ns: int
    update_ns: int
    state: SessionState = SessionState.ACTIVE
    turn_count: int = 0
    turns: tuple[Turn, ...] = ()
    hints: Hints = field(default_factory=Hints)
    last_prefill: str = ""
    version: int = 0
    requests: tuple[str, ...] = ()
    gaps: bytes = NO_GAPS
    """How long it was away between its turns: see `gaps.noted`."""
    hint_ns: int = 0
    """When the client last said how long it would be away; 0: never."""

    @property
    def active(self) -> bool:
        """Whether it takes changes."""
        return self.state is SessionState.ACTIVE

    def running(self) -> tuple[Turn, ...]:
        """The turns that run."""
        running = TurnState.RUNNING
        return tuple([turn for turn in self.turns if turn.state is running])

    def find(self, number: int) -> Turn | None:
        """A turn that is still remembered."""
        for turn in self.turns:
            if turn.number == number:
                return turn
        return None

    def find_token(self, token: str) -> Turn | None:
        """The turn with this token, running or ended, if it is still remembered."""
        for turn in self.turns:
            if token and turn.token == token:
                return turn
        return None

    def find_request(self, request_id: str) -> Turn | None:
        """The turn that a BeginTurn with this id made, if it is still remembered."""
        for turn in self.turns:
            if request_id and turn.request_id == request_id:
                return turn
        return None

    def with_turn(self, turn: Turn, now_ns: int) -> Session:
        """The session with one more turn. IllegalTransitionError: ended, or not the next number."""
        if not self.active or turn.number != self.turn_count + 1:
            raise IllegalTransitionError(
                f"turn {turn.number} cannot follow {self.turn_count} of a session that is "
                f"{self.state.name}",
                session_id=self.key.session_id,
            )
        prefill = turn.prefill.worker.worker_id if turn.prefill else self.last_prefill
        return replace(
            self,
            turn_count=turn.number,
            turns=(*self.turns, turn),
            last_prefill=prefill,
            update_ns=now_ns,
        )

    def with_turn_ended(
        self, number: int, outcome: TurnOutcome, usage: Usage | None, now_ns: int, keep: int
    ) -> Session:
        """The session with a running turn ended; the newest `keep` ended turns are remembered."""
        turn = self.find(number)
        if turn is None or not turn.running or outcome is TurnOutcome.UNSPECIFIED:
            raise IllegalTransitionError(
                f"turn {number} does not run and cannot end", session_id=self.key.session_id
            )
        ended = replace(turn, state=TurnState.ENDED, outcome=outcome, usage=usage, end_ns=now_ns)
        # To the end of the tuple: ended turns lie in the order in which they ended, which is not
        # that of their numbers, nor always of their times.
        turns = [t for t in self.turns if t.number != number]
        # Of turns that ended before, nobody is shown what was compared.
        turns = [
            replace(t, plan=replace(t.plan, candidates=()))
            if t.plan.candidates and t.state is not TurnState.RUNNING
            else t
            for t in turns
        ]
        turns.append(ended)
        excess = len(turns) - len(self.running()) + 1 - keep
        if excess > 0:
            over = [t.number for t in turns if t.state is not TurnState.RUNNING][:excess]
            turns = [t for t in turns if t.number not in over]
        return replace(self, turns=tuple(turns), update_ns=now_ns)

    def last_ended(self) -> Turn | None:
        """The turn that ended last."""
        for turn in reversed(self.turns):
            if turn.state is not TurnState.RUNNING:
                return turn
        return None

    def with_hints(self, hints: Hints, now_ns: int) -> Session:
        """The session with its hints replaced. What a client expects counts from when it said so;
        a new value alone says nothing new of it."""
        idle = hints.expected_idle_ns
        same = idle == self.hints.expected_idle_ns and hints.value is not self.hints.value
        return replace(
            self,
            hints=hints,
            hint_ns=self.hint_ns if idle is None or same else now_ns,
            update_ns=now_ns,
        )

    def with_gap(self, now_ns: int) -> Session:
        """The session at the begin of its next turn: the time since its last one is noted, and
        what the client expected of that time is over."""
        last = self.last_ended()
        if last is None or self.running():
            return self
        return replace(
            self,
            gaps=noted(self.gaps, now_ns - last.end_ns),
            hints=Hints(None, self.hints.value),
        )

    def absence(self, now_ns: int) -> Absence:
        """What is known of the time after its last turn, or after a turn that runs if that ended
        now."""
        running = self.running()
        last = self.last_ended()
        expected = self.hints.expected_idle_ns
        if running:
            since_ns, begin_ns = now_ns, max(turn.begin_ns for turn in running)
        elif last is not None:
            since_ns, begin_ns = last.end_ns, last.begin_ns
        else:
            since_ns = begin_ns = self.create_ns
        busy_ns = since_ns - begin_ns
        if expected is not None:
            since_ns = max(since_ns, self.hint_ns)
        return Absence(since_ns, busy_ns, self.gaps, self.hint_ns > 0, expected)

    def asked(self, request: str) -> Session:
        """The session with a request remembered."""
        return replace(self, requests=remember(self.requests, request))

    def ended(self, now_ns: int) -> Session:
        """The ended session. IllegalTransitionError while a turn runs."""
        if not self.active or self.running():
            raise IllegalTransitionError(
                "a session ends once, after its turns", session_id=self.key.session_id
            )
        return replace(self, state=SessionState.ENDED, update_ns=now_ns)

    def restarted(self, now_ns: int) -> Session:
        """An ended session afresh. Numbers go on: a late EndTurn of the life before must not
        end a turn of this one. Nor must a late EndSession end it, or a late BeginTurn begin twice:
        what was asked is remembered."""
        return Session(
            self.key,
            now_ns,
            now_ns,
            turn_count=self.turn_count,
            turns=self.turns,
            requests=self.requests,
        )
