"""Where a request goes when the control plane cannot say."""

from __future__ import annotations

from kvshuttle.gateway.engines import EngineDirectory
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types


def turn(prefill: str, decode: str) -> session.Turn:
    return session.Turn(
        prefill=session.Placement(worker=types.WorkerRef(worker_id="p"), url=prefill),
        decode=session.Placement(worker=types.WorkerRef(worker_id="d"), url=decode),
    )


def worker(worker_id: str, state: cluster.WorkerState.ValueType) -> cluster.Worker:
    return cluster.Worker(
        ref=types.WorkerRef(worker_id=worker_id),
        role=types.WORKER_ROLE_DECODE,
        state=state,
        url=f"http://{worker_id}",
    )


def urls(directory: EngineDirectory, session_id: str = "s", *failed: str) -> list[str]:
    return [engine.url for engine in directory.candidates("t", session_id, failed)]


def test_decode_engines_go_first_and_failed_ones_are_left_out() -> None:
    directory = EngineDirectory(["http://p"], ["http://d1", "http://d2"])
    assert urls(directory)[2] == "http://p"
    assert set(urls(directory)) == {"http://p", "http://d1", "http://d2"}
    assert urls(directory, "s", "http://d1") == ["http://d2", "http://p"]


def test_sessions_stay_and_spread() -> None:
    directory = EngineDirectory([], [f"http://d{number}" for number in range(4)])
    firsts = [urls(directory, f"s{number}")[0] for number in range(50)]
    assert len(set(firsts)) == 4
    assert firsts == [urls(directory, f"s{number}")[0] for number in range(50)]


def test_a_conversation_goes_back_to_where_it_was() -> None:
    directory = EngineDirectory([], [f"http://d{number}" for number in range(4)])
    directory.learn_placements("t", "s", turn("http://p", "http://last"))
    assert urls(directory)[0] == "http://last"
    assert urls(directory)[-1] == "http://p"


def test_the_list_replaces_what_was_known() -> None:
    directory = EngineDirectory([], [])
    directory.learn_placements("t", "s", turn("http://p", "http://d"))
    directory.learn_workers(
        [worker("a", cluster.WORKER_STATE_READY), worker("b", cluster.WORKER_STATE_LOST)]
    )
    assert urls(directory) == ["http://a"]
