"""An agent asks for more time for what its requests read, and gives it where it is the source."""

from __future__ import annotations

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.scheduler import FinishedRequest, Tick
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from tests.unit.dataplane.test_scheduler_side import BLOCK, DECODE, PREFILL, Bench, chain


@pytest.fixture
def bench() -> Bench:
    return Bench()


def tick(bench: Bench, seconds: float = 0) -> None:
    bench.clock.advance(seconds)
    bench.agent.post(Tick())
    bench.agent.drain()


def extend(
    bench: Bench,
    *seqs: int,
    is_source: bool,
    ttl: float = 30,
    epoch: int = 5,
    late: float = 0,
) -> None:
    order = agent_pb2.ExtendLeases(
        extension=3,
        lease_epoch=epoch,
        lease_seqs=seqs,
        is_source=is_source,
        as_of=0 if is_source else bench.clock() - int(late * NS),
    )
    order.ttl.FromNanoseconds(int(ttl * NS))
    order.guard.FromSeconds(5)
    bench.obey(extend_leases=order)


def asked(bench: Bench) -> list[tuple[int, list[int]]]:
    return [(x.lease_epoch, list(x.lease_seqs)) for x in bench.out.take("leases_needed")]


def test_a_read_asks_for_more_time_when_half_of_it_is_over(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4), ttl=30, seq=7)
    assert bench.look(chain(6)) == 4 * BLOCK
    bench.agent.allocated("r", ("t", PREFILL), range(20, 27), 4 * BLOCK)
    assert bench.agent.next_deadline() == bench.clock() + 15 * NS
    tick(bench, 14)
    assert asked(bench) == []
    tick(bench, 1)
    assert asked(bench) == [(5, [7])]
    # Unanswered, it asks again, less and less often, and not at all once the time is over.
    tick(bench)
    assert asked(bench) == []
    tick(bench, 8)
    assert asked(bench) == [(5, [7])]
    tick(bench, 8)
    assert asked(bench) == []
    assert bench.agent.next_deadline() is None


def test_a_match_that_waits_for_blocks_asks_too_and_a_grant_that_nobody_uses_does_not(
    bench: Bench,
) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4), ttl=30, seq=7)
    tick(bench, 16)
    assert asked(bench) == []
    assert bench.look(chain(6)) == 4 * BLOCK
    tick(bench)
    assert asked(bench) == [(5, [7])]


def test_a_request_in_a_deep_queue_does_not_lose_its_lease(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.agent.arrived("r", ("t", PREFILL))
    bench.grant(chain(4), ttl=30, seq=7)
    assert bench.agent.next_deadline() == bench.clock() + 15 * NS
    tick(bench, 15)
    assert asked(bench) == [(5, [7])]
    extend(bench, 7, is_source=False)
    tick(bench, 20)  # past the first deadline
    assert asked(bench) == [(5, [7])]
    assert bench.look(chain(6)) == 4 * BLOCK


@pytest.mark.parametrize("how", ["aborted", "settled", "another"])
def test_nothing_is_asked_for_a_request_that_will_not_read(bench: Bench, how: str) -> None:
    bench.expect(PREFILL, "l1")
    bench.agent.arrived("r", ("t", PREFILL))
    bench.agent.arrived("r2", ("t", PREFILL))  # a child of n > 1
    bench.grant(chain(4), ttl=30, seq=7)
    if how == "aborted":
        bench.agent.finished(("t", PREFILL), FinishedRequest("r", (), (), 0, True))
    elif how == "settled":
        assert bench.look(chain(4), computed=4 * BLOCK) == 0
        bench.agent.allocated("r", ("t", PREFILL), range(20, 25), 0)
    else:
        bench.agent.finished(("t", PREFILL), FinishedRequest("r2", (), (), 0, True))
    tick(bench, 16)
    # A sibling that goes is not the one that waits.
    still = how == "another" and not bench.out.take("stopped")
    assert asked(bench) == ([(5, [7])] if still else [])


def test_a_control_plane_that_numbers_no_leases_is_not_asked(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4), ttl=30)
    assert bench.look(chain(6)) == 4 * BLOCK
    tick(bench, 16)
    assert asked(bench) == []


def test_the_destination_counts_longer_and_its_mover_too(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4), ttl=30, seq=7)
    assert bench.look(chain(6)) == 4 * BLOCK
    bench.agent.allocated("r", ("t", PREFILL), range(20, 27), 4 * BLOCK)
    bench.clock.advance(16)
    # It counts from the heartbeat that the order names, not from when it comes.
    extend(bench, 6, 7, is_source=False, late=2)
    (order,) = [o for o in bench.out.orders if isinstance(o, m.ExtendRead)]
    assert (order.request_id, order.deadline_ns) == ("r", bench.clock() + 28 * NS)
    assert bench.agent.next_deadline() == bench.clock() + 14 * NS
    # Neither another epoch's lease of this number nor a shorter time changes anything.
    extend(bench, 7, is_source=False, epoch=4, ttl=300)
    extend(bench, 7, is_source=False, ttl=1)
    assert len([o for o in bench.out.orders if isinstance(o, m.ExtendRead)]) == 1


def test_the_source_holds_longer_and_says_what_it_lacks(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5), ttl=10, seq=7)
    bench.clock.advance(8)
    extend(bench, 7, 8, is_source=True)
    (answer,) = bench.out.take("leases_extended")
    assert (answer.extension, list(answer.missing_seqs)) == (3, [8])
    # Its movers say yes for as long.
    until = bench.agent.source.open_leases[0].deadline_ns
    assert until > bench.clock() + 35 * NS
    assert [o for o in bench.out.orders if isinstance(o, m.Serve)][-1] == m.Serve("l1", until)
    tick(bench, 20)
    assert not any(isinstance(o, m.Unserve) for o in bench.out.orders)
    # The number is one of its epoch.
    extend(bench, 7, is_source=True, epoch=6)
    (answer,) = bench.out.take("leases_extended")
    assert list(answer.missing_seqs) == [7]
    assert bench.agent.source.open_leases[0].deadline_ns == until


def test_a_lease_that_is_closing_is_not_revived(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5), ttl=10, seq=7)
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1", version=3))
    extend(bench, 7, is_source=True)
    (answer,) = bench.out.take("leases_extended")
    assert list(answer.missing_seqs) == [7]
