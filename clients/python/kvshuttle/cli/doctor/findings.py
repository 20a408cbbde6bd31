"""What a check found, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvshuttle.cli import exits

if TYPE_CHECKING:
    from collections.abc import Iterable

Severity = Literal["ok", "info", "skipped", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. `remedy` is set where there is something to do."""

    check: str
    severity: Severity
    message: str
    remedy: str = ""

    def document(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def ok(check: str, message: str) -> Finding:
    """As it should be."""
    return Finding(check, "ok", message)


def info(check: str, message: str, remedy: str = "") -> Finding:
    """Worth knowing; no trouble."""
    return Finding(check, "info", message, remedy)


def skipped(check: str, message: str, remedy: str = "") -> Finding:
    """Not looked at."""
    return Finding(check, "skipped", message, remedy)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Works, and is about to be a trouble, or costs speed."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Does not work."""
    return Finding(check, "problem", message, remedy)


def exit_status(findings: Iterable[Finding]) -> int:
    """0, 1 with warnings, 2 with problems."""
    severities = {one.severity for one in findings}
    if "problem" in severities:
        return exits.DOCTOR_PROBLEMS
    return exits.DOCTOR_WARNINGS if "warning" in severities else exits.DOCTOR_OK
