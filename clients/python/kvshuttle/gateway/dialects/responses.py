"""OpenAI's responses, as vLLM serves them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from kvshuttle.gateway.dialects import said
from kvshuttle.gateway.dialects.base import Dialect, Route, Usage, count, dumped, estimate, start_of
from kvshuttle.gateway.dialects.listening import Listener, ResponseListener

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.gateway.errors import ApiError
    from kvshuttle.gateway.jsonspans import Path

__all__ = ["Responses", "response_id"]

# Tools that the client runs. Others are run inside vLLM, which then makes several requests of one.
_CLIENTS_TOOLS = frozenset({"function", "custom", "namespace"})
_SEQUENCE = re.compile(rb'"sequence_number": ?(\d+)')


class Responses(Dialect):
    """`/v1/responses`. A stream begins with events that say nothing of the engine but that it
    listens; it has no `[DONE]`."""

    route: Route = "responses"  # type: ignore[misc]
    path = "/v1/responses"
    usage_paths = (("usage",), ("response", "usage"))
    not_in_prefill = frozenset({"top_logprobs", "enable_response_messages", "stream_options"})
    end = re.compile(rb"(?m)^event: ?response\.(?:completed|incomplete|failed|cancelled)\r?$")
    error = re.compile(rb"(?m)^event: ?(?:error|response\.failed)\r?$")
    begun = re.compile(rb"(?m)^event: ?(?!response\.(?:created|queued|in_progress)\r?\n)\S+\r?\n")
    error_ends = True

    def limit_to_one_token(self, fields: dict[str, Any]) -> None:
        fields["max_output_tokens"] = 1
        fields["store"] = False
        fields["background"] = False

    def can_be_split(self, fields: Mapping[str, Any]) -> bool:
        """What an engine has stored, and what goes on in its background, is there only."""
        if fields.get("previous_response_id") is not None or fields.get("background"):
            return False
        tools = fields.get("tools")
        return not isinstance(tools, list) or all(
            isinstance(tool, dict) and tool.get("type") in _CLIENTS_TOOLS for tool in tools
        )

    def prompt_tokens(self, fields: Mapping[str, Any]) -> int:
        return estimate(fields.get("instructions"), fields.get("input"), fields.get("tools"))

    def start(self, fields: Mapping[str, Any]) -> list[Any] | None:
        found = start_of(fields.get("input"), fields.get("instructions"))
        return None if found is None else [*found, fields.get("tools")]

    def said(self, fields: Mapping[str, Any]) -> list[Any]:
        return said.of_input(fields.get("input"))

    def listener(self, fields: Mapping[str, Any]) -> Listener:
        return ResponseListener()

    def usage(self, usage: Mapping[str, Any]) -> Usage:
        details = _details(usage)
        return Usage(
            count(usage.get("input_tokens")) or 0,
            count(details.get("cached_tokens")),
            count(details.get("cache_write_tokens")),
            count(usage.get("output_tokens")) or 0,
        )

    def true_numbers(self, usage: Mapping[str, Any], found: Usage) -> dict[Path, int]:
        numbers: dict[Path, int] = {}
        if found.cached is not None:
            numbers["input_tokens_details", "cached_tokens"] = found.cached
            # A request that is split is one request inside the engine too.
            numbers["input_tokens_details", "cached_tokens_per_turn", 0] = found.cached
        if found.created is not None:
            numbers["input_tokens_details", "cache_write_tokens"] = found.created
        return numbers

    def error_event(self, error: ApiError, sent: bytes) -> bytes:
        numbers = _SEQUENCE.findall(sent)
        event = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return b"event: error\ndata: " + dumped(event) + b"\n\n"


def _details(usage: Mapping[str, Any]) -> Mapping[str, Any]:
    details = usage.get("input_tokens_details")
    return details if isinstance(details, dict) else {}


def response_id(raw: bytes) -> str | None:
    """The id in a whole answer, or in the first events of a stream."""
    if raw.startswith((b"event:", b"data:")):
        for line in raw.splitlines():
            if line.startswith(b"data:"):
                raw = line[len(b"data:") :]
                break
    try:
        fields = json.loads(raw)
    except ValueError:
        return None
    inner = fields.get("response", fields) if isinstance(fields, dict) else None
    found = inner.get("id") if isinstance(inner, dict) else None
    return found if isinstance(found, str) and found else None
