"""The systemd units, checked by systemd, and what they give to the programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshuttle.controlplane import settings as controlplane
from kvshuttle.gateway import settings as gateway
from kvshuttle.v1 import types_pb2 as types
from tests.unit.deploy.agents import DEPLOY, checked

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SYSTEM = Path("/lib/systemd/system")


def text_of(name: str) -> str:
    return (DEPLOY / "systemd" / name).read_text(encoding="utf-8").replace("\\\n", " ")


def systemd_analyze(*arguments: str | Path) -> str:
    program = shutil.which("systemd-analyze")
    if program is None or not SYSTEM.is_dir():
        pytest.skip("systemd is not installed")
    found = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def test_systemd_takes_them(tmp_path: Path) -> None:
    """In a tree of their own, where the programs that they start exist."""
    if not SYSTEM.is_dir():
        pytest.skip("systemd is not installed")
    shutil.copytree(SYSTEM, tmp_path / "lib/systemd/system", symlinks=True)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, units)
        for program in re.findall(r"^ExecStart=(\S+)", unit.read_text(), re.MULTILINE):
            path = tmp_path / program.removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
    names = [unit.name.replace("@.", "@prefill-0.") for unit in UNITS]
    said = systemd_analyze("verify", f"--root={tmp_path}", "--man=no", *names)
    assert "kvshuttle" not in said, said


@pytest.mark.parametrize(
    ("name", "most"),
    [("kvshuttle-controlplane", 2.0), ("kvshuttle-gateway", 2.0), ("kvshuttle-engine@", 6.0)],
)
def test_they_are_shut_in(name: str, most: float) -> None:
    """systemd's own measure, of 10: GPUs and RDMA leave an engine more."""
    said = systemd_analyze("security", "--offline=true", DEPLOY / f"systemd/{name}.service")
    (level,) = re.findall(r"Overall exposure level for \S+ ([\d.]+)", said)
    assert float(level) <= most


def test_one_that_was_overtaken_is_not_started_again() -> None:
    assert re.search(
        r"^RestartPreventExitStatus=.*\b3\b",
        text_of("kvshuttle-controlplane.service"),
        re.MULTILINE,
    )


def test_an_engine_gets_a_configuration_that_its_agent_takes(tmp_path: Path) -> None:
    example = (DEPLOY / "systemd/engine.env.example").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(\w+)=(.*)$", example, re.MULTILINE))
    unit = text_of("kvshuttle-engine@.service")
    (transfer,) = re.findall(r"--kv-transfer-config '(.+)'$", unit, re.MULTILINE)
    used = set(re.findall(r"\$\{?(\w+)\}?", unit))
    assert used <= set(variables), "named in the unit and not explained"
    for name, value in variables.items():
        transfer = transfer.replace(f"${{{name}}}", value)
    config = checked(transfer.replace("%i", "prefill-0"), tmp_path)
    assert (config.worker_id, config.role) == ("prefill-0", types.WORKER_ROLE_PREFILL)
    assert (config.url, config.nixl_backend) == ("http://10.0.0.7:8000", "UCX")


@pytest.mark.parametrize(
    ("name", "load"), [("controlplane", controlplane.load), ("gateway", gateway.load)]
)
def test_the_file_that_a_server_is_started_with_is_shipped_and_taken(name: str, load: Any) -> None:
    unit = text_of(f"kvshuttle-{name}.service")
    (given,) = re.findall(r"^ExecStart=\S+ --config /etc/kvshuttle/(\S+)$", unit, re.MULTILINE)
    shipped = DEPLOY / given
    settings = load(["--config", str(shipped)])
    for key, value in yaml.safe_load(shipped.read_text(encoding="utf-8")).items():
        found = getattr(settings, key)
        assert (str(found) if isinstance(found, Path) else found) == value, key


def test_a_stop_waits_for_what_the_gateway_waits_for() -> None:
    settings = gateway.load(["--config", str(DEPLOY / "gateway.yaml")])
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text_of("kvshuttle-gateway.service"), re.M)
    waits = settings.drain_notice_s + settings.drain_timeout_s + settings.flush_timeout_s
    assert waits < int(seconds)


def test_the_page_installs_every_file_that_a_unit_reads() -> None:
    page = (DEPLOY.parent / "docs/deploy.md").read_text(encoding="utf-8")
    for unit in UNITS:
        for given in re.findall(r"/etc/kvshuttle/([\w%.-]+\.(?:yaml|env))", unit.read_text()):
            assert f"/etc/kvshuttle/{given.replace('%i', 'prefill-0')}" in page, given
    for shipped in re.findall(r"^    install .* (deploy/\S+) ", page, re.MULTILINE):
        assert (DEPLOY.parent / shipped).is_file(), shipped
