"""The demo as a user runs it: it ends by itself, and fails when a returned block is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / ".models" / "smollm2"
TIMEOUT_S = 540


def run_demo(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the last line, and all that was printed."""
    assert (SMOLLM2 / "config.json").exists(), "no model: run `make model`"
    done = subprocess.run(
        [sys.executable, "-m", "kvshuttle.demo", "--model", str(SMOLLM2), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    text = done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), text


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_demo() -> None:
    code, last, text = run_demo("--turns", "3")
    assert code == 0, text
    assert last["turns"] == 3
    assert last["identical"] is True
    assert last["returned_tokens"] > 300
    assert last["recomputed_tokens"] > 0
    assert last["ttft_ratio"] > 0


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_demo_fails_when_a_returned_block_is_wrong() -> None:
    code, last, text = run_demo("--turns", "2", "--plant-wrong-kv")
    assert code == 1, text
    assert last["identical"] is False
    assert "turn 2, with the return" in text
    # A failed demo leaves its logs to look at, and says where.
    logs = Path(text.partition("The logs are in ")[2].splitlines()[0].strip())
    assert (logs / "prefill-0.log").exists()
    shutil.rmtree(logs)
