"""Which conversation a request belongs to.

A wrong guess is harmless: KV is matched by the hash of the tokens, never by the session's name.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from kvshuttle.gateway.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.gateway.body import RequestBody
    from kvshuttle.gateway.conversations import Conversations, Place
    from kvshuttle.gateway.stored import StoredResponses

SESSION_HEADER = "x-session-id"
# What agents and their proxies send by themselves, in this order. The name with the underscore is
# how older releases of one of them spell the next one.
CLIENT_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
)
# The limit of BeginTurnRequest.session_id.
MAX_SESSION_ID_CHARS = 256
_DIGEST_CHARS = 40

# Some agents put the session into the user's id, after whatever names the user.
_SESSION_IN_USER = re.compile(r"session_([0-9A-Za-z-]{8,64})$")

Source = Literal[
    "header",
    "client_header",
    "prompt_cache_key",
    "conversation",
    "previous_response",
    "user_session",
    "user",
    "derived",
    "prefix",
    "forked",
    "unique",
]


@dataclass(frozen=True, slots=True)
class Identity:
    """A session's id, and where it comes from."""

    session_id: str
    source: Source
    # Where the session is known by what is said: to be closed once the request is over.
    place: Place | None = field(default=None, compare=False, repr=False)


def identify(
    tenant: str,
    headers: Mapping[str, str],
    body: RequestBody,
    stored: StoredResponses | None = None,
    conversations: Conversations | None = None,
) -> Identity:
    """Names the session by the first of these that the request has: X-Session-ID, a header of
    `CLIENT_HEADERS`, `prompt_cache_key`, `conversation`, `previous_response_id` (the session of
    that response, as far as `stored` knows it), a session in `metadata.user_id`, the conversation
    itself: its start (with that user's id, if there is one) or, where `conversations` knows more
    than one that starts so, the longest beginning that is known.

    Header values are as HTTP has them: text in Latin-1. Raises a 400 ApiError for an X-Session-ID
    or a `prompt_cache_key` that cannot be one; what a client sends without being told to is never
    refused.
    """
    header = headers.get(SESSION_HEADER)
    if header is not None:
        return Identity(_from_header(header.encode("latin-1")), "header")
    for name in CLIENT_HEADERS:
        sent = headers.get(name, "").strip()
        if sent:
            return Identity(_fitted(sent), "client_header")
    named = _named_in_body(tenant, body, stored)
    return named if named is not None else _by_content(tenant, body, conversations)


def _named_in_body(
    tenant: str, body: RequestBody, stored: StoredResponses | None
) -> Identity | None:
    key = body.fields.get("prompt_cache_key")
    if key is not None:
        if not isinstance(key, str):
            raise bad_request(
                "prompt_cache_key must be a string. Send a string, or leave it out.",
                param="prompt_cache_key",
            )
        if key:
            return Identity(_fitted(key), "prompt_cache_key")
    if body.route != "responses":
        return None
    conversation = body.fields.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    if isinstance(conversation, str) and conversation:
        return Identity(_fitted(conversation), "conversation")
    previous = body.fields.get("previous_response_id")
    if isinstance(previous, str) and stored is not None:
        found = stored.get(tenant, previous)
        if found is not None:
            return Identity(found.session_id, "previous_response")
    return None


def _by_content(tenant: str, body: RequestBody, conversations: Conversations | None) -> Identity:
    metadata = body.fields.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    user = user if isinstance(user, str) and user else None
    if user is not None and (found := _session_in_user(user)) is not None:
        return Identity(found, "user_session")
    seed = body.dialect.start(body.fields)
    if seed is None:
        return Identity(f"one-{uuid.uuid4().hex}", "unique")
    source: Source = "derived"
    key = "auto-" + _digest([tenant, body.model, *seed])
    if user is not None:
        # A user has many conversations: alone, the id would make them one.
        source, key = "user", "user-" + _digest([tenant, body.model, user, *seed])
    if conversations is None:
        return Identity(key, source)
    place = conversations.place(tenant, key, body.dialect.said(body.fields))
    return Identity(place.session_id, source if place.how == "begun" else place.how, place)


def _session_in_user(user: str) -> str | None:
    """The session that an agent puts into its user's id: at its end, or as a member of JSON."""
    if found := _SESSION_IN_USER.search(user):
        return found.group(1)
    if user.startswith("{"):
        try:
            inner = json.loads(user)
        except (ValueError, RecursionError):
            return None
        named = inner.get("session_id") if isinstance(inner, dict) else None
        if isinstance(named, str) and named:
            return _fitted(named)
    return None


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


def _digest(seed: list[Any]) -> str:
    text = json.dumps(seed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
