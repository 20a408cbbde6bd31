"""Log lines: JSON or console, of the gateway and of the libraries under it.

No line carries a prompt, an answer, an API key or a turn token.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from structlog.types import EventDict, Processor

    from kvshuttle.gateway.settings import GatewaySettings


def _without_colors(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """uvicorn sends its messages a second time, with colours."""
    event.pop("color_message", None)
    return event


def configure(settings: GatewaySettings) -> None:
    """Sends everything to stderr in the chosen form."""
    level = getattr(logging, settings.log_level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_colors,
    ]
    renderer: list[Processor]
    if settings.log_format == "json":
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Where rich is installed, structlog's default prints every frame's variables, prompts and
        # keys among them; and takes minutes over a deep stack.
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    # One line a request is ours; httpx would add one a leg, with the engines' URLs.
    for name in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared[:2], shared[3], structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
