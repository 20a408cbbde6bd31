"""Free TCP ports for programs that must be told theirs.

Between finding a free port and the program binding it, another may take it. Ports below the
kernel's ephemeral range are never given to outgoing connections, and a random choice among
thousands keeps two test runs on one machine apart; what is left of the race shows as a program
that does not start.
"""

from __future__ import annotations

import random
import socket

# Linux gives out 32768 to 60999 on its own.
_LOWEST, _HIGHEST = 20_000, 32_000
_taken: set[int] = set()


def free_port() -> int:
    """A port of the loopback address that nobody listens on; never the same one twice."""
    choice = random.SystemRandom()
    for _ in range(1_000):
        port = choice.randrange(_LOWEST, _HIGHEST)
        if port in _taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _taken.add(port)
        return port
    raise RuntimeError(f"no free port between {_LOWEST} and {_HIGHEST}")
