"""What an idle engine costs while it holds ten sessions' KV, process by process.

Starts a kvshuttle of two engines, holds one turn of ten conversations at decode (without eager
returns, which would move them to prefill's cache and let go), then does nothing for a minute and
counts the CPU time of every process of both engines. A plain engine and one with vLLM's own
NixlConnector, idle and holding nothing, are measured the same way to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvshuttle.localstack import (
    ChatClient,
    ControlPlane,
    ControlPlaneView,
    Engine,
    EngineSpec,
    Gateway,
    ManagedProcess,
    ProcessError,
    Stack,
    engine_cpus,
    kvshuttle_transfer,
    user,
)

# What one idle engine may cost, all its processes together.
TARGET_PERCENT = 5.0
SESSIONS = 10
# After the last request: logs, metrics and the allocator settle.
SETTLE_S = 5.0
# Upstream's own connector; the side channel's port is vLLM's variable.
NIXL_CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True)
class Usage:
    """CPU of one process, in percent of one core over the whole time."""

    engine: str
    process: str
    pid: int
    percent: float


def _label(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    if "api_server" in command:
        return "API server"
    for mark, label in (
        ("EngineCore", "EngineCore"),
        ("Worker", "worker"),
        ("resource_tracker", "resource tracker"),
    ):
        if mark in command or mark in process.name():
            return label
    return process.name()


def measure(engines: list[Engine], seconds: float) -> list[Usage]:
    """CPU of every process of the engines over `seconds` in which nothing is asked of them."""
    before: list[tuple[str, psutil.Process, float]] = []
    for engine in engines:
        for pid in engine.pids():
            process = psutil.Process(pid)
            times = process.cpu_times()
            before.append((engine.name, process, times.user + times.system))
    start = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - start
    used = []
    for name, process, cpu in before:
        times = process.cpu_times()
        percent = (times.user + times.system - cpu) / elapsed * 100
        used.append(Usage(name, _label(process), process.pid, percent))
    return used


def totals(usages: list[Usage]) -> dict[str, float]:
    """Percent of a core by engine."""
    found: dict[str, float] = {}
    for usage in usages:
        found[usage.engine] = found.get(usage.engine, 0.0) + usage.percent
    return {name: round(percent, 2) for name, percent in found.items()}


def show(title: str, usages: list[Usage]) -> None:
    """One line a process, one an engine."""
    print(f"\n{title}")
    sums = totals(usages)
    for name, total in sums.items():
        for usage in usages:
            if usage.engine == name:
                print(f"  {name:<12} {usage.process:<18} {usage.pid:>8} {usage.percent:8.2f} %")
        print(f"  {name:<12} {'all':<18} {'':>8} {total:8.2f} %", flush=True)


def _progress(process: ManagedProcess, phase: str) -> None:
    if phase in ("starting", "ready"):
        print(f"  {process.name}: {phase}", flush=True)


def kvshuttle_pair(model: Path, directory: Path, seconds: float) -> tuple[dict[str, float], int]:
    """Percent by engine, and how many replicas decode held all the time."""
    cpus = engine_cpus()
    with Stack(_progress) as stack:
        control_plane = ControlPlane(
            directory=directory, extra_args=["--no-eager", "--direct-tokens", "0"]
        )
        stack.start(control_plane)
        engines = [
            Engine(
                EngineSpec(
                    name,
                    model,
                    cpu=cpu,
                    kv_transfer=kvshuttle_transfer(
                        control_plane=control_plane.target, worker_id=name, role=role
                    ),
                ),
                log_dir=directory,
            )
            for name, role, cpu in (
                ("prefill-0", "prefill", cpus[0]),
                ("decode-0", "decode", cpus[1]),
            )
        ]
        stack.start(*engines)
        stack.wait_registered(control_plane.target, [engine.name for engine in engines])
        gateway = Gateway(
            directory=directory,
            control_plane=control_plane.target,
            prefill_urls=[engines[0].url],
            decode_urls=[engines[1].url],
        )
        stack.start(gateway)
        with ChatClient(gateway.url) as client, ControlPlaneView(control_plane.target) as view:
            for number in range(SESSIONS):
                words = f"Session {number}. " + "The tide comes in and the tide goes out. " * 30
                client.ask([user(words)], max_tokens=8, session=f"idle-{number}")
            time.sleep(SETTLE_S)
            held = view.workers()["decode-0"].pool
            print(f"\n  decode-0 holds {held.holds} replicas, {held.held_blocks} blocks")
            usages = measure(engines, seconds)
            after = view.workers()["decode-0"].pool
            holds = min(held.holds, after.holds)
        show(f"kvshuttle, {holds} replicas held at decode, idle for {seconds:.0f} s", usages)
        return totals(usages), holds


def single(spec: EngineSpec, title: str, directory: Path, seconds: float) -> float | None:
    """Percent of one engine alone that holds nothing; None if it does not start here."""
    try:
        with Stack(_progress) as stack:
            engine = Engine(spec, log_dir=directory)
            stack.start(engine)
            time.sleep(SETTLE_S)
            usages = measure([engine], seconds)
            show(f"{title}, idle for {seconds:.0f} s", usages)
            return totals(usages)[spec.name]
    except ProcessError as error:
        print(f"\n{title} does not start here:\n{error}")
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".models/tiny"))
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to look on")
    parser.add_argument("--no-peers", action="store_true", help="kvshuttle alone")
    options = parser.parse_args()
    cpu = engine_cpus()[0]
    with tempfile.TemporaryDirectory(prefix="kvshuttle-bench-") as text:
        directory = Path(text)
        pair, holds = kvshuttle_pair(options.model, directory, options.seconds)
        plain = nixl = None
        if not options.no_peers:
            plain = single(
                EngineSpec("plain", options.model, cpu=cpu),
                "vLLM without a connector",
                directory,
                options.seconds,
            )
            nixl = single(
                EngineSpec("nixl", options.model, cpu=cpu, kv_transfer=NIXL_CONNECTOR),
                "vLLM with its own NixlConnector",
                directory,
                options.seconds,
            )
    met = holds >= SESSIONS and max(pair.values()) < TARGET_PERCENT
    print(
        json.dumps(
            {
                "seconds": options.seconds,
                "sessions_held": holds,
                "prefill_percent": pair["prefill-0"],
                "decode_percent": pair["decode-0"],
                "plain_percent": plain,
                "nixl_connector_percent": nixl,
                "target_percent": TARGET_PERCENT,
                "met": met,
            }
        )
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
