"""What the commands that change something do."""

from __future__ import annotations

from kvshuttle.v1 import cluster_service_pb2 as workers
from kvshuttle.v1 import types_pb2 as types
from tests.integration.cli.conftest import CHAIN, Site
from tests.integration.cli.terminal import Terminal
from tests.integration.controlplane.conftest import T


async def state(site: Site, worker_id: str) -> str:
    request = workers.GetWorkerRequest(worker_id=worker_id)
    found = (await site.cluster.GetWorker(request, timeout=T)).worker
    return workers.WorkerState.Name(found.state)


async def test_drain_and_back(site: Site) -> None:
    await site.pair()
    ran = await site.run("drain", "p")
    assert (ran.status, ran.out.splitlines()[0]) == (0, "p is draining")
    assert await state(site, "p") == "WORKER_STATE_DRAINING"
    found = await site.read("drain", "p", "--undo")
    assert found["worker"]["state"] == "ready"
    missing = await site.run("drain", "nobody")
    assert missing.status == 1
    assert "kvshuttle workers" in missing.err


async def test_fence_asks_and_attests(site: Site) -> None:
    prefill, _ = await site.pair()
    refused = await site.run("fence", "p")
    assert refused.status == 2
    assert "--attestation" in refused.err
    assert (await site.run("fence", "p", "--attestation", "seen dead")).status == 2
    assert await state(site, "p") == "WORKER_STATE_READY"
    long = await site.run("fence", "p", "--yes", "--attestation", "x" * 201)
    assert long.status == 2
    empty = await site.run("fence", "p", "--yes", "--attestation", " ")
    assert empty.status == 2
    wrong = await site.run(
        "fence", "p", "--yes", "--attestation", "seen dead", "--incarnation", "999"
    )
    assert wrong.status == 4
    assert "INCARNATION_MISMATCH" in wrong.err
    assert "what to do: look at kvshuttle workers again" in wrong.err
    done = await site.run("fence", "p", "--yes", "--attestation", "seen dead")
    assert done.status == 0
    assert f"boot {prefill.ref.incarnation} of p is fenced" in done.out
    assert await state(site, "p") == "WORKER_STATE_FENCED"
    again = await site.run("fence", "p", "--yes", "--attestation", "seen dead")
    assert again.status in (0, 4)


async def test_fence_asks_on_a_terminal(site: Site) -> None:
    await site.pair()
    async with Terminal("--target", site.target, "fence", "p", columns=100) as terminal:
        await terminal.until("does not look dead")
        await terminal.until("Who attests")
        terminal.press("seen dead, J.D.\r")
        await terminal.until("writes to no memory [y/N]")
        terminal.press("n\r")
        assert await terminal.ended() == 130
    assert await state(site, "p") == "WORKER_STATE_READY"
    async with Terminal("--target", site.target, "fence", "p") as terminal:
        await terminal.until("Who attests")
        terminal.press("seen dead, J.D.\r")
        await terminal.until("[y/N]")
        terminal.press("y\r")
        assert await terminal.ended() == 0
        await terminal.until("is fenced")
    assert await state(site, "p") == "WORKER_STATE_FENCED"


async def test_end_session(site: Site) -> None:
    prefill, decode = await site.pair()
    await site.first_turn(prefill, decode)
    found = await site.read("end-session", "s")
    assert found["session"]["state"] == "ended"
    assert (await site.run("end-session", "nobody")).status == 1
    ran = await site.run("sessions", "--state", "ended")
    assert " s " in ran.out


async def test_revoke(site: Site) -> None:
    prefill, decode = await site.pair()
    begun = await site.begin()
    await prefill.offer(CHAIN[:4], "s", begun.turn_token, types.LEG_PREFILL)
    await prefill.harden(await prefill.told("harden"), CHAIN)
    grant = await decode.told("grant")
    listed = await site.read("leases")
    assert [one["lease_id"] for one in listed["leases"]] == [grant.lease_id]
    ran = await site.run("revoke", grant.lease_id, "--reason", "by hand")
    assert ran.status == 0
    assert (await decode.told("revoke", lease_id=grant.lease_id)).reason == "by hand"
