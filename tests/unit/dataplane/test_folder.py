"""The folder of a mover's sockets: private, and taken away however its process ends."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvshuttle.dataplane.folder import PrivateFolder

_OWNER = """
import sys, time
from kvshuttle.dataplane.folder import PrivateFolder
print(PrivateFolder().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_nobody_else_may_enter(temporary: Path) -> None:
    folder = PrivateFolder()
    assert folder.path.parent == temporary
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    folder.remove()
    assert list(temporary.iterdir()) == []


def test_a_killed_owners_is_removed_by_the_next_and_a_living_ones_is_not(temporary: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        (path / "commands").touch()
        first = PrivateFolder()
        assert path.is_dir()
        owner.kill()
        owner.wait(30)
    second = PrivateFolder()
    assert not path.exists()
    assert first.path.is_dir()
    assert second.path.is_dir()
    first.remove()
    second.remove()


def test_what_looks_like_one_and_is_not_stays(temporary: Path) -> None:
    kept = temporary / "elsewhere"
    kept.mkdir()
    (kept / "lock").touch()
    (temporary / "kvshuttle-mover-link").symlink_to(kept)
    (temporary / "kvshuttle-mover-nolock").mkdir()
    PrivateFolder().remove()
    assert (kept / "lock").exists()
    assert (temporary / "kvshuttle-mover-nolock").is_dir()
