"""The APIs that are served, one class each: what differs between them is here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshuttle.gateway.dialects.base import Dialect, Route, Usage
from kvshuttle.gateway.dialects.messages import Messages
from kvshuttle.gateway.dialects.openai import Chat, Completions
from kvshuttle.gateway.dialects.responses import Responses

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DIALECTS", "Dialect", "Route", "Usage"]

DIALECTS: Mapping[Route, Dialect] = {
    one.route: one for one in (Chat(), Completions(), Responses(), Messages())
}
