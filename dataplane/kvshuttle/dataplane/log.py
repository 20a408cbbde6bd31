"""Structured logs of the agent: JSON lines on stderr, beside vLLM's own; ids, never tokens."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

__all__ = ["get_logger"]


def _pid(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # Asked for each line: vLLM forks processes that have imported this already.
    event["pid"] = os.getpid()
    return event


def get_logger(part: str) -> Any:
    """A logger for one part of the agent.

    It has its own configuration, since structlog's global one belongs to the engine's process.
    ``KVSHUTTLE_LOG_FORMAT=console`` gives lines for people, ``KVSHUTTLE_LOG_LEVEL=debug`` a line
    for each step of each lease (:mod:`kvshuttle.dataplane.journal`); the default is ``info``.
    """
    renderer: Any = structlog.processors.JSONRenderer()
    if os.environ.get("KVSHUTTLE_LOG_FORMAT") == "console":
        renderer = structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        )
    name = os.environ.get("KVSHUTTLE_LOG_LEVEL", "info").upper()
    level = logging.getLevelNamesMapping().get(name, logging.INFO)
    return structlog.wrap_logger(
        # A line is one write: an engine's processes share their stderr, and a line in two pieces
        # has another process's in its midst now and then.
        structlog.WriteLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _pid,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    ).bind(part=f"agent.{part}")
