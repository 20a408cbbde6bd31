"""Looks at a store's files before SQLite does, and writes nothing.

SQLite repairs what it can and drops what it cannot: it would take a log with a flipped bit for one
that ends there, and forget what had been acknowledged after it.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import numpy as np

from kvshuttle.controlplane.store.base import StoreDamagedError, StoreError, StoreFutureError

__all__ = [
    "APPLICATION_ID",
    "check_header",
    "check_log",
    "check_version",
    "damaged",
    "identity",
    "journal_path",
    "log_path",
    "size_of",
]

APPLICATION_ID = 0x4B565348
"""'KVSH', in the header of the file."""

_HEADER, _FRAME = 32, 24
_MAGIC = 0x377F0682
_MASK = 0xFFFFFFFF


def damaged(path: Path, error: object) -> StoreDamagedError:
    """The one text for it."""
    return StoreDamagedError(
        f"{path} is damaged ({error}) and was left as it is: restore it from a copy, or move it "
        "away to start with an empty store (agents then need --accept-lineage-change once)"
    )


def log_path(path: Path) -> Path:
    """Where SQLite keeps what is committed and not yet in the file itself."""
    return path.with_name(path.name + "-wal")


def journal_path(path: Path) -> Path:
    """What takes the file back to before it was made, or was set to keep a log, if that was cut
    short; gone as soon as both are done."""
    return path.with_name(path.name + "-journal")


def size_of(path: Path) -> int:
    """Bytes; 0 when there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def identity(path: Path) -> tuple[int, int] | None:
    """Tells one file from another of the same name; None when there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _page_size(header: bytes) -> int:
    (size,) = struct.unpack_from(">H", header, 16)
    return 65_536 if size == 1 else int(size)


def check_header(path: Path, newest: int) -> bool:
    """Whether the file is still to be made. Reads its first 100 bytes. `newest` is the highest
    schema version that is known.

    StoreError, StoreDamagedError, StoreFutureError.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise StoreError(f"{path} is not a file: name a file, or a name that is still free")
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise StoreError(f"{path.parent} is not a directory: make it first") from None
        if size_of(log_path(path)):
            raise damaged(path, f"it is gone, but its log {log_path(path).name} is there") from None
        return True
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not os.access(path, os.W_OK):
        raise StoreError(f"{path} is read-only: let the control plane's user write it")
    if size_of(journal_path(path)):
        # A crash in the middle of making it: SQLite takes it back to what it was before.
        return False
    if not header:
        if size_of(log_path(path)):
            raise damaged(path, f"it is empty, but its log {log_path(path).name} is not")
        return True
    if len(header) < 100 or not header.startswith(b"SQLite format 3\x00"):
        raise damaged(path, "it is not an SQLite file")
    (version,) = struct.unpack_from(">i", header, 60)
    (application,) = struct.unpack_from(">i", header, 68)
    if application != APPLICATION_ID:
        raise StoreDamagedError(
            f"{path} is an SQLite file, but not one of kvshuttle's; it was left as it is: name "
            "another file"
        )
    check_version(path, version, newest)
    if version < 1:
        raise damaged(path, "it has no schema version")
    (pages,) = struct.unpack_from(">I", header, 28)
    # With a log to be merged the file may be shorter than it says.
    if not size_of(log_path(path)) and path.stat().st_size < pages * _page_size(header):
        raise damaged(path, "it is cut short")
    return False


def check_version(path: Path, version: int, newest: int) -> None:
    """StoreFutureError."""
    if version > newest:
        raise StoreFutureError(
            f"{path} has schema version {version}, this control plane knows {newest}: "
            "start a newer version; the file was left as it is"
        )


# -- the log -------------------------------------------------------------------------------------


class _Sums:
    """SQLite's log checksum, over 32-bit words in pairs: s1 += x + s2, s2 += y + s1. As a linear
    recurrence it is two sums of the words weighted with Fibonacci numbers, modulo 2^32."""

    def __init__(self, byte_order: str, most_words: int) -> None:
        self._type = np.dtype(f"{byte_order}u4")
        numbers = [0, 1]
        while len(numbers) < most_words + 2:
            numbers.append((numbers[-1] + numbers[-2]) & _MASK)
        self._numbers = numbers
        weights = np.array(numbers[::-1], np.uint64)
        self._high, self._low = weights[1:-1], weights[2:]

    def after(self, before: tuple[int, int], data: bytes) -> tuple[int, int]:
        """The sums after `data`, whose length is a multiple of 8."""
        # 64-bit sums wrap, which changes nothing modulo 2^32.
        words = np.frombuffer(data, self._type).astype(np.uint64)
        count = len(words)
        f, (s1, s2) = self._numbers, before
        low, high = self._low[-count:], self._high[-count:]
        return (
            (f[count - 1] * s1 + f[count] * s2 + int(words @ low)) & _MASK,
            (f[count] * s1 + f[count + 1] * s2 + int(words @ high)) & _MASK,
        )


def check_log(path: Path) -> None:
    """StoreDamagedError when the log of the file `path` is damaged in what was synced.

    A log may end in a frame that is not whole: that transaction was never acknowledged. But where
    a frame is broken and a later transaction is there, the broken one had been synced before the
    later one began. Damage to the very last transaction cannot be told from its never having been
    written whole, and is not seen.
    """
    log = log_path(path)
    if size_of(log) <= _HEADER:
        return
    with path.open("rb") as file:
        page_size = _page_size(file.read(100))
    with log.open("rb") as file:
        header = file.read(_HEADER)
        magic, version, log_page, _, *rest = struct.unpack(">8I", header)
        salts, stored = tuple(rest[:2]), (rest[2], rest[3])
        sums = _Sums(">" if magic & 1 else "<", (page_size + 8) // 4)
        good = (
            magic & ~1 == _MAGIC
            and version == 3_007_000
            and log_page == page_size
            and sums.after((0, 0), header[:24]) == stored
        )
        if not good and size_of(log) >= _HEADER + _FRAME + page_size:
            # It is synced before the first frame is written.
            raise damaged(path, f"the header of its log {log.name} is broken")
        # -1: sound so far; 0: in the broken transaction; 1: behind it.
        behind = -1
        number = broken = 0
        while True:
            frame = file.read(_FRAME + page_size)
            if len(frame) < _FRAME + page_size:
                return
            number += 1
            page, commit, *rest = struct.unpack_from(">6I", frame)
            ours = tuple(rest[:2]) == salts and page != 0
            whole = ours and sums.after(stored, frame[:8] + frame[_FRAME:]) == (rest[2], rest[3])
            stored = (rest[2], rest[3])
            if whole and behind == 1:
                raise damaged(path, f"frame {broken} of its log {log.name} is broken")
            if behind == -1 and not whole:
                behind, broken = 0, number
                if ours and commit:
                    behind = 1
            elif behind == 0 and whole and commit:
                behind = 1
