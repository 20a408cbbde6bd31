"""What went wrong, told in three parts: what, why (the server's word), what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import grpc

from kvshuttle.cli import exits
from kvshuttle.cli.reasons import REASONS
from kvshuttle.client import KVShuttleError

_EXITS = {
    grpc.StatusCode.INVALID_ARGUMENT: exits.USAGE,
    grpc.StatusCode.NOT_FOUND: exits.BAD_NEWS,
    grpc.StatusCode.DEADLINE_EXCEEDED: exits.UNREACHABLE,
    grpc.StatusCode.CANCELLED: exits.UNREACHABLE,
}
# What the server calls the metadata that --tenant sets.
TENANT_KEY = "kvshuttle-tenant"
_SUMMARY = {
    exits.BAD_NEWS: "not found",
    exits.USAGE: "not accepted",
    exits.UNREACHABLE: "cannot reach the control plane",
    exits.REFUSED: "refused",
}


class BadNewsError(Exception):
    """A command's own finding that ends it with `exits.BAD_NEWS`."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed command, ready to be told."""

    status: int
    summary: str
    reason: str
    message: str
    remedy: str

    def text(self) -> str:
        """For people, one to three lines."""
        reason = f" ({self.reason})" if self.reason else ""
        lines = [f"kvshuttle: {self.summary}{reason}: {self.message}"]
        if self.remedy:
            lines.append(f"  what to do: {self.remedy}")
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "error": {
                "exit_status": self.status,
                "reason": self.reason,
                "message": self.message,
                "remedy": self.remedy,
            }
        }


def of_usage(error: click.ClickException, program: str) -> Failure:
    """The failure of a command line that cannot be meant as it is."""
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx is not None else program
    return Failure(
        exits.USAGE,
        "wrong usage",
        "WRONG_USAGE",
        error.format_message(),
        f"see {command} --help",
    )


def of_call(error: KVShuttleError, target: str, *, tls: bool) -> Failure:
    """The failure of a call to the control plane."""
    answered = bool(error.reason)
    status = _EXITS.get(error.code, exits.REFUSED)
    if error.code is grpc.StatusCode.UNAVAILABLE and not answered:
        status = exits.UNREACHABLE
    message = error.message
    remedy = error.remedy
    if status == exits.UNREACHABLE:
        message, remedy = _unreachable(error, target, tls=tls)
    elif TENANT_KEY in message:
        message = "this command is about one tenant's session, and the caller may act for any"
        remedy = "name the tenant with --tenant (KVSHUTTLE_TENANT)"
    elif not remedy:
        remedy = _remedy(error)
    else:
        message = error.problem
    return Failure(status, _SUMMARY[status], error.reason, message, remedy)


def _unreachable(error: KVShuttleError, target: str, *, tls: bool) -> tuple[str, str]:
    text = error.message
    low = text.lower()
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return (
            f"{target} did not answer in time",
            "see whether the control plane is overloaded or a firewall drops packets; "
            "--timeout waits longer",
        )
    if "certificate_verify_failed" in low or "certificate verify failed" in low:
        return (
            f"{target}: its certificate was not accepted: {_last(text)}",
            "give the authority that signed it with --ca-file, and --server-name if it was issued "
            "for another name; kvshuttle doctor shows the certificate",
        )
    if "ssl" in low or "tls" in low or "handshake" in low:
        return (
            f"{target}: the TLS handshake failed: {_last(text)}",
            "the server may want a client certificate (--cert-file, --key-file) or serve without "
            "TLS (leave --ca-file and --tls out); kvshuttle doctor says which",
        )
    if "refused" in low:
        return (
            f"{target}: nothing listens there",
            "start the control plane, or name its API's address with --target (KVSHUTTLE_TARGET)",
        )
    if "http1" in low or "failed parsing http/2" in low:
        return (
            f"{target} does not speak gRPC",
            "name the control plane's API with --target (KVSHUTTLE_TARGET), not a gateway, an "
            "engine, or its metrics" + ("" if tls else "; if it serves TLS, give --ca-file"),
        )
    if not tls and ("socket closed" in low or "connection reset" in low or "eof" in low):
        return (
            f"{target} closed the connection: {_last(text)}",
            "if it serves TLS, give --ca-file (and --cert-file, --key-file, or --token-file)",
        )
    return (
        f"{target}: {_last(text)}",
        "check --target, the name's address and the way there; kvshuttle doctor checks each step",
    )


def _last(text: str) -> str:
    """gRPC puts what matters at the end, and a server's text may have lines."""
    _, _, tail = text.rpartition("last error: ")
    return " ".join(tail.split()).strip()


def _remedy(error: KVShuttleError) -> str:
    if error.reason in REASONS:
        return REASONS[error.reason].remedy
    match error.code:
        case grpc.StatusCode.NOT_FOUND:
            return (
                "list what there is (kvshuttle workers, sessions, leases --all); what has ended is "
                "listed for ten minutes"
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return "use an operator's certificate or token: see docs/operating.md, Who may call"
        case grpc.StatusCode.UNAUTHENTICATED:
            return "give --token-file, or --cert-file and --key-file"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "the control plane is older than this program: upgrade it, or use its version"
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN:
            return "look at the control plane's log at this time"
    return ""
