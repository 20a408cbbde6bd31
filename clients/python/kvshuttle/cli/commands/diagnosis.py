"""`doctor`: whether a deployment is as it must be, and what to do where it is not."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
import grpc
from rich.table import Table
from rich.text import Text

from kvshuttle.addresses import split_address
from kvshuttle.cli import failure, human
from kvshuttle.cli.commands.cluster import all_workers
from kvshuttle.cli.commands.leases import OPEN
from kvshuttle.cli.doctor import checks, endpoints, findings, probe
from kvshuttle.cli.doctor.workers import Look
from kvshuttle.cli.options import Command, Seconds
from kvshuttle.cli.run import connect, gather, pass_options
from kvshuttle.client import KVShuttleError, PermissionDeniedError
from kvshuttle.v1 import session_service_pb2 as session_pb

if TYPE_CHECKING:
    import datetime

    from kvshuttle.cli.doctor.findings import Finding
    from kvshuttle.cli.options import Options
    from kvshuttle.cli.output import Printer
    from kvshuttle.client import AsyncClient, TlsOptions

# Longer than the interval of heartbeats (1 s unless set), so that each worker has sent one.
PAUSE_S = 1.5
STUCK_AFTER_S = 120.0
# Sessions and leases that are looked through; a page at a time.
LOOKED_AT = 10_000
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


@dataclass(slots=True)
class _Examination:
    """One run: what to look at, and what was found so far."""

    options: Options
    tls: TlsOptions | None
    agent_target: str
    metrics_url: str
    gateway: str
    engines: bool
    stuck_after_s: float
    findings: list[Finding] = field(default_factory=list)
    pages: list[tuple[probe.Page, datetime.datetime]] = field(default_factory=list)

    async def page(self, url: str) -> probe.Page:
        """One HTTP answer, with the time at which it came."""
        found = await asyncio.to_thread(probe.get, url, self.options.timeout)
        self.pages.append((found, human.now()))
        return found

    async def run(self) -> None:
        """Everything, from the outside in."""
        self._own_files()
        reached = await self._port("api", self.options.target, "start kvshuttle-controlplane")
        if self.agent_target:
            await self._port(
                "agent port", self.agent_target, "see the control plane's agent_address"
            )
        else:
            self.findings.append(
                findings.skipped("agent port", "not looked at", "give --agent-target HOST:PORT")
            )
        metrics = await self.page(self.metrics_url) if self.metrics_url else None
        gateway = await self.page(f"{self.gateway.rstrip('/')}/health") if self.gateway else None
        epoch = await self._control_plane() if reached else None
        if metrics is not None:
            self.findings += endpoints.metrics(metrics, epoch)
        else:
            self.findings.append(findings.skipped("metrics", "not looked at", "give --metrics-url"))
        if gateway is not None:
            self.findings += endpoints.gateway(gateway)

    def _own_files(self) -> None:
        options, at = self.options, human.now()
        for check, path in (("own certificate", options.cert_file), ("authority", options.ca_file)):
            if path is None:
                continue
            found: probe.Certificate | Exception
            try:
                found = probe.certificate_file(path)
            except (OSError, ValueError) as error:
                found = error
            self.findings += endpoints.certificate_file(check, path, found, at)

    async def _port(self, check: str, address: str, start: str) -> bool:
        """A listener of the control plane. Whether calls to it make sense."""
        found = await asyncio.to_thread(probe.port, address, self.tls, self.options.timeout)
        said = endpoints.port(check, found, tls=self.tls is not None, at=human.now(), start=start)
        self.findings += said
        if any(one.severity == "problem" for one in said):
            return False
        await self._health(check, address)
        return True

    async def _health(self, check: str, address: str) -> None:
        """gRPC's own health service, which needs no identity (but mTLS, where that is asked)."""
        async with self.options.client_options().channel(address) as channel:
            ask = channel.unary_unary(
                _HEALTH,
                request_serializer=lambda message: message,
                response_deserializer=lambda message: message,
            )
            try:
                answer = await ask(b"", timeout=self.options.timeout)
            except grpc.aio.AioRpcError as error:
                wants = self.tls is not None and self.tls.cert_file is None
                if error.code() is grpc.StatusCode.UNAVAILABLE and wants:
                    self.findings.append(
                        findings.info(
                            check,
                            f"{address} wants a client certificate, so its health was not asked "
                            "for",
                            "give --cert-file and --key-file",
                        )
                    )
                    return
                self.findings.append(
                    findings.problem(
                        check,
                        f"{address}: no answer to a gRPC health check ({error.code().name}: "
                        f"{' '.join((error.details() or '').split())[-160:]})",
                        "check that this is kvshuttle's port, and the certificates of both sides",
                    )
                )
                return
        if answer != _SERVING:
            self.findings.append(
                findings.problem(check, f"{address} says that it does not serve", "it is stopping")
            )

    async def _control_plane(self) -> int | None:
        """What the control plane says. Its epoch, if it told."""
        try:
            async with connect(self.options) as client:
                first = await _look(client)
                await asyncio.sleep(PAUSE_S)
                second = await _look(client)
                self.findings += checks.cluster(
                    first,
                    second,
                    own_version=importlib.metadata.version("kvshuttle"),
                    skew_s=endpoints.skew_s(self.pages),
                )
                await self._open_things(client, second)
                if self.engines:
                    await self._engines(second)
                return second.status.epoch
        except PermissionDeniedError as error:
            self.findings.append(
                findings.problem(
                    "access",
                    error.message,
                    "use an operator's certificate or token: see docs/operating.md, Who may call",
                )
            )
        except KVShuttleError as error:
            told = failure.of_call(error, self.options.target, tls=self.tls is not None)
            self.findings.append(findings.problem("api", told.message, told.remedy))
        return None

    async def _open_things(self, client: AsyncClient, look: Look) -> None:
        at = human.now()
        if look.status.running_turns:
            listed = client.list_sessions(state=session_pb.SESSION_STATE_ACTIVE)
            sessions, more = await gather(listed, LOOKED_AT)
            self.findings += checks.turns(sessions, at, self.stuck_after_s)
            if more:
                self.findings.append(
                    findings.info("turns", f"only the first {LOOKED_AT} sessions were looked at")
                )
        else:
            self.findings.append(findings.ok("turns", "none runs"))
        leases, _ = await gather(client.list_leases(states=OPEN), LOOKED_AT)
        self.findings += checks.leases(leases, at)

    async def _engines(self, look: Look) -> None:
        live = [one for one in look.workers if one.url]
        pages = await asyncio.gather(*(self.page(f"{one.url.rstrip('/')}/health") for one in live))
        self.findings += [
            endpoints.engine(one.ref.worker_id, page) for one, page in zip(live, pages, strict=True)
        ]


async def _look(client: AsyncClient) -> Look:
    start_s = time.monotonic()
    status = await client.get_status()
    end_s = time.monotonic()
    workers = await all_workers(client)
    return Look((start_s + end_s) / 2, human.now(), status, workers, took_s=end_s - start_s)


@click.command("doctor", cls=Command)
@click.option(
    "--agent-target",
    metavar="HOST:PORT",
    help="The control plane's listener for agents.  [the next port, if the API's is 7400]",
)
@click.option(
    "--metrics-url", metavar="URL", help="Its metrics.  [port 7402, if the API's is 7400]"
)
@click.option("--gateway", default="", metavar="URL", help="A gateway to look at too.")
@click.option("--engines", is_flag=True, help="Ask each engine for its health too.")
@click.option(
    "--stuck-after",
    type=Seconds(min=0, min_open=True),
    default=STUCK_AFTER_S,
    show_default=True,
    metavar="SECONDS",
    help="A turn that runs for longer is told.",
)
@click.option("--brief", is_flag=True, help="Only what is not as it should be.")
@pass_options
def doctor(
    options: Options,
    agent_target: str | None,
    metrics_url: str | None,
    gateway: str,
    engines: bool,
    stuck_after: float,
    brief: bool,
) -> int:
    """Check a deployment, and say what to do about what is wrong.

    It takes two looks, a heartbeat apart. Exit status 0: nothing is wrong, 1: warnings, 2:
    problems.
    """
    for name, address in (("--target", options.target), ("--agent-target", agent_target)):
        try:
            host, number = split_address(address) if address else ("", 0)
        except ValueError as error:
            raise click.UsageError(f"{name}: {error}") from None
        if name == "--target":
            usual = number == 7400
            literal = f"[{host}]" if ":" in host else host
            if agent_target is None:
                agent_target = f"{literal}:7401" if usual else ""
            if metrics_url is None:
                metrics_url = f"http://{literal}:7402/metrics" if usual else ""
    examination = _Examination(
        options,
        options.tls_options(),
        agent_target or "",
        metrics_url or "",
        gateway,
        engines,
        stuck_after,
    )
    try:
        asyncio.run(examination.run())
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None
    status = findings.exit_status(examination.findings)
    printer = options.printer()
    if printer.as_json:
        printer.document(
            {
                "findings": [one.document() for one in examination.findings],
                "exit_status": status,
            }
        )
    else:
        _print(printer, examination.findings, brief=brief)
    return status


_MARKS = {
    "ok": ("✓", "green"),
    "info": ("i", "cyan"),
    "skipped": ("-", "dim"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
}


def _print(printer: Printer, found: list[Finding], *, brief: bool) -> None:
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(max_width=max(40, min(printer.width - 24, 120)))
    for one in found:
        if brief and one.severity not in ("warning", "problem"):
            continue
        mark, style = _MARKS[one.severity]
        grid.add_row(Text(mark, style=style), one.check, Text(one.message))
        if one.remedy:
            grid.add_row("", "", Text(f"→ {one.remedy}", style=style))
    if grid.row_count:
        printer.print(grid)
    counts = {
        name: sum(one.severity == name for one in found) for name in ("problem", "warning", "ok")
    }
    total = Text.assemble(
        (_many(counts["problem"], "problem"), "red" if counts["problem"] else ""),
        ", ",
        (_many(counts["warning"], "warning"), "yellow" if counts["warning"] else ""),
        ", ",
        (f"{counts['ok']} ok", "green"),
    )
    printer.line(total)


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
