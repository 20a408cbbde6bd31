"""Ways to use a last, partial block that is not what the request has."""

from __future__ import annotations

from tests.mutation.mutant import AGENT, Mutant

__all__ = ["PARTIAL"]

TESTS = "tests/unit/dataplane/test_partial_blocks.py"

PARTIAL = (
    Mutant(
        "tail_not_compared",
        "a partial block is used for equal hashes only",
        AGENT + "matching.py",
        "    if tail_hash(end, tail.tokens) != tail.hash:\n",
        "    if False:\n",
        (f"{TESTS}::test_anything_else_behind_equal_blocks_is_not_read",),
    ),
    Mutant(
        "tail_behind_other_blocks",
        "a partial block follows all blocks on offer",
        AGENT + "matching.py",
        "        return left if end < len(own) and own[end] == offered_next else 0\n",
        "        return left\n",
        (f"{TESTS}::test_a_full_block_on_offer_serves_all_but_the_last_token",),
    ),
    Mutant(
        "tail_leaves_nothing_to_compute",
        "the last token is always computed",
        AGENT + "matching.py",
        "    left = min(num_tokens - 1 - end * block_size, block_size - 1)\n",
        "    left = min(num_tokens - end * block_size, block_size - 1)\n",
        (f"{TESTS}::test_the_last_token_of_a_tail_that_is_the_whole_prompt_is_computed",),
    ),
    Mutant(
        "tail_of_a_load_in_flight",
        "only tokens whose KV is written are offered",
        AGENT + "scheduler.py",
        "        tail = request.tail if written is None and not request.aborted else None\n",
        "        tail = request.tail if not request.aborted else None\n",
        (f"{TESTS}::test_a_request_whose_load_is_not_over_leaves_no_tail",),
    ),
    Mutant(
        "tail_of_a_soft_replica",
        "a partial block is offered only while it is held",
        AGENT + "source.py",
        "        self._replicas.turned_soft(replica)\n        self._drop_tail(replica)\n",
        (
            "        self._replicas.turned_soft(replica)\n"
            "        if replica.tail_hold is not None:\n"
            "            self._holds.release(replica.tail_hold)\n"
        ),
        (f"{TESTS}::test_a_replica_that_is_not_hard_and_whole_has_no_tail",),
    ),
    Mutant(
        "tail_of_a_part",
        "a partial block is offered behind all of a replica only",
        AGENT + "source.py",
        "        tail = replica.tail if start + len(block_ids) == len(replica.hashes) else None\n",
        "        tail = replica.tail\n",
        (f"{TESTS}::test_of_a_part_of_a_replica_no_tail_is_named",),
    ),
    Mutant(
        "tail_not_held_for_its_reader",
        "what is offered is held",
        AGENT + "source.py",
        "        held_ids = [*block_ids, tail.block_id] if tail is not None else block_ids\n",
        "        held_ids = block_ids\n",
        (f"{TESTS}::test_a_lease_keeps_its_tail_when_the_replica_is_gone",),
    ),
)
