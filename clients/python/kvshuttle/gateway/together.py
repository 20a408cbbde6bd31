"""Both legs of a turn at once: prefill writes into decode's memory while it computes.

Decode's engine holds its request back until prefill has written all of it, or until it hears that
nothing will come, so there is one answer to wait for. A prefill leg that fails before decode has
answered takes decode's leg with it: nobody else may know that nothing will come.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvshuttle.gateway.legs import LegFailed

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from kvshuttle.gateway.legs import DecodeStream, PrefillAnswer

__all__ = ["BothLegs", "PrefillFailed"]


class PrefillFailed(Exception):  # noqa: N818 - an outcome that the caller handles
    """The prefill leg failed, or was refused, before decode had answered; decode's is closed."""

    def __init__(self, answer: PrefillAnswer | None, failed: LegFailed | None) -> None:
        super().__init__(answer.status if answer is not None else failed)
        self.answer = answer
        self.failed = failed


@dataclass(slots=True)
class BothLegs:
    """The two requests of one turn. `close` whatever happens."""

    prefill: asyncio.Task[PrefillAnswer]
    decode: asyncio.Task[DecodeStream]
    _kept: bool = field(default=False)

    @classmethod
    def start(
        cls,
        prefill: Coroutine[Any, Any, PrefillAnswer],
        decode: Coroutine[Any, Any, DecodeStream],
    ) -> BothLegs:
        """Sends both requests."""
        return cls(
            asyncio.create_task(prefill, name="prefill-leg"),
            asyncio.create_task(decode, name="decode-leg"),
        )

    async def prefilled(self) -> bool:
        """Returns when the prefill leg has ended well (true), or when decode has its answer, or
        none, before that. Raises PrefillFailed."""
        await asyncio.wait({self.prefill, self.decode}, return_when=asyncio.FIRST_COMPLETED)
        if not self.prefill.done():
            return False
        answer, failed = None, None
        try:
            answer = self.prefill.result()
        except LegFailed as error:
            failed = error
        if answer is not None and answer.status == 200:
            return True
        refused = answer is not None and 400 <= answer.status < 500
        if self.decode.done() and not refused:
            return False  # decode needs it no more
        raise PrefillFailed(answer, failed)

    async def answered(self) -> DecodeStream:
        """Decode's answer; the caller closes it. Raises LegFailed."""
        stream = await self.decode
        self._kept = True
        return stream

    def prefill_answer(self) -> PrefillAnswer | None:
        """What the prefill leg has answered by now, if well."""
        if not self.prefill.done() or self.prefill.cancelled():
            return None
        if self.prefill.exception() is not None:
            return None
        answer = self.prefill.result()
        return answer if answer.status == 200 else None

    async def close(self) -> None:
        """Ends what still runs, and an answer of decode's that nobody took."""
        for task in (self.prefill, self.decode):
            task.cancel()
        await asyncio.gather(self.prefill, self.decode, return_exceptions=True)
        if self._kept or self.decode.cancelled() or self.decode.exception() is not None:
            return
        await self.decode.result().close()
