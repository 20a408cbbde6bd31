"""A grant as the reading side keeps it, and the word that ends it."""

from __future__ import annotations

from dataclasses import dataclass

from kvshuttle.dataplane.clock import destination_deadline
from kvshuttle.dataplane.matching import Tail, split_hashes
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2

__all__ = ["Grant", "leg_of_direction", "parse_grant", "say_stopped", "tail_out"]


@dataclass(eq=False)
class Grant:
    """The right to read, once."""

    lease_id: str
    version: int
    token: str
    leg: types_pb2.Leg.ValueType
    source: tuple[str, int]
    start: int
    block_ids: list[int]
    hashes: list[bytes]
    deadline_ns: int
    is_return: bool
    request_id: str = ""
    # Epoch and number in it: its name where many leases are named at once.
    number: tuple[int, int] = (0, 0)
    # When to ask for more time, if it is needed still.
    ask_ns: int = 0
    # What follows the last of the blocks, if the source holds it.
    tail: Tail | None = None

    @property
    def readable_ids(self) -> list[int]:
        """Of all blocks that the source holds, the last, partial one too."""
        return [*self.block_ids, *([self.tail.block_id] if self.tail is not None else [])]


def leg_of_direction(direction: types_pb2.Direction.ValueType) -> types_pb2.Leg.ValueType:
    """The leg that reads: prefill what returns, decode what goes forward."""
    if direction == types_pb2.DIRECTION_RETURN:
        return types_pb2.LEG_PREFILL
    return types_pb2.LEG_DECODE


def parse_grant(command: agent_pb2.Grant) -> Grant:
    """Raises ``ValueError`` where ids and hashes do not pair."""
    blocks = command.blocks
    hashes = split_hashes(blocks.hashes, blocks.hash_size)
    if len(hashes) != len(blocks.block_ids):
        raise ValueError(
            f"blocks: {len(blocks.block_ids)} ids and {len(hashes)} hashes do not pair"
        )
    tail = None
    if blocks.HasField("tail"):
        tail = Tail(blocks.tail.block_id, blocks.tail.num_tokens, blocks.tail.hash)
    return Grant(
        lease_id=command.lease_id,
        version=command.version,
        token=command.turn_token,
        leg=leg_of_direction(command.direction),
        source=(command.source.worker_id, command.source.incarnation),
        start=blocks.range.start,
        block_ids=list(blocks.block_ids),
        hashes=hashes,
        deadline_ns=destination_deadline(command.as_of, command.ttl.ToNanoseconds()),
        is_return=command.direction == types_pb2.DIRECTION_RETURN,
        number=(command.lease_epoch, command.lease_seq),
        ask_ns=destination_deadline(command.as_of, command.ttl.ToNanoseconds() // 2),
        tail=tail,
    )


def tail_out(tail: Tail) -> types_pb2.TailBlock:
    """As `BlockDescriptors` carry it."""
    return types_pb2.TailBlock(block_id=tail.block_id, num_tokens=tail.tokens, hash=tail.hash)


def say_stopped(
    out: Outbox, lease_id: str, outcome: agent_pb2.TransferOutcome.ValueType, reason: str
) -> None:
    """Tells the control plane that nothing is read under this lease any more."""
    out.emit(
        agent_pb2.AgentEvent(
            stopped=agent_pb2.LeaseStopped(lease_id=lease_id, outcome=outcome, reason=reason)
        )
    )
