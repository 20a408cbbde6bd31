"""What a last, partial block costs to compute, in a prefill step and in decode's first step.

Starts one plain engine and asks it for one token after a prompt whose start it has cached: what is
left to compute is `NEW` tokens, or up to a block more (prefill of a later turn), or 1 to a block's
tokens (decode's first step when it has read the prompt). All of them in turn, again and again, so
that what else the machine does falls on all alike. Counted are the wall time of the request and the
CPU time of the engine's processes, which other programs disturb less.

    python benchmarks/partial_block.py .models/smollm2 --block-size 32

What moving one block more costs is in `make bench-ttft`'s raw NIXL figures: its bytes at that rate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from kvshuttle.localstack import Engine, EngineSpec, Stack, engine_cpus

CACHED = 2_048
NEW = 500
VOCABULARY = 2_000  # both models' are larger
SETTLE_ROUNDS = 2


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    block = options.block_size
    spec = EngineSpec(
        "partial-block",
        options.model.resolve(),
        cpu=engine_cpus()[0],
        block_size=block,
        max_model_len=4_096,
    )
    counts = [1, block // 2, block, NEW, NEW + block // 2, NEW + block - 1]
    chooser = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(100, VOCABULARY) for _ in range(count)]

    with tempfile.TemporaryDirectory() as logs, Stack() as stack, httpx.Client(timeout=120) as http:
        engine = Engine(spec, log_dir=Path(logs))
        stack.start(engine)
        assert engine.pid is not None
        root = psutil.Process(engine.pid)
        prefix = tokens(CACHED)

        def ask(count: int) -> tuple[float, float]:
            """(wall, CPU) in ms."""
            body = {
                "model": "model",
                "prompt": prefix + tokens(count),
                "max_tokens": 1,
                "temperature": 0.0,
            }
            before, began = _cpu_s(root), time.perf_counter()
            answer = http.post(f"{engine.url}/v1/completions", json=body)
            wall = time.perf_counter() - began
            answer.raise_for_status()
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == CACHED or not measuring, cached
            return wall * 1e3, (_cpu_s(root) - before) * 1e3

        measuring = False
        for _ in range(SETTLE_ROUNDS):
            for count in counts:
                ask(count)
        measuring = True
        found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
        for _ in range(options.rounds):
            for count in chooser.sample(counts, len(counts)):
                found[count].append(ask(count))
    result = {
        count: {
            "wall_ms_median": round(statistics.median(w for w, _ in x), 1),
            "wall_ms_least": round(min(w for w, _ in x), 1),
            "cpu_ms_median": round(statistics.median(c for _, c in x), 1),
        }
        for count, x in found.items()
    }
    for count, figures in result.items():
        print(f"{count:4} tokens to compute: {figures}")
    print(json.dumps({"model": options.model.name, "block_size": block, "by_tokens": result}))
    return 0


def _cpu_s(root: psutil.Process) -> float:
    processes = [root, *root.children(recursive=True)]
    return sum(x.user + x.system for x in (p.cpu_times() for p in processes))


if __name__ == "__main__":
    sys.exit(main())
