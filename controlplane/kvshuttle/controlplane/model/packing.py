"""Objects as bytes: how they lie in memory while nobody looks at them, and in a store's rows.

MessagePack arrays in the order of the fields. A new field goes to the end of its class and has a
default: what was packed without it can then be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.replica import Replica
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.model.terms import SessionKey

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "TurnHead",
    "lease_from_bytes",
    "lease_to_bytes",
    "leases_without_ids",
    "replicas_from_bytes",
    "replicas_to_bytes",
    "session_from_bytes",
    "session_to_bytes",
    "turn_heads",
]

_NO_KEY = SessionKey("", "")
_encode = msgspec.msgpack.Encoder().encode
_session = msgspec.msgpack.Decoder(Session).decode
_lease = msgspec.msgpack.Decoder(Lease).decode


class _Passed(Struct, array_like=True, gc=False):
    """A packed object that is passed over: cheaper than keeping it packed."""


class _Boot(Struct, array_like=True, gc=False):
    worker_id: str


class _Leg(Struct, array_like=True, gc=False):
    worker: _Boot


class TurnHead(Struct, array_like=True, gc=False):
    """As much of a Turn as a start looks at, which has a million of them before it."""

    number: int
    token: str
    decode: _Leg
    plan: _Passed
    begin_ns: int
    retention_ns: int
    prefill: _Leg | None
    state: int


class _Head(Struct, array_like=True, gc=False):
    key: _Passed
    create_ns: int
    update_ns: int
    state: int = 1
    turn_count: int = 0
    turns: tuple[TurnHead, ...] = ()


_head = msgspec.msgpack.Decoder(_Head).decode
_replicas = msgspec.msgpack.Decoder(tuple[Replica, ...]).decode


def session_to_bytes(session: Session) -> bytes:
    """All but its key, which names the bytes."""
    return _encode(replace(session, key=_NO_KEY))


def session_from_bytes(key: SessionKey, body: bytes) -> Session:
    """The inverse. msgspec.DecodeError, a ValueError, when it is not one."""
    session = _session(body)
    # It is nobody else's yet.
    force_setattr(session, "key", key)
    return session


def turn_heads(body: bytes) -> tuple[TurnHead, ...]:
    """The turns of a packed session. msgspec.DecodeError, a ValueError, when it is none."""
    return _head(body).turns


def lease_to_bytes(lease: Lease) -> bytes:
    """All but its id, which names the bytes."""
    return _encode(replace(lease, lease_id=""))


def lease_from_bytes(lease_id: str, body: bytes) -> Lease:
    """The inverse. msgspec.DecodeError, a ValueError, when it is not one."""
    lease = _lease(body)
    force_setattr(lease, "lease_id", lease_id)
    return lease


def leases_without_ids(bodies: Iterable[bytes]) -> list[Lease]:
    """Many at once. msgspec.DecodeError, a ValueError, when one is none."""
    return [_lease(body) for body in bodies]


def replicas_to_bytes(replicas: tuple[Replica, ...]) -> bytes:
    """Replicas of one session."""
    return _encode(replicas)


def replicas_from_bytes(body: bytes) -> tuple[Replica, ...]:
    """The inverse."""
    return _replicas(body)
