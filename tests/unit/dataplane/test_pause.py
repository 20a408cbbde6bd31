"""vLLM's pause: it resets its cache when nothing moves, and the weights may change meanwhile."""

from __future__ import annotations

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.limits import PAUSE_WAIT_NS, REST_LOOK_NS, REST_NS
from kvshuttle.dataplane.scheduler import CommandBatch
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from tests.unit.dataplane.test_eager import UNUSED, eager, end_read, reads
from tests.unit.dataplane.test_eager_rules import given_back
from tests.unit.dataplane.test_scheduler_side import (
    DECODE,
    PREFILL,
    Bench,
    chain,
    harden_command,
    load,
)

WHY = "ENGINE_PAUSED"
PAUSE_WAIT_S = PAUSE_WAIT_NS / NS


@pytest.fixture
def bench() -> Bench:
    return Bench(total=300)


def pause(bench: Bench, *, told: int = 1) -> None:
    bench.agent.heed_pause(told)
    bench.end_hook()


def go_on(bench: Bench) -> None:
    pause(bench, told=0)


def replica(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(3))


def leased(bench: Bench) -> None:
    """A replica, and a lease on it that somebody reads under."""
    replica(bench)
    bench.harden(chain(3))
    assert len(bench.out.take("hardened")) == 1


def test_a_pause_waits_until_its_blocks_are_not_read_any_more(bench: Bench) -> None:
    leased(bench)
    assert not bench.agent.settling()
    pause(bench)
    assert bench.agent.settling()
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1"))
    bench.agent.post(m.Unserved("l1"))
    bench.end_hook()
    # What is left is a replica: vLLM's reset lets it go, and a pause without one keeps it.
    assert bench.held == 3
    assert not bench.agent.settling()


def test_nor_are_written_to(bench: Bench) -> None:
    load(bench)
    pause(bench)
    assert bench.agent.settling()
    assert not bench.out.take("stopped")
    bench.agent.post(m.ReadEnded("r", "l1", True, "", 1_000, 5))
    bench.end_hook()
    assert not bench.agent.settling()


def test_it_does_not_wait_for_ever(bench: Bench) -> None:
    """A quarantine's writer may never be attested dead."""
    leased(bench)
    pause(bench)
    assert bench.agent.settling()
    bench.clock.advance(PAUSE_WAIT_S - 0.001)
    pause(bench)  # the same pause: it counts from the beginning
    assert bench.agent.settling()
    bench.clock.advance(0.002)
    assert not bench.agent.settling()
    # Whoever asks for it again has it wait again.
    pause(bench, told=2)
    assert bench.agent.settling()


def test_it_counts_from_when_there_is_nothing_else_to_wait_for(bench: Bench) -> None:
    """As `mode=wait` does: answers first, which may take longer than that."""
    pause(bench)
    bench.clock.advance(2 * PAUSE_WAIT_S)
    leased(bench)
    assert bench.agent.settling()
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1"))
    bench.agent.post(m.Unserved("l1"))
    bench.end_hook()
    assert not bench.agent.settling()
    bench.clock.advance(2 * PAUSE_WAIT_S)
    bench.harden(chain(3), "l2")
    assert bench.agent.settling()


def test_a_lease_that_is_asked_for_during_a_reset_is_not_in_its_way(bench: Bench) -> None:
    """vLLM has found that nothing moves, and only then makes its workers ready for the reset."""
    replica(bench)
    pause(bench)
    assert not bench.agent.settling()
    command = agent_pb2.AgentCommand(harden=harden_command(chain(3)))
    bench.agent.post(CommandBatch(1, 5, [command], bench.life))
    bench.agent.reset()
    assert bench.held == 0
    (refused,) = bench.out.take("refused")
    assert refused.reason == "REPLICA_GONE"


def test_what_nobody_reads_yet_goes_back(bench: Bench) -> None:
    """Its source could not be paused, and may have other weights when this engine goes on."""
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4))
    pause(bench)
    assert given_back(bench, "l1") == WHY
    assert not bench.agent.settling()
    go_on(bench)
    # Its request computes, and at once.
    assert bench.look(chain(4)) == 0
    assert bench.agent.counters.snapshot().fallbacks == {}
    bench.agent.allocated("r", ("t", PREFILL), range(4), 0)
    assert bench.agent.counters.snapshot().fallbacks == {WHY: 1}


def test_so_does_what_is_granted_during_it(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    pause(bench)
    bench.grant(chain(4))
    assert given_back(bench, "l1") == WHY
    go_on(bench)
    assert bench.look(chain(4)) == 0


def test_an_eager_return_ends_and_none_begins(bench: Bench) -> None:
    """Its source may not be paused yet, and this engine's cache be reset already: it would bring
    KV of the old weights."""
    hashes = chain(4)
    eager(bench, hashes)
    pause(bench)
    assert bench.agent.settling()
    assert m.Abandon(reads(bench)[0].request_id, WHY) in bench.out.orders
    end_read(bench, reads(bench)[0], WHY)
    assert given_back(bench, "e1") == WHY
    assert not bench.agent.settling()
    eager(bench, hashes, "e2")
    assert given_back(bench, "e2") == WHY
    go_on(bench)
    eager(bench, hashes, "e3")
    assert len(reads(bench)) == 2


def test_who_pauses_can_still_be_read_from(bench: Bench) -> None:
    """Turns that run elsewhere go on; after a reset there is nothing left to read."""
    replica(bench)
    pause(bench)
    bench.harden(chain(3))
    assert len(bench.out.take("hardened")) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_the_engine_rests_while_it_waits(bench: Bench, asked: bool) -> None:
    """Also with a request in hand that waited for a word when the pause came: vLLM does not ask
    for it again before it goes on, however late the word is."""
    looks: list[int] = []

    def has_input() -> bool:
        looks.append(1)
        return False

    leased(bench)
    bench.agent.rest(has_input)
    assert not looks
    if asked:
        bench.expect(PREFILL, "l2")
        assert bench.look(chain(4)) is None
    pause(bench)
    assert bench.agent.settling()
    bench.clock.advance(PAUSE_WAIT_S / 2)
    bench.settle()
    bench.agent.rest(has_input)
    assert len(looks) == REST_NS // REST_LOOK_NS


def test_a_lease_of_a_turn_that_is_over_is_told_as_ever(bench: Bench) -> None:
    pause(bench)
    bench.grant(chain(4))
    (stopped,) = bench.out.take("stopped")
    assert (stopped.outcome, stopped.reason) == (UNUSED, "TURN_GONE_ON")
