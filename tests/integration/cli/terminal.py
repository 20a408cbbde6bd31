"""A program on a pseudo-terminal: what it wrote, and keys to it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from typing import Self

from tests.integration.cli.conftest import RUN_S, environment

_ESCAPES = re.compile(
    r"\x1b(\[[0-9;?<>=]*[a-zA-Z]|\][^\x07\x1b]*(\x07|\x1b\\)|[()][A-Z0-9]|[=>PX^_])"
)


class Terminal:
    """`kvshuttle` in a terminal of so many columns and lines."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self._arguments = arguments
        self._size = struct.pack("HHHH", lines, columns, 0, 0)
        self.raw = ""
        self._seen = 0
        self._more = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, self._size)
        self.child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvshuttle.cli",
            *self._arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment(TERM="xterm-256color"),
        )
        os.close(slave)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self.raw += data.decode(errors="replace")
        self._more.set()

    @property
    def text(self) -> str:
        """Everything since the last mark, without escape sequences."""
        return _ESCAPES.sub("", self.raw[self._seen :])

    def mark(self) -> None:
        """Forgets what was written until now."""
        self._seen = len(self.raw)

    async def until(self, wanted: str) -> None:
        """Waits until it has been written."""
        async with asyncio.timeout(RUN_S):
            while wanted not in self.text:
                self._more.clear()
                await self._more.wait()

    def press(self, keys: str) -> None:
        """Keys."""
        os.write(self._master, keys.encode())

    async def ended(self) -> int:
        """Waits for its end. The exit status."""
        async with asyncio.timeout(RUN_S):
            return await self.child.wait()

    async def __aexit__(self, *error: object) -> None:
        if self.child.returncode is None:
            self.child.kill()
            await self.child.wait()
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
