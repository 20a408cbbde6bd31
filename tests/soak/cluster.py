"""The programs that a soak runs on, with little memory, and their states that it reads."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from kvshuttle.localstack import (
    ControlPlane,
    ControlPlaneView,
    Engine,
    EngineSpec,
    Gateway,
    Stack,
    engine_cpus,
    kvshuttle_transfer,
)
from kvshuttle.localstack.metrics import PREEMPTIONS
from tests.support.ahead import schedules_ahead
from tests.support.leaks import free_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

PREFILL, DECODE, PLAIN = "prefill-0", "decode-0", "plain"
WINDOW = 2_048
# Eight clients with prompts of up to 64 blocks, answers of up to ten: less than they want, so that
# decode preempts and both evict. One request of the whole window must fit.
POOL_BLOCKS = {PREFILL: 120, DECODE: 76}
DEAD_CORE = "EngineDeadError"
# What no program may write into its log. vLLM's API server has a trace of every request whose
# client goes away, so engines are judged by the agent's own words and by a dead core.
BAD_WORDS = {
    "engine": ("hook_failed", "inbox_item_failed", "mover_failed", DEAD_CORE),
    "service": ("Traceback", "inbox_item_failed", '"level": "critical"'),
}


@dataclass
class SoakCluster:
    """One whole kvshuttle and the plain engine that judges it."""

    stack: Stack
    control_plane: ControlPlane
    prefill: Engine
    decode: Engine
    plain: Engine
    gateway: Gateway
    view: ControlPlaneView
    baseline: dict[str, int]
    directory: Path
    # Instants (monotonic) between which some program was dead: requests may fail there, and only
    # there.
    outages: list[tuple[float, float]] = field(default_factory=list)
    # Caches that were dropped.
    resets: int = 0
    # Processes of servers whose computing part the soak has killed.
    crashed: set[int] = field(default_factory=set)
    # Faults of prefill that stay planted all the time, to see the oracles object.
    planted: dict[str, object] = field(default_factory=dict)
    _preempted: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def engines(self) -> dict[str, Engine]:
        """Those with an agent."""
        return {PREFILL: self.prefill, DECODE: self.decode}

    def plant(self, name: str, **faults: object) -> None:
        """Plants faults in a worker's transfers; none at all takes them away."""
        path = self.directory / f"{name}.faults.json"
        if name == PREFILL:
            faults |= self.planted
        if faults:
            # At once, or not at all: it is read while it is written.
            new = path.with_suffix(".new")
            new.write_text(json.dumps(faults))
            new.rename(path)
        else:
            path.unlink(missing_ok=True)

    def outage(self, start: float, end: float) -> None:
        """Notes a time in which requests may fail."""
        with self._lock:
            self.outages.append((start, end))

    def close_outage(self, end: float) -> None:
        """The last outage ends then."""
        with self._lock:
            start, _ = self.outages[-1]
            self.outages[-1] = (start, end)

    def was_out(self, start: float, end: float) -> bool:
        """Whether something was dead between."""
        with self._lock:
            return any(a <= end and start <= b for a, b in self.outages)

    def evict(self, name: str) -> None:
        """Asks vLLM to drop its prefix cache; it does when nothing runs."""
        self.resets += self.engines[name].reset_prefix_cache()

    def count_preemptions(self) -> None:
        """Adds up each engine's own count; it starts anew with its process."""
        for name, engine in self.engines.items():
            try:
                now = engine.metrics().total(PREEMPTIONS)
            except httpx.HTTPError:
                continue
            self._preempted[name] = max(self._preempted.get(name, 0.0), now)

    def new_process(self, name: str) -> None:
        """An engine's counts begin at 0 again."""
        self._preempted[f"{name}@{time.monotonic()}"] = self._preempted.pop(name, 0.0)

    @property
    def preemptions(self) -> int:
        """As counted by the engines."""
        return int(sum(self._preempted.values()))

    def start_control_plane(self, *flags: str) -> None:
        """Starts it anew, with other flags if said; waits for agents and gateway."""
        if flags:
            self.control_plane.extra_args = [*store_args(self.directory), *flags]
        self.control_plane.start()
        self.control_plane.wait_ready()
        self.start_again()

    def start_again(self) -> None:
        """Waits until the agents are back."""
        self.stack.wait_registered(self.control_plane.target, self.engines)

    def bad_lines(self) -> list[str]:
        """Log lines that must not be."""
        kinds = {"controlplane": "service", "gateway": "service", PREFILL: "engine"}
        kinds[DECODE] = "engine"
        found = []
        for name, kind in kinds.items():
            text = (self.directory / f"{name}.log").read_text(errors="replace")
            found += [f"{name}: {line[:300]}" for line in bad_lines(kind, text, self.crashed)]
        return found


def bad_lines(kind: str, text: str, crashed: Collection[int]) -> list[str]:
    """Lines that a program may not write into its log. A server whose core was killed by the soak
    says that it is dead; one whose core died by itself may not need to."""
    killed = tuple(f"pid={pid})" for pid in crashed)
    return [
        line
        for line in text.splitlines()
        if any(word in line for word in BAD_WORDS[kind])
        and not (DEAD_CORE in line and any(mark in line for mark in killed))
    ]


def store_args(directory: Path) -> list[str]:
    """On disk: the control plane is killed and started again."""
    return ["--store", str(directory / "controlplane.sqlite")]


def soak_cluster(
    model: Path, directory: Path, flags: list[str], *, ahead: bool = False
) -> Iterator[SoakCluster]:
    """Starts everything; ends it when the generator ends. `ahead`: engines schedule a step while
    the one before runs, and compute prompts in chunks, so that much meets a step that runs."""
    cpus = engine_cpus()
    with Stack() as stack:
        control_plane = ControlPlane(
            directory=directory, extra_args=[*store_args(directory), *flags]
        )
        stack.start(control_plane)
        prefill, decode = (
            Engine(
                EngineSpec(
                    name=name,
                    model=model,
                    cpu=cpu,
                    max_model_len=WINDOW,
                    num_blocks=POOL_BLOCKS[name],
                    env={"VLLM_SERVER_DEV_MODE": "1", **(schedules_ahead() if ahead else {})},
                    extra_args=("--max-num-batched-tokens", "256") if ahead else (),
                    kv_transfer=kvshuttle_transfer(
                        control_plane=control_plane.target,
                        worker_id=name,
                        role=role,
                        extra={"fault_file": str(directory / f"{name}.faults.json")},
                    ),
                ),
                log_dir=directory,
            )
            for name, role, cpu in ((PREFILL, "prefill", cpus[0]), (DECODE, "decode", cpus[1]))
        )
        plain = Engine(
            EngineSpec(name=PLAIN, model=model, cpu=cpus[0], max_model_len=WINDOW),
            log_dir=directory,
        )
        stack.start(prefill, decode, plain)
        stack.wait_registered(control_plane.target, [PREFILL, DECODE])
        gateway = Gateway(
            directory=directory,
            control_plane=control_plane.target,
            prefill_urls=[prefill.url],
            decode_urls=[decode.url],
        )
        stack.start(gateway)
        with ControlPlaneView(control_plane.target) as view:
            yield SoakCluster(
                stack,
                control_plane,
                prefill,
                decode,
                plain,
                gateway,
                view,
                free_blocks(view),
                directory,
            )
