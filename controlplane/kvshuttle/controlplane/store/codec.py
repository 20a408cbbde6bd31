"""Rows: sessions and leases packed, workers as JSON. A row says nothing of its version: the file's
schema version covers all rows.
"""

from __future__ import annotations

import json
import struct

from msgspec.structs import replace

from kvshuttle.controlplane.model import packing
from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.lease_table import PackedLease
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.model.session_table import PackedSession
from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef, WorkerRole, WorkerState
from kvshuttle.controlplane.model.worker import Worker

__all__ = [
    "lease_from_row",
    "lease_to_row",
    "session_from_row",
    "session_to_row",
    "to_row",
    "worker_from_row",
    "worker_to_row",
]

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_HEAD = struct.Struct("<qBH")
"""What a start must know of every session without unpacking it: its last change, whether it is
active, how many of its turns run."""


def session_to_row(session: Session) -> bytes:
    """All but its key, which is the row's."""
    head = _HEAD.pack(session.update_ns, session.active, len(session.running()))
    return head + packing.session_to_bytes(session)


def session_from_row(tenant: str, session_id: str, body: bytes) -> PackedSession:
    """The inverse, packed. struct.error when the row is too short to be one."""
    update_ns, active, running = _HEAD.unpack_from(body)
    body = b"\0" + body[_HEAD.size :]
    return PackedSession(SessionKey(tenant, session_id), body, update_ns, bool(active), running)


def lease_to_row(lease: Lease) -> bytes:
    """All but its id. A renewal under way is not stored: its answer goes to another stream."""
    if lease.renewal is not None:
        lease = replace(lease, renewal=None)
    return packing.lease_to_bytes(lease)


def lease_from_row(lease_id: str, body: bytes) -> PackedLease:
    """The inverse, packed. msgspec.DecodeError, a ValueError, when it is none."""
    return PackedLease.of(lease_id, body)


def to_row(image: Session | Lease) -> bytes:
    """A session's row or a lease's."""
    return session_to_row(image) if isinstance(image, Session) else lease_to_row(image)


def worker_to_row(worker: Worker) -> str:
    """What is remembered of a boot: see `memory.at_rest`."""
    return _encode(
        {
            "incarnation": worker.ref.incarnation,
            "boot": worker.boot_id,
            "role": int(worker.role),
            "url": worker.url,
            "fenced": worker.state is WorkerState.FENCED,
            "register": worker.register_ns,
            "heard": worker.heard_ns,
            "end": worker.end_ns,
            "draining": worker.draining,
            "generation": worker.stream_generation,
            "block_size": worker.block_size,
            "num_blocks": worker.num_blocks,
            "bytes_per_block": worker.bytes_per_block,
            "prefix_caching": worker.prefix_caching,
            "vllm": worker.vllm_version,
            "agent": worker.agent_version,
            "requests": worker.requests,
            "fenced_boots": worker.fenced_boots,
        }
    )


def worker_from_row(worker_id: str, body: str) -> Worker:
    """The inverse."""
    row = json.loads(body)
    return Worker(
        ref=WorkerRef(worker_id, row["incarnation"]),
        boot_id=row["boot"],
        role=WorkerRole(row["role"]),
        url=row["url"],
        state=WorkerState.FENCED if row["fenced"] else WorkerState.LOST,
        register_ns=row["register"],
        heard_ns=row["heard"],
        end_ns=row["end"] or row["heard"],
        draining=row["draining"],
        stream_generation=row["generation"],
        block_size=row["block_size"],
        num_blocks=row["num_blocks"],
        bytes_per_block=row["bytes_per_block"],
        prefix_caching=row["prefix_caching"],
        vllm_version=row["vllm"],
        agent_version=row["agent"],
        requests=tuple(row["requests"]),
        fenced_boots=tuple(row["fenced_boots"]),
    )
