"""Conversations through the two Python clients, against a real control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvshuttle.client import (
    NO_RETRIES,
    AsyncClient,
    Client,
    ClientOptions,
    FailedPreconditionError,
    NotFoundError,
    RetryPolicy,
    TlsOptions,
    UnavailableError,
)
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.conftest import Cluster, T
from tests.integration.controlplane.test_access import Site
from tests.integration.gateway.fake_control_plane import FakeControlPlane, status
from tests.support.certificates import issue_for_uri

PATIENT = RetryPolicy(attempts=1_000, first_pause_s=0.01, last_pause_s=0.05)


async def test_a_conversation(cluster: Cluster) -> None:
    await cluster.pair()
    async with AsyncClient(cluster.server.addresses.api) as client:
        async with client.session("s1", value="high") as s:
            with pytest.raises(NotFoundError):
                await s.get()
            async with s.turn(prompt_tokens_estimate=900) as turn:
                assert (turn.number, turn.prefill_url) == (1, "http://p:8000")
                assert turn.decode_url == "http://d:8000"
                assert turn.kv_transfer_params("prefill")["kvshuttle"]["leg"] == "prefill"
                assert (await s.get()).turns[0].state == sessions.TURN_STATE_RUNNING
                turn.used(prompt_tokens=900, output_tokens=7, time_to_first_token_s=0.25)
                turn.idle_after(3)
            found = await s.get()
            assert found.turns[0].outcome == sessions.TURN_OUTCOME_COMPLETED
            assert found.turns[0].usage.prompt_tokens == 900
            assert found.turns[0].usage.time_to_first_token.ToMilliseconds() == 250
            assert found.hints.value == types.SESSION_VALUE_HIGH
            assert found.hints.expected_idle.seconds == 3

            assert (await s.tool_running(20)).hints.expected_idle.seconds == 20
            assert (await s.hint(value="low")).hints.value == types.SESSION_VALUE_LOW
            async with s.turn() as turn:
                assert turn.number == 2
            # A later turn does not take back what was said since the first.
            assert (await s.get()).hints.value == types.SESSION_VALUE_LOW
        assert (await cluster.session("s1")).state == sessions.SESSION_STATE_ENDED


async def test_the_same_without_an_event_loop(cluster: Cluster) -> None:
    await cluster.pair()

    def converse() -> tuple[list[str], sessions.Session]:
        with Client(cluster.server.addresses.api) as client:
            with client.session("s1", value="high", keep=True) as s:
                with s.turn() as turn:
                    turn.used(prompt_tokens=5)
                assert s.tool_running(20).hints.expected_idle.seconds == 20
            watch = client.watch_sessions(session_id="s1")
            first = next(watch)
            watch.close()
            assert [one.session_id for one in first.snapshot.sessions] == ["s1"]
            with pytest.raises(NotFoundError) as raised:
                client.get_session("nobody")
            assert raised.value.reason == "SESSION_NOT_FOUND"
            listed = [one.session_id for one in client.list_sessions(page_size=1)]
            assert [one.ref.worker_id for one in client.list_workers()] == ["d", "p"]
            return listed, client.get_session("s1")

    listed, found = await asyncio.to_thread(converse)
    assert listed == ["s1"]
    # It is to be kept.
    assert found.state == sessions.SESSION_STATE_ACTIVE
    assert found.turns[0].usage.prompt_tokens == 5


async def test_how_a_turn_ends(cluster: Cluster) -> None:
    await cluster.pair()

    async def outcome(error: BaseException) -> int:
        with pytest.raises(type(error)):
            async with s.turn():
                raise error
        return (await s.get()).turns[-1].outcome

    async with AsyncClient(cluster.server.addresses.api) as client:
        s = client.session("s")
        assert await outcome(LookupError("bad")) == sessions.TURN_OUTCOME_FAILED
        assert await outcome(asyncio.CancelledError()) == sessions.TURN_OUTCOME_CANCELLED


async def test_the_first_error_is_the_news(cluster: Cluster) -> None:
    """A turn and a session that cannot be ended do not hide why their block was left."""
    await cluster.pair()
    client = AsyncClient(cluster.server.addresses.api, ClientOptions(retries=NO_RETRIES))

    async def fail() -> None:
        async with client.session("s") as s, s.turn():
            await cluster.server.stop()
            raise LookupError("bad")

    async with client:
        with pytest.raises(LookupError) as raised:
            await fail()
        notes = raised.value.__notes__
        assert [note.split(" failed")[0] for note in notes] == [
            "kvshuttle: ending the turn",
            "kvshuttle: ending the session",
        ]
        with pytest.raises(UnavailableError):
            async with client.session("s"):
                pass


async def test_a_session_without_a_turn_needs_no_end(cluster: Cluster) -> None:
    async with AsyncClient(cluster.server.addresses.api) as client:
        async with client.session("s"):
            pass
        with pytest.raises(NotFoundError):
            await client.session("s").end()
        with pytest.raises(RuntimeError, match="has not begun"):
            _ = client.session("s").turn().number


async def test_renew_of_a_lease_that_is_not(cluster: Cluster) -> None:
    async with AsyncClient(cluster.server.addresses.api) as client:
        with pytest.raises((NotFoundError, FailedPreconditionError)) as raised:
            await client.renew_lease("none", 40)
        assert raised.value.reason


@pytest.fixture
async def fake() -> AsyncIterator[FakeControlPlane]:
    async with FakeControlPlane() as control:
        control.placements = [(None, ("d", "http://d"))]
        yield control


async def test_a_mutation_goes_again_under_its_one_name(fake: FakeControlPlane) -> None:
    away = status(14, "", "not now")
    fake.refuse_ends = [away, away]
    async with AsyncClient(fake.target, ClientOptions(retries=PATIENT)) as client:
        await client.end_turn("s", 1, sessions.TURN_OUTCOME_COMPLETED, timeout=20)
        assert len({one.request_id for one in fake.end_tries}) == 1
        assert (len(fake.end_tries), len(fake.ends)) == (3, 1)

    fake.refuse_ends = [away]

    def once() -> None:
        with Client(fake.target, ClientOptions(retries=PATIENT)) as client:
            client.end_turn("s", 2, sessions.TURN_OUTCOME_COMPLETED, timeout=20)

    await asyncio.to_thread(once)
    assert len({one.request_id for one in fake.end_tries}) == 2
    assert fake.outcomes() == [(1, 1), (2, 1)]


async def test_what_was_refused_for_good_is_not_tried_again(fake: FakeControlPlane) -> None:
    fake.refuse_ends = [status(9, "INCARNATION_MISMATCH", "stale")]
    async with AsyncClient(fake.target, ClientOptions(retries=PATIENT)) as client:
        with pytest.raises(FailedPreconditionError):
            await client.end_turn("s", 1, sessions.TURN_OUTCOME_COMPLETED, timeout=20)
    assert len(fake.end_tries) == 1


async def test_a_control_plane_that_comes_back_is_found(fake: FakeControlPlane) -> None:
    await fake.stop()
    async with AsyncClient(fake.target, ClientOptions(retries=PATIENT)) as client:
        call = asyncio.create_task(client.get_status(timeout=30))
        with pytest.raises(UnavailableError):  # nobody is there
            async with AsyncClient(fake.target, ClientOptions(retries=NO_RETRIES)) as other:
                await other.get_status(timeout=5)
        await fake.start()
        assert (await call).epoch == 1


async def ask(target: str, options: ClientOptions) -> list[str]:
    """How a read for operators goes, through either client."""

    def synchronously() -> str:
        with Client(target, options) as client:
            return str(len(list(client.list_workers(timeout=T))))

    async def asynchronously() -> str:
        async with AsyncClient(target, options) as client:
            return str(len([one async for one in client.list_workers(timeout=T)]))

    found = await asyncio.gather(
        asyncio.to_thread(synchronously), asynchronously(), return_exceptions=True
    )
    return [one if isinstance(one, str) else type(one).__name__ for one in found]


async def test_tokens(tmp_path: Path) -> None:
    site = Site(tmp_path, one_listener=False)
    await site.server.start()
    try:
        target, ca = site.server.addresses.api, TlsOptions(ca_file=tmp_path / "ca.pem")
        assert await ask(target, ClientOptions(tls=ca, token="an-operator")) == ["0"] * 2
        denied = await ask(target, ClientOptions(tls=ca, token="client-of-acme"))
        assert denied == ["PermissionDeniedError"] * 2
        unknown = await ask(target, ClientOptions(tls=ca, token="stolen"))
        assert unknown == ["UnauthenticatedError"] * 2
    finally:
        await site.close()


async def test_certificates(tmp_path: Path) -> None:
    site = Site(tmp_path, one_listener=False, tokens=False)
    await site.server.start()
    try:

        def files(uri: str) -> ClientOptions:
            key, chain = issue_for_uri(site.ca, uri)
            (tmp_path / "me.key").write_bytes(key)
            (tmp_path / "me.pem").write_bytes(chain)
            # Paths, or their names.
            tls = TlsOptions(tmp_path / "ca.pem", f"{tmp_path}/me.pem", f"{tmp_path}/me.key")
            return ClientOptions(tls=tls, retries=NO_RETRIES)

        target = site.server.addresses.api
        assert await ask(target, files("kvshuttle://operator/me")) == ["0"] * 2
        denied = await ask(target, files("kvshuttle://gateway/g"))
        assert denied == ["PermissionDeniedError"] * 2
        nobody = ClientOptions(tls=TlsOptions(ca_file=tmp_path / "ca.pem"), retries=NO_RETRIES)
        assert await ask(target, nobody) == ["UnavailableError"] * 2
    finally:
        await site.close()
