"""`doctor`, and TLS: what is well, what is not, and what to do."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from kvshuttle.controlplane import __version__
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import types_pb2 as types
from tests.integration.cli.conftest import RUN_S, Ran, environment, kvshuttle
from tests.integration.cli.conftest import Site as Cluster
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.conftest import eventually
from tests.integration.controlplane.test_access import Site as SecureSite
from tests.support.certificates import issue_for_uri

POOL = {"total_blocks": 1_000, "free_blocks": 700, "held_blocks": 100}


def severities(ran: Ran) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in ran.json["findings"]:
        found.setdefault(one["check"], set()).add(one["severity"])
        if one["severity"] in ("warning", "problem"):
            assert one["remedy"], one
    return found


@asynccontextmanager
async def heard(*agents: Agent, **pool: int) -> AsyncIterator[None]:
    """Heartbeats, as agents send them."""

    async def beat() -> None:
        clock = 2_000
        while True:
            clock += 1
            for agent in agents:
                await agent.beat(clock, pool=workers.PoolStats(**(POOL | pool)))
            await asyncio.sleep(0.2)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def pair(site: Cluster) -> tuple[Agent, Agent]:
    """A prefill and a decode worker of one version."""
    hello = {"nixl_backend": "UCX", "agent_version": __version__}
    return (
        await site.agent("p", types.WORKER_ROLE_PREFILL, **hello).connect(),
        await site.agent("d", types.WORKER_ROLE_DECODE, **hello).connect(),
    )


def doctor(site: Cluster, *more: str) -> tuple[str, ...]:
    return ("doctor", "--agent-target", site.server.addresses.agent, *more)


async def test_all_is_well(site: Cluster, pair: tuple[Agent, Agent]) -> None:
    async with heard(*pair):
        # A machine that stands still for seconds is told of as such, and rightly.
        async def look() -> Ran:
            return await site.run(*doctor(site), "-o", "json")

        ran = await eventually(look, lambda ran: ran.status == 0, RUN_S)
        found = severities(ran)
        for check in ("api", "agent port", "epoch", "clock", "workers", "fingerprint", "pools"):
            assert found[check] <= {"ok", "info"}, check
        assert found["metrics"] == {"skipped"}
        told = await site.run(*doctor(site))
        assert "✓  api " in told.out
        assert "problems, " in told.out
        brief = await site.run(*doctor(site), "--brief")
        assert "✓" not in brief.out


async def test_what_is_wrong_with_workers(site: Cluster, pair: tuple[Agent, Agent]) -> None:
    prefill, decode = pair
    other = await site.agent(
        "other", types.WORKER_ROLE_DECODE, nixl_backend="LIBFABRIC", agent_version="9.9"
    ).connect()
    await decode.close()
    async with heard(prefill, other, quarantined_blocks=120, free_blocks=20):
        ran = await site.run(*doctor(site, "--stuck-after", "0.001"), "-o", "json")
        await site.begin()
        slow = await site.run(*doctor(site, "--stuck-after", "0.001"), "-o", "json")
    found = severities(ran)
    assert ran.status == 2
    assert found["NIXL backend"] == {"problem"}
    assert found["quarantine"] == {"problem"}
    assert found["pool"] == {"warning"}
    assert found["agent version"] == {"warning"}
    assert "warning" in found["workers"], "d is lost"
    assert severities(slow)["turns"] == {"warning"}


async def test_nothing_there(site: Cluster) -> None:
    nowhere = await kvshuttle("doctor", "--target", "127.0.0.1:1", "-o", "json")
    assert nowhere.status == 2
    assert severities(nowhere)["api"] == {"problem"}
    empty = await site.run("doctor", "--agent-target", "127.0.0.1:1", "-o", "json")
    assert empty.status == 2
    found = severities(empty)
    assert found["agent port"] == {"problem"}
    assert found["workers"] == {"problem"}
    assert (await kvshuttle("doctor", "--target", "nonsense")).status == 2


async def test_metrics_and_a_gateway(tmp_path: Path, site: Cluster) -> None:
    await site.stop()
    site._settings["metrics_address"] = "127.0.0.1:0"
    await site.start()
    both = await site.agent("b", types.WORKER_ROLE_BOTH, agent_version=__version__).connect()
    ready = tmp_path / "gateway.json"
    gateway = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvshuttle.gateway", "--port", "0", "--ready-file", str(ready)),
        *("--control-plane", site.target),
        stderr=asyncio.subprocess.DEVNULL,
        env=environment(),
    )
    try:

        async def is_ready() -> bool:
            return ready.exists()

        await eventually(is_ready, bool, RUN_S)
        url = json.loads(ready.read_text())["url"]
        metrics = f"http://{site.server.addresses.metrics}/metrics"
        async with heard(both):
            ran = await site.run(
                *doctor(site, "--metrics-url", metrics, "--gateway", url, "--engines"),
                *("-o", "json"),
            )
            wrong = await site.run(
                *doctor(site, "--metrics-url", f"{url}/metrics", "--gateway", "http://127.0.0.1:1"),
                *("-o", "json"),
            )
    finally:
        gateway.terminate()
        await gateway.wait()
    found = severities(ran)
    assert found["metrics"] == {"ok"}
    # The engine that the agent names is not there: the gateway and we see the same.
    assert found["gateway"] == {"warning"}
    assert found["engine"] == {"problem"}
    assert "reach engine b" in ran.out
    found = severities(wrong)
    assert (found["metrics"], found["gateway"]) == ({"problem"}, {"problem"})


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[SecureSite]:
    """A control plane with TLS, tokens for its API, and an operator's certificate in files."""
    site = SecureSite(tmp_path, one_listener=False)
    key, chain = issue_for_uri(site.ca, "kvshuttle://operator/o")
    (tmp_path / "operator.pem").write_bytes(chain)
    (tmp_path / "operator.key").write_bytes(key)
    (tmp_path / "token").write_text("an-operator\n")
    await site.server.start()
    yield site
    await site.close()


def access(secure: SecureSite, path: Path, *more: str) -> tuple[str, ...]:
    return ("--target", secure.server.addresses.api, "--ca-file", str(path / "ca.pem"), *more)


async def test_tokens_and_authorities(secure: SecureSite, tmp_path: Path) -> None:
    with_file = access(secure, tmp_path, "--token-file", str(tmp_path / "token"))
    assert (await kvshuttle("status", *with_file)).status == 1, "no workers"
    by_variable = await kvshuttle(
        "status", *access(secure, tmp_path), KVSHUTTLE_TOKEN="an-operator"
    )
    assert by_variable.status == 1
    nobody = await kvshuttle("status", *access(secure, tmp_path))
    assert nobody.status == 4
    assert "UNAUTHENTICATED" in nobody.err
    assert "--token-file" in nobody.err
    gateway = await kvshuttle("status", *access(secure, tmp_path), KVSHUTTLE_TOKEN="a-gateway")
    assert gateway.status == 4
    assert "operator's certificate or token" in gateway.err
    assert "a-gateway" not in gateway.err
    tenantless = await kvshuttle("session", "x", *with_file)
    assert tenantless.status == 2
    assert "--tenant" in tenantless.err
    stranger = trustme.CA()
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    distrusted = await kvshuttle(
        *("status", "--target", secure.server.addresses.api),
        *("--ca-file", str(tmp_path / "stranger.pem")),
    )
    assert distrusted.status == 3
    assert "--ca-file" in distrusted.err
    plain = await kvshuttle("status", "--target", secure.server.addresses.api)
    assert plain.status == 3


async def test_doctor_on_certificates(secure: SecureSite, tmp_path: Path) -> None:
    agent = ("--agent-target", secure.server.addresses.agent)
    own = (
        *("--cert-file", str(tmp_path / "operator.pem")),
        *("--key-file", str(tmp_path / "operator.key")),
    )
    token = ("--token-file", str(tmp_path / "token"))
    ran = await kvshuttle("doctor", *access(secure, tmp_path), *agent, *own, *token, "-o", "json")
    found = severities(ran)
    assert found["api certificate"] == {"ok"}
    assert found["agent port certificate"] == {"ok"}
    assert found["own certificate"] == {"warning"}, "it expires within the hour"
    assert found["workers"] == {"problem"}
    without = await kvshuttle(
        *("doctor", "--target", secure.server.addresses.api, *agent, "-o", "json")
    )
    assert severities(without)["api"] == {"problem"}
    assert "speaks TLS" in without.out
    stranger = trustme.CA()
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    distrusted = await kvshuttle(
        *("doctor", "--target", secure.server.addresses.api, *agent, *token),
        *("--ca-file", str(tmp_path / "stranger.pem"), "-o", "json"),
    )
    assert severities(distrusted)["api certificate"] >= {"problem"}
    named = await kvshuttle(
        *("doctor", *access(secure, tmp_path), "--server-name", "elsewhere", *token, "-o", "json")
    )
    assert severities(named)["api certificate"] >= {"problem"}
    client = await kvshuttle(
        *("doctor", *access(secure, tmp_path), *agent, "-o", "json"),
        KVSHUTTLE_TOKEN="client-of-acme",
    )
    assert severities(client)["access"] == {"problem"}
    assert severities(client)["agent port"] == {"ok", "info"}, "mTLS, and no certificate given"
    for text in (client.out, named.out, ran.out):
        assert "client-of-acme" not in text
        assert "an-operator" not in text


async def test_certificates_alone(tmp_path: Path) -> None:
    """Without a tokens file the API wants a certificate of everybody."""
    site = SecureSite(tmp_path, one_listener=False, tokens=False)
    key, chain = issue_for_uri(site.ca, "kvshuttle://operator/o")
    (tmp_path / "operator.pem").write_bytes(chain)
    (tmp_path / "operator.key").write_bytes(key)
    await site.server.start()
    try:
        own = (
            *("--cert-file", str(tmp_path / "operator.pem")),
            *("--key-file", str(tmp_path / "operator.key")),
        )
        ran = await kvshuttle("status", *access(site, tmp_path, *own))
        assert ran.status == 1, "no workers"
        assert "mTLS" in ran.out
        without = await kvshuttle("status", *access(site, tmp_path))
        assert without.status == 3
        looked = await kvshuttle("doctor", *access(site, tmp_path), "-o", "json")
        assert "--cert-file" in looked.out
        assert looked.status == 2
    finally:
        await site.close()
