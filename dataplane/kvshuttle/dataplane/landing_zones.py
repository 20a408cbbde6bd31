"""Landing zones of pushes on one rank: whom the mover believes that all is written.

Only the writer that was named, with the version that was offered, before the deadline as seen after
its notice came, lets vLLM have the blocks; and only a notice of that writer, the control plane's
word or an attested death ends the waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, Clock
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.log import get_logger
from kvshuttle.dataplane.push_writer import GONE, STOPPING
from kvshuttle.dataplane.transport import LocalRegion

if TYPE_CHECKING:
    from kvshuttle.dataplane.transfers import Results

__all__ = ["LandingZones"]

_log = get_logger("landing")

LISTENED_NS = 2 * NS
"""How long after its deadline a zone that was given up is polled for: its writer's notice, if one
is on its way, is there by then; after that the control plane tells."""


@dataclass(eq=False)
class _Landing:
    order: m.Await
    peer: str
    deadline_ns: int
    # vLLM was told how it went.
    told: bool = False


class LandingZones:
    """One rank's landing zones. One thread calls it; `peers` is the mover's table of boots."""

    def __init__(
        self,
        regions: list[LocalRegion],
        results: Results,
        send: Callable[[m.FromMover], None],
        faults: Faults,
        clock: Clock,
        peers: dict[tuple[str, int], str],
    ) -> None:
        self._regions = regions
        self._results = results
        self._send = send
        self._faults = faults
        self._clock = clock
        self._peers = peers
        self._landings: dict[str, _Landing] = {}
        # Requests whose push has ended without a word, until what follows is known: whether vLLM
        # had been told by then.
        self._quieted: dict[str, bool] = {}

    @property
    def busy(self) -> bool:
        """Whether NIXL has to be polled."""
        now = self._clock()
        return any(not x.told or now < x.deadline_ns + LISTENED_NS for x in self._landings.values())

    @property
    def open(self) -> bool:
        """Whether a writer is not known to have stopped."""
        return bool(self._landings)

    @property
    def written_to(self) -> bool:
        """Whether a request waits for a landing zone."""
        return any(not landing.told for landing in self._landings.values())

    def poll(self) -> bool:
        """Gives up what is late. True: something happened."""
        late = [x for x in self._landings.values() if not x.told and self._clock() > x.deadline_ns]
        for landing in late:
            self._give_up(landing, "LATE")
        return bool(late)

    def wait_for(self, order: m.Await) -> None:
        """A landing zone is about to be offered."""
        peer = self._peers.get((order.worker_id, order.incarnation), "")
        self._landings[order.lease_id] = _Landing(order, peer, order.deadline_ns)

    def unawait(self, order: m.Unawait) -> None:
        """Nobody writes there any more."""
        landing = self._landings.pop(order.lease_id, None)
        if order.quiet:
            # A zone leaves the table otherwise only after vLLM was told.
            self._quieted[order.request_id] = landing is None or landing.told
        elif landing is not None:
            self._landed(landing, order.reason or "WRITER_STOPPED")

    def told_already(self, request_id: str) -> bool:
        """Whether vLLM was told of a request's load before its push ended quietly. Asked once, for
        the order that follows: it must not be told again, as the request may run by now."""
        return self._quieted.pop(request_id, False)

    def abandon(self, request_id: str, reason: str) -> bool:
        """The request waits no longer; false if this is no landing's."""
        landing = self._of_request(request_id)
        if landing is None:
            return False
        self._give_up(landing, reason)
        return True

    def extend(self, request_id: str, deadline_ns: int) -> bool:
        """A later deadline; false if this is no landing's."""
        landing = self._of_request(request_id)
        if landing is None:
            return False
        landing.deadline_ns = max(landing.deadline_ns, deadline_ns)
        return True

    def notice(self, peer: str, kind: bytes, rest: bytes) -> None:
        """What a writer says."""
        version, _, rest = rest.partition(b"|")
        lease, _, rest = rest.partition(b"|")
        landing = self._landings.get(lease.decode(errors="replace"))
        if landing is None:
            return  # said twice, or over by the control plane's word
        order = landing.order
        if not landing.peer:
            landing.peer = self._peers.get((order.worker_id, order.incarnation), "")
        if peer != landing.peer or version != str(order.version).encode():
            _log.error("foreign_notice", lease=order.lease_id, peer=peer)
            return
        if kind == STOPPING:
            # It says nothing more of it than that all will not be written; bytes may yet come.
            self._give_up(landing, rest.decode(errors="replace") or "WRITER_STOPPED")
            return
        del self._landings[order.lease_id]
        if kind == GONE:
            self._landed(landing, rest.decode(errors="replace") or "WRITER_STOPPED")
        elif self._clock() > landing.deadline_ns:
            self._landed(landing, "LATE")
        else:
            # Older writers count no pieces, and those from before partial blocks no blocks either,
            # and have written the full ones.
            moved, took, blocks, pieces = (*map(_number, rest.split(b"|")), 0, 0, 0, 0)[:4]
            wanted = len(order.local_block_ids)
            whole = blocks == wanted or (not blocks and not order.partial)
            self._landed(landing, "" if whole else "INCOMPLETE", moved, took, pieces)

    def _landed(
        self, landing: _Landing, reason: str, moved: int = 0, took: int = 0, pieces: int = 0
    ) -> None:
        """The writer has stopped: vLLM is told, unless it was before."""
        order = landing.order
        published = not reason and not landing.told
        if not landing.told:
            if published:
                self._faults.now().after_push(order, self._regions)
            self._results.add(order.request_id, failed=not published)
        self._send(
            m.LandingEnded(order.request_id, order.lease_id, published, reason, moved, took, pieces)
        )

    def _give_up(self, landing: _Landing, reason: str) -> None:
        if landing.told:
            return
        landing.told = True
        order = landing.order
        self._results.add(order.request_id, failed=True)
        self._send(m.LandingGivenUp(order.request_id, order.lease_id, reason))

    def _of_request(self, request_id: str) -> _Landing | None:
        return next((x for x in self._landings.values() if x.order.request_id == request_id), None)

    def drop_peer(self, worker_id: str, incarnation: int) -> None:
        """A boot is attested dead: it writes nothing."""
        for landing in list(self._landings.values()):
            if (landing.order.worker_id, landing.order.incarnation) == (worker_id, incarnation):
                del self._landings[landing.order.lease_id]
                self._landed(landing, "PEER_FENCED")

    def fail_everything(self, reason: str) -> None:
        """NIXL cannot be used any more: requests compute. Writers may go on writing."""
        for landing in self._landings.values():
            self._give_up(landing, reason)

    def refuse(self, message: m.ToMover, reason: str) -> None:
        """One order after :meth:`fail_everything`."""
        match message:
            case m.Await():
                # Its memory can still be written to, so it is as one that was given up.
                self.wait_for(message)
                self._give_up(self._landings[message.lease_id], reason)
            case m.Unawait():
                self.unawait(message)
            case m.Abandon():
                self.abandon(message.request_id, message.reason)
            case m.DropPeer():
                self.drop_peer(message.worker_id, message.incarnation)
            case _:
                pass


def _number(word: bytes) -> int:
    return int(word) if word.isdigit() else 0
