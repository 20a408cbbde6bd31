"""One way to break a rule."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AGENT", "CONTROL", "EXPLORATION", "PUSH_EXPLORATION", "SIMULATION", "Mutant"]

AGENT = "dataplane/kvshuttle/dataplane/"
CONTROL = "controlplane/kvshuttle/controlplane/"
SIMULATION, EXPLORATION = "simulation", "exploration"
PUSH_EXPLORATION = "exploration of a push"


@dataclass(frozen=True)
class Mutant:
    """`rule` is what it breaks; `seen_by` are the fewest tests that should see it: ids of pytest,
    or an explorer. `before` is in the file exactly once, and `after` takes its place."""

    name: str
    rule: str
    path: str
    before: str
    after: str
    seen_by: tuple[str, ...] = ()
