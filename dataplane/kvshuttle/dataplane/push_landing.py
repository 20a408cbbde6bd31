"""The side that is written to: a request's blocks as landing zone of a push.

vLLM has allocated the blocks and holds the request back; they are held here too, offered to the
control plane, and written to by prefill while it computes. vLLM gets them when the writer's notice
has come in time. Whatever happens else, the request computes, and the blocks stay held until the
writer is known to have stopped: by its notice, by the control plane's word, or by an attested
death. Time ends the waiting, never the hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvshuttle.dataplane import journal
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import Clock
from kvshuttle.dataplane.counters import Counters
from kvshuttle.dataplane.grants import Grant, tail_out
from kvshuttle.dataplane.holds import Hold, HoldKind, HoldTable
from kvshuttle.dataplane.limits import LANDING_WAIT_NS
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.matching import Tail
from kvshuttle.dataplane.outbox import Outbox
from kvshuttle.dataplane.turns import PushHope, TurnLeg
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2

__all__ = ["Landing", "LandingSide", "Zone"]

_log = get_logger("landing")

_DISCARDED = frozenset({"LATE", "LEASE_EXPIRED", "GRANT_TIMEOUT"})


@dataclass(frozen=True)
class Zone:
    """A request's blocks that are to be written: full ones with these hashes, from the ``first``th
    of its chain on, and a ``tail`` behind them. ``tokens`` is what it need not compute then."""

    first: int
    hashes: list[bytes]
    block_ids: list[int]
    tail: Tail | None
    tokens: int

    @property
    def all_ids(self) -> list[int]:
        """Of all blocks, the last, partial one too."""
        return [*self.block_ids, *([self.tail.block_id] if self.tail is not None else [])]


@dataclass(eq=False)
class Landing:
    """One landing zone, from its offer until its writer has stopped and its request is gone."""

    # What extensions are asked for: nothing is read under it.
    grant: Grant
    hope: PushHope
    leg: TurnLeg
    hold: Hold
    zone: Zone
    looked_ns: int
    # Until when it must be granted, or a read must follow.
    patience_ns: int
    ranks_left: int
    granted: bool = False
    # Its push is over without a write, and a grant to read is to come.
    reads: bool = False
    published: bool = True
    told_failed: bool = False
    # The movers were told to wait no longer.
    abandoned: bool = False
    orphaned: bool = False
    # The control plane knows what came of it.
    said: bool = False
    reason: str = ""
    bytes_moved: int = 0
    transfer_ns: int = 0
    descriptors: int = 0

    @property
    def request_id(self) -> str:
        """Whose blocks they are."""
        return self.grant.request_id

    @property
    def tokens(self) -> int:
        """What the request need not compute once it is written."""
        return self.zone.tokens

    @property
    def done(self) -> bool:
        """Whether its writer has stopped."""
        return self.ranks_left == 0


class LandingSide:
    """Scheduler thread only."""

    def __init__(
        self,
        holds: HoldTable,
        counters: Counters,
        outbox: Outbox,
        clock: Clock,
        block_size: int,
    ) -> None:
        self._holds = holds
        self._counters = counters
        self._out = outbox
        self._clock = clock
        self._block_size = block_size
        self._by_lease: dict[str, Landing] = {}
        self._by_request: dict[str, Landing] = {}

    # Hooks.

    def has(self, request_id: str) -> bool:
        """Whether a request has, or had, its landing zone."""
        return request_id in self._by_request

    def open(
        self,
        request_id: str,
        leg: TurnLeg,
        zone: Zone,
        looked_ns: int,
    ) -> None:
        """vLLM has allocated: hold the blocks, listen, and only then offer them."""
        assert leg.push is not None
        hope = leg.push
        now = self._clock()
        grant = Grant(
            lease_id=hope.lease_id,
            version=hope.version,
            token=leg.token,
            leg=leg.leg,
            source=hope.peer,
            start=zone.first,
            block_ids=[],
            hashes=[],
            # At or before what the control plane counts, which grants later than now.
            deadline_ns=now + hope.ttl_ns,
            is_return=False,
            request_id=request_id,
            number=hope.number,
            ask_ns=now + hope.ttl_ns // 2,
        )
        landing = Landing(
            grant=grant,
            hope=hope,
            leg=leg,
            hold=self._holds.take(HoldKind.LANDING, zone.all_ids),
            zone=zone,
            looked_ns=looked_ns,
            patience_ns=now + max(leg.lookup_wait_ns, LANDING_WAIT_NS),
            ranks_left=self._out.num_ranks,
        )
        self._by_lease[hope.lease_id] = landing
        self._by_request[request_id] = landing
        journal.landing_held(hope.lease_id, request_id, hope.peer, zone.all_ids)
        self._out.order(
            m.Await(
                request_id=request_id,
                lease_id=hope.lease_id,
                version=hope.version,
                worker_id=hope.peer[0],
                incarnation=hope.peer[1],
                local_block_ids=zone.all_ids,
                deadline_ns=grant.deadline_ns,
                partial=zone.tail is not None,
            )
        )
        blocks = types_pb2.BlockDescriptors(
            range=types_pb2.BlockRange(start=zone.first, end=zone.first + len(zone.block_ids)),
            block_ids=zone.block_ids,
            hashes=b"".join(zone.hashes),
            hash_size=len(zone.hashes[0]),
        )
        if zone.tail is not None:
            blocks.tail.CopyFrom(tail_out(zone.tail))
        self._out.emit(
            agent_pb2.AgentEvent(
                hardened=agent_pb2.LeaseHardened(
                    lease_id=hope.lease_id, version=hope.version, blocks=blocks
                )
            )
        )

    def blocks_written(self, request_id: str) -> int | None:
        """As `DestinationSide.blocks_written`."""
        landing = self._by_request.get(request_id)
        if landing is None or landing.told_failed or (landing.published and landing.done):
            return None
        return landing.zone.first

    def load_failed(self, request_id: str) -> None:
        """vLLM was told that the load failed."""
        landing = self._by_request.get(request_id)
        if landing is not None:
            landing.told_failed = True
            if not landing.done:
                self._holds.quarantine(landing.hold)

    def request_gone(self, request_id: str) -> int:
        """The request has finished or was aborted. Returns the tokens that it was spared."""
        landing = self._by_request.get(request_id)
        if landing is None:
            return 0
        if landing.done:
            self._forget(landing)
            return landing.tokens if landing.published else 0
        landing.orphaned = True
        if landing.reads:
            self._end_reading(landing, "REQUEST_ENDED")
            return 0
        self._abandon(landing, "REQUEST_ENDED")
        self._say(landing, agent_pb2.TRANSFER_OUTCOME_REVOKED, "REQUEST_ENDED")
        return 0

    # Commands.

    def granted(self, lease_id: str) -> None:
        """Its writer may write: it is waited for to the deadline."""
        landing = self._by_lease.get(lease_id)
        if landing is not None:
            landing.granted = True

    def revoke(self, lease_id: str, reason: str) -> bool:
        """Waits no longer; false if this side does not know the lease."""
        landing = self._by_lease.get(lease_id)
        if landing is None:
            return False
        if not landing.done and not landing.reads:
            self._abandon(landing, reason or "REVOKED")
        return True

    def writer_stopped(self, lease_id: str, reason: str, *, pull_follows: bool) -> None:
        """Nobody writes there, now or later."""
        landing = self._by_lease.get(lease_id)
        if landing is None or landing.done or landing.reads:
            return
        if pull_follows and not (landing.said or landing.abandoned):
            landing.reads = True
            landing.said = True  # the lease has ended in the books
            landing.patience_ns = self._clock() + landing.leg.lookup_wait_ns
            self._out.order(m.Unawait(landing.request_id, lease_id, reason, quiet=True))
            return
        self._out.order(m.Unawait(landing.request_id, lease_id, reason))

    def take_for_read(self, token: str) -> Landing | None:
        """A grant to read has come for a landing zone whose push is over: it is a load now."""
        for landing in list(self._by_lease.values()):
            if landing.reads and landing.published and landing.leg.token == token:
                self._forget(landing)
                # It is held under the lease to read from now on.
                journal.landing_let_go(landing.grant.lease_id, landing.request_id)
                return landing
        return None

    def give_back(self, landing: Landing, reason: str) -> None:
        """The grant to read does not fit: the request computes."""
        self._by_request[landing.request_id] = landing
        self._end_reading(landing, reason)

    # The movers' reports.

    def given_up(self, message: m.LandingGivenUp) -> None:
        """One rank waits no longer, but may be written to."""
        landing = self._by_lease.get(message.lease_id)
        if landing is None:
            return
        if landing.reads:
            # It was late before it was told that nobody writes; vLLM knows already.
            self._end_reading(landing, message.reason)
            return
        landing.published = False
        self._holds.quarantine(landing.hold)
        self._fall_back(landing, message.reason)

    def ended(self, message: m.LandingEnded) -> None:
        """One rank's writer has stopped."""
        landing = self._by_lease.get(message.lease_id)
        if landing is None or landing.ranks_left == 0:
            return
        if landing.reads:
            self._end_reading(landing, message.reason or "WRITER_STOPPED")
            return
        landing.ranks_left -= 1
        landing.bytes_moved += message.bytes_moved
        landing.transfer_ns = max(landing.transfer_ns, message.transfer_ns)
        landing.descriptors += message.descriptors
        if not message.published:
            self._fall_back(landing, message.reason)
        if not landing.done:
            return
        self._let_go(landing, message.reason)
        if landing.published:
            self._counters.transfer(
                is_return=False,
                bytes_moved=landing.bytes_moved,
                tokens=landing.tokens,
                pushed=True,
            )
            self._say(landing, agent_pb2.TRANSFER_OUTCOME_PUBLISHED, "")
        if landing.orphaned:
            self._forget(landing)

    def stream_down(self) -> None:
        """Nobody will say soon whether a landing zone was granted."""
        now = self._clock()
        for landing in self._by_lease.values():
            landing.patience_ns = min(landing.patience_ns, now + landing.leg.lookup_wait_ns)

    # Time.

    def expire(self, now: int) -> None:
        """Gives up what is neither granted nor read in time; the movers look after the rest."""
        for landing in list(self._by_lease.values()):
            if now < landing.patience_ns:
                continue
            if landing.reads:
                self._end_reading(landing, "GRANT_TIMEOUT")
            elif not (landing.granted or landing.abandoned):
                # Whether somebody was granted it is not known: it stays held.
                self._abandon(landing, "GRANT_TIMEOUT")

    def next_deadline(self) -> int | None:
        """The next instant at which :meth:`expire` has something to do."""
        times = [
            x.patience_ns
            for x in self._by_lease.values()
            if x.reads or not (x.granted or x.abandoned)
        ]
        return min(times, default=None)

    def needed(self) -> list[Grant]:
        """Leases that requests wait for."""
        return [
            x.grant for x in self._by_lease.values() if x.granted and not (x.said or x.abandoned)
        ]

    @property
    def awaited(self) -> int:
        """How many requests wait for their landing zones."""
        return sum(not (x.done or x.told_failed or x.orphaned) for x in self._by_lease.values())

    @property
    def grants(self) -> list[Grant]:
        """Of every landing zone that is waited for, to count them longer."""
        return [x.grant for x in self._by_lease.values()]

    @property
    def held(self) -> list[Landing]:
        """Every landing zone whose writer is not known to have stopped; any thread."""
        return [x for x in list(self._by_lease.values()) if not x.reads]

    # Inside.

    def _abandon(self, landing: Landing, reason: str) -> None:
        landing.abandoned = True
        self._out.order(m.Abandon(landing.request_id, reason))

    def _end_reading(self, landing: Landing, reason: str) -> None:
        """No read follows after all. Nobody writes, so the blocks may go."""
        landing.ranks_left = 0
        landing.published = False
        self._out.order(m.Refuse(landing.request_id))
        self._let_go(landing, reason)
        self._counters.fallback(reason)
        if landing.orphaned:
            self._forget(landing)

    def _let_go(self, landing: Landing, reason: str) -> None:
        """Nobody writes there now or later."""
        journal.landing_let_go(landing.grant.lease_id, landing.request_id, reason)
        self._holds.release(landing.hold)
        self._by_lease.pop(landing.grant.lease_id, None)

    def _fall_back(self, landing: Landing, reason: str) -> None:
        """The request computes; once is said why."""
        landing.published = False
        landing.reason = landing.reason or reason
        if landing.said:
            return
        outcome = (
            agent_pb2.TRANSFER_OUTCOME_DISCARDED
            if reason in _DISCARDED
            else agent_pb2.TRANSFER_OUTCOME_FAILED
        )
        self._say(landing, outcome, reason)
        if not landing.orphaned:
            self._counters.fallback(reason or "TRANSFER_FAILED")
            _log.warning(
                "load_failed", lease=landing.grant.lease_id, reason=reason, tokens=landing.tokens
            )

    def _say(
        self, landing: Landing, outcome: agent_pb2.TransferOutcome.ValueType, reason: str
    ) -> None:
        if landing.said:
            return
        landing.said = True
        stopped = agent_pb2.LeaseStopped(
            lease_id=landing.grant.lease_id, outcome=outcome, reason=reason
        )
        if outcome == agent_pb2.TRANSFER_OUTCOME_PUBLISHED:
            stopped.stats.blocks = len(landing.zone.all_ids)
            stopped.stats.tokens = landing.tokens
            stopped.stats.bytes = landing.bytes_moved
            stopped.stats.descriptors = landing.descriptors
            stopped.stats.transfer_time.FromNanoseconds(landing.transfer_ns)
            stopped.stats.wait_time.FromNanoseconds(max(0, self._clock() - landing.looked_ns))
        self._out.emit(agent_pb2.AgentEvent(stopped=stopped))

    def _forget(self, landing: Landing) -> None:
        self._by_lease.pop(landing.grant.lease_id, None)
        self._by_request.pop(landing.request_id, None)
