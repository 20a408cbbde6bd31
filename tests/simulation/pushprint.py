"""What a state of the world of a push is: everything that what happens next can depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvshuttle.controlplane.model.terms import LeaseState
from tests.simulation.kernel import SECOND
from tests.simulation.smallscope import KEY

if TYPE_CHECKING:
    from tests.simulation.pushscope import Leg, PushWorld
    from tests.simulation.smallscope import Node

__all__ = ["of_world"]


def of_world(world: PushWorld) -> tuple[Any, ...]:
    """Everything that what happens next can depend on."""
    fabric = world.fabric
    return (
        world.uses,
        tuple(sorted(world.held)),
        _of_books(world),
        _of_leg(world.prompt),
        _of_leg(world.answer),
        tuple((i, world._of_node(x), _of_push(world, x)) for i, x in world.nodes.items()),
        tuple((a.name, b.name, n) for a, b, n in fabric.notices),
        fabric.lose_next,
        tuple((r.reader.name, r.source.name, r.copied) for r in fabric.flying),
        tuple(
            (w.writer.name, w.target.name, tuple(w.local), tuple(w.remote), w.regions, w.copied)
            for w in fabric.writing
        ),
    )


def _of_books(world: PushWorld) -> tuple[Any, ...]:
    state, machine = world.registry.state, world.cp_machine

    def left(at: int) -> int:
        return world._left(machine, at - world._offset_ns) if at else -1

    leases = []
    for lease_id in world.leases:
        lease = state.leases.get(lease_id)
        if lease is None:
            continue
        leases.append(
            (
                *(lease_id, lease.state, lease.version, lease.stop, lease.end_reason),
                *(lease.reader_stopped, lease.stats is None, lease.source, lease.destination),
                lease.renewal is not None and left(lease.renewal.asked_ns + SECOND),
                left(lease.deadline_ns),
                # The guard of a read that is to be granted.
                lease.state is LeaseState.PENDING
                and not lease.push
                and left(lease.create_ns + SECOND),
            )
        )
    return (
        tuple(leases),
        (state.epoch, state.lineage_id, state.last_incarnation, world.stores_lost),
        tuple(sorted(state.turns)),
        tuple(sorted(state.push_declined)),
        tuple(sorted(state.orphans.items())),
        tuple(
            (i, x.source, x.destination, x.epoch, tuple(x.seqs), left(x.asked_ns + SECOND))
            for i, x in state.extensions.items()
        ),
        tuple(
            (
                *(w.ref, w.boot_id, w.state, w.stream_generation, w.past, w.fenced_boots),
                w.clock - world._clock_of(w.ref.worker_id),
            )
            for w in (state.workers[i] for i in sorted(state.workers))
        ),
        tuple(sorted(world.streams.items())),
        tuple((r.worker, r.head_hash, r.num_blocks) for r in _replicas(world)),
    )


def _replicas(world: PushWorld) -> Sequence[Any]:
    if world.registry.state.sessions.get(KEY) is None:
        return ()
    return world.registry.state.replicas_of_session(KEY)


def _of_push(world: PushWorld, node: Node) -> tuple[Any, ...]:
    agent, transfers, machine = node.agent, node.transfers[0], node.machine

    def left(at: int) -> int:
        return world._left(machine, at) if at else -1

    return (
        node.transports[0].attested,
        tuple(node.transports[0].inbox),
        tuple(sorted(node.results.finished)),
        tuple(sorted(node.results.failed)),
        tuple(agent.incarnations),
        agent.lineage,
        tuple(sorted(agent.eager.peers.items())),
        tuple((x.chunks, len(x._said)) for x in node.steps),
        tuple(
            (
                *(i, x.grant.version, x.hold.kind.value, x.hold.ended, x.hold.block_ids),
                x.ranks_left,
                x.granted,
                x.reads,
                x.published,
                x.told_failed,
                x.abandoned,
                x.orphaned,
                x.said,
                left(x.grant.deadline_ns),
                left(x.patience_ns),
                left(x.grant.ask_ns),
                i in agent.landings._by_lease,
            )
            for i, x in ((x.grant.lease_id, x) for x in agent.landings._by_request.values())
        ),
        tuple(agent.landings._by_lease),
        tuple(
            (
                *(i, x.grant.version, x.destination, x.ranks_left, x.sent, x.preemptions),
                tuple((n, h.block_ids) for n, h in x.holds.items()),
                tuple(x.writing.items()),
                x.chunks,
                x.stopping,
                x.written,
                x.reason,
                left(x.grant.deadline_ns),
            )
            for i, x in agent.push._pushes.items()
        ),
        tuple(agent.push._by_token),
        tuple(
            (i, tuple((n > agent.source.steps()[1], end) for n, end in x.running), x.final)
            for i, x in agent.push._live.items()
        ),
        tuple(
            (*(i, x.order.version, x.peer, left(x.deadline_ns), x.told),)
            for i, x in transfers.zones._landings.items()
        ),
        tuple(transfers.zones._quieted.items()),
        tuple(
            (
                *(i, x.order.version, x.peer, left(x.deadline_ns), x.stopping, x.said_stopping),
                x.chunks_done,
                x.chunks_all,
                tuple(_of_chunk(c) for c in x.chunks),
            )
            for i, x in transfers.pushes._pushes.items()
        ),
        tuple(
            (i, tuple(_of_chunk(c) for c in chunks))
            for i, chunks in transfers.pushes._early.items()
        ),
        tuple(transfers.pushes._closed),
        tuple(sorted(transfers._peers.items())),
        tuple(
            (*(key, x.push, x.push_request, x.ended, x.lease_follows, x.hopes),)
            for key, x in agent._turns._legs.items()
        ),
        tuple(
            (
                *(x.key, x.hold is not None, x.available, left(x.expires_ns)),
                max(0, x.filled_after - agent.source.steps()[1]),
            )
            for x in agent.source._replicas.all()
        ),
        tuple((i, x.hold.kind.value, x.hold.ended) for i, x in agent.destination._loads.items()),
    )


def _of_leg(leg: Leg) -> tuple[Any, ...]:
    blocks = None if leg.blocks is None else tuple(leg.blocks)
    return (leg.state, leg.steps, leg.computed, leg.preempted, blocks)


def _of_chunk(chunk: Any) -> tuple[Any, ...]:
    step = chunk.step
    return (
        chunk.order.number,
        tuple(chunk.order.local_block_ids),
        chunk.posted,
        tuple(write.handle.raw.status for write in chunk.flying),
        None if step is None else (step._final, len(step._said)),
    )
