"""Which conversation a request belongs to.

A wrong guess is harmless: KV is matched by the hash of the tokens, never by the session's name.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvshuttle.gateway.body import prompt_count
from kvshuttle.gateway.errors import bad_request

if TYPE_CHECKING:
    from kvshuttle.gateway.body import RequestBody

SESSION_HEADER = "x-session-id"
# The limit of BeginTurnRequest.session_id.
MAX_SESSION_ID_CHARS = 256
# A completion's first turn is recognized in its later ones by this much of its start.
_PROMPT_HEAD_CHARS = 256
_PROMPT_HEAD_TOKENS = 64
_DIGEST_CHARS = 40

Source = Literal["header", "prompt_cache_key", "derived", "unique"]


@dataclass(frozen=True, slots=True)
class Identity:
    """A session's id, and where it comes from."""

    session_id: str
    source: Source


def identify(tenant: str, header: bytes | None, body: RequestBody) -> Identity:
    """Names the session: header, then `prompt_cache_key`, then the conversation's own start.

    `header` is the raw value of X-Session-ID. Raises a 400 ApiError for an id that cannot be one.
    """
    if header is not None:
        return Identity(_from_header(header), "header")
    key = body.fields.get("prompt_cache_key")
    if key is not None:
        if not isinstance(key, str):
            raise bad_request(
                "prompt_cache_key must be a string. Send a string, or leave it out.",
                param="prompt_cache_key",
            )
        if key:
            return Identity(_fitted(key), "prompt_cache_key")
    seed = _chat_seed(body) if body.route == "chat" else _completion_seed(body)
    if seed is None:
        return Identity(f"one-{uuid.uuid4().hex}", "unique")
    return Identity("auto-" + _digest([tenant, body.model, *seed]), "derived")


def _from_header(raw: bytes) -> str:
    try:
        session_id = raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise bad_request(
            "X-Session-ID is not UTF-8. Send printable characters.", param="X-Session-ID"
        ) from None
    if not 1 <= len(session_id) <= MAX_SESSION_ID_CHARS or not session_id.isprintable():
        raise bad_request(
            f"X-Session-ID must be 1 to {MAX_SESSION_ID_CHARS} printable characters. Send a "
            "shorter id, for example a UUID, or leave the header out.",
            param="X-Session-ID",
        )
    return session_id


def _fitted(key: str) -> str:
    if len(key) <= MAX_SESSION_ID_CHARS and key.isprintable():
        return key
    return "key-" + _digest([key])


def _chat_seed(body: RequestBody) -> list[Any] | None:
    """System prompts, tools and the first message that is the user's: equal in all turns."""
    messages = body.fields.get("messages")
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
                system.append(message.get("content"))
        elif role == "user":
            first = message.get("content")
            break
        elif first is None:
            first = message
    if first is None and not system:
        return None
    return [system, body.fields.get("tools"), first]


def _completion_seed(body: RequestBody) -> list[Any] | None:
    prompt = body.fields.get("prompt")
    if prompt_count(prompt) > 1:
        return None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return [prompt[:_PROMPT_HEAD_CHARS]]
    if isinstance(prompt, list) and prompt:
        return [prompt[:_PROMPT_HEAD_TOKENS]]
    return None


def _digest(seed: list[Any]) -> str:
    text = json.dumps(seed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
