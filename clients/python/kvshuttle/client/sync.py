"""The client for programs without an event loop: the same calls as `AsyncClient` has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from kvshuttle.client.calls import ClientCalls
from kvshuttle.client.errors import KVShuttleError, from_rpc_error
from kvshuttle.client.methods import sync_call, sync_list, sync_watch
from kvshuttle.client.options import ClientOptions
from kvshuttle.client.retries import Attempts
from kvshuttle.client.sessions import SessionCalls, SyncSession

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType

    from kvshuttle.client.calls import Call, Listing, Watching
    from kvshuttle.client.rpcs import Rpc
    from kvshuttle.client.sessions import Value

__all__ = ["Client"]

_R = TypeVar("_R")


class Client:
    """Talks to one control plane over one channel, which is shared by all calls and threads.

    Deadlines, retries and errors are those of `AsyncClient`. Turns are always calls: a stream of
    them (`ClientOptions.turn_stream`) is for a gateway, which is asynchronous. A program that forks
    makes its client after the fork.
    """

    def __init__(self, target: str, options: ClientOptions | None = None) -> None:
        self._options = options if options is not None else ClientOptions()
        if self._options.turn_stream:
            raise ValueError("turn_stream needs AsyncClient: leave it out for Client")
        self._channel = self._options.sync_channel(target)
        self._methods: dict[str, grpc.UnaryUnaryMultiCallable[Any, Any]] = {}
        self._calls = ClientCalls()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the channel and whatever still runs on it."""
        self._channel.close()

    def session(
        self,
        session_id: str,
        *,
        value: Value | None = None,
        keep: bool = False,
        tenant: str | None = None,
    ) -> SyncSession:
        """A conversation, to be used with `with`; as `AsyncClient.session`."""
        return SyncSession(self, SessionCalls(self._calls, session_id, value, tenant), keep=keep)

    begin_turn = sync_call(ClientCalls.begin_turn)
    end_turn = sync_call(ClientCalls.end_turn)
    get_session = sync_call(ClientCalls.get_session)
    list_sessions = sync_list(ClientCalls.list_sessions)
    update_session = sync_call(ClientCalls.update_session)
    end_session = sync_call(ClientCalls.end_session)
    watch_sessions = sync_watch(ClientCalls.watch_sessions)
    get_lease = sync_call(ClientCalls.get_lease)
    list_leases = sync_list(ClientCalls.list_leases)
    renew_lease = sync_call(ClientCalls.renew_lease)
    revoke_lease = sync_call(ClientCalls.revoke_lease)
    watch_leases = sync_watch(ClientCalls.watch_leases)
    get_worker = sync_call(ClientCalls.get_worker)
    list_workers = sync_list(ClientCalls.list_workers)
    drain_worker = sync_call(ClientCalls.drain_worker)
    fence_worker = sync_call(ClientCalls.fence_worker)
    get_status = sync_call(ClientCalls.get_status)

    def _run(self, call: Call[_R]) -> _R:
        attempts = Attempts(self._options.retries, self._options.timeouts.of(call))
        while True:
            try:
                return call.take(self._try(call, attempts.remaining_s))
            except KVShuttleError as error:
                pause_s = attempts.pause_after(error)
            time.sleep(pause_s)

    def _try(self, call: Call[_R], timeout_s: float) -> Any:
        metadata = self._options.call_metadata(call.tenant)
        try:
            return self._method(call.rpc)(call.request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def _method(self, rpc: Rpc[Any, Any]) -> grpc.UnaryUnaryMultiCallable[Any, Any]:
        method = self._methods.get(rpc.path)
        if method is None:
            method = self._methods[rpc.path] = self._channel.unary_unary(
                rpc.path, rpc.request.SerializeToString, rpc.response.FromString
            )
        return method

    def _pages(self, listing: Listing[_R]) -> Iterator[_R]:
        more = True
        while more:
            items, more = listing.items(self._run(listing.page()))
            yield from items

    def _follow(self, watching: Watching[_R]) -> Generator[_R, None, None]:
        rpc: Rpc[Any, Any] = watching.rpc
        call = self._channel.unary_stream(
            rpc.path, rpc.request.SerializeToString, rpc.response.FromString
        )(
            watching.request,
            timeout=watching.timeout,
            metadata=self._options.call_metadata(watching.tenant),
        )
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
