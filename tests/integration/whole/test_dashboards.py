"""Every query of the dashboards and alerts, answered by Prometheus itself on real scrapes."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvshuttle.controlplane.model.limits import Limits
from tests.integration.controlplane.conftest import eventually
from tests.integration.whole.stack import Stack, running_stack
from tests.unit.observability.queries import RULES, shipped

PROGRAM = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="there is no prometheus here (Debian has it)"),
]
# Of one query of a panel, in a cluster of two workers.
MOST_LINES = 12
# Of these there is nothing where nothing goes wrong.
QUIET = (
    "alert ",
    "Begun, and not begun by reason B",
    "Blocks given up early",
    "Calls refused",
    "Clients that went away",
    "Extended",
    "Legs that recomputed",
    "Not made",
    "Prefixes of other sessions",
    "Requests that failed",
    "Served in spite of",
    "Why they ended otherwise",
)


class Prometheus:
    """A real one, on a free port."""

    def __init__(self, path: Path, targets: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        configuration = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]}
                for job, target in targets.items()
            ],
        }
        (path / "prometheus.yaml").write_text(json.dumps(configuration), encoding="utf-8")
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=20
        )
        self._log = (path / "prometheus.log").open("w")
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={path / 'prometheus.yaml'}",
                f"--storage.tsdb.path={path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    async def ask(self, query: str) -> list[Any]:
        """The instant value of a query; AssertionError with Prometheus' words where it refuses."""
        answer = await self._http.get("/query", params={"query": query})
        if answer.status_code == 503:  # it reads its log of writes
            raise httpx.ConnectError("not ready")
        said = answer.json()
        assert said["status"] == "success", said
        result: list[Any] = said["data"]["result"]
        return result

    async def until(self, query: str) -> None:
        """Waits until there is anything."""

        async def sees() -> bool:
            try:
                return bool(await self.ask(query))
            except httpx.HTTPError:  # it is not up yet
                return False

        await eventually(sees, bool, 30)

    async def close(self) -> None:
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)
        await self._http.aclose()
        self._log.close()


async def talk(stack: Stack) -> None:
    """Conversations, one after another, without end."""
    for number in itertools.count():
        for turn in range(1, 4):
            answer = await stack.gateway.chat(
                headers={"x-session-id": f"s{number}"},
                messages=[{"role": "user", "content": "hello " * 100 * turn}],
                stream=True,
            )
            assert answer.status_code == 200
            await asyncio.sleep(0.1)


async def test_prometheus_answers_every_query(tmp_path: Path) -> None:
    async with running_stack(tmp_path, Limits(), {"metrics_address": "127.0.0.1:0"}) as stack:
        prometheus = Prometheus(
            tmp_path,
            {
                "kvshuttle-controlplane": stack.cluster.server.addresses.metrics,
                "kvshuttle-gateway": stack.gateway.server.url.removeprefix("http://"),
            },
        )
        talking: asyncio.Task[None] | None = None
        try:
            for job in ("controlplane", "gateway"):
                await prometheus.until(f'up{{job="kvshuttle-{job}"}} == 1')
            talking = asyncio.create_task(talk(stack))
            await prometheus.until("rate(kvshuttle_transfer_bytes_total[1m]) > 0")

            async def empty() -> set[str]:
                """Panels without data, where there should be some by now."""
                found = {where for where, query in shipped() if not await prometheus.ask(query)}
                return {one for one in found if not any(word in one for word in QUIET)}

            # Some rates need one scrape more.
            await eventually(empty, lambda found: not found, 20)
            # A legend that can be read: no panel has a line for every method that there is.
            lines = {where: len(await prometheus.ask(query)) for where, query in shipped()}
            assert {where: count for where, count in lines.items() if count > MOST_LINES} == {}
            firing = await prometheus.ask('ALERTS{alertstate="firing"}')
            assert firing == []
            assert not talking.done(), talking.result()
        finally:
            if talking is not None:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)
            await prometheus.close()
