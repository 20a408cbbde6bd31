"""The scheduler side of pushes: landing zones, and what is written into another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.grants import tail_out
from kvshuttle.dataplane.limits import REST_LOOK_NS, REST_NS
from kvshuttle.dataplane.matching import Tail, TailHash
from kvshuttle.dataplane.push_source import Scheduled
from kvshuttle.dataplane.scheduler import FinishedRequest, StreamDown, Tick
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.fakes import FakeOutbox, grant_of
from tests.unit.dataplane.test_scheduler_side import BLOCK, DECODE, PREFILL, Bench, chain

OTHER = types_pb2.WorkerRef(worker_id="other", incarnation=1)
WRITTEN = agent_pb2.TRANSFER_OUTCOME_WRITTEN
PUBLISHED = agent_pb2.TRANSFER_OUTCOME_PUBLISHED
FAILED = agent_pb2.TRANSFER_OUTCOME_FAILED
DISCARDED = agent_pb2.TRANSFER_OUTCOME_DISCARDED


def hope(ttl: float = 30) -> agent_pb2.PushPlan:
    plan = agent_pb2.PushPlan(lease_id="l1", version=1, peer=OTHER, lease_epoch=5, lease_seq=9)
    plan.ttl.FromNanoseconds(int(ttl * NS))
    return plan


def words(text: bytes = b"t") -> TailHash:
    """Hashes of a last block's first tokens: of those that a prompt of 165 tokens has."""

    def tail_hash(full: int, tokens: int) -> bytes | None:
        return (text * 32)[:30] + bytes([full, tokens]) if full * BLOCK + tokens <= 165 else None

    return tail_hash


def tail_at(block_id: int, text: bytes = b"t") -> Tail:
    return Tail(block_id, 5, words(text)(5, 5) or b"")


class Decode(Bench):
    """A decode leg of a prompt of five full blocks and five tokens, one block cached."""

    key = ("t", DECODE)

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.expect(DECODE, lease_follows=True, push=hope())

    def ask(self, computed: int = 1, request: str = "r") -> int | None:
        return self.agent.look(request, self.key, chain(5), 5 * BLOCK + 5, computed * BLOCK)

    def land(self) -> agent_pb2.LeaseHardened:
        assert self.ask() == 4 * BLOCK
        self.pool.touch(range(20, 26))  # vLLM's own references
        self.agent.allocated("r", self.key, range(20, 26), 4 * BLOCK)
        self.end_hook()
        (hardened,) = self.out.take("hardened")
        found: agent_pb2.LeaseHardened = hardened
        return found

    def report(self, *messages: m.FromMover) -> None:
        for message in messages:
            self.agent.post(message)
        self.end_hook()

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.agent.post(Tick())
        self.end_hook()

    def stopped(self) -> list[tuple[int, str]]:
        return [(x.outcome, x.reason) for x in self.out.take("stopped")]

    def orders(self, kind: type[m.ToMover]) -> list[Any]:
        found = [x for x in self.out.orders if isinstance(x, kind)]
        self.out.orders = [x for x in self.out.orders if not isinstance(x, kind)]
        return found

    @property
    def quarantined(self) -> int:
        return self.agent.pool_stats().quarantined_blocks


def ended(published: bool, reason: str = "") -> m.LandingEnded:
    return m.LandingEnded("r", "l1", published, reason, 1_000, 5, 7)


# -- decode --------------------------------------------------------------------------------------


def test_what_decode_lacks_becomes_a_landing_zone_and_is_published_by_the_notice() -> None:
    bench = Decode()
    offer = bench.land()
    assert (offer.lease_id, offer.version) == ("l1", 1)
    assert (offer.blocks.range.start, offer.blocks.range.end) == (1, 5)
    assert list(offer.blocks.block_ids) == [21, 22, 23, 24]
    assert offer.blocks.hashes == b"".join(chain(5)[1:])
    (order,) = bench.orders(m.Await)
    assert (order.local_block_ids, order.version) == ([21, 22, 23, 24], 1)
    assert order.deadline_ns == bench.clock() + 30 * NS
    assert bench.held == 4
    bench.obey(landing_granted=agent_pb2.LandingGranted(lease_id="l1", version=2))
    bench.report(ended(True))
    (said,) = bench.out.take("stopped")
    assert (said.outcome, said.is_source) == (PUBLISHED, False)
    assert (said.stats.blocks, said.stats.tokens, said.stats.bytes) == (4, 4 * BLOCK, 1_000)
    assert said.stats.descriptors == 7
    assert bench.held == 0
    assert bench.agent.counters.snapshot().pushed_tokens == 4 * BLOCK
    assert not bench.agent.lease_inventory()
    # Its request ends later, and was spared that much.
    bench.agent.finished(
        bench.key, FinishedRequest("r", chain(5), tuple(range(20, 25)), 165, False)
    )
    (computed,) = bench.out.take("leg_computed")
    assert computed.external_tokens == 4 * BLOCK


def test_every_rank_must_have_been_written() -> None:
    bench = Decode(ranks=2)
    bench.land()
    bench.report(ended(True))
    assert not bench.out.take("stopped")
    assert bench.held == 4
    bench.report(ended(False, "TRANSFER_FAILED"))
    assert bench.stopped() == [(FAILED, "TRANSFER_FAILED")]
    assert bench.held == 0
    assert bench.agent.counters.snapshot().pushed_tokens == 0


def test_it_is_offered_after_the_movers_listen() -> None:
    """Else a writer could be done before anybody hears it."""
    bench = Decode()
    said: list[str] = []

    class Noting(FakeOutbox):
        def order(self, message: m.ToMover, rank: int | None = None) -> None:
            said.append(type(message).__name__)
            super().order(message, rank)

        def emit(self, event: agent_pb2.AgentEvent) -> None:
            said.append(str(event.WhichOneof("event")))
            super().emit(event)

    bench.agent.landings._out = Noting()
    assert bench.ask() == 4 * BLOCK
    bench.pool.touch(range(20, 26))
    bench.agent.allocated("r", bench.key, range(20, 26), 4 * BLOCK)
    assert said == ["Await", "hardened"]


def test_a_load_that_failed_keeps_its_blocks_until_the_writer_has_stopped() -> None:
    bench = Decode()
    bench.land()
    bench.obey(landing_granted=agent_pb2.LandingGranted(lease_id="l1", version=2))
    bench.report(m.LandingGivenUp("r", "l1", "LATE"))
    assert bench.stopped() == [(DISCARDED, "LATE")]
    bench.agent.load_failed(["r"])
    bench.pool.free(range(20, 26))  # vLLM gives the request other blocks
    assert (bench.held, bench.quarantined) == (4, 4)
    assert bench.ask() == 0  # it has had its one lease
    assert [x.lease_id for x in bench.agent.lease_inventory()] == ["l1"]
    assert bench.agent.lease_inventory()[0].writer == OTHER
    bench.tick(10_000)
    assert bench.quarantined == 4
    bench.obey(writer_stopped=agent_pb2.WriterStopped(lease_id="l1", version=3, reason="LATE"))
    assert [x.quiet for x in bench.orders(m.Unawait)] == [False]
    assert bench.quarantined == 4  # until the movers have said it
    bench.report(ended(False, "LATE"))
    assert (bench.held, bench.quarantined) == (0, 0)
    assert not bench.stopped()
    assert not bench.agent.lease_inventory()


def test_a_writers_late_notice_ends_the_quarantine_too() -> None:
    bench = Decode()
    bench.land()
    bench.report(m.LandingGivenUp("r", "l1", "LATE"), ended(False, "LATE"))
    assert bench.held == 0
    assert bench.stopped() == [(DISCARDED, "LATE")]
    bench.report(ended(True))  # twice
    assert bench.held == 0
    assert not bench.stopped()


def test_a_request_that_goes_away_stops_the_writer_and_keeps_the_blocks() -> None:
    bench = Decode()
    bench.land()
    bench.agent.finished(bench.key, FinishedRequest("r", chain(5), tuple(range(20, 25)), 165, True))
    assert [x.request_id for x in bench.orders(m.Abandon)] == ["r"]
    assert bench.stopped() == [(agent_pb2.TRANSFER_OUTCOME_REVOKED, "REQUEST_ENDED")]
    # What it had before the landing zone is all that it leaves.
    (offered,) = bench.out.take("offered")
    assert offered.num_blocks == 1
    bench.report(m.LandingGivenUp("r", "l1", "REQUEST_ENDED"))
    assert bench.quarantined == 4
    bench.report(ended(False, "REVOKED"))
    assert bench.quarantined == 0
    assert bench.held == 1


def test_without_an_answer_it_waits_no_longer_than_a_lookup_and_frees_nothing() -> None:
    bench = Decode()
    bench.land()
    bench.tick(0.31)
    assert not bench.orders(m.Abandon)
    bench.tick(2.7)
    assert [x.reason for x in bench.orders(m.Abandon)] == ["GRANT_TIMEOUT"]
    bench.report(m.LandingGivenUp("r", "l1", "GRANT_TIMEOUT"))
    assert bench.stopped() == [(DISCARDED, "GRANT_TIMEOUT")]
    assert bench.quarantined == 4
    bench.tick(60)
    assert not bench.orders(m.Abandon)
    # A grant in time lets it wait to its deadline, which the movers keep.
    other = Decode()
    other.land()
    other.obey(landing_granted=agent_pb2.LandingGranted(lease_id="l1", version=2))
    other.tick(3.1)
    assert not other.orders(m.Abandon)
    # Without a stream nobody will answer soon.
    alone = Decode()
    alone.land()
    alone.agent.post(StreamDown(1))
    alone.end_hook()
    alone.tick(0.31)
    assert [x.reason for x in alone.orders(m.Abandon)] == ["GRANT_TIMEOUT"]


def test_a_revoke_fails_the_load_and_frees_nothing() -> None:
    bench = Decode()
    bench.land()
    bench.obey(revoke=agent_pb2.Revoke(lease_id="l1", version=3, reason="SOURCE_LOST"))
    assert [x.reason for x in bench.orders(m.Abandon)] == ["SOURCE_LOST"]
    assert not bench.stopped()
    bench.report(m.LandingGivenUp("r", "l1", "SOURCE_LOST"))
    assert bench.stopped() == [(FAILED, "SOURCE_LOST")]
    assert bench.quarantined == 4


def test_what_is_waited_for_is_extended_in_time() -> None:
    bench = Decode()
    bench.land()
    bench.obey(landing_granted=agent_pb2.LandingGranted(lease_id="l1", version=2))
    bench.tick(16)
    (needed,) = bench.out.take("leases_needed")
    assert (needed.lease_epoch, list(needed.lease_seqs)) == (5, [9])
    more = agent_pb2.ExtendLeases(lease_epoch=5, lease_seqs=[9], as_of=bench.clock())
    more.ttl.FromSeconds(30)
    bench.obey(extend_leases=more)
    assert [x.deadline_ns for x in bench.orders(m.ExtendRead)] == [bench.clock() + 30 * NS]


def test_prefill_was_faster_and_decode_reads_into_the_same_blocks() -> None:
    bench = Decode()
    bench.land()
    bench.obey(
        writer_stopped=agent_pb2.WriterStopped(
            lease_id="l1", version=2, reason="PULLED_INSTEAD", pull_follows=True
        )
    )
    assert [x.quiet for x in bench.orders(m.Unawait)] == [True]
    forward(bench, chain(5))
    (order,) = bench.orders(m.Read)
    assert (order.lease_id, order.local_block_ids) == ("l2", [21, 22, 23, 24])
    assert order.remote_block_ids == [501, 502, 503, 504]
    assert bench.held == 4
    bench.report(m.ReadEnded("r", "l2", True, "", 1_000, 5))
    assert bench.stopped() == [(PUBLISHED, "")]
    assert bench.held == 0
    bench.agent.finished(
        bench.key, FinishedRequest("r", chain(5), tuple(range(20, 25)), 165, False)
    )
    (computed,) = bench.out.take("leg_computed")
    assert computed.external_tokens == 4 * BLOCK


def test_a_read_that_does_not_come_or_does_not_fit_fails_the_load() -> None:
    for case in ("none", "other", "gone"):
        bench = Decode()
        bench.land()
        over = agent_pb2.WriterStopped(lease_id="l1", version=2, pull_follows=True)
        bench.obey(writer_stopped=over)
        if case == "other":
            forward(bench, chain(5, "b"))
            assert bench.stopped() == [(agent_pb2.TRANSFER_OUTCOME_UNUSED, "NO_COMMON_PREFIX")]
        elif case == "gone":
            bench.agent.finished(bench.key, FinishedRequest("r", chain(5), (20,), 165, True))
        else:
            bench.tick(0.4)
        assert [x.request_id for x in bench.orders(m.Refuse)] == ["r"], case
        assert not bench.orders(m.Read)
        # Nobody was granted to write, so the blocks may go.
        assert bench.held == (case == "gone")


def test_a_landing_zone_that_was_given_up_is_not_read_into() -> None:
    bench = Decode()
    bench.land()
    bench.tick(3.1)  # told to wait no longer; the movers have not said so yet
    over = agent_pb2.WriterStopped(lease_id="l1", version=2, pull_follows=True)
    bench.obey(writer_stopped=over)
    assert [x.quiet for x in bench.orders(m.Unawait)] == [False]
    forward(bench, chain(5))
    assert not bench.orders(m.Read)


@pytest.mark.parametrize("word", [m.LandingGivenUp("r", "l1", "LATE"), ended(False, "LATE")])
def test_one_that_a_mover_gave_up_before_the_word_came_is_not_read_into(word: m.FromMover) -> None:
    bench = Decode()
    bench.land()
    over = agent_pb2.WriterStopped(lease_id="l1", version=2, pull_follows=True)
    bench.obey(writer_stopped=over)
    bench.report(word)
    # The other ranks tell vLLM now; nobody writes, so the blocks may go.
    assert [x.request_id for x in bench.orders(m.Refuse)] == ["r"]
    assert bench.held == 0
    forward(bench, chain(5))
    assert not bench.orders(m.Read)
    assert bench.stopped() == [(agent_pb2.TRANSFER_OUTCOME_UNUSED, "TURN_GONE_ON")]


def test_prefill_ended_before_decode_looked() -> None:
    bench = Decode()
    over = agent_pb2.WriterStopped(lease_id="l1", version=2, pull_follows=True)
    bench.obey(writer_stopped=over)
    assert bench.ask() is None  # the grant to read is on its way
    forward(bench, chain(5))
    assert bench.ask() == 4 * BLOCK
    bench.agent.allocated("r", bench.key, range(20, 26), 4 * BLOCK)
    assert len(bench.orders(m.Read)) == 1
    assert not bench.out.take("hardened")


def test_a_push_that_will_not_come_is_not_waited_for() -> None:
    bench = Decode()
    bench.obey(writer_stopped=agent_pb2.WriterStopped(lease_id="l1", reason="SOURCE_LOST"))
    assert bench.ask() == 0


def forward(bench: Decode, hashes: Sequence[bytes], tail: Tail | None = None) -> None:
    grant = grant_of(
        hashes, bench.clock(), lease="l2", direction=types_pb2.DIRECTION_FORWARD, source=OTHER
    )
    if tail is not None:
        grant.blocks.tail.CopyFrom(tail_out(tail))
    bench.obey(grant=grant)


@pytest.mark.parametrize(
    ("computed", "reason"), [(5, "LOCAL_HIT"), (4, "TOO_FEW_TOKENS"), (1, "PEER_UNKNOWN")]
)
def test_what_is_not_to_be_pushed_is_declined(computed: int, reason: str) -> None:
    bench = Bench()
    plan = hope()
    if reason == "PEER_UNKNOWN":
        plan.peer.worker_id = "nobody"
    bench.expect(DECODE, lease_follows=True, push=plan, min_tokens=64)
    key = ("t", DECODE)
    answer = bench.agent.look("r", key, chain(5), 5 * BLOCK + 5, computed * BLOCK)
    if reason == "PEER_UNKNOWN":
        assert answer is None
        bench.clock.advance(1)
        answer = bench.agent.look("r", key, chain(5), 5 * BLOCK + 5, computed * BLOCK)
    assert answer == 0
    assert not bench.out.take("refused")
    bench.agent.allocated("r", key, range(20, 26), 0)
    (refused,) = bench.out.take("refused")
    assert (refused.lease_id, refused.reason) == ("l1", reason)


def test_a_child_of_the_same_request_computes_and_declines_nothing() -> None:
    bench = Decode()
    bench.land()
    assert bench.ask(request="child") == 0
    bench.agent.allocated("child", bench.key, range(30, 36), 0)
    assert not bench.out.take("refused")


def test_too_much_in_quarantine_takes_no_landing_zone() -> None:
    bench = Decode(total=30)
    bench.land()
    bench.report(m.LandingGivenUp("r", "l1", "LATE"))
    plan = hope()
    plan.lease_id = "l2"
    expect = agent_pb2.ExpectTurn(turn_token="u", leg=DECODE, lease_follows=True, push=plan)
    expect.lookup_wait.FromMilliseconds(300)
    bench.obey(expect_turn=expect)
    key = ("u", DECODE)
    assert bench.agent.look("q", key, chain(5), 5 * BLOCK + 5, 0) == 0
    assert bench.agent.counters.snapshot().fallbacks == {"LATE": 1}
    bench.agent.allocated("q", key, range(5, 11), 0)
    assert bench.agent.counters.snapshot().fallbacks["QUARANTINE_FULL"] == 1


def ask_all(bench: Decode, tokens: int = 5 * BLOCK + 5, full: int = 5) -> int | None:
    return bench.agent.look("r", bench.key, chain(full), tokens, BLOCK, words())


def land_all(bench: Decode) -> agent_pb2.LeaseHardened:
    """With the last block, of which the prompt has five tokens."""
    assert ask_all(bench) == 4 * BLOCK + 4
    bench.pool.touch(range(20, 26))
    bench.agent.allocated("r", bench.key, range(20, 26), 4 * BLOCK + 4)
    bench.end_hook()
    (hardened,) = bench.out.take("hardened")
    found: agent_pb2.LeaseHardened = hardened
    return found


def test_the_last_block_is_written_too_up_to_the_token_that_is_computed() -> None:
    bench = Decode()
    blocks = land_all(bench).blocks
    assert (blocks.range.start, blocks.range.end) == (1, 5)
    assert list(blocks.block_ids) == [21, 22, 23, 24]
    assert (blocks.tail.block_id, blocks.tail.num_tokens) == (25, 5)
    assert blocks.tail.hash == words()(5, 5)
    (order,) = bench.orders(m.Await)
    assert (order.local_block_ids, order.partial) == ([21, 22, 23, 24, 25], True)
    assert bench.held == 5
    bench.report(ended(True))
    (said,) = bench.out.take("stopped")
    assert (said.stats.blocks, said.stats.tokens) == (5, 4 * BLOCK + 4)
    assert bench.held == 0


def test_a_prompt_of_whole_blocks_has_its_last_one_written_as_one_of_them() -> None:
    bench = Decode()
    assert ask_all(bench, tokens=5 * BLOCK) == 4 * BLOCK - 1
    bench.agent.allocated("r", bench.key, range(20, 25), 4 * BLOCK - 1)
    (hardened,) = bench.out.take("hardened")
    assert list(hardened.blocks.block_ids) == [21, 22, 23, 24]
    assert not hardened.blocks.HasField("tail")
    assert [x.partial for x in bench.orders(m.Await)] == [False]
    # Of one token more only that one is in its last block, and it is computed.
    other = Decode()
    assert ask_all(other, tokens=5 * BLOCK + 1) == 4 * BLOCK


@pytest.mark.parametrize("offered", ["the same", "another", "none", "longer"])
def test_a_read_into_a_landing_zone_fills_its_last_block_or_fails(offered: str) -> None:
    bench = Decode()
    land_all(bench)
    over = agent_pb2.WriterStopped(lease_id="l1", version=2, pull_follows=True)
    bench.obey(writer_stopped=over)
    hashes = chain(6) if offered == "longer" else chain(5)
    tails = {"the same": tail_at(909), "another": tail_at(909, b"u")}
    forward(bench, hashes, tails.get(offered))
    reads = bench.orders(m.Read)
    if offered == "the same":
        assert [x.local_block_ids for x in reads] == [[21, 22, 23, 24, 25]]
        assert reads[0].remote_block_ids == [501, 502, 503, 504, 909]
    else:
        assert not reads
        assert bench.stopped() == [(agent_pb2.TRANSFER_OUTCOME_UNUSED, "NO_COMMON_PREFIX")]
        assert [x.request_id for x in bench.orders(m.Refuse)] == ["r"]
        assert bench.held == 0


# -- prefill -------------------------------------------------------------------------------------


class View:
    """A running request."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.own = list(hashes)
        self.taken = 0
        self.tail_hash = words()

    def hashes(self) -> Sequence[bytes]:
        return self.own

    def preemptions(self) -> int:
        return self.taken


class Prefill(Bench):
    """A prefill leg of a prompt of five full blocks and five tokens; decode lacks the last four."""

    key = ("t", PREFILL)

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.expect(PREFILL, push=hope())
        self.view = View(chain(5))

    def push_grant(
        self, ttl: float = 30, hashes: Sequence[bytes] | None = None, tail: Tail | None = None
    ) -> None:
        lands = (hashes or chain(5))[1:]
        grant = agent_pb2.Grant(
            lease_id="l1",
            version=2,
            turn_token="t",
            direction=types_pb2.DIRECTION_FORWARD,
            source=types_pb2.WorkerRef(worker_id="w", incarnation=2),
            blocks=types_pb2.BlockDescriptors(
                range=types_pb2.BlockRange(start=1, end=1 + len(lands)),
                block_ids=range(700, 700 + len(lands)),
                hashes=b"".join(lands),
                hash_size=32,
            ),
            as_of=self.clock(),
            push=True,
            destination=OTHER,
            landing_version=1,
            lease_epoch=5,
            lease_seq=9,
        )
        grant.ttl.FromNanoseconds(int(ttl * NS))
        if tail is not None:
            grant.blocks.tail.CopyFrom(tail_out(tail))
        self.obey(grant=grant)

    def run(self) -> None:
        self.pool.touch(range(20, 26))
        self.agent.allocated("p", self.key, range(20, 26), 0, self.view)

    def step(self, computed: int, tokens: int) -> list[m.PushChunk]:
        """A step of the engine; tokens."""
        item = Scheduled("p", computed, tokens, list(range(20, 26)))
        chunks = self.agent.push.step([item] if self.agent.push.wants("p") else [])
        self.end_hook()
        return chunks

    def finish(self, *, aborted: bool = False, blocks: int = 5, tail: Tail | None = None) -> None:
        ids = tuple(range(20, 20 + blocks))
        self.agent.finished(self.key, FinishedRequest("p", chain(blocks), ids, 165, aborted, tail))
        self.pool.free(range(20, 26))
        self.end_hook()

    def orders(self, kind: type[m.ToMover]) -> list[Any]:
        found = [x for x in self.out.orders if isinstance(x, kind)]
        self.out.orders = [x for x in self.out.orders if not isinstance(x, kind)]
        return found

    def report(self, *messages: m.FromMover) -> None:
        for message in messages:
            self.agent.post(message)
        self.end_hook()

    def stopped(self) -> list[tuple[int, str, bool]]:
        return [(x.outcome, x.reason, x.is_source) for x in self.out.take("stopped")]


def test_each_steps_whole_blocks_are_a_chunk_and_held_until_written() -> None:
    bench = Prefill()
    bench.push_grant()
    (order,) = bench.orders(m.Push)
    assert (order.version, order.remote_block_ids) == (1, [700, 701, 702, 703])
    bench.run()
    # 80 tokens: two blocks are whole, of which decode has the first.
    assert bench.step(0, 80) == [m.PushChunk("l1", 0, 0, [21], False)]
    assert len(bench.out.take("active")) == 1
    assert bench.held == 1
    assert bench.step(80, 40) == [m.PushChunk("l1", 1, 1, [22], False)]
    assert not bench.orders(m.PushFinish)
    assert bench.step(120, 45) == [m.PushChunk("l1", 2, 2, [23, 24], False)]
    assert [x.chunks for x in bench.orders(m.PushFinish)] == [3]
    bench.finish()
    assert not bench.out.take("offered")  # decode has it
    assert bench.held == 4
    bench.report(m.PushChunkDone("l1", 1))
    assert bench.held == 3
    bench.report(m.PushChunkDone("l1", 0), m.PushChunkDone("l1", 2))
    assert bench.held == 0
    bench.report(m.PushEnded("l1", True, "", 1_000, 5))
    assert bench.stopped() == [(WRITTEN, "", True)]
    assert not bench.agent.lease_inventory()


def test_a_chunk_is_held_until_every_rank_has_written_it() -> None:
    bench = Prefill(ranks=2)
    bench.push_grant()
    bench.run()
    bench.step(0, 165)
    bench.report(m.PushChunkDone("l1", 0))
    assert bench.held == 4
    bench.report(m.PushChunkDone("l1", 0))
    assert bench.held == 0
    bench.report(m.PushEnded("l1", True, ""))
    assert not bench.stopped()
    bench.report(m.PushEnded("l1", True, ""))
    assert bench.stopped() == [(WRITTEN, "", True)]


def test_a_grant_in_the_midst_writes_what_was_computed_at_once() -> None:
    bench = Prefill()
    bench.run()
    assert bench.step(0, 70) == []
    assert bench.step(70, 40) == []
    bench.push_grant()
    assert bench.step(110, 55) == [
        m.PushChunk("l1", 0, 0, [21, 22], True),
        m.PushChunk("l1", 1, 2, [23, 24], False),
    ]
    assert [x.chunks for x in bench.orders(m.PushFinish)] == [2]


@pytest.mark.parametrize("computed", [110, 128])
def test_what_a_step_that_still_runs_computes_is_written_with_the_next_ones_layers(
    computed: int,
) -> None:
    """vLLM schedules the next step while one runs, wherever it can (`async_scheduling`)."""
    bench = Prefill()
    bench.run()
    bench.begun, bench.over = 7, 6
    assert bench.step(0, 70) == []
    bench.begun, bench.over = 8, 7
    assert bench.step(70, computed - 70) == []
    bench.push_grant()
    bench.begun, bench.over = 9, 7  # the one before runs
    assert bench.step(computed, 165 - computed) == [
        m.PushChunk("l1", 0, 0, [21], True),
        m.PushChunk("l1", 1, 1, [22, 23, 24], False),
    ]
    assert [x.chunks for x in bench.orders(m.PushFinish)] == [2]


def test_nothing_is_final_while_the_first_step_runs() -> None:
    """Its hits may be what another request's part of it fills."""
    bench = Prefill()
    bench.run()
    bench.begun, bench.over = 7, 6
    bench.step(96, 20)
    bench.push_grant()
    bench.begun, bench.over = 8, 6
    assert bench.step(116, 49) == [m.PushChunk("l1", 0, 0, [21, 22, 23, 24], False)]


def test_prefix_hits_of_a_first_step_are_written_with_its_layers() -> None:
    """Another request of the same step may be what fills them."""
    bench = Prefill()
    bench.push_grant()
    bench.run()
    assert bench.step(96, 69) == [m.PushChunk("l1", 0, 0, [21, 22, 23, 24], False)]


def test_prefix_hits_of_the_first_step_after_a_preemption_are_written_with_its_layers() -> None:
    """It had run before, and was preempted before the grant came: the hits are as fresh."""
    bench = Prefill()
    bench.run()
    bench.step(0, 70)
    bench.pool.free(range(20, 26))
    bench.view.taken += 1
    bench.push_grant()
    bench.agent.push.step([])
    bench.run()
    assert bench.step(96, 69) == [m.PushChunk("l1", 0, 0, [21, 22, 23, 24], False)]


def test_a_grant_while_the_last_step_runs_is_served_at_its_end() -> None:
    bench = Prefill()
    bench.run()
    bench.step(0, 165)
    bench.push_grant()
    bench.finish()
    (order,) = bench.orders(m.PushBlocks)
    assert order.chunk == m.PushChunk("l1", 0, 0, [21, 22, 23, 24], True)
    assert not bench.out.take("offered")
    assert bench.held == 4


def test_a_late_grant_for_other_words_is_not_served_by_what_the_request_left() -> None:
    """No step has compared its hashes with the request's."""
    bench = Prefill()
    bench.run()
    bench.step(0, 165)
    bench.push_grant(hashes=chain(5, "u"))
    bench.finish()
    assert not bench.orders(m.PushBlocks)
    assert [x.reason for x in bench.orders(m.PushStop)] == ["NO_COMMON_PREFIX"]


def test_of_several_prompts_of_a_call_the_first_is_pushed() -> None:
    """The hashes of one are compared."""
    bench = Prefill()
    bench.push_grant()
    bench.run()
    bench.step(0, 70)
    bench.agent.allocated("p2", bench.key, range(40, 46), 0, View(chain(5, "u")))
    assert not bench.agent.push.wants("p2")
    assert bench.step(70, 95) == [m.PushChunk("l1", 1, 1, [22, 23, 24], False)]


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("granted_first", [True, False])
def test_a_prompt_of_the_same_call_that_ends_first_stops_nothing(
    aborted: bool, granted_first: bool
) -> None:
    """Nor does its leg count as ended: what its own request left would be asked for."""
    bench = Prefill()
    if granted_first:
        bench.push_grant()
    bench.run()
    bench.step(0, 70)
    bench.pool.touch(range(40, 46))
    bench.agent.allocated("p2", bench.key, range(40, 46), 0, View(chain(5, "u")))
    other = FinishedRequest("p2", chain(5, "u"), tuple(range(40, 45)), 165, aborted, None)
    bench.agent.finished(bench.key, other)
    if not granted_first:
        bench.push_grant()
    assert not bench.orders(m.PushStop)
    assert not bench.out.take("refused")
    assert bench.step(70, 95)
    assert not bench.orders(m.PushStop)


def test_a_replica_that_was_trimmed_is_not_pushed_in_part() -> None:
    bench = Bench()
    bench.expect(DECODE)
    bench.offer(chain(5))
    retain = agent_pb2.RetainReplica(
        tenant="acme", session_id="s", head_hash=chain(5)[-1], keep_blocks=2
    )
    retain.retention.FromSeconds(50)
    bench.obey(retain_replica=retain)
    assert bench.agent.source.blocks_of("acme", "s", 0, chain(5)[:2]) == [10, 11]
    assert bench.agent.source.blocks_of("acme", "s", 0, chain(5)[:4]) == []


def test_a_last_block_goes_with_the_step_that_computes_its_last_token() -> None:
    bench = Prefill()
    bench.push_grant(tail=tail_at(777))
    (order,) = bench.orders(m.Push)
    assert order.remote_block_ids == [700, 701, 702, 703, 777]
    bench.run()
    assert bench.step(0, 162) == [m.PushChunk("l1", 0, 0, [21, 22, 23, 24], False)]
    assert not bench.orders(m.PushFinish)
    assert bench.step(162, 3) == [m.PushChunk("l1", 1, 4, [25], False)]
    assert [x.chunks for x in bench.orders(m.PushFinish)] == [2]
    assert [x.blocks for x in bench.out.take("active")] == [5]
    bench.finish(tail=tail_at(25))
    assert bench.held == 5
    bench.report(m.PushChunkDone("l1", 0), m.PushChunkDone("l1", 1))
    assert bench.held == 0


def test_a_last_block_of_other_words_is_not_written() -> None:
    bench = Prefill()
    bench.push_grant(tail=tail_at(777, b"u"))
    bench.run()
    assert bench.step(0, 165) == []
    assert [x.reason for x in bench.orders(m.PushStop)] == ["NO_COMMON_PREFIX"]


@pytest.mark.parametrize("left", ["the same", "another", "none"])
def test_a_late_grant_is_served_with_the_last_block_that_was_left_or_not_at_all(left: str) -> None:
    tail = {"the same": tail_at(25), "another": tail_at(25, b"u"), "none": None}[left]
    for granted in ("while the last step runs", "after the end"):
        bench = Prefill()
        bench.run()
        bench.step(0, 165)
        if granted == "after the end":
            bench.finish(tail=tail)
            bench.push_grant(tail=tail_at(777))
        else:
            bench.push_grant(tail=tail_at(777))
            bench.finish(tail=tail)
        blocks = [x.chunk.local_block_ids for x in bench.orders(m.PushBlocks)]
        if left == "the same":
            assert blocks == [[21, 22, 23, 24, 25]], granted
        else:
            assert not blocks, granted
            refused = [x.reason for x in bench.out.take("refused")]
            stopped = [x.reason for x in bench.orders(m.PushStop)]
            assert (refused, stopped) in ((["REPLICA_GONE"], []), ([], ["REQUEST_ENDED"])), granted


def test_a_grant_after_the_end_is_served_from_what_the_leg_left() -> None:
    bench = Prefill()
    bench.run()
    bench.step(0, 165)
    bench.finish()
    (offered,) = bench.out.take("offered")
    assert offered.num_blocks == 5
    bench.push_grant()
    (order,) = bench.orders(m.PushBlocks)
    assert order.chunk.local_block_ids == [21, 22, 23, 24]
    assert len(bench.orders(m.PushFinish)) == 1
    release = agent_pb2.ReleaseReplica(tenant="acme", session_id="s", head_hash=b"")
    bench.obey(release_replica=release)
    assert bench.held == 4  # until it is written
    bench.report(m.PushChunkDone("l1", 0), m.PushEnded("l1", True, ""))
    assert bench.held == 0


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("forgotten", "TURN_GONE_ON"),
        ("peer", "PEER_UNKNOWN"),
        ("late", "LEASE_EXPIRED"),
        ("replica", "REPLICA_GONE"),
    ],
)
def test_a_grant_that_cannot_be_used_is_refused(case: str, reason: str) -> None:
    bench = Prefill()
    if case == "forgotten":
        bench.obey(forget_turn=agent_pb2.ForgetTurn(turn_token="t", leg=PREFILL))
    elif case == "peer":
        bench.agent.eager.peers.clear()
    elif case == "replica":
        bench.run()
        bench.finish(aborted=True)
    bench.push_grant(ttl=0.1 if case == "late" else 30)
    assert [(x.lease_id, x.reason) for x in bench.out.take("refused")] == [("l1", reason)]
    assert not bench.orders(m.Push)


def test_a_request_with_other_hashes_is_not_written() -> None:
    bench = Prefill()
    bench.push_grant(hashes=chain(5, "b"))
    bench.run()
    assert bench.step(0, 165) == []
    assert [x.reason for x in bench.orders(m.PushStop)] == ["NO_COMMON_PREFIX"]


@pytest.mark.parametrize("how", ["abort", "preempt", "short", "revoke", "failure"])
def test_whatever_ends_the_leg_stops_the_push_and_keeps_what_flies(how: str) -> None:
    bench = Prefill()
    bench.push_grant()
    bench.run()
    bench.step(0, 80)
    match how:
        case "abort":
            bench.finish(aborted=True, blocks=2)
        case "short":
            bench.finish(blocks=2)
        case "preempt":
            bench.view.taken += 1
            assert bench.step(0, 165) == []
        case "revoke":
            bench.obey(revoke=agent_pb2.Revoke(lease_id="l1", reason="TURN_ENDED", is_source=True))
        case "failure":
            bench.report(m.MoverFailed("x"))
    (order,) = bench.orders(m.PushStop)
    reasons = {
        "abort": "REQUEST_ABORTED",
        "short": "REQUEST_ENDED",
        "preempt": "PREEMPTED",
        "revoke": "TURN_ENDED",
        "failure": "MOVER_FAILED",
    }
    assert order.reason == reasons[how]
    assert bench.held == 1
    assert bench.step(80, 85) == []
    bench.report(m.PushEnded("l1", False, order.reason))
    assert bench.held == 0
    assert bench.stopped() == [(FAILED, order.reason, True)]


def test_one_rank_that_fails_stops_the_others() -> None:
    bench = Prefill(ranks=2)
    bench.push_grant()
    bench.run()
    bench.step(0, 80)
    bench.report(m.PushEnded("l1", False, "TRANSFER_FAILED"))
    assert [x.reason for x in bench.orders(m.PushStop)] == ["TRANSFER_FAILED"]
    assert not bench.stopped()
    assert bench.held == 1
    bench.report(m.PushEnded("l1", False, "TRANSFER_FAILED"))
    assert bench.stopped() == [(FAILED, "TRANSFER_FAILED", True)]
    assert bench.held == 0


def test_a_write_that_stands_still_stops_all_ranks_and_is_extended_no_more() -> None:
    bench = Prefill(ranks=2)
    bench.push_grant()
    bench.run()
    bench.step(0, 80)
    bench.report(m.PushStopping("l1", "TRANSFER_STALLED"))
    assert [x.reason for x in bench.orders(m.PushStop)] == ["TRANSFER_STALLED"]
    assert not bench.stopped()
    more = agent_pb2.ExtendLeases(extension=3, lease_epoch=5, lease_seqs=[9], is_source=True)
    more.ttl.FromSeconds(60)
    bench.obey(extend_leases=more)
    (answer,) = bench.out.take("leases_extended")
    assert list(answer.missing_seqs) == [9]


def test_after_the_deadline_nothing_is_held_for_it() -> None:
    """A WRITE that never ends: nobody will be told that it was written."""
    bench = Prefill()
    bench.push_grant(ttl=5)
    bench.run()
    bench.step(0, 80)
    bench.clock.advance(5.1)
    bench.agent.post(Tick())
    bench.end_hook()
    assert [x.reason for x in bench.orders(m.PushStop)] == ["LEASE_EXPIRED"]
    assert bench.held == 0
    # Its end is still waited for, and listed.
    assert [(x.lease_id, x.is_source) for x in bench.agent.lease_inventory()] == [("l1", True)]


def test_a_revoke_for_a_lease_that_is_not_known_is_answered_by_the_movers() -> None:
    bench = Prefill()
    bench.obey(revoke=agent_pb2.Revoke(lease_id="old", reason="UNKNOWN_LEASE", is_source=True))
    assert [(x.lease_id, x.anew) for x in bench.orders(m.PushStop)] == [("old", True)]
    assert not bench.stopped()
    bench.report(m.PushEnded("old", False, "UNKNOWN_LEASE"))
    assert bench.stopped() == [(FAILED, "UNKNOWN_LEASE", True)]


def test_more_time_for_many_names_what_is_pushed_among_them() -> None:
    bench = Prefill()
    bench.push_grant()
    more = agent_pb2.ExtendLeases(extension=3, lease_epoch=5, lease_seqs=[9, 10], is_source=True)
    more.ttl.FromSeconds(60)
    bench.obey(extend_leases=more)
    (answer,) = bench.out.take("leases_extended")
    assert list(answer.missing_seqs) == [10]
    assert [x.deadline_ns for x in bench.orders(m.ExtendPush)] == [bench.clock() + 60 * NS]
    one = agent_pb2.Extend(lease_id="l1", version=3, is_source=True)
    one.ttl.FromSeconds(90)
    bench.obey(extend=one)
    (extended,) = bench.out.take("extended")
    assert (extended.lease_id, extended.version, extended.is_source) == ("l1", 3, True)


def test_a_prefill_leg_that_hopes_for_a_return_offers_no_landing_zone() -> None:
    """Found by the simulation: both legs know of the push."""
    bench = Bench()
    bench.expect(PREFILL, "l0", push=hope())
    assert bench.look(chain(5)) is None
    bench.clock.advance(1)
    assert bench.look(chain(5)) == 0
    bench.agent.allocated("r", ("t", PREFILL), range(20, 26), 0)
    assert not bench.out.take("hardened")
    assert not bench.out.take("refused")


def test_without_a_grant_the_leg_offers_what_it_leaves_as_ever() -> None:
    bench = Prefill()
    bench.run()
    bench.step(0, 165)
    bench.finish()
    assert len(bench.out.take("offered")) == 1


# -- an engine that only waits -------------------------------------------------------------------


def test_an_engine_that_only_waits_for_kv_rests_until_it_hears_something() -> None:
    """Else it would step on and on, on cores that prefill may need: 3.5 times slower here."""
    bench = Decode()
    looks: list[int] = []

    def has_input() -> bool:
        looks.append(1)
        return False

    bench.agent.rest(has_input)
    assert not looks  # nobody waits
    bench.land()
    bench.settle()
    # Another request waits, for something else: it is soon looked at.
    bench.agent._counts = lambda: (0, 2)
    bench.agent.rest(has_input)
    assert len(looks) == REST_NS // REST_LOOK_NS
    # Nobody else does.
    bench.agent._counts = lambda: (0, 1)
    looks.clear()

    def has_input_later() -> bool:
        looks.append(1)
        return len(looks) > 2 * REST_NS // REST_LOOK_NS

    bench.agent.rest(has_input_later)
    assert len(looks) == 2 * REST_NS // REST_LOOK_NS + 1
    looks.clear()
    bench.agent.rest(lambda: True)  # a request has come
    bench.agent.post(ended(True))
    bench.agent.rest(has_input)
    assert not looks
    bench.end_hook()
    bench.settle()
    bench.agent.rest(has_input)
    assert not looks


def rests(bench: Bench) -> bool:
    looks: list[int] = []
    bench.agent.rest(lambda: not looks.append(1))  # type: ignore[func-returns-value]
    return bool(looks)


def test_nobody_rests_over_a_step_that_computes() -> None:
    """vLLM schedules ahead: it takes that step's answer after this one only."""
    bench = Decode()
    bench.land()
    bench.settle()
    bench.begun += 1
    bench.agent.computing()
    bench.begun += 1
    assert not rests(bench)
    bench.over += 1
    assert rests(bench)


def test_nobody_rests_over_what_the_mover_has_told_vllms_worker() -> None:
    """A step takes it that is scheduled with the news, or the next one; one rest before vLLM hears
    of it, and a load that has failed would wait for ten seconds."""
    bench = Decode()
    bench.land()
    bench.settle()
    assert rests(bench)
    bench.begun += 1
    bench.agent.post(m.LandingGivenUp("r", "l1", "LATE"))
    bench.end_hook()
    for _ in range(2):
        assert not rests(bench)
        bench.begun += 1
        assert not rests(bench)
        bench.over += 1
    assert rests(bench)


def test_so_does_one_that_waits_for_a_word_on_what_it_may_read() -> None:
    """Only as long as that may take: who has waited for long enough computes."""
    bench = Decode()
    bench.obey(writer_stopped=agent_pb2.WriterStopped(lease_id="l1", pull_follows=True))
    assert bench.ask() is None
    bench.settle()
    bench.agent._counts = lambda: (0, 1)
    looks: list[int] = []

    def has_input() -> bool:
        looks.append(1)
        return False

    bench.agent.rest(has_input)
    assert len(looks) == 300  # the lookup's wait, in ms
    bench.clock.advance(0.29)
    looks.clear()
    bench.agent.rest(has_input)
    assert len(looks) == 10
    # The word comes.
    looks.clear()
    forward(bench, chain(5))
    assert bench.ask() == 4 * BLOCK
    bench.settle()
    bench.agent.rest(has_input)
    assert not looks


def test_one_that_has_waited_for_long_enough_does_not_rest() -> None:
    bench = Decode()
    bench.obey(writer_stopped=agent_pb2.WriterStopped(lease_id="l1", pull_follows=True))
    assert bench.ask() is None
    bench.clock.advance(0.4)
    bench.settle()
    looks: list[int] = []
    bench.agent.rest(lambda: bool(looks.append(1)))  # type: ignore[func-returns-value]
    assert not looks
    assert bench.ask() == 0
    bench.agent.rest(lambda: bool(looks.append(1)))  # type: ignore[func-returns-value]
    assert not looks


def test_so_does_one_that_waits_for_a_read() -> None:
    bench = Decode()
    bench.obey(writer_stopped=agent_pb2.WriterStopped(lease_id="l1", pull_follows=True))
    forward(bench, chain(5))
    assert bench.ask() == 4 * BLOCK
    bench.agent.allocated("r", bench.key, range(20, 26), 4 * BLOCK)
    bench.end_hook()
    bench.settle()
    looks: list[int] = []
    bench.agent._counts = lambda: (0, 2)
    bench.agent.rest(lambda: bool(looks.append(1)))  # type: ignore[func-returns-value]
    assert looks
    bench.agent.post(m.ReadEnded("r", "l2", True, "", 1_000, 5))
    bench.end_hook()
    bench.settle()
    looks.clear()
    bench.agent.rest(lambda: bool(looks.append(1)))  # type: ignore[func-returns-value]
    assert not looks
