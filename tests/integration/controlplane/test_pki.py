"""Certificates of deploy/pki/make.sh: those who have one are known, and nobody else."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.server import Server
from kvshuttle.controlplane.settings import Settings
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import Agent
from tests.integration.controlplane.conftest import T

SCRIPT = Path(__file__).resolve().parents[3] / "deploy/pki/make.sh"


def make(path: Path, *workers_: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(
        ["sh", SCRIPT, path, "controlplane,127.0.0.1", *workers_], check=True, timeout=60
    )


def modes(path: Path) -> set[int]:
    """Of the private keys."""
    return {stat.S_IMODE(key.stat().st_mode) for key in path.glob("*.key")}


def channel(path: Path, address: str, name: str) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        (path / "ca.crt").read_bytes(),
        (path / f"{name}.key").read_bytes(),
        (path / f"{name}.crt").read_bytes(),
    )
    return grpc.aio.secure_channel(address, credentials)


async def test_agent_gateway_and_operator_are_who_their_certificates_say(tmp_path: Path) -> None:
    make(tmp_path, "prefill-0")
    assert modes(tmp_path) == {0o600}
    before = (tmp_path / "prefill-0.crt").read_bytes()
    make(tmp_path, "prefill-0", "decode-0")
    assert (tmp_path / "prefill-0.crt").read_bytes() == before, "what was there changed"
    settings: dict[str, Any] = {
        "store": "memory",
        "metrics_address": "",
        "api_address": "127.0.0.1:0",
        "agent_address": "127.0.0.1:0",
        "tls_cert": tmp_path / "server.crt",
        "tls_key": tmp_path / "server.key",
        "client_ca": tmp_path / "ca.crt",
        "stop_grace": 0.2,
    }
    server = Server(Settings(**settings), Limits())
    await server.start()
    channels = {
        "decode-0": channel(tmp_path, server.addresses.agent, "decode-0"),
        "gateway": channel(tmp_path, server.addresses.api, "gateway"),
        "operator": channel(tmp_path, server.addresses.api, "operator"),
    }
    agent = Agent(channels["decode-0"], "decode-0", types.WORKER_ROLE_BOTH)
    try:
        await agent.connect()
        with pytest.raises(grpc.aio.AioRpcError):
            await Agent(channels["decode-0"], "prefill-0", types.WORKER_ROLE_BOTH).connect()
        listed = await cluster_grpc.ClusterServiceStub(channels["operator"]).ListWorkers(
            workers.ListWorkersRequest(), timeout=T
        )
        assert [one.ref.worker_id for one in listed.workers] == ["decode-0"]
        turn = await session_grpc.SessionServiceStub(channels["gateway"]).BeginTurn(
            sessions.BeginTurnRequest(session_id="s"),
            timeout=T,
            metadata=(("kvshuttle-tenant", "acme"),),
        )
        assert turn.turn.turn == 1
    finally:
        await agent.close()
        for one in channels.values():
            await one.close()
        await server.stop()
