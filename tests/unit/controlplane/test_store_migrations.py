"""Files of older versions."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.controlplane.model.effects import PutLease
from kvshuttle.controlplane.model.packed import PackedSessions
from kvshuttle.controlplane.model.session import Placement, Plan, Session, Turn, Usage
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import (
    Hints,
    LeaseState,
    ReturnMode,
    SessionKey,
    SessionValue,
    WorkerRef,
    WorkerState,
)
from kvshuttle.controlplane.store import SqliteStore, StoreDamagedError, codec, migrations
from tests.unit.controlplane.store_files import contents, in_a_child, make_v1, read


def check(found: Snapshot) -> None:
    """What data/store_v1.sql says."""
    assert (found.epoch, found.lineage_id) == (7, "lineage-v1")
    assert (found.last_incarnation, found.time_ns) == (9, 123)
    (session,) = found.sessions
    assert (session.key, session.turn_count) == (("t", "s"), 3)
    assert (session.hints, session.last_prefill) == (Hints(5, SessionValue.HIGH), "p")
    assert session.requests == ()
    assert [turn.number for turn in session.running()] == [1, 3]
    assert session.turns[1].usage == Usage(1, 2, 3, 4)
    assert session.turns[2].request_id == "é\"'"
    one, two = sorted(found.leases, key=lambda lease: lease.order)
    assert (one.state, one.range, one.reader_stopped) == (LeaseState.COMPLETED, (0, 20), True)
    assert one.stats is not None
    assert one.stats.bytes == 736_000
    assert (two.state, two.end_reason) == (LeaseState.FAILED, "DESTINATION_LOST")
    assert two.requests == ()
    decode, prefill = sorted(found.workers, key=lambda worker: worker.ref)
    assert (decode.ref, decode.boot_id, decode.state) == (("d", 2), "boot-of-d", WorkerState.LOST)
    assert (prefill.state, prefill.fenced_boots) == (WorkerState.FENCED, ("boot-of-p",))
    assert (decode.fenced_boots, decode.requests) == ((), ())


def version_of(path: Path) -> int:
    found: int = struct.unpack_from(">i", path.read_bytes(), 60)[0]
    return found


@pytest.mark.parametrize("log", [True, False])
def test_a_file_of_version_1_is_upgraded(tmp_path: Path, log: bool) -> None:
    path = make_v1(tmp_path / "s.db", log=log)
    check(read(path))
    assert version_of(path) == migrations.VERSION
    store = SqliteStore(path)
    check(store.load())
    (lease, *_) = store.load().leases
    store.commit([PutLease(lease)])
    check(store.load())
    store.close()


def test_an_upgraded_file_has_the_schema_of_a_new_one(tmp_path: Path) -> None:
    read(tmp_path / "new.db")
    read(make_v1(tmp_path / "old.db"))
    schemas = []
    for name in ("new.db", "old.db"):
        db = sqlite3.connect(tmp_path / name)
        schemas.append(sorted(db.execute("SELECT type, name, sql FROM sqlite_schema")))
        db.close()
    assert schemas[0] == schemas[1]


def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path) -> None:
    def broken(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM sessions")
        db.execute("ALTER TABLE leases ADD COLUMN more INTEGER")
        raise RuntimeError

    path = tmp_path / "s.db"
    read(make_v1(path))
    db = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(RuntimeError):
        migrations.upgrade(db, (*migrations.STEPS, broken))
    db.close()
    assert version_of(path) == migrations.VERSION
    check(read(path))


def test_a_row_that_cannot_be_upgraded_is_damage(tmp_path: Path) -> None:
    path = make_v1(tmp_path / "s.db")
    db = sqlite3.connect(path)
    db.execute("UPDATE sessions SET body = 'x'")
    db.commit()
    db.close()
    before = contents(path)
    with pytest.raises(StoreDamagedError, match="left as it is"):
        read(path)
    assert contents(path) == before


def test_an_upgrade_killed_at_any_statement_is_done_or_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = SqliteStore._connect

    def die_at(statement: int) -> None:
        seen = 0

        def traced(text: str) -> None:
            nonlocal seen
            seen += 1
            if seen == statement:
                os.kill(os.getpid(), signal.SIGKILL)

        def connected(self: SqliteStore, mode: str) -> sqlite3.Connection:
            db = connect(self, mode)
            db.set_trace_callback(traced)
            return db

        monkeypatch.setattr(SqliteStore, "_connect", connected)
        read(path)

    versions = []
    for statement in range(1, 200):
        path = make_v1(tmp_path / f"{statement}.db")
        status = in_a_child(lambda n=statement: die_at(n))  # type: ignore[misc]
        if status == 0:
            break
        assert status == -signal.SIGKILL
        db = sqlite3.connect(path)
        (version,) = db.execute("PRAGMA user_version").fetchone()
        columns = {row[1] for row in db.execute("PRAGMA table_info(sessions)")}
        db.close()
        assert ("crc" in columns) is (version > 1)
        versions.append(version)
        check(read(path))
    assert set(versions) == set(range(1, migrations.VERSION + 1))
    assert len(versions) > 20


def test_sessions_of_version_2_come_with_or_without_their_gaps() -> None:
    turn = [3, "token", 1, 0, ["p", 4, "http://p"], ["d", 5, "http://d"], [2, "WHY", 7, 8, 9]]
    turn += [10, 0, 11, [1, 2, 3, 4], "request"]
    row = [1, 2, 1, 3, [turn], [5, 3], "p", 6, ["r"]]
    for body, gaps, hint_ns in ((row, b"", 0), ([*row, "0102", 12], b"\1\2", 12)):
        packed = PackedSessions()
        codec.add_sessions(packed, ["t"], ["s"], [migrations._session_of_3(json.dumps(body))])
        assert [packed.update_ns[0], packed.active[0]] == [2, True]
        assert (packed.running, packed.tokens) == ([0], ["token"])
        assert packed[0] == Session(
            SessionKey("t", "s"),
            create_ns=1,
            update_ns=2,
            turn_count=3,
            turns=(
                Turn(
                    3,
                    "token",
                    Placement(WorkerRef("d", 5), "http://d"),
                    Plan(ReturnMode.LAZY, "WHY", 7, 8, 9),
                    begin_ns=10,
                    retention_ns=11,
                    prefill=Placement(WorkerRef("p", 4), "http://p"),
                    usage=Usage(1, 2, 3, 4),
                    request_id="request",
                ),
            ),
            hints=Hints(5, SessionValue.HIGH),
            last_prefill="p",
            version=6,
            requests=("r",),
            gaps=gaps,
            hint_ns=hint_ns,
        )


@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=40)), max_size=9))
def test_checksums_by_column_are_those_by_row(rows: list[tuple[str, bytes]]) -> None:
    rows = [*rows, ("long", b"x" * 9_000)]
    columns = list(zip(*rows, strict=True))
    assert migrations.checksums(*columns) == [migrations.checksum(*row) for row in rows]


def test_a_session_row_that_is_too_short_is_refused() -> None:
    packed = PackedSessions()
    with pytest.raises(ValueError, match="cut short"):
        codec.add_sessions(packed, ["t", "t"], ["a", "b"], [b"0123456789", b"0123456789ab"])
    assert not packed.keys
