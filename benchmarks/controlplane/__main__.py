"""How many turns, renewals and sessions one control plane bears, measured from outside.

The server is the real command with its store on disk (SQLite in WAL mode, every commit synced), in
a process of its own pinned to one core; agents and gateway are another process on another core.
Everything is drained before it is counted, and what is counted is what agents and gateway
received. Beside wall-clock figures stand the server's CPU seconds a turn, which say what a core
would bear when the machine is shared.

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import sys
import time
from pathlib import Path

import uvloop

from benchmarks.controlplane.phases import Options, expiry, fsync_ms, million, restart, turns
from benchmarks.controlplane.traces import ChainLengths

NAMED = (
    "turns_per_s",
    "grant_p99_ms",
    "renewals_per_s",
    "rss_gib_at_1m",
    "grant_p99_ms_during_expiry",
    "restart_s_at_1m",
    "turn_cost_ratio_1m_to_1k",
)
"""The keys of the last line."""
PHASES = ("turns", "expiry", "million")
ALONE = "restart"
"""A part of `million` that can be had without the half hour that its sessions take."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-controlplane", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes: fewer sessions")
    parser.add_argument("--traces", default="", help="recorded sessions (.jsonl or .jsonl.gz)")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=0, help="default 1,000,000; quick 20,000")
    parser.add_argument("--store-dir", type=Path, default=Path("out"), help="where the store lies")
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--load-core", type=int, default=1)
    parser.add_argument(
        "--only", choices=(*PHASES, ALONE), action="append", help="leave out the others"
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench-controlplane.json"))
    return parser.parse_args()


def main() -> None:
    """Runs the phases and prints what they found."""
    args = _arguments()
    # Unwinds, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.store_dir.mkdir(parents=True, exist_ok=True)
    cores = os.cpu_count() or 1
    pinned = cores > max(args.server_core, args.load_core)
    if pinned:
        os.sched_setaffinity(0, {args.load_core})
    # Sixty-four channels and their streams, on both ends.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65_536), most))
    lengths = ChainLengths(args.traces)
    options = Options(
        folder=args.store_dir.resolve(),
        core=args.server_core if pinned else None,
        agents=args.agents,
        sessions=args.sessions or (20_000 if args.quick else 1_000_000),
        seconds=3.0 if args.quick else 10.0,
        repeats=1 if args.quick else 3,
        burst=4_000 if args.quick else 20_000,
        say=lambda text: print(text, flush=True),
    )
    median, worst = fsync_ms(options.folder)
    load = os.getloadavg()[0]
    print(
        f"{platform.processor() or platform.machine()}, {cores} cores"
        f"{', server and load on one each' if pinned else ', nothing pinned'}; "
        f"load average {load:.1f}; fdatasync of 4 KiB {median:.2f} ms, p99 {worst:.2f} ms; "
        f"{options.agents} agents; chain lengths: {lengths.source}"
    )
    found: dict[str, float] = {}
    began = time.perf_counter()
    for name in args.only or PHASES:
        print(f"{name}", flush=True)
        match name:
            case "turns":
                phase = turns(options)
            case "expiry":
                phase = expiry(options)
            case "restart":
                phase = restart(options, lengths)
            case _:
                phase = million(options, lengths)
        found |= uvloop.run(phase)
    found |= {
        "sessions": options.sessions,
        "fdatasync_ms": median,
        "load_average": load,
        "seconds": time.perf_counter() - began,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    line: dict[str, object] = {
        name: round(found[name], 3) if name in found else None for name in NAMED
    }
    if options.sessions != 1_000_000:
        # What is called after a million is not to be had from fewer.
        line["sessions"] = options.sessions
        for name in ("rss_gib_at_1m", "restart_s_at_1m", "turn_cost_ratio_1m_to_1k"):
            line[name.replace("_at_1m", "").replace("_1m_to_1k", "")] = line[name]
            line[name] = None
    print(json.dumps(line))


if __name__ == "__main__":
    main()
