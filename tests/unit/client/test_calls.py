"""The one table of calls, the two clients made from it, and when a call is made again."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, assert_type

import grpc
import pytest

from kvshuttle.client import (
    AbortedError,
    AsyncClient,
    Client,
    ClientOptions,
    DeadlineExceededError,
    KVShuttleError,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
    hints,
)
from kvshuttle.client.calls import ClientCalls
from kvshuttle.client.retries import Attempts
from kvshuttle.client.rpcs import RPCS, Rpc
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as lease
from kvshuttle.v1 import session_service_pb2 as session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

CALLS = [name for name in vars(ClientCalls) if not name.startswith("_")]


def test_every_method_of_the_api_is_in_the_table() -> None:
    ours = {one.path: one for one in vars(RPCS).values() if isinstance(one, Rpc)}
    theirs = {}
    for module in (session, lease, cluster):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                theirs[f"/{service.full_name}/{method.name}"] = method
    # How three of the others travel, not a call of its own.
    del theirs["/kvshuttle.v1.SessionService/Turns"]
    assert ours.keys() == theirs.keys()
    for path, method in theirs.items():
        assert ours[path].request.DESCRIPTOR is method.input_type
        assert ours[path].response.DESCRIPTOR is method.output_type


@pytest.mark.parametrize("client", [AsyncClient, Client])
def test_both_clients_have_every_call(client: type) -> None:
    assert len(CALLS) == len([one for one in vars(RPCS).values() if isinstance(one, Rpc)])
    for name in CALLS:
        build, method = getattr(ClientCalls, name), getattr(client, name)
        assert method.__doc__ == build.__doc__
        assert list(inspect.signature(method).parameters) == list(
            inspect.signature(build).parameters
        )


def check_types(aio: AsyncClient, sync: Client) -> None:
    """Read by mypy, not run: parameters and results keep their types through the table."""
    assert_type(sync.get_session("s"), session.Session)
    _: Coroutine[Any, Any, session.Session] = aio.get_session("s")
    leases: Iterator[lease.Lease] = sync.list_leases(worker_id="p")
    workers: AsyncIterator[cluster.Worker] = aio.list_workers()
    del leases, workers
    assert_type(sync.session("s").tool_running(20), session.Session)
    sync.get_session(1)  # type: ignore[arg-type]
    sync.get_worker("p", tenant="t")  # type: ignore[call-arg]
    sync.session("s", value="great")  # type: ignore[arg-type]


def unavailable(retry_after_s: float | None = None) -> UnavailableError:
    return UnavailableError("away", code=grpc.StatusCode.UNAVAILABLE, retry_after_s=retry_after_s)


def test_what_is_tried_again() -> None:
    policy = RetryPolicy(attempts=4, first_pause_s=0.1, last_pause_s=0.3)
    pauses = [policy.pause_s(attempt, unavailable()) for attempt in (1, 2, 3, 4)]
    assert pauses == [0.1, 0.2, 0.3, None]
    assert policy.pause_s(1, unavailable(1.5)) == 1.5

    quota = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert policy.pause_s(1, ResourceExhaustedError("full", code=quota)) is None
    assert policy.pause_s(1, ResourceExhaustedError("full", code=quota, retry_after_s=2.0)) == 2.0

    never: list[KVShuttleError] = [
        DeadlineExceededError("late", code=grpc.StatusCode.DEADLINE_EXCEEDED),
        AbortedError("lost", code=grpc.StatusCode.ABORTED),
    ]
    assert [policy.pause_s(1, error) for error in never] == [None, None]
    with pytest.raises(ValueError, match="attempts is 0"):
        RetryPolicy(attempts=0)


def test_all_tries_are_within_one_deadline() -> None:
    attempts = Attempts(RetryPolicy(attempts=100, first_pause_s=1), timeout_s=5)
    assert attempts.pause_after(unavailable()) >= 1
    with pytest.raises(UnavailableError):
        attempts.pause_after(unavailable(retry_after_s=6))


def test_hints_that_cannot_be_meant() -> None:
    assert hints() is None
    with pytest.raises(ValueError, match="value is 'great': use one of low, normal, high"):
        hints(value="great")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected_idle_s is -1"):
        hints(expected_idle_s=-1)
    with pytest.raises(ValueError, match="turn_stream needs AsyncClient"):
        Client("127.0.0.1:1", ClientOptions(turn_stream=True))
