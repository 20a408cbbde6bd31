"""Entry point of the benchmark."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.retention.__main__ import DEFAULT_TRACES
from benchmarks.ttft import raw_nixl
from benchmarks.ttft.arms import ARMS, Pool
from benchmarks.ttft.groups import RESERVE_BYTES
from benchmarks.ttft.offload_tier import reason_it_does_not_run
from benchmarks.ttft.oracles import failures
from benchmarks.ttft.report import arm_of_ours, last_line, summary, tables
from benchmarks.ttft.schedule import Plan, fixed, from_traces, read_traces
from benchmarks.ttft.session import Options, Results, Run
from benchmarks.ttft.turns import SPIN_S

ROOT = Path(__file__).resolve().parents[2]
# The fixed schedule: 1,500 tokens cold, then 2,000, 2,500 and 3,000.
TURNS = 4
OUTPUT_TOKENS = 64
GAP_S = 2.0
TRACE_WINDOW = 3_000
# QUICK must end within 8 minutes; what is left after the last group is stopping and reporting.
QUICK_MINUTES = 6.5
QUICK_TURNS = 3
QUICK_OUTPUT_TOKENS = 32
QUICK_RETURNS = 5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--pool-tokens", type=int, default=16_384)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "ttft")
    parser.add_argument("--quick", action="store_true", help="within 8 minutes: fewer of all")
    parser.add_argument("--repeats", type=int, default=3, help="fixed conversations")
    parser.add_argument(
        "--pairs", type=int, default=20, help="prompts more that f and g compute side by side"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        help="recorded sessions; by default those of benchmarks/retention, none with --quick",
    )
    parser.add_argument("--trace-conversations", type=int, default=2)
    parser.add_argument("--trace-turns", type=int, default=5)
    parser.add_argument("--scenarios", default="lost,kept", help="lost, kept, or both")
    parser.add_argument("--arms", default=",".join(kind.key for kind in ARMS))
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--idle-sessions", type=int, default=100)
    parser.add_argument(
        "--wait-quiet", type=float, default=0.0, help="seconds a turn waits for a quiet machine"
    )
    parser.add_argument(
        "--minutes", type=float, help="no further group or conversation is begun after that"
    )
    parser.add_argument(
        "--reserve-gib",
        type=float,
        default=RESERVE_BYTES / 2**30,
        help="memory left to all but the engines",
    )
    parser.add_argument("--no-offload-tier", action="store_true", help="do not try arm d2")
    options = parser.parse_args()
    if options.traces is None and not options.quick:
        options.traces = DEFAULT_TRACES
    if options.quick:
        options.repeats, options.scenarios = 1, "lost"
        # What the last line is made of; the others take two more stacks, a minute each.
        options.arms, options.trace_conversations = "a,b,c,g", 1
        options.idle_seconds, options.idle_sessions = min(options.idle_seconds, 10.0), 5
        options.no_offload_tier = True
        options.minutes = QUICK_MINUTES
    return options


def _plans(options: argparse.Namespace) -> list[Plan]:
    turns, output = (QUICK_TURNS, QUICK_OUTPUT_TOKENS) if options.quick else (TURNS, OUTPUT_TOKENS)
    plans = [fixed(i, turns, output, GAP_S) for i in range(options.repeats)]
    if options.traces:
        plans += from_traces(
            read_traces(options.traces),
            count=options.trace_conversations,
            turns=options.trace_turns,
            window=TRACE_WINDOW,
            max_output=OUTPUT_TOKENS,
        )
    return plans


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _settings(options: argparse.Namespace, pool: Pool) -> dict[str, Any]:
    return {
        "commit": _commit(),
        "model": pool.model.name,
        "dtype": pool.dtype,
        "block_size": pool.block_size,
        "pool_blocks": pool.blocks,
        "quick": options.quick,
        "traces": None if options.traces is None else options.traces.name,
        "output_tokens": QUICK_OUTPUT_TOKENS if options.quick else OUTPUT_TOKENS,
        "gap_s": GAP_S,
        "machine": platform.machine(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "emulation": (
            "lost: prefix caching off on prefill in b, c, d, e; in f and g on, and emptied while "
            "decode answers, before anything comes back"
        ),
    }


def _raw(results: Results, model: Path, *, quick: bool) -> dict[str, Any]:
    """Raw NIXL on as many bytes, in as many descriptors, as our median return to an idle engine;
    not quick: in other ways too."""
    ours = results.quiet.get(arm_of_ours(results.samples), [])
    moved = sorted((x.moved.bytes, x.moved.descriptors, x.moved.blocks) for x in ours)
    if not moved:
        return {}
    size, descriptors, blocks = moved[len(moved) // 2]
    layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    # Each after a pause, as ours.
    found = raw_nixl.measure(size, descriptors, pause_s=SPIN_S)
    if quick:
        return found
    return found | {
        "in_a_loop": raw_nixl.measure(size, descriptors),
        "in_one_run": raw_nixl.measure(size, layers, pause_s=SPIN_S),
        "block_by_block": raw_nixl.measure(size, layers * blocks, pause_s=SPIN_S),
    }


def main() -> int:
    """Runs, writes, and prints the line that programs read last. 1: an oracle failed in an arm of
    ours, which no speed makes up for."""
    options = _arguments()
    console = Console(width=150)
    pool = Pool(
        model=options.model,
        dtype=options.dtype,
        block_size=options.block_size,
        tokens=options.pool_tokens,
        kv_cache_gib=1,
        max_model_len=8_192,
        dummy_weights=not any(options.model.glob("*.safetensors")),
    )
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    settings = _settings(options, pool)

    def write(results: Results, raw: dict[str, Any]) -> dict[str, Any]:
        found = summary(results, raw, settings)
        line, reasons = last_line(found)
        found |= {"line": line, "null_because": reasons}
        (out / "ttft.json").write_text(json.dumps(found, indent=1) + "\n")
        return found

    def keep(results: Results) -> None:
        write(results, {})

    # The programs' logs of the last run stay, for whoever wonders about a figure.
    directory = out / "logs"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    run = Run(
        Options(
            pool=pool,
            plans=_plans(options),
            scenarios=options.scenarios.split(","),
            arms=options.arms.split(","),
            directory=directory,
            idle_seconds=options.idle_seconds,
            idle_sessions=options.idle_sessions,
            patience_s=options.wait_quiet,
            pairs=0 if options.quick else options.pairs,
            quiet_returns=QUICK_RETURNS if options.quick else Options.quiet_returns,
            reserve_bytes=int(options.reserve_gib * 2**30),
            budget_s=None if options.minutes is None else options.minutes * 60,
        ),
        say=lambda line: console.print(line, highlight=False, markup=False),
        save=keep,
    )
    results = run.run()
    if options.no_offload_tier:
        reason: str | None = (
            "not tried in this run; vLLM 0.32 refuses to start it on CPU, see docs/benchmarks.md"
        )
    else:
        reason = reason_it_does_not_run(pool, directory / "offload")
    results.left_out.setdefault("lost", {})["d2"] = reason or (
        "it starts here; the benchmark has no proxy for it"
    )
    found = write(results, _raw(results, pool.model, quick=options.quick))
    tables(found, console)
    table = out / "ttft.txt"
    with table.open("w", encoding="utf-8") as file:
        tables(found, Console(width=150, file=file))
    from benchmarks.ttft.plots import plot

    for path in [out / "ttft.json", table, *plot(found, out)]:
        console.print(f"written: {path}", highlight=False)
    failed = failures(results.samples, results.leaked, exact=pool.dtype == "float32")
    for text in failed:
        console.print(f"FAILED: {text}", highlight=False, markup=False)
    print(json.dumps(found["line"]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
