"""A request without anything of its session's own asks for what others of the tenant have."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.checkpoints import checkpoints
from kvshuttle.dataplane.scheduler import FinishedRequest, StreamUp
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from tests.unit.dataplane.test_scheduler_side import BLOCK, DECODE, PREFILL, Bench, chain


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    welcome = agent_pb2.AgentWelcome(
        incarnation=1, lineage_id="L", clock_drift_ppm=200, checkpoint_interval=2
    )
    made.agent.post(StreamUp(1, 5, welcome))
    made.agent.drain()
    return made


def asked(bench: Bench) -> list[Any]:
    return bench.out.take("prefix_wanted")


def test_it_asks_once_and_reads_what_it_is_granted(bench: Bench) -> None:
    bench.expect(PREFILL, may_ask=True)
    own = chain(21)
    assert bench.look(own, computed=BLOCK) is None
    (wanted,) = asked(bench)
    assert (wanted.turn_token, wanted.leg) == ("t", PREFILL)
    assert list(wanted.checkpoints) == [own[i - 1] for i in (2, 4, 6, 8, 12, 16)]
    assert (wanted.have_blocks, wanted.usable_blocks) == (1, 21)
    assert bench.look(own, computed=BLOCK) is None
    assert asked(bench) == []
    bench.grant(chain(9) + chain(3, "b"))
    assert bench.look(own, computed=BLOCK) == 8 * BLOCK
    bench.agent.allocated("r", ("t", PREFILL), range(20, 42), 8 * BLOCK)
    (order,) = [o for o in bench.out.orders if isinstance(o, m.Read)]
    assert order.remote_block_ids == list(range(501, 509))


def test_a_no_ends_the_wait_and_is_no_trouble(bench: Bench) -> None:
    bench.expect(PREFILL, may_ask=True)
    assert bench.look(chain(21)) is None
    bench.obey(revoke=agent_pb2.Revoke(reason="NO_PREFIX", turn_token="t"))
    assert bench.look(chain(21)) == 0
    bench.agent.allocated("r", ("t", PREFILL), range(20, 42), 0)
    assert not bench.agent.counters.snapshot().fallbacks


def test_without_an_answer_it_waits_no_longer_than_for_a_grant(bench: Bench) -> None:
    bench.expect(PREFILL, may_ask=True)
    assert bench.look(chain(21)) is None
    bench.clock.advance(0.29)
    assert bench.look(chain(21)) is None
    bench.clock.advance(0.02)
    assert bench.look(chain(21)) == 0


def test_what_is_not_worth_a_question(bench: Bench) -> None:
    bench.expect(PREFILL, may_ask=True, min_tokens=3 * BLOCK)
    assert bench.look(chain(10), computed=8 * BLOCK) == 0
    assert asked(bench) == []
    assert bench.look(chain(1), request="short") == 0
    assert asked(bench) == []


def test_only_where_it_was_told_that_it_may(bench: Bench) -> None:
    bench.expect(PREFILL)
    assert bench.look(chain(21)) == 0
    assert asked(bench) == []


def test_not_while_nobody_listens(bench: Bench) -> None:
    bench.expect(PREFILL, may_ask=True)
    bench.out.connected = False
    assert bench.look(chain(21)) == 0
    assert asked(bench) == []


def test_offers_of_decode_carry_checkpoints_and_those_of_prefill_do_not(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(9))
    (offered,) = bench.out.take("offered")
    assert list(offered.checkpoints) == checkpoints(chain(9), 9, 2)
    assert len(offered.checkpoints) == 4
    bench.expect(PREFILL)
    ids = tuple(range(40, 49))
    bench.pool.touch(ids)
    bench.agent.finished(("t", PREFILL), FinishedRequest("r", chain(9, "p"), ids, 9 * BLOCK, False))
    (offered,) = bench.out.take("offered")
    assert not offered.checkpoints
    assert {len(one.checkpoints) for one in bench.agent.source.inventory()} == {4}
