"""Figures of many replays: what they come to, a table and a picture."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from benchmarks.retention.replay import Outcome

__all__ = ["POLICIES", "Row", "draw", "summary", "table"]

POLICIES = {
    "fixed": "fixed 480 s",
    "lru": "LRU",
    "ours": "ours, no hints",
    "hints": "ours, hints",
    "bound": "clairvoyant",
}
PRESSURE = (0.05, 0.80)
"""A pool is under pressure, and counts for the medians, where LRU recomputes so much."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pool at one rate of sessions: by policy the outcomes of the seeds, in their order."""

    per_hour: float
    tokens: int
    outcomes: dict[str, list[Outcome]]

    def share(self, policy: str) -> float:
        """Of the reusable tokens those computed again, mean of the seeds."""
        return statistics.fmean(outcome.share for outcome in self.outcomes[policy])

    def spread(self, policy: str) -> float:
        """Half the range of the seeds' shares."""
        shares = [outcome.share for outcome in self.outcomes[policy]]
        return (max(shares) - min(shares)) / 2

    def held(self, policy: str) -> float:
        """Blocks times seconds under a hold, in millions, mean of the seeds."""
        return statistics.fmean(o.held for o in self.outcomes[policy]) / 1e6

    def kept(self, policy: str) -> float:
        """Blocks times seconds in the pool, held or soft, in millions, mean of the seeds."""
        return statistics.fmean(o.kept for o in self.outcomes[policy]) / 1e6

    def closed(self, policy: str) -> float:
        """How much of what the bound saves over LRU the policy saves; not a number where there is
        nothing to save."""
        lru = self.share("lru")
        gap = lru - self.share("bound")
        return (lru - self.share(policy)) / gap if gap else math.nan

    @property
    def pressed(self) -> bool:
        """Whether it counts for the medians."""
        return PRESSURE[0] <= self.share("lru") <= PRESSURE[1]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "sessions_per_hour": self.per_hour,
            "pool_tokens": self.tokens,
            "under_pressure": self.pressed,
            "gap_closed": _number(self.closed("ours")),
            "gap_closed_with_hints": _number(self.closed("hints")),
            "policies": {
                policy: {
                    "recomputed_share": self.share(policy),
                    "recomputed_share_by_seed": [o.share for o in self.outcomes[policy]],
                    "held_block_seconds": self.held(policy) * 1e6,
                    "kept_block_seconds": self.kept(policy) * 1e6,
                    "refused_blocks": [o.refused for o in self.outcomes[policy]],
                }
                for policy in POLICIES
            },
        }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def summary(rows: Iterable[Row]) -> dict[str, float | int | None]:
    """Medians over the pools under pressure; and where memory is ample, the worst that ours does
    against LRU, in shares of the reusable tokens (negative: always better)."""
    rows = list(rows)
    pressed = [row for row in rows if row.pressed]
    ample = [row for row in rows if row.share("lru") < PRESSURE[0]]

    def median(values: list[float]) -> float | None:
        return round(statistics.median(values), 3) if values else None

    def worst(policy: str) -> float | None:
        return (
            round(max(row.share(policy) - row.share("lru") for row in ample), 5) if ample else None
        )

    return {
        "pools_under_pressure": len(pressed),
        "gap_closed": median([row.closed("ours") for row in pressed]),
        "gap_closed_with_hints": median([row.closed("hints") for row in pressed]),
        "recompute_ratio_to_fixed_480s": median(
            [row.share("ours") / row.share("fixed") for row in pressed]
        ),
        "recompute_ratio_to_fixed_480s_with_hints": median(
            [row.share("hints") / row.share("fixed") for row in pressed]
        ),
        "worst_over_lru_where_ample": worst("ours"),
        "worst_over_lru_where_ample_with_hints": worst("hints"),
    }


def table(rows: Iterable[Row]) -> str:
    """In Markdown."""
    head = ["sessions/h", "pool, M tokens", *POLICIES.values(), "closed", "closed, hints"]
    held = [f"held, {POLICIES[policy]}" for policy in ("fixed", "ours", "hints")]
    lines = ["| " + " | ".join(head + held) + " |", "|" + "---:|" * len(head + held)]
    for row in rows:
        mark = "" if row.pressed else " *"
        cells = [f"{row.per_hour:g}", f"{row.tokens / 1e6:g}{mark}"]
        cells += [f"{row.share(policy):.4f} ± {row.spread(policy):.4f}" for policy in POLICIES]
        cells += [f"{row.closed('ours'):.2f}", f"{row.closed('hints'):.2f}"]
        cells += [f"{row.held(policy):.0f}" for policy in ("fixed", "ours", "hints")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Left, for each rate, the share that is recomputed by the size of the pool; right, how much
    of the way from LRU to the bound is gone, by how hard pressed the pool is."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rates = sorted({row.per_hour for row in rows})
    styles = {
        "fixed": ("#9a6324", "s", "--"),
        "lru": ("#777777", "o", "-"),
        "ours": ("#1f77b4", "D", "-"),
        "hints": ("#d62728", "^", "-"),
        "bound": ("#000000", "", ":"),
    }
    figure, axes = plt.subplots(
        1, len(rates) + 1, figsize=(5.0 * (len(rates) + 1), 4.8), layout="constrained"
    )
    for axis, rate in zip(axes, rates, strict=False):
        here = [row for row in rows if row.per_hour == rate]
        for policy, name in POLICIES.items():
            color, marker, line = styles[policy]
            axis.plot(
                [row.tokens / 1e6 for row in here],
                [max(0.01, 100 * row.share(policy)) for row in here],
                color=color,
                marker=marker,
                markersize=5,
                linestyle=line,
                label=name,
            )
        # Below a thousandth is as good as nothing, and nothing has no place on a logarithmic axis.
        axis.set(
            ylim=(0.1, 130),
            xscale="log",
            yscale="log",
            xlabel="pool, million tokens",
            ylabel="reusable tokens computed again, %",
            title=f"{rate:g} new sessions an hour",
        )
        axis.set_xticks([row.tokens / 1e6 for row in here])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(mpl.ticker.NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(visible=True, alpha=0.25)
    axes[0].legend(frameon=False)
    last = axes[-1]
    ordered = sorted(rows, key=lambda row: row.share("lru"))
    for policy in ("ours", "hints"):
        color, marker, _ = styles[policy]
        last.plot(
            [100 * row.share("lru") for row in ordered],
            [100 * row.closed(policy) for row in ordered],
            color=color,
            marker=marker,
            markersize=5,
            label=POLICIES[policy],
        )
    last.axvspan(100 * PRESSURE[0], 100 * PRESSURE[1], color="#000000", alpha=0.05, lw=0)
    last.axhline(0, color="#777777", lw=1)
    last.set(
        xlabel="what LRU computes again, %",
        ylabel="gap between LRU and clairvoyant closed, %",
        title="By pressure (shaded: in the medians)",
    )
    last.grid(visible=True, alpha=0.25)
    last.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.07, 1.0))
    last.set_ylim(-8, 100)
    figure.savefig(path, dpi=120)
    plt.close(figure)
