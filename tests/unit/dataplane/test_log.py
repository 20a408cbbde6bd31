"""The agent's log lines, which several processes of an engine write to one stderr."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvshuttle.dataplane.log import get_logger

LINES = 2_000
# Says so many lines, from two threads at once.
WRITES = f"""
import threading
from kvshuttle.dataplane.log import get_logger

def says(name):
    log = get_logger(name)
    for number in range({LINES // 2}):
        log.info("said", number=number)

threads = [threading.Thread(target=says, args=(name,)) for name in "ab"]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_line_is_one_write(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process writes stands before or behind it, never inside."""
    writes: list[str] = []

    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setenv("KVSHUTTLE_LOG_FORMAT", form)
    monkeypatch.setattr(sys, "stderr", Stderr())
    log = get_logger("test")
    log.info("one", lease="a")
    log.warning("two")
    assert len(writes) == 2
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in writes)


def test_lines_of_processes_and_threads_stay_whole(tmp_path: Path) -> None:
    """Three processes append to one file, as an engine's do."""
    path = tmp_path / "engine.log"
    with path.open("ab") as log:
        programs = [
            subprocess.Popen([sys.executable, "-c", WRITES], stderr=log, stdin=subprocess.DEVNULL)
            for _ in range(3)
        ]
    assert [program.wait(60) for program in programs] == [0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3 * LINES
    for program in programs:
        said = [x["number"] for x in lines if x["pid"] == program.pid and x["part"] == "agent.a"]
        assert said == list(range(LINES // 2))
