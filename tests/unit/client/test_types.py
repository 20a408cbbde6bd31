"""What a user's type checker sees of the SDK. Nothing here is run: `make lint` checks it, and would
find an `ignore` that nothing needs, so each of them is a mistake that is seen."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any, assert_type

import httpx
import pytest

from kvshuttle.client import (
    AsyncClient,
    Client,
    ClientOptions,
    KVShuttleError,
    NotFoundError,
    RetryPolicy,
    Timeouts,
    TlsOptions,
)
from kvshuttle.client.agents import AsyncConversation, Conversation, attach
from kvshuttle.v1.cluster_service_pb2 import Worker
from kvshuttle.v1.session_service_pb2 import Plan, Session, WatchSessionsResponse


def options(path: Path) -> ClientOptions:
    tls = TlsOptions(ca_file=path, cert_file="me.pem", key_file="me.key")
    ClientOptions(retry=3)  # type: ignore[call-arg]
    return ClientOptions(
        tls=tls, retries=RetryPolicy(attempts=2), timeouts=Timeouts(read_s=1.0), tenant="acme"
    )


def synchronous(given: ClientOptions) -> None:
    with Client("cp:7400", given) as client:
        assert_type(client, Client)
        with client.session("s1", value="high") as s, s.turn(prompt_tokens_estimate=900) as turn:
            assert_type(turn.prefill_url, str)
            assert_type(turn.decode_url, str)
            assert_type(turn.plan, Plan)
            assert_type(turn.kv_transfer_params("prefill"), dict[str, Any])
            turn.kv_transfer_params("neither")  # type: ignore[arg-type]
            turn.used(prompt_tokens=900, cached_tokens=864, output_tokens=120)
            s.tool_running("20")  # type: ignore[arg-type]
        with client.session("s1", value="great"):  # type: ignore[arg-type]
            pass
        assert_type(client.list_sessions(), Iterator[Session])
        watch = client.watch_sessions(timeout=1)
        assert_type(watch, Generator[WatchSessionsResponse, None, None])
        try:
            client.get_session("s1", timeout=2.0)
        except NotFoundError as error:
            assert_type(error.reason, str)
            assert_type(error.remedy, str)
            assert_type(error.retry_after_s, float | None)
            raise KVShuttleError from error  # type: ignore[call-arg]
        client.no_such_method()  # type: ignore[attr-defined]


async def asynchronous(given: ClientOptions) -> None:
    async with AsyncClient("cp:7400", given) as client:
        assert_type(client, AsyncClient)
        async with client.session("s1") as s:
            async with s.turn() as turn:
                assert_type(turn.decode_url, str)
            await s.tool_running(20)
        assert_type(client.list_workers(), AsyncIterator[Worker])
        assert_type(await client.get_session("s1"), Session)
        with client.session("s1"):  # type: ignore[attr-defined]
            pass


async def agents() -> None:
    """The hook gives back the client that it was given."""
    assert_type(attach(httpx.AsyncClient()), httpx.AsyncClient)
    assert_type(attach(httpx.Client()), httpx.Client)
    async with AsyncConversation("s1", value="low") as conversation:
        assert_type(await conversation.tool_running(20), bool)
        report = await conversation.report()
        if report is not None:
            assert_type(report.cached_tokens, int)
    with Conversation() as another:
        assert_type(another.session_id, str)
        assert_type(another.over(), bool)


@pytest.mark.parametrize("package", ["client", "v1", "gateway", "cli"])
def test_the_packages_say_that_they_are_typed(package: str) -> None:
    """Without this file a type checker takes nothing of an installed package for granted."""
    found = importlib.util.find_spec(f"kvshuttle.{package}")
    assert found is not None
    assert found.submodule_search_locations is not None
    assert all((Path(one) / "py.typed").is_file() for one in found.submodule_search_locations)
