"""The program as users run it, against a real control plane with scripted agents."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvshuttle.controlplane.model.limits import MS, SECOND, Limits
from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import BLOCK, Agent, hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually

CHAIN = hashes("conversation", 64)
RUN_S = 100


@dataclasses.dataclass(frozen=True)
class Ran:
    """A command that ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**more: str) -> dict[str, str]:
    """Nothing of the caller's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVSHUTTLE_")}
    kept.pop("NO_COLOR", None)
    kept.pop("COLUMNS", None)
    # A machine under load decides no test.
    return kept | {"KVSHUTTLE_TIMEOUT": str(RUN_S)} | more


async def kvshuttle(*arguments: str, stdin: str = "", **env: str) -> Ran:
    """Runs the program with pipes."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvshuttle.cli",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**env),
    )
    async with asyncio.timeout(RUN_S):
        out, err = await child.communicate(stdin.encode())
    assert child.returncode is not None
    ran = Ran(child.returncode, out.decode(), err.decode())
    assert "Traceback" not in ran.err, ran.err
    return ran


class Site(Cluster):
    """A control plane, and the program pointed at it."""

    @property
    def target(self) -> str:
        return self.server.addresses.api

    async def run(self, *arguments: str, **more: str) -> Ran:
        return await kvshuttle("--target", self.target, *arguments, **more)

    async def read(self, *arguments: str) -> Any:
        """The JSON that a command prints when all is well."""
        ran = await self.run("-o", "json", *arguments)
        assert ran.status == 0, ran
        return ran.json

    async def first_turn(self, prefill: Agent, decode: Agent, blocks: int = 10) -> None:
        """A turn without a return: forward only."""
        begun = await self.begin()
        await prefill.told("expect_turn", turn_token=begun.turn_token)
        await self._forward(prefill, decode, begun.turn_token, 0, blocks)
        await self._end(begun.turn.turn, blocks, cached=0)

    async def returned_turn(self, prefill: Agent, decode: Agent, blocks: int = 14) -> None:
        """A turn under whose lease prefill reads what decode holds, and that computes the rest."""
        begun = await self.begin(return_policy=sessions.RETURN_POLICY_ALWAYS)
        expect = await prefill.told("expect_turn", turn_token=begun.turn_token)
        await decode.harden(await decode.told("harden", lease_id=expect.lease_id), CHAIN)
        grant = await prefill.told("grant", lease_id=expect.lease_id)
        back = grant.blocks.range.end
        await prefill.publish(grant.lease_id, back)
        await self._forward(prefill, decode, begun.turn_token, back, blocks)
        await self._end(begun.turn.turn, blocks, cached=back * BLOCK)

    async def failed_turn(self, prefill: Agent, decode: Agent) -> None:
        """A turn whose return is granted and fails on the way."""
        begun = await self.begin(return_policy=sessions.RETURN_POLICY_ALWAYS)
        expect = await prefill.told("expect_turn", turn_token=begun.turn_token)
        await decode.harden(await decode.told("harden", lease_id=expect.lease_id), CHAIN)
        grant = await prefill.told("grant", lease_id=expect.lease_id)
        await prefill.say(
            stopped=agents.LeaseStopped(
                lease_id=grant.lease_id,
                outcome=agents.TRANSFER_OUTCOME_FAILED,
                reason="TRANSFER_STALLED",
            )
        )
        await self.ended_lease(grant.lease_id)
        await self._end(begun.turn.turn, 12, cached=0)

    async def ended_lease(self, lease_id: str) -> None:
        async def read() -> leases.Lease:
            request = leases.GetLeaseRequest(lease_id=lease_id)
            return (await self.leases.GetLease(request, timeout=T)).lease

        await eventually(read, lambda x: x.state >= leases.LEASE_STATE_COMPLETED)

    async def _forward(
        self, prefill: Agent, decode: Agent, token: str, has: int, blocks: int
    ) -> None:
        await prefill.offer(CHAIN[:blocks], "s", token, types.LEG_PREFILL)
        await prefill.harden(await prefill.told("harden"), CHAIN)
        grant = await decode.told("grant", turn_token=token)
        await decode.publish(grant.lease_id, blocks - has)
        await prefill.told("reader_stopped", lease_id=grant.lease_id)
        # The answer's tokens fill two blocks more: that is what prefill lacks the next time.
        await decode.offer(CHAIN[: blocks + 2], "s", token, types.LEG_DECODE)
        await self.ended_lease(grant.lease_id)

    async def _end(self, turn: int, blocks: int, *, cached: int) -> None:
        usage = sessions.TurnUsage(
            prompt_tokens=blocks * BLOCK + 5, cached_tokens=cached, output_tokens=20
        )
        usage.time_to_first_token.FromMilliseconds(142)
        await self.end(turn, usage=usage)


@pytest.fixture
def limits() -> Limits:
    """The real ones, but short where a test would wait for them; returns are lazy."""
    return dataclasses.replace(
        Limits(),
        tick_ns=20 * MS,
        watch_progress_ns=200 * MS,
        silence_ns=60 * SECOND,
        eager=False,
    )


@pytest.fixture
async def site(tmp_path: Path, limits: Limits) -> AsyncIterator[Site]:
    site = Site(tmp_path, limits)
    await site.start()
    yield site
    await site.stop()
