"""Who may do what: mTLS, bearer tokens, tenants."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.server import Server
from kvshuttle.controlplane.settings import Settings
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import lease_service_pb2_grpc as lease_grpc
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.conftest import T
from tests.integration.controlplane.status import reason
from tests.support.certificates import issue_for_uri

DENIED = grpc.StatusCode.PERMISSION_DENIED


class Site:
    """A control plane with TLS, and certificates for its callers."""

    def __init__(
        self,
        path: Path,
        *,
        one_listener: bool,
        tokens: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.ca = trustme.CA()
        cert = self.ca.issue_cert("127.0.0.1")
        (path / "cert.pem").write_bytes(cert.cert_chain_pems[0].bytes())
        (path / "key.pem").write_bytes(cert.private_key_pem.bytes())
        self.ca.cert_pem.write_to_path(str(path / "ca.pem"))
        entries = "".join(
            f"- {{sha256: {hashlib.sha256(token.encode()).hexdigest()}, role: {role}{more}}}\n"
            for token, role, more in (
                ("client-of-acme", "client", ", tenant: acme"),
                ("a-gateway", "gateway", ""),
                ("an-operator", "operator", ""),
            )
        )
        (path / "tokens.yaml").write_text(entries)
        addresses: dict[str, Any] = (
            {"listen": "127.0.0.1:0"}
            if one_listener
            else {"api_address": "127.0.0.1:0", "agent_address": "127.0.0.1:0"}
        )
        self.server = Server(
            Settings(
                store="memory",
                metrics_address="",
                tls_cert=path / "cert.pem",
                tls_key=path / "key.pem",
                client_ca=path / "ca.pem",
                tokens_file=path / "tokens.yaml" if tokens and not one_listener else None,
                stop_grace=0.2,
                **addresses,
            ),
            limits or Limits(),
        )
        self.channels: list[grpc.aio.Channel] = []

    def channel(self, address: str, uri: str = "") -> grpc.aio.Channel:
        key = chain = None
        if uri:
            key, chain = issue_for_uri(self.ca, uri)
        credentials = grpc.ssl_channel_credentials(self.ca.cert_pem.bytes(), key, chain)
        channel = grpc.aio.secure_channel(address, credentials)
        self.channels.append(channel)
        return channel

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        await self.server.stop()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path, one_listener=False)
    await site.server.start()
    yield site
    await site.close()


def bearer(token: str, tenant: str = "") -> tuple[tuple[str, str], ...]:
    metadata = [("authorization", f"Bearer {token}")]
    if tenant:
        metadata.append(("kvshuttle-tenant", tenant))
    return tuple(metadata)


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


STATUS = workers.GetStatusRequest()
LIST = sessions.ListSessionsRequest()


async def test_an_agent_is_who_its_certificate_says(site: Site) -> None:
    address = site.server.addresses.agent
    channel = site.channel(address, "kvshuttle://worker/d")
    agent = await Agent(channel, "d", types.WORKER_ROLE_DECODE).connect()
    assert agent.welcome.incarnation > 0
    error = await refused(Agent(channel, "other", types.WORKER_ROLE_DECODE).connect())
    assert error.code() is DENIED
    await agent.close()
    for uri in ("kvshuttle://gateway/g", "https://elsewhere/worker/d"):
        stranger = Agent(site.channel(address, uri), "d", types.WORKER_ROLE_DECODE)
        error = await refused(stranger.connect())
        assert error.code() in (DENIED, grpc.StatusCode.UNAUTHENTICATED)


@pytest.mark.parametrize("late_s", [0.0, 0.1])
async def test_a_refusal_is_heard_before_a_hello_and_beside_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """The scripted agent's own: a hello that meets the call's end makes gRPC forget the status."""
    channel = site.channel(site.server.addresses.agent, "kvshuttle://gateway/g")
    strangers = [Agent(channel, "d", types.WORKER_ROLE_DECODE) for _ in range(20)]
    for stranger in strangers:
        connect = stranger.stub.Connect
        calls = iter([connect()])

        def first(calls: Any = calls, connect: Any = connect) -> Any:
            return next(calls, None) or connect()

        monkeypatch.setattr(stranger.stub, "Connect", first)
    await asyncio.sleep(late_s)
    for stranger in strangers:
        assert (await refused(stranger.connect())).code() is DENIED


async def test_an_agent_without_a_certificate_gets_no_connection(site: Site) -> None:
    agent = Agent(site.channel(site.server.addresses.agent), "d", types.WORKER_ROLE_DECODE)
    error = await refused(agent.connect())
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_roles(site: Site) -> None:
    channel = site.channel(site.server.addresses.api)
    cluster = cluster_grpc.ClusterServiceStub(channel)
    session = session_grpc.SessionServiceStub(channel)
    lease = lease_grpc.LeaseServiceStub(channel)
    error = await refused(cluster.GetStatus(STATUS, timeout=T))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    error = await refused(cluster.GetStatus(STATUS, timeout=T, metadata=bearer("guessed")))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    for token in ("client-of-acme", "a-gateway"):
        error = await refused(cluster.GetStatus(STATUS, timeout=T, metadata=bearer(token)))
        assert (error.code(), reason(error)) == (DENIED, "PERMISSION_DENIED")
    await cluster.GetStatus(STATUS, timeout=T, metadata=bearer("an-operator"))
    await session.ListSessions(LIST, timeout=T, metadata=bearer("client-of-acme"))
    await lease.ListLeases(leases.ListLeasesRequest(), timeout=T, metadata=bearer("client-of-acme"))
    revoke = leases.RevokeLeaseRequest(lease_id="x")
    error = await refused(lease.RevokeLease(revoke, timeout=T, metadata=bearer("client-of-acme")))
    assert error.code() is DENIED


async def test_tenants_do_not_see_each_other(site: Site) -> None:
    agents = site.channel(site.server.addresses.agent, "kvshuttle://worker/b")
    agent = await Agent(agents, "b", types.WORKER_ROLE_BOTH).connect()
    session = session_grpc.SessionServiceStub(site.channel(site.server.addresses.api))
    for tenant in ("acme", "other"):
        await session.BeginTurn(
            sessions.BeginTurnRequest(session_id=f"of-{tenant}"),
            timeout=T,
            metadata=bearer("a-gateway", tenant),
        )
    mine = await session.ListSessions(LIST, timeout=T, metadata=bearer("client-of-acme"))
    assert [s.session_id for s in mine.sessions] == ["of-acme"]
    request = sessions.GetSessionRequest(session_id="of-other")
    error = await refused(session.GetSession(request, timeout=T, metadata=bearer("client-of-acme")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    error = await refused(
        session.GetSession(request, timeout=T, metadata=bearer("client-of-acme", "other"))
    )
    assert error.code() is DENIED
    # A gateway says for whom it acts; an operator that does not say sees all.
    error = await refused(session.ListSessions(LIST, timeout=T, metadata=bearer("a-gateway")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    everyone = await session.ListSessions(LIST, timeout=T, metadata=bearer("an-operator"))
    assert {s.tenant for s in everyone.sessions} == {"acme", "other"}
    await agent.close()


async def test_certificates_of_gateways_and_operators(tmp_path: Path) -> None:
    site = Site(tmp_path, one_listener=False, tokens=False)
    await site.server.start()
    try:
        address = site.server.addresses.api
        operator = cluster_grpc.ClusterServiceStub(site.channel(address, "kvshuttle://operator/o"))
        await operator.GetStatus(STATUS, timeout=T)
        gateway = cluster_grpc.ClusterServiceStub(site.channel(address, "kvshuttle://gateway/g"))
        assert (await refused(gateway.GetStatus(STATUS, timeout=T))).code() is DENIED
        nobody = cluster_grpc.ClusterServiceStub(site.channel(address))
        error = await refused(nobody.GetStatus(STATUS, timeout=T))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await site.close()


async def test_on_one_listener_an_agent_still_needs_its_certificate(tmp_path: Path) -> None:
    site = Site(tmp_path, one_listener=True)
    await site.server.start()
    try:
        address = site.server.addresses.agent
        assert address == site.server.addresses.api
        agent = Agent(site.channel(address, "kvshuttle://worker/d"), "d", types.WORKER_ROLE_DECODE)
        await agent.connect()
        await agent.close()
        stranger = Agent(site.channel(address), "d", types.WORKER_ROLE_DECODE)
        error = await refused(stranger.connect())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await site.close()
