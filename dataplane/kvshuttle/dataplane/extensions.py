"""Leases that are needed for longer than they were granted, many in one message.

A request may match a grant and then wait for blocks, or read slowly: the lease must not run out
under it. So its destination asks in time, for all such leases at once, and counts longer when the
control plane says so, which it does after the source holds longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import destination_deadline
from kvshuttle.dataplane.grants import Grant
from kvshuttle.dataplane.limits import ASK_AGAIN_NS
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.v1 import agent_service_pb2 as agent_pb2

__all__ = ["ask", "count_longer", "next_ask"]


def next_ask(needed: Iterable[Grant]) -> int | None:
    """When the next of these grants is to be asked for."""
    return min((x.ask_ns for x in needed if x.number[1] and x.ask_ns < x.deadline_ns), default=None)


def ask(out: Outbox, needed: Iterable[Grant], now: int) -> None:
    """Asks for those whose time is half over; again after half of what is left, until they are
    extended or run out."""
    epochs: dict[int, list[int]] = {}
    for grant in needed:
        # A control plane that does not number its leases does not extend them so either.
        if not grant.number[1] or grant.ask_ns > now:
            continue
        left = grant.deadline_ns - now
        # Its own deadline means never again: it is over then.
        grant.ask_ns = min(now + max(ASK_AGAIN_NS, left // 2), grant.deadline_ns)
        if left > 0:
            epochs.setdefault(grant.number[0], []).append(grant.number[1])
    for epoch, seqs in epochs.items():
        needs = agent_pb2.LeasesNeeded(lease_epoch=epoch, lease_seqs=seqs)
        out.emit(agent_pb2.AgentEvent(leases_needed=needs))


def count_longer(
    out: Outbox, grants: Collection[Grant], command: agent_pb2.ExtendLeases, now: int
) -> None:
    """Obeys an ExtendLeases as its destination. What is not known is not revived."""
    deadline = destination_deadline(command.as_of, command.ttl.ToNanoseconds())
    named = set(command.lease_seqs)
    for grant in grants:
        if grant.number[0] != command.lease_epoch or grant.number[1] not in named:
            continue
        if deadline <= grant.deadline_ns:
            continue
        grant.deadline_ns = deadline
        grant.ask_ns = now + max(ASK_AGAIN_NS, (deadline - now) // 2)
        if grant.request_id:
            out.order(m.ExtendRead(grant.request_id, deadline))
