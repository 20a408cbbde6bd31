"""When a call that failed is made again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from kvshuttle.client.errors import KVShuttleError, ResourceExhaustedError, UnavailableError

__all__ = ["NO_RETRIES", "Attempts", "RetryPolicy"]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after which pauses in seconds: doubled from the first up to the last, with
    jitter, and never shorter than the server asked for.

    Only what is safe and may help is tried again: a call that no server answered or that the server
    cannot serve now, and one over a quota for which the server says when there will be room. Reads
    change nothing, and a mutation goes again with its own `request_id`, so that it takes effect
    once whatever became of the first try. All tries are within the call's one deadline. Watches
    are not resumed: only their reader knows what it has seen.
    """

    attempts: int = 4
    first_pause_s: float = 0.1
    last_pause_s: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"retries: attempts is {self.attempts}; give 1 for no second try")

    def pause_s(self, attempt: int, error: KVShuttleError) -> float | None:
        """The pause after the failed `attempt` (from 1), without jitter; None: give up."""
        if attempt >= self.attempts:
            return None
        if isinstance(error, ResourceExhaustedError):
            if error.retry_after_s is None:
                return None
        elif not isinstance(error, UnavailableError):
            return None
        pause = min(self.first_pause_s * 2.0 ** (attempt - 1), self.last_pause_s)
        return max(pause, error.retry_after_s or 0.0)


NO_RETRIES = RetryPolicy(attempts=1)
"""For a caller that has its own."""


class Attempts:
    """The tries of one call. `timeout_s` is for all of them."""

    def __init__(self, policy: RetryPolicy, timeout_s: float) -> None:
        self._policy = policy
        self._until = time.monotonic() + timeout_s
        self._made = 0

    @property
    def remaining_s(self) -> float:
        """Of the deadline; the next try's."""
        return max(self._until - time.monotonic(), 0.0)

    def pause_after(self, error: KVShuttleError) -> float:
        """How long to wait, in seconds, before the next try. Raises `error` if there is none."""
        self._made += 1
        pause = self._policy.pause_s(self._made, error)
        if pause is None:
            raise error
        # Clients that lost the same server do not all come back at once.
        pause *= random.uniform(1.0, 1.25)  # noqa: S311
        if pause >= self.remaining_s:
            raise error
        return pause
