"""A turn's trace on real engines: gateway, control plane, both agents, the transfers, and vLLM."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import DECODE, PREFILL, Cluster
from tests.e2e.steps import BLOCK, wait_until
from tests.support.conversation import Conversation
from tests.support.otlp import Collector, Span

pytestmark = pytest.mark.usefixtures("nothing_leaked")

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# (who, what, below what); the lease and what becomes of it once a direction.
GATEWAY, CONTROL, AGENT = "kvshuttle-gateway", "kvshuttle-controlplane", "kvshuttle-agent"
TURN = {
    (GATEWAY, "kvshuttle.gateway.request", "CLIENT"),
    (GATEWAY, "kvshuttle.gateway.begin_turn", "kvshuttle.gateway.request"),
    (GATEWAY, "kvshuttle.gateway.prefill", "kvshuttle.gateway.request"),
    (GATEWAY, "kvshuttle.gateway.decode", "kvshuttle.gateway.request"),
    (CONTROL, "kvshuttle.BeginTurn", "kvshuttle.gateway.begin_turn"),
    (CONTROL, "kvshuttle.lease", "kvshuttle.BeginTurn"),
    (AGENT, "kvshuttle.hold", "kvshuttle.lease"),
    (AGENT, "kvshuttle.transfer", "kvshuttle.lease"),
}


def named(spans: list[Span]) -> set[tuple[str, str, str]]:
    """Each span's service, its name and its parent's."""
    names = {one.span_id: one.name for one in spans} | {CLIENT: "CLIENT"}
    return {(one.service, one.name, names.get(one.parent_id, "?")) for one in spans}


def test_a_turn_is_one_trace(cluster: Cluster, collector: Collector) -> None:
    talk = Conversation("traced", seed=210)
    first = talk.turn(cluster.client)
    cluster.wait_offered(talk.session, first.prompt_tokens // BLOCK * BLOCK)
    cluster.forget_prefill()
    # Nobody asked for the first turn's trace.
    assert collector.spans() == []
    before = cluster.returned_tokens()
    talk.turn(cluster.client, headers={"traceparent": f"00-{TRACE}-{CLIENT}-01"})
    returned = cluster.returned_tokens() - before
    assert returned >= first.prompt_tokens // BLOCK * BLOCK

    def ours() -> list[Span]:
        return [one for one in collector.spans(TRACE) if one.name.startswith("kvshuttle")]

    wait_until(lambda: len(ours()) >= 11, "all spans of the turn")
    print(sorted(named(collector.spans())))
    assert named(ours()) == TURN
    # What came back, and what went forward: each a lease, held by one agent, moved by the other.
    for direction, source, reader in (("RETURN", DECODE, PREFILL), ("FORWARD", PREFILL, DECODE)):
        (lease,) = (
            one
            for one in ours()
            if one.get("direction") == direction and one.name == "kvshuttle.lease"
        )
        below = {one.name: one for one in ours() if one.parent_id == lease.span_id}
        assert below["kvshuttle.hold"].get("worker_id") == source
        assert below["kvshuttle.transfer"].get("worker_id") == reader
        if direction == "RETURN":
            assert below["kvshuttle.transfer"].get("tokens") == returned
    # vLLM's own, below the legs.
    legs = {"kvshuttle.gateway.prefill", "kvshuttle.gateway.decode"}

    def parents() -> set[str]:
        spans = named(collector.spans(TRACE))
        return {parent for _, name, parent in spans if not name.startswith("kvshuttle")}

    # Which it exports when it will.
    wait_until(lambda: parents() >= legs, "vLLM's spans of both legs")
