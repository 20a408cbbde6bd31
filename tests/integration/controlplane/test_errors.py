"""Every refusal has its code, its reason, and says what to do."""

from __future__ import annotations

import base64
from typing import Any

import grpc
import pytest

from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.conftest import Cluster, T
from tests.integration.controlplane.status import details, reason

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CASES: list[tuple[str, str, Any, str]] = [
    ("sessions", "BeginTurn", sessions.BeginTurnRequest(), "session_id"),
    ("sessions", "BeginTurn", sessions.BeginTurnRequest(session_id="x" * 257), "session_id"),
    ("sessions", "BeginTurn", sessions.BeginTurnRequest(session_id="a\nb"), "session_id"),
    (
        "sessions",
        "BeginTurn",
        sessions.BeginTurnRequest(session_id="s", request_id="r" * 129),
        "request_id",
    ),
    (
        "sessions",
        "BeginTurn",
        sessions.BeginTurnRequest(session_id="s", return_policy=sessions.ReturnPolicy.ValueType(9)),
        "return_policy",
    ),
    (
        "sessions",
        "BeginTurn",
        sessions.BeginTurnRequest(
            session_id="s", hints=types.SessionHints(value=types.SessionValue.ValueType(9))
        ),
        "hints.value",
    ),
    (
        "sessions",
        "BeginTurn",
        sessions.BeginTurnRequest(session_id="s", exclude_worker_ids=[""]),
        "exclude_worker_ids",
    ),
    ("sessions", "EndTurn", sessions.EndTurnRequest(session_id="s"), "turn"),
    ("sessions", "EndTurn", sessions.EndTurnRequest(session_id="s", turn=1), "outcome"),
    (
        "sessions",
        "EndTurn",
        sessions.EndTurnRequest(
            session_id="s",
            turn=1,
            outcome=sessions.TURN_OUTCOME_FAILED,
            turn_token="x" * 129,
        ),
        "turn_token",
    ),
    (
        "sessions",
        "EndTurn",
        sessions.EndTurnRequest(session_id="s", turn=1, outcome=sessions.TURN_OUTCOME_ABANDONED),
        "outcome",
    ),
    *(
        (
            "sessions",
            "EndTurn",
            sessions.EndTurnRequest(
                session_id="s",
                turn=1,
                outcome=sessions.TURN_OUTCOME_COMPLETED,
                usage=sessions.TurnUsage(**{name: count}),  # type: ignore[arg-type]
            ),
            f"usage.{name}",
        )
        for name in ("prompt_tokens", "cached_tokens", "output_tokens")
        for count in ((1 << 40) + 1, (1 << 64) - 1)
    ),
    (
        "sessions",
        "BeginTurn",
        sessions.BeginTurnRequest(session_id="s", prompt_tokens_estimate=(1 << 64) - 1),
        "prompt_tokens_estimate",
    ),
    ("sessions", "ListSessions", sessions.ListSessionsRequest(page_size=-1), "page_size"),
    ("sessions", "ListSessions", sessions.ListSessionsRequest(page_token="?"), "page_token"),
    (
        "sessions",
        "ListSessions",
        sessions.ListSessionsRequest(state=sessions.SessionState.ValueType(7)),
        "state",
    ),
    ("leases", "GetLease", leases.GetLeaseRequest(), "lease_id"),
    (
        "leases",
        "ListLeases",
        leases.ListLeasesRequest(states=[leases.LeaseState.ValueType(77)]),
        "states",
    ),
    ("cluster", "GetWorker", workers.GetWorkerRequest(), "worker_id"),
    (
        "cluster",
        "FenceWorker",
        workers.FenceWorkerRequest(worker=types.WorkerRef(worker_id="p")),
        "worker.incarnation",
    ),
]


def token(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


STRANGE = [
    "?",
    "x",
    token("{}"),
    token("7"),
    token("[]"),
    token("[null]"),
    token("[[]]"),
    token("[1]"),
    token("[1.5]"),
    token("[true]"),
    token("[{},[]]"),
    token("[null,null]"),
    token("[true,false]"),
    token("[1.5,2.5]"),
    token('["a",1]'),
    token('[1,"a"]'),
    token('["a","b","c"]'),
    token("[1,2,3]"),
    token("[" * 100_000),
    token("[" * 100_000 + "]" * 100_000),
    token('{"a":' * 100_000),
    token(f"[{'9' * 5_000},1]"),
]
"""Page tokens that no list ever gives."""
OTHERS = {
    "ListSessions": ['["a"]', "[1,2]"],
    "ListLeases": ["[1]", '["a","b"]', '["a"]'],
    "ListWorkers": ['["a","b"]', "[1,2]"],
}
"""What another list may give."""


async def refusal(cluster: Cluster, service: str, method: str, request: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(getattr(cluster, service), method)(request, timeout=T)
    return caught.value


async def test_a_wrong_field_is_named_with_its_remedy(cluster: Cluster) -> None:
    for service, method, request, field in CASES:
        error = await refusal(cluster, service, method, request)
        assert error.code() is INVALID, (method, request)
        found = details(error)
        assert found["ErrorInfo"].reason == "INVALID_FIELD"
        assert found["ErrorInfo"].metadata["field"] == field
        violation = found["BadRequest"].field_violations[0]
        assert violation.field == field
        assert violation.description


async def test_a_page_token_that_the_list_did_not_give_is_refused(cluster: Cluster) -> None:
    for service, method, kind in [
        ("sessions", "ListSessions", sessions.ListSessionsRequest),
        ("leases", "ListLeases", leases.ListLeasesRequest),
        ("cluster", "ListWorkers", workers.ListWorkersRequest),
    ]:
        for strange in STRANGE + [token(text) for text in OTHERS[method]]:
            error = await refusal(cluster, service, method, kind(page_token=strange))
            assert error.code() is INVALID, (method, strange[:40])
            assert details(error)["ErrorInfo"].metadata["field"] == "page_token"


async def test_a_remedy_names_what_is_taken(cluster: Cluster) -> None:
    await cluster.pair()
    for wrong in (0, sessions.TURN_OUTCOME_ABANDONED, 99):
        request = sessions.EndTurnRequest(
            session_id="s", turn=1, outcome=sessions.TurnOutcome.ValueType(wrong)
        )
        error = await refusal(cluster, "sessions", "EndTurn", request)
        remedy = details(error)["ErrorInfo"].metadata["remedy"]
        assert remedy == "use one of COMPLETED, CANCELLED, FAILED"
    begun = await cluster.begin()
    for name in remedy.removeprefix("use one of ").split(", "):
        outcome = sessions.TurnOutcome.Value(f"TURN_OUTCOME_{name}")
        await cluster.end(begun.turn.turn, outcome=outcome)


async def test_what_is_not_there_is_not_found(cluster: Cluster) -> None:
    for service, method, request, why in [
        ("sessions", "GetSession", sessions.GetSessionRequest(session_id="s"), "SESSION"),
        ("sessions", "EndSession", sessions.EndSessionRequest(session_id="s"), "SESSION"),
        ("sessions", "UpdateSession", sessions.UpdateSessionRequest(session_id="s"), "SESSION"),
        (
            "sessions",
            "EndTurn",
            sessions.EndTurnRequest(session_id="s", turn=1, outcome=sessions.TURN_OUTCOME_FAILED),
            "SESSION",
        ),
        ("leases", "GetLease", leases.GetLeaseRequest(lease_id="x"), "LEASE"),
        ("leases", "RevokeLease", leases.RevokeLeaseRequest(lease_id="x"), "LEASE"),
        ("leases", "RenewLease", leases.RenewLeaseRequest(lease_id="x"), "LEASE"),
        ("cluster", "GetWorker", workers.GetWorkerRequest(worker_id="x"), "WORKER"),
        ("cluster", "DrainWorker", workers.DrainWorkerRequest(worker_id="x"), "WORKER"),
    ]:
        error = await refusal(cluster, service, method, request)
        assert error.code() is grpc.StatusCode.NOT_FOUND, method
        assert reason(error) == f"{why}_NOT_FOUND"


async def test_a_call_without_a_deadline_is_refused(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.cluster.GetStatus(workers.GetStatusRequest())
    assert caught.value.code() is INVALID
    assert reason(caught.value) == "DEADLINE_REQUIRED"


async def test_no_worker_says_when_to_try_again(cluster: Cluster) -> None:
    request = sessions.BeginTurnRequest(session_id="s")
    error = await refusal(cluster, "sessions", "BeginTurn", request)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    found = details(error)
    assert found["ErrorInfo"].reason == "NO_WORKER"
    assert found["RetryInfo"].retry_delay.seconds == 1
    # Nothing was made of it.
    assert not (
        await cluster.sessions.ListSessions(sessions.ListSessionsRequest(), timeout=T)
    ).sessions


async def test_too_large_a_message_is_refused(cluster: Cluster) -> None:
    request = sessions.GetSessionRequest(session_id="x" * (2 << 20))
    error = await refusal(cluster, "sessions", "GetSession", request)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_bytes_that_are_no_message_do_no_harm(cluster: Cluster) -> None:
    for path in (
        "/kvshuttle.v1.SessionService/BeginTurn",
        "/kvshuttle.v1.LeaseService/ListLeases",
        "/kvshuttle.v1.ClusterService/GetWorker",
    ):
        call: Any = cluster.api.unary_unary(path)
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"\xff\xfe\x00garbage", timeout=T)
    await cluster.cluster.GetStatus(workers.GetStatusRequest(), timeout=T)


async def test_an_internal_error_says_nothing_of_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(cluster.server.registry, "begin_turn", broken)
    request = sessions.BeginTurnRequest(session_id="s")
    error = await refusal(cluster, "sessions", "BeginTurn", request)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")


async def test_lists_are_paged(cluster: Cluster) -> None:
    await cluster.pair()
    for number in range(5):
        await cluster.begin(f"s{number}")
    seen: list[str] = []
    token = ""
    while True:
        request = sessions.ListSessionsRequest(page_size=2, page_token=token)
        page = await cluster.sessions.ListSessions(request, timeout=T)
        seen += [s.session_id for s in page.sessions]
        token = page.next_page_token
        if not token:
            break
    assert seen == [f"s{number}" for number in range(5)]
    found: list[str] = []
    while True:
        listed = await cluster.cluster.ListWorkers(
            workers.ListWorkersRequest(page_size=1, page_token=token), timeout=T
        )
        found += [w.ref.worker_id for w in listed.workers]
        token = listed.next_page_token
        if not token:
            break
    assert found == ["d", "p"]
