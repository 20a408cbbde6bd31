"""`make bench-gateway`: the bare engine, the gateway and vLLM's own router, in turns, in one run.

Each round asks every side in the same order: requests one after the other for latencies, then many
at once for requests a second. What is proxied has one core, everybody else the other. Prints what
it measures as it goes, and one line of JSON at the end: medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from benchmarks.gateway.client import Connection, Samples
from benchmarks.gateway.router import VERSION, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Between an engine's tokens in the measurement of one token; a fast engine's.
INTERVAL_S = 0.002
START_TIMEOUT_S = 60.0
Side = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def process(
    command: list[str], core: int | None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Runs on one core, until the end of the block."""
    pin: Callable[[], None] | None = None
    if core is not None:

        def pin() -> None:
            os.sched_setaffinity(0, {core})

    with subprocess.Popen(command, text=True, preexec_fn=pin, **options) as one:  # noqa: PLW1509
        try:
            yield one
        finally:
            one.terminate()
            try:
                one.wait(10)
            except subprocess.TimeoutExpired:
                one.kill()


async def measure(side: Side, requests: int, tokens: int) -> Samples:
    """Requests one after the other."""
    samples = Samples()
    connection = Connection(side["url"], side["session"], side["chars"])
    await connection.open()
    for _ in range(5):  # connections, caches
        await connection.ask(2, Samples())
    for _ in range(requests):
        await connection.ask(tokens, samples)
    connection.close()
    return samples


async def load(side: Side, seconds: float, concurrency: int) -> tuple[float, int]:
    """Requests a second, of one token each, so many at once; and how many there were."""
    until = time.monotonic() + seconds
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        connection = Connection(side["url"], f"{side['session']}-{number}", side["chars"])
        await connection.open()
        while time.monotonic() < until:
            await connection.ask(1, Samples())
            done += 1
        connection.close()

    started = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(concurrency)))
    return done / (time.monotonic() - started), done


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[int], share: float) -> float:
    """Milliseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] / 1e6


async def rounds(sides: dict[str, Side], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians over the rounds, for each side."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(args.rounds):
        for name, side in sides.items():
            samples = await measure(side, args.requests, args.tokens)
            before = cpu_s(side["pid"])
            rate, asked = await load(side, args.seconds, args.concurrency)
            spent = cpu_s(side["pid"]) - before
            row = {
                "first_token_p50_ms": percentile(samples.first, 0.5),
                "first_token_p99_ms": percentile(samples.first, 0.99),
                "token_p50_ms": percentile(samples.token, 0.5),
                "token_p99_ms": percentile(samples.token, 0.99),
                "requests_per_s": rate,
                # Whoever else uses the core has no part in this one.
                "cpu_ms_per_request": spent * 1e3 / asked,
            }
            found[name].append(row)
            said = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
            say(f"round {number + 1}  {name:16} {said}")
    return {
        name: {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
        for name, rows in found.items()
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> bool:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and running.poll() is None:
        if condition():
            return True
        time.sleep(0.1)
    return False


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def report(found: dict[str, dict[str, float]], why: str) -> dict[str, Any]:
    """With what each side adds to the bare engine, and the gateway's rate in the router's."""
    bare = found["bare"]
    added = {
        name: round(one["first_token_p50_ms"] - bare["first_token_p50_ms"], 4)
        for name, one in found.items()
        if name != "bare"
    }
    router = found.get("vllm_router")
    ratio = None
    if router is not None:
        ratio = round(found["gateway_one_leg"]["requests_per_s"] / router["requests_per_s"], 4)
    return {
        "benchmark": "gateway",
        "sides": {"vllm_router": None, **found},
        "added_to_first_token_p50_ms": {"vllm_router": None, **added},
        "requests_per_s_gateway_by_router": ratio,
        "vllm_router_version": VERSION if router is not None else None,
        "vllm_router_missing": why or None,
        # What one core could do if it had nothing else to do; of the rates above it cannot be said
        # on a machine that is busy.
        "requests_per_s_of_a_core": {
            name: round(1e3 / one["cpu_ms_per_request"], 1)
            for name, one in found.items()
            if name != "bare" and one["cpu_ms_per_request"] > 0
        },
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Runs all sides."""
    parser = argparse.ArgumentParser(prog="bench-gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="one after the other, a round")
    parser.add_argument("--tokens", type=int, default=20, help="a request's, for its latencies")
    parser.add_argument("--seconds", type=float, default=3.0, help="of load, a round")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt-chars", type=int, default=16_000)
    parser.add_argument("--router", type=Path, default=Path("out/vllm-router"))
    parser.add_argument("--no-router", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.requests, args.seconds = 1, 50, 1.0
    cores = sorted(os.sched_getaffinity(0))
    proxy, others = (cores[-1], cores[0]) if len(cores) > 1 else (None, None)
    if others is not None:
        os.sched_setaffinity(0, {others})
    command, why = (None, "left out") if args.no_router else install(args.router)
    python = sys.executable
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        standins = stack.enter_context(
            process(
                [python, "-m", "benchmarks.gateway.standins", str(INTERVAL_S)],
                others,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert standins.stdout is not None
        where = json.loads(standins.stdout.readline())
        ready = folder / "ready.json"
        gateway = stack.enter_context(
            process(
                [
                    *(python, "-m", "kvshuttle.gateway", "--port", "0"),
                    *("--control-plane", where["control"], "--ready-file", str(ready)),
                    *("--log-level", "warning"),
                ],
                proxy,
                stderr=subprocess.DEVNULL,
            )
        )
        if not wait_for(ready.exists, gateway):
            raise SystemExit("bench-gateway: the gateway did not start")
        url = json.loads(ready.read_text())["url"]
        sides = {
            "bare": {"url": where["decode"], "session": "one", "pid": standins.pid},
            "gateway_one_leg": {"url": url, "session": "one", "pid": gateway.pid},
            "gateway_two_legs": {"url": url, "session": "two", "pid": gateway.pid},
        }
        if command is not None:
            port, log = free_port(), stack.enter_context((folder / "router.log").open("w+"))
            router = stack.enter_context(
                process(
                    [
                        *command,
                        *("--host", "127.0.0.1", "--port", str(port)),
                        *("--worker-urls", where["decode"], "--policy", "round_robin"),
                        *("--prometheus-port", str(free_port()), "--log-level", "warning"),
                    ],
                    proxy,
                    stdout=log,
                    stderr=log,
                )
            )
            if wait_for(lambda: listens(port), router):
                sides["vllm_router"] = {
                    "url": f"http://127.0.0.1:{port}",
                    "session": "one",
                    "pid": router.pid,
                }
            else:
                log.seek(0)
                why = "does not start: " + " ".join(log.read().split())[-300:]
        if why:
            say(f"without vllm-router: {why}")
        for side in sides.values():
            side["chars"] = args.prompt_chars
        found = uvloop.run(rounds(sides, args))
    print(json.dumps(report(found, why)))


if __name__ == "__main__":
    main()
