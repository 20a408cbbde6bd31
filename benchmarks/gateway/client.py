"""A client as thin as can be: what it costs is in every side's figures alike."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

__all__ = ["Connection", "Samples"]

_STAMP = b'"t":'


@dataclass
class Samples:
    """Nanoseconds."""

    first: list[int] = field(default_factory=list)
    # From an engine's writing of a token to its arrival, the first one left out.
    token: list[int] = field(default_factory=list)


class Connection:
    """One connection, kept open, one request at a time."""

    def __init__(self, url: str, session: str, prompt_chars: int) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._session = session
        self._prompt = "word " * (prompt_chars // 5)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        """Connects."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    def close(self) -> None:
        """Closes."""
        self._writer.close()

    async def ask(self, tokens: int, samples: Samples) -> None:
        """One streamed request. Raises RuntimeError for another status than 200."""
        body = json.dumps(
            {
                "model": "m",
                "stream": True,
                "max_tokens": tokens,
                "messages": [{"role": "user", "content": self._prompt}],
            }
        ).encode()
        started = time.monotonic_ns()
        self._writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"x-session-id: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (self._session.encode(), len(body), body)
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode("latin-1").splitlines()[0])
        first = True
        while size := int((await self._reader.readuntil(b"\r\n"))[:-2], 16):
            chunk = await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            now = time.monotonic_ns()
            for part in chunk.split(_STAMP)[1:]:
                if first:
                    samples.first.append(now - started)
                    first = False
                else:
                    samples.token.append(now - int(part[: part.index(b"}")]))
        await self._reader.readexactly(2)
