"""Waiting for what will be, without a fixed pause."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Far more than anything here takes, on a machine that is busy with other things.
PATIENCE_S = 15.0


async def eventually(
    condition: Callable[[], object], what: str = "", patience_s: float = PATIENCE_S
) -> None:
    """Returns once the condition holds. Raises TimeoutError."""
    try:
        async with asyncio.timeout(patience_s):
            while not condition():  # noqa: ASYNC110 - any condition, not one of ours
                await asyncio.sleep(0.003)
    except TimeoutError:
        raise TimeoutError(f"never happened: {what or condition}") from None
