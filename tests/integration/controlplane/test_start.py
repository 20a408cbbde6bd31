"""A start with many sessions: killed in its midst it has changed nothing; what it took up by column
is there for every call, ends in time, and is squared with inventories."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import grpc
import pytest

from benchmarks.controlplane.stored import TENANT, write_store
from benchmarks.controlplane.traces import ChainLengths
from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.store import SqliteStore
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import cluster_service_pb2_grpc as cluster_grpc
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import session_service_pb2_grpc as session_grpc
from tests.integration.controlplane.conftest import eventually
from tests.integration.controlplane.live import kill
from tests.integration.controlplane.test_process import COMMAND, Process

SESSIONS = 3_000
WAIT = 20


def stored(path: Path) -> tuple[int, list[Session], list[Lease]]:
    store = SqliteStore(path)
    try:
        found = store.load()
        leases = sorted(found.leases, key=lambda one: one.order)
        return found.epoch, list(found.sessions), leases
    finally:
        store.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "store.db"
    write_store(path, SESSIONS, 8, ChainLengths(""), ttl_s=1)
    return path


def test_a_start_that_is_killed_has_changed_nothing(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(made.read_bytes())
    epoch, *before = stored(path)
    for part in range(1, 7):
        (tmp_path / "ready.json").unlink(missing_ok=True)
        child = subprocess.Popen(
            [
                *COMMAND,
                "--insecure",
                "--listen=127.0.0.1:0",
                f"--store={path}",
                f"--ready-file={tmp_path / 'ready.json'}",
            ],
            stderr=subprocess.DEVNULL,
        )
        # Anywhere between its first line and its serving.
        time.sleep(0.15 * part)
        child.kill()
        child.wait()
        later, *after = stored(path)
        # A term that began is never used again.
        assert epoch <= later <= epoch + 1
        epoch = later
        assert after == before


async def test_what_a_start_took_up_is_there_and_ends_in_time(made: Path, tmp_path: Path) -> None:
    await asyncio.to_thread(shutil.copy, made, tmp_path / "store.db")
    _, before, _ = stored(tmp_path / "store.db")
    turns = {x.key.session_id: x.running()[0] for x in before}
    process = await asyncio.to_thread(Process, tmp_path, "--lease-ttl=3")
    try:
        async with grpc.aio.insecure_channel(process.ready["api"]) as channel:
            cluster = cluster_grpc.ClusterServiceStub(channel)
            calls = session_grpc.SessionServiceStub(channel)
            whose = (("kvshuttle-tenant", TENANT),)
            status = await cluster.GetStatus(workers.GetStatusRequest(), timeout=WAIT)
            assert status.active_sessions == status.running_turns == SESSIONS
            assert status.open_leases == SESSIONS
            # One turn ends, one session does, and one is only looked at.
            one, two, three = "s0000007", "s0001234", "s0002999"
            ended = await calls.EndTurn(
                sessions.EndTurnRequest(
                    session_id=one,
                    turn=turns[one].number,
                    turn_token=turns[one].token,
                    outcome=sessions.TURN_OUTCOME_COMPLETED,
                ),
                timeout=WAIT,
                metadata=whose,
            )
            assert ended.turn.state == sessions.TURN_STATE_ENDED
            await calls.EndSession(
                sessions.EndSessionRequest(session_id=two), timeout=WAIT, metadata=whose
            )
            found = await calls.GetSession(
                sessions.GetSessionRequest(session_id=three), timeout=WAIT, metadata=whose
            )
            assert found.session.turn_count == 2

            async def read() -> workers.GetStatusResponse:
                return await cluster.GetStatus(workers.GetStatusRequest(), timeout=WAIT)

            # Nobody comes back: all leases end at the deadline that a start gives them.
            status = await eventually(read, lambda now: now.open_leases == 0, 60)
            assert status.active_sessions == SESSIONS - 1
            assert status.running_turns == SESSIONS - 2
    finally:
        await kill(process)
    _, sessions_after, leases_after = stored(tmp_path / "store.db")
    assert len(sessions_after) == len(leases_after) == SESSIONS
