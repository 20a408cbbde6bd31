"""What survives a restart: sessions, leases, boots, the epoch and the lineage."""

from kvshuttle.controlplane.store.base import (
    Store,
    StoreDamagedError,
    StoreError,
    StoreFutureError,
    StoreLockedError,
)
from kvshuttle.controlplane.store.memory import MemoryStore
from kvshuttle.controlplane.store.sqlite import SqliteStore

__all__ = [
    "MemoryStore",
    "SqliteStore",
    "Store",
    "StoreDamagedError",
    "StoreError",
    "StoreFutureError",
    "StoreLockedError",
]
