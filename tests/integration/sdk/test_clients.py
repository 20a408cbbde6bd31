"""The clients of other languages: each is generated, compiled, and its quickstart run against a
real control plane. A language whose tools are not on this machine is skipped, with the reason."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types
from scripts.sdk import LANGUAGES, Language, MissingError
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.test_access import Site
from tests.support.certificates import issue_for_uri

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.controlplane.model.limits import Limits
    from tests.integration.controlplane.conftest import Cluster

# Compilers on a machine that does other things too.
pytestmark = pytest.mark.timeout(600)

_built: dict[str, list[str]] = {}


async def built(language: Language) -> list[str]:
    """What runs the quickstart; built once."""
    if language.name not in _built:
        try:
            _built[language.name] = await asyncio.to_thread(language.build)
        except MissingError as missing:
            pytest.skip(f"{language.name}: {missing}")
    return _built[language.name]


async def run(command: list[str], *arguments: str, **environment: str) -> str:
    """What it printed; all that it said if it fails."""
    child = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    assert child.returncode == 0, out.decode() + err.decode()
    return out.decode()


def expected(session_id: str, known: int) -> list[str]:
    return [
        f"{known} sessions are known",
        "refused: SESSION_NOT_FOUND",
        "turn 1 runs on http://d:8000 (NO_REPLICA)",
        f"watched: turn 1 of {session_id} has ended",
        "session over",
    ]


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.name)
async def test_quickstart(cluster: Cluster, language: Language) -> None:
    command = await built(language)
    await cluster.pair()
    for number in range(3):
        await cluster.begin(f"s{number}")
    text = await run(command, cluster.server.addresses.api, "mine")
    assert text.splitlines() == expected("mine", 3)
    found = await cluster.session("mine")
    assert (found.state, found.turn_count) == (session.SESSION_STATE_ENDED, 1)


@pytest.mark.parametrize("way", ["token", "certificate"])
@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.name)
async def test_quickstart_over_tls(
    tmp_path: Path, limits: Limits, language: Language, way: str
) -> None:
    """A client shows its token; a gateway or an operator its certificate, and names the tenant."""
    command = await built(language)
    # Those of scripted agents, which send no heartbeats: a slow start of Java is no silence.
    site = Site(tmp_path, one_listener=False, tokens=way == "token", limits=limits)
    await site.server.start()
    agents = []
    try:
        for name, role in (("p", types.WORKER_ROLE_PREFILL), ("d", types.WORKER_ROLE_DECODE)):
            channel = site.channel(site.server.addresses.agent, f"kvshuttle://worker/{name}")
            agents.append(await Agent(channel, name, role).connect())
        key, chain = issue_for_uri(site.ca, "kvshuttle://operator/me")
        (tmp_path / "me.key").write_bytes(key)
        (tmp_path / "me.pem").write_bytes(chain)
        environment = {"CA": str(tmp_path / "ca.pem")}
        if way == "token":
            environment["TOKEN"] = "client-of-acme"
        else:
            environment |= {"CERT": str(tmp_path / "me.pem"), "KEY": str(tmp_path / "me.key")}
            environment["TENANT"] = "acme"
        text = await run(command, site.server.addresses.api, "mine", **environment)
        assert text.splitlines() == expected("mine", 0)
    finally:
        for agent in agents:
            await agent.close()
        await site.close()
