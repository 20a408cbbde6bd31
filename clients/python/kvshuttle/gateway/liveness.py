"""Engines that hang: they neither answer a leg nor refuse it, and would hold it to its timeout.

A leg may take minutes and an engine that computes says nothing meanwhile, so silence alone proves
nothing. While legs wait for an engine, its /health is asked; one that has said nothing at all for
`engine_hang_s`, to a probe or within an answer, is taken for hung, and its legs are given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
import structlog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = ["Liveness", "Watch"]

log = structlog.get_logger(__name__)

# So many probes go unanswered before an engine is given up, whatever `engine_hang_s` is.
_PROBES = 4


@dataclass(eq=False)
class Watch:
    """A leg that waits. Its owner keeps `scope` up to date; `hung` tells why it expired."""

    scope: asyncio.Timeout | None = None
    hung: bool = False
    _heard: Callable[[], None] = lambda: None

    def heard(self) -> None:
        """Bytes of the engine have come."""
        self._heard()

    def give_up(self) -> None:
        """Ends the wait now."""
        self.hung = True
        if self.scope is not None:
            # RuntimeError: nothing is awaited at this moment; the next probe comes again.
            with contextlib.suppress(RuntimeError):
                self.scope.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class _Engine:
    """An engine that somebody waits for."""

    watches: set[Watch] = field(default_factory=set)
    heard: float = field(default_factory=time.monotonic)
    prober: asyncio.Task[None] | None = None

    def note(self) -> None:
        self.heard = time.monotonic()


class Liveness:
    """Watches the engines that legs wait for; costs nothing for others."""

    def __init__(self, probe: Callable[[str], Awaitable[object]], hang_s: float) -> None:
        """`probe` asks the engine at a base URL for anything; it raises httpx.HTTPError."""
        self._probe = probe
        self._hang_s = hang_s
        self._engines: dict[str, _Engine] = {}

    @contextlib.contextmanager
    def watch(self, url: str) -> Iterator[Watch]:
        """For the time that a leg waits for the engine at `url`."""
        engine = self._engines.get(url)
        if engine is None:
            engine = self._engines[url] = _Engine()
            engine.prober = asyncio.create_task(self._keep_asking(url, engine), name="probe")
        watch = Watch(_heard=engine.note)
        engine.watches.add(watch)
        try:
            yield watch
        finally:
            engine.watches.discard(watch)
            if not engine.watches and self._engines.get(url) is engine:
                del self._engines[url]
                if engine.prober is not None:
                    engine.prober.cancel()

    async def _keep_asking(self, url: str, engine: _Engine) -> None:
        pause = self._hang_s / _PROBES
        unanswered = 0
        while True:
            await asyncio.sleep(pause)
            if time.monotonic() - engine.heard < pause:
                unanswered = 0
                continue
            try:
                await self._probe(url)
            except httpx.HTTPError:
                unanswered += 1
            else:
                engine.note()
                continue
            # By probes too, not by time alone: this process may have been the one that stood still.
            if unanswered >= _PROBES and time.monotonic() - engine.heard >= self._hang_s:
                log.warning("engine_hangs", url=url, legs=len(engine.watches))
                for watch in list(engine.watches):
                    watch.give_up()
                unanswered = 0
