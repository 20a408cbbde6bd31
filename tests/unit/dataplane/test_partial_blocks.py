"""The last block of a replica, if not full: whose it is, how long it is held, who may use it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.matching import Tail, TailHash, partial_tokens
from kvshuttle.dataplane.scheduler import FinishedRequest
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.fakes import grant_of
from tests.unit.dataplane.test_scheduler_side import BLOCK, DECODE, PREFILL, Bench, chain, retain

TAIL_BLOCK = 900


def digest(parent: bytes, tokens: list[int], salt: str = "") -> bytes:
    """Stands for vLLM's hash of a block of just these tokens."""
    return hashlib.sha256(repr((parent, tokens, salt)).encode()).digest()


def hasher(tokens: list[int], hashes: tuple[bytes, ...], salt: str = "") -> TailHash:
    """Of a request that goes on with `tokens` after the full blocks of `hashes`."""

    def tail_hash(full: int, count: int) -> bytes | None:
        if full != len(hashes) or count > len(tokens):
            return None
        return digest(hashes[full - 1], tokens[:count], salt)

    return tail_hash


WORDS = [11, 12, 13, 14, 15, 16, 17, 18, 19]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def granted(bench: Bench, tail: Tail | None, blocks: int = 4) -> None:
    """A return of `blocks` full blocks and of what follows them."""
    bench.expect(PREFILL, "l1")
    grant = grant_of(chain(blocks), bench.clock())
    if tail is not None:
        grant.blocks.tail.block_id = tail.block_id
        grant.blocks.tail.num_tokens = tail.tokens
        grant.blocks.tail.hash = tail.hash
    bench.obey(grant=grant)


def tail_of(tokens: list[int], blocks: int = 4, salt: str = "") -> Tail:
    return Tail(TAIL_BLOCK, len(tokens), digest(chain(blocks)[-1], tokens, salt))


def look(bench: Bench, tail_hash: TailHash | None, num_tokens: int) -> int | None:
    return bench.agent.look("r", ("t", PREFILL), chain(4), num_tokens, BLOCK, tail_hash)


def reads(bench: Bench) -> list[m.Read]:
    return [order for order in bench.out.orders if isinstance(order, m.Read)]


# Whose it is.


def test_equal_tokens_behind_equal_blocks_are_read_too(bench: Bench) -> None:
    granted(bench, tail_of(WORDS[:5]))
    tokens = look(bench, hasher(WORDS, chain(4)), 4 * BLOCK + len(WORDS))
    assert tokens == 3 * BLOCK + 5
    bench.agent.allocated("r", ("t", PREFILL), range(20, 26), tokens)
    (order,) = reads(bench)
    assert order.local_block_ids == [21, 22, 23, 24]
    assert order.remote_block_ids == [501, 502, 503, TAIL_BLOCK]
    bench.agent.post(m.ReadEnded("r", "l1", True, "", 4_000, 5))
    bench.agent.drain()
    (stopped,) = bench.out.take("stopped")
    # A block is a block, however much of it counts.
    assert (stopped.stats.blocks, stopped.stats.tokens) == (4, 3 * BLOCK + 5)
    assert stopped.stats.bytes == 4_000
    request = FinishedRequest("r", chain(4), (20, 21, 22, 23), 4 * BLOCK + 9, False)
    bench.agent.finished(("t", PREFILL), request)
    (leg,) = bench.out.take("leg_computed")
    assert (leg.external_tokens, leg.computed_tokens) == (3 * BLOCK + 5, 4)


@pytest.mark.parametrize(
    ("tail", "tail_hash"),
    [
        (None, hasher(WORDS, chain(4))),
        (tail_of(WORDS[:5]), None),
        (tail_of(WORDS[:5]), hasher([11, 12, 13, 14, 99, 16], chain(4))),
        (tail_of(WORDS[:5]), hasher([99, *WORDS[1:]], chain(4))),
        (tail_of(WORDS[:5]), hasher(WORDS, chain(4), "salt")),
        (tail_of(WORDS[:5], salt="salt"), hasher(WORDS, chain(4))),
        (tail_of([*WORDS, 20]), hasher(WORDS, chain(4))),
        (Tail(TAIL_BLOCK, 5, b""), hasher(WORDS, chain(4))),
        (Tail(TAIL_BLOCK, 0, digest(chain(4)[-1], [])), hasher(WORDS, chain(4))),
        (Tail(TAIL_BLOCK, BLOCK, b"x"), lambda *_: b"x"),
    ],
    ids=[
        "none-offered",
        "no-hasher",
        "last-token-differs",
        "first-token-differs",
        "reader-has-a-salt",
        "source-has-a-salt",
        "longer-than-the-prompt",
        "no-hash",
        "no-tokens",
        "a-full-one",
    ],
)
def test_anything_else_behind_equal_blocks_is_not_read(
    bench: Bench, tail: Tail | None, tail_hash: TailHash | None
) -> None:
    granted(bench, tail)
    assert look(bench, tail_hash, 4 * BLOCK + len(WORDS)) == 3 * BLOCK
    bench.agent.allocated("r", ("t", PREFILL), range(20, 26), 3 * BLOCK)
    (order,) = reads(bench)
    assert order.remote_block_ids == [501, 502, 503]


def test_behind_blocks_that_differ_nothing_is_read(bench: Bench) -> None:
    granted(bench, tail_of(WORDS[:5]))
    own = chain(3) + chain(1, "b")
    found = bench.agent.look("r", ("t", PREFILL), own, 4 * BLOCK + 9, BLOCK, lambda *_: b"never")
    assert found == 2 * BLOCK


def test_the_last_token_of_a_tail_that_is_the_whole_prompt_is_computed(bench: Bench) -> None:
    """As decode finds it: prefill has computed all of the prompt, and decode samples from its last
    token."""
    granted(bench, tail_of(WORDS))
    assert look(bench, hasher(WORDS, chain(4)), 4 * BLOCK + len(WORDS)) == 3 * BLOCK + 8


def test_a_tail_of_the_last_token_alone_spares_nothing(bench: Bench) -> None:
    granted(bench, tail_of(WORDS[:1]))
    assert look(bench, hasher(WORDS, chain(4)), 4 * BLOCK + 1) == 3 * BLOCK


def test_a_full_block_on_offer_serves_all_but_the_last_token() -> None:
    """Its hash is vLLM's own: no other is needed."""
    own, size = chain(4), 4 * BLOCK
    assert partial_tokens(own, size, BLOCK, 3, own[3], None, None) == BLOCK - 1
    assert partial_tokens(own, size, BLOCK, 3, chain(4, "b")[3], None, None) == 0
    # The request has fewer tokens than a block there, so no hash, whatever the block has.
    assert partial_tokens(own[:3], size - 1, BLOCK, 3, own[3], None, None) == 0


def test_what_the_cache_has_in_full_is_not_read_for_a_tail(bench: Bench) -> None:
    granted(bench, tail_of(WORDS[:5]))
    request = ("r", ("t", PREFILL), chain(4), 4 * BLOCK + 9, 4 * BLOCK, hasher(WORDS, chain(4)))
    assert bench.agent.look(*request) == 0


def test_landing_blocks_are_held_with_the_tail(bench: Bench) -> None:
    granted(bench, tail_of(WORDS[:5]))
    tokens = look(bench, hasher(WORDS, chain(4)), 4 * BLOCK + 9)
    assert tokens is not None
    bench.agent.allocated("r", ("t", PREFILL), range(20, 26), tokens)
    assert bench.pool.references[24] == 1
    bench.agent.post(m.ReadEnded("r", "l1", False, "TRANSFER_FAILED", 0, 0))
    bench.agent.drain()
    assert bench.pool.references[24] == 0
    assert bench.held == 0


# How long it is held.


def leave(bench: Bench, tail: Tail, *, aborted: bool = False) -> tuple[bytes, ...]:
    """Decode's request ends; its own references are gone right after, as in vLLM."""
    hashes, ids = chain(4), (10, 11, 12, 13)
    mine = (*ids, tail.block_id)
    bench.pool.touch(mine)
    bench.pool.cache.update(zip(hashes, ids, strict=True))
    request = FinishedRequest("r-decode", hashes, ids, 4 * BLOCK, aborted, tail)
    bench.agent.finished(("t", DECODE), request)
    bench.pool.free(mine)
    return hashes


def hardened(bench: Bench, hashes: tuple[bytes, ...], lease: str = "l1") -> Any:
    bench.harden(hashes, lease)
    (answer,) = bench.out.take("hardened")
    return answer.blocks


def test_a_replicas_tail_is_held_and_named_with_all_of_it(bench: Bench) -> None:
    bench.expect(DECODE)
    tail = tail_of(WORDS[:5])
    hashes = leave(bench, tail)
    assert bench.held == 5
    # The control plane hears of full blocks.
    (offered,) = bench.out.take("offered")
    assert (offered.num_blocks, offered.num_tokens) == (4, 4 * BLOCK)
    blocks = hardened(bench, hashes)
    assert list(blocks.block_ids) == [10, 11, 12, 13]
    assert (blocks.range.start, blocks.range.end) == (0, 4)
    named = blocks.tail
    assert (named.block_id, named.num_tokens, named.hash) == (TAIL_BLOCK, 5, tail.hash)
    assert not named.token_digest
    assert bench.pool.references[TAIL_BLOCK] == 2


def test_of_a_part_of_a_replica_no_tail_is_named(bench: Bench) -> None:
    bench.expect(DECODE)
    hashes = leave(bench, tail_of(WORDS[:5]))
    command = agent_pb2.Harden(
        lease_id="l1",
        version=1,
        tenant="acme",
        session_id="s",
        head_hash=hashes[-1],
        range=types_pb2.BlockRange(start=0, end=3),
        destination=types_pb2.WorkerRef(worker_id="other", incarnation=1),
    )
    command.ttl.FromSeconds(30)
    bench.obey(harden=command)
    (answer,) = bench.out.take("hardened")
    assert not answer.blocks.HasField("tail")
    assert bench.pool.references[TAIL_BLOCK] == 1


@pytest.mark.parametrize("how", ["expires", "softened", "trimmed", "pressure", "released"])
def test_a_replica_that_is_not_hard_and_whole_has_no_tail(bench: Bench, how: str) -> None:
    bench.expect(DECODE)
    hashes = leave(bench, tail_of(WORDS[:5]))
    if how == "expires":
        bench.clock.advance(101)
        bench.agent.source.expire(bench.clock())
    elif how == "softened":
        bench.obey(retain_replica=retain(hashes[-1], 0, 0))
    elif how == "trimmed":
        bench.obey(retain_replica=retain(hashes[-1], 100, 2))
    elif how == "pressure":
        bench.agent.make_room(100)
    else:
        release = agent_pb2.ReleaseReplica(tenant="acme", session_id="s", head_hash=hashes[-1])
        bench.obey(release_replica=release)
    assert bench.pool.references[TAIL_BLOCK] == 0
    bench.harden(hashes)
    for answer in bench.out.take("hardened"):
        assert not answer.blocks.HasField("tail")


def test_trimmed_to_all_of_its_full_blocks_it_keeps_its_tail(bench: Bench) -> None:
    bench.expect(DECODE)
    hashes = leave(bench, tail_of(WORDS[:5]))
    bench.obey(retain_replica=retain(hashes[-1], 100, 4))
    assert hardened(bench, hashes).HasField("tail")


def test_a_lease_keeps_its_tail_when_the_replica_is_gone(bench: Bench) -> None:
    bench.expect(DECODE)
    hashes = leave(bench, tail_of(WORDS[:5]))
    assert hardened(bench, hashes).HasField("tail")
    bench.agent.make_room(100)
    assert bench.pool.references[TAIL_BLOCK] == 1
    bench.obey(reader_stopped=agent_pb2.ReaderStopped(lease_id="l1", version=1))
    bench.agent.post(m.Unserved("l1"))
    bench.agent.drain()
    assert bench.pool.references[TAIL_BLOCK] == 0
    assert bench.held == 0


def test_a_longer_turn_takes_the_tails_place(bench: Bench) -> None:
    bench.expect(DECODE)
    leave(bench, tail_of(WORDS[:5]))
    leave(bench, Tail(TAIL_BLOCK + 1, 7, b"other"))
    assert bench.pool.references[TAIL_BLOCK] == 0
    assert bench.pool.references[TAIL_BLOCK + 1] == 1
    assert hardened(bench, chain(4)).tail.num_tokens == 7


def test_an_aborted_request_leaves_no_tail(bench: Bench) -> None:
    bench.expect(DECODE)
    hashes = leave(bench, tail_of(WORDS[:5]), aborted=True)
    assert bench.pool.references[TAIL_BLOCK] == 0
    assert not hardened(bench, hashes).HasField("tail")


def test_a_request_whose_load_is_not_over_leaves_no_tail(bench: Bench) -> None:
    """vLLM counts what is being loaded as computed, the tail's tokens too."""
    granted(bench, tail_of(WORDS[:5]))
    tokens = look(bench, hasher(WORDS, chain(4)), 4 * BLOCK + 9)
    assert tokens is not None
    bench.agent.allocated("r", ("t", PREFILL), range(20, 26), tokens)
    bench.pool.touch([24])
    tail = Tail(24, 5, digest(chain(4)[-1], WORDS[:5]))
    request = FinishedRequest("r", chain(4), (20, 21, 22, 23), 4 * BLOCK + 9, False, tail)
    bench.agent.finished(("t", PREFILL), request)
    bench.pool.free([24])
    replicas = bench.agent.source.inventory()
    assert [r.num_blocks for r in replicas] == [1]
    # One reference: the read that may still fill it.
    assert bench.pool.references[24] == 1
