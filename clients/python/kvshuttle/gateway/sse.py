"""Passing a server-sent-event stream through, event by event, byte for byte but for its usage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.gateway import limits
from kvshuttle.gateway.body import TRANSFER_PARAMS as _INSIDE
from kvshuttle.gateway.jsonspans import with_nulls
from kvshuttle.gateway.usage import with_true_usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvshuttle.gateway.dialects import Dialect, Usage

__all__ = ["EventPassthrough", "EventTooLongError"]

_BOUNDARIES = (b"\n\n", b"\r\n\r\n")
# A boundary that ends in a new piece may have begun so far before it.
_OVERLAP = max(map(len, _BOUNDARIES)) - 1


class EventTooLongError(Exception):
    """An event of the engine's is longer than the gateway keeps back."""


class EventPassthrough:
    """Cuts what arrives at event boundaries, and notes what the turn's accounting needs.

    An event that has only begun is kept back: if the engine dies inside it, the client gets a
    well-formed error event instead of half an event.
    """

    def __init__(self, dialect: Dialect, found: Callable[[], Usage | None] = lambda: None) -> None:
        """`found` is asked at each usage that comes by: what the prefill leg found, if known."""
        self._dialect = dialect
        self._found = found
        self._rest = bytearray()
        self.usage: Usage | None = None
        # What was passed on last, whole events.
        self.last = b""
        # The first token, the regular end, an error.
        self.saw_data = False
        self.saw_done = False
        self.saw_error = False

    @property
    def ended(self) -> bool:
        """Whether the engine has said all that it says in a stream."""
        return self.saw_done or (self.saw_error and self._dialect.error_ends)

    def feed(self, chunk: bytes) -> bytes:
        """What may be sent on: complete events only, possibly none. Raises EventTooLongError."""
        rest = self._rest
        # What is kept back has no boundary in it: only what is new is looked through.
        start = max(0, len(rest) - _OVERLAP)
        rest += chunk
        end = max(
            (at + len(mark) for mark in _BOUNDARIES if (at := rest.rfind(mark, start)) >= 0),
            default=0,
        )
        ready = bytes(rest[:end])
        del rest[:end]
        if len(rest) > limits.EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {limits.EVENT_BYTES} bytes")
        return self._noted(ready) if ready else ready

    def finish(self) -> bytes:
        """What is left at the regular end of the stream."""
        rest, self._rest = bytes(self._rest), bytearray()
        return self._noted(rest) if rest else rest

    def _noted(self, events: bytes) -> bytes:
        dialect = self._dialect
        if not self.saw_data:
            # What comes before the first token (keep-alives, say) is none.
            self.saw_data = dialect.begun.search(events) is not None
        self.saw_error = self.saw_error or dialect.error.search(events) is not None
        self.saw_done = self.saw_done or dialect.end.search(events) is not None
        if b'"usage"' in events or b'_transfer_params"' in events:
            events = b"".join(map(self._for_client, events.splitlines(keepends=True)))
        self.last = events
        return events

    def _for_client(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        data = line[len(b"data:") :]
        if b'_transfer_params"' in data:
            # What the engine says about the transfer is not for clients.
            data = with_nulls(
                data,
                [(*path[:-1], name) for path in self._dialect.usage_paths for name in _INSIDE],
            )
        data, usage = with_true_usage(data, self._dialect, self._found())
        self.usage = usage or self.usage
        return b"data:" + data
