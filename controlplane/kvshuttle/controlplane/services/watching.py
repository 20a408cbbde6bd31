"""A watch over the wire: what is the same for sessions and leases."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvshuttle.controlplane.model.effects import (
    LeaseChange,
    LeaseDropped,
    SessionChange,
    SessionDropped,
)
from kvshuttle.controlplane.services.convert import lease_out, session_out
from kvshuttle.controlplane.services.guard import tenant_or_all
from kvshuttle.controlplane.services.watch import Changed, Piece, token
from kvshuttle.controlplane.services.watch_sources import Source, Wish
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvshuttle.controlplane.runtime import Runtime
    from kvshuttle.controlplane.services.checks import Checks
    from kvshuttle.controlplane.services.watch import Hub

__all__ = ["LEASES", "SESSIONS", "Wire", "watch"]

C = TypeVar("C", SessionChange | SessionDropped, LeaseChange | LeaseDropped)


@dataclass(frozen=True, slots=True)
class Wire(Generic[C]):
    """How one kind's changes are told. `show` and `removed` give nothing for the other sort."""

    response: Callable[..., Any]
    snapshot: Callable[..., Any]
    field: str
    show: Callable[[C], Any]
    removed: Callable[[C], Any]


def _show_session(change: SessionChange | SessionDropped) -> sessions.Session | None:
    if isinstance(change, SessionDropped):
        return None
    return session_out(change.session, change.replicas)


def _removed_session(change: SessionChange | SessionDropped) -> sessions.SessionRemoved | None:
    if isinstance(change, SessionChange):
        return None
    return sessions.SessionRemoved(tenant=change.key.tenant, session_id=change.key.session_id)


def _show_lease(change: LeaseChange | LeaseDropped) -> leases.Lease | None:
    return None if isinstance(change, LeaseDropped) else lease_out(change.lease)


def _removed_lease(change: LeaseChange | LeaseDropped) -> leases.LeaseRemoved | None:
    return None if isinstance(change, LeaseChange) else leases.LeaseRemoved(lease_id=change.name)


SESSIONS: Wire[SessionChange | SessionDropped] = Wire(
    sessions.WatchSessionsResponse,
    sessions.SessionSnapshot,
    "sessions",
    _show_session,
    _removed_session,
)
LEASES: Wire[LeaseChange | LeaseDropped] = Wire(
    leases.WatchLeasesResponse, leases.LeaseSnapshot, "leases", _show_lease, _removed_lease
)


async def watch(
    wire: Wire[C],
    hub: Hub[C],
    source: Source[C],
    runtime: Runtime,
    checks: Checks,
    request: sessions.WatchSessionsRequest | leases.WatchLeasesRequest,
) -> AsyncIterator[Any]:
    """The messages of one watch, for the tenant that the caller may see."""
    wanted = checks.text("session_id", request.session_id, checks.limits.session_id_chars)
    wish = Wish(tenant_or_all(), wanted or None)
    async with aclosing(hub.watch(request.resume_token, wish, source, runtime.settled)) as events:
        async for event in events:
            yield _message(wire, event, runtime)


def _message(wire: Wire[C], event: Any, runtime: Runtime) -> Any:
    if isinstance(event, Piece):
        pairs = [(wire.show(item), wire.removed(item)) for item in event.items]
        snapshot = wire.snapshot(
            complete=event.complete,
            first=event.first,
            removed=[gone for _, gone in pairs if gone is not None],
            **{wire.field: [shown for shown, _ in pairs if shown is not None]},
        )
        return wire.response(snapshot=snapshot, resume_token=token(event.revision))
    if isinstance(event, Changed):
        item = event.item
        return wire.response(
            changed=wire.show(item),
            removed=wire.removed(item),
            resume_token=token(item.revision),
        )
    progress = sessions.WatchProgress()
    progress.time.FromNanoseconds(runtime.clock.now_ns())
    return wire.response(progress=progress, resume_token=token(event.revision))
