"""What was done and what was wrong, counted and written down as it happens."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Tally:
    """Counts of events and a list of violations. Any thread."""

    def __init__(self, path: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        # Leases whose tokens have been counted.
        self.leases: set[str] = set()
        self._start = time.monotonic()
        self._file = path.open("w", buffering=1)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes the journal."""
        self._file.close()

    def add(self, what: str, **details: object) -> None:
        """Counts one event and writes a line about it."""
        with self._lock:
            self.counts[what] += 1
            self._write(what, details)

    def violation(self, what: str, **details: object) -> None:
        """Something that must never be."""
        with self._lock:
            self.violations.append(what)
            self._write("VIOLATION", {"violation": what, **details})
        print(f"VIOLATION: {what}", flush=True)

    def _write(self, what: str, details: dict[str, object]) -> None:
        at = round(time.monotonic() - self._start, 2)
        self._file.write(json.dumps({"at_s": at, "what": what, **details}) + "\n")
