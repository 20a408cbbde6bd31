"""Anthropic's messages, as vLLM serves them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from kvshuttle.gateway.dialects import said
from kvshuttle.gateway.dialects.base import Dialect, Route, Usage, count, dumped, estimate, start_of
from kvshuttle.gateway.dialects.listening import BlocksListener, Listener

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.gateway.errors import ApiError
    from kvshuttle.gateway.jsonspans import Path

__all__ = ["Messages"]

# The names of errors, by status.
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Messages(Dialect):
    """`/v1/messages`. Its `input_tokens` are those that were found nowhere; its streams end with
    `message_stop`, or with an error."""

    route: Route = "messages"  # type: ignore[misc]
    path = "/v1/messages"
    usage_paths = (("usage",), ("message", "usage"))
    end = re.compile(rb"(?m)^event: ?message_stop\r?$")
    error = re.compile(rb"(?m)^event: ?error\r?$")
    begun = re.compile(rb"(?m)^event: ?(?!ping\r?\n)\S+\r?\n")
    error_ends = True

    def limit_to_one_token(self, fields: dict[str, Any]) -> None:
        fields["max_tokens"] = 1
        thinking = fields.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") == "enabled":
            # vLLM refuses a budget beyond max_tokens. It shapes the answer only: without one the
            # prompt is the same.
            fields["thinking"] = {"type": "adaptive"}

    def can_be_split(self, fields: Mapping[str, Any]) -> bool:
        return True

    def prompt_tokens(self, fields: Mapping[str, Any]) -> int:
        return estimate(fields.get("system"), fields.get("messages"), fields.get("tools"))

    def start(self, fields: Mapping[str, Any]) -> list[Any] | None:
        found = start_of(fields.get("messages"), fields.get("system"))
        return None if found is None else [*found, fields.get("tools")]

    def said(self, fields: Mapping[str, Any]) -> list[Any]:
        return said.of_messages(fields.get("messages"))

    def listener(self, fields: Mapping[str, Any]) -> Listener:
        return BlocksListener()

    def usage(self, usage: Mapping[str, Any]) -> Usage:
        cached = count(usage.get("cache_read_input_tokens"))
        created = count(usage.get("cache_creation_input_tokens"))
        rest = count(usage.get("input_tokens")) or 0
        return Usage(
            count(rest + (cached or 0) + (created or 0)) or 0,
            cached,
            created,
            count(usage.get("output_tokens")) or 0,
        )

    def true_numbers(self, usage: Mapping[str, Any], found: Usage) -> dict[Path, int]:
        said = self.usage(usage)
        if said.cached is None or found.cached is None:
            return {}  # it does not say how many were found, as at a stream's start
        created = said.created or 0
        if said.created is not None and found.created is not None:
            created = found.created
        return {
            ("cache_read_input_tokens",): found.cached,
            ("cache_creation_input_tokens",): created,
            ("input_tokens",): max(0, said.prompt - found.cached - created),
        }

    def error_body(self, error: ApiError) -> bytes:
        return _error(error.status, error.message)

    def engine_error(self, status: int, body: bytes) -> bytes:
        """vLLM says in OpenAI's form what it finds before it looks at the route, and calls errors
        by names of its own in both."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return body
        error = fields.get("error") if isinstance(fields, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return _error(status, message) if isinstance(message, str) else body

    def error_event(self, error: ApiError, _sent: bytes) -> bytes:
        return b"event: error\ndata: " + self.error_body(error) + b"\n\n"


def _error(status: int, message: str) -> bytes:
    kind = _ERRORS.get(status, "api_error" if status >= 500 else _ERRORS[400])
    return dumped({"type": "error", "error": {"type": kind, "message": message}})
