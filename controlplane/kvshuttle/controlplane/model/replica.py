"""Workers' copies of sessions' chains."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kvshuttle.controlplane.model.errors import IllegalTransitionError
from kvshuttle.controlplane.model.terms import ReplicaState, WorkerRef

__all__ = ["Replica"]


class Replica(Struct, frozen=True, array_like=True, gc=False):
    """A worker's copy of `chain[0:num_blocks)`, named by the hash of its last block.

    A session is a tree: one worker may hold several replicas of it.
    """

    worker: WorkerRef
    head_hash: bytes
    num_blocks: int
    num_tokens: int
    state: ReplicaState
    expire_ns: int

    @property
    def name(self) -> tuple[str, bytes]:
        """Its key within the session."""
        return (self.worker.worker_id, self.head_hash)

    def changed(self, state: ReplicaState, num_blocks: int) -> Replica:
        """The replica after a report: HARD → SOFT → GONE, HARD again on a new hold; it may get
        shorter, never longer (a longer one has another hash)."""
        if self.state is ReplicaState.GONE or num_blocks > self.num_blocks:
            raise IllegalTransitionError(
                f"a replica that is {self.state.name} with {self.num_blocks} blocks cannot become "
                f"{state.name} with {num_blocks}"
            )
        tokens = self.num_tokens
        if num_blocks != self.num_blocks and self.num_blocks:
            tokens = self.num_tokens * num_blocks // self.num_blocks
        return replace(self, state=state, num_blocks=num_blocks, num_tokens=tokens)
