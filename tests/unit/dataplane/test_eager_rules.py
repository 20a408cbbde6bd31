"""What an eager return must not do, or forget."""

from __future__ import annotations

import pytest

from kvshuttle.dataplane import eager as eager_module
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.limits import EAGER_PIECE_BLOCKS
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.test_eager import UNUSED, eager, eager_grant, end_read, reads
from tests.unit.dataplane.test_scheduler_side import Bench, chain


@pytest.fixture
def bench() -> Bench:
    return Bench(total=300)


def given_back(bench: Bench, lease: str) -> str:
    """Why a lease was given back at once."""
    (stopped,) = bench.out.take("stopped")
    assert (stopped.lease_id, stopped.outcome) == (lease, UNUSED)
    return str(stopped.reason)


def test_beyond_the_quarantine_cap_nothing_is_read(bench: Bench) -> None:
    eager(bench, chain(40))
    (first,) = reads(bench)
    bench.agent.post(m.ReadGivenUp(first.request_id, "TRANSFER_STALLED"))
    bench.end_hook()
    assert bench.agent.pool_stats().quarantined_blocks == 40
    eager(bench, chain(4, "b"), "e2")
    assert given_back(bench, "e2") == "QUARANTINE_FULL"
    assert reads(bench) == [first]


def test_what_a_request_has_computed_meanwhile_stays_as_it_is(bench: Bench) -> None:
    hashes = chain(4)
    eager(bench, hashes)
    bench.pool.touch([7])
    bench.pool.insert(hashes[1], 7, 64)
    (read,) = reads(bench)
    end_read(bench, read)
    assert bench.pool.lookup(hashes[1]) == 7
    assert bench.pool.lookup(hashes[2]) == read.local_block_ids[2]


def test_a_range_from_the_middle_is_given_back(bench: Bench) -> None:
    """What comes before it is not known here, so nothing could be found by it."""
    grant = eager_grant(bench, chain(4))
    grant.blocks.range.start, grant.blocks.range.end = 2, 6
    bench.obey(grant=grant)
    assert given_back(bench, "e1") == "RANGE_STARTS_LATER"
    assert reads(bench) == []


def test_a_draining_worker_takes_nothing_in(bench: Bench) -> None:
    bench.obey(drain=agent_pb2.Drain())
    eager(bench, chain(4))
    assert given_back(bench, "e1") == "DRAINING"
    bench.obey(drain=agent_pb2.Drain(undo=True))
    eager(bench, chain(4), "e2")
    assert len(reads(bench)) == 1


def test_a_reset_of_the_cache_ends_it(bench: Bench) -> None:
    """What lands after it must not be entered: it may be of other weights."""
    hashes = chain(4)
    eager(bench, hashes)
    bench.agent.reset()
    assert m.Abandon(reads(bench)[0].request_id, "RESET") in bench.out.orders
    end_read(bench, reads(bench)[0], "RESET")
    assert given_back(bench, "e1") == "RESET"
    assert all(bench.pool.lookup(x) is None for x in hashes)
    assert bench.held == 0


def test_nothing_more_is_read_of_a_source_that_is_attested_dead(bench: Bench) -> None:
    eager(bench, chain(EAGER_PIECE_BLOCKS + 5))
    (first,) = reads(bench)
    other = types_pb2.WorkerRef(worker_id="other", incarnation=1)
    bench.obey(peer_fenced=agent_pb2.PeerFenced(worker=other))
    # The piece was complete and confirmed before.
    end_read(bench, first)
    assert reads(bench) == [first]
    assert [x.lease_id for x in bench.out.take("stopped")] == ["e1"]
    assert bench.held == 0


def test_a_hello_names_it(bench: Bench) -> None:
    """Else the control plane would let its source go while it reads."""
    eager(bench, chain(4))
    (lease,) = bench.agent.lease_inventory()
    assert (lease.lease_id, lease.is_source, lease.transferring) == ("e1", False, True)
    assert bench.agent.pool_stats().open_leases == 1


def test_a_repeated_grant_reads_nothing_twice(bench: Bench) -> None:
    eager(bench, chain(4))
    eager(bench, chain(4))
    assert len(reads(bench)) == 1
    assert bench.held == 4
    end_read(bench, reads(bench)[0])
    assert len(bench.out.take("stopped")) == 1


def test_ended_ones_are_remembered_up_to_a_number(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_module, "EAGER_REMEMBERED", 3)
    bench.obey(drain=agent_pb2.Drain())
    for number in range(5):
        eager(bench, chain(4), f"e{number}")
    remembered = [bench.agent.eager.has_ended(f"e{number}") for number in range(5)]
    assert remembered == [False, False, True, True, True]
