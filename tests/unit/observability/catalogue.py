"""Every metric that the code has: name as scraped, type, labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.observer import Metrics
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.scrape import Files, Now
from kvshuttle.gateway.metrics import Metrics as GatewayMetrics

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Described:
    """A metric as code or documentation has it."""

    name: str
    type: str
    labels: tuple[str, ...]

    def series(self) -> set[str]:
        """Names of its samples."""
        if self.type == "histogram":
            return {f"{self.name}{tail}" for tail in ("_bucket", "_sum", "_count")}
        return {self.name}


def _described(metric: Any) -> Described:
    # Neither the library's metrics nor its families tell their labels in public, as long as they
    # have no sample.
    kind = getattr(metric, "_type", None) or metric.type
    name = getattr(metric, "_name", None) or metric.name
    total = "_total" if kind == "counter" else ""
    return Described(name + total, kind, tuple(metric._labelnames))


def in_code() -> dict[str, Described]:
    """Of control plane and gateway."""
    registry = Registry(Limits(), Planner())
    registry.start(1, Snapshot(), "lineage")
    found: list[Any] = [*Now(registry).read(), *Files(None, {}).read()]
    for metrics in (Metrics(), GatewayMetrics()):
        # The other collectors there are the library's own, of the process.
        found += [
            one for one in metrics.registry._collector_to_names if hasattr(one, "_labelnames")
        ]
    described = [_described(metric) for metric in found]
    by_name = {one.name: one for one in described}
    assert len(by_name) == len(described), "two metrics have one name"
    return by_name


def all_series() -> dict[str, frozenset[str]]:
    """Sample names and the labels that they have."""
    found: dict[str, frozenset[str]] = {}
    for one in in_code().values():
        for name in one.series():
            more = {"le"} if name.endswith("_bucket") else set()
            found[name] = frozenset({*one.labels, *more})
    return found
