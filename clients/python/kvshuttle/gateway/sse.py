"""Passing a server-sent-event stream through, event by event, without changing a byte."""

from __future__ import annotations

import json
from typing import Any

# How vLLM says within a stream that it cannot go on; quotes within a token's text are escaped.
ERROR_EVENT = b'data: {"error"'

_BOUNDARIES = (b"\n\n", b"\r\n\r\n")


class EventPassthrough:
    """Cuts what arrives at event boundaries, and notes what the turn's accounting needs.

    An event that has only begun is kept back: if the engine dies inside it, the client gets a
    well-formed error event instead of half an event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.usage: dict[str, Any] | None = None
        self.saw_data = False
        self.saw_done = False
        self.saw_error = False

    def feed(self, chunk: bytes) -> bytes:
        """What may be sent on: complete events only, possibly none."""
        data = self._rest + chunk if self._rest else chunk
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _BOUNDARIES)
        ready, self._rest = data[:end], data[end:]
        if ready:
            self._note(ready)
        return ready

    def finish(self) -> bytes:
        """What is left at the regular end of the stream."""
        rest, self._rest = self._rest, b""
        if rest:
            self._note(rest)
        return rest

    def _note(self, events: bytes) -> None:
        if not self.saw_data:
            # Comments (keep-alives) before the first token are not tokens.
            self.saw_data = events.startswith(b"data:") or b"\ndata:" in events
        self.saw_error |= ERROR_EVENT in events
        has_usage = b'"usage"' in events
        if not has_usage and b"[DONE]" not in events:
            return
        for line in events.splitlines():
            if not line.startswith(b"data:"):
                continue
            payload = line[len(b"data:") :].strip()
            if payload == b"[DONE]":
                self.saw_done = True
            elif has_usage and b'"usage"' in payload:
                self.usage = usage_of(payload) or self.usage


def usage_of(raw: bytes) -> dict[str, Any] | None:
    """The `usage` object of a response or chunk, if it has one."""
    try:
        fields = json.loads(raw)
    except ValueError:
        return None
    usage = fields.get("usage") if isinstance(fields, dict) else None
    return usage if isinstance(usage, dict) else None


def error_event(body: bytes) -> bytes:
    """An event that OpenAI's clients raise as an error."""
    return b"data: " + body + b"\n\n"
