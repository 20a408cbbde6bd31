"""The compose file against its schema, the programs' options and the agent's configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshuttle.controlplane import settings as controlplane
from kvshuttle.gateway.settings import GatewaySettings
from kvshuttle.v1 import types_pb2 as types
from tests.unit.deploy.agents import DEPLOY, checked

FILE = DEPLOY / "compose/compose.yaml"


def services() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]
    return loaded


def flags(command: list[str]) -> dict[str, Any]:
    """Settings by name, from flags."""
    found: dict[str, Any] = {}
    for one in command[1:]:
        name, equals, value = one.removeprefix("--").partition("=")
        found[name.replace("-", "_")] = value if equals else True
    return found


def test_it_is_a_compose_file() -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    found = subprocess.run(
        [program, "--builtin-schema", "vendor.compose-spec", str(FILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_programs_take_their_flags() -> None:
    found = services()
    command = found["controlplane"]["command"]
    assert command[0] == "kvshuttle-controlplane"
    assert controlplane.load(command[1:]).tls_cert == Path("/certificates/server.crt")
    command = found["gateway"]["command"]
    assert command[0] == "kvshuttle-gateway"
    assert GatewaySettings(**flags(command)).control_plane == "controlplane:7400"
    variables = found["operator"]["environment"]
    page = (DEPLOY.parent / "docs/cli.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in variables)


def test_the_agents_take_their_configuration(tmp_path: Path) -> None:
    found = services()
    names = re.findall(r"make\.sh \S+ (\S+) ([\w -]+?) &&", found["certificates"]["command"][0])
    ((server, workers),) = names
    assert server == "controlplane"
    assert workers.split() == ["prefill-0", "decode-0"]
    for name, role in (
        ("prefill-0", types.WORKER_ROLE_PREFILL),
        ("decode-0", types.WORKER_ROLE_DECODE),
    ):
        command = found[name]["command"]
        config = checked(command[command.index("--kv-transfer-config") + 1], tmp_path)
        assert (config.worker_id, config.role, config.url) == (name, role, f"http://{name}:8000")
        assert config.control_plane == "controlplane:7401"


def mounts(service: str) -> dict[str, Path]:
    """Files and folders of the repository by where the container has them."""
    found = {}
    for volume in services()[service]["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("."):
            found[target] = (FILE.parent / source).resolve()
    return found


@pytest.mark.parametrize("service", sorted(services()))
def test_what_is_mounted_exists(service: str) -> None:
    named = yaml.safe_load(FILE.read_text(encoding="utf-8"))["volumes"]
    for volume in services()[service].get("volumes", ()):
        assert volume.startswith(".") or volume.split(":")[0] in named, volume
    assert all(path.exists() for path in mounts(service).values())


def test_prometheus_gets_a_configuration_that_it_takes(tmp_path: Path) -> None:
    found = mounts("prometheus")
    command = services()["prometheus"]["command"]
    config = next(one for one in command if one.startswith("--config.file=")).partition("=")[2]
    folder = tmp_path / "prometheus"
    folder.mkdir()
    for target, source in found.items():
        assert Path(target).parent == Path(config).parent
        shutil.copy(source, folder / Path(target).name)
    text = found[config].read_text(encoding="utf-8")
    for host, port in re.findall(r'"([\w-]+):(\d+)"', text):
        assert port in str(services()[host]), f"{host} does not listen at {port}"
    assert set(re.findall(r"job_name: (kvshuttle-\S+)", text)) == set(
        re.findall(r"job_name: (\S+)", (DEPLOY / "prometheus/scrape.yaml").read_text())
    )
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    ran = subprocess.run(
        [program, "check", "config", folder / Path(config).name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_grafana_finds_its_dashboards_and_its_source() -> None:
    found = mounts("grafana")
    provisioning = "/etc/grafana/provisioning"
    boards = yaml.safe_load(found[f"{provisioning}/dashboards/kvshuttle.yaml"].read_text())
    (provider,) = boards["providers"]
    assert found[provider["options"]["path"]] == DEPLOY / "grafana"
    sources = yaml.safe_load(found[f"{provisioning}/datasources/kvshuttle.yaml"].read_text())
    (source,) = sources["datasources"]
    # The dashboards' variable takes the one of this kind.
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    host = source["url"].removeprefix("http://").partition(":")[0]
    assert host in services()
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (found[str(Path(home).parent)] / Path(home).name).is_file()


def test_nothing_is_open_to_the_network() -> None:
    for service in services().values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")


def test_hadolint_finds_nothing_in_the_dockerfiles() -> None:
    program = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert program is not None, "make venv installs it"
    files = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
    found = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_dockerfiles_copy_what_there_is_and_name_extras_that_there_are() -> None:
    import tomllib

    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))
    ignored = (DEPLOY.parent / ".dockerignore").read_text(encoding="utf-8").split()
    for path in (DEPLOY / "docker").glob("*.Dockerfile"):
        text = path.read_text(encoding="utf-8")
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
            for source in sources.split():
                assert (DEPLOY.parent / source).exists(), source
                assert any(f"!{source}".startswith(one) for one in ignored if one != "*"), source
        for extras in re.findall(r"'\.\[([\w,]+)\]'", text):
            known = project["project"]["optional-dependencies"]
            assert set(extras.split(",")) <= set(known)
