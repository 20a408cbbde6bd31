"""From what the control plane says of itself and its workers to findings. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.cli import human
from kvshuttle.cli.doctor.findings import Finding, info, ok, problem, warning
from kvshuttle.cli.reasons import NOTHING, reason
from kvshuttle.cli.shape import moment, seconds, word

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Mapping, Sequence

    from kvshuttle.v1 import cluster_service_pb2 as cluster_pb
    from kvshuttle.v1 import lease_service_pb2 as lease_pb
    from kvshuttle.v1 import session_service_pb2 as session_pb

# The control plane's defaults, which the API does not tell: a worker is lost after five silent
# heartbeats of a second, and beyond a tenth of the pool in quarantine nothing is granted to it.
SILENCE_S = 5.0
QUARANTINE_CAP = 0.1
WATERMARK = 0.05
GUARD_S = 5.0
# Between two looks the control plane's clock must have moved as ours did, but for the calls' time.
CLOCK_TOLERANCE = 0.2
SKEW_S = 5.0
JUST_STARTED_S = 60.0
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


def cluster(first: Look, second: Look, *, own_version: str, skew_s: float | None) -> list[Finding]:
    """All that two looks show."""
    connected = [one for one in second.workers if word(one, "state") in ("ready", "draining")]
    return [
        *_process(first, second),
        *_versions(second, connected, own_version),
        *_clock(first, second, skew_s),
        *_states(second),
        *_heartbeats(first, second, connected, skew_s or 0.0),
        *_sameness(connected),
        *_pools(connected),
        *_fallbacks(connected),
    ]


def _process(first: Look, second: Look) -> list[Finding]:
    a, b = first.status, second.status
    up = seconds(b.uptime)
    found: list[Finding] = []
    if a.epoch != b.epoch or seconds(b.uptime) < seconds(a.uptime):
        found.append(
            problem(
                "epoch",
                f"the control plane restarted while it was looked at (epoch {a.epoch}, then "
                f"{b.epoch})",
                "see in its log why it ends; if two run behind one address, stop one",
            )
        )
    elif up < JUST_STARTED_S:
        found.append(
            info("epoch", f"epoch {b.epoch}; the control plane started {human.span(up)} ago")
        )
    else:
        found.append(ok("epoch", f"epoch {b.epoch}, up {human.span(up)}, {b.lineage_id}"))
    if a.lineage_id != b.lineage_id:
        found.append(
            problem(
                "lineage",
                f"two stores answered: {a.lineage_id} and {b.lineage_id}",
                "two control planes share this address: stop one",
            )
        )
    if b.insecure_agents:
        found.append(
            info(
                "security",
                "agents connect without mTLS (insecure, loopback only)",
                "for more than a trial give the control plane tls_cert, tls_key and client_ca",
            )
        )
    if b.store == "memory":
        found.append(
            info(
                "store",
                "state is kept in memory: a restart forgets sessions and leases",
                "for more than a trial start the control plane with --store FILE",
            )
        )
    else:
        found.append(ok("store", b.store))
    return found


def _versions(
    look: Look, connected: Sequence[cluster_pb.Worker], own_version: str
) -> list[Finding]:
    theirs = look.status.version
    found: list[Finding] = []
    if theirs == own_version:
        found.append(ok("version", f"control plane and this program are {theirs}"))
    else:
        found.append(
            warning(
                "version",
                f"the control plane is {theirs}, this program {own_version}",
                "install the same version of kvshuttle here",
            )
        )
    for check, what, field in (
        ("agent version", "agents", "agent_version"),
        ("vLLM version", "engines", "vllm_version"),
    ):
        by = _by_value(connected, field)
        if len(by) > 1:
            found.append(
                warning(check, f"{what} differ: {_told(by)}", "upgrade the older ones, one by one")
            )
        elif by:
            found.append(ok(check, f"{what} are all {next(iter(by))}"))
    agents = _by_value(connected, "agent_version")
    if len(agents) == 1 and theirs not in agents:
        found.append(
            warning(
                "agent version",
                f"agents are {next(iter(agents))}, the control plane {theirs}",
                "upgrade the control plane first, then the agents",
            )
        )
    return found


def _by_value(workers: Iterable[cluster_pb.Worker], field: str) -> dict[str, list[str]]:
    """Workers' names by what they say; those that say nothing are left out."""
    by: dict[str, list[str]] = {}
    for one in workers:
        value = getattr(one, field)
        if value:
            by.setdefault(str(value), []).append(one.ref.worker_id)
    return by


def _told(by: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value}: {some(names)}" for value, names in sorted(by.items()))


def _clock(first: Look, second: Look, skew_s: float | None) -> list[Finding]:
    ours = second.at_s - first.at_s
    theirs = seconds(second.status.uptime) - seconds(first.status.uptime)
    found: list[Finding] = []
    if first.status.epoch == second.status.epoch:
        # Where within its call the answer was written is not known.
        unknown = (first.took_s + second.took_s) / 2
        if abs(theirs - ours) > CLOCK_TOLERANCE * ours + CLOCK_TOLERANCE + unknown:
            found.append(
                problem(
                    "clock",
                    f"in {human.span(ours)} here the control plane's clock went "
                    f"{human.span(theirs)}",
                    "its machine is paused, suspended or overloaded: leases would end at wrong "
                    "times; look at its load and at the hypervisor",
                )
            )
        else:
            found.append(ok("clock", "the control plane's clock moves as this machine's does"))
    if skew_s is not None and abs(skew_s) > SKEW_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        found.append(
            warning(
                "wall clock",
                f"the control plane's machine is {human.span(abs(skew_s))} {ahead} this one",
                "run NTP on both; leases do not depend on it, logs and ages do",
            )
        )
    return found


def _states(look: Look) -> list[Finding]:
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


def _heartbeats(
    first: Look, second: Look, connected: Sequence[cluster_pb.Worker], skew_s: float
) -> list[Finding]:
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


def _sameness(connected: Sequence[cluster_pb.Worker]) -> list[Finding]:
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
                f"{name} differs: {_told(by)}",
                "start the engines with the same setting; KV moves only between equal ones",
            )
        )
    if not different:
        found.append(ok("fingerprint", f"{len(fields)} fields are equal on all connected workers"))
    backends = _by_value(connected, "nixl_backend")
    if len(backends) > 1:
        found.append(
            problem(
                "NIXL backend",
                f"differs: {_told(backends)}",
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


def _pools(connected: Sequence[cluster_pb.Worker]) -> list[Finding]:
    found: list[Finding] = []
    for one in connected:
        pool, name = one.pool, one.ref.worker_id
        if not pool.total_blocks:
            continue
        quarantined = pool.quarantined_blocks / pool.total_blocks
        told = (
            f"{name}: {human.count(pool.quarantined_blocks)} blocks "
            f"({human.share(pool.quarantined_blocks, pool.total_blocks)}) are in quarantine"
        )
        remedy = (
            "somebody may still write to them: fence the boot that is dead (kvshuttle fence), or "
            f"restart {name}"
        )
        if quarantined > QUARANTINE_CAP:
            found.append(
                problem("quarantine", f"{told}: nothing is granted to it any more", remedy)
            )
        elif quarantined > QUARANTINE_CAP / 2:
            found.append(warning("quarantine", f"{told}, near the cap of 10 %", remedy))
        elif quarantined:
            found.append(info("quarantine", told))
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


def _fallbacks(connected: Sequence[cluster_pb.Worker]) -> list[Finding]:
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


def turns(
    sessions: Iterable[session_pb.Session], at: datetime.datetime, stuck_after_s: float
) -> list[Finding]:
    """Turns that have run for long."""
    stuck = []
    running = 0
    for session in sessions:
        for turn in session.turns:
            if word(turn, "state") != "running":
                continue
            running += 1
            age = human.age_s(turn.begin_time, at)
            if age > stuck_after_s:
                stuck.append(f"{session.session_id} turn {turn.turn} ({human.span(age)})")
    if stuck:
        return [
            warning(
                "turns",
                f"{len(stuck)} have run for longer than {human.span(stuck_after_s)}: {some(stuck)}",
                "if their requests have ended, their gateway died without saying so: the control "
                "plane gives them up after turn_timeout (10 minutes), or kvshuttle end-session",
            )
        ]
    return [ok("turns", f"{running} running, none for long")]


def leases(found: Iterable[lease_pb.Lease], at: datetime.datetime) -> list[Finding]:
    """Open leases that should have ended."""
    late, long = [], []
    number = 0
    for one in found:
        number += 1
        if word(one, "state") == "pending":
            if human.age_s(one.create_time, at) > 2 * GUARD_S:
                late.append(one.lease_id)
        elif human.age_s(one.grant_time, at) > seconds(one.ttl) + 2 * GUARD_S:
            # Renewals do not show in `grant_time`, so this may be as it should.
            long.append(one.lease_id)
    if late:
        return [
            warning(
                "leases",
                f"{len(late)} were asked for long ago and never granted: {some(late)}",
                "their sources do not answer: look at those engines' load and logs",
            )
        ]
    if long:
        return [
            info(
                "leases",
                f"{len(long)} are open for longer than a grant lasts: {some(long)}",
                "they were renewed, or their readers are silent: see kvshuttle workers for one "
                "that is lost, and fence it if it is dead",
            )
        ]
    return [ok("leases", f"{number} open, none beyond its time")]
