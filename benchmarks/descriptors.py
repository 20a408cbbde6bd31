"""What it costs to post a transfer, and what the first one between two workers costs.

    python -m benchmarks.descriptors

One process reads from another and writes to it, with the agent's own transport over plain memory:
`--layers` regions of `--pool` blocks each. Compared are, in one run and by turns:

- READs by descriptors of all blocks of both pools, prepared once (what the agent does), and READs
  whose descriptors are made for each, of merged runs;
- pushes layer by layer of merged runs, prepared for all layers at the first (what the agent does),
  pushes of a descriptor a block, and one READ of the same blocks;
- a first READ a second after the peer was added (as at registration), and one at once.

It ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from kvshuttle.dataplane.messages import PeerRegion
from kvshuttle.dataplane.transport import LocalRegion, NixlTransport, ReadHandle

BACKEND = "UCX"
NOTICE = b"read"
CONNECT_S = 1.0
TIMEOUT_S = 30.0
WAYS = ("READ", "READ, made each time", "push", "push, block by block")
Blocks = list[int]


class Other(NixlTransport):
    """With transfers as the agent does not make them."""

    def post_made(self, local: Blocks, remote: Blocks) -> ReadHandle:
        """A READ whose descriptors are made for it."""
        pools, self._pools = self._pools, {}
        try:
            return self.post_read("far", local, remote, NOTICE)
        finally:
            self._pools = pools

    def post_each(self, local: Blocks, remote: Blocks, regions: range) -> ReadHandle:
        """A WRITE of these regions out of the pools, where the agent has lists of the blocks."""
        (mine, theirs) = self._pools.values()
        which = [
            pool.pick(np.asarray(blocks)).reshape(pool.regions, -1)[regions].ravel()
            for pool, blocks in ((mine, local), (theirs, remote))
        ]
        raw = self._agent.make_prepped_xfer(
            "WRITE", mine.raw, which[0], theirs.raw, which[1], NOTICE, backends=[BACKEND]
        )
        if self._agent.transfer(raw) == "ERR":
            raise RuntimeError("a WRITE was refused")
        return ReadHandle(raw, 0)

    def count(self, handle: ReadHandle) -> int:
        """Descriptors that NIXL has made of it."""
        return int(self._agent.get_xfer_telemetry(handle.raw).descCount)


def _regions(memory: np.ndarray[Any, Any]) -> list[LocalRegion]:
    layers, blocks, size = memory.shape
    return [
        LocalRegion(f"layer{i}", int(memory[i].ctypes.data), size, blocks, "DRAM", 0)
        for i in range(layers)
    ]


def _serve(pipe: Connection, shape: tuple[int, int, int]) -> None:
    """Polls until it is told to end, as an agent does while a lease of its is open."""
    memory = np.full(shape, 7, dtype=np.uint8)
    transport = NixlTransport("far", BACKEND, {})
    metadata = transport.register(_regions(memory))
    pipe.send((metadata, [r.base for r in _regions(memory)]))
    while not pipe.poll(0):
        transport.notices()


@contextmanager
def far_end(shape: tuple[int, int, int]) -> Iterator[tuple[bytes, list[PeerRegion]]]:
    """Another process with as much memory: its metadata and regions."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, shape), daemon=True)
    process.start()
    try:
        metadata, bases = pipe.recv()
        yield metadata, [PeerRegion(base, shape[2], "DRAM", 0, shape[1]) for base in bases]
        pipe.send(None)
        process.join(5)
    finally:
        process.kill()


def until_done(transport: NixlTransport, handle: ReadHandle) -> None:
    """Polls without a pause. RuntimeError on failure and after `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while (state := transport.state(handle)) != "DONE":
        if state == "ERR" or time.monotonic() > deadline:
            raise RuntimeError(f"a transfer ended as {state}")


def layout(name: str, pool: int, count: int, luck: random.Random) -> Blocks:
    """Block numbers: one run, runs of four, or each for itself."""
    run = {"one run": count, "runs of 4": 4, "scattered": 1}[name]
    # Every second place stays empty, or two runs would be neighbours.
    places = range(0, pool - 2 * run + 1, 2 * run)
    found: Blocks = []
    for start in luck.sample(places, count // run):
        found += range(start, start + run)
    return found


def timed(transport: Other, *posts: Callable[[], ReadHandle]) -> tuple[float, float, int]:
    """Milliseconds until all are posted, and until all are done; descriptors."""
    start = time.perf_counter()
    handles = [post() for post in posts]
    posted = time.perf_counter()
    for handle in handles:
        until_done(transport, handle)
    done = time.perf_counter()
    count = sum(transport.count(handle) for handle in handles)
    for handle in handles:
        transport.release(handle)
    return (posted - start) * 1e3, (done - start) * 1e3, count


def pushed(
    transport: Other, post: Callable[[range], ReadHandle], layers: int
) -> tuple[float, float, int]:
    """As `timed`, of a push layer by layer."""
    return timed(transport, *(partial(post, range(i, i + 1)) for i in range(layers)))


def merged_push(
    transport: Other, local: Blocks, remote: Blocks, layers: int
) -> tuple[float, float, int]:
    """As the agent does it."""
    mine, theirs = transport.prepare("", local), transport.prepare("far", remote)
    found = pushed(transport, partial(transport.post_write, mine, theirs, 0), layers)
    transport.drop_list(mine)
    return found


def median(found: list[tuple[float, float, int]]) -> dict[str, float]:
    """Of both times; the number of descriptors is the same each time."""
    return {
        "post_ms": round(statistics.median(x[0] for x in found), 3),
        "done_ms": round(statistics.median(x[1] for x in found), 3),
        "descriptors": int(statistics.median(x[2] for x in found)),
    }


def transfers(shape: tuple[int, int, int], counts: list[int], rounds: int) -> dict[str, Any]:
    """Every way for every number of blocks and layout."""
    layers, pool, size = shape
    luck = random.Random(1)
    memory = np.ones(shape, dtype=np.uint8)
    rows: list[dict[str, Any]] = []
    with far_end(shape) as (metadata, regions):
        transport = Other("near", BACKEND, {})
        transport.register(_regions(memory))
        before, start = psutil.Process().memory_full_info().uss, time.perf_counter()
        transport.add_peer("far", metadata, regions)
        took = time.perf_counter() - start
        grown = psutil.Process().memory_full_info().uss - before
        for name in ("one run", "runs of 4", "scattered"):
            for count in counts:
                found: dict[str, list[tuple[float, float, int]]] = {}
                for number in range(rounds + 2):
                    blocks = layout(name, pool, count, luck)
                    # Runs of the same lengths, elsewhere.
                    remote = [x + 1 for x in blocks]
                    read = partial(transport.post_read, "far", blocks, remote, NOTICE)
                    made = partial(transport.post_made, blocks, remote)
                    each = partial(transport.post_each, blocks, remote)
                    ways = {
                        "READ": partial(timed, transport, read),
                        "READ, made each time": partial(timed, transport, made),
                        "push": partial(merged_push, transport, blocks, remote, layers),
                        "push, block by block": partial(pushed, transport, each, layers),
                    }
                    # Who goes first changes.
                    for way in list(ways)[:: 1 if number % 2 else -1]:
                        reads = way.startswith("READ")
                        if reads:
                            memory[:, blocks] = 0
                        one = ways[way]()
                        if reads and not memory[:, blocks].all():
                            raise RuntimeError("a READ has left blocks as they were")
                        if number >= 2:
                            found.setdefault(way, []).append(one)
                moved = layers * count * size
                rows.append(
                    {"layout": name, "blocks": count, "bytes": moved}
                    | {way: median(times) for way, times in found.items()}
                )
        transport.close()
    return {
        "prepare_ms": round(took * 1e3, 1),
        "prepare_bytes": grown,
        "prepare_bytes_a_descriptor": round(grown / (2 * layers * pool), 1),
        "rows": rows,
    }


def first(shape: tuple[int, int, int], blocks: int, times: int) -> dict[str, Any]:
    """A first READ and the next, with a peer that was added a second before, and with one that was
    not."""
    found: dict[str, list[float]] = {}
    for _ in range(times):
        for name, wait_s in (("connected", CONNECT_S), ("at_once", 0.0)):
            memory = np.ones(shape, dtype=np.uint8)
            with far_end(shape) as (metadata, regions):
                transport = Other("near", BACKEND, {})
                transport.register(_regions(memory))
                start = time.perf_counter()
                transport.add_peer("far", metadata, regions)
                found.setdefault("add_peer", []).append((time.perf_counter() - start) * 1e3)
                end = time.monotonic() + wait_s
                while time.monotonic() < end:
                    transport.notices()
                    time.sleep(0.001)
                some = list(range(blocks))
                read = partial(transport.post_read, "far", some, some, NOTICE)
                for which in ("first", "next"):
                    _, done, _ = timed(transport, read)
                    found.setdefault(f"{name}_{which}", []).append(done)
                transport.close()
    return {f"{name}_ms": round(statistics.median(x), 3) for name, x in found.items()}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.descriptors")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--pool", type=int, default=1_024, help="blocks")
    parser.add_argument("--block-bytes", type=int, default=24_576, help="of one layer")
    parser.add_argument("--counts", default="16,64,256", help="blocks of a transfer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--first", type=int, default=5, help="pairs of first transfers")
    options = parser.parse_args()
    shape = (options.layers, options.pool, options.block_bytes)
    found = transfers(shape, [int(x) for x in options.counts.split(",")], options.rounds)
    found["first"] = first((options.layers, 128, options.block_bytes), 64, options.first)
    console = Console(width=120)
    table = Table(
        "layout",
        "blocks",
        "MB",
        "way",
        "descriptors",
        "posted, ms",
        "done, ms",
        "GB/s",
        title="medians",
    )
    for row in found["rows"]:
        for way in WAYS:
            one = row[way]
            table.add_row(
                row["layout"],
                str(row["blocks"]),
                f"{row['bytes'] / 1e6:.1f}",
                way,
                str(one["descriptors"]),
                f"{one['post_ms']:.2f}",
                f"{one['done_ms']:.2f}",
                f"{row['bytes'] / one['done_ms'] / 1e6:.2f}",
            )
    console.print(table)
    console.print(
        f"prepared: {found['prepare_ms']} ms, {found['prepare_bytes'] / 2**20:.1f} MiB for "
        f"{2 * options.layers * options.pool} descriptors; first transfers: {found['first']}",
        highlight=False,
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
