"""docs/metrics.md against the code, and the code against Prometheus' conventions."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client import generate_latest

from kvshuttle.controlplane.observer import Metrics
from kvshuttle.gateway.metrics import Metrics as GatewayMetrics
from tests.unit.observability.catalogue import ROOT, Described, in_code

ROW = re.compile(
    r"^\| `(kvshuttle_\w+)` \| (counter|gauge|histogram) \|([^|]*)\| (\S.*) \|$", re.MULTILINE
)


def documented() -> list[Described]:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert len(rows) == len(re.findall(r"^\| `kvshuttle_", page, re.MULTILINE)), "a row is not read"
    return [Described(row[0], row[1], tuple(re.findall(r"`(\w+)`", row[2]))) for row in rows]


def test_the_page_has_every_metric_once_and_no_other() -> None:
    page = documented()
    names = [one.name for one in page]
    assert sorted(names) == sorted(set(names))
    code = in_code()
    assert set(names) == set(code)
    for one in page:
        assert one == code[one.name]


@pytest.mark.parametrize("one", in_code().values(), ids=lambda one: one.name)
def test_a_name_follows_the_conventions(one: Described) -> None:
    assert re.fullmatch(r"kvshuttle_[a-z_]+", one.name)
    assert one.name.endswith("_total") == (one.type == "counter")
    # Base units only; a time is told in seconds, an amount of memory in bytes.
    assert not re.search(
        r"_(ms|millis|microseconds|ns|minutes|kb|mb|gb|kib|mib|percent)\b", one.name
    )
    if one.type == "histogram":
        assert one.name.endswith(("_seconds", "_bytes"))
    assert not {"tenant", "session_id", "turn", "lease_id"} & set(one.labels)


@pytest.mark.parametrize("metrics", [Metrics(), GatewayMetrics()], ids=["controlplane", "gateway"])
def test_prometheus_own_linter_finds_nothing(metrics: Metrics | GatewayMetrics) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    page = generate_latest(metrics.registry)
    found = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")
