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

__all__ = ["Pair", "measure"]

# The first READ sets up the connection.
WARM_UP = 2
ROUNDS = 15
# How many stretches of memory are read in turns where there is a pause: 0.9 GB, more than a cache.
SLOTS = 5
PAGE = 4_096


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

    def rows(self, start: int, descriptors: int, piece: int) -> Any:
        """So many equal pieces from `start` on; every second one is skipped, so that they are as
        far apart as blocks of different layers are, and none can be merged."""
        rows = np.empty((descriptors, 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(start) + np.arange(descriptors, dtype=np.uint64) * np.uint64(
            2 * piece
        )
        rows[:, 1] = piece
        rows[:, 2] = 0
        return self.agent.get_xfer_descs(rows, "DRAM")


def _source(pipe: Connection, size: int) -> None:
    """Polls while it is read from, and at no other time: two cores are shared with engines."""
    end = _End("raw-source", size)
    end.memory[:] = 7
    pipe.send((end.agent.get_agent_metadata(), end.base))
    while pipe.recv():
        pipe.send(True)
        while not pipe.poll(0):
            end.agent.get_new_notifs()
        pipe.recv()


class Pair:
    """Two ends in two processes, of which one reads from the other. A context manager.

    `most_bytes`: of one READ. `slots`: how many stretches of memory are read in turns.
    """

    def __init__(self, most_bytes: int, slots: int = SLOTS) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._most_bytes = most_bytes
        self._slots, self._slot = slots, 0
        # A slot has room for the gaps between pieces, and for one piece that is rounded up.
        self._slot_bytes = 2 * most_bytes + PAGE
        size = slots * self._slot_bytes
        self._process = context.Process(target=_source, args=(theirs, size), daemon=True)
        self._process.start()
        try:
            self._end = _End("raw-reader", size)
            metadata, self._base = self._pipe.recv()
            name = self._end.agent.add_remote_agent(metadata)
            self._peer = name.decode() if isinstance(name, bytes) else str(name)
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(False)
        self._process.join(5)
        self._process.kill()

    def read(self, total_bytes: int, descriptors: int) -> float:
        """Seconds of one READ of so many bytes, in so many equal pieces, into the next slot.
        ValueError for more than `most_bytes`."""
        if not 0 < descriptors <= total_bytes <= self._most_bytes:
            raise ValueError(
                f"{total_bytes} bytes in {descriptors} pieces: at most {self._most_bytes} bytes, "
                "and a byte a piece at least"
            )
        end, piece = self._end, total_bytes // descriptors
        start = self._slot * self._slot_bytes
        self._slot = (self._slot + 1) % self._slots
        # Prepared before the clock starts, as ours are when a peer is met.
        local = self._prepared("NIXL_INIT_AGENT", end.base + start, descriptors, piece)
        remote = self._prepared(self._peer, self._base + start, descriptors, piece)
        which = np.arange(descriptors, dtype=np.int32)
        self._pipe.send(True)
        self._pipe.recv()
        try:
            began = time.perf_counter()
            handle = end.agent.make_prepped_xfer(
                "READ", local, which, remote, which, b"", backends=["UCX"]
            )
            state = end.agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = end.agent.check_xfer_state(handle)
            took = time.perf_counter() - began
            end.agent.release_xfer_handle(handle)
        finally:
            self._pipe.send(True)
            for prepared in (local, remote):
                end.agent.release_dlist_handle(prepared)
        if state == "ERR":
            raise RuntimeError(f"a READ of {total_bytes} bytes failed")
        if int(end.memory[start]) != 7:
            raise RuntimeError("wrong bytes arrived")
        return took

    def _prepared(self, agent: str, start: int, descriptors: int, piece: int) -> Any:
        rows = self._end.rows(start, descriptors, piece)
        return self._end.agent.prep_xfer_dlist(agent, rows, backends=["UCX"])


def measure(
    total_bytes: int, descriptors: int, rounds: int = ROUNDS, pause_s: float = 0.0
) -> dict[str, Any]:
    """Median GB/s over `rounds` READs of `total_bytes` in `descriptors` pieces. With a pause before
    each, and none over the memory of the one before, it is as when a conversation comes back;
    without, what NIXL can do in a loop."""
    moved = total_bytes // descriptors * descriptors
    elapsed = []
    with Pair(total_bytes, SLOTS if pause_s else 1) as pair:
        for i in range(WARM_UP + rounds):
            time.sleep(pause_s)
            took = pair.read(total_bytes, descriptors)
            if i >= WARM_UP:
                elapsed.append(took)
    return {
        "bytes": moved,
        "descriptors": descriptors,
        "rounds": rounds,
        "pause_s": pause_s,
        "gb_per_s_median": round(moved / statistics.median(elapsed) / 1e9, 3),
        "gb_per_s_best": round(moved / min(elapsed) / 1e9, 3),
        "ms_median": round(statistics.median(elapsed) * 1e3, 3),
    }


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
