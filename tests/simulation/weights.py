"""An operator who gives all engines new weights, as docs/agent.md says: pause all, then change all,
then let all go on."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.kernel import MS, SECOND, between

if TYPE_CHECKING:
    from tests.simulation.worker import Boot
    from tests.simulation.world import World

__all__ = ["Operator"]

LOOK_MS = 20.0
ASK_MS = 300.0
GO_ON_MS = 2_000.0
PATIENCE_NS = 50 * SECOND
"""Longer than a paused engine waits for what is read or written."""


class Operator:
    """One change of weights: hashes stay what they are, and the KV of before is wrong under them.
    Where an engine does not come to rest, the old weights stay."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kernel = world.kernel
        self._until_ns = world.kernel.now + PATIENCE_NS
        # Whom it has asked to pause, and whether they could; None: not yet.
        self._rests: dict[Boot, bool | None] = {}

    def look(self) -> None:
        """Asks whoever it has not asked; changes the weights when all have come to rest."""
        alive = [boot for boot in self._world.boots.values() if boot is not None]
        for boot in alive:
            if boot not in self._rests:
                self._rests[boot] = None
                done = partial(self._rests.__setitem__, boot)
                self._kernel.at(
                    between(self._kernel.rng, 0, ASK_MS),
                    boot.engine_thread,
                    boot.engine.pause,
                    done,
                )
        known = [self._rests[boot] for boot in alive]
        if all(known):
            self._change(alive)
        elif False in known or self._kernel.now > self._until_ns:
            self._kernel.log("operator", "keeps the old weights")
        else:
            self._kernel.at(between(self._kernel.rng, 1, LOOK_MS), None, self.look)
            return
        for boot in alive:
            # Who goes on first meets those that do not yet. Nobody is told so before he is told to
            # pause.
            delay = between(self._kernel.rng, ASK_MS, GO_ON_MS)
            self._kernel.at(delay, boot.engine_thread, boot.engine.resume)
        self._kernel.at(int(GO_ON_MS * MS), None, self._over)

    def _over(self) -> None:
        self._world.changing_weights = False

    def _change(self, alive: list[Boot]) -> None:
        self._kernel.fault("new_weights", f"{len(alive)} engines")
        self._world.weights += 1
        for boot in alive:
            boot.pool.weights.version = self._world.weights
