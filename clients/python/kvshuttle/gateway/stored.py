"""Responses that an engine keeps: whose they are, which conversation they belong to, and where."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.gateway import limits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["StoredResponse", "StoredResponses"]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Where one is."""

    session_id: str
    engine_url: str


class StoredResponses:
    """The latest responses that went through this gateway; of older ones, and of other gateways',
    nothing is known."""

    def __init__(
        self,
        find: Callable[[str], Awaitable[str | None]] | None = None,
        limit: int = limits.KNOWN_RESPONSES,
    ) -> None:
        """`find` asks the engines which of them has a response that is not known here, and returns
        its URL. Leave it out where there are several tenants: an engine does not know whose a
        response is."""
        self._find = find
        self._limit = limit
        self._found: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def note(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """A response of this tenant's has been answered."""
        self._found[tenant, response_id] = stored
        self._found.move_to_end((tenant, response_id))
        while len(self._found) > self._limit:
            self._found.popitem(last=False)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """What is known of a tenant's response; a use keeps it known."""
        found = self._found.get((tenant, response_id))
        if found is not None:
            self._found.move_to_end((tenant, response_id))
        return found

    async def holder(self, tenant: str, response_id: str) -> str | None:
        """The URL of the engine that keeps it, if any is known to."""
        found = self.get(tenant, response_id)
        if found is not None:
            return found.engine_url
        return await self._find(response_id) if self._find is not None else None
