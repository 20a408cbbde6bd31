"""Several programs together: started side by side, ended in order."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvshuttle.localstack.engine import Engine
from kvshuttle.localstack.process import POLL_S, ManagedProcess, ProcessError
from kvshuttle.localstack.view import ControlPlaneView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# From an engine's health to its agent's registration.
REGISTER_TIMEOUT_S = 60.0


class Stack:
    """The programs of one demo, test session or benchmark. Use as a context manager."""

    def __init__(self, on_progress: Callable[[ManagedProcess, str], None] | None = None) -> None:
        self.processes: list[ManagedProcess] = []
        self._on_progress = on_progress or (lambda _process, _phase: None)

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except ProcessError as left_over:
            if not isinstance(error, ProcessError):
                raise
            # What went wrong first is the reason.
            error.add_note(str(left_over))

    def start(self, *processes: ManagedProcess) -> None:
        """Starts them side by side and returns when all serve.

        Raises ProcessError with the tail of the log when one does not.
        """
        for process in processes:
            self.processes.append(process)
            self._on_progress(process, "starting")
            process.start()
        failures: list[ProcessError] = []

        def wait(process: ManagedProcess) -> None:
            try:
                process.wait_ready()
            except ProcessError as error:
                failures.append(error)

        threads = [
            threading.Thread(target=wait, args=(process,), daemon=True) for process in processes
        ]
        for thread in threads:
            thread.start()
        shown = {process.name: "starting" for process in processes}
        while any(thread.is_alive() for thread in threads) and not failures:
            for process, thread in zip(processes, threads, strict=True):
                phase = _phase(process) if thread.is_alive() else "ready"
                if shown.get(process.name) != phase:
                    shown[process.name] = phase
                    self._on_progress(process, phase)
            # Engines take a minute; reading their logs ten times a second would slow them.
            time.sleep(5 * POLL_S)
        if failures:
            raise failures[0]
        for process in processes:
            if shown.get(process.name) != "ready":
                self._on_progress(process, "ready")

    def wait_registered(self, target: str, worker_ids: Iterable[str]) -> None:
        """Returns once the control plane has these workers ready. Raises ProcessError."""
        wanted = set(worker_ids)
        deadline = time.monotonic() + REGISTER_TIMEOUT_S
        with ControlPlaneView(target) as view:
            while missing := wanted - view.ready_workers():
                if time.monotonic() > deadline:
                    logs = [p.tail() for p in self.processes if p.name in missing]
                    raise ProcessError(
                        f"the control plane does not have {sorted(missing)} ready after "
                        f"{REGISTER_TIMEOUT_S:.0f} s\n" + "\n".join(logs)
                    )
                time.sleep(POLL_S)

    def ended(self) -> Iterator[ManagedProcess]:
        """Waits for programs to end by themselves, and tells of each once; until all have."""
        left = list(self.processes)
        while left:
            for process in [x for x in left if not x.running]:
                left.remove(process)
                yield process
            time.sleep(POLL_S)

    def close(self) -> None:
        """Stops all, the last started first: those that use others go before those others.

        Engines are stopped side by side. Raises ProcessError when a process is left over.
        """
        failures: list[ProcessError] = []

        def stop(process: ManagedProcess) -> None:
            try:
                process.stop()
            except ProcessError as error:
                failures.append(error)

        engines = [process for process in self.processes if isinstance(process, Engine)]
        for process in reversed(self.processes):
            if process not in engines:
                stop(process)
        threads = [threading.Thread(target=stop, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.processes.clear()
        if failures:
            raise failures[0]


def _phase(process: ManagedProcess) -> str:
    return process.phase() if isinstance(process, Engine) else "starting"
