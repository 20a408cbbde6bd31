"""A worker that waits for KV leaves its core alone: vLLM's own queue between engine and worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed with the engines", exc_type=ImportError)
pytestmark = [
    pytest.mark.engines,
    # torch and vLLM warn of themselves when they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

WAIT_S = 30.0


class Worker:
    """As vLLM's: it reads step after step from a queue, and makes its connector in one of them."""

    def __init__(self, handle: Any) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self.rpc_broadcast_mq = MessageQueue.create_from_handle(handle, 0)
        self.got: list[str] = []
        self.looks = 0
        self.blocked = threading.Event()
        self._watch(self.rpc_broadcast_mq._spin_condition)

    def _watch(self, condition: Any) -> None:
        wait, poller = condition.wait, condition.poller

        class Poller:
            def poll(_, timeout: int | None = None) -> Any:  # noqa: N805
                self.blocked.set()
                return poller.poll(timeout=timeout)

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
            self.blocked.clear()
            if rests:
                rest()
            self.got.append(message)


@pytest.mark.parametrize("rests", [True, False])
def test_after_an_idle_step_a_worker_blocks_until_the_next(rests: bool) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    queue = MessageQueue(1, 1)
    worker = Worker(queue.export_handle())
    ready = threading.Thread(target=queue.wait_until_ready)
    ready.start()
    worker.rpc_broadcast_mq.wait_until_ready()
    ready.join()
    thread = threading.Thread(target=worker.run, args=(rests,))
    thread.start()
    try:
        queue.enqueue("first")
        while not worker.got:
            thread.join(0.01)
            assert thread.is_alive()
        # Without a rest it comes to this after a second of looking.
        assert worker.blocked.wait(WAIT_S)
        looks = worker.looks
        queue.enqueue("second")
        thread.join(WAIT_S)
        assert worker.got == ["first", "second"]
        # The notice of the first step may come only now: one look more.
        assert (looks <= 2) is rests
    finally:
        thread.join(WAIT_S)


def test_without_a_worker_process_there_is_nothing_to_rest() -> None:
    from kvshuttle.dataplane.vllm_compat import worker_rest

    worker_rest()()
