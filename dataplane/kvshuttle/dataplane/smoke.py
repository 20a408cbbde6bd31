"""Moves blocks between two processes on this machine, exactly as two engines would.

    python -m kvshuttle.dataplane.smoke                      DRAM over UCX
    python -m kvshuttle.dataplane.smoke --memory VRAM        two GPUs (or one) over UCX
    python -m kvshuttle.dataplane.smoke --memory VRAM --backend LIBFABRIC      over EFA

Run it before a deployment: it uses the agent's own mover, so that what it says of NIXL, its backend
and the memory type holds for the engines too. It ends with one JSON line; exit status 0 means that
every byte arrived. Without a GPU only DRAM can be run; the VRAM and LIBFABRIC paths are untested
until somebody runs this on such a machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq

from kvshuttle.dataplane import huge_pages
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, boottime_ns
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.mover import Mover
from kvshuttle.dataplane.transport import LocalRegion, TransportError

__all__ = ["main"]

NUM_BLOCKS = 512
LAYERS = 8


class _End:
    """One process's mover over tensors of its own."""

    def __init__(self, name: str, device: str, backend: str, block_bytes: int) -> None:
        self.tensors = [
            torch.zeros((NUM_BLOCKS, block_bytes), dtype=torch.uint8, device=device)
            for _ in range(LAYERS)
        ]
        index = self.tensors[0].device.index or 0
        on_host = self.tensors[0].device.type == "cpu"
        regions = [
            LocalRegion(
                f"layer{i}",
                t.data_ptr(),
                block_bytes,
                NUM_BLOCKS,
                "DRAM" if on_host else "VRAM",
                0 if on_host else index,
            )
            for i, t in enumerate(self.tensors)
        ]

        huge_pages.advise(huge_pages.in_host_memory(regions), boottime_ns)

        def bind() -> None:
            if not on_host:
                torch.cuda.set_device(index)

        self.mover = Mover(
            0,
            f"smoke-{name}",
            regions,
            backend=backend,
            backend_params={},
            faults=Faults(),
            bind_device=bind,
        )
        self.endpoint = self.mover.start()
        context = zmq.Context()
        self.orders = context.socket(zmq.PUSH)
        self.orders.connect(self.endpoint.command_address)
        self.events = context.socket(zmq.PULL)
        self.events.connect(self.endpoint.event_address)

    def order(self, message: m.ToMover) -> None:
        self.orders.send(m.encode(message))

    def meet(self, name: str, peer: Any) -> None:
        regions = [
            m.PeerRegion(r.base, r.block_bytes, r.memory_type, r.device_id, r.num_blocks)
            for r in peer.regions
        ]
        self.order(m.AddPeer(name, 1, peer.agent_name, peer.agent_metadata, regions))

    def event(self, kind: type[m.FromMover], seconds: float = 30) -> m.FromMover:
        end = boottime_ns() + int(seconds * NS)
        while (left := end - boottime_ns()) > 0:
            if self.events.poll(left // 1_000_000 + 1):
                message = m.decode_from_mover(self.events.recv())
                if isinstance(message, kind):
                    return message
        raise TransportError(f"no {kind.__name__} within {seconds} s")


def _source(pipe: Connection, device: str, backend: str, block_bytes: int) -> None:
    try:
        end = _End("source", device, backend, block_bytes)
        for layer, tensor in enumerate(end.tensors):
            for block in range(NUM_BLOCKS):
                tensor[block] = (block + layer) % 251
        pipe.send(end.endpoint)
        end.meet("reader", pipe.recv())
        end.event(m.PeerReady)
        while (lease := pipe.recv()) is not None:
            end.order(m.Serve(lease, boottime_ns() + 30 * NS))
            pipe.send("serving")
        end.mover.shutdown()
    except Exception as error:
        pipe.send(error)


def run(device: str, backend: str, block_bytes: int, rounds: int) -> dict[str, Any]:
    """Reads a third of the source's blocks ``rounds`` times and checks every byte of them.

    Raises :class:`TransportError` with NIXL's reason where it cannot be done.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    far = device if device == "cpu" or torch.cuda.device_count() < 2 else "cuda:1"
    process = context.Process(target=_source, args=(theirs, far, backend, block_bytes), daemon=True)
    process.start()
    try:
        end = _End("reader", device, backend, block_bytes)
        peer = ours.recv()
        if isinstance(peer, Exception):
            raise TransportError(f"the source: {peer}")
        ours.send(end.endpoint)
        end.meet("source", peer)
        ready = end.event(m.PeerReady)
        assert isinstance(ready, m.PeerReady)
        if ready.error:
            raise TransportError(ready.error)
        remote = [b for b in range(NUM_BLOCKS) if b % 3]
        local = remote[::-1]
        rates: list[float] = []
        for i in range(rounds):
            lease = f"smoke-{i}"
            ours.send(lease)
            ours.recv()
            deadline = boottime_ns() + 30 * NS
            end.order(m.Read(lease, lease, "source", 1, local, remote, deadline, True))
            ended = end.event(m.ReadEnded)
            assert isinstance(ended, m.ReadEnded)
            if not ended.published:
                raise TransportError(f"round {i}: {ended.reason}")
            rates.append(ended.bytes_moved / ended.transfer_ns)
        for layer, tensor in enumerate(end.tensors):
            got = tensor.cpu()
            for mine, its in zip(local, remote, strict=True):
                if not bool((got[mine] == (its + layer) % 251).all()):
                    raise TransportError(f"layer {layer}, block {its}: wrong bytes arrived")
        ours.send(None)
        end.mover.shutdown()
        return {
            "ok": True,
            "backend": backend,
            "device": device,
            "rounds": rounds,
            "bytes_a_round": len(local) * LAYERS * block_bytes,
            "gb_per_s_median": round(statistics.median(rates), 3),
        }
    finally:
        process.join(5)
        process.kill()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m kvshuttle.dataplane.smoke",
        description="Moves blocks between two processes with NIXL and checks every byte.",
    )
    parser.add_argument("--memory", choices=["DRAM", "VRAM"], default="DRAM")
    parser.add_argument("--backend", default="UCX", help="NIXL plugin: UCX or LIBFABRIC (EFA)")
    parser.add_argument("--block-kib", type=int, default=64, help="bytes of a block and layer, KiB")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.memory == "VRAM" and not torch.cuda.is_available():
        sys.stderr.write("--memory VRAM: torch sees no GPU; run this where the engines run\n")
        return 2
    device = "cpu" if arguments.memory == "DRAM" else "cuda:0"
    try:
        result = run(device, arguments.backend, arguments.block_kib * 1024, arguments.rounds)
    except TransportError as error:
        sys.stderr.write(f"{error}\n")
        sys.stdout.write(json.dumps({"ok": False, "error": str(error)}) + "\n")
        return 1
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
