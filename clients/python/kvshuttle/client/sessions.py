"""A conversation as one object: its turns, what is known of the time after them, its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

from google.protobuf.duration_pb2 import Duration

from kvshuttle.client.errors import KVShuttleError, NotFoundError
from kvshuttle.client.methods import async_call, sync_call
from kvshuttle.v1 import session_service_pb2 as session
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from kvshuttle.client.aio import AsyncClient
    from kvshuttle.client.calls import Call, ClientCalls
    from kvshuttle.client.sync import Client

__all__ = [
    "AsyncSession",
    "AsyncTurn",
    "SessionCalls",
    "SyncSession",
    "SyncTurn",
    "Value",
    "hints",
]

_C = TypeVar("_C")
_P = ParamSpec("_P")
_R = TypeVar("_R")

Value = Literal["low", "normal", "high"]
"""What a session's KV is worth against others of its tenant."""
_VALUES: dict[str, types.SessionValue.ValueType] = {
    "low": types.SESSION_VALUE_LOW,
    "normal": types.SESSION_VALUE_NORMAL,
    "high": types.SESSION_VALUE_HIGH,
}


def hints(
    *, expected_idle_s: float | None = None, value: Value | None = None
) -> types.SessionHints | None:
    """What a client knows of the time after a turn; None if it says nothing.

    Raises ValueError for a time below zero and for a value that there is not.
    """
    if expected_idle_s is None and value is None:
        return None
    found = types.SessionHints()
    if value is not None:
        if value not in _VALUES:
            raise ValueError(f"value is {value!r}: use one of {', '.join(_VALUES)}")
        found.value = _VALUES[value]
    if expected_idle_s is not None:
        if not 0 <= expected_idle_s < float("inf"):
            raise ValueError(f"expected_idle_s is {expected_idle_s}: give seconds from 0 up")
        found.expected_idle.FromNanoseconds(int(expected_idle_s * 1e9))
    return found


class SessionCalls:
    """What can be asked of one session. Its value goes with every turn."""

    def __init__(
        self, client: ClientCalls, session_id: str, value: Value | None, tenant: str | None
    ) -> None:
        hints(value=value)
        self.client = client
        self.session_id = session_id
        self.tenant = tenant
        self._value = value

    def begin(
        self,
        *,
        prompt_tokens_estimate: int = 0,
        return_policy: session.ReturnPolicy.ValueType = session.RETURN_POLICY_AUTO,
        exclude_worker_ids: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Call[session.BeginTurnResponse]:
        """Begins the next turn: the block says where it runs, and ends it when it is left.

        It ends as completed, as failed if an exception leaves the block, as cancelled if that is
        a cancellation.
        """
        return self.client.begin_turn(
            self.session_id,
            prompt_tokens_estimate=prompt_tokens_estimate,
            return_policy=return_policy,
            exclude_worker_ids=exclude_worker_ids,
            hints=hints(value=self._value),
            tenant=self.tenant,
            timeout=timeout,
        )

    def hint(
        self,
        *,
        expected_idle_s: float | None = None,
        value: Value | None = None,
        timeout: float | None = None,
    ) -> Call[session.Session]:
        """Says what is known of the time until the next turn, and what the KV is worth.

        Raises NotFoundError before the first turn: nothing is known of the session yet.
        """
        said = hints(expected_idle_s=expected_idle_s, value=value)
        if said is None:
            raise ValueError("hint: give expected_idle_s or value")
        self._value = value or self._value
        return self.client.update_session(
            self.session_id, said, tenant=self.tenant, timeout=timeout
        )

    def tool_running(
        self, about_s: float, *, timeout: float | None = None
    ) -> Call[session.Session]:
        """A tool runs, for about so many seconds: the next turn comes after it."""
        return self.hint(expected_idle_s=about_s, timeout=timeout)

    def get(self, *, timeout: float | None = None) -> Call[session.Session]:
        """Reads it. Raises NotFoundError before its first turn."""
        return self.client.get_session(self.session_id, tenant=self.tenant, timeout=timeout)

    def end(self, *, timeout: float | None = None) -> Call[session.Session]:
        """The session is over: its KV is released everywhere."""
        return self.client.end_session(self.session_id, tenant=self.tenant, timeout=timeout)


class _Turn:
    """A turn that was begun, and what is to be said at its end."""

    def __init__(self, calls: SessionCalls, begin: Call[session.BeginTurnResponse]) -> None:
        self._calls = calls
        self._begin = begin
        self._begun: session.BeginTurnResponse | None = None
        self._usage: session.TurnUsage | None = None
        self._idle_s: float | None = None

    @property
    def begun(self) -> session.BeginTurnResponse:
        """The control plane's answer. RuntimeError outside of the block."""
        if self._begun is None:
            raise RuntimeError("the turn has not begun: enter its `with` block first")
        return self._begun

    @property
    def number(self) -> int:
        """Counted from 1 within the session."""
        return self.begun.turn.turn

    @property
    def plan(self) -> session.Plan:
        """How the KV of earlier turns is meant to reach prefill, and why."""
        return self.begun.turn.plan

    @property
    def prefill_url(self) -> str:
        """Where the prompt is computed; empty if decode does it."""
        return self.begun.turn.prefill.url

    @property
    def decode_url(self) -> str:
        """Where the answer is generated."""
        return self.begun.turn.decode.url

    def kv_transfer_params(self, leg: Literal["prefill", "decode"]) -> dict[str, Any]:
        """`kv_transfer_params` of the request to vLLM for one leg of the turn."""
        return {"kvshuttle": {"turn_token": self.begun.turn_token, "leg": leg}}

    def used(
        self,
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        time_to_first_token_s: float | None = None,
    ) -> None:
        """What the turn cost; told at its end."""
        first = None
        if time_to_first_token_s is not None:
            first = Duration()
            first.FromNanoseconds(int(time_to_first_token_s * 1e9))
        self._usage = session.TurnUsage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            time_to_first_token=first,
        )

    def idle_after(self, about_s: float) -> None:
        """How long until the next turn, in seconds; told at this one's end."""
        hints(expected_idle_s=about_s)
        self._idle_s = about_s

    def _end(self, error: BaseException | None) -> Call[session.Turn]:
        return self._calls.client.end_turn(
            self._calls.session_id,
            self.number,
            _outcome(error),
            turn_token=self.begun.turn_token,
            usage=self._usage,
            hints=hints(expected_idle_s=self._idle_s),
            tenant=self._calls.tenant,
        )


def _outcome(error: BaseException | None) -> session.TurnOutcome.ValueType:
    if error is None:
        return session.TURN_OUTCOME_COMPLETED
    if isinstance(error, Exception):
        return session.TURN_OUTCOME_FAILED
    return session.TURN_OUTCOME_CANCELLED


def _ended(error: KVShuttleError, cause: BaseException | None) -> None:
    """A session that never had a turn, or that is gone already, needs no end."""
    if not isinstance(error, NotFoundError):
        _outranked(error, cause, "ending the session")


def _outranked(error: KVShuttleError, cause: BaseException | None, what: str) -> None:
    """An error at a block's end is raised only if nothing else is: the first one is the news."""
    if cause is None:
        raise error
    cause.add_note(f"kvshuttle: {what} failed too: {error}")


class AsyncTurn(_Turn):
    """See `AsyncSession.turn`."""

    def __init__(
        self, client: AsyncClient, calls: SessionCalls, begin: Call[session.BeginTurnResponse]
    ) -> None:
        super().__init__(calls, begin)
        self._client = client

    async def __aenter__(self) -> Self:
        self._begun = await self._client._run(self._begin)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._client._run(self._end(exc))
        except KVShuttleError as error:
            _outranked(error, exc, "ending the turn")


class SyncTurn(_Turn):
    """See `SyncSession.turn`."""

    def __init__(
        self, client: Client, calls: SessionCalls, begin: Call[session.BeginTurnResponse]
    ) -> None:
        super().__init__(calls, begin)
        self._client = client

    def __enter__(self) -> Self:
        self._begun = self._client._run(self._begin)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._client._run(self._end(exc))
        except KVShuttleError as error:
            _outranked(error, exc, "ending the turn")


def _async_turn(
    build: Callable[Concatenate[SessionCalls, _P], Call[session.BeginTurnResponse]],
) -> Callable[Concatenate[AsyncSession, _P], AsyncTurn]:
    def turn(self: AsyncSession, /, *args: _P.args, **kwargs: _P.kwargs) -> AsyncTurn:
        return AsyncTurn(self._client, self._calls, build(self._calls, *args, **kwargs))

    turn.__doc__ = build.__doc__
    return turn


def _sync_turn(
    build: Callable[Concatenate[SessionCalls, _P], Call[session.BeginTurnResponse]],
) -> Callable[Concatenate[SyncSession, _P], SyncTurn]:
    def turn(self: SyncSession, /, *args: _P.args, **kwargs: _P.kwargs) -> SyncTurn:
        return SyncTurn(self._client, self._calls, build(self._calls, *args, **kwargs))

    turn.__doc__ = build.__doc__
    return turn


class _Session(Generic[_C]):
    """What both kinds have in common."""

    def __init__(self, client: _C, calls: SessionCalls, *, keep: bool) -> None:
        self._client = client
        self._calls = calls
        self._keep = keep

    @property
    def session_id(self) -> str:
        """Its name within the tenant."""
        return self._calls.session_id


class AsyncSession(_Session["AsyncClient"]):
    """One conversation. Leaving its block ends it, unless it is to be kept.

    Its methods raise `KVShuttleError`s, as the client's do. At the block's end such an error is
    raised only if the block itself raised nothing; else it is a note on that exception.
    """

    turn = _async_turn(SessionCalls.begin)
    hint = async_call(SessionCalls.hint)
    tool_running = async_call(SessionCalls.tool_running)
    get = async_call(SessionCalls.get)
    end = async_call(SessionCalls.end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._keep:
            return
        try:
            await self.end()
        except KVShuttleError as error:
            _ended(error, exc)

    async def _run(self, call: Call[_R]) -> _R:
        return await self._client._run(call)


class SyncSession(_Session["Client"]):
    """As `AsyncSession`, without an event loop."""

    turn = _sync_turn(SessionCalls.begin)
    hint = sync_call(SessionCalls.hint)
    tool_running = sync_call(SessionCalls.tool_running)
    get = sync_call(SessionCalls.get)
    end = sync_call(SessionCalls.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._keep:
            return
        try:
            self.end()
        except KVShuttleError as error:
            _ended(error, exc)

    def _run(self, call: Call[_R]) -> _R:
        return self._client._run(call)
