"""Where a turn runs and how its KV gets there: from rates that agents report, without I/O."""

from kvshuttle.controlplane.planner.planner import Choice, Planner
from kvshuttle.controlplane.planner.rates import Rate, Rates, Wait

__all__ = ["Choice", "Planner", "Rate", "Rates", "Wait"]
