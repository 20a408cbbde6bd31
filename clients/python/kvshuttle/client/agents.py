"""For agents that reach the gateway only: their conversations get a name and hints, over the HTTP
client that they have. No gRPC, no address, no key of its own.

    client = openai.AsyncOpenAI(base_url=..., http_client=attach(openai.DefaultAsyncHttpxClient()))

    async with AsyncConversation("s1") as conversation:
        ...                                   # any framework, on this client
        await conversation.tool_running(20)   # about 20 s until the next turn
                                              # the block's end: the session is over

Without a conversation around it a request is recognized by its start, as the gateway does for all.
What is said here changes how long KV is kept, never an answer: a hint that cannot be delivered is
a warning in the log, and no exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import uuid
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

__all__ = ["AsyncConversation", "Conversation", "TurnReport", "TurnSeen", "Value", "attach"]

log = logging.getLogger(__name__)

Value = Literal["low", "normal", "high"]
"""What a conversation's KV is worth against others of its tenant."""

SESSION_HEADER = "x-session-id"
EXPECTED_IDLE_HEADER = "x-kvshuttle-expected-idle"
VALUE_HEADER = "x-kvshuttle-value"
_SEEN_PREFIX = "x-kvshuttle-"
_API = "/v1/"
_SESSIONS = "/v1/kvshuttle/sessions/"

HINT_TIMEOUT_S = 2.0
"""A tool does not wait longer for its announcement to be taken."""
REPORT_WITHIN_S = 2.0
"""The gateway ends a turn just after its answer's last byte: a report may have to wait for that."""
_REPORT_PAUSE_S = 0.02


class _HttpClient(Protocol):
    """An HTTP client with event hooks: httpx's or httpx2's, synchronous or not."""

    @property
    def event_hooks(self) -> dict[str, list[Callable[..., Any]]]: ...
    @event_hooks.setter
    def event_hooks(self, event_hooks: dict[str, list[Callable[..., Any]]], /) -> None: ...


_H = TypeVar("_H", bound=_HttpClient)


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """What the gateway said of a turn in its answer's headers."""

    session_id: str
    turn: int | None
    """None: the control plane placed no turn."""
    mode: str
    """How earlier KV was meant to reach prefill: none, lazy, eager, direct."""
    reason: str
    fallback: str


@dataclass(frozen=True, slots=True)
class TurnReport:
    """A turn that has ended, as the control plane knows it."""

    turn: int
    outcome: str
    mode: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, what prefill did not compute: its own cache, and what was returned to it."""
    output_tokens: int
    time_to_first_token_s: float | None


@dataclass(frozen=True, slots=True)
class _Gateway:
    """Where the last answer came from, and what was shown there."""

    http: Any
    sessions_url: str
    headers: dict[str, str] = field(repr=False)


_current: ContextVar[_Core | None] = ContextVar("kvshuttle_conversation", default=None)


class _Core:
    """What both kinds of conversation are."""

    def __init__(
        self, session_id: str | None = None, *, value: Value | None = None, keep: bool = False
    ) -> None:
        """`session_id`: 1 to 256 printable characters, or else a new one. With `keep` the session
        is not ended when the block is left. Raises ValueError."""
        self.session_id = session_id if session_id is not None else uuid.uuid4().hex
        if not 1 <= len(self.session_id) <= 256 or not self.session_id.isprintable():
            raise ValueError(
                f"session_id is {self.session_id[:40]!r}: give 1 to 256 printable characters"
            )
        _checked(value=value)
        self._value = value
        self._keep = keep
        self._idle_s: float | None = None
        self._gateway: _Gateway | None = None
        self._tokens: list[Token[_Core | None]] = []
        self.last: TurnSeen | None = None
        """The last answer's turn; None before the first."""

    def idle_after(self, about_s: float) -> None:
        """How long until the turn after the next one, in seconds; goes with the next request."""
        _checked(idle_s=about_s)
        self._idle_s = about_s

    # For the hooks

    def headers(self) -> dict[str, str]:
        """What a request carries."""
        found = {SESSION_HEADER: self.session_id}
        if self._value is not None:
            found[VALUE_HEADER] = self._value
        if self._idle_s is not None:
            found[EXPECTED_IDLE_HEADER] = f"{self._idle_s:g}"
        return found

    def note(self, http: Any, request: Any, headers: Mapping[str, str]) -> None:
        """An answer has come. One that names no session is not a gateway's."""
        session_id = headers.get(_SEEN_PREFIX + "session")
        path = request.url.path
        if session_id is None or _API not in path:
            return
        self._idle_s = None
        turn = headers.get(_SEEN_PREFIX + "turn", "")
        self.last = TurnSeen(
            session_id,
            int(turn) if turn.isdecimal() else None,
            headers.get(_SEEN_PREFIX + "mode", ""),
            headers.get(_SEEN_PREFIX + "reason", ""),
            headers.get(_SEEN_PREFIX + "fallback", ""),
        )
        url = request.url
        netloc = url.netloc.decode("ascii") if isinstance(url.netloc, bytes) else url.netloc
        key = request.headers.get("authorization")
        self._gateway = _Gateway(
            http,
            f"{url.scheme}://{netloc}{path[: path.rindex(_API)]}{_SESSIONS}",
            {} if key is None else {"authorization": key},
        )

    # What is sent

    def _enter(self) -> None:
        self._tokens.append(_current.set(self))

    def _leave(self) -> None:
        # A framework may leave the block in another context than it entered it in.
        with contextlib.suppress(ValueError):
            _current.reset(self._tokens.pop())

    def _hint(self, expected_idle_s: float | None, value: Value | None) -> dict[str, Any]:
        _checked(idle_s=expected_idle_s, value=value)
        self._value = value or self._value
        said = {"expected_idle_s": expected_idle_s, "value": value}
        return {name: one for name, one in said.items() if one is not None}

    def _request(self, method: str, what: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Arguments of the HTTP client's `request`."""
        assert self._gateway is not None
        name = quote(self.last.session_id if self.last else self.session_id, safe="")
        return {
            "method": method,
            "url": self._gateway.sessions_url + name + what,
            "json": body,
            "headers": self._gateway.headers,
            "timeout": HINT_TIMEOUT_S,
        }

    def _lost(self, what: str, why: object) -> None:
        log.warning("session %s: %s was not delivered: %s", self.session_id, what, why)

    def _answer(self, what: str, response: Any) -> dict[str, Any] | None:
        if response.status_code == 200:
            found: dict[str, Any] = response.json()
            return found
        self._lost(what, f"{response.status_code} {response.text[:200]}")
        return None


class AsyncConversation(_Core):
    """One conversation of an asynchronous agent; `async with` around all of its turns.

    Requests that are made inside, by this task and by those that it starts, belong to it. The HTTP
    client must outlive the block: what is said last goes over it too.
    """

    async def tool_running(self, about_s: float) -> bool:
        """A tool runs, for about so many seconds: the next turn comes after it. Whether it was
        taken; before the first answer there is nobody to tell."""
        return await self.hint(expected_idle_s=about_s)

    async def hint(
        self, *, expected_idle_s: float | None = None, value: Value | None = None
    ) -> bool:
        """What is known of the time until the next turn, and what the KV is worth. As above."""
        body = self._hint(expected_idle_s, value)
        return await self._send("POST", "/hint", body, "a hint") is not None

    async def over(self) -> bool:
        """The session is over: its KV is released everywhere. As above."""
        return await self._send("DELETE", "", None, "its end") is not None

    async def report(self, within_s: float = REPORT_WITHIN_S) -> TurnReport | None:
        """What the last answer's turn cost; None if nobody can say within that time."""
        until = time.monotonic() + within_s
        while (found := await self._send("GET", "", None, "a question")) is not None:
            report = _report(found, self.last)
            if report is not None or time.monotonic() >= until:
                return report
            await asyncio.sleep(_REPORT_PAUSE_S)
        return None

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        if not self._keep:
            await self.over()

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, what: str
    ) -> dict[str, Any] | None:
        if self._gateway is None:
            return None
        http = self._gateway.http
        arguments = self._request(method, path, body)
        try:
            if _is_async(http):
                response = await http.request(**arguments)
            else:
                response = await asyncio.to_thread(http.request, **arguments)
        # Both HTTP libraries have their own; whatever it is, the agent's work goes on.
        except Exception as error:
            self._lost(what, repr(error))
            return None
        return self._answer(what, response)


class Conversation(_Core):
    """As `AsyncConversation`, for an agent without an event loop. Threads that the agent starts
    belong to it if they run in a copy of its context, as frameworks' own do."""

    def tool_running(self, about_s: float) -> bool:
        """A tool runs, for about so many seconds: the next turn comes after it. Whether it was
        taken; before the first answer there is nobody to tell."""
        return self.hint(expected_idle_s=about_s)

    def hint(self, *, expected_idle_s: float | None = None, value: Value | None = None) -> bool:
        """What is known of the time until the next turn, and what the KV is worth. As above."""
        body = self._hint(expected_idle_s, value)
        return self._send("POST", "/hint", body, "a hint") is not None

    def over(self) -> bool:
        """The session is over: its KV is released everywhere. As above."""
        return self._send("DELETE", "", None, "its end") is not None

    def report(self, within_s: float = REPORT_WITHIN_S) -> TurnReport | None:
        """What the last answer's turn cost; None if nobody can say within that time."""
        until = time.monotonic() + within_s
        while (found := self._send("GET", "", None, "a question")) is not None:
            report = _report(found, self.last)
            if report is not None or time.monotonic() >= until:
                return report
            time.sleep(_REPORT_PAUSE_S)
        return None

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()
        if not self._keep:
            self.over()

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, what: str
    ) -> dict[str, Any] | None:
        if self._gateway is None:
            return None
        http = self._gateway.http
        if _is_async(http):
            self._lost(what, "its HTTP client is asynchronous: use AsyncConversation")
            return None
        try:
            response = http.request(**self._request(method, path, body))
        # As above.
        except Exception as error:
            self._lost(what, repr(error))
            return None
        return self._answer(what, response)


def attach(http: _H, default: AsyncConversation | Conversation | None = None) -> _H:
    """Lets an HTTP client name the conversation of each request; returns the same client.

    `http` is httpx's or httpx2's, asynchronous or not; give it to `openai.AsyncOpenAI`,
    `openai.OpenAI` or whatever takes one. A request belongs to the conversation whose block it is
    made in, or else to `default`. One that has an `X-Session-ID` already is left as it is.
    """

    def name(request: Any) -> None:
        conversation = _current.get() or default
        if conversation is None or SESSION_HEADER in request.headers:
            return
        request.headers.update(conversation.headers())
        request.extensions["kvshuttle"] = conversation

    def note(response: Any) -> None:
        conversation = response.request.extensions.get("kvshuttle")
        if conversation is not None:
            conversation.note(http, response.request, response.headers)

    async def name_async(request: Any) -> None:
        name(request)

    async def note_async(response: Any) -> None:
        note(response)

    hooks = http.event_hooks
    before, after = (name_async, note_async) if _is_async(http) else (name, note)
    http.event_hooks = {
        "request": [*hooks.get("request", []), before],
        "response": [*hooks.get("response", []), after],
    }
    return http


def _is_async(http: Any) -> bool:
    return inspect.iscoroutinefunction(http.request)


def _checked(*, idle_s: float | None = None, value: str | None = None) -> None:
    if idle_s is not None and not 0 <= idle_s < float("inf"):
        raise ValueError(f"{idle_s} is no time: give seconds from 0 up")
    if value not in (None, "low", "normal", "high"):
        raise ValueError(f"value is {value!r}: use low, normal or high")


def _report(found: dict[str, Any], seen: TurnSeen | None) -> TurnReport | None:
    for turn in found["turns"]:
        if seen is not None and turn["turn"] == seen.turn and turn["state"] == "ended":
            return TurnReport(
                turn["turn"],
                turn["outcome"],
                turn["mode"],
                turn["reason"],
                turn["prompt_tokens"],
                turn["cached_tokens"],
                turn["output_tokens"],
                turn["time_to_first_token_s"],
            )
    return None
