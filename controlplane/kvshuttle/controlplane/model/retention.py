"""How long a worker holds what a turn leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.terms import SessionValue

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.controlplane.model.terms import Hints

__all__ = ["retention_ns"]


def retention_ns(hints: Hints, limits: Limits) -> int:
    """Twice the idle time that the client expects (an expectation is as often too short as too
    long), else the default; halved or doubled by the session's value; clamped."""
    base = limits.retention_ns
    if hints.expected_idle_ns is not None:
        base = 2 * hints.expected_idle_ns
    if hints.value is SessionValue.LOW:
        base //= 2
    elif hints.value is SessionValue.HIGH:
        base *= 2
    return min(max(base, limits.retention_min_ns), limits.retention_max_ns)
