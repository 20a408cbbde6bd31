"""An eager return over the real streams, both agents played by the test."""

from __future__ import annotations

import dataclasses

import pytest

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually

CHAIN = hashes("conversation", 40)


@pytest.fixture
def limits(limits: Limits) -> Limits:
    return dataclasses.replace(limits, eager=True)


async def test_what_a_turn_left_comes_back_before_the_next_one(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    begun = await cluster.begin()
    await decode.offer(CHAIN[:12], "s", begun.turn_token, types.LEG_DECODE)
    harden = await decode.told("harden")
    assert harden.destination == prefill.ref
    await cluster.end(begun.turn.turn)
    await decode.harden(harden, CHAIN)
    grant = await prefill.told("grant")
    assert grant.eager
    assert (grant.turn_token, grant.tenant, grant.session_id) == ("", "default", "s")
    assert grant.direction == types.DIRECTION_RETURN
    landed = prefill.replica(CHAIN[:12], "s")
    landed.state = sessions.REPLICA_STATE_SOFT
    await prefill.say(offered=landed)
    await prefill.publish(grant.lease_id, 12)
    assert (await decode.told("reader_stopped")).lease_id == grant.lease_id
    assert (await decode.told("retain_replica")).retention.ToNanoseconds() == 0

    async def lease() -> leases.Lease:
        request = leases.GetLeaseRequest(lease_id=grant.lease_id)
        return (await cluster.leases.GetLease(request, timeout=T)).lease

    done = await eventually(lease, lambda x: x.state == leases.LEASE_STATE_COMPLETED)
    assert done.eager
    again = await cluster.begin()
    assert again.turn.plan.return_mode == sessions.RETURN_MODE_EAGER
    assert again.turn.plan.reason == "EAGER_HIT"
    expect = await prefill.told("expect_turn", turn_token=again.turn_token)
    assert (expect.lease_id, expect.replica_blocks) == ("", 12)
