"""The picture: time to first token against prompt length, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import ScalarFormatter

from benchmarks.ttft.arms import ARMS

__all__ = ["plot"]

_NAMES = {kind.key: f"({kind.key}) {kind.name}" for kind in ARMS}
# Colours that people who do not see red and green alike can tell apart (Okabe and Ito).
_COLOURS = {
    "a": "#000000",
    "b": "#E69F00",
    "c": "#D55E00",
    "d": "#CC79A7",
    "e": "#56B4E9",
    "f": "#0072B2",
    "g": "#F0E442",
}
_PARTS = (
    ("prefill queue, without the return's transfer", "prefill_queue_rest_ms", "#E69F00"),
    ("return's transfer, as far as prefill waits for it", "return_in_queue_ms", "#D55E00"),
    ("prefill compute", "prefill_compute_ms", "#0072B2"),
    ("decode queue beyond prefill, forward transfer in it", "decode_wait_ms", "#CC79A7"),
    ("decode's first step", "decode_first_step_ms", "#009E73"),
    ("HTTP, tokens, proxy or gateway", "rest_ms", "#999999"),
)


# How many times the least time to first token the greatest is, on a linear axis.
WIDE = 4


def plot(found: dict[str, Any], directory: Path) -> list[Path]:
    """One file a scenario and kind of conversation, and one for idle engines. Returns the paths."""
    paths = []
    for scenario, kinds in found["scenarios"].items():
        for kind, body in kinds.items():
            path = directory / f"ttft-{scenario}-{kind}.png"
            _scenario(body, found, scenario, kind, path)
            paths.append(path)
    if found["idle"]:
        path = directory / "ttft-idle.png"
        _idle(found["idle"], path)
        paths.append(path)
    return paths


def _scenario(
    body: dict[str, Any], found: dict[str, Any], scenario: str, kind: str, path: Path
) -> None:
    figure, (lines, bars, held) = plt.subplots(
        1, 3, figsize=(17, 5.2), width_ratios=(1.3, 1.3, 0.7), layout="constrained"
    )
    settings = found["settings"]
    title = f"prefill's cache {scenario}, {kind} conversations"
    figure.suptitle(f"{title} ({settings['model']}, {settings['dtype']}, one core an engine)")
    arms = sorted(body["arms"])
    points = [
        s
        for s in found["samples"]
        if s["arm"] in arms
        and s["turn"] >= 2
        and s["scenario"] == scenario
        and s["conversation"].startswith(kind)
    ]
    for arm in arms:
        by_prompt = body["arms"][arm]["ttft_ms_by_prompt"]
        if kind == "fixed":
            lengths = sorted(by_prompt, key=int)
            lines.plot(
                [int(n) for n in lengths],
                [by_prompt[n] for n in lengths],
                marker="o",
                color=_COLOURS[arm],
                label=_NAMES[arm],
            )
        else:
            mine = [s for s in points if s["arm"] == arm]
            lines.scatter(
                [s["prompt_tokens"] for s in mine],
                [s["ttft_ms"] for s in mine],
                color=_COLOURS[arm],
                label=_NAMES[arm],
                s=18,
            )
    lines.set(xlabel="prompt, tokens", ylabel="time to first token, ms")
    shown = [s["ttft_ms"] for s in points]
    if shown and max(shown) > WIDE * min(shown):
        # Arms that lie together at the bottom of a linear axis could not be told apart.
        lines.set_yscale("log")
        lines.yaxis.set_major_formatter(ScalarFormatter())
    else:
        lines.set_ylim(bottom=0)
    lines.grid(alpha=0.3, which="both")
    lines.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    left = [0.0] * len(arms)
    for label, key, colour in _PARTS:
        values = [max(0.0, _split(body["arms"][arm])[key] or 0.0) for arm in arms]
        bars.barh([_NAMES[arm] for arm in arms], values, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    bars.set(xlabel="ms of a turn, medians of each part")
    bars.invert_yaxis()
    bars.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    held.barh(
        [f"({arm})" for arm in arms],
        [body["arms"][arm]["held_block_seconds"] or 0.0 for arm in arms],
        color=[_COLOURS[arm] for arm in arms],
    )
    held.set(xlabel="held block-seconds between two turns")
    # An empty axis where nobody holds anything would otherwise begin below nothing.
    held.set_xlim(0, max(1.0, held.get_xlim()[1]))
    held.invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _split(row: dict[str, Any]) -> dict[str, Any]:
    """With prefill's queue taken apart: what it waits for is the return's transfer, where one is on
    the turn's way."""
    queue = row["prefill_queue_ms"] or 0.0
    transfer = min(queue, row["return_transfer_ms"] or 0.0)
    return row | {"prefill_queue_rest_ms": queue - transfer, "return_in_queue_ms": transfer}


def _idle(idle: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    arms = sorted(idle)
    axes.barh(
        [f"{_NAMES[arm]}, {idle[arm]['sessions']} sessions" for arm in arms],
        [idle[arm]["percent"] for arm in arms],
        color=[_COLOURS[arm] for arm in arms],
    )
    axes.set(xlabel="CPU of the busier engine while idle, % of a core")
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)
