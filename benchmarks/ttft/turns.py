"""One turn of one conversation on one arm, measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.ttft.arms import Arm, Pool, Scenario
from benchmarks.ttft.counters import Legs, Snapshot, held_blocks, legs
from benchmarks.ttft.noise import Noise, wait_for_quiet
from benchmarks.ttft.proxy import PREFILL_HEADER
from kvshuttle.localstack import Answer, ChatClient, Message, user
from kvshuttle.v1 import lease_service_pb2, types_pb2

__all__ = ["SPIN_S", "Client", "Moved", "Sample"]

# After SIGCONT: sockets, shared memory and NIXL's threads catch up before anything is timed.
WAKE_S = 0.3
# Prefill's holds end with decode's notice, and its heartbeat says so within a second.
DROP_TIMEOUT_S = 10.0
POLL_S = 0.05
# Between one arm's turn and another's: vLLM's worker looks for its next step in a tight loop for a
# second after each, on the core where the next arm computes.
SPIN_S = 1.3
# An eager return that has not ended by then is measured as it stands.
RETURN_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Moved:
    """One of our transfers, as its reader measured it."""

    direction: str
    eager: bool
    blocks: int
    bytes: int
    descriptors: int
    transfer_ms: float
    wait_ms: float
    state: str

    @property
    def is_whole_return(self) -> bool:
        """Whether it is one back to prefill that went through, and was measured."""
        done = self.direction == "RETURN" and self.state == "COMPLETED"
        return bool(done and self.bytes and self.transfer_ms)

    @property
    def gb_per_s(self) -> float:
        """Of a transfer that was measured."""
        return self.bytes / self.transfer_ms / 1e6


@dataclass
class Sample:
    """One measured turn."""

    arm: str
    scenario: str
    group: int
    conversation: str
    turn: int
    wanted_tokens: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_ms: float
    total_ms: float
    legs: Legs
    prefill_leg_ms: float | None
    plan_reason: str | None
    moved: list[Moved]
    # None: this arm does not drop. False: it could not be dropped before the answer had ended.
    cache_dropped: bool | None
    # Cores that other programs took meanwhile, other arms' engines among them.
    foreign_cores: float = 0.0
    # (seconds since the end of the answer, blocks) of both engines together.
    held: list[tuple[float, float]] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()
    differences: list[str] = field(default_factory=list)

    @property
    def held_block_seconds(self) -> float:
        """Held blocks over the gap that followed, by trapezoids."""
        return sum(
            (b[0] - a[0]) * (a[1] + b[1]) / 2
            for a, b in zip(self.held, self.held[1:], strict=False)
        )


class Client:
    """Talks to one arm; keeps what must be known from turn to turn."""

    def __init__(
        self, arm: Arm, scenario: Scenario, pool: Pool, group: int, patience_s: float = 0.0
    ) -> None:
        self.arm = arm
        self._patience_s = patience_s
        self._scenario: Scenario = scenario
        self._pool = pool
        self._group = group
        self._http = ChatClient(arm.url)
        self._ended: dict[str, float] = {}
        self._last: dict[str, Sample] = {}

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    @property
    def drops(self) -> bool:
        """Whether prefill's cache is emptied while decode answers, to stand for its loss."""
        eager = bool(self.arm.kind.eager)
        return self._scenario == "lost" and eager and self.arm.prefix_caching

    def turn(
        self,
        conversation: str,
        turn: int,
        messages: Sequence[Message],
        wanted: int,
        output: int,
        gap_s: float,
        *,
        drops: bool | None = None,
    ) -> tuple[Sample, Answer]:
        """One turn. `drops`: whether prefill's cache is emptied, if not as ever. Raises
        httpx.HTTPError."""
        if self.arm.wake():
            time.sleep(WAKE_S)
        self._wait_gap(conversation, gap_s)
        before = Snapshot.of(self.arm)
        self._note_held(conversation, before)
        dropper = _Dropper(self.arm) if (self.drops if drops is None else drops) else None
        pids = self.arm.pids()
        wait_for_quiet(pids, self._patience_s)
        noise = Noise(pids)
        answer = self._http.ask(
            messages,
            max_tokens=output,
            session=conversation,
            on_first_token=dropper.start if dropper else None,
        )
        ended = time.monotonic()
        foreign = noise.cores()
        dropped = dropper.finish() if dropper else None
        after = Snapshot.of(self.arm)
        reason, moved = self._said(conversation, turn)
        split = legs(self.arm, before, after)
        header = answer.headers.get(PREFILL_HEADER.lower())
        sample = Sample(
            arm=self.arm.kind.key,
            scenario=self._scenario,
            group=self._group,
            conversation=conversation,
            turn=turn,
            wanted_tokens=wanted,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            ttft_ms=answer.ttft_s * 1e3,
            total_ms=answer.total_s * 1e3,
            legs=split,
            prefill_leg_ms=split.prefill_leg_ms if header is None else float(header),
            plan_reason=reason,
            moved=moved,
            cache_dropped=dropped,
            foreign_cores=round(foreign, 3),
            token_ids=answer.token_ids,
        )
        self._ended[conversation] = ended
        self._last[conversation] = sample
        self._note_held(conversation, after)
        return sample, answer

    def touch(self, conversation: str, text: str) -> None:
        """A first turn that nobody measures, so that something is held."""
        self._http.ask([user(text)], max_tokens=2, session=conversation)

    def settle(self, conversation: str) -> None:
        """Waits for the eager return of the turn before, and adds what it moved to its sample."""
        sample = self._last.get(conversation)
        if sample is None or not self.arm.kind.eager or self.arm.view is None:
            return
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        while time.monotonic() < deadline:
            _, sample.moved = self._said(conversation, sample.turn)
            eager = [m for m in sample.moved if m.eager]
            if eager and all(m.state not in _OPEN for m in eager):
                return
            time.sleep(POLL_S)

    def quiet_return(self, conversation: str, messages: Sequence[Message]) -> tuple[Answer, Moved]:
        """A turn of a pushed arm whose eager return comes when both engines have come to rest: the
        control plane stands still from the first token until then, and prefill's cache is emptied
        meanwhile. Raises TimeoutError where nothing comes back."""
        control_plane, view = self.arm.control_plane, self.arm.view
        assert control_plane is not None
        assert view is not None
        try:
            answer = self._http.ask(
                messages,
                max_tokens=2,
                session=conversation,
                on_first_token=control_plane.pause,
            )
            time.sleep(SPIN_S)
            # Where it cannot, less comes back than the whole, and the return is not counted.
            self.arm.prefill.reset_prefix_cache()
        finally:
            control_plane.resume()
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        while time.monotonic() < deadline:
            turn = view.session(conversation).turns[-1].turn
            eager = [m for m in self._said(conversation, turn)[1] if m.eager]
            if eager and all(m.state not in _OPEN for m in eager):
                return answer, eager[0]
            time.sleep(POLL_S)
        raise TimeoutError(f"nothing of {conversation} came back")

    def end(self, conversation: str) -> None:
        """The conversation will not go on. Upstream has no way to be told."""
        self._note_held(conversation, None)
        if self.arm.view is not None:
            self.arm.view.end_session(conversation)
        self._last.pop(conversation, None)

    def _wait_gap(self, conversation: str, gap_s: float) -> None:
        ended = self._ended.get(conversation)
        if ended is not None:
            time.sleep(max(0.0, ended + gap_s - time.monotonic()))

    def _note_held(self, conversation: str, found: Snapshot | None) -> None:
        sample = self._last.get(conversation)
        if sample is None:
            return
        found = found or Snapshot.of(self.arm)
        blocks = sum(held_blocks(self.arm, found, self._pool.blocks).values())
        since = time.monotonic() - self._ended[conversation]
        sample.held.append((round(since, 3), round(blocks, 1)))

    def _said(self, conversation: str, turn: int) -> tuple[str | None, list[Moved]]:
        """The planner's reason and the leases of this turn."""
        view = self.arm.view
        if view is None:
            return None, []
        reason = next(
            (t.plan.reason for t in view.session(conversation).turns if t.turn == turn), None
        )
        moved = [
            Moved(
                direction=types_pb2.Direction.Name(lease.direction).removeprefix("DIRECTION_"),
                eager=bool(getattr(lease, "eager", False)),
                blocks=lease.stats.blocks,
                bytes=lease.stats.bytes,
                descriptors=lease.stats.descriptors,
                transfer_ms=lease.stats.transfer_time.ToNanoseconds() / 1e6,
                wait_ms=lease.stats.wait_time.ToNanoseconds() / 1e6,
                state=lease_service_pb2.LeaseState.Name(lease.state).removeprefix("LEASE_STATE_"),
            )
            for lease in view.leases(conversation)
            if lease.turn == turn
        ]
        return reason, moved


_OPEN = ("PENDING", "GRANTED", "ACTIVE")


class _Dropper:
    """Empties prefill's prefix cache while decode still answers: before anything comes back."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = False
        self._over = threading.Event()
        self._dropped_at: float | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Called at the first token: prefill has done its part."""
        self._started = True
        self._thread.start()

    def finish(self) -> bool:
        """Called when the answer is complete: whether the cache was empty before that."""
        ended = time.monotonic()
        self._over.set()
        if self._started:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._dropped_at is not None and self._dropped_at < ended

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + DROP_TIMEOUT_S
            while not self._over.is_set() and time.monotonic() < deadline:
                if self._arm.prefill.reset_prefix_cache():
                    self._dropped_at = time.monotonic()
                    return
                time.sleep(POLL_S)
        except Exception as error:
            self._error = error
