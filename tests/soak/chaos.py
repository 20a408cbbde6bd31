"""What goes wrong meanwhile: evictions, pauses, slow transfers, restarts, deaths."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.soak.cluster import DECODE, PREFILL, SoakCluster
from tests.soak.judge import REQUEST_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from kvshuttle.localstack.process import ManagedProcess
    from tests.soak.tally import Tally

WORKERS = (PREFILL, DECODE)
# How the processes that compute call themselves.
CORE = b"VLLM::"
# Requests that were on their way when an engine died may fail a moment later.
OUTAGE_MARGIN_S = 3.0


class Chaos(threading.Thread):
    """One trouble after the other until told to stop; leaves everything running."""

    def __init__(self, cluster: SoakCluster, tally: Tally, chance: Random, *, kill: bool) -> None:
        """`kill`: engines and the gateway too, so that requests may fail."""
        super().__init__(name="chaos", daemon=True)
        self.stopping = threading.Event()
        self._cluster = cluster
        self._tally = tally
        self._chance = chance
        self._troubles: list[tuple[float, Callable[[], None]]] = [
            (6.0, self._evict),
            (2.0, self._pause_vllm),
            (2.0, self._pause_engine),
            (1.0, self._pause_gateway),
            (1.0, self._pause_control_plane),
            (1.0, self._kill_control_plane),
            (2.0, self._slow_reads),
        ]
        if kill:
            self._troubles += [(0.3, self._kill_engine), (0.5, self._kill_gateway)]

    def run(self) -> None:
        """Until told to stop."""
        try:
            while not self.stopping.wait(self._chance.uniform(0.3, 3.0)):
                weights = [weight for weight, _ in self._troubles]
                self._chance.choices([what for _, what in self._troubles], weights)[0]()
        except Exception as error:
            self._tally.violation(f"chaos broke: {error!r}")
            raise
        finally:
            for name in WORKERS:
                self._cluster.plant(name)

    def _evict(self) -> None:
        name = self._chance.choice(WORKERS)
        try:
            self._cluster.evict(name)
        except httpx.HTTPError as error:
            self._tally.violation(f"{name} does not answer /reset_prefix_cache: {error!r}")
        self._tally.add("reset", worker=name)

    def _pause_engine(self) -> None:
        engine = self._cluster.engines[self._chance.choice(WORKERS)]
        self._pause(engine, self._chance.choice([0.2, 1.0, 3.0]))

    def _pause_vllm(self) -> None:
        """As before new weights, told of it: the engine resets its cache, and goes on."""
        engine = self._cluster.engines[self._chance.choice(WORKERS)]
        # "keep" cannot reset while a request of the engine's own waits for KV, and says so.
        mode, may_say = self._chance.choice([("wait", {200}), ("keep", {200, 500})])
        try:
            said = engine.pause_vllm(mode, REQUEST_TIMEOUT_S).status_code
            self._tally.add("engine_pause", worker=engine.name, mode=mode, said=said)
            time.sleep(self._chance.choice([0.0, 0.3, 1.0]))
            engine.resume_vllm()
        except httpx.HTTPError as error:
            self._tally.violation(f"{engine.name} does not pause and go on: {error!r}")
        else:
            if said not in may_say:
                self._tally.violation(f"{engine.name} answers {said} to /pause?mode={mode}")

    def _pause_gateway(self) -> None:
        self._pause(self._cluster.gateway, self._chance.uniform(0.1, 1.5))

    def _pause_control_plane(self) -> None:
        # Beyond the silence that agents bear, too: their streams end and begin again.
        self._pause(self._cluster.control_plane, self._chance.choice([0.3, 1.0, 9.0]))

    def _pause(self, process: ManagedProcess, seconds: float) -> None:
        self._tally.add("pause", program=process.name, s=round(seconds, 2))
        process.pause()
        try:
            time.sleep(seconds)
        finally:
            process.resume()

    def _slow_reads(self) -> None:
        name = self._chance.choice(WORKERS)
        delay = self._chance.choice([0.05, 0.3, 1.0])
        self._tally.add("slow_reads", worker=name, s=delay)
        self._cluster.plant(name, delay_read_s=delay)
        self.stopping.wait(self._chance.uniform(1.0, 5.0))
        self._cluster.plant(name)

    def _kill_control_plane(self) -> None:
        # Now and then again while the agents come back.
        for _ in range(self._chance.choice([1, 1, 2])):
            self._tally.add("kill", program="controlplane")
            self._cluster.control_plane.kill()
            time.sleep(self._chance.uniform(0.0, 2.0))
            self._cluster.control_plane.start()
            self._cluster.control_plane.wait_ready()
            time.sleep(self._chance.uniform(0.0, 0.5))
        self._cluster.start_again()

    def _kill_gateway(self) -> None:
        with self._outage():
            self._tally.add("kill", program="gateway")
            self._cluster.gateway.kill()
            time.sleep(self._chance.uniform(0.0, 2.0))
            self._cluster.gateway.start()
            self._cluster.gateway.wait_ready()

    def _kill_engine(self) -> None:
        name = self._chance.choice(WORKERS)
        engine = self._cluster.engines[name]
        with self._outage():
            # Now and then again while it starts.
            for _ in range(self._chance.choice([1, 1, 2])):
                self._tally.add("kill", program=name)
                self._cluster.count_preemptions()
                ref = self._cluster.view.workers()[name].ref
                if self._chance.random() < 0.5:
                    self._crash(engine)
                engine.kill()
                self._cluster.new_process(name)
                engine.start()
                # Without it, what the dead one may be writing to stays in quarantine.
                time.sleep(self._chance.uniform(0.0, 10.0))
                self._cluster.view.fence(ref, "killed by the soak")
            engine.wait_ready()
            self._cluster.start_again()

    def _crash(self, engine: ManagedProcess) -> None:
        """Only what computes dies, as for want of memory: the server before it goes on a while."""
        self._cluster.crashed.add(engine.pid)
        for pid in engine.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(CORE):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(self._chance.uniform(0.0, 5.0))

    @contextlib.contextmanager
    def _outage(self) -> Iterator[None]:
        """Until it is over, and a moment after, requests may fail."""
        self._cluster.outage(time.monotonic(), float("inf"))
        try:
            yield
        finally:
            self._cluster.close_outage(time.monotonic() + OUTAGE_MARGIN_S)
