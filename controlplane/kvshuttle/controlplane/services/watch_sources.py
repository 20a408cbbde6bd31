"""What watches may be of, and where their snapshots are read from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvshuttle.controlplane.model.effects import (
    LeaseChange,
    LeaseDropped,
    SessionChange,
    SessionDropped,
)
from kvshuttle.controlplane.model.terms import SessionKey

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvshuttle.controlplane.model.state import State

__all__ = ["Leases", "Sessions", "Source", "Wish"]

C_co = TypeVar("C_co", SessionChange | SessionDropped, LeaseChange | LeaseDropped, covariant=True)


@dataclass(frozen=True, slots=True)
class Wish:
    """Which objects a reader may and wants to see; None: whatever."""

    tenant: str | None = None
    session_id: str | None = None

    def matches(self, key: SessionKey) -> bool:
        """Whether an object of this session is among them."""
        return self.tenant in (None, key.tenant) and self.session_id in (None, key.session_id)


class Source(Protocol[C_co]):
    """Where snapshots are read from."""

    def names(self, wish: Wish) -> list[Hashable]:
        """Names of the objects that are there now, perhaps with some that the wish excludes."""
        ...

    def read(self, name: Hashable, wish: Wish) -> C_co | None:
        """An object as it is now, if it is still there and wished for."""
        ...


class Sessions:
    """Every listed session."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    def names(self, wish: Wish) -> list[Hashable]:
        """See Source."""
        if wish.tenant is not None and wish.session_id is not None:
            return [SessionKey(wish.tenant, wish.session_id)]
        sessions = self._state().sessions
        if wish.tenant is not None:
            mine = sessions.after(SessionKey(wish.tenant, ""))
            return [*takewhile(wish.matches, mine)]
        return list(sessions)

    def read(self, name: Hashable, wish: Wish) -> SessionChange | SessionDropped | None:
        """See Source."""
        assert isinstance(name, SessionKey)
        if not wish.matches(name):
            return None
        state = self._state()
        session = state.sessions.peek(name)
        if session is None:
            return None
        session = state.as_shown(session)
        return SessionChange(session.version, session, state.replicas_of_session(name))


class Leases:
    """Every open lease."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    def names(self, wish: Wish) -> list[Hashable]:
        """See Source."""
        return list(self._state().open_leases)

    def read(self, name: Hashable, wish: Wish) -> LeaseChange | LeaseDropped | None:
        """See Source."""
        leases = self._state().leases
        if name not in leases:
            return None
        lease = leases.peek(str(name))
        return LeaseChange(0, lease) if lease.open and wish.matches(lease.key) else None
