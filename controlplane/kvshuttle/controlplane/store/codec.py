"""Rows: sessions and leases packed, workers as JSON. A row says nothing of its version: the file's
schema version covers all rows.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from kvshuttle.controlplane.model import packing
from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.model.terms import SessionKey, WorkerRef, WorkerRole, WorkerState
from kvshuttle.controlplane.model.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvshuttle.controlplane.model.packed import PackedSessions

__all__ = [
    "add_sessions",
    "lease_to_row",
    "session_to_row",
    "to_row",
    "worker_from_row",
    "worker_to_row",
]

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_HEAD = struct.Struct("<qBH")
"""What a start must know of every session without unpacking it: its last change, whether it is
active, how many of its turns run."""
_HEADS = np.dtype([("update_ns", "<i8"), ("active", "u1"), ("running", "<u2")])
"""The same, of many in a row."""


def session_to_row(session: Session) -> bytes:
    """All but its key, which is the row's."""
    head = _HEAD.pack(session.update_ns, session.active, len(session.running()))
    return head + packing.session_to_bytes(session)


def add_sessions(
    found: PackedSessions, tenants: Sequence[str], ids: Sequence[str], bodies: Sequence[bytes]
) -> None:
    """The inverse for many rows, which stay packed; a tenant's name should be one object in all of
    them. ValueError when one is too short to be one."""
    size = _HEAD.size
    heads = b"".join([body[:size] for body in bodies])
    if len(heads) != size * len(bodies):
        raise ValueError("a session's row is cut short")
    columns = np.frombuffer(heads, _HEADS)
    new, key = tuple.__new__, SessionKey
    found.extend(
        [new(key, name) for name in zip(tenants, ids, strict=True)],
        [body[size:] for body in bodies],
        columns["update_ns"],
        columns["active"],
        columns["running"],
    )


def lease_to_row(lease: Lease) -> bytes:
    """All but its id. A renewal under way is not stored: its answer goes to another stream."""
    if lease.renewal is not None:
        lease = replace(lease, renewal=None)
    return packing.lease_to_bytes(lease)


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
