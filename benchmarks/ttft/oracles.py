"""What must hold in every arm of ours, however fast it is: the plain engine's answers, no leak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.ttft.arms import ARMS, Arm
from benchmarks.ttft.turns import Sample

# One oracle for tests and benchmarks.
from tests.support.leaks import assert_nothing_leaked, free_blocks

__all__ = ["failures", "free_at_first", "leaks"]


def free_at_first(arm: Arm) -> dict[str, int]:
    """Free blocks by worker id before anything is asked; empty where nobody says: upstream."""
    return {} if arm.view is None else free_blocks(arm.view)


def leaks(arm: Arm, free: Mapping[str, int]) -> str | None:
    """What is left behind once all sessions have ended, in words. None: nothing, or nobody says."""
    if arm.view is None:
        return None
    try:
        assert_nothing_leaked(arm.view, free)
    except AssertionError as error:
        return str(error)
    return None


def failures(
    samples: Sequence[Sample], leaked: Mapping[str, Mapping[str, str | None]], *, exact: bool
) -> list[str]:
    """What failed in arms of ours, in words. `exact`: whether equal work gives equal tokens, as in
    float32; in bfloat16 plain vLLM too differs between two ways to compute a prompt."""
    ours = {kind.key for kind in ARMS if kind.ours}
    found = [
        f"{sample.scenario}, {sample.arm}, {sample.conversation} turn {sample.turn}: {text}"
        for sample in samples
        if exact and sample.arm in ours
        for text in sample.differences
    ]
    found += [
        f"{scenario}, {arm}: {text}"
        for scenario, by_arm in leaked.items()
        for arm, text in by_arm.items()
        if text is not None
    ]
    return found
