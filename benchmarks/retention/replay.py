"""A pool of limited size under a timetable of turns: one mechanism for all policies.

The pool is what a worker may keep between turns. What a turn leaves is held until the time that
the policy gives, then soft: readable until its blocks are wanted. Blocks that are wanted are taken
from the soft ones first, the oldest first and from a chain's tail, as vLLM takes them; then from
those that the policy lets go. What then finds no room is not kept: nobody waits for a hold.
A turn that begins takes what is left of its session out of the pool (it uses it), computes the
rest of what it could have reused, and leaves the whole when it ends.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.retention.trace import NS

if TYPE_CHECKING:
    from benchmarks.retention.policies import Policy
    from benchmarks.retention.trace import Event, Session

__all__ = ["Outcome", "replay"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Blocks, and blocks times seconds. `held` counts what vLLM could not have reused, `kept`
    also what was soft. `refused` is what found no room at the end of its turn."""

    reusable: int
    recomputed: int
    held: float
    kept: float
    refused: int

    @property
    def share(self) -> float:
        """Of the reusable blocks those that were computed again."""
        return self.recomputed / self.reusable


class _Pool:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.hard: dict[int, int] = {}
        self.soft: dict[int, int] = {}
        self.blocks = 0
        self._hard_blocks = 0
        self._until: dict[int, int] = {}
        self._expiring: list[tuple[int, int]] = []
        self._clock_ns = 0
        self.held = 0.0
        self.kept = 0.0

    def pass_time(self, now_ns: int) -> None:
        """Holds that end until now turn soft, each in its time."""
        while self._expiring and self._expiring[0][0] <= now_ns:
            until_ns, session = heapq.heappop(self._expiring)
            if self._until.get(session) == until_ns:
                self._pass(until_ns)
                self._soften(session)
        self._pass(now_ns)

    def _pass(self, now_ns: int) -> None:
        seconds = (now_ns - self._clock_ns) / NS
        self.held += self._hard_blocks * seconds
        self.kept += self.blocks * seconds
        self._clock_ns = now_ns

    def _soften(self, session: int) -> None:
        del self._until[session]
        blocks = self.hard.pop(session)
        self._hard_blocks -= blocks
        self.soft[session] = self.soft.get(session, 0) + blocks

    def take(self, session: int) -> int:
        """What is left of a session, out of the pool."""
        blocks = self.soft.pop(session, 0)
        if session in self.hard:
            hard = self.hard.pop(session)
            self._hard_blocks -= hard
            del self._until[session]
            blocks += hard
        self.blocks -= blocks
        return blocks

    def put(self, session: int, blocks: int, until_ns: int) -> None:
        self.hard[session] = blocks
        self.blocks += blocks
        self._hard_blocks += blocks
        self._until[session] = until_ns
        heapq.heappush(self._expiring, (until_ns, session))

    def make_room(self, excess: int, now_ns: int) -> int:
        """Lets so many blocks go; returns how many it could not."""
        while excess > 0 and self.soft:
            session = next(iter(self.soft))
            blocks = self.soft[session]
            if blocks > excess:
                self.soft[session] = blocks - excess
                self.blocks -= excess
                return 0
            del self.soft[session]
            self.blocks -= blocks
            excess -= blocks
        if excess <= 0:
            return 0
        for session, blocks in self.policy.surplus(self.hard, excess, now_ns):
            self.cut(session, blocks)
            excess -= blocks
        return excess

    def cut(self, session: int, blocks: int) -> None:
        """Takes blocks from a held session's tail."""
        self.blocks -= blocks
        self._hard_blocks -= blocks
        if self.hard[session] > blocks:
            self.hard[session] -= blocks
        else:
            del self.hard[session], self._until[session]


def replay(
    sessions: list[Session],
    events: list[Event],
    policy: Policy,
    capacity: int,
    *,
    running_counts: bool = False,
) -> Outcome:
    """All events in order; `capacity` in blocks. With `running_counts` the turns that run take
    their place in the pool too, before everything else."""
    pool = _Pool(policy)
    reusable = recomputed = refused = running = 0
    for event in events:
        now_ns = event.time_ns
        turn = sessions[event.session].turns[event.turn]
        pool.pass_time(now_ns)
        if event.begins:
            reusable += turn.reusable
            recomputed += max(0, turn.reusable - pool.take(event.session))
            policy.begins(event.session, now_ns)
            if running_counts:
                running += turn.left
        else:
            if running_counts:
                running -= turn.left
            until_ns = policy.ends(event.session, now_ns)
            pool.put(event.session, turn.left, until_ns)
            pool.pass_time(now_ns)
        lacking = pool.make_room(pool.blocks + running - capacity, now_ns)
        if lacking > 0 and event.session in pool.hard:
            # Nothing else gives way: of what the turn has left only so much is kept.
            gone = min(lacking, pool.hard[event.session])
            pool.cut(event.session, gone)
            refused += gone
    return Outcome(reusable, recomputed, pool.held, pool.kept, refused)
