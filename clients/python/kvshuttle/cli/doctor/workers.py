"""From what two looks say of workers to findings. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.cli import human
from kvshuttle.cli.doctor.findings import Finding, info, ok, problem, warning
from kvshuttle.cli.reasons import NOTHING, reason
from kvshuttle.cli.shape import moment, word

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Mapping, Sequence

    from kvshuttle.v1 import cluster_service_pb2 as cluster_pb

# The control plane's defaults, which the API does not tell: a worker is lost after five silent
# heartbeats of a second, and beyond a tenth of the pool in quarantine nothing is granted to it.
SILENCE_S = 5.0
QUARANTINE_CAP = 0.1
WATERMARK = 0.05
# Fewer legs than this say nothing of a share.
FALLBACKS_LEAST = 5
FALLBACK_SHARE = 0.1
NAMED = 5


@dataclass(frozen=True, slots=True)
class Look:
    """What the control plane said at one time. `at_s` is this machine's monotonic clock in the
    middle of the call for `status`, which took `took_s`; `time` is its wall clock."""

    at_s: float
    time: datetime.datetime
    status: cluster_pb.GetStatusResponse
    workers: Sequence[cluster_pb.Worker]
    took_s: float = 0.0


def some(names: Iterable[str]) -> str:
    """The first of many names."""
    listed = list(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more


def by_value(workers: Iterable[cluster_pb.Worker], field: str) -> dict[str, list[str]]:
    """Workers' names by what they say; those that say nothing are left out."""
    by: dict[str, list[str]] = {}
    for one in workers:
        value = getattr(one, field)
        if value:
            by.setdefault(str(value), []).append(one.ref.worker_id)
    return by


def told(by: Mapping[str, Sequence[str]]) -> str:
    """Each value with the workers that have it."""
    return "; ".join(f"{value}: {some(names)}" for value, names in sorted(by.items()))


def states(look: Look) -> list[Finding]:
    """Whether there are workers that can work, of the roles that are needed."""
    states = Counter(word(one, "state") for one in look.workers)
    if not look.workers:
        return [
            problem(
                "workers",
                "no worker has registered",
                "start engines with the agent in them (docs/agent.md); their logs say why one is "
                "refused",
            )
        ]
    said = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    found: list[Finding] = []
    if states["ready"]:
        found.append(ok("workers", said))
    else:
        found.append(
            problem(
                "workers",
                f"none is ready: {said}",
                "start an engine, or end a drain (kvshuttle drain --undo WORKER)",
            )
        )
    lost = [one for one in look.workers if word(one, "state") == "lost"]
    for one in lost[:NAMED]:
        silent = human.age(one.heartbeat_time, look.time)
        found.append(
            warning(
                "workers",
                f"{one.ref.worker_id} (boot {one.ref.incarnation}) is lost: last heard {silent} "
                "ago",
                "see whether its process lives. If not: kvshuttle fence "
                f"{one.ref.worker_id}, and start it; if it does: the network to the control "
                "plane's agent port",
            )
        )
    if len(lost) > NAMED:
        found.append(
            warning("workers", f"{len(lost) - NAMED} more are lost", "see kvshuttle workers")
        )
    ready = [one for one in look.workers if word(one, "state") == "ready"]
    roles = {word(one, "role") for one in ready}
    if ready and "both" not in roles and len(roles) == 1:
        lacking = "decode" if roles == {"prefill"} else "prefill"
        found.append(
            warning(
                "roles",
                f"every ready worker is of role {next(iter(roles))}: no KV moves",
                f"start a worker of role {lacking}",
            )
        )
    return found


def heartbeats(
    first: Look, second: Look, connected: Sequence[cluster_pb.Worker], skew_s: float
) -> list[Finding]:
    """Connected workers that say nothing."""
    before = {(one.ref.worker_id, one.ref.incarnation): one for one in first.workers}
    silent = []
    for one in connected:
        old = before.get((one.ref.worker_id, one.ref.incarnation))
        moved = old is None or old.heartbeat_time != one.heartbeat_time
        age = (second.time - moment(one.heartbeat_time)).total_seconds() + skew_s
        if not moved and age > SILENCE_S / 2:
            silent.append(f"{one.ref.worker_id} ({human.span(age)})")
    if silent:
        return [
            warning(
                "heartbeats",
                f"nothing heard for long from {some(silent)}",
                "its engine is stuck in a long step, or the machine is paused; after the control "
                "plane's silence (5 s unless set) it counts as lost",
            )
        ]
    return [ok("heartbeats", f"{len(connected)} connected workers are heard")] if connected else []


def sameness(connected: Sequence[cluster_pb.Worker]) -> list[Finding]:
    """What must be equal for KV to move."""
    if not connected:
        return []
    found: list[Finding] = []
    fields: dict[str, dict[str, list[str]]] = {}
    for one in connected:
        said = {field.name: field.value for field in one.fingerprint}
        said |= {
            "block_size": str(one.block_size),
            "bytes_per_block": str(one.bytes_per_block),
            "ranks": str(one.num_ranks),
        }
        for name, value in said.items():
            fields.setdefault(name, {}).setdefault(value, []).append(one.ref.worker_id)
    different = {name: by for name, by in fields.items() if len(by) > 1}
    for name, by in sorted(different.items()):
        found.append(
            problem(
                "fingerprint",
                f"{name} differs: {told(by)}",
                "start the engines with the same setting; KV moves only between equal ones",
            )
        )
    if not different:
        found.append(ok("fingerprint", f"{len(fields)} fields are equal on all connected workers"))
    backends = by_value(connected, "nixl_backend")
    if len(backends) > 1:
        found.append(
            problem(
                "NIXL backend",
                f"differs: {told(backends)}",
                "set nixl_backend to the same on every engine: UCX and LIBFABRIC do not talk to "
                "each other",
            )
        )
    elif backends:
        found.append(ok("NIXL backend", f"{next(iter(backends))} everywhere"))
    uncached = [one.ref.worker_id for one in connected if not one.prefix_caching]
    if uncached:
        found.append(
            info(
                "prefix cache",
                f"off on {some(uncached)}: KV comes back only while a request waits for it",
                "start the engine with --enable-prefix-caching, if that was not meant",
            )
        )
    return found


def pools(connected: Sequence[cluster_pb.Worker]) -> list[Finding]:
    """Quarantine, and blocks that are free."""
    found: list[Finding] = []
    for one in connected:
        pool, name = one.pool, one.ref.worker_id
        if not pool.total_blocks:
            continue
        quarantined = pool.quarantined_blocks / pool.total_blocks
        much = (
            f"{name}: {human.count(pool.quarantined_blocks)} blocks "
            f"({human.share(pool.quarantined_blocks, pool.total_blocks)}) are in quarantine"
        )
        remedy = (
            "somebody may still write to them: fence the boot that is dead (kvshuttle fence), or "
            f"restart {name}"
        )
        if quarantined > QUARANTINE_CAP:
            found.append(
                problem("quarantine", f"{much}: nothing is granted to it any more", remedy)
            )
        elif quarantined > QUARANTINE_CAP / 2:
            found.append(warning("quarantine", f"{much}, near the cap of 10 %", remedy))
        elif quarantined:
            found.append(info("quarantine", much))
        if pool.free_blocks < WATERMARK * pool.total_blocks:
            found.append(
                warning(
                    "pool",
                    f"{name} has {human.share(pool.free_blocks, pool.total_blocks)} of its blocks "
                    "free: it is asked to hold nothing",
                    "add workers of its role, or give its engine more KV memory",
                )
            )
    reported = [one for one in connected if one.pool.total_blocks]
    if reported and not found:
        found.append(ok("pools", "no worker is short of blocks or has any in quarantine"))
    return found


def fallbacks(connected: Sequence[cluster_pb.Worker]) -> list[Finding]:
    """How often legs recompute, and why."""
    found: list[Finding] = []
    for one in connected:
        bad = {
            name: number for name, number in one.counters.fallbacks.items() if not reason(name).fine
        }
        total = sum(bad.values())
        whole = total + one.counters.transfers_completed
        if total < FALLBACKS_LEAST or total < FALLBACK_SHARE * whole:
            continue
        top = max(bad, key=lambda name: bad[name])
        known = reason(top)
        found.append(
            warning(
                "fallbacks",
                f"{one.ref.worker_id} recomputed {human.count(total)} of {human.count(whole)} "
                f"legs for which a transfer was hoped since its boot, most for {top}: "
                f"{known.meaning}",
                "" if known.remedy == NOTHING else known.remedy,
            )
        )
    if connected and not found:
        found.append(ok("fallbacks", "transfers that are hoped for mostly happen"))
    return found
