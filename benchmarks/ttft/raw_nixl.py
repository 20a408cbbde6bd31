"""NIXL's own speed between two processes here: same bytes, same descriptors, nothing around it.

    python -m benchmarks.ttft.raw_nixl --bytes 115000000 --descriptors 30

Two agents without progress threads, both polling in a tight loop, READ from one into the other:
the fastest that NIXL goes here. It ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

__all__ = ["measure"]

# The first READ sets up the connection.
WARM_UP = 2
ROUNDS = 15
# How many stretches of memory are read in turns where there is a pause: 0.9 GB, more than a cache.
SLOTS = 5


class _End:
    def __init__(self, name: str, size: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, capture_telemetry=True, backends=[])
        self.agent = nixl_agent(name, config)
        self.agent.create_backend("UCX", {})
        self.memory = np.ones(size, dtype=np.uint8)
        self.base = int(self.memory.ctypes.data)
        self._registered = self.agent.register_memory(
            [(self.base, size, 0, "kv")], "DRAM", backends=["UCX"]
        )

    def rows(self, base: int, descriptors: int, piece: int, slot: int) -> Any:
        """So many equal pieces from `base` on; every second one is skipped, so that they are as far
        apart as blocks of different layers are, and none can be merged."""
        rows = np.empty((descriptors, 3), dtype=np.uint64)
        start = base + slot * 2 * descriptors * piece
        rows[:, 0] = np.uint64(start) + np.arange(descriptors, dtype=np.uint64) * np.uint64(
            2 * piece
        )
        rows[:, 1] = piece
        rows[:, 2] = 0
        return self.agent.get_xfer_descs(rows, "DRAM")


def _source(pipe: Connection, size: int) -> None:
    end = _End("raw-source", size)
    end.memory[:] = 7
    pipe.send((end.agent.get_agent_metadata(), end.base))
    while not pipe.poll(0):
        end.agent.get_new_notifs()


def measure(
    total_bytes: int, descriptors: int, rounds: int = ROUNDS, pause_s: float = 0.0
) -> dict[str, Any]:
    """Median GB/s over `rounds` READs of `total_bytes` in `descriptors` pieces. With a pause before
    each, and none over the memory of the one before, it is as when a conversation comes back;
    without, what NIXL can do in a loop."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    piece = total_bytes // descriptors
    slots = SLOTS if pause_s else 1
    size = slots * 2 * descriptors * piece
    process = context.Process(target=_source, args=(theirs, size), daemon=True)
    process.start()
    try:
        end = _End("raw-reader", size)
        metadata, base = ours.recv()
        name = end.agent.add_remote_agent(metadata)
        peer = name.decode() if isinstance(name, bytes) else str(name)
        rates, elapsed = [], []
        for i in range(WARM_UP + rounds):
            local = end.rows(end.base, descriptors, piece, i % slots)
            remote = end.rows(base, descriptors, piece, i % slots)
            time.sleep(pause_s)
            start = time.perf_counter()
            handle = end.agent.initialize_xfer("READ", local, remote, peer, b"", backends=["UCX"])
            state = end.agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = end.agent.check_xfer_state(handle)
            took = time.perf_counter() - start
            end.agent.release_xfer_handle(handle)
            if state == "ERR":
                raise RuntimeError(f"READ {i} failed")
            if i >= WARM_UP:
                rates.append(descriptors * piece / took / 1e9)
                elapsed.append(took * 1e3)
        if int(end.memory[0]) != 7:
            raise RuntimeError("wrong bytes arrived")
        return {
            "bytes": descriptors * piece,
            "descriptors": descriptors,
            "rounds": rounds,
            "pause_s": pause_s,
            "gb_per_s_median": round(statistics.median(rates), 3),
            "gb_per_s_best": round(max(rates), 3),
            "ms_median": round(statistics.median(elapsed), 3),
        }
    finally:
        ours.send(None)
        process.join(5)
        process.kill()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft.raw_nixl")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--descriptors", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each READ")
    options = parser.parse_args()
    print(json.dumps(measure(options.bytes, options.descriptors, options.rounds, options.pause)))


if __name__ == "__main__":
    main()
