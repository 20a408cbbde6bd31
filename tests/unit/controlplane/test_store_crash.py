"""A store whose process is killed at each system call, and whose machine loses power after it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshuttle.controlplane.store import SqliteStore, sqlite
from tests.support.syscalls import Call, supported, traced
from tests.unit.controlplane.store_files import keys, log_of, read, transactions

pytestmark = pytest.mark.skipif(not supported(), reason="needs ptrace on Linux, x86-64")

WORK = transactions(12)


@pytest.fixture(autouse=True)
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that some commits merge the log into the file."""
    monkeypatch.setattr(sqlite, "LOG_PAGES", 12)


def work(path: Path, acknowledge: Callable[[], object]) -> None:
    """Makes a store, fills it, closes it."""
    store = SqliteStore(path)
    store.load()
    for records in WORK:
        store.commit(records)
        acknowledge()
    store.close()


def check(path: Path, acknowledged: int) -> int:
    """Whole transactions, in order, and all that were acknowledged; one more may have been on
    its way. Returns how many there are."""
    found = read(path)
    assert acknowledged <= found.epoch <= acknowledged + 1
    assert {session.key for session in found.sessions} == keys(WORK[: found.epoch])
    assert (found.last_incarnation, found.time_ns) == (found.epoch, found.epoch)
    return found.epoch


def test_killed_before_any_system_call(tmp_path: Path) -> None:
    seen: set[str] = set()
    extra = 0
    for step in range(1, 2_000):
        path = tmp_path / f"{step}.db"
        ours, theirs = os.pipe()
        left = step

        def allow(call: Call) -> bool:
            nonlocal left
            if not call.path.startswith(str(path)):  # noqa: B023
                return True
            left -= 1
            if not left:
                seen.add(f"{call.name} {call.path[len(str(path)) :]}")  # noqa: B023
            return bool(left)

        status = traced(lambda: work(path, lambda: os.write(theirs, b".")), allow)  # noqa: B023
        os.close(theirs)
        acknowledged = len(os.read(ours, 1_000))
        os.close(ours)
        extra += check(path, acknowledged) - acknowledged
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        pytest.fail("it never came to its end")
    assert acknowledged == len(WORK)
    # Between being durable and being said so, there is a moment.
    assert extra > 0
    assert {"pwrite64 ", "fdatasync ", "pwrite64 -wal", "fdatasync -wal", "unlink -wal"} <= seen


class Disk:
    """Files as a machine without power has them: what was synced, and of the rest any part."""

    def __init__(self) -> None:
        self.synced: dict[str, bytearray] = {}
        self.since: dict[str, list[Call]] = {}

    def do(self, call: Call) -> None:
        name = call.path
        if call.name in ("fsync", "fdatasync"):
            self.synced[name] = self._with(name, self.since.pop(name, []))
        else:
            self.since.setdefault(name, []).append(call)

    def sync_folder(self) -> None:
        """What was removed is removed for good."""
        for name, calls in list(self.since.items()):
            if any(call.name == "unlink" for call in calls):
                last = max(n for n, call in enumerate(calls) if call.name == "unlink")
                self.synced[name], self.since[name] = bytearray(), calls[last + 1 :]

    def _with(self, name: str, calls: list[Call]) -> bytearray:
        data = bytearray(self.synced.get(name, b""))
        for call in calls:
            if call.name == "unlink":
                data = bytearray()
            elif call.name == "ftruncate":
                data = data[: call.offset].ljust(call.offset, b"\0")
            else:
                end = call.offset + len(call.data)
                data.extend(b"\0" * (end - len(data)))
                data[call.offset : end] = call.data
        return data

    def after(self, luck: random.Random) -> dict[str, bytearray]:
        """One of the states that a power cut can leave."""
        found = {}
        for name in self.synced.keys() | self.since.keys():
            calls = self.since.get(name, [])
            kept = [call for call in calls if luck.random() < 0.5]
            found[name] = self._with(name, kept)
        return found


def test_power_cut_at_any_system_call(tmp_path: Path) -> None:
    """Writes that were not synced may have arrived or not, in any order."""
    path = tmp_path / "live" / "s.db"
    path.parent.mkdir()
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    disk, luck = Disk(), random.Random(3)
    states: list[tuple[int, dict[str, bytearray]]] = []
    acknowledged = 0

    def allow(call: Call) -> bool:
        nonlocal acknowledged
        if call.path.startswith("pipe:"):
            acknowledged += 1
        elif call.path == str(path.parent):
            disk.sync_folder()
        elif call.path.startswith(str(path)):
            disk.do(call)
            states.extend((acknowledged, disk.after(luck)) for _ in range(3))
        return True

    assert traced(lambda: work(path, lambda: os.write(theirs, b".")), allow) == 0
    os.close(ours)
    os.close(theirs)
    assert acknowledged == len(WORK)
    made = tmp_path / "after"
    made.mkdir()
    copy = made / "s.db"
    for number, (said, files) in enumerate(states):
        for old in made.iterdir():
            old.unlink()
        for name, data in files.items():
            if data:
                (made / Path(name).name).write_bytes(data)
        if said == 0 and not copy.exists():
            continue  # nothing was ever there
        try:
            check(copy, said)
        except Exception as error:
            error.add_note(f"state {number} of {len(states)}, log {log_of(copy).exists()}")
            raise
    assert len(states) > 200
