"""vLLM caches a block when it schedules the step that fills it: nobody reads it before that step is
over, whoever's request it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvshuttle.dataplane.scheduler import StreamUp
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.test_eager import eager, end_read, reads
from tests.unit.dataplane.test_push_sides import Decode
from tests.unit.dataplane.test_scheduler_side import DECODE, Bench, chain

HASHES = chain(4)


def came_back(bench: Bench) -> None:
    """An eager return ends; of its chain two blocks are those of a request that runs."""
    bench.pool.cache.update(zip(HASHES, (10, 11, 12, 13), strict=True))
    bench.agent.source.offer_cached("acme", "s", HASHES)


def was_cut_off(bench: Bench) -> None:
    """A request ends in its first step, in which another one fills what it found."""
    bench.expect(DECODE)
    bench.offer(HASHES, aborted=True)


LEFT = pytest.mark.parametrize("left", [came_back, was_cut_off])


@LEFT
def test_a_range_is_granted_when_the_step_that_may_fill_it_is_over(
    left: Callable[[Bench], None],
) -> None:
    bench = Bench()
    bench.begun, bench.over = 7, 5
    left(bench)
    assert bench.out.take("offered")
    bench.harden(HASHES)
    bench.over = 6
    bench.end_hook()
    assert not bench.out.take("hardened")
    # Later steps do not matter.
    bench.begun, bench.over = 9, 7
    bench.end_hook()
    (hardened,) = bench.out.take("hardened")
    assert list(hardened.blocks.block_ids) == [10, 11, 12, 13]
    bench.end_hook()
    assert not bench.out.take("hardened")
    assert not bench.out.take("refused")


@LEFT
def test_in_an_engine_at_rest_it_is_granted_at_once(left: Callable[[Bench], None]) -> None:
    bench = Bench()
    bench.begun = bench.over = 7
    left(bench)
    bench.begun = 8
    bench.harden(HASHES)
    assert bench.out.take("hardened")


def test_what_a_request_left_at_its_own_end_is_granted_at_once() -> None:
    bench = Bench()
    bench.begun, bench.over = 8, 7
    bench.expect(DECODE)
    bench.offer(HASHES)
    bench.harden(HASHES)
    assert bench.out.take("hardened")


def test_nor_is_it_pushed_before() -> None:
    bench = Bench()
    bench.begun, bench.over = 7, 6
    was_cut_off(bench)
    assert bench.agent.source.blocks_of("acme", "s", 0, HASHES) == []
    bench.over = 7
    assert bench.agent.source.blocks_of("acme", "s", 0, HASHES) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    "over",
    [
        {"reader_stopped": agent_pb2.ReaderStopped(lease_id="l1")},
        {
            "peer_fenced": agent_pb2.PeerFenced(
                worker=types_pb2.WorkerRef(worker_id="other", incarnation=1)
            )
        },
    ],
)
def test_nothing_is_held_for_a_reader_that_is_gone_meanwhile(over: dict[str, Any]) -> None:
    bench = Bench()
    bench.begun, bench.over = 7, 6
    came_back(bench)
    bench.harden(HASHES)
    bench.obey(**over)
    bench.over = 7
    bench.end_hook()
    assert not bench.out.take("hardened")
    assert bench.held == 0


@pytest.mark.parametrize("how", ["stream", "replaced", "term"])
def test_what_waits_is_not_obeyed_when_its_stream_or_its_term_is_over(how: str) -> None:
    bench = Bench()
    bench.begun, bench.over = 7, 6
    came_back(bench)
    bench.harden(HASHES)
    if how == "stream":
        bench.agent.end_stream(bench.life)
    elif how == "replaced":
        bench.agent.post(StreamUp(2, 6, agent_pb2.AgentWelcome(incarnation=1, lineage_id="L")))
    else:
        bench.agent.saw_epoch(6)
    bench.end_hook()
    bench.over = 7
    bench.end_hook()
    assert not bench.out.take("hardened")
    assert bench.held == 0


def test_who_waits_for_a_step_is_not_left_waiting_by_an_engine_that_rests() -> None:
    bench = Decode()
    bench.land()
    bench.agent._counts = lambda: (0, 1)
    bench.begun, bench.over = 7, 6
    came_back(bench)
    bench.harden(HASHES, lease="l9")
    looks: list[int] = []

    def has_input() -> bool:
        looks.append(1)
        return True

    bench.agent.rest(has_input)
    assert not looks
    bench.over = 7
    bench.end_hook()
    assert bench.out.take("hardened")
    bench.settle()
    bench.agent.rest(has_input)
    assert looks


def test_what_an_eager_return_has_brought_is_filled() -> None:
    """It was read and confirmed; what the cache had before is filled by the steps of then."""
    bench = Bench(total=300)
    bench.begun, bench.over = 7, 6
    bench.pool.cache.update(zip(HASHES[:2], (40, 41), strict=True))
    eager(bench, HASHES)
    (read,) = reads(bench)
    bench.begun = 9
    end_read(bench, read)
    bench.harden(HASHES)
    assert not bench.out.take("hardened")
    bench.over = 7
    bench.end_hook()
    assert bench.out.take("hardened")


def test_what_was_let_go_meanwhile_is_not_granted() -> None:
    bench = Bench()
    bench.begun, bench.over = 7, 6
    came_back(bench)
    bench.harden(HASHES)
    bench.agent.source.drop_replicas("RESET")
    bench.over = 7
    bench.end_hook()
    assert not bench.out.take("hardened")
    assert [x.reason for x in bench.out.take("refused")] == ["REPLICA_GONE"]
