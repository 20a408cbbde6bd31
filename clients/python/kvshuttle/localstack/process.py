"""One real program as a child: started in a session of its own, watched, and ended whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvshuttle.localstack import watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Between two looks at something that is awaited.
POLL_S = 0.1
# vLLM takes some seconds to end in order; what takes longer than this hangs.
STOP_GRACE_S = 30.0
# Between SIGKILL and the kernel having taken everything down; engines map gigabytes.
KILL_GRACE_S = 20.0
# What a resource tracker may take to clean up after its clients.
TRACKER_GRACE_S = 5.0
TAIL_LINES = 40


class ProcessError(RuntimeError):
    """A program did not do what was asked of it. The text ends with the tail of its log."""


class ManagedProcess:
    """A program and all that it starts.

    It runs in its own session, so that `pids()` finds every process of it, those that were
    orphaned too, and `kill()` reaches them all. When the process that called `start()` dies,
    however it dies, the watchdog kills the session.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.ready_timeout_s = ready_timeout_s
        self._argv = list(argv)
        self._env = dict(env or {})
        self._popen: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    # What kinds of programs differ in.

    def is_ready(self) -> bool:
        """Whether it serves. Called again and again until it says so."""
        return True

    @property
    def env(self) -> Mapping[str, str]:
        """What its environment has beyond this process's."""
        return self._env

    def argv(self) -> list[str]:
        """The command line of the next start."""
        return self._argv

    def prepare(self) -> None:
        """Called before every start."""

    # Life.

    @property
    def pid(self) -> int:
        """The first process, which is also the session's id."""
        if self._popen is None:
            raise ProcessError(f"{self.name} was never started")
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the first process lives."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def age_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_at

    def start(self) -> None:
        """Starts the program and returns at once."""
        if self.running:
            raise ProcessError(f"{self.name} runs already")
        self.prepare()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                self.argv(),
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        watchdog.watch(self._popen.pid)

    def wait_ready(self, while_waiting: Callable[[], None] | None = None) -> None:
        """Returns once it serves. Raises ProcessError when it ends first or takes too long."""
        deadline = self._started_at + self.ready_timeout_s
        while True:
            if not self.running:
                code = self._popen.returncode if self._popen else None
                self.kill()
                raise ProcessError(f"{self.name} ended with {code} while starting\n{self.tail()}")
            if self.is_ready():
                return
            if time.monotonic() > deadline:
                self.kill()
                raise ProcessError(
                    f"{self.name} was not ready after {self.ready_timeout_s:.0f} s\n{self.tail()}"
                )
            if while_waiting is not None:
                while_waiting()
            # Seldom enough to leave the cores to what starts, which may take a minute.
            time.sleep(min(5 * POLL_S, POLL_S + self.age_s / 20))

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to the first process, then SIGKILL to what is left. Nothing is left after."""
        if self._popen is None:
            return
        if self.running:
            self.resume()
            self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
            # Children that end in order need a moment more than their parent.
            deadline = time.monotonic() + 2.0
            while self.pids() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of it at once, as when its machine dies.

        Python's resource tracker is spared at first, as a crash spares it: it ends by itself when
        its clients are gone, after removing their shared memory, hundreds of megabytes an engine.
        Raises ProcessError when a process outlives that.
        """
        if self._popen is None:
            return
        start = time.monotonic()
        while pids := self.pids():
            waited = time.monotonic() - start
            if waited > KILL_GRACE_S:
                raise ProcessError(f"{self.name}: {pids} are still there after SIGKILL")
            for pid in pids:
                if waited < TRACKER_GRACE_S and _is_resource_tracker(pid):
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._popen.poll()
            time.sleep(0.02)
        self._popen.wait(KILL_GRACE_S)
        watchdog.forget(self._popen.pid)

    def restart(self) -> None:
        """Starts it again, in the same place, and waits until it serves."""
        self.stop()
        self.start()
        self.wait_ready()

    def pause(self) -> None:
        """SIGSTOP to every process of it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to every process of it."""
        self._signal(signal.SIGCONT)

    def pids(self) -> list[int]:
        """The live processes of its session; zombies do not count."""
        return [] if self._popen is None else watchdog.session_pids(self._popen.pid)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log, under a line that says where the rest is."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            text = ""
        shown = "\n".join(text.splitlines()[-lines:])
        return f"--- the end of {self.log_path}\n{shown}\n---"

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
