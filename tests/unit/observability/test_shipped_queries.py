"""Dashboards and alert rules against the code: each metric, label and value that they name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvshuttle.cli.reasons import REASONS
from kvshuttle.controlplane.model.terms import (
    Direction,
    LeaseState,
    Leg,
    TransferOutcome,
    TurnOutcome,
    WorkerState,
)
from tests.unit.observability.catalogue import ROOT, all_series
from tests.unit.observability.queries import (
    DASHBOARDS,
    RULES,
    grouped,
    panels,
    rules,
    selectors,
    shipped,
)

SHIPPED = shipped()
KNOWN = all_series()
# Prometheus' own, and the process collector's of its Python library.
FOREIGN = {
    "up": frozenset[str](),
    **{
        f"process_{name}": frozenset[str]()
        for name in ("open_fds", "max_fds", "cpu_seconds_total", "resident_memory_bytes")
    },
}
# Labels that Prometheus adds to every series.
SCRAPED = {"job", "instance", "namespace", "cluster"}
WORDS = {
    "outcome": {one.name for kind in (TransferOutcome, TurnOutcome) for one in kind},
    "leg": {one.name for one in Leg} | {"prefill", "decode"},
    "direction": {one.name for one in Direction} | {"forward", "return"},
    "state": {one.name for one in LeaseState}
    | {one.name.lower() for kind in (LeaseState, WorkerState) for one in kind}
    | {"active", "ended"},
    "reason": {*REASONS, "", "INTERNAL"},
    "kind": {"total", "free", "held", "quarantined"},
    "source": {
        *("returned", "forwarded", "reused", "recomputed"),
        *("eager", "pushed", "cached", "computed"),
    },
    "job": {"kvshuttle-controlplane", "kvshuttle-gateway"},
    "method": {"BeginTurn", "Connect"},
    "route": {"models"},
}


@pytest.mark.parametrize(("where", "query"), SHIPPED, ids=[where for where, _ in SHIPPED])
def test_a_query_asks_for_what_there_is(where: str, query: str) -> None:
    found = selectors(query)
    assert found, "it selects nothing"
    series = KNOWN | FOREIGN
    for one in found:
        assert one.metric in series, f"{where}: there is no {one.metric}"
        labels = series[one.metric] | SCRAPED
        for label, operator, value in one.matchers:
            assert label in labels, f"{where}: {one.metric} has no label {label}"
            if value == ".*" or label in ("worker_id", "status"):
                continue
            words = value.split("|") if "Re" in operator and "(" not in value else [value]
            for word in words:
                fits = [k for k in WORDS[label] if re.fullmatch(word, k)] if word else [""]
                assert fits, f"{where}: {label} is never {word}"
    for by, under in grouped(query):
        for label in by - SCRAPED:
            assert any(label in series[one.metric] for one in under), f"{where}: by {label}"


def test_histograms_are_asked_by_their_buckets() -> None:
    for where, query in SHIPPED:
        if "histogram_quantile" in query:
            assert {one.metric[-7:] for one in selectors(query)} == {"_bucket"}, where
            assert all("le" in labels for labels, _ in grouped(query)), where


def test_every_metric_of_trouble_is_shown_or_alerted_on() -> None:
    """What nobody would see without asking: counters of things that go wrong."""
    asked = {one.metric for _, query in SHIPPED for one in selectors(query)}
    whole = {name for name in KNOWN if not name.endswith(("_sum", "_count"))}
    # Told by what is shown beside it, or for a look by hand only.
    by_hand = {
        "kvshuttle_build_info",
        "kvshuttle_gateway_build_info",
        "kvshuttle_gateway_dropped_kv_transfer_params_total",
        "kvshuttle_gateway_known_conversations",
        "kvshuttle_output_tokens_total",
        "kvshuttle_store_records_total",
        "kvshuttle_streams",
        "kvshuttle_time_to_first_token_seconds_bucket",
        "kvshuttle_turns_total",
        "kvshuttle_worker_transfers_total",
    }
    assert whole - asked <= by_hand


# -- dashboards ----------------------------------------------------------------------------------


def test_dashboards_are_what_the_script_makes() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "scripts.dashboards", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert [path.stem for path in DASHBOARDS] == ["gateway", "overview", "transfers", "workers"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_one_for_grafana(path: Path) -> None:
    register_default_plugins()
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert Dashboard.from_json(loaded).uid == f"kvshuttle-{path.stem}".replace(
        "transfers", "movement"
    )
    taken: Counter[tuple[int, int]] = Counter()
    for panel in panels(loaded):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                taken[x, y] += 1
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
    assert max(taken.values()) == 1, "panels lie on each other"


# -- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_says_what_it_means(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"KVShuttle[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def promtool(*arguments: str | Path) -> None:
    """Runs it, or says why not."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    found = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, cwd=RULES.parent
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_prometheus_takes_the_rules_and_the_scrape_configuration() -> None:
    promtool("check", "rules", RULES)
    promtool("check", "config", RULES.with_name("scrape.yaml"))


def test_the_rules_fire_when_they_should() -> None:
    promtool("test", "rules", RULES.parent / "tests/alerts_test.yaml")


def test_every_rule_has_a_test() -> None:
    text = (RULES.parent / "tests/alerts_test.yaml").read_text(encoding="utf-8")
    for rule in rules():
        assert rule["alert"] in text, rule["alert"]
