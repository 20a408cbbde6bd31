"""How many requests run at once: the gateway's own bound, and one tenant's share of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from kvshuttle.gateway import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvshuttle.gateway.metrics import Metrics

__all__ = ["InFlight"]


class InFlight:
    """Counts requests from their headers to their last byte. Nothing queues: a request that finds
    no place is refused at once, before its body is read, and its client knows when to come back."""

    def __init__(self, most: int, most_of_a_tenant: int, metrics: Metrics) -> None:
        self._most = most
        self._most_of_a_tenant = most_of_a_tenant
        self._metrics = metrics
        self._by_tenant: Counter[str] = Counter()
        self._all = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextlib.contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """For as long as a request runs. Raises a 429 ApiError where there is no place."""
        if self._all >= self._most:
            self._metrics.refused.labels("GATEWAY_LIMIT").inc()
            raise errors.too_many_requests("The gateway", self._most, "--max-requests")
        if self._by_tenant[tenant] >= self._most_of_a_tenant:
            self._metrics.refused.labels("TENANT_LIMIT").inc()
            raise errors.too_many_requests(
                "This API key's tenant", self._most_of_a_tenant, "--max-tenant-requests"
            )
        self._all += 1
        self._by_tenant[tenant] += 1
        self._none.clear()
        try:
            yield
        finally:
            self._all -= 1
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            if not self._all:
                self._none.set()

    async def all_ended(self, timeout_s: float) -> bool:
        """Returns once none runs (true), or when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none.wait()
        except TimeoutError:
            return False
        return True
