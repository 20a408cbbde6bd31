"""Time to first token of three ways to place turns, on recorded sessions: simulated, not measured.

    python -m benchmarks.planner --traces agentic_sessions.jsonl.gz

`sticky`: a session stays where it began. `planner`: the real planner, with all that it has to
learn first; `planner_no_direct` the same with --direct-tokens 0. `greedy`: knows all rates, queues
and what of a history was rewritten, and takes what is best for this turn, under the same rule for
decode alone. `bound`: as if nothing ever waited and all KV were everywhere: no placement can do
better, and none need be able to do as well. What the cluster is made of is in `replay`. Ends with
one JSON line; seeded: it says the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.planner.replay import (
    Hardware,
    Policy,
    Run,
    greedy,
    load,
    planned,
    replay,
    sticky,
    timetable,
)

DEFAULT_TRACES = Path(__file__).parents[1] / "retention" / "traces" / "agentic_sessions.jsonl.gz"
ARMS: dict[str, tuple[Policy, int]] = {
    "sticky": (sticky, 0),
    "planner_no_direct": (planned, 0),
    "planner": (planned, 256),
    "greedy": (greedy, 256),
}
# An 8B model with grouped attention on one GPU a worker, and 100 Gb/s between them: round figures.
TOKENS_PER_S, BYTES_PER_TOKEN, BYTES_PER_S = 8_000.0, 128 << 10, 10e9


def figures(runs: list[Run]) -> dict[str, float]:
    """Of all seeds together."""
    ttft = sorted(x for run in runs for x in run.ttft_ms)
    found = {
        "median_ms": round(statistics.median(ttft), 1),
        "p90_ms": round(ttft[int(0.9 * (len(ttft) - 1))], 1),
        "mean_ms": round(statistics.fmean(ttft), 1),
    }
    off = sorted(x for run in runs for x in run.off)
    if off:
        modes = sum((run.modes for run in runs), runs[0].modes.__class__())
        found |= {
            "moved_share": round(sum(run.moves for run in runs) / len(ttft), 4),
            "direct_share": round(modes["DIRECT"] / len(ttft), 4),
            "predicted_to_simulated_median": round(statistics.median(off), 3),
        }
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner")
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4], help="of each role")
    parser.add_argument("--load", type=float, nargs="+", default=[0.4, 0.7])
    parser.add_argument("--sessions", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    if not options.traces.is_file():
        parser.error(f"{options.traces} is not there: give --traces PATH")
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for count in options.workers:
        hardware = Hardware(count, count, TOKENS_PER_S, BYTES_PER_TOKEN, BYTES_PER_S)
        for share in options.load:
            rows.append(row(options, hardware, count, share))
            print(f"{count} prefill and {count} decode workers, load {share:.0%}")
            for name in (*ARMS, "bound"):
                print(f"  {name:<18} {rows[-1][name]}")
    ratios = {
        f"{what}_to_sticky_{arm}": round(
            statistics.geometric_mean(r[arm][what] / r["sticky"][what] for r in rows), 3
        )
        for arm in ("planner_no_direct", "planner", "greedy", "bound")
        for what in ("median_ms", "p90_ms")
    }
    print(
        json.dumps({"simulated": True, "rows": rows, **ratios, "seconds": time.monotonic() - began})
    )
    return 0


def row(
    options: argparse.Namespace, hardware: Hardware, count: int, share: float
) -> dict[str, Any]:
    """All arms on one cluster at one load, over all seeds."""
    found: dict[str, Any] = {"workers": count, "load": share}
    bounds: list[Run] = []
    timed = []
    for seed in range(options.seeds):
        sessions = load(options.traces, options.sessions, seed)
        timed.append((seed, sessions, timetable(sessions, hardware, share, seed)))
    for name, (policy, direct) in ARMS.items():
        runs = []
        for seed, sessions, events in timed:
            run, bound = replay(sessions, events, hardware, policy, seed=seed, direct_tokens=direct)
            runs.append(run)
            if name == "sticky":
                bounds.append(bound)
        found[name] = figures(runs)
    found["bound"] = figures(bounds)
    return found


if __name__ == "__main__":
    sys.exit(main())
