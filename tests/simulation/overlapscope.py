"""A push whose writer's engine schedules a step while the one before runs: the fourth world.

As `pushscope.py`, but both steps of the prompt take until an action says that the oldest is over,
the second may be scheduled before, and the request's client may go away while they run: what a
step writes is then there only later, and so are the blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle.dataplane.push_source import Scheduled
from kvshuttle.dataplane.push_steps import PushStep
from tests.simulation.pushscope import LAYERS, PROMPT, PushWorld
from tests.simulation.smallscope import BLOCK_TOKENS, HASHES, Node

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel

__all__ = ["OverlapWorld"]


@dataclass(eq=False)
class _Flight:
    """A step that is not over: which of the prompt's blocks it fills, in which block of the pool,
    and how many tokens are computed after it."""

    step: PushStep
    index: int
    block_id: int
    end: int


class OverlapWorld(PushWorld):
    """See the module."""

    def __init__(self, kernel: Kernel) -> None:
        self.flights: deque[_Flight] = deque()
        self.begun = self.ended = 0
        # Of a request that has ended: they come back when its steps are over.
        self.deferred: list[int] = []
        super().__init__(kernel)

    def boot(self, worker_id: str) -> Node:
        """Its agent knows of the engine's steps."""
        node = super().boot(worker_id)
        if worker_id == "s":
            node.agent.source.steps = lambda: (self.begun, self.ended)
        return node

    @property
    def may_step(self) -> bool:
        """Whether prefill's next step can be scheduled."""
        return super().may_step or (
            self.prompt.state == "steps" and self.prompt.steps == 1 and len(self.flights) == 1
        )

    @property
    def may_end_step(self) -> bool:
        """Whether a step of it can be over."""
        return bool(self.flights)

    @property
    def may_abort(self) -> bool:
        """Whether its client can go away."""
        return super().may_abort or self.prompt.state == "steps"

    def step(self) -> None:
        """Its next step is scheduled; it runs when the one before is over."""
        node, leg = self.nodes["s"], self.prompt
        with self.kernel.on(node.thread):
            blocks = self._blocks_of_prompt(node)
            self.begun += 1
            node.agent.drain()
            first, end = (BLOCK_TOKENS, PROMPT) if leg.steps else (0, BLOCK_TOKENS)
            chunks = node.agent.push.step([Scheduled("p", first, end - first, list(blocks))])
            node.agent.next_deadline()
        step = PushStep(chunks, LAYERS)
        if chunks:
            node.steps.append(step)
        self.flights.append(_Flight(step, leg.steps, blocks[leg.steps], end))
        leg.steps += 1
        leg.state = "steps"
        if len(self.flights) == 1:
            self._run()

    def _run(self) -> None:
        flight = self.flights[0]
        self._fill_layer(flight, 0)
        flight.step.layer_final(0, 1)

    def _fill_layer(self, flight: _Flight, layer: int) -> None:
        block = self.nodes["s"].pool.blocks[flight.block_id]
        self.nodes["s"].pool.on_compute(block)
        block.content[layer] = HASHES[flight.index]

    def step_over(self) -> None:
        """The oldest step is over, and vLLM hears of it."""
        node, leg = self.nodes["s"], self.prompt
        flight = self.flights.popleft()
        self.ended += 1
        self._fill_layer(flight, 1)
        flight.step.all_final()
        if self.flights:
            self._run()
        if leg.state != "steps":
            if not self.flights:
                node.pool.free(self.deferred)
                self.deferred = []
            return
        leg.computed = flight.end
        node.pool.insert(HASHES[flight.index], flight.block_id, 0)
        if flight.end == PROMPT:
            self.finish_prompt(aborted=False)
        elif not self.flights:
            leg.state = "between"

    def _end_blocks(self, blocks: list[int]) -> None:
        """Its last step may run on."""
        if self.flights:
            self.deferred = blocks
        else:
            super()._end_blocks(blocks)

    def fingerprint(self) -> tuple[Any, ...]:
        """Everything that what happens next can depend on."""
        flights = ((x.index, x.block_id, x.step._final, len(x.step._said)) for x in self.flights)
        return (*super().fingerprint(), tuple(flights), tuple(self.deferred))
