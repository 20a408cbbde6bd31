"""Runs events through the registry and lets their effects out once they are durable.

Everything happens on one event loop. The order in which effects leave is the order in which events
were applied, so a command that an event caused is on its agent's stream before the caller of that
event has its answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvshuttle.controlplane.store.base import StoreError
from kvshuttle.controlplane.store.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvshuttle.controlplane.clock import Clock
    from kvshuttle.controlplane.model.commands import Command
    from kvshuttle.controlplane.model.effects import Change, Decision, Disconnect, Fact
    from kvshuttle.controlplane.model.errors import SupersededError
    from kvshuttle.controlplane.model.registry import Registry
    from kvshuttle.controlplane.model.terms import WorkerRef
    from kvshuttle.controlplane.store.base import Store

__all__ = ["AgentStreams", "Observer", "Runtime", "Watchers"]

T = TypeVar("T")
STOPPING = "the control plane is stopping: its store failed, or another one has taken over"


class AgentStreams(Protocol):
    """Where commands go."""

    def deliver(self, commands: Sequence[tuple[WorkerRef, Command]]) -> None:
        """Puts each command on its boot's stream, in order; drops it if there is none."""
        ...

    def disconnect(self, order: Disconnect) -> None:
        """Ends a stream after what is queued on it."""
        ...


class Watchers(Protocol):
    """Where changes go."""

    def publish(self, change: Change) -> None:
        """One change, in order."""
        ...


class Observer(Protocol):
    """Logs and metrics."""

    def fact(self, fact: Fact) -> None:
        """Something happened, and is durable."""
        ...

    def committed(self, records: int, seconds: float) -> None:
        """A commit to a durable store."""
        ...

    def late(self, seconds: float) -> None:
        """The event loop woke up so much later than asked."""
        ...


class Runtime:
    """`failed` is set, with the error, when the process must end: when the store cannot be written
    (what is in memory is ahead of the disk for good), or when another control plane has taken
    over. Nothing is let out from then on."""

    def __init__(
        self,
        registry: Registry,
        store: Store,
        clock: Clock,
        streams: AgentStreams,
        watchers: Watchers,
        observer: Observer,
    ) -> None:
        self.registry = registry
        self.clock = clock
        self.epoch = 0
        """The newest that is durable."""
        self._streams = streams
        self._watchers = watchers
        self._observer = observer
        self._waiting: set[asyncio.Future[Any]] = set()
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        self._journal = Journal(store, loop, self._fail, observer.committed)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        for future in self._waiting:
            if not future.done():
                future.set_exception(StoreError(f"the control plane is stopping: {error}"))
        self._waiting.clear()

    def step_down(self, error: SupersededError) -> None:
        """Another control plane has taken over: no grant leaves any more, not even one that is
        being written."""
        self._fail(error)

    def submit(
        self,
        event: Callable[[int], Decision[T]],
        done: Callable[[T], None] | None = None,
        attach: Callable[[T], None] | None = None,
    ) -> None:
        """Applies an event now. `attach` runs just before its effects leave, once they are
        durable, `done` just after. DomainErrors are raised at once, StoreError when the store has
        failed; if it fails later neither runs, and `failed` says so."""
        if self.failed.done():
            raise StoreError(STOPPING)
        decision = event(self.clock.now_ns())
        effects = decision.effects
        epoch = self.registry.state.epoch

        def release() -> None:
            if self.failed.done():
                return
            self.epoch = epoch
            if attach is not None:
                attach(decision.result)
            if effects.commands:
                self._streams.deliver(effects.commands)
            for order in effects.disconnects:
                self._streams.disconnect(order)
            for change in effects.changes:
                self._watchers.publish(change)
            for fact in effects.facts:
                self._observer.fact(fact)
            if done is not None:
                done(decision.result)

        self._journal.append(effects.records, release)

    def post(
        self,
        event: Callable[[int], Decision[T]],
        attach: Callable[[T], None] | None = None,
    ) -> asyncio.Future[T]:
        """Applies an event now; the future has its answer once its effects are durable and out.
        `attach` runs just before the effects leave. DomainErrors are raised at once."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T) -> None:
            self._waiting.discard(future)
            if not future.done():  # a caller that went away has cancelled it
                future.set_result(result)

        self._waiting.add(future)
        try:
            self.submit(event, done, attach)
        except StoreError as error:
            self._waiting.discard(future)
            future.set_exception(error)
        except BaseException:
            self._waiting.discard(future)
            raise
        return future

    def forget(
        self,
        event: Callable[[int], Decision[T]],
        attach: Callable[[T], None] | None = None,
    ) -> None:
        """Applies an event whose answer nobody needs; a store's failure is seen in `failed`."""
        if not self.failed.done():
            self.submit(event, None, attach)

    async def apply(
        self,
        event: Callable[[int], Decision[T]],
        attach: Callable[[T], None] | None = None,
    ) -> T:
        """`post`, and waits."""
        return await self.post(event, attach)

    async def settled(self) -> None:
        """Waits until everything applied so far is durable: a reader must not be shown what a
        crash could still undo."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)

        def release() -> None:
            self._waiting.discard(future)
            if not future.done():
                future.set_result(None)

        self._journal.append((), release)
        if self.failed.done():
            raise StoreError(STOPPING)
        await future

    async def run_ticks(self) -> None:
        """Feeds time to the registry until cancelled."""
        registry, limits = self.registry, self.registry.limits
        loop = asyncio.get_running_loop()
        while True:
            behind = registry.behind(self.clock.now_ns())
            pause_ns = limits.tick_behind_ns if behind else limits.tick_ns
            pause_s = min(pause_ns, limits.tick_ns) / 1e9
            asked_s = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            self._observer.late(max(0.0, loop.time() - asked_s))
            if not self.failed.done():
                self.forget(registry.tick)

    async def close(self) -> None:
        """Makes durable and lets out what was applied."""
        await self._journal.close()
