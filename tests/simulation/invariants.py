"""What must always be true, looked at from outside: the checker sees all machines at once.

The design's six invariants and that of tenants, as they are checked here:

1. `source held`: while a destination may post or has posted a READ under a lease, and its own
   deadline has not passed, the source holds the range. `source reused`: no block is handed out
   that such a READ has still to fetch.
2. `landing`: no block is handed out, published or computed into while a READ or a WRITE may still
   write to it; a WRITE goes to blocks that its target holds for it. `source reused`: no block is
   handed out that a WRITE has still to fetch whose writer has not given it up.
3. `publish`, `offer`, `wrong KV`: what is published, offered, or computed upon holds the KV of its
   hash, on every rank.
4. `stale`: no command of an older term, of another boot, or of a stream that a later hello has
   replaced, is obeyed; a READ goes to the boot that its grant names.
5. `bounded`: when the faults are over, every hold and every lease ends, and the pool is as before.
6. `tenant`: no lease moves what another tenant has left.
7. `stuck`: every request ends; a lookup and a load hold it back for a bounded time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.commands import Grant
from kvshuttle.controlplane.model.effects import LeaseChange
from kvshuttle.controlplane.model.lease import TRANSITIONS, Lease
from kvshuttle.controlplane.model.terms import LeaseState
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.limits import DEADLINE_MARGIN_NS
from kvshuttle.dataplane.scheduler import CommandBatch, StreamUp
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from tests.simulation.kernel import Kernel, Violation

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.effects import Effects
    from kvshuttle.dataplane.grants import Grant as HeldGrant
    from kvshuttle.dataplane.scheduler import InboxItem
    from tests.simulation.control import ControlPlane
    from tests.simulation.fabric import Fabric, FlyingWrite, SimTransport
    from tests.simulation.pool import Block
    from tests.simulation.worker import Boot

__all__ = ["Checker", "Transitions", "record_transitions", "uncovered"]

_P, _G, _A = LeaseState.PENDING, LeaseState.GRANTED, LeaseState.ACTIVE
_C, _F, _E, _R = (
    LeaseState.COMPLETED,
    LeaseState.FAILED,
    LeaseState.EXPIRED,
    LeaseState.REVOKED,
)
LEGAL = {
    *((_P, x) for x in (_G, _F, _R)),
    *((_G, x) for x in (_A, _C, _F, _E, _R)),
    *((_A, x) for x in (_C, _F, _E, _R)),
}
"""Written down once more, so that a wrong edge in the table is seen."""

Transitions = Counter[tuple[LeaseState, LeaseState]]


def record_transitions(seen: Transitions) -> None:
    """From now on every step of every lease in this process is counted, and must be legal."""
    before = Lease._to

    def counted(lease: Lease, state: LeaseState) -> None:
        before(lease, state)
        step = (lease.state, state)
        if step not in LEGAL:
            raise Violation("transition", f"{lease.lease_id}: {step[0].name} to {step[1].name}")
        seen[step] += 1

    type.__setattr__(Lease, "_to", counted)


class Checker:
    """Sees everything, changes nothing."""

    def __init__(self, kernel: Kernel, fabric: Fabric) -> None:
        self.kernel = kernel
        self.fabric = fabric
        self.boots: list[Boot] = []
        # (worker, incarnation) of every welcome, by the agent's own account.
        self._named: dict[tuple[str, int], Boot] = {}
        self._granted: set[str] = set()
        self._shared_ids: set[str] = set()
        self._posted: set[tuple[str, int]] = set()
        self._terms: Counter[str] = Counter()
        self._ended: dict[tuple[str, str], LeaseState] = {}
        self._revision: dict[str, int] = {}
        self._epochs: list[tuple[str, int]] = []
        self.eager_grants = 0
        self.shared_grants = 0
        self.pushes = 0

    # Watching a boot.

    def watch(self, boot: Boot) -> None:
        """Looks at all that a boot does from now on."""
        self.boots.append(boot)
        boot.pool.on_handout = lambda block: self._handed_out(boot, block)
        boot.pool.on_publish = lambda block: self._changing(boot, block, "publishes")
        boot.pool.on_compute = lambda block: self._changing(boot, block, "computes into")
        agent = boot.agent
        apply, obey, emit = agent._apply, agent._obey, boot.emit
        now_applying: list[CommandBatch] = []

        def applying(item: InboxItem) -> None:
            if isinstance(item, CommandBatch):
                now_applying[:] = [item]
            elif isinstance(item, StreamUp):
                self._terms[boot.name] = max(self._terms[boot.name], item.epoch)
            apply(item)

        def obeying(command: agent_pb2.AgentCommand) -> None:
            self._obeyed(boot, now_applying[0], command)
            obey(command)

        def emitting(event: agent_pb2.AgentEvent) -> None:
            self._said(boot, event)
            emit(event)

        agent._apply = applying  # type: ignore[method-assign]
        agent._obey = obeying  # type: ignore[method-assign]
        boot.emit = emitting  # type: ignore[method-assign]

    def _obeyed(self, boot: Boot, batch: CommandBatch, command: agent_pb2.AgentCommand) -> None:
        kind = command.WhichOneof("command")
        if batch.epoch < self._terms[boot.name]:
            raise Violation("stale", f"{boot.name} obeys {kind} of epoch {batch.epoch}")
        if batch.life in boot.replaced_lives:
            raise Violation(
                "stale", f"{boot.name} obeys {kind} of a stream that a later hello has replaced"
            )

    def _said(self, boot: Boot, event: agent_pb2.AgentEvent) -> None:
        if event.WhichOneof("event") == "hardened":
            blocks = event.hardened.blocks
            size = blocks.hash_size
            lands = {x.grant.lease_id: x for x in boot.agent.landings.held}
            if (landing := lands.get(event.hardened.lease_id)) is not None:
                offered = [*blocks.block_ids]
                offered += [blocks.tail.block_id] if blocks.HasField("tail") else []
                if landing.hold.ended or list(landing.hold.block_ids) != offered:
                    raise Violation("landing", f"{boot.name} offers blocks that it does not hold")
                self.pushes += 1
                return
            for i, block_id in enumerate(blocks.block_ids):
                block_hash = blocks.hashes[i * size : (i + 1) * size]
                if not boot.pool.blocks[block_id].holds(block_hash):
                    raise Violation(
                        "offer",
                        f"{boot.name} hardens block {block_id} for {event.hardened.lease_id} as "
                        f"{block_hash.hex()}, which it does not hold"
                        f"{' yet' if boot.pool.blocks[block_id].pending else ''}",
                    )
            if blocks.HasField("tail"):
                tail = blocks.tail
                if not boot.pool.blocks[tail.block_id].begins_with(tail.hash, tail.num_tokens):
                    raise Violation(
                        "offer",
                        f"{boot.name} hardens block {tail.block_id} for {event.hardened.lease_id} "
                        f"as {tail.num_tokens} tokens that it does not hold",
                    )

    def _handed_out(self, boot: Boot, block: Block) -> None:
        self._changing(boot, block, "hands out")
        for write in self.fabric.writers_of(boot.pool, block.block_id):
            if self._writes_on(boot, write):
                raise Violation(
                    "source reused",
                    f"{boot.name} hands out block {block.block_id}, which it is writing to "
                    f"{write.target.name}",
                )
        for read in self.fabric.readers_of(boot.pool, block.block_id):
            reader = next(b for b in self.boots if read.reader in b.transports)
            if self._reads_on(reader, read.reader, read.lease_id):
                raise Violation(
                    "source reused",
                    f"{boot.name} hands out block {block.block_id}, which {reader.name} is "
                    f"reading under {read.lease_id}",
                )

    def _changing(self, boot: Boot, block: Block, how: str) -> None:
        what = self.fabric.writes_to(boot.pool, block.block_id)
        if what:
            raise Violation(
                "landing",
                f"{boot.name} {how} block {block.block_id}, to which {what} may still write",
            )

    @staticmethod
    def _writes_on(boot: Boot, write: FlyingWrite) -> bool:
        """Whether the writer may still say that all is written."""
        if not boot.alive:
            return False
        pushes = boot.transfers[write.writer.rank].pushes._pushes.values()
        return any(
            flying.handle.raw is write
            and not push.stopping
            and boot.machine.boottime() < push.deadline_ns
            for push in pushes
            for chunk in push.chunks
            for flying in chunk.flying
        )

    def writing(self, writer: SimTransport, target: SimTransport, block_ids: list[int]) -> None:
        """A WRITE is about to be posted: to a landing zone that was offered to this boot."""
        boot = next(b for b in self.boots if writer in b.transports)
        to = next(b for b in self.boots if target in b.transports)
        self.kernel.reached("read")
        if not to.alive:
            return
        for landing in to.agent.landings.held:
            named = self._named.get(landing.hope.peer)
            if named is boot and set(block_ids) <= set(landing.hold.block_ids):
                if landing.hold.ended:
                    break
                return
        raise Violation(
            "landing", f"{boot.name} writes to blocks {block_ids} of {to.name}, not held for it"
        )

    def posting(self, reader: SimTransport, source: SimTransport, notice: bytes) -> None:
        """A READ is about to be posted."""
        boot = next(b for b in self.boots if reader in b.transports)
        kind, _, lease_id = notice.partition(b"|")
        grant = next(
            (g for g in boot.agent.destination.open_grants if g.lease_id == lease_id.decode()),
            None,
        )
        if grant is None:
            raise Violation("stale", f"{boot.name} reads under {lease_id!r}, which it has not")
        named = self._named.get(grant.source)
        if named is None or source not in named.transports:
            raise Violation(
                "stale", f"{boot.name} reads from {source.name}, not from {grant.source}"
            )
        now = boot.machine.boottime()
        if now > grant.deadline_ns - DEADLINE_MARGIN_NS:
            raise Violation("stale", f"{boot.name} posts under {grant.lease_id} after its margin")
        self._check_grant(boot, grant, posting=True)
        self.kernel.reached("read")
        if kind == b"done":
            use = (grant.lease_id, reader.rank)
            if use in self._posted:
                raise Violation("single use", f"{grant.lease_id} is read a second time")
            self._posted.add(use)

    # After each step.

    def check(self) -> None:
        """The state of all boots."""
        for boot in self.boots:
            if boot.alive:
                for grant in boot.agent.destination.open_grants:
                    self._check_grant(boot, grant)

    def _check_grant(self, boot: Boot, grant: HeldGrant, *, posting: bool = False) -> None:
        if boot.machine.boottime() >= grant.deadline_ns:
            return
        source = self._named.get(grant.source)
        if source is None or not source.alive:
            return
        if any(lease.lease_id == grant.lease_id for lease in source.agent.source.open_leases):
            return
        if posting or self._may_read(boot, grant):
            raise Violation(
                "source held",
                f"{source.name} does not hold {grant.lease_id}, under which {boot.name} may read "
                f"for {(grant.deadline_ns - boot.machine.boottime()) / 1e9:.3f} s",
            )

    def _may_read(self, boot: Boot, grant: HeldGrant) -> bool:
        """Whether the grant's READ is still to be posted, or under way and not given up."""
        eager = boot.agent.eager
        job = eager._open.get(grant.lease_id)
        name = grant.request_id
        if job is not None:
            if job.piece is None:
                return not job.stopping
            name = job.piece.name
        elif not name:
            return True
        for rank, transfers in enumerate(boot.transfers):
            ordered = any(isinstance(o, m.Read) and o.request_id == name for o in boot.orders[rank])
            if ordered:
                return True
            transport = boot.transports[rank]
            if transfers.reading(name) and any(
                read.reader is transport and read.lease_id == grant.lease_id
                for read in self.fabric.flying
            ):
                return True
        # An eager return goes on to its next piece only with the answer to this one.
        return False

    def _reads_on(self, boot: Boot, transport: SimTransport, lease_id: str) -> bool:
        if not boot.alive:
            return False
        grants = {g.lease_id: g for g in boot.agent.destination.open_grants}
        grant = grants.get(lease_id)
        if grant is None or boot.machine.boottime() >= grant.deadline_ns:
            return False
        job = boot.agent.eager._open.get(lease_id)
        name = grant.request_id if job is None or job.piece is None else job.piece.name
        return boot.transfers[transport.rank].reading(name)

    # The control plane.

    def welcomed(self, boot: Boot) -> None:
        """A boot has its number."""
        name = (boot.spec.worker_id, boot.incarnation)
        if self._named.setdefault(name, boot) is not boot:
            raise Violation("stale", f"{name} is the number of two boots")

    def decided(self, control: ControlPlane, effects: Effects) -> None:
        """An event's effects, before they leave."""
        for _, command in effects.commands:
            if isinstance(command, Grant):
                if command.lease_id in self._granted:
                    raise Violation("single use", f"{command.lease_id} is granted twice")
                self._granted.add(command.lease_id)
                self.eager_grants += command.eager_for is not None
                self.kernel.reached("grant")
        for change in effects.changes:
            if change.revision <= self._revision.get(control.name, 0):
                raise Violation("watch", f"revision {change.revision} does not grow")
            self._revision[control.name] = change.revision
            if isinstance(change, LeaseChange):
                lease = change.lease
                self._shared(lease)
                name = (control.name, lease.lease_id)
                before = self._ended.get(name)
                if before is not None and lease.state is not before:
                    raise Violation(
                        "transition",
                        f"{lease.lease_id} was {before.name} and is {lease.state.name}",
                    )
                if not lease.open:
                    self._ended[name] = lease.state

    def _shared(self, lease: Lease) -> None:
        """What another session has left is given to no other tenant."""
        owner = lease.source_key
        if owner is None:
            return
        if owner.tenant != lease.key.tenant:
            raise Violation("tenant", f"{lease.lease_id}: of {owner.tenant} for {lease.key.tenant}")
        if owner == lease.key:
            raise Violation("tenant", f"{lease.lease_id} is for the session that has it")
        if lease.grant_ns and lease.lease_id not in self._shared_ids:
            self._shared_ids.add(lease.lease_id)
            self.shared_grants += 1

    def began(self, control: ControlPlane, lineage: str) -> None:
        """A control plane has started on a store."""
        epoch = control.registry.state.epoch
        for of_lineage, before in self._epochs:
            if of_lineage == lineage and before >= epoch:
                raise Violation("stale", f"epoch {epoch} does not grow")
        self._epochs.append((lineage, epoch))


def uncovered(seen: Transitions) -> list[str]:
    """Edges of the table that were not taken."""
    return [
        f"{before.name}->{after.name}"
        for before, afters in TRANSITIONS.items()
        for after in sorted(afters)
        if not seen[before, after]
    ]
