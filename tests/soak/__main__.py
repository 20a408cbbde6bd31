"""Random traffic on real engines, with trouble, until the time is over or an oracle objects.

    python -m tests.soak --minutes 30 --seed 7

Eight clients hold conversations that go on, fork, shrink, are rewritten, go away and come back, on
engines with too little memory, while caches are reset, programs stand still, transfers are slow and
the control plane is killed (engines and the gateway too, with `--kill`). Every answer is compared
with one plain engine's: status, tokens, logprobs. After every round all sessions end, and nothing
may be held. Rounds return eagerly and lazily by turns.

Prints a line a round; the last line is JSON. Exit status 1 after any violation, and where the run
was too tame to prove anything. `actions.jsonl` in the output folder has every step. A seed repeats
the choices; how they interleave is up to the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import time
from pathlib import Path

from kvshuttle.v1 import lease_service_pb2 as lease_pb2
from kvshuttle.v1 import types_pb2
from tests.soak.chaos import Chaos
from tests.soak.clients import SoakClient
from tests.soak.cluster import PREFILL, SoakCluster, soak_cluster
from tests.soak.judge import REQUEST_TIMEOUT_S, Judge
from tests.soak.tally import Tally
from tests.support.leaks import assert_nothing_leaked

ROOT = Path(__file__).parents[2]
CLIENTS = 8
ROUND_S = 75.0
# A run shorter than this may not have met everything.
TAME_AFTER_MINUTES = 5.0
MOST_VIOLATIONS = 20
PLANTED: dict[str, dict[str, object]] = {
    "wrong-kv": {"corrupt_returned_block": True},
    "leak": {"lose_references": "source"},
}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic (30)")
    parser.add_argument("--seed", type=int, default=None, help="of all choices (the clock's)")
    parser.add_argument("--mode", choices=["both", "eager", "lazy"], default="both")
    parser.add_argument(
        "--forward",
        choices=["pull", "push", "auto"],
        help="how prompts go to decode; pulled and pushed by rounds if absent",
    )
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="engines schedule a step while one runs, as on GPUs, and compute in chunks",
    )
    parser.add_argument(
        "--kill", action="store_true", help="SIGKILL to engines and the gateway too"
    )
    parser.add_argument(
        "--plant", choices=PLANTED, help="a defect in prefill: the soak must fail, and say of what"
    )
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "tiny")
    parser.add_argument("--out", type=Path, default=None, help="folder for logs (out/soak-SEED)")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    directory = (options.out or ROOT / "out" / f"soak-{seed}").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.log"):
        old.unlink()
    print(f"seed {seed}, logs in {directory}; engines start", flush=True)
    tally = Tally(directory / "actions.jsonl")
    returns = {"both": ["eager", "lazy"], "eager": ["eager"], "lazy": ["lazy"]}[options.mode]
    forwards = [options.forward] if options.forward else ["pull", "push"]
    modes = list(itertools.product(forwards, returns))
    clusters = contextlib.contextmanager(soak_cluster)
    start_cluster = clusters(
        options.model.resolve(), directory, _flags(*modes[0]), ahead=options.ahead
    )
    with (
        start_cluster as cluster,
        contextlib.closing(Judge(cluster.plain.url)) as judge,
    ):
        if options.plant:
            cluster.planted = PLANTED[options.plant]
            cluster.plant(PREFILL)
        left_s, number = options.minutes * 60, 0
        while left_s > 0 and not tally.violations:
            mode = modes[number % len(modes)]
            if number and len(modes) > 1:
                cluster.control_plane.stop()
                cluster.start_control_plane(*_flags(*mode))
            start = time.monotonic()
            _round(cluster, judge, tally, f"{seed}-{number}", min(ROUND_S, left_s), options)
            left_s -= time.monotonic() - start
            number += 1
            print(_line(number, mode, cluster, judge, tally), flush=True)
        for line in cluster.bad_lines()[:MOST_VIOLATIONS]:
            tally.violation(line)
        result = _result(cluster, judge, tally, seed, options.minutes - left_s / 60)
    tally.close()
    if options.minutes >= TAME_AFTER_MINUTES and not result["violations"]:
        wanted: tuple[str, ...] = ("turns", "preemptions", "cancels", "evictions", "kills")
        wanted += ("engine_pauses",)
        wanted += ("eager_tokens",) if options.mode != "lazy" else ()
        wanted += ("returned_tokens",) if options.mode != "eager" else ()
        wanted += ("pushed_tokens",) if options.forward != "pull" else ()
        tame = [name for name in wanted if not result[name]]
        if tame:
            print(f"too tame: none of {', '.join(tame)}", file=sys.stderr)
            result["violations"] = [f"no {name}" for name in tame]
    print(json.dumps(result))
    return 1 if result["violations"] else 0


def _flags(forward: str, returns: str) -> list[str]:
    """Of the control plane."""
    return ["--eager" if returns == "eager" else "--no-eager", "--forward", forward]


def _round(
    cluster: SoakCluster,
    judge: Judge,
    tally: Tally,
    seed: str,
    seconds: float,
    options: argparse.Namespace,
) -> None:
    clients = [
        SoakClient(f"c{i}-{seed}", cluster, judge, tally, random.Random(f"{seed}-{i}"))
        for i in range(CLIENTS)
    ]
    chaos = Chaos(cluster, tally, random.Random(f"{seed}-chaos"), kill=options.kill)
    threads: list[SoakClient | Chaos] = [*clients, chaos]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and len(tally.violations) < MOST_VIOLATIONS:
        time.sleep(1.0)
        cluster.count_preemptions()
    for thread in threads:
        thread.stopping.set()
    for thread in threads:
        thread.join(3 * REQUEST_TIMEOUT_S)
        if thread.is_alive():
            tally.violation(f"{thread.name} does not come to an end")
    cluster.count_preemptions()
    for lease in cluster.view.leases(states=[lease_pb2.LEASE_STATE_COMPLETED]):
        if lease.lease_id not in tally.leases:
            tally.leases.add(lease.lease_id)
            returned = lease.direction == types_pb2.DIRECTION_RETURN
            way = "pushed" if lease.push else "pulled"
            kind = "eager" if lease.eager else "returned" if returned else way
            tally.counts[f"{kind}_tokens"] += lease.stats.tokens
    try:
        assert_nothing_leaked(cluster.view, cluster.baseline, timeout_s=90)
    except AssertionError as error:
        tally.counts["leaked"] += 1
        tally.violation(str(error))


def _result(
    cluster: SoakCluster, judge: Judge, tally: Tally, seed: int, minutes: float
) -> dict[str, object]:
    counts = tally.counts
    return {
        "seed": seed,
        "minutes": round(minutes, 1),
        "turns": counts["turn"],
        "identical": judge.identical,
        "leaked": counts["leaked"],
        "preemptions": cluster.preemptions,
        "cancels": counts["cancel"],
        "evictions": cluster.resets,
        "resets_tried": counts["reset"],
        "kills": counts["kill"],
        "pauses": counts["pause"],
        "engine_pauses": counts["engine_pause"],
        "failed_in_outages": counts["failed_in_outage"],
        "ties": judge.ties,
        "largest_logprob_difference": round(judge.largest_difference, 7),
        "returned_tokens": counts["returned_tokens"],
        "eager_tokens": counts["eager_tokens"],
        "pulled_tokens": counts["pulled_tokens"],
        "pushed_tokens": counts["pushed_tokens"],
        "violations": tally.violations[:MOST_VIOLATIONS],
    }


def _line(
    number: int, mode: tuple[str, str], cluster: SoakCluster, judge: Judge, tally: Tally
) -> str:
    counts = tally.counts
    return (
        f"round {number} {mode[0]} {mode[1]:5}: {counts['turn']} turns, "
        f"{judge.identical} identical, {cluster.preemptions} preemptions, "
        f"{counts['cancel']} cancels, {cluster.resets} evictions, {counts['pause']} pauses, "
        f"{counts['kill']} kills, {len(tally.violations)} violations"
    )


if __name__ == "__main__":
    raise SystemExit(main())
