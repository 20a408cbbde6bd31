"""Medians and ratios of what was measured."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from benchmarks.ttft.turns import Sample

__all__ = ["Ratio", "cells", "counted", "median_or_none", "prefill_throughput", "ratio"]

Cell = tuple[str, int]
RESAMPLES = 2_000


def median_or_none(values: Iterable[float | None]) -> float | None:
    """The median of what is there; None of nothing."""
    found = [v for v in values if v is not None]
    return median(found) if found else None


def counted(samples: Iterable[Sample]) -> list[Sample]:
    """The turns that count: from the second on, and with the cache lost where it was to be lost."""
    return [s for s in samples if s.turn >= 2 and s.cache_dropped is not False]


def cells(samples: Iterable[Sample], arm: str) -> dict[Cell, float]:
    """Time to first token of one arm by (conversation, turn), in ms; turns that count."""
    return {(s.conversation, s.turn): s.ttft_ms for s in counted(samples) if s.arm == arm}


class Ratio:
    """Median over median, over the turns that both have, with a bootstrap interval. `paired`:
    median of the pairs' own ratios, for what differs more from turn to turn than between arms."""

    def __init__(
        self,
        ours: Mapping[Cell, float],
        theirs: Mapping[Cell, float],
        seed: int = 0,
        *,
        paired: bool = False,
    ) -> None:
        self.common = sorted(set(ours) & set(theirs))
        pairs = [(ours[cell], theirs[cell]) for cell in self.common]
        if paired:
            pairs = [(a / b, 1.0) for a, b in pairs]
        self.value = _ratio(pairs) if pairs else None
        self.interval = _bootstrap(pairs, seed) if len(pairs) > 1 else None

    def record(self) -> dict[str, object]:
        """For the JSON file."""
        return {
            "value": None if self.value is None else round(self.value, 4),
            "interval_95": None
            if self.interval is None
            else [round(bound, 4) for bound in self.interval],
            "turns": len(self.common),
        }


def ratio(samples: Sequence[Sample], ours: str, theirs: str) -> Ratio:
    """Time to first token of one arm as a part of another's: of turns side by side where there are
    such, since the plain engine is in every group."""
    groups = {s.group for s in samples if s.arm == ours}
    beside = [s for s in samples if s.arm == theirs and s.group in groups]
    others = beside or [s for s in samples if s.arm == theirs]
    return Ratio(cells(samples, ours), cells(others, theirs))


def prefill_throughput(samples: Sequence[Sample], ours: str, theirs: str) -> Ratio:
    """Prompt tokens that prefill computes in a second, of one arm as a part of another's, over the
    turns, first ones too, that both had side by side. vLLM's own times: from the first step of a
    request to its first token."""

    def rates(arm: str) -> dict[Cell, float]:
        return {
            # In a group of its own every conversation is another pair.
            (f"{s.scenario} {s.group} {s.conversation}", s.turn): s.legs.computed_tokens
            / s.legs.prefill_compute_ms
            for s in samples
            if s.arm == arm and s.legs.computed_tokens and s.legs.prefill_compute_ms
        }

    return Ratio(rates(ours), rates(theirs), paired=True)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(a for a, _ in pairs) / median(b for _, b in pairs)


def _bootstrap(pairs: Sequence[tuple[float, float]], seed: int) -> tuple[float, float]:
    chooser = random.Random(seed)
    drawn = sorted(_ratio(chooser.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return drawn[int(RESAMPLES * 0.025)], drawn[int(RESAMPLES * 0.975) - 1]
