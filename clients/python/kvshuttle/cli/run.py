"""Runs a command's calls, and gathers lists up to a limit."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvshuttle.cli.options import Options
from kvshuttle.client import AsyncClient, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")

# The server's own cap of a page.
PAGE_MAX = 1_000

pass_options = click.make_pass_decorator(Options, ensure=True)


def limit_option(default: int) -> Callable[[Any], Any]:
    """`--limit`, for lists that may be long."""
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=default,
        show_default=True,
        help="At most so many; 0: all.",
    )


def connect(options: Options, tenant: str | None = None) -> AsyncClient:
    """A client for this command. UsageError for options that cannot go together."""
    try:
        return AsyncClient(options.target, options.client_options(tenant))
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None


def call(options: Options, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Runs `work` with a client that is closed afterwards."""

    async def run() -> T:
        async with connect(options) as client:
            return await work(client)

    return asyncio.run(run())


def page_size(limit: int) -> int:
    """One page where the limit allows it; one more than asked, to know whether there are more."""
    return min(limit + 1, PAGE_MAX) if limit else PAGE_MAX


async def gather(items: AsyncIterator[T], limit: int) -> tuple[list[T], bool]:
    """The first `limit` (0: all), and whether there are more."""
    found: list[T] = []
    async for item in items:
        if limit and len(found) == limit:
            return found, True
        found.append(item)
    return found, False


async def gather_of(
    worker_id: str, client: AsyncClient, items: AsyncIterator[T], limit: int
) -> tuple[list[T], bool]:
    """As `gather`, of what a filter by worker leaves, if there is one. NotFoundError when nothing
    is left and there is no such worker: a misspelt name is not a worker with nothing."""
    found, more = await gather(items, limit)
    if worker_id and not found:
        with suppress(PermissionDeniedError):  # a gateway's token may not read workers
            await client.get_worker(worker_id)
    return found, more


def more_note(shown: int, more: bool) -> str:
    """Tells that a list was cut."""
    return f"the first {shown}; --limit shows more" if more else ""
