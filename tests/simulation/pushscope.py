"""One push between two workers, in every order of events: the third world that is explored.

Prefill "s" computes a prompt of two blocks in two steps, the second of them layer by layer (there
are two), and writes it to decode "d", whose request offers its landing zone at any moment, or too
late, so that it reads. Each WRITE moves when an action says so. Boots die, or lose their places to
others ("s'", "d'") while they live, and come back under new numbers; the control plane may come
back with an old copy of its store, or with none.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.store import MemoryStore
from kvshuttle.dataplane.limits import UNKNOWN_TURN_WAIT_NS
from kvshuttle.dataplane.push_source import Scheduled
from kvshuttle.dataplane.push_steps import PushStep
from kvshuttle.dataplane.scheduler import FinishedRequest
from tests.simulation import pushprint
from tests.simulation.kernel import SECOND, Kernel, Violation
from tests.simulation.smallscope import (
    BLOCK_TOKENS,
    BLOCKS,
    DECODE,
    HASHES,
    PREFILL,
    Node,
    SmallWorld,
)

__all__ = ["LAYERS", "PROMPT", "PushNode", "PushWorld"]

LAYERS = 2
PROMPT = BLOCKS * BLOCK_TOKENS + 5
WAIT_NS = 2 * SECOND


@dataclass(eq=False)
class Leg:
    """A request of one leg, as its engine has it."""

    # Where it is: "none", "waiting", "loading", "loaded", "failed", "computes", "aborted", "done",
    # "dead"; of prefill's how many steps it has begun, and whether one of them runs.
    state: str = "none"
    steps: int = 0
    computed: int = 0
    preempted: int = 0
    blocks: list[int] | None = None

    def hashes(self) -> Sequence[bytes]:
        """Of its full blocks."""
        return HASHES

    def tail_hash(self, full: int, tokens: int) -> bytes | None:
        """Nobody asks for the last block, which is not full."""
        return None

    def preemptions(self) -> int:
        """How often its blocks were taken."""
        return self.preempted


class PushNode(Node):
    """As its base, with layers and room for what is held of a preempted request."""

    blocks = 6
    layers = LAYERS
    push = True


class PushWorld(SmallWorld):
    """See the module. Its boots are "s", "d", and those that have taken their places."""

    node = PushNode
    prefill_id = "s"

    def __init__(self, kernel: Kernel) -> None:
        # What is left to chance of a dead peer: nothing is refused at once, and no handle let go.
        kernel.rng.random = lambda: 0.9  # type: ignore[method-assign]
        self.prompt, self.answer = Leg(), Leg()
        super().__init__(kernel)

    def _limits(self) -> Limits:
        # Leases are shorter than a landing zone waits for a word, so that either may come first.
        return replace(
            super()._limits(),
            lookup_wait_ns=WAIT_NS,
            lookup_wait_max_ns=WAIT_NS,
            forward="push",
            # With so small a pool: a quarantine must not keep anything from being tried.
            quarantine_share=1.0,
        )

    def _set_up(self) -> None:
        """Up to where both agents know of the turn."""
        for node in self.nodes.values():
            node.say_hello()
        self.flow()
        self.copied_store = copy.deepcopy(self.store)
        self.turn()
        self.flow()
        (self.lease_id,) = self.registry.state.open_leases

    # Prefill's engine.

    @property
    def may_step(self) -> bool:
        """Whether its next step can begin."""
        return self.prompt.state in ("none", "between")

    @property
    def may_end_step(self) -> bool:
        """Whether a step can be over."""
        return self.prompt.state == "steps"

    @property
    def may_abort(self) -> bool:
        """Whether its client can go away."""
        return self.prompt.state in ("none", "between")

    def _blocks_of_prompt(self, node: Node) -> list[int]:
        leg, key = self.prompt, (self.token, PREFILL)
        if leg.blocks is None:
            found = node.agent.look("p", key, HASHES, PROMPT, 0)
            while found is None:
                # A turn that it does not know may yet come; vLLM asks again.
                self.kernel.now += UNKNOWN_TURN_WAIT_NS
                found = node.agent.look("p", key, HASHES, PROMPT, 0)
            if found:
                raise Violation("engine", f"prefill is to load {found} tokens")
            leg.blocks = node.pool.allocate(BLOCKS + 1)
            node.agent.allocated("p", key, leg.blocks, 0, leg)
        return leg.blocks

    def step(self) -> None:
        """Its next step begins; the first is over at once, of the second a layer is filled."""
        node, leg = self.nodes["s"], self.prompt
        with self.kernel.on(node.thread):
            blocks = self._blocks_of_prompt(node)
            node.agent.drain()
            tokens = PROMPT if leg.computed else BLOCK_TOKENS
            item = Scheduled("p", leg.computed, tokens - leg.computed, list(blocks))
            chunks = node.agent.push.step([item])
            node.agent.next_deadline()
        self.running = PushStep(chunks, LAYERS)
        if chunks:
            node.steps.append(self.running)
        leg.steps += 1
        leg.state = "steps"
        self._fill(0)
        self.running.layer_final(0, 1)
        if not leg.computed:
            self.step_over()

    def step_over(self) -> None:
        """The step that runs ends; with the last one the request does."""
        node, leg = self.nodes["s"], self.prompt
        assert leg.blocks is not None
        self._fill(1)
        self.running.all_final()
        leg.state = "between"
        if not leg.computed:
            leg.computed = BLOCK_TOKENS
            node.pool.insert(HASHES[0], leg.blocks[0], 0)
            return
        leg.computed = PROMPT
        node.pool.insert(HASHES[1], leg.blocks[1], 0)
        self.finish_prompt(aborted=False)

    def _fill(self, layer: int) -> None:
        node, leg = self.nodes["s"], self.prompt
        assert leg.blocks is not None
        index = 1 if leg.computed else 0
        block = node.pool.blocks[leg.blocks[index]]
        node.pool.on_compute(block)
        block.content[layer] = HASHES[index]

    def finish_prompt(self, *, aborted: bool) -> None:
        """It ends: of itself, or because its client has gone."""
        node, leg = self.nodes["s"], self.prompt
        blocks, leg.blocks = leg.blocks or [], None
        full = min(leg.computed // BLOCK_TOKENS, BLOCKS)
        with self.kernel.on(node.thread):
            node.agent.finished(
                (self.token, PREFILL),
                FinishedRequest("p", HASHES[:full], tuple(blocks[:full]), PROMPT, aborted),
            )
            node.agent.next_deadline()
        self._end_blocks(blocks)
        leg.state = "aborted" if aborted else "done"

    def _end_blocks(self, blocks: list[int]) -> None:
        """Of a request that has ended."""
        self.nodes["s"].pool.free(blocks)

    def preempt(self) -> None:
        """vLLM takes its blocks, and it will compute again."""
        node, leg = self.nodes["s"], self.prompt
        assert leg.blocks is not None
        node.pool.free(leg.blocks)
        leg.blocks, leg.computed, leg.steps = None, 0, 0
        leg.preempted += 1
        leg.state = "none"

    # Decode's engine.

    def ask(self) -> None:
        """Its request comes, or is looked at again."""
        node, leg = self.nodes["d"], self.answer
        key = (self.token, DECODE)
        with self.kernel.on(node.thread):
            tokens = node.agent.look("r", key, HASHES, PROMPT, 0)
            if tokens is None:
                leg.state = "waiting"
                return
            leg.blocks = node.pool.allocate(BLOCKS + 1)
            node.agent.allocated("r", key, leg.blocks, tokens)
            node.agent.next_deadline()
        leg.state = "loading" if tokens else "computes"

    def results(self) -> None:
        """vLLM's step takes what the mover has to say."""
        node, leg = self.nodes["d"], self.answer
        if not node.alive or node.stalled:
            return
        finished, failed = node.results.take()
        if not finished:
            return
        blocks = leg.blocks or []
        if failed and leg.state in ("loading", "aborted"):
            with self.kernel.on(node.thread):
                node.agent.load_failed(sorted(failed))
        if leg.state == "aborted":
            node.pool.free(blocks)
            leg.state, leg.blocks = "gone", None
        elif leg.state != "loading":
            raise Violation("engine", f"a load is reported of a request that is {leg.state}")
        elif failed:
            node.pool.free(blocks)
            leg.state, leg.blocks = "failed", None
        else:
            for block_hash, block_id in zip(HASHES, blocks, strict=False):
                node.pool.insert(block_hash, block_id, 0)
            leg.state = "loaded"

    def finish_answer(self) -> None:
        """It has answered, and computed what was not loaded."""
        node, leg = self.nodes["d"], self.answer
        key = (self.token, DECODE)
        with self.kernel.on(node.thread):
            if leg.blocks is None:
                if node.agent.look("r", key, HASHES, PROMPT, 0) != 0:
                    raise Violation("single use", "a request that has failed to load loads again")
                leg.blocks = node.pool.allocate(BLOCKS + 1)
                node.agent.allocated("r", key, leg.blocks, 0)
            if leg.state != "loaded":
                for block_hash, block_id in zip(HASHES, leg.blocks, strict=False):
                    node.pool.write(block_id, block_hash)
                    node.pool.insert(block_hash, block_id, 0)
            self._answered(leg.blocks, BLOCKS, aborted=False)
        node.pool.free(leg.blocks)
        leg.state, leg.blocks = "done", None

    def abort_answer(self) -> None:
        """Its client has gone while it waits for its load: vLLM keeps the blocks until it is told
        of the load's end."""
        leg = self.answer
        assert leg.blocks is not None
        with self.kernel.on(self.nodes["d"].thread):
            self._answered(leg.blocks, BLOCKS, aborted=True)
        leg.state = "aborted"

    def _answered(self, blocks: Sequence[int], full: int, *, aborted: bool) -> None:
        agent = self.nodes["d"].agent
        agent.finished(
            (self.token, DECODE),
            FinishedRequest("r", HASHES[:full], tuple(blocks[:full]), PROMPT, aborted),
        )
        agent.next_deadline()

    # Faults.

    def replace(self, name: str) -> None:
        """Another boot of a worker, beside the one that is dead or was not heard."""
        self.nodes[f"{name}'"] = self.boot(name)

    def old_store(self) -> None:
        """The control plane comes back with a copy of its store from before the turn."""
        self.store = self.copied_store

    @property
    def books_lost(self) -> bool:
        """Whether the control plane does not know any more what it has granted."""
        return self.stores_lost > 0 or self.store is self.copied_store

    def lose_store(self) -> None:
        """Or with none, and an operator says that it may."""
        self.store = MemoryStore()
        self.stores_lost += 1

    def fingerprint(self) -> tuple[Any, ...]:
        """Everything that what happens next can depend on."""
        return pushprint.of_world(self)
