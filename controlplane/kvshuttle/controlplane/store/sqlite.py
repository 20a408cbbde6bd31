"""The embedded store: one SQLite file in WAL mode, each commit synced to the device.

The file is locked for as long as it is open, so two control planes never share one. Before SQLite
gets to see it, `files` has: one that is not ours, of a newer schema or damaged is refused as it is.
What is left to find, damage inside pages and rows, is found before anything is written.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvshuttle.controlplane.model.effects import (
    DropLease,
    DropSession,
    DropWorker,
    PutLease,
    PutSession,
    PutTerm,
    PutWorker,
)
from kvshuttle.controlplane.model.packed import PackedLeases, PackedSessions
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.store import codec, migrations
from kvshuttle.controlplane.store.base import StoreError, StoreLockedError
from kvshuttle.controlplane.store.files import (
    APPLICATION_ID,
    check_header,
    check_log,
    check_version,
    damaged,
    identity,
    journal_path,
    log_path,
    size_of,
)
from kvshuttle.controlplane.store.migrations import checksum, checksums

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvshuttle.controlplane.model.effects import Record
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.session import Session

__all__ = ["APPLICATION_ID", "LOG_BYTES", "LOG_PAGES", "SCHEMA_VERSION", "SqliteStore"]

SCHEMA_VERSION = migrations.VERSION
LOG_PAGES = 4_000
"""Pages in the log after which a commit merges it into the file: 16 MB, which bounds what a start
after a crash has to read again. It costs that commit, and who waits for it, some 10 ms and two
syncs more; so it should be rare: at 750 turns a second it is once a second, and a page that many
turns have written is merged once."""
CACHE_KIB = 16 << 10
"""Holds the inner pages of a million rows, so that a row costs one page to find, not three."""
LOG_BYTES = 32 << 20
"""The log file is cut to this after one transaction made it larger."""

_ROWS = {
    "term": "one, epoch, lineage_id, last_incarnation, time_ns",
    "sessions": "tenant, session_id, body",
    "leases": "lease_id, body",
    "workers": "worker_id, body, incarnation",
}

ROWS_AT_ONCE = 32
"""Rows in one statement at most. sqlite3 lets go of the interpreter for each and has to wait for
it again, up to a switch interval while the event loop is busy: few statements make short commits.
There is a statement for each number of rows, made once (`STATEMENTS`)."""
ROWS_READ = 512
"""Rows that a start takes up at a time: with what is made of them they stay in a core's cache of a
megabyte. With 4,096 reading takes half as long again."""
STATEMENTS = 256
"""Prepared statements that a connection keeps: those of two busy tables and some."""


def _put_sql(table: str, rows: int) -> str:
    columns = _ROWS[table]
    row = f"({'?, ' * len(columns.split(','))}?)"
    return (
        f"INSERT OR REPLACE INTO {table} ({columns}, crc) "  # noqa: S608
        f"VALUES {', '.join([row] * rows)}"
    )


_PUT = {
    (table, rows): _put_sql(table, rows) for table in _ROWS for rows in range(1, ROWS_AT_ONCE + 1)
}
_DROP_SESSION = "DELETE FROM sessions WHERE tenant = ? AND session_id = ?"
"""One at a time: for a list of pairs SQLite would look at every row."""
_DROP_LEASES = {
    rows: f"DELETE FROM leases WHERE lease_id IN ({', '.join('?' * rows)})"  # noqa: S608
    for rows in range(1, ROWS_AT_ONCE + 1)
}


class SqliteStore:
    """StoreError and its kinds from the constructor and `load`; then the files are as they were.

    `load` and `commit` may be called from different threads, one at a time.
    """

    kind = "sqlite"
    durable = True

    def __init__(self, path: str | Path) -> None:
        # SQLite keeps the log beside the file itself, not beside a link to it.
        self.path = Path(os.path.realpath(path))
        self._found: Snapshot | None = None
        new = check_header(self.path, SCHEMA_VERSION)
        if not new:
            check_log(self.path)
            if size_of(log_path(self.path)) and not size_of(journal_path(self.path)):
                self._check_pages()
        else:
            # Turn tokens are in it: nobody else reads it.
            try:
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            except OSError as error:
                raise StoreError(f"{self.path} cannot be made: {error}") from error
        self._db = self._connect("rw")
        try:
            self._open()
        except sqlite3.Error as error:
            self._db.close()
            raise _refusal(self.path, error) from error
        except BaseException:
            self._db.close()
            raise

    def _connect(self, mode: str) -> sqlite3.Connection:
        try:
            return sqlite3.connect(
                f"file:{quote(str(self.path.absolute()))}?mode={mode}",
                uri=True,
                timeout=0,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=STATEMENTS,
            )
        except sqlite3.Error as error:
            raise _refusal(self.path, error) from error

    def _check_pages(self) -> None:
        """Reads everything through a connection that cannot write: closing one that can merges the
        log into the file, damaged or not. What is found is kept for `load`."""
        before = self._signature()
        db = self._connect("ro")
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            check_version(self.path, version, SCHEMA_VERSION)
            _check_structure(self.path, db, version)
            if version == SCHEMA_VERSION:
                self._found = _read_all(self.path, db)
        except sqlite3.Error as error:
            raise _refusal(self.path, error) from error
        finally:
            db.close()
        self._seen = before

    def _signature(self) -> tuple[int, ...]:
        """Tells whether somebody has written the files."""
        stats = [path.stat() for path in (self.path, log_path(self.path)) if path.exists()]
        return tuple(n for stat in stats for n in (stat.st_size, stat.st_mtime_ns))

    def _open(self) -> None:
        db = self._db
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA synchronous = FULL")
        if not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            migrations.create(db, APPLICATION_ID)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if self._found is None:
            _check_structure(self.path, db, version)
        migrations.upgrade(db)
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"{self.path}: the file system does not support SQLite's WAL mode")
        db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        # Takes the lock and, in this locking mode, keeps it.
        db.execute("BEGIN EXCLUSIVE")
        db.execute("COMMIT")
        self._identity = identity(self.path)
        if self._found is not None and self._signature() != self._seen:
            # Written between the look at it and the lock.
            self._found = None
            _check_structure(self.path, db, SCHEMA_VERSION)
        if version < SCHEMA_VERSION:
            # The header of the file itself must say what it is.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def load(self) -> Snapshot:
        """Everything that was committed. Reads every row, so damage shows here."""
        found, self._found = self._found, None
        return found if found is not None else _read_all(self.path, self._db)

    def _put(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        for at in range(0, len(rows), ROWS_AT_ONCE):
            several = rows[at : at + ROWS_AT_ONCE]
            values = [x for row in several for x in (*row, checksum(*row))]
            self._db.execute(_PUT[table, len(several)], values)

    def _drop(self, table: str, keys: Sequence[tuple[str, ...]]) -> None:
        if table == "sessions":
            for key in keys:
                self._db.execute(_DROP_SESSION, key)
            return
        for at in range(0, len(keys), ROWS_AT_ONCE):
            several = [lease_id for (lease_id,) in keys[at : at + ROWS_AT_ONCE]]
            self._db.execute(_DROP_LEASES[len(several)], several)

    def _last(self, records: Iterable[Record]) -> dict[str, dict[tuple[str, ...], bytes | None]]:
        """Of each session and lease its last image, None where it is dropped; the others are
        written as they come, for they are few."""
        last: dict[str, dict[tuple[str, ...], Session | Lease | None]]
        last = {"sessions": {}, "leases": {}}
        for record in records:
            match record:
                case PutSession(session):
                    last["sessions"][session.key] = session
                case DropSession(key):
                    last["sessions"][key] = None
                case PutLease(lease):
                    last["leases"][(lease.lease_id,)] = lease
                case DropLease(lease_id):
                    last["leases"][(lease_id,)] = None
                case PutWorker(worker):
                    name, incarnation = worker.ref
                    self._put("workers", [(name, codec.worker_to_row(worker), incarnation)])
                case DropWorker(ref):
                    self._db.execute(
                        "DELETE FROM workers WHERE worker_id = ? AND incarnation = ?", ref
                    )
                case PutTerm(epoch, lineage_id, last_incarnation, time_ns):
                    self._put("term", [(1, epoch, lineage_id, last_incarnation, time_ns)])
        return {
            table: {
                key: codec.to_row(image) if image is not None else None
                for key, image in images.items()
            }
            for table, images in last.items()
        }

    def commit(self, records: Iterable[Record]) -> None:
        """One transaction, synced."""
        execute = self._db.execute
        try:
            execute("BEGIN IMMEDIATE")
            for table, images in self._last(records).items():
                self._put(table, [(*key, x) for key, x in images.items() if x is not None])
                self._drop(table, [key for key, x in images.items() if x is None])
            execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"{self.path} cannot be written: {error}") from error
        finally:
            if self._db.in_transaction:
                self._db.rollback()

    def moved(self) -> bool:
        """Whether the file is no longer where it was opened; SQLite writes on to where it is now.
        OSError when that cannot be told."""
        return identity(self.path) != self._identity

    def close(self) -> None:
        """Merges the log and lets go of the file."""
        self._db.close()


def _rows(db: sqlite3.Connection, table: str) -> Iterable[Sequence[Any]]:
    for *columns, crc in db.execute(f"SELECT {_ROWS[table]}, crc FROM {table}"):  # noqa: S608
        if checksum(*columns) != crc:
            raise _not_what_was_written(table)
        yield columns


def _columns(db: sqlite3.Connection, table: str) -> Iterable[Sequence[Any]]:
    """As `_rows`, many at a time and by column: a million would take four times as long."""
    rows = db.execute(f"SELECT {_ROWS[table]}, crc FROM {table}")  # noqa: S608
    while some := rows.fetchmany(ROWS_READ):
        *columns, crcs = zip(*some, strict=True)
        if checksums(*columns) != list(crcs):
            raise _not_what_was_written(table)
        yield columns


def _not_what_was_written(table: str) -> ValueError:
    return ValueError(f"a row of {table} is not what was written")


def _read_sessions(db: sqlite3.Connection) -> PackedSessions:
    """One string for all sessions of a tenant."""
    found = PackedSessions()
    tenants: dict[str, str] = {}
    for names, ids, bodies in _columns(db, "sessions"):
        one_each = [tenants.setdefault(name, name) for name in names]
        codec.add_sessions(found, one_each, ids, bodies)
    return found


def _read_leases(db: sqlite3.Connection) -> PackedLeases:
    found = PackedLeases()
    for ids, bodies in _columns(db, "leases"):
        found.extend(ids, bodies)
    return found


def _read_all(path: Path, db: sqlite3.Connection) -> Snapshot:
    """What a file of the newest version has. StoreDamagedError, StoreError."""
    try:
        term = next(iter(_rows(db, "term")), (1, 0, "", 0, 0))
        _, epoch, lineage_id, last_incarnation, time_ns = term
        return Snapshot(
            epoch=epoch,
            lineage_id=lineage_id,
            last_incarnation=last_incarnation,
            time_ns=time_ns,
            sessions=_read_sessions(db),
            leases=_read_leases(db),
            workers=[codec.worker_from_row(*row[:2]) for row in _rows(db, "workers")],
        )
    except sqlite3.Error as error:
        raise _refusal(path, error) from error
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
        raise damaged(path, error) from error


def _check_structure(path: Path, db: sqlite3.Connection, version: int) -> None:
    """StoreDamagedError; sqlite3.Error too. A damaged page can hide rows without any error; this
    costs half a second at a million."""
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise damaged(path, found)
    if why_not := migrations.why_not(db, version):
        raise damaged(path, why_not)


def _refusal(path: Path, error: sqlite3.Error) -> StoreError:
    """What an error of SQLite's means to an operator."""
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreLockedError(
                f"{path} is in use by another control plane: stop it, or give this one "
                "a file of its own"
            )
        case (
            sqlite3.SQLITE_CANTOPEN
            | sqlite3.SQLITE_FULL
            | sqlite3.SQLITE_IOERR
            | sqlite3.SQLITE_NOMEM
            | sqlite3.SQLITE_PERM
            | sqlite3.SQLITE_READONLY
        ):
            return StoreError(
                f"{path} cannot be used: {error}. Look at the space on its file system, at its "
                "permissions and at the system's log; what was committed is in it"
            )
    return damaged(path, error)
