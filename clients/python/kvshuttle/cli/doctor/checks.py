"""From what the control plane says of itself and its workers to findings. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.cli import human
from kvshuttle.cli.doctor import workers
from kvshuttle.cli.doctor.findings import Finding, info, ok, problem, warning
from kvshuttle.cli.doctor.workers import Look, by_value, some, told
from kvshuttle.cli.shape import seconds, word

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Sequence

    from kvshuttle.v1 import cluster_service_pb2 as cluster_pb
    from kvshuttle.v1 import lease_service_pb2 as lease_pb
    from kvshuttle.v1 import session_service_pb2 as session_pb

# The control plane's default.
GUARD_S = 5.0
# Between two looks the control plane's clock must have moved as ours did, but for the calls' time.
CLOCK_TOLERANCE = 0.2
SKEW_S = 5.0
JUST_STARTED_S = 60.0


def cluster(first: Look, second: Look, *, own_version: str, skew_s: float | None) -> list[Finding]:
    """All that two looks show."""
    connected = [one for one in second.workers if word(one, "state") in ("ready", "draining")]
    return [
        *_process(first, second),
        *_versions(second, connected, own_version),
        *_clock(first, second, skew_s),
        *workers.states(second),
        *workers.heartbeats(first, second, connected, skew_s or 0.0),
        *workers.sameness(connected),
        *workers.pools(connected),
        *workers.fallbacks(connected),
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
        by = by_value(connected, field)
        if len(by) > 1:
            found.append(
                warning(check, f"{what} differ: {told(by)}", "upgrade the older ones, one by one")
            )
        elif by:
            found.append(ok(check, f"{what} are all {next(iter(by))}"))
    agents = by_value(connected, "agent_version")
    if len(agents) == 1 and theirs not in agents:
        found.append(
            warning(
                "agent version",
                f"agents are {next(iter(agents))}, the control plane {theirs}",
                "upgrade the control plane first, then the agents",
            )
        )
    return found


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
