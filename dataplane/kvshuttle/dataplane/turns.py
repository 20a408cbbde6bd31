"""What the control plane has announced: whose request it is, and what it may read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvshuttle.dataplane.limits import MAX_PAST_TURNS, MAX_TURNS
from kvshuttle.v1 import types_pb2

__all__ = ["PARAMS_KEY", "LegKey", "PushHope", "TurnBook", "TurnLeg", "leg_of_params"]

PARAMS_KEY = "kvshuttle"
"""Key in ``kv_transfer_params`` under which the gateway puts the token and the leg."""

_LEGS = {"prefill": types_pb2.LEG_PREFILL, "decode": types_pb2.LEG_DECODE}

LegKey = tuple[str, types_pb2.Leg.ValueType]
"""(turn token, leg)."""


def leg_of_params(params: Mapping[str, Any] | None) -> LegKey | None:
    """The turn leg that a request's ``kv_transfer_params`` name; None if they name none.

    They come from outside the engine, so anything that is not exactly ours is ignored.
    """
    ours = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    if not isinstance(ours, Mapping):
        return None
    token, leg = ours.get("turn_token"), _LEGS.get(str(ours.get("leg")))
    if not isinstance(token, str) or not token or len(token) > 256 or leg is None:
        return None
    return token, leg


@dataclass(frozen=True)
class PushHope:
    """The turn's forward KV may be pushed under this lease; `peer` runs the other leg."""

    lease_id: str
    version: int
    peer: tuple[str, int]
    ttl_ns: int
    number: tuple[int, int]


@dataclass
class TurnLeg:
    """One leg of a turn, as announced. Durations and instants in ns."""

    token: str
    leg: types_pb2.Leg.ValueType
    tenant: str
    session_id: str
    turn: int
    lease_id: str
    lease_follows: bool
    lookup_wait_ns: int
    retention_ns: int
    min_tokens: int
    replica_blocks: int = 0
    # Predicted, to compute one block; 0: not known.
    block_compute_ns: int = 0
    # Whether its request may ask for what other sessions of the tenant have, and whether it has.
    may_ask: bool = False
    asked: bool = False
    # Set when the lease that this leg waits for will not be granted.
    refused: str = ""
    # The request that reads under the lease: a lease is used once, other children recompute.
    claimed_by: str = ""
    # Set once the leg's request has been admitted without a load, or its load has begun.
    settled: bool = False
    # While the leg may offer a landing zone, or be granted one to write to.
    push: PushHope | None = None
    # Of a leg that may push: its request, once that runs, and whether it has ended.
    push_request: str = ""
    ended: bool = False

    @property
    def hopes(self) -> bool:
        """Whether a grant may still come."""
        may_come = bool(self.lease_id or self.lease_follows or self.may_ask)
        return not self.refused and not self.settled and may_come


class TurnBook:
    """The announced legs. Scheduler thread only."""

    def __init__(self) -> None:
        self._legs: OrderedDict[LegKey, TurnLeg] = OrderedDict()
        self._past: OrderedDict[LegKey, TurnLeg] = OrderedDict()

    def expect(self, leg: TurnLeg) -> None:
        """Remembers a leg; a repeated announcement changes nothing."""
        self._legs.setdefault((leg.token, leg.leg), leg)
        while len(self._legs) > MAX_TURNS:
            self._legs.popitem(last=False)

    def find(self, key: LegKey) -> TurnLeg | None:
        """The leg, if announced and not forgotten."""
        return self._legs.get(key)

    def forget(self, key: LegKey) -> TurnLeg | None:
        """A leg's turn is over: nothing is read for it any more. Returns it, if it was known."""
        leg = self._legs.pop(key, None)
        if leg is not None:
            self._past[key] = leg
            while len(self._past) > MAX_PAST_TURNS:
                self._past.popitem(last=False)
        return leg

    def find_past(self, key: LegKey) -> TurnLeg | None:
        """A leg whose turn is over, or running; if it is still remembered."""
        return self._legs.get(key) or self._past.get(key)

    def refuse(self, token: str, reason: str) -> None:
        """The lease that a leg of this turn hopes for will not come."""
        for number in _LEGS.values():
            leg = self._legs.get((token, number))
            if leg is not None and leg.hopes:
                leg.refused = reason

    def refuse_lease(self, lease_id: str, reason: str) -> None:
        """This lease will not come; legs that hope for it hope no more."""
        for leg in self._legs.values():
            if leg.lease_id == lease_id and leg.hopes:
                leg.refused = reason

    def push_over(self, lease_id: str, reason: str, *, pull_follows: bool) -> None:
        """A push is over before its landing zone was offered."""
        for leg in self._legs.values():
            if leg.push is not None and leg.push.lease_id == lease_id:
                leg.push = None
                if not pull_follows and leg.hopes:
                    leg.refused = reason

    def __len__(self) -> int:
        return len(self._legs)
