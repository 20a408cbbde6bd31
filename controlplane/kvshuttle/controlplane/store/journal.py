"""Group commit: while one commit runs, what queues up becomes the next one.

So a burst of events costs a few syncs, not one each, and a lone event waits for its own sync only.
Every entry is released after it is durable, in the order in which it was appended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvshuttle.controlplane.model.effects import Record
    from kvshuttle.controlplane.store.base import Store

__all__ = ["Journal"]

Entry = tuple["Sequence[Record]", "Callable[[], None]"]
BATCH_RECORDS = 5_000
"""Records in one transaction: keeps a burst from delaying the first of it by more than some tens
of ms."""


class Journal:
    """Belongs to one event loop; the writer is a thread of its own, because a sync blocks.

    `failed` is called once, on the loop, when a commit fails: nothing is released after that.
    """

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],
        committed: Callable[[int, float], None] | None = None,
    ) -> None:
        self._store = store
        self._loop = loop
        self._failed = failed
        self._committed = committed
        self._queue: deque[Entry] = deque()
        self._condition = threading.Condition()
        self._pending = 0
        self._closing = False
        self._broken = False
        self._thread: threading.Thread | None = None
        if store.durable:
            self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
            self._thread.start()

    def append(self, records: Sequence[Record], release: Callable[[], None]) -> None:
        """Calls `release` on the loop once the records, and everything appended before, are
        durable; at once if there is nothing to wait for."""
        if self._broken:
            return
        if self._thread is None:
            try:
                self._store.commit(records)
            except Exception as error:
                self._broken = True
                self._failed(error)
                return
            release()
        elif not records and not self._pending:
            release()
        else:
            self._pending += 1
            with self._condition:
                self._queue.append((records, release))
                self._condition.notify()

    def _write(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closing:
                    self._condition.wait()
                if not self._queue:
                    return
                batch: list[Entry] = []
                count = 0
                while self._queue and count < BATCH_RECORDS:
                    entry = self._queue.popleft()
                    count += len(entry[0])
                    batch.append(entry)
            began = self._loop.time()
            try:
                if count:
                    self._store.commit([record for records, _ in batch for record in records])
            except Exception as error:
                self._loop.call_soon_threadsafe(self._fail, error)
                return
            self._loop.call_soon_threadsafe(self._release, batch, count, self._loop.time() - began)

    def _fail(self, error: BaseException) -> None:
        self._broken = True
        self._failed(error)

    def _release(self, batch: list[Entry], count: int, seconds: float) -> None:
        if self._committed is not None and count:
            self._committed(count, seconds)
        for _, release in batch:
            self._pending -= 1
            release()

    async def close(self) -> None:
        """Writes what is queued, releases it, and ends the thread. The store stays open."""
        if self._thread is None:
            return
        with self._condition:
            self._closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)
        # The last releases were scheduled before the thread ended.
        await asyncio.sleep(0)
        self._thread = None
