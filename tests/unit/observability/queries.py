"""Every PromQL query that is shipped, and what it asks for, read by a real parser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
import yaml

from tests.unit.observability.catalogue import ROOT

RULES = ROOT / "deploy/prometheus/kvshuttle-alerts.yaml"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))


@dataclass(frozen=True)
class Selector:
    """One selection of series: its matchers as (label, operator, value)."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def rules() -> list[dict[str, Any]]:
    """All alert rules, in order."""
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, those in rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def shipped() -> list[tuple[str, str]]:
    """(where, query) of every rule and panel, with Grafana's variables filled in."""
    found = [(f"alert {rule['alert']}", rule["expr"]) for rule in rules()]
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text(encoding="utf-8"))):
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "1m").replace("$worker", ".*")
                found.append((f"{path.stem}: {panel['title']} {target['refId']}", query))
    return found


def nodes(node: Any) -> Iterator[Any]:
    """A parsed query and all its parts."""
    yield node
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        part = getattr(node, name, None)
        for one in part if isinstance(part, list) else [part]:
            if isinstance(one, promql.Expr):
                yield from nodes(one)


def selectors(query: str) -> list[Selector]:
    """What a query selects. ValueError where it does not parse."""
    return [
        Selector(
            node.name or "",
            tuple((m.name, str(m.op), m.value) for m in node.matchers.matchers),
        )
        for node in nodes(promql.parse(query))
        if isinstance(node, promql.VectorSelector)
    ]


def grouped(query: str) -> list[tuple[set[str], list[Selector]]]:
    """Labels of each aggregation, and the selections under it."""
    found = []
    for node in nodes(promql.parse(query)):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            labels = set(node.modifier.labels)
            found.append((labels, selectors(node.expr.prettify())))
    return found
