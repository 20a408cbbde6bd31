"""Files that are damaged, foreign, too new, locked, read-only or cut: refused, and left alone."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshuttle.controlplane.model.effects import PutTerm
from kvshuttle.controlplane.store import (
    SqliteStore,
    StoreDamagedError,
    StoreError,
    StoreFutureError,
    StoreLockedError,
)
from tests.unit.controlplane.store_files import (
    FRAME,
    HEADER,
    PAGE,
    contents,
    crashed,
    in_a_child,
    keys,
    log_of,
    read,
    run,
    session,
    transactions,
)


def make(path: Path) -> Path:
    """Closed properly: no log."""
    store = SqliteStore(path)
    store.commit([PutTerm(1, "lineage", 0, 0), *(session(n, 200) for n in range(200))])
    store.close()
    return path


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    return make(tmp_path / "s.db")


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Fifteen transactions, all of them in the log only."""
    path = tmp_path / "s.db"
    crashed(path, transactions(15))
    return path


def refused(path: Path, kind: type[StoreError], words: str) -> None:
    before = contents(path)
    for _ in range(2):  # looking at it must not mend it either
        with pytest.raises(kind, match=words):
            read(path)
    assert contents(path) == before


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    byte = path.read_bytes()[offset]
    patch(path, offset, bytes([byte ^ 0x10]))


# -- the file ------------------------------------------------------------------------------------


def test_two_control_planes_do_not_share_a_file(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "s.db")
    first.commit([PutTerm(1, "lineage", 0, 0)])
    refused(tmp_path / "s.db", StoreLockedError, "in use by another")
    first.close()
    assert read(tmp_path / "s.db").epoch == 1


def test_a_newer_file_is_left_alone(closed: Path) -> None:
    patch(closed, 60, struct.pack(">i", 99))
    refused(closed, StoreFutureError, "99.*newer version.*left as it is")


def test_a_file_whose_log_makes_it_newer_is_left_alone(tmp_path: Path) -> None:
    path, live = tmp_path / "s.db", make(tmp_path / "live.db")
    db = sqlite3.connect(live, isolation_level=None)
    db.execute("PRAGMA user_version = 99")
    shutil.copy(live, path)
    shutil.copy(log_of(live), log_of(path))
    db.close()
    refused(path, StoreFutureError, "99")


def test_a_foreign_database_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.execute("CREATE TABLE x (y)")
    db.close()
    refused(tmp_path / "s.db", StoreDamagedError, "not one of kvshuttle's")


def test_another_application_id_is_left_alone(closed: Path) -> None:
    patch(closed, 68, b"\0\0\0\1")
    refused(closed, StoreDamagedError, "not one of kvshuttle's")


def test_what_is_no_database_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("hello")
    refused(tmp_path / "s.db", StoreDamagedError, "not an SQLite file.*restore it")


def test_a_damaged_header_is_left_alone(closed: Path) -> None:
    patch(closed, 0, b"\0" * 100)
    refused(closed, StoreDamagedError, "not an SQLite file")


@pytest.mark.parametrize("length", [50, 100, PAGE, PAGE + 17, -PAGE, -1])
def test_a_truncated_file_is_left_alone(closed: Path, length: int) -> None:
    whole = closed.read_bytes()
    closed.write_bytes(whole[:length])
    refused(closed, StoreDamagedError, "cut short|not an SQLite file")


def test_a_lost_file_with_a_log_is_not_made_anew(killed: Path) -> None:
    killed.unlink()
    refused(killed, StoreDamagedError, "it is gone, but its log")
    killed.touch()
    refused(killed, StoreDamagedError, "it is empty, but its log")


def test_damage_in_any_page_is_found_or_harmless(closed: Path) -> None:
    """One bit of each page, and more at random: either it is said, or nothing was lost."""
    whole, expected = closed.read_bytes(), read(closed)
    assert len(whole) > 10 * PAGE
    luck = random.Random(1)
    places = [page * PAGE + luck.randrange(100, PAGE) for page in range(len(whole) // PAGE)]
    places += [luck.randrange(100, len(whole)) for _ in range(100)]
    found = 0
    for place in places:
        closed.write_bytes(whole)
        flip(closed, place)
        before = contents(closed)
        try:
            assert read(closed) == expected, place
        except StoreDamagedError:
            found += 1
            assert contents(closed) == before, place
    assert found > len(places) // 2


def test_damage_in_a_page_is_found_with_a_log_too(tmp_path: Path) -> None:
    """Closing a connection that can write merges the log, so the file is not opened with one."""
    live, path = make(tmp_path / "live.db"), tmp_path / "s.db"
    store = SqliteStore(live)
    store.commit([session(500)])
    shutil.copy(live, path)
    shutil.copy(log_of(live), log_of(path))
    store.close()
    page = path.stat().st_size // PAGE // 2
    patch(path, page * PAGE, b"\xff" * PAGE)
    refused(path, StoreDamagedError, "restore it from a copy")


def test_a_row_that_was_changed_by_hand_is_found(closed: Path) -> None:
    with sqlite3.connect(closed) as db:
        db.execute("UPDATE sessions SET body = zeroblob(length(body))")
    db.close()
    refused(closed, StoreDamagedError, "a row of sessions is not what was written")


@pytest.mark.parametrize("log", [False, True])
def test_damage_in_any_byte_of_the_header_is_found_or_harmless(tmp_path: Path, log: bool) -> None:
    path = tmp_path / "s.db"
    if log:
        crashed(path, transactions(5))
    else:
        make(path)
    whole = contents(path)
    expected = read(path)
    for place in range(100):
        for bit in (0x01, 0x10):
            for name, data in whole.items():
                (tmp_path / name).write_bytes(data)
            patch(path, place, bytes([whole[path.name][place] ^ bit]))
            before = contents(path)
            try:
                assert read(path) == expected, place
            except StoreError:
                assert contents(path) == before, place


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    refused(tmp_path, StoreError, "is not a file")


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    refused(tmp_path / "no" / "s.db", StoreError, "make it first")


def test_the_file_is_for_its_owner_only(closed: Path) -> None:
    assert closed.stat().st_mode & 0o077 == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user can enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def as_nobody(path: Path, words: str) -> None:
    """Opens it as a user without rights of root's, who may do everything."""

    def call() -> None:
        if os.getuid() == 0:
            os.setgid(65_534)
            os.setuid(65_534)
        with pytest.raises(StoreError, match=words):
            read(path)

    assert in_a_child(call) == 0


def test_a_read_only_file_is_left_alone(shared: Path) -> None:
    path = make(shared / "s.db")
    path.chmod(0o444)
    before = contents(path)
    as_nobody(path, "is read-only")
    assert contents(path) == before


def test_a_file_of_another_user_is_left_alone(shared: Path) -> None:
    path = make(shared / "s.db")
    as_nobody(path, "cannot be read")


def test_a_folder_that_cannot_be_written_is_said(shared: Path) -> None:
    shared.chmod(0o555)
    as_nobody(shared / "s.db", "cannot be made")
    shared.chmod(0o777)


FILL = """
import resource, sys
from kvshuttle.controlplane.store import SqliteStore, StoreError
from tests.unit.controlplane.store_files import log_of, transactions
store = SqliteStore(sys.argv[1])
store.load()
room = log_of(store.path).stat().st_size + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    for number, records in enumerate(transactions(100, 300), 1):
        store.commit(records)
        print(number, flush=True)
except StoreError as error:
    print(error, file=sys.stderr)
store.close()
"""


@pytest.mark.parametrize("room", [0, 1, PAGE, 10 * PAGE, 100 * PAGE + 5])
def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path, room: int) -> None:
    path = tmp_path / "s.db"
    store = SqliteStore(path)
    store.commit([PutTerm(0, "lineage", 0, 0)])
    store.close()
    found = run(FILL, path, room)
    assert "cannot be written" in found.stderr, found.stderr
    acknowledged = len(found.stdout.split())
    after = read(path)
    assert after.epoch == acknowledged
    assert {one.key for one in after.sessions} == keys(transactions(100, 300)[:acknowledged])


def test_a_link_to_a_file_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "s.db", tmp_path / "link.db"
    crashed(real, transactions(7))
    link.symlink_to(real)
    flip(log_of(real), HEADER + 40)
    before = contents(real)
    with pytest.raises(StoreDamagedError, match="its log"):
        read(link)
    assert contents(real) == before
    flip(log_of(real), HEADER + 40)
    assert read(link).epoch == 7
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["link.db"]


def test_any_name_will_do(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=ro#%41é.db"
    crashed(path, transactions(3))
    assert read(path).epoch == 3
    assert path.is_file()


# -- the log -------------------------------------------------------------------------------------


def test_a_log_cut_anywhere_gives_what_was_acknowledged_by_then(tmp_path: Path) -> None:
    """At every frame, and at its edges: as after a crash whose last writes did not arrive."""
    path = tmp_path / "s.db"
    work = transactions(12)
    sizes = crashed(path, work)
    file, log = path.read_bytes(), log_of(path).read_bytes()
    edges = range(HEADER, len(log) + 1, FRAME)
    cuts = {0, 1, HEADER - 1, len(log)} | {
        edge + near for edge in edges for near in (-1, 0, 1, 24, FRAME // 2)
    }
    seen = set()
    for cut in sorted(cut for cut in cuts if 0 <= cut <= len(log)):
        path.write_bytes(file)
        log_of(path).write_bytes(log[:cut])
        found = read(path)
        acknowledged = sum(size <= cut for size in sizes)
        assert found.epoch == acknowledged, cut
        assert {one.key for one in found.sessions} == keys(work[:acknowledged]), cut
        seen.add(acknowledged)
    assert seen == set(range(13))


def test_damage_in_any_frame_of_the_log_is_found(tmp_path: Path) -> None:
    """SQLite alone would take the log for one that ends there. In the last transaction it cannot
    be told from a write that did not arrive, which was never acknowledged."""
    path = tmp_path / "s.db"
    sizes = crashed(path, transactions(12))
    file, log = path.read_bytes(), log_of(path).read_bytes()
    luck = random.Random(2)
    for frame in range((len(log) - HEADER) // FRAME):
        start = HEADER + frame * FRAME
        for place in (luck.randrange(24), 24 + luck.randrange(PAGE)):
            path.write_bytes(file)
            log_of(path).write_bytes(log)
            flip(log_of(path), start + place)
            before = contents(path)
            if start < sizes[-3]:
                with pytest.raises(StoreDamagedError, match=r"of its log s\.db-wal is broken"):
                    read(path)
                assert contents(path) == before
            else:
                try:
                    assert read(path).epoch >= 10
                except StoreDamagedError:
                    assert contents(path) == before


@pytest.mark.parametrize("place", [0, 4, 8, 12, 16, 20, 24, 28])
def test_a_damaged_header_of_the_log_is_found(killed: Path, place: int) -> None:
    flip(log_of(killed), place + 1)
    refused(killed, StoreDamagedError, "log s.db-wal is broken")


def test_what_a_log_has_from_before_its_last_merge_is_not_damage(tmp_path: Path) -> None:
    """The log is written again from its start; behind the new frames lie old ones."""
    live, path = tmp_path / "live.db", tmp_path / "s.db"
    store = SqliteStore(live)
    store.load()
    for records in transactions(20):
        store.commit(records)
    store._db.execute("PRAGMA wal_checkpoint(RESTART)")
    store.commit([PutTerm(77, "lineage", 0, 0)])
    shutil.copy(live, path)
    shutil.copy(log_of(live), log_of(path))
    store.close()
    assert log_of(path).stat().st_size > HEADER + 10 * FRAME
    assert read(path).epoch == 77


def test_a_store_killed_while_it_is_made_is_made_again(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from kvshuttle.controlplane.store import SqliteStore
left = int(sys.argv[2])
connect = SqliteStore._connect
def connected(self, mode):
    db = connect(self, mode)
    def trace(text):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    db.set_trace_callback(trace)
    return db
SqliteStore._connect = connected
SqliteStore(sys.argv[1]).close()
"""
    for statement in range(1, 60, 3):
        path = tmp_path / f"{statement}.db"
        found = run(script, path, statement)
        assert read(path).epoch == 0
        if not found.returncode:
            break
    else:
        pytest.fail("it never came to its end")


def test_damage_in_a_row_is_found_with_a_log_too(tmp_path: Path) -> None:
    live, path = make(tmp_path / "live.db"), tmp_path / "s.db"
    store = SqliteStore(live)
    store.commit([session(500)])
    shutil.copy(live, path)
    shutil.copy(log_of(live), log_of(path))
    store.close()
    place = path.read_bytes().index(b"x" * 100, 3 * PAGE) + 50
    flip(path, place)
    refused(path, StoreDamagedError, "a row of sessions is not what was written")


def test_what_is_written_between_the_look_and_the_lock_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    crashed(path, transactions(5))
    open_it = SqliteStore._open

    def late(self: SqliteStore) -> None:
        if self._found is not None:
            found, self._found = self._found, None
            monkeypatch.setattr(SqliteStore, "_open", open_it)
            other = SqliteStore(path)
            other.commit([PutTerm(99, "lineage", 0, 0)])
            other.close()
            self._found = found
        open_it(self)

    monkeypatch.setattr(SqliteStore, "_open", late)
    assert read(path).epoch == 99
