"""For agents that reach the gateway only: their conversations get a name and hints, over the HTTP
client that they have. No gRPC, no address, no key of its own.

    client = openai.AsyncOpenAI(base_url=..., http_client=attach(openai.DefaultAsyncHttpxClient()))

    async with AsyncConversation("s1") as conversation:
        ...                                   # any framework, on this client
        await conversation.tool_running(20)   # about 20 s until the next turn
                                              # the block's end: the session is over

Without a conversation around it a request is recognized by what it says, as the gateway does for
all. What is said here changes how long KV is kept, never an answer: a hint that cannot be delivered
is a warning in the log, and no exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from kvshuttle.client.conversation import (
    SESSION_HEADER,
    Known,
    Pause,
    Talk,
    TurnReport,
    TurnSeen,
)
from kvshuttle.client.sessions import hints

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from kvshuttle.client.conversation import Message, Steps
    from kvshuttle.client.sessions import Value

__all__ = ["AsyncConversation", "Conversation", "TurnReport", "TurnSeen", "attach"]

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

HINT_TIMEOUT_S = 2.0
"""A tool does not wait longer for its announcement to be taken."""


class _HttpClient(Protocol):
    """An HTTP client with event hooks: httpx's or httpx2's, synchronous or not."""

    @property
    def event_hooks(self) -> dict[str, list[Callable[..., Any]]]: ...
    @event_hooks.setter
    def event_hooks(self, event_hooks: dict[str, list[Callable[..., Any]]], /) -> None: ...


_H = TypeVar("_H", bound=_HttpClient)

_current: ContextVar[Known | None] = ContextVar("kvshuttle_conversation", default=None)


class _Conversation:
    """What both kinds are."""

    def __init__(
        self, session_id: str | None = None, *, value: Value | None = None, keep: bool = False
    ) -> None:
        """`session_id`: 1 to 256 printable characters, or else a new one. `value`: what its KV is
        worth against others of the tenant. With `keep` the session is not ended when the block is
        left. Raises ValueError."""
        self._known = Known(session_id, value)
        self._talk = Talk(self._known)
        self._keep = keep
        self._tokens: list[Token[Known | None]] = []

    @property
    def session_id(self) -> str:
        """Its name within the tenant."""
        return self._known.session_id

    @property
    def last(self) -> TurnSeen | None:
        """The last answer's turn; None before the first."""
        return self._known.last

    def idle_after(self, about_s: float) -> None:
        """How long from the next answer to the request after it, in seconds; goes with the next
        request. Raises ValueError."""
        hints(expected_idle_s=about_s)
        self._known.idle_s = about_s

    def _enter(self) -> None:
        self._tokens.append(_current.set(self._known))

    def _leave(self) -> None:
        # A framework may leave the block in another context than it entered it in.
        with contextlib.suppress(ValueError):
            _current.reset(self._tokens.pop())

    def _request(self, message: Message) -> dict[str, Any]:
        """Arguments of the HTTP client's `request`."""
        assert self._known.gateway is not None
        return {
            "method": message.method,
            "url": self._known.url(message.path),
            "json": message.body,
            "headers": self._known.gateway.headers,
            "timeout": HINT_TIMEOUT_S,
        }

    def _answer(self, message: Message, response: Any) -> dict[str, Any] | None:
        if response.status_code == 200:
            found: dict[str, Any] = response.json()
            return found
        self._lost(message, f"{response.status_code} {response.text[:200]}")
        return None

    def _lost(self, message: Message, why: object) -> None:
        log.warning("session %s: %s was not delivered: %s", self.session_id, message.what, why)


class _Walk(Generic[_R]):
    """What is said, step by step."""

    result: _R

    def __init__(self, steps: Steps[_R]) -> None:
        self._steps = steps
        # To the last step, if it is a message.
        self.answer: dict[str, Any] | None = None

    def step(self) -> Message | Pause | None:
        """The next one; None once there is a result."""
        answer, self.answer = self.answer, None
        try:
            return self._steps.send(answer)
        except StopIteration as done:
            self.result = done.value
            return None


def _awaited(
    talk: Callable[Concatenate[Talk, _P], Steps[_R]],
) -> Callable[Concatenate[AsyncConversation, _P], Coroutine[Any, Any, _R]]:
    @functools.wraps(talk)
    async def method(self: AsyncConversation, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        walk = _Walk(talk(self._talk, *args, **kwargs))
        while (step := walk.step()) is not None:
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            else:
                walk.answer = await self._send(step)
        return walk.result

    return method


def _blocking(
    talk: Callable[Concatenate[Talk, _P], Steps[_R]],
) -> Callable[Concatenate[Conversation, _P], _R]:
    @functools.wraps(talk)
    def method(self: Conversation, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        walk = _Walk(talk(self._talk, *args, **kwargs))
        while (step := walk.step()) is not None:
            if isinstance(step, Pause):
                time.sleep(step.seconds)
            else:
                walk.answer = self._send(step)
        return walk.result

    return method


class AsyncConversation(_Conversation):
    """One conversation of an asynchronous agent; `async with` around all of its turns.

    Requests that are made inside, by this task and by those that it starts, belong to it. The HTTP
    client must outlive the block: what is said last goes over it too.
    """

    tool_running = _awaited(Talk.tool_running)
    hint = _awaited(Talk.hint)
    over = _awaited(Talk.over)
    report = _awaited(Talk.report)

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

    async def _send(self, message: Message) -> dict[str, Any] | None:
        if self._known.gateway is None:
            return None
        http, arguments = self._known.gateway.http, self._request(message)
        try:
            if _is_async(http):
                response = await http.request(**arguments)
            else:
                response = await asyncio.to_thread(http.request, **arguments)
        # Both HTTP libraries have their own; whatever it is, the agent's work goes on.
        except Exception as error:
            self._lost(message, repr(error))
            return None
        return self._answer(message, response)


class Conversation(_Conversation):
    """As `AsyncConversation`, for an agent without an event loop. Threads that the agent starts
    belong to it if they run in a copy of its context, as frameworks' own do."""

    tool_running = _blocking(Talk.tool_running)
    hint = _blocking(Talk.hint)
    over = _blocking(Talk.over)
    report = _blocking(Talk.report)

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

    def _send(self, message: Message) -> dict[str, Any] | None:
        if self._known.gateway is None:
            return None
        http = self._known.gateway.http
        if _is_async(http):
            self._lost(message, "its HTTP client is asynchronous: use AsyncConversation")
            return None
        try:
            response = http.request(**self._request(message))
        # As above.
        except Exception as error:
            self._lost(message, repr(error))
            return None
        return self._answer(message, response)


def attach(http: _H, default: AsyncConversation | Conversation | None = None) -> _H:
    """Lets an HTTP client name the conversation of each request; returns the same client.

    `http` is httpx's or httpx2's, asynchronous or not; give it to `openai.AsyncOpenAI`,
    `openai.OpenAI` or whatever takes one. A request belongs to the conversation whose block it is
    made in, or else to `default`. One that has an `X-Session-ID` already is left as it is.
    """

    def name(request: Any) -> None:
        known = _current.get() or (default._known if default is not None else None)
        if known is None or SESSION_HEADER in request.headers:
            return
        request.headers.update(known.headers())
        request.extensions["kvshuttle"] = known

    def note(response: Any) -> None:
        known = response.request.extensions.get("kvshuttle")
        if known is not None:
            known.note(http, response.request, response.headers)

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
