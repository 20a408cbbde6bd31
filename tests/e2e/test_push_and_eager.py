"""Pushes one way and eager returns the other, at once, on real engines: upstream refuses that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from kvshuttle.localstack.metrics import EXTERNAL_HITS, LOCAL_HITS
from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from tests.e2e.conftest import Cluster
from tests.e2e.steps import BLOCK, tries, turn, wait_for_leases, wait_until
from tests.e2e.test_eager import first_turn, settled
from tests.e2e.test_push import LONG, begun, pushes, whole
from tests.support.conversation import Conversation, Oracle

pytestmark = pytest.mark.usefixtures("both", "nothing_leaked")


@pytest.fixture(scope="module")
def both(cluster: Cluster) -> Iterator[None]:
    """The control plane with both; the engines go on."""
    with cluster.control_plane_with("--eager", "--forward", "push"):
        yield


def test_what_was_returned_eagerly_is_a_local_hit_of_a_turn_that_is_pushed(
    cluster: Cluster, oracle: Oracle
) -> None:
    for number in tries("a return is over in time, and decode's offer comes in time"):
        talk = Conversation(f"both-{number}", seed=8_800 + number)
        first = first_turn(cluster, oracle, talk)
        returned = settled(cluster, talk.session, 1)
        before = cluster.prefill.metrics()
        turn(cluster, oracle, talk, words=LONG)
        wait_until(partial(begun, cluster, talk.session), "its KV is on its way")
        wait_for_leases(cluster, talk.session)
        push = next(x for x in pushes(cluster, talk.session) if x.turn == 2)
        if whole(push) and returned.state == lease_pb2.LEASE_STATE_COMPLETED:
            break
    after = cluster.prefill.metrics()
    assert after.total(EXTERNAL_HITS) == before.total(EXTERNAL_HITS)
    hits = after.total(LOCAL_HITS) - before.total(LOCAL_HITS)
    assert hits >= first.prompt_tokens // BLOCK * BLOCK
    # What decode had kept of the first turn was not pushed again.
    assert push.range.start >= first.prompt_tokens // BLOCK
    ended = cluster.view.session(talk.session).turns[-1]
    assert (ended.plan.reason, ended.plan.forward_mode) == ("EAGER_HIT", 2)
