"""What the demo tells its user to type can be typed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvshuttle.demo import display


@pytest.mark.parametrize("installed", [True, False])
def test_the_operators_program_that_is_named_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """It is seldom on the PATH: the demo runs from .venv."""
    monkeypatch.chdir(tmp_path)
    if installed:
        beside = tmp_path / ".venv/bin"
        beside.mkdir(parents=True)
        (beside / "kvshuttle").write_text("#!/bin/sh\necho started with $1\n")
        (beside / "kvshuttle").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(beside / "python"))
        assert display.operators_program() == ".venv/bin/kvshuttle"
    named = shlex.split(display.operators_program())
    ran = subprocess.run([*named, "--help"], capture_output=True, text=True, check=True)
    assert ran.stdout
