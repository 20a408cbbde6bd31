"""How long to wait before the next try to connect."""

from __future__ import annotations

import random

from kvshuttle.dataplane.limits import RECONNECT_MAX_S, RECONNECT_MIN_S

__all__ = ["Backoff"]


class Backoff:
    """Doubles with every try, up to a bound; each pause is drawn between nothing and that much
    (full jitter), so that after a restart of the control plane its agents do not come in one
    instant. Seconds."""

    def __init__(self, least: float = RECONNECT_MIN_S, most: float = RECONNECT_MAX_S) -> None:
        self._least, self._most = least, most
        self._next = least

    def pause(self) -> float:
        """The next pause."""
        most, self._next = self._next, min(self._next * 2, self._most)
        return random.uniform(0, most)  # noqa: S311

    def worked(self, seconds: float) -> None:
        """A connection lasted so long. One that ended at once is no reason to hurry."""
        if seconds >= self._most:
            self._next = self._least
