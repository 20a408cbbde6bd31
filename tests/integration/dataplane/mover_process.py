"""A worker process with a mover over plain memory: the far end in the tests of the mover.

Run as ``python -m tests.integration.dataplane.mover_process``. Speaks JSON lines on its standard
streams: prints its endpoint first, then obeys ``{"order": <base64 msgpack>}``,
``{"fill": [block, value]}``, ``{"fill_head": [block, head, value]}``, ``{"peek": block}``,
``{"peek_heads": block}``, ``{"results": true}``,
``{"events": seconds}``, and as vLLM's worker thread would ``{"step": <base64 msgpack>}``,
``{"layer": number}`` and ``{"step_over": true}``.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import msgspec
import numpy as np
import zmq

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.mover import Mover
from kvshuttle.dataplane.transport import LocalRegion

NUM_BLOCKS = 64
HEAD_BYTES = 1024
BLOCK_BYTES = 4 * HEAD_BYTES
LAYERS = 3


def main() -> None:
    """Serves until its input ends."""
    faults: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    heads = int(sys.argv[2]) if len(sys.argv) > 2 else BLOCK_BYTES // HEAD_BYTES
    block_bytes = heads * HEAD_BYTES
    memory = [np.zeros((NUM_BLOCKS, block_bytes), dtype=np.uint8) for _ in range(LAYERS)]
    regions = [
        LocalRegion(f"layer{i}", a.ctypes.data, block_bytes, NUM_BLOCKS, "DRAM", 0)
        for i, a in enumerate(memory)
    ]
    mover = Mover(
        0,
        f"test-{np.random.default_rng().integers(1 << 60)}",
        regions,
        backend="UCX",
        backend_params={},
        faults=Faults.from_config(faults),
        bind_device=lambda: None,
    )
    endpoint = mover.start()
    context = zmq.Context()
    orders = context.socket(zmq.PUSH)
    orders.connect(endpoint.command_address)
    events = context.socket(zmq.PULL)
    events.connect(endpoint.event_address)

    def say(value: object) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    say(
        {
            "name": endpoint.agent_name,
            "metadata": base64.b64encode(endpoint.agent_metadata).decode(),
            "regions": [[r.base, r.block_bytes, "DRAM", 0, r.num_blocks] for r in regions],
        }
    )
    for line in sys.stdin:
        command = json.loads(line)
        if "order" in command:
            orders.send(base64.b64decode(command["order"]))
            say("ok")
        elif "fill" in command:
            block, value = command["fill"]
            for layer, array in enumerate(memory):
                array[block] = value + layer
            say("ok")
        elif "fill_head" in command:
            block, head, value = command["fill_head"]
            for layer, array in enumerate(memory):
                array[block].reshape(heads, HEAD_BYTES)[head] = value + layer
            say("ok")
        elif "peek_heads" in command:
            # Every byte of a head is the same, or it is -1.
            pages = [a[command["peek_heads"]].reshape(heads, HEAD_BYTES) for a in memory]
            say([[int(h[0]) if (h == h[0]).all() else -1 for h in page] for page in pages])
        elif "peek" in command:
            say([int(a[command["peek"]].sum()) for a in memory])
        elif "step" in command:
            chunks = msgspec.msgpack.decode(
                base64.b64decode(command["step"]), type=list[m.PushChunk]
            )
            mover.begin_step(chunks)
            say("ok")
        elif "layer" in command:
            mover.layer_final(f"layer{command['layer']}")
            say("ok")
        elif "step_over" in command:
            mover.end_step()
            say("ok")
        elif "results" in command:
            finished, failed = mover.take_results()
            say([sorted(finished), sorted(failed)])
        elif "events" in command:
            if events.poll(int(command["events"] * 1000)):
                message = m.decode_from_mover(events.recv())
                say(
                    [
                        type(message).__name__,
                        {f: getattr(message, f) for f in message.__struct_fields__},
                    ]
                )
            else:
                say(None)
    mover.shutdown()


if __name__ == "__main__":
    main()
