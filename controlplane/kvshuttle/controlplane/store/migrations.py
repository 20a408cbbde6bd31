"""The schema, as the ordered steps that lead to it from an empty file.

A step is never changed once it was on the main branch: files that went through it exist. What it
needs to know of rows is written out here and not shared with the codec, which moves on.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import msgspec

__all__ = ["STEPS", "VERSION", "Step", "checksum", "checksums", "create", "upgrade", "why_not"]

Step = Callable[[sqlite3.Connection], None]


def checksum(*columns: str | int | bytes) -> int:
    """What a row's `crc` must be, from its other columns in order. SQLite has no checksums of its
    own: without this a flipped bit inside a row's text would be taken for what was stored."""
    parts: list[bytes] = []
    for column in columns:
        data = column if isinstance(column, bytes) else str(column).encode()
        # The length keeps ("a", "bc") and ("ab", "c") apart.
        parts += len(data).to_bytes(4, "little"), data
    return crc32(b"".join(parts))


_SIZES = [size.to_bytes(4, "little") for size in range(8_192)]


def checksums(*columns: Sequence[str | bytes]) -> list[int]:
    """`checksum` of many rows of text and bytes, by column."""
    sized: list[list[bytes]] = []
    for column in columns:
        data = [x if isinstance(x, bytes) else x.encode() for x in column]
        try:
            sized.append([_SIZES[len(x)] for x in data])
        except IndexError:
            sized.append([len(x).to_bytes(4, "little") for x in data])
        sized.append(data)
    return [crc32(b"".join(row)) for row in zip(*sized, strict=True)]


def _statements(script: str) -> Step:
    def run(db: sqlite3.Connection) -> None:
        # Not executescript, which would commit the transaction around it.
        for statement in script.split(";"):
            db.execute(statement.strip())

    return run


_tables = _statements("""
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
CREATE TABLE workers (worker_id TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID
""")

_checksums_and_requests = _statements("""
ALTER TABLE workers ADD COLUMN incarnation INTEGER NOT NULL DEFAULT 0;
ALTER TABLE workers ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE leases ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE term ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE sessions SET body = json_insert(body, '$[#]', json('[]'));
UPDATE leases SET body = json_set(body, '$.requests', json('[]'));
UPDATE workers SET
    incarnation = json_extract(body, '$.incarnation'),
    body = json_set(body, '$.requests', json('[]'), '$.fenced_boots',
        CASE json_extract(body, '$.fenced')
            WHEN 1 THEN json_array(json_extract(body, '$.boot')) ELSE json('[]') END);
UPDATE sessions SET crc = row_crc(tenant, session_id, body);
UPDATE leases SET crc = row_crc(lease_id, body);
UPDATE workers SET crc = row_crc(worker_id, body, incarnation);
UPDATE term SET crc = row_crc(one, epoch, lineage_id, last_incarnation, time_ns)
""")


def _session_of_3(body: str) -> bytes:
    """Version 2's session, as version 3 has it."""

    def placement(row: list[Any] | None) -> list[Any] | None:
        return [[row[0], row[1]], row[2]] if row else None

    create, update, state, count, turns, hints, last_prefill, version, *rest = json.loads(body)
    # Rows of before the rhythm of sessions was kept are shorter.
    requests, gaps, hint = [*rest, "", 0][:3] if len(rest) < 3 else rest
    packed = []
    for turn in turns:
        number, token, turn_state, outcome, prefill, decode, plan, begin, end, *rest = turn
        retention, usage, request_id = rest
        made = [number, token, placement(decode), plan, begin, retention]
        packed.append([*made, placement(prefill), turn_state, outcome, end, usage, request_id])
    running = sum(turn[2] == 1 for turn in turns)
    return struct.pack("<qBH", update, state == 1, running) + msgspec.msgpack.encode(
        [
            ["", ""],
            create,
            update,
            state,
            count,
            packed,
            hints,
            last_prefill,
            version,
            requests,
            bytes.fromhex(gaps),
            hint,
        ]
    )


def _lease_of_3(body: str) -> bytes:
    """Version 2's lease, as version 3 has it."""
    row = json.loads(body)
    names: tuple[str, ...] = (
        "seq",
        "key",
        "turn",
        "token",
        "direction",
        "source",
        "destination",
        "epoch",
        "ttl",
    )
    made = [*(row[name] for name in names), row["create"], bytes.fromhex(row["ask_head"])]
    names = ("ask_range", "state", "version", "range")
    held = [*(row[name] for name in names), bytes.fromhex(row["head"])]
    names = ("grant", "deadline", "end", "reason", "stats", "stop", "reader_stopped")
    ended = [row[name] for name in names]
    return msgspec.msgpack.encode(["", *made, *held, *ended, None, row["requests"]])


_packed_tables = _statements("""
CREATE TABLE sessions_3 (
    tenant TEXT NOT NULL,
    session_id TEXT NOT NULL,
    body BLOB NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (tenant, session_id)
) STRICT, WITHOUT ROWID;
INSERT INTO sessions_3 SELECT tenant, session_id, session_of_3(body), 0 FROM sessions;
UPDATE sessions_3 SET crc = row_crc(tenant, session_id, body);
DROP TABLE sessions;
ALTER TABLE sessions_3 RENAME TO sessions;
CREATE TABLE leases_3 (
    lease_id TEXT PRIMARY KEY,
    body BLOB NOT NULL,
    crc INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO leases_3 SELECT lease_id, lease_of_3(body), 0 FROM leases;
UPDATE leases_3 SET crc = row_crc(lease_id, body);
DROP TABLE leases;
ALTER TABLE leases_3 RENAME TO leases
""")


def _packed_rows(db: sqlite3.Connection) -> None:
    """Sessions and leases as MessagePack: a quarter of the size, read without parsing."""
    db.create_function("session_of_3", 1, _session_of_3, deterministic=True)
    db.create_function("lease_of_3", 1, _lease_of_3, deterministic=True)
    _packed_tables(db)


STEPS: tuple[Step, ...] = (_tables, _checksums_and_requests, _packed_rows)
"""Step n makes version n + 1 of version n. A new one goes to the end."""

VERSION = len(STEPS)


def _numbered(db: sqlite3.Connection, steps: Sequence[Step], first: int, also: str = "") -> None:
    """Runs steps in one transaction, which also leaves the version that they lead to."""
    db.create_function("row_crc", -1, checksum, deterministic=True)
    db.execute("BEGIN EXCLUSIVE")
    try:
        for step in steps:
            step(db)
        if also:
            db.execute(also)
        db.execute(f"PRAGMA user_version = {first + len(steps) - 1}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _schema(db: sqlite3.Connection) -> set[str]:
    """Its tables, as they were made."""
    texts = db.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")
    return {" ".join(text.split()) for (text,) in texts}


def why_not(db: sqlite3.Connection, version: int) -> str:
    """Why a file is not what its version says, or nothing. Looked at before anything is written:
    an upgrade that fails half way changes nothing, but merges the log."""
    made = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _numbered(made, STEPS[:version], 1)
        if _schema(made) != _schema(db):
            return f"its tables are not those of version {version}"
    finally:
        made.close()
    for table in ("sessions", "leases", "workers") if version < 3 else ():
        query = f"SELECT count(*) FROM {table} WHERE NOT json_valid(body)"  # noqa: S608
        if db.execute(query).fetchone()[0]:
            return f"a row of {table} is not what was written"
    return ""


def create(db: sqlite3.Connection, application_id: int, steps: Sequence[Step] = STEPS) -> None:
    """Makes an empty file a store of the newest version: all of it, or nothing."""
    _numbered(db, steps, 1, f"PRAGMA application_id = {application_id}")


def upgrade(db: sqlite3.Connection, steps: Sequence[Step] = STEPS) -> int:
    """Brings a file to the newest version, each step in a transaction of its own: a crash leaves
    the file at one version or at the next. Returns the version that it had."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    for number, step in enumerate(steps[version:], version + 1):
        _numbered(db, (step,), number)
    return int(version)
