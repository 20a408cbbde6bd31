"""A folder for sockets that only this user may enter, and that no dead process leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "kvshuttle-mover-"
_UNFINISHED = "kvshuttle-new-"
_LOCK = "lock"


class PrivateFolder:
    """A new folder, readable and writable by this user alone, in the system's temporary one.

    A process that is killed removes nothing. So each folder holds a file that its owner keeps
    locked; the kernel lets go of the lock however the owner ends, and the next folder that this
    user makes takes away those whose lock is free. A lock, not a process number: containers share
    a folder and not their numbers. Raises OSError where the temporary folder cannot be written.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        # It gets the name that others look for once it is locked, not before.
        made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(parent / made.name.replace(_UNFINISHED, _PREFIX, 1))

    def remove(self) -> None:
        """Takes the folder away. Harmless the second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        # In use, another user's, or gone meanwhile: not ours to remove.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
