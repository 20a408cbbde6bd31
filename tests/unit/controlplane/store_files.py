"""Store files in every state that a process or a disk can leave them in."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kvshuttle.controlplane.model.effects import PutSession, PutTerm, Record
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import SessionKey
from kvshuttle.controlplane.store import SqliteStore

V1 = Path(__file__).with_name("data") / "store_v1.sql"
PAGE = 4096
FRAME = 24 + PAGE
HEADER = 32


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def make_v1(path: Path, *, log: bool = True) -> Path:
    """A file of version 1; its program left it in WAL mode."""
    db = sqlite3.connect(path)
    db.executescript(V1.read_text())
    if log:
        db.execute("PRAGMA journal_mode = WAL")
    db.close()
    return path


def session(number: int, length: int = 40) -> PutSession:
    """A session whose row names its number."""
    key = SessionKey("t", f"s{number:05}-{'x' * length}")
    return PutSession(Session(key, 1, number))


def transactions(count: int, length: int = 40) -> list[list[Record]]:
    """Transaction n raises the epoch to n and adds a session or three, so that what a store
    remembers says which transactions it has."""
    return [
        [PutTerm(n, "lineage", n, n), *(session(n * 10 + i, length) for i in range(1 + n % 3))]
        for n in range(1, count + 1)
    ]


def crashed(path: Path, work: list[list[Record]]) -> list[int]:
    """Leaves a file and its log as a process that was killed does. The result: bytes of the log
    after each transaction, each of which was acknowledged then."""
    live = path.with_name("live.db")
    store = SqliteStore(live)
    store.load()
    sizes = []
    for records in work:
        store.commit(records)
        sizes.append(log_of(live).stat().st_size)
    shutil.copy(live, path)
    shutil.copy(log_of(live), log_of(path))
    store.close()
    live.unlink()
    return sizes


def read(path: Path) -> Snapshot:
    """Opens, loads, closes."""
    store = SqliteStore(path)
    try:
        return store.load()
    finally:
        store.close()


def contents(path: Path) -> dict[str, bytes]:
    """Bytes of the file and of its log."""
    return {file.name: file.read_bytes() for file in (path, log_of(path)) if file.is_file()}


def keys(work: Iterable[list[Record]]) -> set[SessionKey]:
    """The sessions that transactions put."""
    return {r.session.key for records in work for r in records if isinstance(r, PutSession)}


def in_a_child(call: Callable[[], None]) -> int:
    """Runs it in a forked process; returns the exit status, or minus the signal."""
    child = os.fork()
    if not child:
        status = 70
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
