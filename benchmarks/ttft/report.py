"""From samples to the JSON file, the table and the last line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ttft.arms import ARMS
from benchmarks.ttft.session import Results
from benchmarks.ttft.stats import counted, median_or_none, prefill_throughput, ratio
from benchmarks.ttft.turns import Sample

__all__ = ["arm_of_ours", "last_line", "summary", "tables"]

_KINDS = {kind.key: kind for kind in ARMS}


def arm_of_ours(samples: Sequence[Sample]) -> str:
    """What the last line's ratios are of: push and eager return, where that was run."""
    return "g" if any(s.arm == "g" for s in samples) else "f"


def summary(results: Results, raw: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """All of it but the samples themselves."""
    scenarios = sorted({s.scenario for s in results.samples}, reverse=True)
    return {
        "settings": settings,
        "arm_of_ours": arm_of_ours(results.samples),
        "left_out": results.left_out,
        "groups": results.groups,
        "engine_bytes": results.engine_bytes,
        "scenarios": {
            scenario: {
                kind: _scenario(
                    [s for s in results.samples if s.scenario == scenario and _kind(s) == kind],
                    arm_of_ours(results.samples),
                )
                for kind in ("fixed", "trace")
                if any(s.scenario == scenario and _kind(s) == kind for s in results.samples)
            }
            for scenario in scenarios
        },
        "transfers": _transfers(results, raw),
        "prefill_throughput_of_push": prefill_throughput(results.samples, "g", "f").record(),
        "idle": results.idle,
        "leaked": results.leaked,
        "samples": [dataclasses.asdict(s) for s in results.samples],
    }


def last_line(found: dict[str, Any]) -> tuple[dict[str, float | None], dict[str, str]]:
    """The keys of the last line, and for each that is null why."""
    lost = found["scenarios"].get("lost", {}).get("fixed", {}).get("ratios", {})
    transfers, idle = found["transfers"], found["idle"]
    line: dict[str, float | None] = {
        "ttft_ratio_to_upstream_bidirectional": _value(lost, "c"),
        "ttft_ratio_to_upstream_one_way": _value(lost, "b"),
        "ttft_ratio_to_ideal": _value(lost, "a"),
        "gbps_ratio_to_upstream": transfers["gbps_ratio_to_upstream"],
        "gbps_ratio_to_raw": transfers["gbps_ratio_to_raw"],
        "idle_cpu_percent": idle.get(found["arm_of_ours"], {}).get("percent"),
        # Not the median but the lower bound: what push costs prefill at most.
        "prefill_throughput_ratio": (found["prefill_throughput_of_push"]["interval_95"] or [None])[
            0
        ],
    }
    out = found["left_out"].get("lost", {})
    reasons = {
        "prefill_throughput_ratio": "no turns of both f and g, side by side",
        "ttft_ratio_to_upstream_bidirectional": out.get("c", "no turns of both arms"),
        "ttft_ratio_to_upstream_one_way": out.get("b", "no turns of both arms"),
        "ttft_ratio_to_ideal": "no turns of both arms",
        "gbps_ratio_to_upstream": "no transfer of both was measured",
        "gbps_ratio_to_raw": "no transfer of ours was measured",
        "idle_cpu_percent": "not measured: --idle-seconds 0",
    }
    return line, {key: reasons[key] for key, value in line.items() if value is None}


def _value(ratios: dict[str, Any], arm: str) -> float | None:
    value = ratios.get(arm, {}).get("value")
    return None if value is None else float(value)


def _kind(sample: Sample) -> str:
    return sample.conversation.split("-", 1)[0]


def _scenario(samples: Sequence[Sample], ours: str) -> dict[str, Any]:
    arms = [k.key for k in ARMS if any(s.arm == k.key for s in samples)]
    return {
        "ratios": {
            arm: ratio(samples, ours, arm).record()
            | {"side_by_side": _side_by_side(samples, ours, arm)}
            for arm in arms
            if arm != ours
        },
        "arms": {arm: _arm([s for s in samples if s.arm == arm]) for arm in arms},
    }


def _side_by_side(samples: Sequence[Sample], ours: str, theirs: str) -> bool:
    def groups(arm: str) -> set[int]:
        return {s.group for s in samples if s.arm == arm}

    return bool(groups(ours) & groups(theirs))


def _arm(samples: Sequence[Sample]) -> dict[str, Any]:
    later = counted(samples)
    lengths = sorted({s.wanted_tokens for s in later})

    def median(values: Sequence[float | None]) -> float | None:
        found = median_or_none(values)
        return None if found is None else round(found, 2)

    return {
        "turns": len(later),
        "turns_not_counted": len([s for s in samples if s.turn >= 2]) - len(later),
        "ttft_ms": median([s.ttft_ms for s in later]),
        "ttft_ms_by_prompt": {
            str(n): median([s.ttft_ms for s in later if s.wanted_tokens == n]) for n in lengths
        },
        "ttft_ms_cold": median([s.ttft_ms for s in samples if s.turn == 1]),
        "prompt_tokens": median([float(s.prompt_tokens) for s in later]),
        "local_tokens": median([float(s.legs.local_tokens) for s in later]),
        "returned_tokens": median([float(s.legs.returned_tokens) for s in later]),
        "computed_tokens": median([float(s.legs.computed_tokens) for s in later]),
        "prefill_leg_ms": median([s.prefill_leg_ms for s in later]),
        "prefill_queue_ms": median([s.legs.prefill_queue_ms for s in later]),
        "prefill_compute_ms": median([s.legs.prefill_compute_ms for s in later]),
        "return_transfer_ms": median([_return_ms(s) for s in later]),
        "begin_turn_ms": median([s.legs.begin_turn_ms for s in later]),
        "forward_transfer_ms": median([_forward_ms(s) for s in later]),
        "decode_queue_ms": median([s.legs.decode_queue_ms for s in later]),
        "decode_wait_ms": median([_decode_wait_ms(s) for s in later]),
        "decode_first_step_ms": median([s.legs.decode_first_step_ms for s in later]),
        "rest_ms": median([_rest_ms(s) for s in later]),
        "foreign_cores": median([s.foreign_cores for s in later]),
        "held_block_seconds": median([s.held_block_seconds for s in later]),
        "held_blocks_after_answer": median([s.held[0][1] for s in later if s.held]),
        "held_blocks_before_next": median([s.held[-1][1] for s in later if s.held]),
        "turns_that_differ_from_a": len([s for s in samples if s.differences]),
        "differences": [
            f"{s.conversation} turn {s.turn}: {text}" for s in samples for text in s.differences
        ],
        "plan_reasons": sorted({s.plan_reason for s in later if s.plan_reason}),
    }


def _return_ms(sample: Sample) -> float | None:
    """Transfer that the turn's prefill waited for: an eager return is not on its way."""
    if sample.legs.return_ms is not None:
        return sample.legs.return_ms
    found = [m.transfer_ms for m in sample.moved if m.direction == "RETURN" and not m.eager]
    return sum(found) if found else None


def _forward_ms(sample: Sample) -> float | None:
    if sample.legs.forward_ms is not None:
        return sample.legs.forward_ms
    found = [m.transfer_ms for m in sample.moved if m.direction == "FORWARD"]
    return sum(found) if found else None


def _decode_wait_ms(sample: Sample) -> float | None:
    """Decode's queue, as far as it is not beside prefill's leg."""
    queue = sample.legs.decode_queue_ms
    if queue is None or not _KINDS[sample.arm].together:
        return queue
    return max(0.0, queue - sample.legs.prefill_queue_ms - sample.legs.prefill_compute_ms)


def _rest_ms(sample: Sample) -> float | None:
    """What the engines do not count: HTTP, templates and tokens, proxy or gateway, twice."""
    return (
        sample.ttft_ms
        - sample.legs.prefill_queue_ms
        - sample.legs.prefill_compute_ms
        - (_decode_wait_ms(sample) or 0.0)
        - (sample.legs.decode_first_step_ms or 0.0)
    )


def gbps(samples: Sequence[Sample], arm: str) -> list[float]:
    """GB/s of each return of an arm: ours by its leases, upstream's by its own counters."""
    found = []
    for s in samples:
        if s.arm != arm or s.turn < 2:
            continue
        if s.legs.return_bytes and s.legs.return_ms:
            found.append(s.legs.return_bytes / s.legs.return_ms / 1e6)
        found += [m.gb_per_s for m in s.moved if m.is_whole_return]
    return found


def _transfers(results: Results, raw: dict[str, Any]) -> dict[str, Any]:
    samples = results.samples
    ours = arm_of_ours(samples)
    rates = {arm: median_or_none(gbps(samples, arm)) for arm in ("c", "e", "f", "g")}
    quiet = {
        arm: median_or_none([x.moved.gb_per_s for x in found])
        for arm, found in results.quiet.items()
    }
    to_raw = median_or_none([x.ratio_to_raw for x in results.quiet.get(ours, [])])

    def over(mine: float | None, theirs: float | None) -> float | None:
        return round(mine / theirs, 4) if mine and theirs else None

    def rounded(found: dict[str, float | None]) -> dict[str, float | None]:
        return {k: None if v is None else round(v, 3) for k, v in found.items()}

    return {
        "gbps_of_returns": rounded(rates),
        "gbps_of_returns_to_idle_engines": rounded(quiet),
        "returns_to_idle_engines": {
            arm: [dataclasses.asdict(x.moved) | {"raw_ms": round(x.raw_ms, 3)} for x in found]
            for arm, found in results.quiet.items()
        },
        "raw_nixl": raw,
        "gbps_ratio_to_upstream": over(rates[ours], rates["c"]),
        # Upstream's and the turns' are measured while both engines go on; this one is not.
        # By pairs: raw NIXL is measured between the returns.
        "gbps_ratio_to_raw": None if to_raw is None else round(to_raw, 4),
    }


def tables(found: dict[str, Any], console: Console) -> None:
    """For a person."""
    names = {kind.key: kind.name for kind in ARMS}
    for scenario, kinds in found["scenarios"].items():
        for kind, body in kinds.items():
            title = f"prefill's cache {scenario}, {kind} conversations: medians over turns ≥ 2, ms"
            table = Table(title=title, title_justify="left")
            for column in (
                "arm",
                "TTFT",
                f"{found['arm_of_ours']}/arm",
                "prefill queue",
                "compute",
                "decode wait",
                "first step",
                "rest",
                "return",
                "forward",
                "computed tok",
                "differs",
                "others' cores",
            ):
                table.add_column(column, justify="left" if column == "arm" else "right")
            for arm, row in sorted(body["arms"].items()):
                compared = body["ratios"].get(arm, {}).get("value")
                table.add_row(
                    f"{arm} {names[arm]}",
                    *(
                        _text(row[k], 0) if k else _text(compared, 3)
                        for k in (
                            "ttft_ms",
                            "",
                            "prefill_queue_ms",
                            "prefill_compute_ms",
                            "decode_wait_ms",
                            "decode_first_step_ms",
                            "rest_ms",
                        )
                    ),
                    _text(row["return_transfer_ms"], 1),
                    _text(row["forward_transfer_ms"], 1),
                    _text(row["computed_tokens"], 0),
                    str(row["turns_that_differ_from_a"]),
                    _text(row["foreign_cores"], 2),
                )
            console.print(table)
        for arm, reason in found["left_out"].get(scenario, {}).items():
            console.print(f"left out: {arm}: {reason.splitlines()[0]}", highlight=False)
    throughput = found["prefill_throughput_of_push"]
    if throughput["value"] is not None:
        console.print(
            f"prefill's throughput with push, as a part of without: {throughput['value']}, 95 % of "
            f"{throughput['turns']} pairs in {throughput['interval_95']}",
            highlight=False,
        )


def _text(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
