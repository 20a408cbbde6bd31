"""The embedded store: one SQLite file in WAL mode, each commit synced to the device.

The file is locked for as long as it is open, so two control planes never share one. Before SQLite
gets to see a file, its header is read: a file that is not ours, or of a newer schema, is refused
untouched. The header is trustworthy because the schema is written before WAL mode is turned on.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.effects import (
    DropLease,
    DropSession,
    DropWorker,
    PutLease,
    PutSession,
    PutTerm,
    PutWorker,
)
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.store import codec
from kvshuttle.controlplane.store.base import (
    StoreDamagedError,
    StoreError,
    StoreFutureError,
    StoreLockedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvshuttle.controlplane.model.effects import Record

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "SqliteStore"]

APPLICATION_ID = 0x4B565348
"""'KVSH', in the header of the file."""
SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE term (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    epoch INTEGER NOT NULL,
    lineage_id TEXT NOT NULL,
    last_incarnation INTEGER NOT NULL,
    time_ns INTEGER NOT NULL
) STRICT;
CREATE TABLE sessions (
    tenant TEXT NOT NULL,
    session_id TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (tenant, session_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE leases (lease_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE workers (worker_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
"""


class SqliteStore:
    """StoreLockedError, StoreDamagedError or StoreFutureError from the constructor and `load`.

    `load` and `commit` may be called from different threads, one at a time.
    """

    kind = "sqlite"
    durable = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        new = _check_header(self.path)
        if new:
            # Turn tokens are in it: nobody else reads it.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            self._db = sqlite3.connect(
                self.path, timeout=0, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise StoreError(f"{self.path} cannot be opened: {error}") from error
        try:
            self._open(new)
        except BaseException:
            self._db.close()
            raise

    def _open(self, new: bool) -> None:
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA synchronous = FULL")
            if new:
                self._db.executescript(
                    f"BEGIN EXCLUSIVE; PRAGMA application_id = {APPLICATION_ID}; "
                    f"PRAGMA user_version = {SCHEMA_VERSION}; {_SCHEMA} COMMIT;"
                )
            mode = self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            # Takes the lock and, in this locking mode, keeps it.
            self._db.execute("BEGIN EXCLUSIVE")
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise StoreLockedError(
                    f"{self.path} is in use by another control plane: stop it, or give this one "
                    "a file of its own"
                ) from error
            raise _damaged(self.path, error) from error
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, error) from error
        if mode != "wal":
            raise StoreError(f"{self.path}: the file system does not support SQLite's WAL mode")

    def load(self) -> Snapshot:
        """Everything that was committed. Reads every row, so damage shows here."""
        try:
            row = self._db.execute(
                "SELECT epoch, lineage_id, last_incarnation, time_ns FROM term"
            ).fetchone()
            epoch, lineage_id, last_incarnation, time_ns = row or (0, "", 0, 0)
            select = self._db.execute
            return Snapshot(
                epoch=epoch,
                lineage_id=lineage_id,
                last_incarnation=last_incarnation,
                time_ns=time_ns,
                sessions=[
                    codec.session_from_row(*row)
                    for row in select("SELECT tenant, session_id, body FROM sessions")
                ],
                leases=[
                    codec.lease_from_row(*row)
                    for row in select("SELECT lease_id, body FROM leases")
                ],
                workers=[
                    codec.worker_from_row(*row)
                    for row in select("SELECT worker_id, body FROM workers")
                ],
            )
        except (sqlite3.DatabaseError, ValueError, KeyError, IndexError, TypeError) as error:
            raise _damaged(self.path, error) from error

    def commit(self, records: Iterable[Record]) -> None:
        """One transaction, synced."""
        execute = self._db.execute
        try:
            execute("BEGIN IMMEDIATE")
            for record in records:
                match record:
                    case PutSession(session):
                        execute(
                            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)",
                            (*session.key, codec.session_to_row(session)),
                        )
                    case DropSession(key):
                        execute("DELETE FROM sessions WHERE tenant = ? AND session_id = ?", key)
                    case PutLease(lease):
                        execute(
                            "INSERT OR REPLACE INTO leases VALUES (?, ?)",
                            (lease.lease_id, codec.lease_to_row(lease)),
                        )
                    case DropLease(lease_id):
                        execute("DELETE FROM leases WHERE lease_id = ?", (lease_id,))
                    case PutWorker(worker):
                        execute(
                            "INSERT OR REPLACE INTO workers VALUES (?, ?)",
                            (worker.ref.worker_id, codec.worker_to_row(worker)),
                        )
                    case DropWorker(ref):
                        execute(
                            "DELETE FROM workers WHERE worker_id = ? "
                            "AND json_extract(body, '$.incarnation') = ?",
                            ref,
                        )
                    case PutTerm(epoch, lineage_id, last_incarnation, time_ns):
                        execute(
                            "INSERT OR REPLACE INTO term VALUES (1, ?, ?, ?, ?)",
                            (epoch, lineage_id, last_incarnation, time_ns),
                        )
            execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.rollback()
            raise StoreError(f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        """Merges the WAL and lets go of the file."""
        self._db.close()


def _damaged(path: Path, error: BaseException) -> StoreDamagedError:
    return StoreDamagedError(
        f"{path} is damaged ({error}) and was left as it is: restore it from a copy, or move it "
        "away to start with an empty store (agents then need --accept-lineage-change once)"
    )


def _check_header(path: Path) -> bool:
    """Whether the file is still to be made. Reads the first 100 bytes, writes nothing."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise StoreError(f"{path.parent} is not a directory: make it first") from None
        return True
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not header:
        return True
    if len(header) < 100 or not header.startswith(b"SQLite format 3\x00"):
        raise _damaged(path, ValueError("it is not an SQLite file"))
    (version,) = struct.unpack_from(">i", header, 60)
    (application,) = struct.unpack_from(">i", header, 68)
    if application != APPLICATION_ID:
        raise StoreDamagedError(f"{path} is an SQLite file, but not one of kvshuttle's")
    if version > SCHEMA_VERSION:
        raise StoreFutureError(
            f"{path} has schema version {version}, this control plane knows {SCHEMA_VERSION}: "
            "start a newer version"
        )
    if version < 1:
        raise _damaged(path, ValueError("it has no schema version"))
    (page_size,) = struct.unpack_from(">H", header, 16)
    (pages,) = struct.unpack_from(">I", header, 28)
    wal = path.with_name(path.name + "-wal")
    # Without a WAL to be merged, the file must be as long as it says.
    if not (wal.exists() and wal.stat().st_size) and path.stat().st_size < pages * (
        65_536 if page_size == 1 else page_size
    ):
        raise _damaged(path, ValueError("it is cut short"))
    return False
