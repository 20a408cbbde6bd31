"""What gRPC and the event loop take by themselves: the least that a turn's messages can cost.

A server that does nothing but send back what it gets, on the server's core, with a stream and a
connection an agent as the control plane has, asked as often as the control plane is at the rate of
`grant_p99_ms`. Run as a module it is that server.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import uvloop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

__all__ = ["Floor", "floor"]

METHOD = "/floor.Echo/Echo"
MESSAGE_BYTES = 400
"""A Harden or a ReplicaOffered has about that much."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Floor:
    """`us` is the server's CPU time for one message in and one out."""

    us: float
    p50_ms: float
    p99_ms: float


async def _echo(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _serve() -> None:
    server = grpc.aio.server()
    _, service, method = METHOD.split("/")
    handler: Any = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def _cpu_s(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(stat[11]) + int(stat[12])) / TICKS


async def floor(core: int | None, streams: int, rate: float, seconds: float) -> Floor:
    """`rate` messages a second each way, at random moments and on random streams."""
    with _server(core) as (pid, address):
        return await _measure(pid, address, streams, rate, seconds)


@contextmanager
def _server(core: int | None) -> Iterator[tuple[int, str]]:
    pin = ["taskset", "-c", str(core)] if core is not None else []
    process = subprocess.Popen(
        [*pin, sys.executable, "-m", "benchmarks.controlplane.floor"], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process.pid, f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


async def _measure(pid: int, address: str, streams: int, rate: float, seconds: float) -> Floor:
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(address, own) for _ in range(streams)]
    calls: list[Any] = [channel.stream_stream(METHOD)() for channel in channels]
    taken: list[float] = []
    more = asyncio.Event()

    async def read(call: Any) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            taken.append((time.perf_counter() - float(answer[:20])) * 1e3)
            more.set()

    async def ask(call: Any, busy: asyncio.Lock) -> None:
        async with busy:  # a stream takes one message at a time
            stamp = f"{time.perf_counter():020.9f}".encode()
            await call.write(stamp.ljust(MESSAGE_BYTES, b"."))

    readers = [asyncio.create_task(read(call)) for call in calls]
    locks = [asyncio.Lock() for _ in calls]
    rng = random.Random(7)
    asking: set[asyncio.Task[None]] = set()
    sent = 0
    cpu, due = _cpu_s(pid), time.perf_counter()
    until = due + seconds
    while due < until:
        due += rng.expovariate(rate)
        if (delay := due - time.perf_counter()) > 0:
            await asyncio.sleep(delay)
        one = rng.randrange(streams)
        task = asyncio.create_task(ask(calls[one], locks[one]))
        asking.add(task)
        task.add_done_callback(asking.discard)
        sent += 1
    async with asyncio.timeout(30):
        while len(taken) < sent:
            more.clear()
            await more.wait()
    cpu = _cpu_s(pid) - cpu
    for call in calls:
        call.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await asyncio.gather(*(channel.close() for channel in channels))
    taken.sort()
    return Floor(cpu / sent * 1e6, taken[sent // 2], taken[int(sent * 0.99)])


if __name__ == "__main__":
    uvloop.run(_serve())
