"""From what was found at addresses to findings. No I/O, no clock."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from typing import TYPE_CHECKING, Any

from kvshuttle.cli import human
from kvshuttle.cli.doctor.findings import Finding, info, ok, problem, warning

if TYPE_CHECKING:
    from pathlib import Path

    from kvshuttle.cli.doctor.probe import Certificate, Page, Port

EXPIRES_SOON = datetime.timedelta(days=14)
_EPOCH = re.compile(rb"^kvshuttle_epoch (\S+)$", re.MULTILINE)


def port(check: str, found: Port, *, tls: bool, at: datetime.datetime, start: str) -> list[Finding]:
    """A gRPC listener; `start` says what to start where nothing listens."""
    address = found.address
    if found.speaks == "nothing":
        return [
            problem(
                check,
                f"{address}: {found.error}",
                f"{start}; check the address, and firewalls or security groups on the way",
            )
        ]
    if found.speaks == "plain":
        if tls:
            return [
                problem(
                    check,
                    f"{address} does not speak TLS ({found.error})",
                    "leave --tls and --ca-file out, or start it with tls_cert and tls_key",
                )
            ]
        return [ok(check, f"{address} listens, without TLS")]
    if not tls:
        return [
            problem(
                check,
                f"{address} speaks TLS, and no TLS option was given",
                "give --ca-file, and --cert-file with --key-file or --token-file",
            )
        ]
    findings = [ok(check, f"{address} listens, with TLS")]
    if found.certificate is not None:
        findings += certificate(f"{check} certificate", address, found.certificate, at)
    if found.distrust:
        findings.append(
            problem(
                f"{check} certificate",
                f"{address}: not accepted: {found.distrust}",
                "give the authority that signed it with --ca-file, and with --server-name the "
                f"name it was issued for{_names(found.certificate)}",
            )
        )
    return findings


def _names(found: Certificate | None) -> str:
    if found is None or not found.names:
        return ""
    return f" (it has: {', '.join(found.names[:5])})"


def certificate(
    check: str, subject: str, found: Certificate, at: datetime.datetime
) -> list[Finding]:
    """Whether a certificate is within its time."""
    left = found.not_after - at
    until = f"{found.not_after:%Y-%m-%d %H:%M} UTC"
    if left < datetime.timedelta(0):
        ago = human.span(-left.total_seconds())
        return [problem(check, f"{subject}: expired {ago} ago ({until})", "renew it")]
    if found.not_before > at:
        return [
            problem(
                check,
                f"{subject}: valid only from {found.not_before:%Y-%m-%d %H:%M} UTC",
                "check this machine's clock",
            )
        ]
    if left < EXPIRES_SOON:
        return [
            warning(
                check,
                f"{subject}: expires in {human.span(left.total_seconds())} ({until})",
                "renew it; renewed files are read at the next connection",
            )
        ]
    return [ok(check, f"{subject}: valid until {until}")]


def certificate_file(
    check: str, path: Path, found: Certificate | Exception, at: datetime.datetime
) -> list[Finding]:
    """One of the caller's own files."""
    if isinstance(found, Exception):
        return [problem(check, f"{path}: {found}", "give a PEM file with a certificate")]
    return certificate(check, str(path), found, at)


def metrics(page: Page, epoch: int | None) -> list[Finding]:
    """The control plane's metrics."""
    if not page.status:
        return [
            warning(
                "metrics",
                f"{page.url}: {page.error}",
                "set metrics_address where Prometheus can reach it, or give --metrics-url",
            )
        ]
    match = _EPOCH.search(page.body)
    if page.status != 200 or match is None:
        return [
            problem(
                "metrics",
                f"{page.url}: status {page.status}, and no kvshuttle_epoch in it",
                "give the control plane's own address with --metrics-url",
            )
        ]
    theirs = int(float(match[1]))
    if epoch is not None and theirs != epoch:
        return [
            problem(
                "metrics",
                f"{page.url} is of epoch {theirs}, the API of epoch {epoch}",
                "this is another control plane, or one of before a restart: give the right "
                "--metrics-url, and scrape that",
            )
        ]
    return [ok("metrics", f"{page.url} answers, epoch {theirs}")]


def skew_s(pages: list[tuple[Page, datetime.datetime]]) -> float | None:
    """How much a server's wall clock is ahead of this one, to a second; None: nobody told."""
    for page, at in pages:
        if page.time is not None:
            ahead = (page.time - at).total_seconds()
            # The header has whole seconds, cut off.
            return 0.0 if -1.5 < ahead < 1.5 else ahead
    return None


def gateway(page: Page) -> list[Finding]:
    """What a gateway says of itself."""
    if not page.status:
        return [
            problem(
                "gateway",
                f"{page.url}: {page.error}",
                "start kvshuttle-gateway, or check --gateway",
            )
        ]
    report: Any = None
    with contextlib.suppress(ValueError):
        report = json.loads(page.body)
    if not isinstance(report, dict) or "status" not in report:
        return [
            problem(
                "gateway",
                f"{page.url}: status {page.status}, and not a gateway's answer",
                "give the gateway's base URL with --gateway",
            )
        ]
    found: list[Finding] = []
    word = str(report["status"])
    if word == "ok":
        found.append(ok("gateway", f"{page.url}: ok"))
    elif page.status == 503:
        found.append(
            problem(
                "gateway",
                f"{page.url}: it knows no engine",
                "see whether workers are ready, and whether it reaches the control plane",
            )
        )
    control = report.get("control_plane")
    if isinstance(control, dict) and control.get("state") != "ok":
        why = f" ({control['reason']})" if control.get("reason") else ""
        found.append(
            warning(
                "gateway",
                f"its control plane {control.get('target')} is {control.get('state')}{why}: turns "
                "go without KV movement",
                "check its --control-plane options; a gateway needs a certificate "
                "kvshuttle://gateway/NAME or a gateway's token",
            )
        )
    for one in report.get("engines") or ():
        if isinstance(one, dict) and not one.get("reachable"):
            found.append(
                warning(
                    "gateway",
                    f"it cannot reach engine {one.get('worker_id') or one.get('url')}",
                    "see whether the engine serves HTTP, and whether its agent's url is one that "
                    "gateways can reach",
                )
            )
    return found or [info("gateway", f"{page.url}: {word}")]


def engine(worker_id: str, page: Page) -> Finding:
    """An engine's own health."""
    if page.status == 200:
        return ok("engine", f"{worker_id}: {page.url} answers")
    said = page.error or f"status {page.status}"
    return problem(
        "engine",
        f"{worker_id}: {page.url}: {said}",
        "see the engine's log; if it serves, its agent's url is not one that can be reached here",
    )
