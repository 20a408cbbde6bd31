"""What the commands that only look say."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvshuttle.cli.app import main
from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.cli.conftest import Site, kvshuttle
from tests.integration.controlplane.conftest import T, eventually

ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


async def test_status(site: Site) -> None:
    ran = await site.run("status")
    assert ran.status == 1, "no worker is ready: bad news"
    await site.pair()
    await site.begin()
    ran = await site.run("status")
    assert ran.status == 0
    for word in (site.target, "epoch 1", "2 ready", "1 active sessions", "1 running turns"):
        assert word in ran.out
    found = await site.read("status")
    assert found["workers"] == {"ready": 2, "draining": 0, "lost": 0, "fenced": 0}
    assert found["status"]["running_turns"] == 1
    assert found["status"]["uptime_s"] > 0


async def test_workers(site: Site) -> None:
    prefill, _ = await site.pair()
    await prefill.beat(
        2_000,
        pool=workers.PoolStats(total_blocks=1_000, free_blocks=700, held_blocks=200),
        counters=workers.WorkerCounters(return_bytes=5_000_000, fallbacks={"GRANT_TIMEOUT": 3}),
    )

    async def worker() -> workers.Worker:
        request = workers.GetWorkerRequest(worker_id="p")
        return (await site.cluster.GetWorker(request, timeout=T)).worker

    await eventually(worker, lambda x: x.pool.free_blocks == 700)
    ran = await site.run("workers")
    line = next(line for line in ran.out.splitlines() if line.startswith("p "))
    for word in ("prefill", "ready", "70 %", "20 %", "5 MB"):
        assert word in line
    one = await site.run("workers", "p")
    assert "GRANT_TIMEOUT" in one.out
    assert "was not granted within the time" in one.out
    assert "bfloat16" in one.out
    found = await site.read("workers")
    assert [w["ref"]["worker_id"] for w in found["workers"]] == ["d", "p"]
    assert found["more"] is False
    assert found["workers"][1]["counters"]["fallbacks"] == {"GRANT_TIMEOUT": 3}
    assert ISO.fullmatch(found["workers"][1]["heartbeat_time"])
    assert (await site.read("workers", "--limit", "1"))["more"] is True
    assert (await site.read("workers", "--state", "lost"))["workers"] == []


async def test_what_ran_on_a_lost_worker_is_not_said_to_run(site: Site) -> None:
    prefill, _ = await site.pair()
    await prefill.beat(2_000, pool=workers.PoolStats(total_blocks=10, running_requests=7_077))

    async def worker() -> workers.Worker:
        request = workers.GetWorkerRequest(worker_id="p")
        return (await site.cluster.GetWorker(request, timeout=T)).worker

    await eventually(worker, lambda x: x.pool.running_requests == 7_077)
    assert "7,077" in (await site.run("workers")).out
    await prefill.close()
    await eventually(worker, lambda x: x.state == workers.WORKER_STATE_LOST)
    listed = await site.run("workers")
    assert "lost" in listed.out
    assert "7,077" not in listed.out
    assert "when it was last heard: 7077 running" in (await site.run("workers", "p")).out


async def test_a_filter_by_a_worker_that_there_is_not(site: Site) -> None:
    """No worker of this name, and a worker with nothing, are two answers."""
    await site.pair()
    for command in ("sessions", "leases", "transfers"):
        assert (await site.run(command, "--worker", "d")).status == 0
        typo = await site.run(command, "--worker", "decode-9")
        assert typo.status == 1
        assert "decode-9" in typo.err


async def test_a_conversation_with_a_return(site: Site) -> None:
    prefill, decode = await site.pair()
    await site.first_turn(prefill, decode)
    await site.returned_turn(prefill, decode)

    found = await site.read("session", "s")
    turn = found["session"]["turns"][-1]
    assert (turn["turn"], turn["state"], turn["outcome"]) == (2, "ended", "completed")
    assert turn["plan"]["return_mode"] == "lazy"
    assert turn["usage"]["time_to_first_token_s"] == 0.142
    assert {lease["direction"] for lease in found["leases"]} == {"forward", "return"}
    ran = await site.run("session", "s")
    for word in ("p → d", "POLICY_ALWAYS", "142 ms", "85 %", "completed"):
        assert word in ran.out
    listed = await site.run("sessions")
    assert "POLICY_ALWAYS" in listed.out
    assert "d:512" in listed.out

    moved = await site.read("transfers", "--direction", "return")
    assert [one["stats"]["tokens"] for one in moved["transfers"]] == [384]
    assert moved["transfers"][0]["bytes_per_second"] == 384 * 23_000 / 0.005
    assert moved["summary"]["median_wait_s"] == 0.008
    ran = await site.run("transfers")
    for word in ("d → p", "p → d", "1.77 GB/s", "3 shown"):
        assert word in ran.out
    assert "no open leases" in (await site.run("leases")).out
    every = await site.read("leases", "--all", "--limit", "2")
    assert len(every["leases"]) == 2
    assert every["more"] is True
    lease = await site.run("lease", every["leases"][0]["lease_id"])
    assert "completed" in lease.out

    told = await site.run("explain", "s")
    assert told.status == 0
    for word in ("384 tokens came back", "8.83 MB in 5 ms", "waited 8 ms", "first token after"):
        assert word in told.out
    told_json = await site.read("explain", "s")
    assert told_json["turns"][0]["verdict"] == "good"
    assert told_json["turns"][0]["returned_tokens"] == 384
    for text in (ran.out, str(told_json), str(found)):
        assert "turn_token" not in text


async def test_explain_says_why_nothing_came_back_and_what_to_do(site: Site) -> None:
    prefill, decode = await site.pair()
    await site.first_turn(prefill, decode)
    await site.failed_turn(prefill, decode)
    ran = await site.run("explain", "s")
    assert ran.status == 1
    for word in ("TRANSFER_STALLED", "did not finish in five seconds", "to do", "network"):
        assert word in ran.out
    found = (await site.run("explain", "s", "-o", "json")).json
    assert found["turns"][0]["verdict"] == "bad"


async def test_tenants(site: Site) -> None:
    await site.pair()
    for tenant in ("acme", "other"):
        await site.sessions.BeginTurn(
            _begin("of-" + tenant), timeout=T, metadata=(("kvshuttle-tenant", tenant),)
        )
    everyone = await site.read("sessions")
    assert [one["session_id"] for one in everyone["sessions"]] == ["of-acme", "of-other"]
    own = await site.read("sessions", "--tenant", "acme")
    assert [one["session_id"] for one in own["sessions"]] == ["of-acme"]
    ran = await site.run("session", "of-acme", KVSHUTTLE_TENANT="acme")
    assert ran.status == 0
    assert (await site.run("session", "of-acme")).status == 1


def _begin(session_id: str) -> sessions.BeginTurnRequest:
    return sessions.BeginTurnRequest(session_id=session_id)


async def test_a_port_that_speaks_http_is_named_as_such() -> None:
    """As a gateway's, or an engine's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wrong = await kvshuttle("status", "--target", f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert wrong.status == 3
    assert "does not speak gRPC" in wrong.err
    assert "not a gateway" in wrong.err


async def test_errors_have_a_status_a_reason_and_a_remedy(site: Site) -> None:
    missing = await site.run("session", "nobody")
    assert missing.status == 1
    assert "nobody" in missing.err
    assert "what to do" in missing.err
    wrong = await site.run("sessions", "--limit", "-1")
    assert wrong.status == 2
    nowhere = await kvshuttle("status", "--target", "127.0.0.1:1")
    assert nowhere.status == 3
    assert "nothing listens there" in nowhere.err
    assert "--target" in nowhere.err
    for target in ("", "http://127.0.0.1:7400", "127.0.0.1", "127.0.0.1:99999"):
        none = await kvshuttle("status", "--target", target)
        assert none.status == 2
        assert f"target {target!r} is not host:port" in none.err
    told = await kvshuttle("status", "--target", "127.0.0.1:1", "-o", "json")
    assert told.out == ""
    assert '"exit_status": 3' in told.err
    half = await site.run("status", "--cert-file", __file__)
    assert half.status == 2
    assert "--key-file" in half.err
    clear = await kvshuttle("status", "--target", "192.0.2.1:7400", KVSHUTTLE_TOKEN="secret-word")
    assert clear.status == 2
    assert "clear text" in clear.err
    assert "secret-word" not in clear.err


async def test_wrong_usage_is_told_to_programs_too() -> None:
    """Whether `-o` was read before the mistake or not."""
    for arguments, word, command in (
        (("-o", "json", "sessions", "--limit", "-1"), "--limit", "kvshuttle sessions"),
        (("sessions", "--limit", "-1", "--output=json"), "--limit", "kvshuttle sessions"),
        (("-ojson", "nosuch"), "nosuch", "kvshuttle"),
        (("session", "-o", "json"), "SESSION_ID", "kvshuttle session"),
        (("fence", "w", "-o", "json"), "--attestation", "kvshuttle fence"),
    ):
        ran = await kvshuttle(*arguments)
        assert (ran.status, ran.out) == (2, "")
        error = json.loads(ran.err)["error"]
        assert (error["exit_status"], error["reason"]) == (2, "WRONG_USAGE")
        assert word in error["message"]
        assert error["remedy"] == f"see {command} --help"
    ran = await kvshuttle("nosuch", KVSHUTTLE_OUTPUT="json")
    assert json.loads(ran.err)["error"]["exit_status"] == 2
    # For people it stays as it is; the last `-o` counts.
    ran = await kvshuttle("-o", "json", "nosuch", "-o", "table")
    assert ran.err.startswith("Usage: ")


@pytest.mark.parametrize(
    "command",
    [
        ("status", "--timeout"),
        ("top", "--interval"),
        ("watch", "sessions", "--for"),
        ("doctor", "--stuck-after"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf", "1e999", "-1", "soon"])
def test_a_time_that_is_none_is_refused(
    command: tuple[str, ...], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *words, option = command
    assert main([*words, "--target=127.0.0.1:1", f"{option}={value}"]) == 2
    err = capsys.readouterr().err
    assert f"Invalid value for '{option}': " in err


async def test_the_gateways_variables_are_read(site: Site) -> None:
    ran = await kvshuttle("status", KVSHUTTLE_GW_CONTROL_PLANE=site.target)
    assert site.target in ran.out
    own = await kvshuttle(
        "status", KVSHUTTLE_GW_CONTROL_PLANE="127.0.0.1:1", KVSHUTTLE_TARGET=site.target
    )
    assert site.target in own.out


async def test_completion(site: Site) -> None:
    await site.pair()
    for shell in ("bash", "zsh", "fish"):
        ran = await kvshuttle("completion", shell)
        assert ran.status == 0
        assert "_KVSHUTTLE_COMPLETE" in ran.out
    ran = await kvshuttle(
        _KVSHUTTLE_COMPLETE="bash_complete",
        COMP_WORDS=f"kvshuttle --target {site.target} drain ",
        COMP_CWORD="4",
    )
    assert {line.rpartition(",")[2] for line in ran.out.split()} == {"p", "d"}
    ran = await kvshuttle(
        _KVSHUTTLE_COMPLETE="bash_complete", COMP_WORDS="kvshuttle dr", COMP_CWORD="1"
    )
    assert "drain" in ran.out


async def test_help_names_every_command() -> None:
    ran = await kvshuttle("--help")
    assert ran.status == 0
    for name in [
        "status",
        "workers",
        "sessions",
        "session",
        "leases",
        "transfers",
        "explain",
        "drain",
        "fence",
        "end-session",
        "watch",
        "top",
        "doctor",
        "completion",
    ]:
        assert re.search(rf"^  {name}\b", ran.out, re.MULTILINE), name


async def test_roles_alone(site: Site) -> None:
    """A cluster whose every worker does both has nothing to move, and says where it ran."""
    await site.agent("b", types.WORKER_ROLE_BOTH).connect()
    begun = await site.begin()
    await site.end(begun.turn.turn)
    ran = await site.run("explain", "s")
    assert ran.status == 0
    assert "all of it on b" in ran.out
    assert "SAME_WORKER" in ran.out
