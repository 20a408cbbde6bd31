"""Where a turn runs, and whether decode's KV is returned: from measured rates, without I/O.

A prediction is only as good as its rates, so a rate is learned from samples that are large enough
to show it; a small transfer is mostly latency and would make a fast link look slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from kvshuttle.controlplane.model.errors import NoWorkerError
from kvshuttle.controlplane.model.session import Plan
from kvshuttle.controlplane.model.terms import ReplicaState, ReturnMode, ReturnPolicy, WorkerRole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from kvshuttle.controlplane.model.replica import Replica
    from kvshuttle.controlplane.model.session import Session
    from kvshuttle.controlplane.model.worker import Worker

__all__ = ["Choice", "Planner", "Rate"]

SECOND = 1_000_000_000
PREFILL_TOKENS_PER_S = 2_000.0
"""Before anything was measured: a small model on a CPU core. A fast engine corrects it with its
first prompt; too low a guess only returns what might have been computed as fast."""
LINK_BYTES_PER_S = 1e9
"""Before anything was measured: shared memory or a 10 GbE link."""
OVERHEAD_NS = 10_000_000
"""Harden, grant and the read's set-up, mostly hidden behind the HTTP request."""
PREFILL_SAMPLE_TOKENS = 64
LINK_SAMPLE_BYTES = 8 << 20
SMOOTHING = 0.25
"""Weight of a new sample: follows a change within about eight samples."""


@dataclass(slots=True)
class Rate:
    """An exponentially weighted mean of amount per second."""

    enough: float
    value: float = 0.0

    def observe(self, amount: float, elapsed_ns: int) -> None:
        """One sample. Too small a sample counts only where it shows that the rate is higher."""
        if amount <= 0 or elapsed_ns <= 0:
            return
        sample = amount * SECOND / elapsed_ns
        if amount < self.enough:
            if self.value and sample > self.value:
                self.value = sample
            return
        self.value = sample if not self.value else self.value + SMOOTHING * (sample - self.value)


class Choice(Struct, frozen=True):
    """A placement. `prefill` is None for a turn that runs on one worker; `replica` is the best
    one on decode's worker; `lack` says why there is none."""

    decode: Worker
    prefill: Worker | None
    replica: Replica | None
    lack: str


@dataclass(slots=True)
class Planner:
    """Learns rates and decides. `min_tokens` as in Limits."""

    min_tokens: int = 64
    prefill: dict[str, Rate] = field(default_factory=dict)
    links: dict[tuple[str, str], Rate] = field(default_factory=dict)

    # -- learning ------------------------------------------------------------------------------
    def observe_prefill(self, worker_id: str, tokens: int, elapsed_ns: int) -> None:
        """A worker computed so many prompt tokens."""
        self.prefill.setdefault(worker_id, Rate(PREFILL_SAMPLE_TOKENS)).observe(tokens, elapsed_ns)

    def observe_transfer(self, source: str, destination: str, size: int, elapsed_ns: int) -> None:
        """So many bytes were moved."""
        rate = self.links.setdefault((source, destination), Rate(LINK_SAMPLE_BYTES))
        rate.observe(size, elapsed_ns)

    def forget_worker(self, worker_id: str) -> None:
        """A worker is no longer listed."""
        self.prefill.pop(worker_id, None)
        for pair in [pair for pair in self.links if worker_id in pair]:
            del self.links[pair]

    def prefill_rate(self, worker_id: str) -> float:
        """Prompt tokens a second; 0 while nothing was measured."""
        rate = self.prefill.get(worker_id)
        return rate.value if rate is not None else 0.0

    def link_rate(self, source: str, destination: str) -> float:
        """Bytes a second; 0 while nothing was measured."""
        rate = self.links.get((source, destination))
        return rate.value if rate is not None else 0.0

    # -- placing -------------------------------------------------------------------------------
    def place(
        self,
        workers: Iterable[Worker],
        session: Session | None,
        replicas: Collection[Replica],
        turns_on: Mapping[str, int],
        replicas_on: Mapping[str, int],
        excluded: Collection[str],
        by_id: Mapping[str, Worker] | None = None,
    ) -> Choice:
        """Decode stays where the longest replica lies, prefill where it was; else the least
        loaded. NoWorkerError when nothing is left. With `by_id`, the same workers by name, a turn
        that stays where the one before ran is placed without a look at all of them."""
        if by_id is not None and session is not None and replicas:
            stays = self._stay(by_id, session, replicas, excluded)
            if stays is not None:
                return stays
        known = {worker.ref.worker_id: worker for worker in workers}
        able = [w for w in known.values() if w.ready and w.ref.worker_id not in excluded]
        if not able:
            raise NoWorkerError(
                "no worker can take this turn: start one, or end a drain",
                known=len(known),
                excluded=len(excluded),
            )

        def load(worker: Worker) -> tuple[int, int, str]:
            name = worker.ref.worker_id
            return (turns_on.get(name, 0), replicas_on.get(name, 0), name)

        # A worker whose role is only to prefill decodes when nothing else is left: a slow answer
        # is better than none.
        decoders = [w for w in able if w.role is not WorkerRole.PREFILL] or able
        by_name = {w.ref.worker_id: w for w in decoders}
        usable = [
            r
            for r in replicas
            if r.state is not ReplicaState.GONE
            and r.num_blocks
            and (at := by_name.get(r.worker.worker_id)) is not None
            and at.ref == r.worker
        ]
        best = max(usable, key=lambda r: (r.num_blocks, r.state is ReplicaState.HARD), default=None)
        decode = by_name[best.worker.worker_id] if best else min(decoders, key=load)
        lack = "" if best else self._lack(known, replicas, excluded)
        prefill = self._place_prefill(able, decode, session, load)
        return Choice(decode, prefill, best, lack)

    def _stay(
        self,
        known: Mapping[str, Worker],
        session: Session,
        replicas: Collection[Replica],
        excluded: Collection[str],
    ) -> Choice | None:
        prefill = known.get(session.last_prefill)
        if prefill is None or not prefill.ready or prefill.role is not WorkerRole.PREFILL:
            return None
        best = None
        for replica in replicas:
            at = known.get(replica.worker.worker_id)
            if (
                at is None
                or at.ref != replica.worker
                or replica.state is ReplicaState.GONE
                or not replica.num_blocks
                or not at.ready
                or at.role is WorkerRole.PREFILL
                or at.ref.worker_id in excluded
            ):
                continue
            if best is None or (replica.num_blocks, replica.state is ReplicaState.HARD) > (
                best.num_blocks,
                best.state is ReplicaState.HARD,
            ):
                best = replica
        if best is None or session.last_prefill in excluded:
            return None
        return Choice(known[best.worker.worker_id], prefill, best, "")

    def _place_prefill(
        self,
        able: list[Worker],
        decode: Worker,
        session: Session | None,
        load: Callable[[Worker], tuple[int, int, str]],
    ) -> Worker | None:
        others = [w for w in able if w is not decode]
        candidates = [w for w in others if w.role is WorkerRole.PREFILL]
        if not candidates and decode.role is WorkerRole.DECODE:
            candidates = [w for w in others if w.role is WorkerRole.BOTH]
        if not candidates or decode.role is WorkerRole.PREFILL:
            return None
        if session is not None:
            for worker in candidates:
                if worker.ref.worker_id == session.last_prefill:
                    return worker
        return min(candidates, key=load)

    def _lack(
        self,
        known: Mapping[str, Worker],
        replicas: Collection[Replica],
        excluded: Collection[str],
    ) -> str:
        """Why none of a session's replicas can be used, in one word."""
        words = set()
        for replica in replicas:
            worker = known.get(replica.worker.worker_id)
            if worker is not None and worker.role is WorkerRole.PREFILL:
                continue
            if worker is None or worker.ref != replica.worker or not worker.connected:
                words.add("WORKER_LOST")
            elif not worker.ready:
                words.add("DRAINING")
            elif replica.worker.worker_id in excluded:
                words.add("WORKER_EXCLUDED")
        for word in ("WORKER_LOST", "DRAINING", "WORKER_EXCLUDED"):
            if word in words:
                return word
        return "NO_REPLICA"

    # -- predicting ----------------------------------------------------------------------------
    def recompute_ns(self, worker_id: str, tokens: int) -> int:
        """How long a worker takes to compute so many prompt tokens."""
        return int(tokens * SECOND / (self.prefill_rate(worker_id) or PREFILL_TOKENS_PER_S))

    def transfer_ns(self, source: Worker, destination: Worker, num_blocks: float) -> int:
        """How long it takes to move so many blocks."""
        link = self.link_rate(source.ref.worker_id, destination.ref.worker_id) or LINK_BYTES_PER_S
        return OVERHEAD_NS + int(num_blocks * source.bytes_per_block * SECOND / link)

    def cheaper_to_move(self, replica: Replica, source: Worker, destination: Worker) -> bool:
        """Whether moving all of a replica is faster than computing it."""
        recompute = self.recompute_ns(destination.ref.worker_id, replica.num_tokens)
        return self.transfer_ns(source, destination, replica.num_blocks) < recompute

    # -- planning ------------------------------------------------------------------------------
    def plan(self, choice: Choice, policy: ReturnPolicy, prompt_tokens: int) -> Plan:
        """Return where moving is predicted cheaper than computing again. What prefill has in its
        own cache is not known here, so this compares for the whole replica; the destination
        reads only what it misses."""
        replica = choice.replica
        reusable = replica.num_tokens if replica else 0
        if choice.prefill is None:
            return Plan(ReturnMode.DIRECT, "SAME_WORKER", reusable)
        if replica is None:
            return Plan(ReturnMode.NONE, choice.lack)
        # A prompt that is known to be short cannot use more than itself.
        useful = min(reusable, prompt_tokens) if prompt_tokens else reusable
        source, destination = choice.decode, choice.prefill
        recompute_ns = self.recompute_ns(destination.ref.worker_id, useful)
        share = useful / max(reusable, 1)
        transfer_ns = self.transfer_ns(source, destination, replica.num_blocks * share)

        def decided(mode: ReturnMode, reason: str) -> Plan:
            return Plan(mode, reason, reusable, recompute_ns, transfer_ns)

        if policy is ReturnPolicy.NEVER:
            return decided(ReturnMode.NONE, "POLICY_NEVER")
        if policy is ReturnPolicy.ALWAYS:
            return decided(ReturnMode.LAZY, "POLICY_ALWAYS")
        if useful < self.min_tokens or recompute_ns <= transfer_ns:
            return decided(ReturnMode.NONE, "CHEAPER_TO_RECOMPUTE")
        return decided(ReturnMode.LAZY, "CHEAPER_TO_MOVE")
