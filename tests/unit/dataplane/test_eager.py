"""Returns that no request waits for, and soft replicas that get shorter."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.limits import (
    EAGER_FREE_SHARE,
    EAGER_PIECE_BLOCKS,
    EAGER_PIECE_NS,
    EAGER_PIECE_SHARE,
)
from kvshuttle.dataplane.matching import laid_out_as
from kvshuttle.dataplane.scheduler import Tick
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import session_service_pb2 as session_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.fakes import grant_of
from tests.unit.dataplane.test_scheduler_side import BLOCK, DECODE, PREFILL, Bench, chain

PUBLISHED = agent_pb2.TRANSFER_OUTCOME_PUBLISHED
UNUSED = agent_pb2.TRANSFER_OUTCOME_UNUSED
FAILED = agent_pb2.TRANSFER_OUTCOME_FAILED
REVOKED = agent_pb2.TRANSFER_OUTCOME_REVOKED


def eager_grant(
    bench: Bench, hashes: tuple[bytes, ...], lease: str = "e1", ttl: float = 30, **more: object
) -> agent_pb2.Grant:
    eager: dict[str, object] = {
        "turn_token": "",
        "eager": True,
        "tenant": "acme",
        "session_id": "s",
    }
    return grant_of(hashes, bench.clock(), lease=lease, ttl=ttl, **(eager | more))


def eager(
    bench: Bench, hashes: tuple[bytes, ...], lease: str = "e1", ttl: float = 30, **more: object
) -> None:
    bench.obey(grant=eager_grant(bench, hashes, lease, ttl, **more))


def reads(bench: Bench) -> list[m.Read]:
    return [o for o in bench.out.orders if isinstance(o, m.Read)]


def end_read(
    bench: Bench, read: m.Read, reason: str = "", ranks: int = 1, took_ns: int = 5_000_000
) -> None:
    for _ in range(ranks):
        bench.agent.post(
            m.ReadEnded(
                read.request_id,
                read.lease_id,
                not reason,
                reason,
                1_000 * len(read.local_block_ids),
                took_ns,
                3,
            )
        )
    bench.end_hook()


@pytest.fixture
def bench() -> Bench:
    return Bench(total=300)


def test_it_lands_in_the_cache_and_is_let_go(bench: Bench) -> None:
    hashes = chain(6)
    eager(bench, hashes)
    (read,) = reads(bench)
    assert not read.attended
    assert read.last
    assert read.remote_block_ids == list(range(500, 506))
    assert bench.held == 6
    assert all(bench.pool.lookup(h) is None for h in hashes), "entered before it was read"
    end_read(bench, read)
    assert [bench.pool.lookup(h) for h in hashes] == read.local_block_ids
    assert bench.held == 0
    assert bench.pool.free_blocks == 300
    (offered,) = bench.out.take("offered")
    assert offered.state == session_pb2.REPLICA_STATE_SOFT
    assert (offered.session_id, offered.num_blocks, offered.head_hash) == ("s", 6, hashes[-1])
    (stopped,) = bench.out.take("stopped")
    assert stopped.outcome == PUBLISHED
    assert (stopped.stats.blocks, stopped.stats.bytes) == (6, 6_000)
    assert stopped.stats.descriptors == 3
    counted = bench.agent.counters.snapshot()
    assert (counted.returned_tokens, counted.eager_tokens) == (6 * BLOCK, 6 * BLOCK)


@given(remote=st.lists(st.integers(0, 60), unique=True, max_size=20), data=st.data())
def test_blocks_are_laid_out_as_their_source_has_them(
    remote: list[int], data: st.DataObject
) -> None:
    size = len(remote)
    local = data.draw(st.lists(st.integers(0, 60), unique=True, min_size=size, max_size=size))
    found = laid_out_as(remote, local)
    assert sorted(found) == sorted(local)
    pairs = sorted(zip(remote, found, strict=True))
    assert [mine for _, mine in pairs] == sorted(local)


def test_a_chain_in_falling_order_lands_in_falling_order(bench: Bench) -> None:
    """So that it is one piece of memory."""
    blocks = types_pb2.BlockDescriptors(
        range=types_pb2.BlockRange(start=0, end=6),
        block_ids=range(505, 499, -1),
        hashes=b"".join(chain(6)),
        hash_size=32,
    )
    eager(bench, chain(6), blocks=blocks)
    (read,) = reads(bench)
    first = read.local_block_ids[-1]
    assert read.local_block_ids == list(range(first + 5, first - 1, -1))
    end_read(bench, read)
    assert [bench.pool.lookup(h) for h in chain(6)] == read.local_block_ids


def test_only_what_is_missing_is_read(bench: Bench) -> None:
    hashes = chain(6)
    bench.pool.cache.update({hashes[0]: 31, hashes[1]: 32, hashes[4]: 33})
    eager(bench, hashes)
    (read,) = reads(bench)
    assert read.remote_block_ids == [502, 503, 505]
    assert bench.held == 6, "what the new blocks continue may not be evicted meanwhile"
    end_read(bench, read)
    (stopped,) = bench.out.take("stopped")
    assert stopped.stats.blocks == 3
    assert bench.held == 0


def test_nothing_is_read_when_all_of_it_is_cached(bench: Bench) -> None:
    hashes = chain(3)
    bench.pool.cache.update(dict(zip(hashes, (31, 32, 33), strict=True)))
    eager(bench, hashes)
    assert reads(bench) == []
    (stopped,) = bench.out.take("stopped")
    assert (stopped.outcome, stopped.reason) == (UNUSED, "LOCAL_HIT")
    assert bench.out.take("offered"), "the control plane learns that it is there"
    assert bench.held == 0


@pytest.mark.parametrize("total", [300, 100_000])
def test_a_long_chain_comes_in_pieces_and_the_source_is_told_the_last(total: int) -> None:
    """Where the pool is small, or the link slow, the pieces are."""
    bench = Bench(total=total)
    hashes = chain(2 * EAGER_PIECE_BLOCKS + 5)
    eager(bench, hashes)
    for count in (EAGER_PIECE_BLOCKS, EAGER_PIECE_BLOCKS, 5):
        read = reads(bench)[-1]
        assert len(read.local_block_ids) == count
        assert read.last == (count == 5)
        end_read(bench, read, took_ns=5_000_000 if total == 300 else EAGER_PIECE_NS)
    assert len(reads(bench)) == 3
    assert all(bench.pool.lookup(h) is not None for h in hashes)
    (stopped,) = bench.out.take("stopped")
    assert stopped.stats.blocks == len(hashes)


def test_the_faster_the_link_the_larger_the_pieces() -> None:
    """A busy engine orders one piece a step; none takes much of the pool."""
    total = 20_000
    bench = Bench(total=total)
    first, most = EAGER_PIECE_BLOCKS, int(EAGER_PIECE_SHARE * total)
    eager(bench, chain(first + 4 * first + most + 7))
    for count, took_ns in ((first, EAGER_PIECE_NS // 4), (4 * first, 1_000), (most, 1), (7, 1)):
        read = reads(bench)[-1]
        assert len(read.local_block_ids) == count
        end_read(bench, read, took_ns=took_ns)
    (stopped,) = bench.out.take("stopped")
    assert stopped.stats.blocks == 5 * first + most + 7


def test_it_never_takes_the_last_free_blocks(bench: Bench) -> None:
    spare = int(EAGER_FREE_SHARE * 300)
    bench.pool.touch(range(1, 300 - spare - 10 + 1))
    free = bench.pool.free_blocks
    eager(bench, chain(40))
    (read,) = reads(bench)
    assert len(read.local_block_ids) == 10
    assert bench.pool.free_blocks == free - 10 == spare
    end_read(bench, read)
    (stopped,) = bench.out.take("stopped")
    assert (stopped.outcome, stopped.reason) == (PUBLISHED, "NO_ROOM")
    (offered,) = bench.out.take("offered")
    assert offered.num_blocks == 10, "a prefix is worth having"


def test_a_request_that_needs_blocks_ends_it(bench: Bench) -> None:
    hashes = chain(EAGER_PIECE_BLOCKS + 5)
    eager(bench, hashes)
    first = reads(bench)[0]
    end_read(bench, first)
    bench.agent.make_room(300)
    # What has landed may be reused; what may still be written to may not.
    assert bench.held == 5
    assert any(isinstance(o, m.Abandon) for o in bench.out.orders)
    end_read(bench, reads(bench)[1], "PRESSURE")
    assert bench.held == 0
    (stopped,) = bench.out.take("stopped")
    assert (stopped.outcome, stopped.reason) == (PUBLISHED, "PRESSURE")
    assert bench.pool.lookup(hashes[0]) is not None


def test_what_was_not_confirmed_is_not_entered(bench: Bench) -> None:
    hashes = chain(4)
    eager(bench, hashes)
    end_read(bench, reads(bench)[0], "SOURCE_LET_GO")
    assert all(bench.pool.lookup(h) is None for h in hashes)
    assert bench.held == 0
    (stopped,) = bench.out.take("stopped")
    assert (stopped.outcome, stopped.reason) == (FAILED, "SOURCE_LET_GO")
    assert bench.out.take("offered") == []


def test_one_rank_that_failed_fails_the_piece() -> None:
    bench = Bench(total=300, ranks=2)
    hashes = chain(4)
    eager(bench, hashes)
    (read,) = reads(bench)
    end_read(bench, read)
    assert bench.held == 4, "the other rank may still be written to"
    end_read(bench, read, "TRANSFER_FAILED")
    assert all(bench.pool.lookup(h) is None for h in hashes)
    assert bench.held == 0


def test_a_read_that_does_not_end_is_a_quarantine(bench: Bench) -> None:
    eager(bench, chain(4))
    (read,) = reads(bench)
    bench.agent.post(m.ReadGivenUp(read.request_id, "TRANSFER_STALLED"))
    bench.end_hook()
    stats = bench.agent.pool_stats()
    assert (stats.held_blocks, stats.quarantined_blocks) == (4, 4)
    assert bench.out.take("stopped") == [], "the source must keep the range"
    end_read(bench, read, "TRANSFER_STALLED")
    assert bench.agent.pool_stats().quarantined_blocks == 0
    assert bench.out.take("stopped")[0].outcome == FAILED


def test_revoke_stops_it_but_keeps_what_may_be_written_to(bench: Bench) -> None:
    eager(bench, chain(4))
    revoke = agent_pb2.Revoke(lease_id="e1", version=3, reason="SESSION_ENDED")
    bench.obey(revoke=revoke)
    assert bench.held == 4
    assert bench.out.take("stopped") == []
    end_read(bench, reads(bench)[0], "SESSION_ENDED")
    assert bench.held == 0
    (stopped,) = bench.out.take("stopped")
    assert stopped.outcome == REVOKED


@pytest.mark.parametrize(
    ("changes", "caching", "reason"),
    [
        ({"hash_size": 5}, True, "GRANT_MALFORMED"),
        ({}, False, "PREFIX_CACHING_OFF"),
    ],
)
def test_what_cannot_be_is_given_back_at_once(
    changes: dict[str, int], caching: bool, reason: str
) -> None:
    bench = Bench(total=300, caching=caching)
    grant_blocks = changes.get("hash_size")
    if grant_blocks:
        grant = agent_pb2.Grant(lease_id="e1", version=2, eager=True)
        grant.blocks.hashes, grant.blocks.hash_size = b"123", 5
        bench.obey(grant=grant)
    else:
        eager(bench, chain(4))
    (stopped,) = bench.out.take("stopped")
    assert stopped.reason == reason
    assert reads(bench) == []
    assert bench.held == 0


def test_nothing_is_posted_near_the_deadline(bench: Bench) -> None:
    hashes = chain(EAGER_PIECE_BLOCKS + 5)
    eager(bench, hashes, ttl=10)
    bench.clock.advance(9.9)
    end_read(bench, reads(bench)[0])
    assert len(reads(bench)) == 1
    (stopped,) = bench.out.take("stopped")
    assert (stopped.outcome, stopped.reason) == (PUBLISHED, "LEASE_EXPIRED")
    assert bench.held == 0


def test_a_fenced_source_ends_it(bench: Bench) -> None:
    eager(bench, chain(4))
    fenced = agent_pb2.PeerFenced(worker=types_pb2.WorkerRef(worker_id="other", incarnation=1))
    bench.obey(peer_fenced=fenced)
    end_read(bench, reads(bench)[0], "PEER_FENCED")
    assert bench.held == 0


# A turn that comes meanwhile.


def test_a_turn_that_comes_in_the_midst_waits_and_then_finds_it(bench: Bench) -> None:
    hashes = chain(6)
    eager(bench, hashes)
    bench.expect(PREFILL, "e1", replica_blocks=6, min_tokens=64)
    own = hashes + chain(10, "b")
    assert bench.look(own) is None
    end_read(bench, reads(bench)[0])
    # vLLM looks again into its own cache first.
    assert bench.look(own, computed=6 * BLOCK) == 0
    bench.agent.allocated("r", ("t", PREFILL), range(20, 36), 0)
    assert not bench.agent.counters.snapshot().fallbacks


def test_a_turn_waits_no_longer_than_told(bench: Bench) -> None:
    eager(bench, chain(6))
    bench.expect(PREFILL, "e1", replica_blocks=6, min_tokens=64)
    own = chain(6) + chain(10, "b")
    assert bench.look(own) is None
    bench.clock.advance(0.4)
    assert bench.look(own) == 0


@pytest.mark.parametrize(
    ("block_ms", "waits"),
    [
        # 64 blocks have landed in a second, and 36 are left: they take 0.56 s.
        (16, True),
        (15, False),
        # An older control plane does not say, and the lookup wait counts.
        (0, True),
    ],
)
def test_a_turn_waits_for_the_rest_if_it_lands_sooner_than_it_is_computed(
    bench: Bench, block_ms: int, waits: bool
) -> None:
    hashes = chain(100)
    eager(bench, hashes)
    bench.clock.advance(1)
    first, *_ = reads(bench)
    assert len(first.local_block_ids) == 64
    end_read(bench, first)
    bench.expect(
        PREFILL,
        "e1",
        replica_blocks=100,
        min_tokens=64,
        block_compute_time=Duration(nanos=block_ms * 1_000_000),
    )
    own = hashes + chain(10, "b")
    found = bench.look(own, computed=64 * BLOCK)
    assert found == (None if waits else 0)
    # What is left lands all the same, if the request has not computed it by then.
    if waits:
        end_read(bench, reads(bench)[-1])
        assert bench.look(own, computed=100 * BLOCK) == 0
    bench.agent.allocated("r", ("t", PREFILL), range(20, 36), 0)
    assert bench.agent.counters.snapshot().fallbacks == ({} if waits else {"FASTER_TO_COMPUTE": 1})


def test_a_turn_waits_no_longer_for_a_rest_that_is_late_than_computing_it_takes(
    bench: Bench,
) -> None:
    hashes = chain(100)
    eager(bench, hashes)
    bench.clock.advance(0.032)
    end_read(bench, reads(bench)[0])
    # 36 blocks are left: they land in 18 ms, and are computed in 72.
    bench.expect(
        PREFILL,
        "e1",
        replica_blocks=100,
        min_tokens=64,
        block_compute_time=Duration(nanos=2_000_000),
    )
    own = hashes + chain(10, "b")
    assert bench.look(own, computed=64 * BLOCK) is None
    bench.clock.advance(0.018 + 0.071)
    assert bench.look(own, computed=64 * BLOCK) is None
    bench.clock.advance(0.001)
    assert bench.look(own, computed=64 * BLOCK) == 0
    bench.agent.allocated("r", ("t", PREFILL), range(20, 36), 0)
    assert bench.agent.counters.snapshot().fallbacks == {"FASTER_TO_COMPUTE": 1}


def test_a_turn_that_finds_nearly_all_of_it_waits_for_nothing(bench: Bench) -> None:
    bench.expect(PREFILL, "l1", replica_blocks=6, min_tokens=64)
    assert bench.look(chain(6) + chain(10, "b"), computed=5 * BLOCK) == 0


def test_an_eager_lease_that_fails_ends_the_waiting(bench: Bench) -> None:
    bench.expect(PREFILL, "e1", replica_blocks=6, min_tokens=64)
    own = chain(6) + chain(10, "b")
    assert bench.look(own) is None
    bench.obey(revoke=agent_pb2.Revoke(lease_id="e1", version=2, reason="REPLICA_GONE"))
    assert bench.look(own) == 0


# Soft replicas.


def soft_replica(bench: Bench, hashes: tuple[bytes, ...]) -> None:
    bench.expect(DECODE)
    bench.offer(hashes)
    bench.clock.advance(200)
    bench.agent.post(Tick())
    bench.end_hook()
    assert bench.held == 0
    (changed,) = bench.out.take("replica_changed")
    assert changed.state == session_pb2.REPLICA_STATE_SOFT


def test_a_soft_replica_gets_shorter_as_its_tail_is_reused(bench: Bench) -> None:
    hashes = chain(5)
    soft_replica(bench, hashes)
    for index in (4, 3):
        bench.pool.reuse(10 + index)
    bench.end_hook()
    (changed,) = bench.out.take("replica_changed")
    assert (changed.num_blocks, changed.reason) == (3, "REUSED")
    assert changed.head_hash == hashes[-1], "its identity stays"
    (entry,) = bench.agent.source.inventory()
    assert entry.num_blocks == 3
    bench.pool.reuse(10)
    bench.end_hook()
    (changed,) = bench.out.take("replica_changed")
    assert changed.state == session_pb2.REPLICA_STATE_GONE


def test_a_shorter_replica_can_still_be_hardened(bench: Bench) -> None:
    hashes = chain(5)
    soft_replica(bench, hashes)
    bench.pool.reuse(14)
    bench.end_hook()
    bench.harden(hashes)
    (hardened,) = bench.out.take("hardened")
    assert list(hardened.blocks.block_ids) == [10, 11, 12, 13]


def test_the_owners_of_a_block_do_not_pile_up(bench: Bench) -> None:
    hashes = chain(5)
    for _ in range(20):
        bench.agent.source.offer_cached("acme", "s", hashes)
        soft_replica(bench, hashes)
        bench.out.events.clear()
        bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
        bench.out.events.clear()
    assert max(len(x) for x in bench.agent.source._owners.values()) <= 2
