"""A worker that waits for KV leaves its core alone: vLLM's own queue between engine and worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvshuttle.dataplane.limits import WORKER_LOOK_NS

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

WAIT_S = 30.0
FOR_EVER_S = 3_600.0
# One that rests looks a hundred times a second before it blocks, another some hundred thousand.
MANY_LOOKS = 1_000


class Worker:
    """As vLLM's: it reads step after step from a queue, and makes its connector in one of them."""

    def __init__(self, handle: Any, *, busy_s: float = 1.0) -> None:
        """`busy_s`: how long it looks for a step in a tight loop, if it does not rest."""
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self.rpc_broadcast_mq = MessageQueue.create_from_handle(handle, 0)
        self.got: list[str] = []
        self.looks = 0
        self.blocked = threading.Event()
        # Notices are lost while it is deaf.
        self.deaf = False
        self.asked_ms: list[int | None] = []
        self._watch(self.rpc_broadcast_mq._spin_condition)
        self.rpc_broadcast_mq._spin_condition.busy_loop_s = busy_s

    def _watch(self, condition: Any) -> None:
        wait, poller = condition.wait, condition.poller

        class Poller:
            def poll(_, timeout: int | None = None) -> Any:  # noqa: N805
                self.asked_ms.append(timeout)
                self.blocked.set()
                heard = poller.poll(timeout=timeout)
                return {} if self.deaf else heard

        def looked(*args: Any, **kwargs: Any) -> None:
            self.looks += 1
            wait(*args, **kwargs)

        condition.wait = looked
        condition.poller = Poller()

    def make_connector(self) -> Callable[[], None]:
        from kvshuttle.dataplane.vllm_compat import worker_rest

        return worker_rest()

    def run(self, rests: bool) -> None:
        """One step in which nothing is computed, and the next."""
        rest = self.make_connector()
        for _ in range(2):
            message = self.rpc_broadcast_mq.dequeue(timeout=WAIT_S)
            self.looks = 0
            self.asked_ms.clear()
            self.blocked.clear()
            if rests:
                rest()
            self.got.append(message)


def connected(*, busy_s: float) -> tuple[Any, Worker]:
    """An engine's queue, and a worker that reads it."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    queue = MessageQueue(1, 1)
    worker = Worker(queue.export_handle(), busy_s=busy_s)
    ready = threading.Thread(target=queue.wait_until_ready)
    ready.start()
    worker.rpc_broadcast_mq.wait_until_ready()
    ready.join()
    return queue, worker


def take_first(queue: Any, worker: Worker, thread: threading.Thread) -> None:
    """The first step, taken by the worker that runs in this thread."""
    queue.enqueue("first")
    while not worker.got:
        thread.join(0.01)
        assert thread.is_alive()


@pytest.mark.parametrize("rests", [True, False])
def test_after_an_idle_step_a_worker_blocks_until_the_next(rests: bool) -> None:
    # For as long as it would be busy: here until the test is over.
    queue, worker = connected(busy_s=FOR_EVER_S)
    thread = threading.Thread(target=worker.run, args=(rests,))
    thread.start()
    try:
        take_first(queue, worker, thread)
        if rests:
            assert worker.blocked.wait(WAIT_S)
            assert worker.looks <= MANY_LOOKS
        else:
            end = time.monotonic() + WAIT_S
            while worker.looks <= MANY_LOOKS:
                assert time.monotonic() < end
                thread.join(0.01)
            assert not worker.blocked.is_set()
        queue.enqueue("second")
        thread.join(WAIT_S)
        assert worker.got == ["first", "second"]
    finally:
        thread.join(WAIT_S)


def test_a_step_is_seen_though_its_notice_is_lost() -> None:
    """As one can be that comes when its reader has just blocked: seen here at 1 of 200 steps that
    came half a millisecond after an idle one. vLLM looks again by itself after five seconds."""
    queue, worker = connected(busy_s=FOR_EVER_S)
    worker.deaf = True
    thread = threading.Thread(target=worker.run, args=(True,))
    thread.start()
    try:
        take_first(queue, worker, thread)
        assert worker.blocked.wait(WAIT_S)
        asked_ms = worker.asked_ms
        assert asked_ms[-1] == WORKER_LOOK_NS // 1_000_000
        queue.enqueue("second")
        thread.join(WAIT_S)
        assert worker.got == ["first", "second"]
    finally:
        thread.join(WAIT_S)


def test_a_worker_that_computes_looks_for_its_next_step_as_ever() -> None:
    """It rests after the step that it is told to rest after, and after no other."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    queue = MessageQueue(1, 1)
    worker = Worker(queue.export_handle())
    condition = worker.rpc_broadcast_mq._spin_condition
    rest = worker.make_connector()
    condition.record_read()
    rest()
    condition.wait(timeout_ms=5_000)
    assert worker.blocked.is_set()
    worker.blocked.clear()
    condition.record_read()
    condition.wait(timeout_ms=5_000)
    assert not worker.blocked.is_set()


def test_without_a_worker_process_there_is_nothing_to_rest() -> None:
    from kvshuttle.dataplane.vllm_compat import worker_rest

    worker_rest()()
