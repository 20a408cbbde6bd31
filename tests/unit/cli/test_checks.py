"""Each of doctor's checks, on what it is to find."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import pytest

from kvshuttle.cli.doctor import checks, endpoints, findings
from kvshuttle.cli.doctor.probe import Certificate, Page, Port
from kvshuttle.cli.doctor.workers import Look
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types

AT = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def worker(name: str, **more: Any) -> cluster.Worker:
    fields: dict[str, Any] = {
        "role": types.WORKER_ROLE_PREFILL if name == "p" else types.WORKER_ROLE_DECODE,
        "state": cluster.WORKER_STATE_READY,
        "block_size": 32,
        "prefix_caching": True,
        "agent_version": "1.0",
        "vllm_version": "0.32.0",
        "nixl_backend": "UCX",
        "num_ranks": 1,
        "pool": cluster.PoolStats(total_blocks=1_000, free_blocks=500),
        "fingerprint": [cluster.FingerprintField(name="dtype", value="bfloat16")],
    } | more
    made = cluster.Worker(ref=types.WorkerRef(worker_id=name, incarnation=1), **fields)
    if not made.HasField("heartbeat_time"):
        made.heartbeat_time.FromDatetime(AT)
    return made


def look(*found: cluster.Worker, at_s: float = 0, up_s: float = 600, **more: Any) -> Look:
    fields: dict[str, Any] = {"version": "1.0", "epoch": 3, "lineage_id": "l", "store": "sqlite"}
    status = cluster.GetStatusResponse(**(fields | more))
    status.uptime.FromMilliseconds(int(up_s * 1_000))
    return Look(at_s, AT + datetime.timedelta(seconds=at_s), status, found)


def said(
    first: Look, second: Look, *, version: str = "1.0", skew_s: float | None = 0.0
) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in checks.cluster(first, second, own_version=version, skew_s=skew_s):
        found.setdefault(one.check, set()).add(one.severity)
        if one.severity in ("warning", "problem"):
            assert one.remedy, one
    return found


PAIR = (worker("p"), worker("d"))


def test_a_cluster_as_it_should_be() -> None:
    found = said(look(*PAIR), look(*PAIR, at_s=1.5, up_s=601.5))
    assert set().union(*found.values()) == {"ok"}


@pytest.mark.parametrize(
    ("workers", "check", "severity"),
    [
        ((), "workers", "problem"),
        ((worker("p", state=cluster.WORKER_STATE_LOST), worker("d")), "workers", "warning"),
        ((worker("p", state=cluster.WORKER_STATE_DRAINING),), "workers", "problem"),
        ((worker("d"), worker("d2")), "roles", "warning"),
        ((worker("p"), worker("d", block_size=16)), "fingerprint", "problem"),
        ((worker("p"), worker("d", nixl_backend="LIBFABRIC")), "NIXL backend", "problem"),
        ((worker("p"), worker("d", nixl_backend="")), "NIXL backend", "ok"),
        ((worker("p"), worker("d", vllm_version="0.33.0")), "vLLM version", "warning"),
        ((worker("p", agent_version="2.0"), worker("d")), "agent version", "warning"),
        ((worker("p", prefix_caching=False), worker("d")), "prefix cache", "info"),
    ],
)
def test_workers(workers: tuple[cluster.Worker, ...], check: str, severity: str) -> None:
    assert severity in said(look(*workers), look(*workers, at_s=1.5, up_s=601.5))[check]


@pytest.mark.parametrize(
    ("free", "quarantined", "check", "severity"),
    [
        (500, 101, "quarantine", "problem"),
        (500, 60, "quarantine", "warning"),
        (500, 1, "quarantine", "info"),
        (49, 0, "pool", "warning"),
    ],
)
def test_pools(free: int, quarantined: int, check: str, severity: str) -> None:
    pool = cluster.PoolStats(total_blocks=1_000, free_blocks=free, quarantined_blocks=quarantined)
    both = (worker("p", pool=pool), worker("d"))
    assert said(look(*both), look(*both, at_s=1.5, up_s=601.5))[check] == {severity}


def test_silence_is_told_before_the_worker_is_lost() -> None:
    silent = worker("p")
    silent.heartbeat_time.FromDatetime(AT - datetime.timedelta(seconds=3))
    second = look(silent, worker("d"), at_s=1.5, up_s=601.5)
    assert said(look(silent, worker("d")), second)["heartbeats"] == {"warning"}
    # The control plane's clock is four seconds behind: it was heard just now.
    assert said(look(silent, worker("d")), second, skew_s=-4.0)["heartbeats"] == {"ok"}


@pytest.mark.parametrize(
    ("second", "check", "severity"),
    [
        (look(*PAIR, at_s=1.5, up_s=600), "clock", "problem"),
        (look(*PAIR, at_s=1.5, up_s=610), "clock", "problem"),
        (look(*PAIR, at_s=1.5, up_s=1.5, epoch=4), "epoch", "problem"),
        (look(*PAIR, at_s=1.5, up_s=601.5, lineage_id="m"), "lineage", "problem"),
        (look(*PAIR, at_s=1.5, up_s=601.5, version="0.9"), "version", "warning"),
        (look(*PAIR, at_s=1.5, up_s=601.5, store="memory"), "store", "info"),
        (look(*PAIR, at_s=1.5, up_s=601.5, insecure_agents=True), "security", "info"),
    ],
)
def test_the_process(second: Look, check: str, severity: str) -> None:
    assert severity in said(look(*PAIR), second)[check]


def test_a_call_that_takes_long_says_nothing_of_the_clock() -> None:
    first, second = look(*PAIR), look(*PAIR, at_s=1.5, up_s=603)
    assert said(first, second)["clock"] == {"problem"}
    slow = dataclasses.replace(second, took_s=4.0)
    assert said(first, slow)["clock"] == {"ok"}


def test_another_wall_clock() -> None:
    found = said(look(*PAIR), look(*PAIR, at_s=1.5, up_s=601.5), skew_s=40.0)
    assert found["wall clock"] == {"warning"}


def test_fallbacks_count_when_they_are_many_and_not_fine() -> None:
    def after(fallbacks: dict[str, int], completed: int) -> set[str]:
        counters = cluster.WorkerCounters(transfers_completed=completed, fallbacks=fallbacks)
        both = (worker("p", counters=counters), worker("d"))
        return said(look(*both), look(*both, at_s=1.5, up_s=601.5))["fallbacks"]

    assert after({"GRANT_TIMEOUT": 20}, 80) == {"warning"}
    assert after({"GRANT_TIMEOUT": 4}, 0) == {"ok"}
    assert after({"GRANT_TIMEOUT": 20}, 1_000) == {"ok"}
    assert after({"LOCAL_HIT": 500}, 0) == {"ok"}


def test_turns_and_leases_beyond_their_time() -> None:
    session = sessions.Session(
        session_id="s", turns=[sessions.Turn(turn=1, state=sessions.TURN_STATE_RUNNING)]
    )
    session.turns[0].begin_time.FromDatetime(AT - datetime.timedelta(seconds=100))
    assert checks.turns([session], AT, 120)[0].severity == "ok"
    assert checks.turns([session], AT, 60)[0].severity == "warning"
    lease = leases.Lease(lease_id="l", state=leases.LEASE_STATE_PENDING)
    lease.create_time.FromDatetime(AT - datetime.timedelta(seconds=11))
    assert checks.leases([lease], AT)[0].severity == "warning"
    lease.state = leases.LEASE_STATE_GRANTED
    lease.ttl.FromSeconds(30)
    lease.grant_time.FromDatetime(AT - datetime.timedelta(seconds=39))
    assert checks.leases([lease], AT)[0].severity == "ok"
    lease.grant_time.FromDatetime(AT - datetime.timedelta(seconds=41))
    assert checks.leases([lease], AT)[0].severity == "info"


def certificate(**until: float) -> Certificate:
    return Certificate(
        ("localhost",), AT - datetime.timedelta(days=1), AT + datetime.timedelta(**until)
    )


@pytest.mark.parametrize(
    ("found", "severity"),
    [
        (certificate(days=100), "ok"),
        (certificate(days=3), "warning"),
        (certificate(hours=-1), "problem"),
        (
            Certificate((), AT + datetime.timedelta(days=1), AT + datetime.timedelta(days=2)),
            "problem",
        ),
    ],
)
def test_certificates(found: Certificate, severity: str) -> None:
    assert [one.severity for one in endpoints.certificate("c", "x", found, AT)] == [severity]


@pytest.mark.parametrize(
    ("found", "tls", "severities"),
    [
        (Port("a:1", "nothing", error="refused"), False, ["problem"]),
        (Port("a:1", "plain"), False, ["ok"]),
        (Port("a:1", "plain"), True, ["problem"]),
        (Port("a:1", "tls", certificate=certificate(days=99)), False, ["problem"]),
        (Port("a:1", "tls", certificate=certificate(days=99)), True, ["ok", "ok"]),
        (
            Port("a:1", "tls", certificate=certificate(days=99), distrust="unknown"),
            True,
            ["ok", "ok", "problem"],
        ),
    ],
)
def test_ports(found: Port, tls: bool, severities: list[str]) -> None:
    said = endpoints.port("api", found, tls=tls, at=AT, start="start it")
    assert [one.severity for one in said] == severities


@pytest.mark.parametrize(
    ("page", "severity"),
    [
        (Page("u", 0, error="refused"), "warning"),
        (Page("u", 200, b"# HELP\nkvshuttle_epoch 3.0\n"), "ok"),
        (Page("u", 200, b"kvshuttle_epoch 4.0\n"), "problem"),
        (Page("u", 404), "problem"),
    ],
)
def test_metrics(page: Page, severity: str) -> None:
    assert [one.severity for one in endpoints.metrics(page, 3)] == [severity]


@pytest.mark.parametrize(
    ("page", "severities"),
    [
        (Page("u", 0, error="refused"), ["problem"]),
        (Page("u", 200, b"<html>"), ["problem"]),
        (Page("u", 200, b'{"status": "ok", "control_plane": {"state": "ok"}}'), ["ok"]),
        (Page("u", 503, b'{"status": "unavailable", "engines": []}'), ["problem"]),
        (
            Page(
                "u",
                200,
                b'{"status": "degraded", "control_plane": {"state": "down", "target": "t"}, '
                b'"engines": [{"worker_id": "d", "reachable": false}]}',
            ),
            ["warning", "warning"],
        ),
    ],
)
def test_gateways(page: Page, severities: list[str]) -> None:
    assert [one.severity for one in endpoints.gateway(page)] == severities


def test_skew_is_only_told_beyond_what_the_header_can_show() -> None:
    near = Page("u", 200, time=AT - datetime.timedelta(seconds=1))
    far = Page("u", 200, time=AT + datetime.timedelta(seconds=30))
    assert endpoints.skew_s([(Page("u", 0), AT), (near, AT)]) == 0.0
    assert endpoints.skew_s([(far, AT)]) == 30.0
    assert endpoints.skew_s([(Page("u", 200), AT)]) is None


def test_status_is_the_worst() -> None:
    made = [findings.ok("a", "x"), findings.info("b", "x"), findings.skipped("c", "x")]
    assert findings.exit_status(made) == 0
    made.append(findings.warning("d", "x", "y"))
    assert findings.exit_status(made) == 1
    made.insert(0, findings.problem("e", "x", "y"))
    assert findings.exit_status(made) == 2
