"""When a mover calls into NIXL, which costs its core: while a lease of its is open, and then less
and less often while nothing happens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import zmq

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, boottime_ns
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.limits import POLL_MAX_SERVING_NS, POLL_MIN_NS
from kvshuttle.dataplane.mover import Mover
from kvshuttle.dataplane.transport import LocalRegion

pytest.importorskip("nixl._api", reason="NIXL is installed with the engines", exc_type=ImportError)
pytestmark = pytest.mark.engines

WAIT_S = 20.0


@dataclass
class Watched:
    """A mover with nobody around it, and how long it slept before each call."""

    mover: Mover
    orders: zmq.Socket[bytes]
    slept_ns: list[int] = field(default_factory=list)

    def order(self, message: m.ToMover) -> None:
        self.orders.send(m.encode(message))

    def until(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < end, f"still not so: {what}"
            time.sleep(0.01)


@pytest.fixture
def watched() -> Iterator[Watched]:
    memory = np.zeros((4, 4096), dtype=np.uint8)
    mover = Mover(
        0,
        "watched",
        [LocalRegion("layer0", memory.ctypes.data, 4096, 4, "DRAM", 0)],
        backend="UCX",
        backend_params={},
        faults=Faults(),
        bind_device=lambda: None,
    )
    endpoint = mover.start()
    context = zmq.Context()
    orders = context.socket(zmq.PUSH)
    orders.connect(endpoint.command_address)
    found = Watched(mover, orders)
    notices = mover._transport.notices

    def asked() -> list[tuple[str, bytes]]:
        found.slept_ns.append(mover._interval_ns)
        return notices()

    mover._transport.notices = asked  # type: ignore[method-assign]
    yield found
    found.order(m.Stop())
    mover._thread.join(WAIT_S)
    mover.shutdown()
    # A mover's own sockets end with its process.
    for socket in (orders, mover._commands, mover._events):
        socket.close(0)
    mover._commands.context.term()
    context.term()
    os.close(mover._nudge)


def test_an_idle_mover_is_woken_by_orders_only(watched: Watched) -> None:
    watched.order(m.Unserve("none"))
    watched.until(lambda: bool(watched.slept_ns), "the order is obeyed")
    seen = len(watched.slept_ns)
    time.sleep(0.5)
    assert len(watched.slept_ns) == seen


def test_one_that_serves_calls_in_less_and_less_often(watched: Watched) -> None:
    watched.order(m.Serve("lease", boottime_ns() + 60 * NS))
    watched.until(lambda: watched.mover._interval_ns == POLL_MAX_SERVING_NS, "it has slowed down")
    often = list(watched.slept_ns)
    assert often[0] <= POLL_MIN_NS * 2
    assert often == sorted(often)
    # And not at all when the lease is over.
    watched.order(m.Unserve("lease"))
    watched.until(lambda: not watched.mover._transfers.busy, "nothing is served any more")
    time.sleep(POLL_MAX_SERVING_NS / NS * 2)
    seen = len(watched.slept_ns)
    time.sleep(0.5)
    assert len(watched.slept_ns) == seen
