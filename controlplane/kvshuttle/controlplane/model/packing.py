"""Objects as bytes: how they lie in memory while nobody looks at them, and in a store's rows.

MessagePack arrays in the order of the fields. A new field goes to the end of its class and has a
default: what was packed without it can then be read.
"""

from __future__ import annotations

import zlib

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import force_setattr, replace

from kvshuttle.controlplane.model.lease import Lease
from kvshuttle.controlplane.model.replica import Replica
from kvshuttle.controlplane.model.session import Placement, Session
from kvshuttle.controlplane.model.terms import SessionKey, TurnState

__all__ = [
    "Press",
    "RunningTurn",
    "lease_from_bytes",
    "lease_to_bytes",
    "replicas_from_bytes",
    "replicas_to_bytes",
    "running_turns",
    "session_from_bytes",
    "session_to_bytes",
    "worker_of_leg",
]

_RUNS = int(TurnState.RUNNING)
_NO_KEY = SessionKey("", "")
_encode = msgspec.msgpack.Encoder().encode
_session = msgspec.msgpack.Decoder(Session).decode
_lease = msgspec.msgpack.Decoder(Lease).decode


class RunningTurn(Struct, array_like=True, gc=False):
    """As much of a Turn as a start looks at, which has a million of them before it. Its legs are as
    they were packed: there are few different ones."""

    number: int
    token: str
    decode: Raw
    plan: Raw
    begin_ns: int
    retention_ns: int
    prefill: Raw
    state: int


class _Running(Struct, array_like=True, gc=False):
    key: Raw
    create_ns: int
    update_ns: int
    state: int = 1
    turn_count: int = 0
    turns: tuple[RunningTurn, ...] = ()


_placement = msgspec.msgpack.Decoder(Placement | None).decode
_running = msgspec.msgpack.Decoder(_Running).decode
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


def worker_of_leg(leg: bytes) -> str:
    """The worker of a turn's packed leg; empty where it has none."""
    found = _placement(leg)
    return found.worker.worker_id if found is not None else ""


def running_turns(body: bytes) -> list[RunningTurn]:
    """The turns of a packed session that run. msgspec.DecodeError, a ValueError, when it is
    none."""
    return [turn for turn in _running(body).turns if turn.state == _RUNS]


def lease_to_bytes(lease: Lease) -> bytes:
    """All but its id, which names the bytes."""
    return _encode(replace(lease, lease_id=""))


def lease_from_bytes(lease_id: str, body: bytes) -> Lease:
    """The inverse. msgspec.DecodeError, a ValueError, when it is not one."""
    lease = _lease(body)
    force_setattr(lease, "lease_id", lease_id)
    return lease


def replicas_to_bytes(replicas: tuple[Replica, ...]) -> bytes:
    """Replicas of one session."""
    return _encode(replicas)


def replicas_from_bytes(body: bytes) -> tuple[Replica, ...]:
    """The inverse."""
    return _replicas(body)


class Press:
    """Compresses bytes that resemble each other, with the first of them as the dictionary. Only
    for memory: another process could not read it."""

    SAMPLE = 16
    _LEVEL = 1
    _MEMORY = 5
    """Of nine: a table of 8 KB to find repetitions by, which is cleared for each object, instead of
    128. No object is so large that it would be found wanting."""
    _WINDOW = -12
    """Raw, with a window that holds the dictionary: an inflating stream needs 11 KB for a while."""

    def __init__(self) -> None:
        self._sample: list[bytes] = []
        self._dictionary = b""

    def press(self, body: bytes) -> bytes:
        """A first byte says how the rest is to be read."""
        if not self._dictionary:
            self._sample.append(body)
            if len(self._sample) < self.SAMPLE:
                return b"\0" + body
            self._dictionary = b"".join(self._sample)[-(1 << -self._WINDOW) + 512 :]
            self._sample.clear()
        deflate = zlib.compressobj(
            self._LEVEL,
            zlib.DEFLATED,
            self._WINDOW,
            self._MEMORY,
            zlib.Z_DEFAULT_STRATEGY,
            self._dictionary,
        )
        pressed = deflate.compress(body) + deflate.flush()
        return b"\1" + pressed if len(pressed) < len(body) else b"\0" + body

    def release(self, pressed: bytes) -> bytes:
        """The inverse."""
        if pressed[0] == 0:
            return pressed[1:]
        return zlib.decompressobj(self._WINDOW, self._dictionary).decompress(pressed[1:])
