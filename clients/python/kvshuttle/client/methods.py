"""Methods of the clients, made from what builds their calls: their parameters and types stay.

A class that has such methods keeps the builder's own object in `_calls`, and knows how to run what
it builds.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Coroutine,
        Generator,
        Iterator,
    )

    from kvshuttle.client.calls import Call, Listing, Watching

__all__ = [
    "async_call",
    "async_list",
    "async_watch",
    "sync_call",
    "sync_list",
    "sync_watch",
]

_C = TypeVar("_C")
_C_co = TypeVar("_C_co", covariant=True)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound="Callable[..., Any]")


class _Built(Protocol[_C_co]):
    @property
    def _calls(self) -> _C_co: ...


class _AsyncCalls(_Built[_C_co], Protocol[_C_co]):
    async def _run(self, call: Call[_R]) -> _R: ...


class _AsyncLists(_Built[_C_co], Protocol[_C_co]):
    def _pages(self, listing: Listing[_R]) -> AsyncIterator[_R]: ...


class _AsyncWatches(_Built[_C_co], Protocol[_C_co]):
    def _follow(self, watching: Watching[_R]) -> AsyncGenerator[_R, None]: ...


class _SyncCalls(_Built[_C_co], Protocol[_C_co]):
    def _run(self, call: Call[_R]) -> _R: ...


class _SyncLists(_Built[_C_co], Protocol[_C_co]):
    def _pages(self, listing: Listing[_R]) -> Iterator[_R]: ...


class _SyncWatches(_Built[_C_co], Protocol[_C_co]):
    def _follow(self, watching: Watching[_R]) -> Generator[_R, None, None]: ...


def _like(build: Callable[..., Any]) -> Callable[[_F], _F]:
    """Name, docstring and parameters of the builder, for `help` and for editors."""

    def dress(method: _F) -> _F:
        functools.update_wrapper(method, build)
        signature = inspect.signature(build).replace(return_annotation=inspect.Signature.empty)
        vars(method)["__signature__"] = signature
        return method

    return dress


def async_call(
    build: Callable[Concatenate[_C, _P], Call[_R]],
) -> Callable[Concatenate[_AsyncCalls[_C], _P], Coroutine[Any, Any, _R]]:
    """A method that makes one call."""

    @_like(build)
    async def method(self: _AsyncCalls[_C], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return await self._run(build(self._calls, *args, **kwargs))

    return method


def async_list(
    build: Callable[Concatenate[_C, _P], Listing[_R]],
) -> Callable[Concatenate[_AsyncLists[_C], _P], AsyncIterator[_R]]:
    """A method that reads page after page."""

    @_like(build)
    def method(self: _AsyncLists[_C], /, *args: _P.args, **kwargs: _P.kwargs) -> AsyncIterator[_R]:
        return self._pages(build(self._calls, *args, **kwargs))

    return method


def async_watch(
    build: Callable[Concatenate[_C, _P], Watching[_R]],
) -> Callable[Concatenate[_AsyncWatches[_C], _P], AsyncGenerator[_R, None]]:
    """A method that follows a stream."""

    @_like(build)
    def method(
        self: _AsyncWatches[_C], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> AsyncGenerator[_R, None]:
        return self._follow(build(self._calls, *args, **kwargs))

    return method


def sync_call(
    build: Callable[Concatenate[_C, _P], Call[_R]],
) -> Callable[Concatenate[_SyncCalls[_C], _P], _R]:
    """A method that makes one call."""

    @_like(build)
    def method(self: _SyncCalls[_C], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self._run(build(self._calls, *args, **kwargs))

    return method


def sync_list(
    build: Callable[Concatenate[_C, _P], Listing[_R]],
) -> Callable[Concatenate[_SyncLists[_C], _P], Iterator[_R]]:
    """A method that reads page after page."""

    @_like(build)
    def method(self: _SyncLists[_C], /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_R]:
        return self._pages(build(self._calls, *args, **kwargs))

    return method


def sync_watch(
    build: Callable[Concatenate[_C, _P], Watching[_R]],
) -> Callable[Concatenate[_SyncWatches[_C], _P], Generator[_R, None, None]]:
    """A method that follows a stream."""

    @_like(build)
    def method(
        self: _SyncWatches[_C], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Generator[_R, None, None]:
        return self._follow(build(self._calls, *args, **kwargs))

    return method
