"""Ways to serve wrong KV or to use a stale grant: each as it was, in few steps."""

from __future__ import annotations

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.conversation import Conversation
from kvshuttle.dataplane.scheduler import CommandBatch, FinishedRequest, StreamDown
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.fakes import grant_of
from tests.unit.dataplane.test_eager import eager_grant, reads, soft_replica
from tests.unit.dataplane.test_scheduler_side import BLOCK, DECODE, PREFILL, Bench, chain


@pytest.fixture
def bench() -> Bench:
    return Bench()


def forward_load(bench: Bench, blocks: int = 4) -> None:
    """A decode leg of five blocks has one of its own and waits for the next ones."""
    bench.expect(DECODE, "l1")
    forward = types_pb2.DIRECTION_FORWARD
    bench.obey(grant=grant_of(chain(blocks), bench.clock(), direction=forward))
    key = ("t", DECODE)
    assert bench.agent.look("r", key, chain(5), 165, BLOCK) == (blocks - 1) * BLOCK
    bench.agent.allocated("r", key, range(20, 26), (blocks - 1) * BLOCK)


def leave(bench: Bench, *, aborted: bool) -> list[agent_pb2.ReplicaOffered]:
    """The request ends; vLLM counts the load's tokens as computed since it began."""
    request = FinishedRequest("r", chain(4), (20, 21, 22, 23), 165, aborted)
    bench.agent.finished(("t", DECODE), request)
    return bench.out.take("offered")


def test_a_request_aborted_during_its_load_offers_only_what_it_had_before(bench: Bench) -> None:
    forward_load(bench)
    (offered,) = leave(bench, aborted=True)
    assert offered.num_blocks == 1


def test_a_failed_load_that_vllm_has_not_heard_of_is_not_offered(bench: Bench) -> None:
    forward_load(bench)
    bench.agent.post(m.ReadEnded("r", "l1", False, "TRANSFER_FAILED", 0, 0))
    (offered,) = leave(bench, aborted=True)
    assert offered.num_blocks == 1


def test_a_failed_load_that_was_computed_instead_is_offered(bench: Bench) -> None:
    forward_load(bench)
    bench.agent.post(m.ReadEnded("r", "l1", False, "TRANSFER_FAILED", 0, 0))
    bench.agent.load_failed(["r"])
    (offered,) = leave(bench, aborted=False)
    assert offered.num_blocks == 4


def test_a_published_load_is_offered(bench: Bench) -> None:
    forward_load(bench)
    bench.agent.post(m.ReadEnded("r", "l1", True, "", 1000, 5))
    (offered,) = leave(bench, aborted=True)
    assert offered.num_blocks == 4


def test_a_grant_that_queues_while_its_stream_is_replaced_is_not_obeyed(bench: Bench) -> None:
    """A slow engine step: the grant is in the inbox, the stream breaks, and the next hello says
    that there is no such grant; then the control plane lets the source go."""
    hello = agent_pb2.AgentHello(boot_id="b")
    conversation = Conversation(hello, bench.clock())
    bench.expect(PREFILL, "l1")
    grant = grant_of(chain(4), bench.clock())
    batch = conversation.hear(
        agent_pb2.ConnectResponse(
            epoch=5,
            boot_id="b",
            stream_generation=1,
            commands=agent_pb2.AgentCommands(commands=[agent_pb2.AgentCommand(grant=grant)]),
        ),
        bench.clock(),
    )
    assert isinstance(batch, CommandBatch)
    bench.agent.post(batch)
    bench.agent.end_stream(conversation.life)
    bench.agent.post(StreamDown(1))
    assert bench.agent.lease_inventory() == []  # the next hello
    bench.agent.drain()
    assert bench.agent.lease_inventory() == []


def test_a_message_for_another_boot_is_not_heard() -> None:
    conversation = Conversation(agent_pb2.AgentHello(boot_id="b"), 0)
    commands = agent_pb2.AgentCommands(commands=[agent_pb2.AgentCommand()])
    response = agent_pb2.ConnectResponse(boot_id="a", epoch=1, commands=commands)
    assert conversation.hear(response, 0) is None


def test_no_block_is_taken_for_an_eager_return_while_vllm_looks_a_request_up() -> None:
    """vLLM has found prefix hits by then that nothing references yet: they would be taken, and the
    request would go on from another chain's KV."""
    bench = Bench(total=300)
    bench.expect(PREFILL)
    grant = agent_pb2.AgentCommand(grant=eager_grant(bench, chain(4, "e")))
    bench.agent.post(CommandBatch(1, 5, [grant]))
    free = bench.pool.free_blocks
    bench.agent.drain()
    bench.agent.make_room(3)
    assert bench.look(chain(4)) == 0
    assert bench.pool.free_blocks == free
    assert not reads(bench)
    bench.end_hook()
    assert len(reads(bench)) == 1


def test_a_block_that_is_being_computed_again_is_not_hardened(bench: Bench) -> None:
    """A soft replica lost its tail, and a request of the step that runs now computes it again:
    vLLM has cached the block already, but its KV is not written yet."""
    hashes = chain(5)
    soft_replica(bench, hashes)
    bench.pool.reuse(14)
    bench.pool.touch([40])
    bench.pool.insert(hashes[4], 40, 5 * BLOCK)
    bench.harden(hashes)
    (hardened,) = bench.out.take("hardened")
    assert list(hardened.blocks.block_ids) == [10, 11, 12, 13]


def test_a_soft_replica_is_hardened_where_it_lies_and_not_where_its_hash_is_found(
    bench: Bench,
) -> None:
    """Found by the simulation: another request computes the same prompt, vLLM has cached its block
    already, found first, and the step that fills it still runs."""
    soft_replica(bench, chain(4))
    bench.pool.cache[chain(4)[2]] = 77
    bench.harden(chain(4))
    (hardened,) = bench.out.take("hardened")
    assert list(hardened.blocks.block_ids) == [10, 11, 12, 13]
