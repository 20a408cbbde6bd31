"""Completes ids on the command line, by asking the control plane."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

from kvshuttle.cli.options import DEFAULT_TIMEOUT_S, Options
from kvshuttle.client import AsyncClient, KVShuttleError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import click

# A shell that hangs on a tab is worse than one that does not complete.
TIMEOUT_S = 1.0
MOST = 200


def complete_workers(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Worker ids that begin so."""

    async def names(client: AsyncClient) -> AsyncIterator[str]:
        async for one in client.list_workers():
            yield one.ref.worker_id

    return _complete(ctx, names, incomplete)


def complete_sessions(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Session ids that begin so."""

    async def names(client: AsyncClient) -> AsyncIterator[str]:
        async for one in client.list_sessions():
            yield one.session_id

    return _complete(ctx, names, incomplete)


def _complete(
    ctx: click.Context,
    names: Callable[[AsyncClient], AsyncIterator[str]],
    incomplete: str,
) -> list[CompletionItem]:
    options = ctx.find_object(Options) or Options()
    # Unless somebody said how long to wait.
    if options.timeout == DEFAULT_TIMEOUT_S:
        options.timeout = TIMEOUT_S

    async def run() -> list[str]:
        found: list[str] = []
        async with asyncio.timeout(options.timeout):
            async with AsyncClient(options.target, options.client_options()) as client:
                async for name in names(client):
                    if name.startswith(incomplete):
                        found.append(name)
                    if len(found) >= MOST:
                        break
        return found

    try:
        return [CompletionItem(name) for name in asyncio.run(run())]
    except (KVShuttleError, TimeoutError, ValueError, OSError):
        return []
