"""What an API has to say about itself, and what most of them have in common (OpenAI's way)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvshuttle.gateway import limits
from kvshuttle.gateway.dialects.said import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.gateway.dialects.listening import Listener
    from kvshuttle.gateway.errors import ApiError
    from kvshuttle.gateway.jsonspans import Path

__all__ = ["Dialect", "Route", "Usage", "count", "estimate", "start_of", "text_length"]

Route = Literal["chat", "completions", "responses", "messages"]

# A guess for texts of unknown language and tokenizer; the planner corrects it by what it learns.
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine says that a request cost, in tokens; None where it does not say."""

    prompt: int = 0
    cached: int | None = None
    # Written to the cache for the first time, where the engine counts that.
    created: int | None = None
    output: int = 0


class Dialect:
    """One API. Stateless: one object serves all requests."""

    route: ClassVar[Route]
    path: ClassVar[str]
    # Where a whole answer or an event of a stream may have its usage.
    usage_paths: ClassVar[tuple[Path, ...]] = (("usage",),)
    # What the prefill leg does not need. Everything that shapes the prompt stays: the engines'
    # block hashes of the two legs must be equal.
    not_in_prefill: ClassVar[frozenset[str]] = frozenset()
    # Lines of a stream: the regular end, an error, and what says that tokens have begun.
    end: ClassVar[re.Pattern[bytes]] = re.compile(rb"(?m)^data: ?\[DONE\]\r?$")
    error: ClassVar[re.Pattern[bytes]] = re.compile(rb'(?m)^data: ?\{"error"')
    begun: ClassVar[re.Pattern[bytes]] = re.compile(rb"(?m)^data:")
    # Whether a stream is over with an error; else the engine says its end after it.
    error_ends: ClassVar[bool] = False

    # Requests

    def prefill(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The prefill leg's fields: the same prompt, one token, not streamed."""
        kept = {name: value for name, value in fields.items() if name not in self.not_in_prefill}
        kept["stream"] = False
        self.limit_to_one_token(kept)
        return kept

    def limit_to_one_token(self, fields: dict[str, Any]) -> None:
        """Changes the fields of a request so that it generates one token and keeps nothing."""
        raise NotImplementedError

    def can_be_split(self, fields: Mapping[str, Any]) -> bool:
        """Whether two legs make sense."""
        raise NotImplementedError

    def prompt_tokens(self, fields: Mapping[str, Any]) -> int:
        """A guess of the prompt's length in tokens."""
        raise NotImplementedError

    def start(self, fields: Mapping[str, Any]) -> list[Any] | None:
        """What is equal in all turns of a conversation and differs between conversations: its
        instructions, tools and first message. None if there is no such thing."""
        raise NotImplementedError

    def said(self, fields: Mapping[str, Any]) -> list[Any]:
        """All that is said in it, piece by piece, as it looks the same in later turns."""
        raise NotImplementedError

    # Answers

    def listener(self, fields: Mapping[str, Any]) -> Listener:
        """For the answer to a request with these fields."""
        raise NotImplementedError

    def usage(self, usage: Mapping[str, Any]) -> Usage:
        """The engine's usage object, read."""
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        return Usage(
            count(usage.get("prompt_tokens")) or 0,
            count(details.get("cached_tokens")),
            count(details.get("created_cache_tokens")),
            count(usage.get("completion_tokens")) or 0,
        )

    def true_numbers(self, usage: Mapping[str, Any], found: Usage) -> dict[Path, int]:
        """What to say instead in decode's usage object, by what the prefill leg found: decode finds
        the whole prompt, since it was just brought there."""
        numbers: dict[Path, int] = {}
        if found.cached is not None:
            numbers["prompt_tokens_details", "cached_tokens"] = found.cached
        if found.created is not None:
            numbers["prompt_tokens_details", "created_cache_tokens"] = found.created
        return numbers

    # Errors

    def error_body(self, error: ApiError) -> bytes:
        """The gateway's own refusal, as the API's clients know errors."""
        return error.body()

    def engine_error(self, _status: int, body: bytes) -> bytes:
        """An engine's refusal, as the API's clients know errors. vLLM's own form is OpenAI's."""
        return body

    def error_event(self, error: ApiError, _sent: bytes) -> bytes:
        """An event that the API's clients raise as an error; `_sent` is what went before it."""
        return b"data: " + self.error_body(error) + b"\n\n"


def count(value: Any) -> int | None:
    """A count of tokens, if it is one; what cannot be one is as good as not told."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= limits.TOKENS else None


def estimate(*parts: Any) -> int:
    """About how many tokens the texts in these are."""
    return sum(map(text_length, parts)) // _CHARS_PER_TOKEN


def text_length(value: Any) -> int:
    """Characters of all texts in a value; media in data URLs and in base64 are not text."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else len(value)
    if isinstance(value, list):
        return sum(map(text_length, value))
    if isinstance(value, dict):
        if value.get("type") == "base64":
            return 0
        return sum(text_length(inner) for name, inner in value.items() if name != "input_audio")
    return 0


def start_of(messages: Any, *instructions: Any) -> list[Any] | None:
    """Instructions, system messages and the first message that is the user's, as clients repeat
    them: whether a text is alone or in a list, and where caching is asked for, changes from turn to
    turn."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return None
    system: list[Any] = []
    first: Any = None
    for message in messages:
        if not isinstance(message, dict):
            return None
        role = message.get("role")
        if role in ("system", "developer"):
            if first is None:
                system.append(plain(message.get("content")))
        elif role == "user":
            first = plain(message.get("content"))
            break
        elif first is None:
            first = plain(message)
    given = [plain(one) for one in instructions]
    if first is None and not system and not any(given):
        return None
    return [system, given, first]


def dumped(fields: Mapping[str, Any]) -> bytes:
    """JSON without spaces, in ASCII."""
    return json.dumps(fields, separators=(",", ":")).encode()
