"""How long conversations are: from recorded traces, or from a distribution like theirs."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path

__all__ = ["BLOCK_TOKENS", "ChainLengths"]

BLOCK_TOKENS = 32
MEDIAN_TOKENS = 104_000
SIGMA = 0.82
"""A lognormal with the median of 36,348 recorded turns of coding agents, and about their tenth and
ninetieth percentiles (42k and 238k tokens; it gives 36k and 297k)."""


class ChainLengths:
    """Draws lengths of conversations in blocks, the same ones for the same seed."""

    def __init__(self, path: str, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._known: list[int] = []
        self.source = f"lognormal, median {MEDIAN_TOKENS:,} tokens, sigma {SIGMA}"
        if path:
            data = Path(path).read_bytes()
            text = gzip.decompress(data) if path.endswith(".gz") else data
            for line in text.splitlines():
                for turn in json.loads(line)["turns"]:
                    self._known.append(max(1, (turn[1] + turn[3]) // BLOCK_TOKENS))
            self.source = f"{Path(path).name}, {len(self._known):,} turns"

    def draw(self) -> int:
        """One length."""
        if self._known:
            return self._random.choice(self._known)
        tokens = self._random.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
        return max(1, int(tokens) // BLOCK_TOKENS)
