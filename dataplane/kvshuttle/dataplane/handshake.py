"""What a rank tells the scheduler's process when its memory is registered."""

from __future__ import annotations

from dataclasses import dataclass

from kvshuttle.dataplane.mover import MoverEndpoint
from kvshuttle.dataplane.shapes import Heads
from kvshuttle.dataplane.vllm_compat import KVConnectorHandshakeMetadata
from kvshuttle.v1 import agent_service_pb2 as agent_pb2

__all__ = ["RankHandshake"]


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Pickled by vLLM between its processes."""

    endpoint: MoverEndpoint
    fingerprint: tuple[tuple[str, str], ...]
    num_blocks: int
    heads: Heads

    def describe(self) -> agent_pb2.RankEndpoint:
        """As a message for the control plane."""
        return agent_pb2.RankEndpoint(
            rank=self.endpoint.rank,
            agent_name=self.endpoint.agent_name,
            agent_metadata=self.endpoint.agent_metadata,
            regions=[
                agent_pb2.MemoryRegion(
                    base_address=r.base,
                    block_bytes=r.block_bytes,
                    memory_type=r.memory_type,
                    device_id=r.device_id,
                    layer=r.layer,
                )
                for r in self.endpoint.regions
            ],
            first_head=self.heads.first,
            num_heads=self.heads.count,
        )
