"""Structured logs of the agent: JSON lines on stderr, beside vLLM's own; ids, never tokens."""

from __future__ import annotations

import os
import sys
from typing import Any

import structlog

__all__ = ["get_logger"]


def get_logger(part: str) -> Any:
    """A logger for one part of the agent.

    It has its own configuration, since structlog's global one belongs to the engine's process.
    ``KVSHUTTLE_LOG_FORMAT=console`` gives lines for people.
    """
    renderer: Any = structlog.processors.JSONRenderer()
    if os.environ.get("KVSHUTTLE_LOG_FORMAT") == "console":
        renderer = structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        )
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
    ).bind(part=f"agent.{part}")
