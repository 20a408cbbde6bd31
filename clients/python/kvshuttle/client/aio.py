"""The asynchronous client: one channel, one method an RPC, typed messages of `kvshuttle.v1`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from kvshuttle.client.calls import ClientCalls
from kvshuttle.client.errors import KVShuttleError, from_rpc_error
from kvshuttle.client.methods import async_call, async_list, async_watch
from kvshuttle.client.options import ClientOptions
from kvshuttle.client.retries import Attempts
from kvshuttle.client.sessions import AsyncSession, SessionCalls
from kvshuttle.client.turns import NoTurnStreamError, TurnStreams
from kvshuttle.v1.session_service_pb2_grpc import SessionServiceStub

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from types import TracebackType

    from kvshuttle.client.calls import Call, Listing, Watching
    from kvshuttle.client.rpcs import Rpc
    from kvshuttle.client.sessions import Value

__all__ = ["AsyncClient"]

_R = TypeVar("_R")


class AsyncClient:
    """Talks to one control plane over one channel, which is shared by all calls.

    Every call has a deadline (`timeout`, in seconds, or the default of its kind in
    `ClientOptions.timeouts`), is tried again where that is safe (`ClientOptions.retries`), and
    raises a `KVShuttleError`.
    """

    def __init__(self, target: str, options: ClientOptions | None = None) -> None:
        self._options = options if options is not None else ClientOptions()
        self._channel = self._options.channel(target)
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable[Any, Any]] = {}
        self._calls = ClientCalls()
        self._turns: TurnStreams | None = None
        if self._options.turn_stream:
            self._turns = TurnStreams(SessionServiceStub(self._channel), self._metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the channel and whatever still runs on it."""
        if self._turns is not None:
            await self._turns.close()
        await self._channel.close()

    def session(
        self,
        session_id: str,
        *,
        value: Value | None = None,
        keep: bool = False,
        tenant: str | None = None,
    ) -> AsyncSession:
        """A conversation, to be used with `async with`; see `AsyncSession`. Nothing is sent yet.

        `value` is what its KV is worth against others of the tenant. With `keep` the session is not
        ended when the block is left.
        """
        return AsyncSession(self, SessionCalls(self._calls, session_id, value, tenant), keep=keep)

    begin_turn = async_call(ClientCalls.begin_turn)
    end_turn = async_call(ClientCalls.end_turn)
    get_session = async_call(ClientCalls.get_session)
    list_sessions = async_list(ClientCalls.list_sessions)
    update_session = async_call(ClientCalls.update_session)
    end_session = async_call(ClientCalls.end_session)
    watch_sessions = async_watch(ClientCalls.watch_sessions)
    get_lease = async_call(ClientCalls.get_lease)
    list_leases = async_list(ClientCalls.list_leases)
    renew_lease = async_call(ClientCalls.renew_lease)
    revoke_lease = async_call(ClientCalls.revoke_lease)
    watch_leases = async_watch(ClientCalls.watch_leases)
    get_worker = async_call(ClientCalls.get_worker)
    list_workers = async_list(ClientCalls.list_workers)
    drain_worker = async_call(ClientCalls.drain_worker)
    fence_worker = async_call(ClientCalls.fence_worker)
    get_status = async_call(ClientCalls.get_status)

    def _metadata(self, tenant: str | None) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*self._options.call_metadata(tenant))

    async def _run(self, call: Call[_R]) -> _R:
        attempts = Attempts(self._options.retries, self._options.timeouts.of(call))
        while True:
            try:
                return call.take(await self._try(call, attempts.remaining_s))
            except KVShuttleError as error:
                pause_s = attempts.pause_after(error)
            await asyncio.sleep(pause_s)

    async def _try(self, call: Call[_R], timeout_s: float) -> Any:
        """Over the tenant's stream of turns where there is one, or else as a call."""
        if self._turns is None or call.operation is None:
            return await self._ask(call, timeout_s)
        until = time.monotonic() + timeout_s
        try:
            return await self._turns.ask(
                call.tenant, call.operation, call.request, call.rpc.response, timeout_s
            )
        except NoTurnStreamError:
            pass
        async with self._turns.one_call(until - time.monotonic()):
            return await self._ask(call, max(until - time.monotonic(), 0.0))

    async def _ask(self, call: Call[Any], timeout_s: float) -> Any:
        try:
            return await self._method(call.rpc)(
                call.request, timeout=timeout_s, metadata=self._metadata(call.tenant)
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def _method(self, rpc: Rpc[Any, Any]) -> grpc.aio.UnaryUnaryMultiCallable[Any, Any]:
        method = self._methods.get(rpc.path)
        if method is None:
            method = self._methods[rpc.path] = self._channel.unary_unary(
                rpc.path, rpc.request.SerializeToString, rpc.response.FromString
            )
        return method

    async def _pages(self, listing: Listing[_R]) -> AsyncIterator[_R]:
        more = True
        while more:
            items, more = listing.items(await self._run(listing.page()))
            for one in items:
                yield one

    async def _follow(self, watching: Watching[_R]) -> AsyncGenerator[_R, None]:
        rpc: Rpc[Any, Any] = watching.rpc
        call = self._channel.unary_stream(
            rpc.path, rpc.request.SerializeToString, rpc.response.FromString
        )(watching.request, timeout=watching.timeout, metadata=self._metadata(watching.tenant))
        try:
            async for piece in call:
                yield piece
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
