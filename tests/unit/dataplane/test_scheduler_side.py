"""The scheduler side of the agent: holds, matching and leases."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.scheduler import (
    CommandBatch,
    FinishedRequest,
    SchedulerAgent,
    StreamLife,
    StreamUp,
    Tick,
)
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import session_service_pb2 as session_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.fakes import FakeClock, FakeOutbox, FakePool, grant_of

BLOCK = 32
PREFILL, DECODE = types_pb2.LEG_PREFILL, types_pb2.LEG_DECODE


def chain(n: int, salt: str = "a") -> tuple[bytes, ...]:
    return tuple(f"{salt}{i:031d}".encode() for i in range(n))


def harden_command(
    hashes: tuple[bytes, ...], lease: str = "l1", ttl: float = 30, seq: int = 0
) -> agent_pb2.Harden:
    command = agent_pb2.Harden(
        lease_id=lease,
        version=1,
        tenant="acme",
        session_id="s",
        head_hash=hashes[-1],
        range=types_pb2.BlockRange(start=0, end=len(hashes)),
        destination=types_pb2.WorkerRef(worker_id="other", incarnation=1),
        lease_epoch=5,
        lease_seq=seq,
    )
    command.ttl.FromNanoseconds(int(ttl * NS))
    command.guard.FromSeconds(5)
    return command


class Bench:
    """One agent with its surroundings faked."""

    def __init__(self, *, total: int = 100, caching: bool = True, ranks: int = 1) -> None:
        self.pool = FakePool(total, caching=caching)
        self.out = FakeOutbox(ranks)
        self.clock = FakeClock()
        self.life = StreamLife()
        # Steps that were begun, and that are over.
        self.begun = self.over = 0
        self.agent = SchedulerAgent(
            self.pool,
            self.out,
            self.clock,
            block_size=BLOCK,
            worker_id="w",
            counts=lambda: (0, 0),
            steps=lambda: (self.begun, self.over),
        )
        welcome = agent_pb2.AgentWelcome(incarnation=1, lineage_id="L", clock_drift_ppm=200)
        self.agent.post(StreamUp(1, 5, welcome))
        self.agent.post(m.PeerReady("other", 1, ""))
        self.agent.drain()

    def obey(self, *, generation: int = 1, epoch: int = 5, **command: Any) -> None:
        batch = [agent_pb2.AgentCommand(**{k: v}) for k, v in command.items()]
        self.agent.post(CommandBatch(generation, epoch, batch, self.life))
        self.end_hook()

    def settle(self) -> None:
        """vLLM has heard of all steps, of which some had nothing to compute."""
        self.begun += 2
        self.over = self.begun

    def end_hook(self) -> None:
        """As the connector ends a step."""
        self.agent.drain()
        self.agent.next_deadline()

    def expect(self, leg: types_pb2.Leg.ValueType, lease: str = "", **more: Any) -> None:
        expect = agent_pb2.ExpectTurn(
            turn_token="t", tenant="acme", session_id="s", turn=1, leg=leg, lease_id=lease, **more
        )
        expect.lookup_wait.FromMilliseconds(300)
        expect.retention.FromSeconds(100)
        self.obey(expect_turn=expect)

    def grant(
        self, hashes: tuple[bytes, ...], lease: str = "l1", ttl: float = 30, seq: int = 0
    ) -> None:
        self.obey(
            grant=grant_of(hashes, self.clock(), lease=lease, ttl=ttl, lease_epoch=5, lease_seq=seq)
        )

    def offer(
        self,
        hashes: tuple[bytes, ...],
        first: int = 10,
        *,
        turn: str = "t",
        aborted: bool = False,
    ) -> None:
        """A decode leg finishes; its own references are gone right after, as in vLLM."""
        ids = tuple(range(first, first + len(hashes)))
        self.pool.touch(ids)
        self.pool.cache.update(zip(hashes, ids, strict=True))
        request = FinishedRequest("r-decode", hashes, ids, len(hashes) * BLOCK, aborted)
        self.agent.finished((turn, DECODE), request)
        self.pool.free(ids)

    def harden(
        self, hashes: tuple[bytes, ...], lease: str = "l1", ttl: float = 30, seq: int = 0
    ) -> None:
        self.obey(harden=harden_command(hashes, lease, ttl, seq))

    def look(self, own: tuple[bytes, ...], computed: int = 0, request: str = "r") -> int | None:
        return self.agent.look(request, ("t", PREFILL), own, len(own) * BLOCK + 5, computed)

    @property
    def held(self) -> int:
        return self.agent.pool_stats().held_blocks


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Matching.


def test_a_request_loads_the_common_hash_prefix_beyond_its_own_cache(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(6))
    own = chain(4) + chain(4, "b")
    assert bench.look(own, computed=BLOCK) == 3 * BLOCK
    bench.agent.allocated("r", ("t", PREFILL), range(20, 29), 3 * BLOCK)
    (order,) = [o for o in bench.out.orders if isinstance(o, m.Read)]
    assert order.local_block_ids == [21, 22, 23]
    assert order.remote_block_ids == [501, 502, 503]


def test_equal_length_with_other_content_loads_nothing(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(6))
    assert bench.look(chain(6, "b")) == 0
    bench.agent.allocated("r", ("t", PREFILL), range(20, 27), 0)
    (stopped,) = bench.out.take("stopped")
    assert stopped.reason == "NO_COMMON_PREFIX"
    assert not [o for o in bench.out.orders if isinstance(o, m.Read)]


def test_the_last_token_is_always_computed(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4))
    assert bench.agent.look("r", ("t", PREFILL), chain(4), 4 * BLOCK, 0) == 4 * BLOCK - 1


def test_what_the_engine_has_itself_is_not_read(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4))
    assert bench.look(chain(4), computed=4 * BLOCK) == 0


def test_a_lookup_waits_for_its_grant_and_no_longer_than_told(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    assert bench.look(chain(4)) is None
    bench.clock.advance(0.2)
    assert bench.look(chain(4)) is None
    bench.clock.advance(0.2)
    assert bench.look(chain(4)) == 0
    bench.agent.allocated("r", ("t", PREFILL), range(4), 0)
    assert bench.agent.counters.snapshot().fallbacks == {"GRANT_TIMEOUT": 1}
    # The late grant goes back at once, so that its source is not held for nothing.
    bench.grant(chain(4))
    assert [s.reason for s in bench.out.take("stopped")] == ["TURN_GONE_ON"]


def test_a_revoke_before_the_grant_ends_the_wait(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    assert bench.look(chain(4)) is None
    bench.obey(revoke=agent_pb2.Revoke(lease_id="l1", turn_token="t", reason="REPLICA_GONE"))
    assert bench.look(chain(4)) == 0


def test_a_lease_that_was_denied_to_one_turn_is_not_denied_to_others(bench: Bench) -> None:
    for token in ("t1", "t2"):
        expect = agent_pb2.ExpectTurn(
            turn_token=token, tenant="acme", session_id=token, turn=1, leg=DECODE,
            lease_follows=True,
        )  # fmt: skip
        expect.lookup_wait.FromMilliseconds(300)
        bench.obey(expect_turn=expect)
    # There is no lease that it could name.
    bench.obey(revoke=agent_pb2.Revoke(turn_token="t1", reason="TENANT_BUDGET"))
    looks = [
        bench.agent.look(f"r-{token}", (token, DECODE), chain(4), 4 * BLOCK + 5, 0)
        for token in ("t1", "t2")
    ]
    assert looks == [0, None]
    assert bench.out.take("stopped") == []


def test_a_short_prompt_does_not_wait_for_a_lease_that_it_would_not_use(bench: Bench) -> None:
    bench.expect(PREFILL, "l1", min_tokens=64)
    assert bench.look(chain(1)) == 0
    assert bench.look(chain(4), computed=3 * BLOCK, request="r2") == 0


def test_without_a_lease_to_come_nothing_waits(bench: Bench) -> None:
    bench.expect(PREFILL)
    assert bench.look(chain(4)) == 0


def test_an_unannounced_token_waits_briefly_and_recomputes(bench: Bench) -> None:
    assert bench.look(chain(4)) is None
    bench.clock.advance(0.06)
    assert bench.look(chain(4)) == 0


def test_without_a_control_plane_nothing_waits(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.out.connected = False
    assert bench.look(chain(4)) == 0


def test_an_expired_grant_is_not_used(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4), ttl=10)
    bench.clock.advance(9.9)  # within the margin before the deadline
    assert bench.look(chain(4)) == 0


def test_the_ttl_counts_from_the_heartbeat_that_the_grant_names(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.clock.advance(-8)
    bench.grant(chain(4), ttl=10)
    bench.clock.advance(8)
    assert bench.look(chain(4)) == 4 * BLOCK
    bench.clock.advance(1.9)
    assert bench.look(chain(4)) == 0


def test_one_lease_serves_one_request(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4))
    assert bench.look(chain(4), request="r1") == 4 * BLOCK
    bench.agent.allocated("r1", ("t", PREFILL), range(20, 25), 4 * BLOCK)
    assert bench.look(chain(4), request="r2") == 0


def test_too_few_tokens_are_not_worth_a_transfer(bench: Bench) -> None:
    bench.expect(PREFILL, "l1", min_tokens=64)
    bench.grant(chain(1))
    assert bench.look(chain(4)) == 0


# Landing blocks.


def load(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4))
    assert bench.look(chain(4)) == 4 * BLOCK
    bench.pool.touch(range(20, 25))  # vLLM's own references
    bench.agent.allocated("r", ("t", PREFILL), range(20, 25), 4 * BLOCK)


def ended(bench: Bench, *, published: bool = True, reason: str = "") -> None:
    bench.agent.post(m.ReadEnded("r", "l1", published, reason, 1000, 5))
    bench.agent.drain()


def test_a_published_load_is_reported_and_its_hold_ends(bench: Bench) -> None:
    load(bench)
    assert bench.held == 4
    ended(bench)
    assert bench.held == 0
    (stopped,) = bench.out.take("stopped")
    assert stopped.outcome == agent_pb2.TRANSFER_OUTCOME_PUBLISHED
    assert (stopped.stats.tokens, stopped.stats.bytes) == (128, 1000)


def test_landing_blocks_of_an_aborted_request_stay_until_nothing_writes(bench: Bench) -> None:
    load(bench)
    request = FinishedRequest("r", (), (), 133, True)
    bench.agent.finished(("t", PREFILL), request)
    bench.pool.free(range(20, 25))  # vLLM lets go of its references
    assert [o for o in bench.out.orders if isinstance(o, m.Abandon)]
    assert bench.held == 4
    assert bench.pool.references[20] == 1
    ended(bench, published=False, reason="REQUEST_ENDED")
    assert bench.held == 0
    assert bench.pool.free_blocks == 100


@pytest.mark.parametrize("how", ["revoke", "fence", "the turn's end"])
def test_a_reader_that_reads_has_not_stopped(bench: Bench, how: str) -> None:
    """Whatever asks it to stop: the source may let go only when nothing reads any more."""
    load(bench)
    if how == "revoke":
        bench.obey(revoke=agent_pb2.Revoke(lease_id="l1", reason="OPERATOR", turn_token="t"))
    elif how == "fence":
        other = types_pb2.WorkerRef(worker_id="other", incarnation=1)
        bench.obey(peer_fenced=agent_pb2.PeerFenced(worker=other))
    else:
        bench.obey(forget_turn=agent_pb2.ForgetTurn(turn_token="t", leg=PREFILL))
    assert (bench.out.take("stopped"), bench.held) == ([], 4)
    assert [lease.lease_id for lease in bench.agent.lease_inventory()] == ["l1"]
    ended(bench, published=False, reason="REVOKED")
    assert [stopped.lease_id for stopped in bench.out.take("stopped")] == ["l1"]
    assert bench.held == 0


def test_a_failed_load_is_a_quarantine_until_nothing_writes(bench: Bench) -> None:
    load(bench)
    bench.agent.load_failed(["r"])
    assert bench.agent.pool_stats().quarantined_blocks == 4
    # The request is asked again, with other blocks: it recomputes.
    assert bench.look(chain(4)) == 0
    ended(bench, published=False, reason="TRANSFER_STALLED")
    assert bench.agent.pool_stats().quarantined_blocks == 0
    (stopped,) = bench.out.take("stopped")
    assert stopped.outcome == agent_pb2.TRANSFER_OUTCOME_FAILED
    assert bench.agent.counters.snapshot().fallbacks == {"TRANSFER_STALLED": 1}


def test_beyond_the_quarantine_cap_no_new_landing_zone_is_taken() -> None:
    bench = Bench(total=30)
    load(bench)
    bench.agent.load_failed(["r"])
    bench.obey(
        expect_turn=agent_pb2.ExpectTurn(turn_token="u", leg=PREFILL, lease_id="l2"),
    )
    bench.obey(grant=grant_of(chain(4), bench.clock(), lease="l2", turn_token="u"))
    assert bench.agent.look("r2", ("u", PREFILL), chain(5), 165, 0) == 0


def test_every_rank_must_have_ended() -> None:
    bench = Bench(ranks=2)
    load(bench)
    ended(bench)
    assert bench.held == 4
    ended(bench)
    assert bench.held == 0


# Replicas.


def test_a_finished_decode_leg_is_held_and_offered(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    (offered,) = bench.out.take("offered")
    assert (offered.num_blocks, offered.num_tokens) == (5, 160)
    assert offered.state == session_pb2.REPLICA_STATE_HARD
    assert bench.pool.free_blocks == 95


def test_a_longer_turn_supersedes_and_a_fork_does_not(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.offer(chain(8))
    assert bench.pool.free_blocks == 92
    assert [c.reason for c in bench.out.take("replica_changed")] == ["SUPERSEDED"]
    bench.offer(chain(3) + chain(3, "b"), first=40)
    assert bench.pool.free_blocks == 86


def test_an_aborted_prefill_leaves_nothing(bench: Bench) -> None:
    bench.expect(PREFILL)
    request = FinishedRequest("r", chain(3), (1, 2, 3), 100, True)
    bench.agent.finished(("t", PREFILL), request)
    assert not bench.out.take("offered")
    assert bench.held == 0


def test_a_hold_ends_with_its_retention_and_the_replica_turns_soft(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.clock.advance(101)
    bench.agent.post(Tick())
    bench.agent.drain()
    assert bench.held == 0
    (changed,) = bench.out.take("replica_changed")
    assert (changed.state, changed.reason) == (session_pb2.REPLICA_STATE_SOFT, "EXPIRED")


def retain(head_hash: bytes, seconds: int, keep_blocks: int) -> agent_pb2.RetainReplica:
    command = agent_pb2.RetainReplica(
        tenant="acme", session_id="s", head_hash=head_hash, keep_blocks=keep_blocks
    )
    command.retention.FromSeconds(seconds)
    return command


def test_a_replica_is_trimmed_and_keeps_its_start(bench: Bench) -> None:
    hashes = chain(5)
    bench.expect(DECODE)
    bench.offer(hashes)
    bench.obey(retain_replica=retain(hashes[-1], 50, 3))
    assert bench.held == 3
    assert bench.pool.free_blocks == 97
    (changed,) = bench.out.take("replica_changed")
    assert (changed.state, changed.num_blocks) == (session_pb2.REPLICA_STATE_HARD, 3)
    # Trimmed to more than there is, or to all of it: nothing changes.
    bench.obey(retain_replica=retain(hashes[-1], 50, 4))
    bench.obey(retain_replica=retain(hashes[-1], 50, 0))
    assert (bench.held, bench.out.take("replica_changed")) == (3, [])
    # What is left can be read, and goes soft in its time.
    bench.harden(hashes)
    (hardened,) = bench.out.take("hardened")
    assert list(hardened.blocks.block_ids) == [10, 11, 12]
    (offered,) = bench.agent.source.inventory()
    assert offered.num_blocks == 3
    bench.clock.advance(51)
    bench.agent.post(Tick())
    bench.agent.drain()
    (changed,) = bench.out.take("replica_changed")
    assert (changed.state, changed.num_blocks) == (session_pb2.REPLICA_STATE_SOFT, 3)


def test_without_a_prefix_cache_an_ended_hold_is_gone() -> None:
    bench = Bench(caching=False)
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.clock.advance(101)
    bench.agent.post(Tick())
    bench.agent.drain()
    (changed,) = bench.out.take("replica_changed")
    assert changed.state == session_pb2.REPLICA_STATE_GONE


def test_under_pressure_the_soonest_to_expire_goes_first_and_leases_stay(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(20, "x"), first=0)
    bench.clock.advance(1)
    bench.offer(chain(20, "y"), first=20)
    bench.clock.advance(1)
    bench.offer(chain(20, "z"), first=40)
    bench.harden(chain(20, "x"), "lease-x")
    bench.agent.make_room(55)
    # x was first to go, but its lease holds its blocks; y went too; z stays.
    assert bench.pool.references[0] == 1
    assert bench.pool.references[20] == 0
    assert bench.pool.references[40] == 1
    # Nor does its reader hear a no.
    bench.agent.make_room(100)
    assert not [order for order in bench.out.orders if isinstance(order, m.Unserve)]
    assert bench.agent.source.open_leases[0].closing == ""


# Leases at the source.


def test_harden_answers_with_where_the_range_lies(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5))
    (hardened,) = bench.out.take("hardened")
    assert list(hardened.blocks.block_ids) == [10, 11, 12, 13, 14]
    assert hardened.blocks.hashes == b"".join(chain(5))
    assert isinstance(bench.out.orders[-1], m.Serve)


def test_a_soft_replica_is_hardened_as_far_as_it_is_still_there(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.clock.advance(101)
    bench.agent.post(Tick())
    bench.agent.drain()
    del bench.pool.cache[chain(5)[3]]  # vLLM has reused the fourth block
    bench.harden(chain(5))
    (hardened,) = bench.out.take("hardened")
    assert hardened.blocks.range.end == 3


def test_an_unknown_replica_is_refused(bench: Bench) -> None:
    bench.harden(chain(5))
    (refused,) = bench.out.take("refused")
    assert refused.reason == "REPLICA_GONE"


def stop_serving(bench: Bench, lease: str = "l1") -> None:
    bench.agent.post(m.Unserved(lease))
    bench.agent.drain()


def test_a_source_keeps_its_range_until_the_reader_has_stopped(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5))
    # None of these ends a lease's hold: the end of the session, a revoke, a lost stream.
    bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
    bench.obey(revoke=agent_pb2.Revoke(lease_id="l1", reason="OPERATOR"))
    assert bench.held == 5
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1"))
    assert bench.held == 5  # the mover has not yet confirmed that it says no
    stop_serving(bench)
    assert bench.held == 0
    (released,) = bench.out.take("source_released")
    assert released.reason == "READER_STOPPED"


def test_a_source_keeps_its_range_until_every_rank_says_no_to_the_reader() -> None:
    """A rank that still says yes lets its reader publish what it has read."""
    bench = Bench(ranks=2)
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5))
    bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1"))
    stop_serving(bench)
    assert (bench.held, bench.out.take("source_released")) == (5, [])
    stop_serving(bench)
    assert (bench.held, len(bench.out.take("source_released"))) == (0, 1)


def test_a_source_keeps_its_range_for_ttl_guard_and_drift(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5), ttl=30)
    bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
    bench.clock.advance(35.001)
    bench.agent.post(Tick())
    bench.agent.drain()
    assert not any(isinstance(o, m.Unserve) for o in bench.out.orders)
    bench.clock.advance(0.02)
    bench.agent.post(Tick())
    bench.agent.drain()
    stop_serving(bench)
    assert bench.held == 0


def test_an_extension_moves_the_source_deadline(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5), ttl=10)
    bench.clock.advance(8)
    extend = agent_pb2.Extend(lease_id="l1", version=2, is_source=True)
    extend.ttl.FromSeconds(30)
    extend.guard.FromSeconds(5)
    bench.obey(extend=extend)
    bench.clock.advance(20)
    bench.agent.post(Tick())
    bench.agent.drain()
    assert not any(isinstance(o, m.Unserve) for o in bench.out.orders)
    assert len(bench.out.take("extended")) == 1


def test_the_readers_own_notice_ends_the_lease_after_all_ranks() -> None:
    bench = Bench(ranks=2)
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5))
    bench.agent.post(m.ReaderDone("l1"))
    bench.agent.drain()
    assert not any(isinstance(o, m.Unserve) for o in bench.out.orders)
    bench.agent.post(m.ReaderDone("l1"))
    bench.agent.drain()
    assert any(isinstance(o, m.Unserve) for o in bench.out.orders)


# Who is obeyed.


@pytest.mark.parametrize(("generation", "epoch"), [(0, 5), (1, 4)])
def test_a_closed_stream_and_an_older_term_are_not_obeyed(
    bench: Bench, generation: int, epoch: int
) -> None:
    expect = agent_pb2.ExpectTurn(turn_token="t", leg=PREFILL, lease_id="l1")
    bench.obey(generation=generation, epoch=epoch, expect_turn=expect)
    assert bench.look(chain(4)) is None  # unknown: waits for an announcement
    bench.clock.advance(0.06)
    assert bench.look(chain(4)) == 0


def test_one_bad_command_does_not_stop_the_next(bench: Bench) -> None:
    bad = agent_pb2.AgentCommand(
        harden=agent_pb2.Harden(lease_id="bad", range=types_pb2.BlockRange(start=9, end=2))
    )
    good = agent_pb2.AgentCommand(
        expect_turn=agent_pb2.ExpectTurn(turn_token="t", leg=PREFILL, lease_id="")
    )
    bench.agent.post(CommandBatch(1, 5, [bad, good]))
    bench.agent.drain()
    assert bench.look(chain(4)) == 0


def test_nothing_is_left_when_all_is_over(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(5))
    bench.harden(chain(5))
    bench.agent.post(m.ReaderDone("l1"))
    bench.agent.drain()
    stop_serving(bench)
    bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
    stats = bench.agent.pool_stats()
    assert (stats.holds, stats.held_blocks, stats.open_leases) == (0, 0, 0)
    assert bench.pool.free_blocks == 100


def test_what_decode_leaves_is_offered_though_its_turn_is_over(bench: Bench) -> None:
    """The server finds stop words, so a turn can end before its request does in the engine."""
    bench.expect(DECODE)
    bench.obey(forget_turn=agent_pb2.ForgetTurn(turn_token="t", leg=DECODE))
    bench.offer(chain(4))
    (offered,) = bench.out.take("offered")
    assert offered.num_blocks == 4


def test_nothing_is_read_for_a_turn_that_is_over(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.obey(forget_turn=agent_pb2.ForgetTurn(turn_token="t", leg=PREFILL))
    bench.grant(chain(6))
    (stopped,) = bench.out.take("stopped")
    assert stopped.reason == "TURN_GONE_ON"
    assert bench.look(chain(6)) is None, "it could be a turn that is still to be announced"
    bench.clock.advance(1)
    assert bench.look(chain(6)) == 0
    # Nor is anything of a prefill leg offered: nobody waits for it.
    ids = tuple(range(10, 14))
    bench.pool.touch(ids)
    request = FinishedRequest("r", chain(4), ids, 4 * BLOCK, False)
    bench.agent.finished(("t", PREFILL), request)
    assert bench.out.take("offered") == []
