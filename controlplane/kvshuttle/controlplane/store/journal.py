"""Group commit: while one commit runs, what queues up becomes the next one.

So a burst of events costs a few syncs, not one each. A lone event waits for its own sync only: for
others to come it is kept waiting where the commit before has begun less than `SPACING_S` ago, and
so only where events come faster than that. Every entry is released after it is durable, in the
order in which it was appended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from queue import SimpleQueue
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
SPACING_S = 0.001
"""Between the starts of two commits. A commit costs as much CPU as the events of a turn, most of it
whatever it holds (the sync, and handing the interpreter to the writer and back); on a device that
syncs in a tenth of a millisecond a busy control plane would do little else."""


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
        # What the writer is to write; None ends it.
        self._jobs: SimpleQueue[list[Entry] | None] = SimpleQueue()
        self._writing = False
        self._next: asyncio.Handle | None = None
        self._began = 0.0
        self._broken = False
        self._idle = asyncio.Event()
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
                self._fail(error)
                return
            release()
        elif not records and not self._queue and not self._writing:
            release()
        else:
            self._queue.append((records, release))
            self._schedule()

    def _schedule(self) -> None:
        """The next commit, once the one before is over: after what else this turn of the loop
        brings, and not too soon after the one before."""
        if self._writing or self._next is not None:
            return
        wait_s = self._began + SPACING_S - self._loop.time()
        if wait_s > 0:
            self._next = self._loop.call_later(wait_s, self._begin)
        else:
            self._next = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._next = None
        batch: list[Entry] = []
        count = 0
        while self._queue and count < BATCH_RECORDS:
            entry = self._queue.popleft()
            count += len(entry[0])
            batch.append(entry)
        self._writing = True
        if count:
            self._began = self._loop.time()
            self._jobs.put(batch)
        else:
            self._release(batch, 0, 0.0)

    def _write(self) -> None:
        while (batch := self._jobs.get()) is not None:
            began = self._loop.time()
            records = [record for records, _ in batch for record in records]
            try:
                self._store.commit(records)
            except Exception as error:
                self._loop.call_soon_threadsafe(self._fail, error)
                return
            self._loop.call_soon_threadsafe(
                self._release, batch, len(records), self._loop.time() - began
            )

    def _fail(self, error: BaseException) -> None:
        self._broken = True
        self._queue.clear()
        self._idle.set()
        self._failed(error)

    def _release(self, batch: list[Entry], count: int, seconds: float) -> None:
        if self._committed is not None and count:
            self._committed(count, seconds)
        # Until the last of them has gone, nothing that comes of it may overtake the others.
        for _, release in batch:
            try:
                release()
            except Exception as error:  # a defect; the others must not wait for ever
                self._loop.call_exception_handler(
                    {"message": "an effect could not leave", "exception": error}
                )
        self._writing = False
        if self._queue:
            self._schedule()
        else:
            self._idle.set()

    async def close(self) -> None:
        """Writes what is queued, releases it, and ends the thread. The store stays open."""
        if self._thread is None:
            return
        while (self._queue or self._writing) and not self._broken:
            self._idle.clear()
            await self._idle.wait()
        if self._next is not None:
            self._next.cancel()
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        self._thread = None
