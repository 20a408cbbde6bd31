"""The interface of every store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.controlplane.model.effects import Record
    from kvshuttle.controlplane.model.state import Snapshot

__all__ = ["Store", "StoreDamagedError", "StoreError", "StoreFutureError", "StoreLockedError"]


class StoreError(Exception):
    """The store cannot be read or written; the message says what to do."""


class StoreLockedError(StoreError):
    """Another control plane uses the store."""


class StoreDamagedError(StoreError):
    """The store's file is not one, or is damaged. It was not changed."""


class StoreFutureError(StoreError):
    """The store was written by a newer version. It was not changed."""


class Store(Protocol):
    """Remembers the after-images that events produce.

    One caller at a time; `load` comes first. A store that raised StoreError in `commit` has
    written all of the records or none, and is not used again.
    """

    @property
    def kind(self) -> str:
        """Its name for operators."""
        ...

    @property
    def durable(self) -> bool:
        """Whether a commit waits for a device; if not, it may be called where waiting is not
        allowed."""
        ...

    def load(self) -> Snapshot:
        """Everything that was committed; an empty snapshot when the store is new."""
        ...

    def commit(self, records: Iterable[Record]) -> None:
        """Writes the records, in order, all or none. They are durable when it returns."""
        ...

    def close(self) -> None:
        """Lets go of it. May be called twice."""
        ...
