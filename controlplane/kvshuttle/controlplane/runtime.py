"""Runs events through the registry and lets their effects out once they are durable.

Everything happens on one event loop. The order in which effects leave is the order in which events
were applied, so a command that an event caused is on its agent's stream before the caller of that
event has its answer. Only what asks and promises nothing leaves sooner: see `ahead`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvshuttle.controlplane.model.commands import ExpectTurn, Harden
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

    Addressed = tuple[WorkerRef, Command]

__all__ = ["AgentStreams", "Observer", "Runtime", "Watchers", "ahead"]

T = TypeVar("T")
BURST_PAUSE = 2
"""Pauses between the ticks of a burst, in durations of one."""
STOPPING = "the control plane is stopping: its store failed, or another one has taken over"


def ahead(
    commands: Sequence[Addressed], reaches: Callable[[WorkerRef], bool]
) -> tuple[list[Addressed], Sequence[Addressed]]:
    """What of an event's commands may leave before its records are durable, and what may not.

    A Harden asks a source to hold a range and to say where it lies; nobody may read it before the
    Grant, which leaves when the lease and all before it are durable. If the process dies first, the
    source holds for a lease that no store knows, as it does after any lost answer, until its own
    deadline (`source-unknown`); the number of the lease is never given again, since the epoch is
    not. The ExpectTurns of the same turn go with it, to be one message; nobody comes with a token
    that no gateway was given. One that announces a push does not: what a landing zone holds has no
    deadline. So a grant waits for one commit instead of two in a row.

    `reaches`: whether a boot's newest stream is attached. What overtakes a hello would go to the
    stream before it, and be lost.
    """
    if not any(isinstance(command, Harden) for _, command in commands):
        return [], commands
    now: list[Addressed] = []
    later: list[Addressed] = []
    for ref, command in commands:
        asks = isinstance(command, Harden) or (
            isinstance(command, ExpectTurn) and command.push is None
        )
        (now if asks and reaches(ref) else later).append((ref, command))
    return now, later


class AgentStreams(Protocol):
    """Where commands go."""

    def reaches(self, ref: WorkerRef, generation: int) -> bool:
        """Whether this stream of a boot is the one that commands go to."""
        ...

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
        commands: Sequence[Addressed] = effects.commands
        epoch = self.registry.state.epoch
        # A lease of an epoch that could be used again after a crash must not be heard of.
        if commands and epoch == self.epoch:
            now, commands = ahead(commands, self._reaches)
            if now:
                self._streams.deliver(now)

        def release() -> None:
            if self.failed.done():
                return
            self.epoch = epoch
            if attach is not None:
                attach(decision.result)
            if commands:
                self._streams.deliver(commands)
            for order in effects.disconnects:
                self._streams.disconnect(order)
            for change in effects.changes:
                self._watchers.publish(change)
            for fact in effects.facts:
                self._observer.fact(fact)
            if done is not None:
                done(decision.result)

        self._journal.append(effects.records, release)

    def _reaches(self, ref: WorkerRef) -> bool:
        worker = self.registry.state.workers.get(ref.worker_id)
        return worker is not None and self._streams.reaches(ref, worker.stream_generation)

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
        """Feeds time to the registry until cancelled. While more is due than one tick takes, the
        next one follows when this one is durable and twice as long has passed as that took: what
        a burst costs is a third of the core at most, and less where grants wait for long."""
        registry, limits = self.registry, self.registry.limits
        loop = asyncio.get_running_loop()
        pause_s = limits.tick_ns / 1e9
        while True:
            asked_s = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            now_s = loop.time()
            self._observer.late(max(0.0, now_s - asked_s))
            pause_s = limits.tick_ns / 1e9
            if self.failed.done():
                continue
            if registry.behind(self.clock.now_ns()):
                with suppress(StoreError):
                    await self.apply(registry.tick)
                took_s = loop.time() - now_s
                pause_s = min(pause_s, max(limits.tick_behind_ns / 1e9, BURST_PAUSE * took_s))
            else:
                self.forget(registry.tick)

    async def close(self) -> None:
        """Makes durable and lets out what was applied."""
        await self._journal.close()
