"""What one request needs: what all share, and what its client asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.gateway.body import RequestBody
    from kvshuttle.gateway.control import ControlPlane
    from kvshuttle.gateway.conversations import Conversations
    from kvshuttle.gateway.engines import EngineDirectory
    from kvshuttle.gateway.identity import Identity
    from kvshuttle.gateway.legs import EngineHttp
    from kvshuttle.gateway.metrics import Metrics
    from kvshuttle.gateway.settings import GatewaySettings
    from kvshuttle.gateway.stored import StoredResponses
    from kvshuttle.tracing import Tracing
    from kvshuttle.v1 import session_service_pb2 as session
    from kvshuttle.v1 import types_pb2 as types

__all__ = ["Services", "TurnRequest"]


@dataclass(frozen=True, slots=True)
class Services:
    """What all requests share."""

    settings: GatewaySettings
    metrics: Metrics
    engines: EngineDirectory
    control: ControlPlane
    http: EngineHttp
    stored: StoredResponses
    conversations: Conversations
    tracing: Tracing | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a client asked for. `started` is the monotonic time of the whole request's arrival."""

    tenant: str
    identity: Identity
    body: RequestBody
    headers: Mapping[str, str]
    return_policy: session.ReturnPolicy.ValueType
    started: float
    # Told at the turn's end: what is expected of the time after it counts from there.
    hints: types.SessionHints | None = None
    # A comment at a stream's end says what happened.
    wants_comment: bool = False
