"""Rules of the agent that nothing else would miss: each was broken once and no test saw it."""

from __future__ import annotations

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane import source as source_module
from kvshuttle.dataplane import turns as turns_module
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.turns import TurnBook, TurnLeg
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import session_service_pb2 as session_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.test_scheduler_side import DECODE, Bench, chain, ended, load


@pytest.fixture
def bench() -> Bench:
    return Bench()


def held(bench: Bench, blocks: int = 5) -> None:
    """A lease's range, for the first boot of `other`."""
    bench.expect(DECODE)
    bench.offer(chain(blocks))
    bench.harden(chain(blocks))


def unserved(bench: Bench) -> list[str]:
    return [order.lease_id for order in bench.out.orders if isinstance(order, m.Unserve)]


def test_a_source_lets_go_for_a_reader_that_is_attested_dead_and_no_other_boot(
    bench: Bench,
) -> None:
    held(bench)
    for incarnation, gone in ((2, []), (1, ["l1"])):
        dead = types_pb2.WorkerRef(worker_id="other", incarnation=incarnation)
        bench.obey(peer_fenced=agent_pb2.PeerFenced(worker=dead))
        assert unserved(bench) == gone


def test_a_repeated_harden_holds_and_answers_once(bench: Bench) -> None:
    held(bench)
    bench.harden(chain(5))
    assert len(bench.out.take("hardened")) == 1
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1"))
    bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
    bench.agent.post(m.Unserved("l1"))
    bench.end_hook()
    assert bench.held == 0


def test_a_draining_worker_holds_and_offers_nothing_new(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.out.take("offered")
    bench.obey(drain=agent_pb2.Drain())
    bench.harden(chain(5))
    (refused,) = bench.out.take("refused")
    assert refused.reason == "DRAINING"
    bench.offer(chain(8), first=40)
    assert bench.out.take("offered") == []
    assert bench.held == 0


def test_a_drain_lets_go_of_what_nobody_may_read_and_an_undo_finds_what_is_left(
    bench: Bench,
) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5))
    bench.out.take("hardened")
    bench.obey(drain=agent_pb2.Drain())
    (changed,) = bench.out.take("replica_changed")
    assert (changed.state, changed.reason) == (session_pb2.REPLICA_STATE_SOFT, "DRAINING")
    # A lease that was there goes on.
    assert bench.held == 5
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1"))
    bench.agent.post(m.Unserved("l1"))
    bench.end_hook()
    assert bench.held == 0
    bench.obey(drain=agent_pb2.Drain(undo=True))
    bench.harden(chain(5), "l2")
    assert len(bench.out.take("hardened")) == 1


def test_a_retention_of_nothing_ends_the_hold(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    retain = agent_pb2.RetainReplica(tenant="acme", session_id="s", head_hash=chain(5)[-1])
    bench.obey(retain_replica=retain)
    assert bench.held == 0
    (changed,) = bench.out.take("replica_changed")
    assert changed.state == session_pb2.REPLICA_STATE_SOFT


def test_so_many_soft_replicas_are_remembered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MAX_SOFT_REPLICAS", 2)
    bench.expect(DECODE)
    for number in range(4):
        bench.offer(chain(3, f"{number}-"), first=10 * (number + 1))
        bench.agent.make_room(100)
    gone = [x.head_hash for x in bench.out.take("replica_changed") if not x.num_blocks]
    assert gone == [chain(3, f"{number}-")[-1] for number in range(2)]
    assert len(bench.agent.source.inventory()) == 2


def leg(number: int) -> TurnLeg:
    return TurnLeg(f"t{number}", DECODE, "acme", "s", number, "", False, 0, 0, 0)


def test_so_many_turns_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "MAX_TURNS", 3)
    monkeypatch.setattr(turns_module, "MAX_PAST_TURNS", 2)
    book = TurnBook()
    for number in range(5):
        book.expect(leg(number))
    assert [book.find((f"t{n}", DECODE)) is not None for n in range(5)] == [False] * 2 + [True] * 3
    for number in range(5):
        book.forget((f"t{number}", DECODE))
    assert len(book) == 0
    found = [book.find_past((f"t{n}", DECODE)) is not None for n in range(5)]
    assert found == [False, False, False, True, True]


def test_a_repeated_grant_does_not_stop_the_read_of_the_first(bench: Bench) -> None:
    load(bench)
    bench.grant(chain(4))
    assert bench.out.take("stopped") == []
    assert [lease.lease_id for lease in bench.agent.lease_inventory()] == ["l1"]
    ended(bench)
    assert len(bench.out.take("stopped")) == 1


def test_an_extension_counts_from_the_heartbeat_that_it_names(bench: Bench) -> None:
    load(bench)
    bench.clock.advance(10)
    extend = agent_pb2.Extend(lease_id="l1", version=3, as_of=bench.clock() - 3 * NS)
    extend.ttl.FromSeconds(60)
    bench.obey(extend=extend)
    (order,) = [x for x in bench.out.orders if isinstance(x, m.ExtendRead)]
    assert order.deadline_ns == bench.clock() + 57 * NS
    # An older one of the same lease changes nothing.
    extend.version, extend.as_of = 2, bench.clock()
    bench.obey(extend=extend)
    assert len([x for x in bench.out.orders if isinstance(x, m.ExtendRead)]) == 1
