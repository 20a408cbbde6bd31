"""The control plane under test: the real command in a process of its own, on a core of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["ControlPlane"]

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class ControlPlane:
    """Runs until `stop` or `kill`; what it logs goes to a file beside its store."""

    def __init__(self, folder: Path, core: int | None, **settings: object) -> None:
        self.folder = folder
        self.store = folder / "store.db"
        self._core = core
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.api = self.agents = ""

    def start(self) -> float:
        """Returns the seconds from starting the command until it serves."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        flags = {
            "insecure": "true",
            "api_address": "127.0.0.1:0",
            "agent_address": "127.0.0.1:0",
            "metrics_address": "",
            "store": str(self.store),
            "ready_file": str(ready),
            "log_level": "info",
            # The return of a turn's KV is measured where its next turn asks for it.
            "eager": "false",
            # An agent here shares its core with all the others, and with what else runs.
            "silence": 60,
            # Budgets are not what is measured here.
            "leased_share": 0,
            "tenant_leased_share": 0,
            "tenant_held_share": 0,
            "free_share_min": 0,
            "worker_turns": 10_000_000,
            "tenant_turns": 100_000_000,
            "sessions": 100_000_000,
            "tenant_sessions": 100_000_000,
        } | self._settings
        environment = os.environ | {
            f"KVSHUTTLE_CP_{name.upper()}": str(value) for name, value in flags.items()
        }
        log = (self.folder / "controlplane.log").open("ab")
        began = time.perf_counter()
        pin = ["taskset", "-c", str(self._core)] if self._core is not None else []
        self._process = subprocess.Popen(
            [*pin, sys.executable, "-m", "kvshuttle.controlplane"],
            env=environment,
            stdout=log,
            stderr=log,
        )
        log.close()
        while not ready.exists():
            if self._process.poll() is not None:
                text = (self.folder / "controlplane.log").read_text(errors="replace")[-3_000:]
                raise RuntimeError(f"the control plane ended at its start:\n{text}")
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        found = json.loads(ready.read_text())
        self.api, self.agents = found["api"], found["agent"]
        return seconds

    def _stat(self) -> list[str]:
        assert self._process is not None
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        return text.rsplit(")", 1)[1].split()

    def cpu_s(self) -> float:
        """CPU time so far, user and system, all threads."""
        stat = self._stat()
        return (int(stat[11]) + int(stat[12])) / TICKS

    def rss_gib(self) -> float:
        """Resident memory now."""
        return int(self._stat()[21]) * PAGE / 2**30

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM; waits."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
