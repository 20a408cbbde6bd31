"""What the mover decides about pushes: when it writes, what it says, and whom it believes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane import push_writer
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.limits import DEADLINE_MARGIN_NS, WRITE_STALL_NS
from kvshuttle.dataplane.push_steps import PushStep, region_ends
from kvshuttle.dataplane.transport import BlockList, LocalRegion, TransportError
from tests.unit.dataplane.fakes import FakeMover

TTL_NS = 30 * NS
LAYERS = 4
BYTES = 64
REGIONS = [LocalRegion(f"layer{i}", 0, BYTES, 100, "VRAM", 0) for i in range(LAYERS)]


@dataclass(eq=False)
class Write:
    """A WRITE that a test completes."""

    local: tuple[int, ...]
    remote: tuple[int, ...]
    regions: range
    status: str = "PROC"
    released: bool = False

    @property
    def expected_bytes(self) -> int:
        return len(self.local) * len(self.regions) * BYTES

    @property
    def descriptors(self) -> int:
        """As if none were neighbours."""
        return len(self.local) * len(self.regions)


@dataclass
class Wire:
    """A transport that completes WRITEs when a test says so."""

    at_once: bool = False
    refuses: bool = False
    deaf: bool = False
    # NIXL cannot cancel what it has.
    keeps: bool = False
    writes: list[Write] = field(default_factory=list)
    said: list[tuple[str, bytes]] = field(default_factory=list)
    heard: list[tuple[str, bytes]] = field(default_factory=list)
    lists: int = 0

    dropped: list[str] = field(default_factory=list)

    def add_peer(self, *_: object) -> None:
        pass

    def drop_peer(self, name: str) -> None:
        self.dropped.append(name)

    def prepare(self, agent_name: str, blocks: list[int]) -> BlockList:
        self.lists += 1
        return BlockList(tuple(blocks), len(blocks), agent_name)

    def drop_list(self, _: object) -> None:
        self.lists -= 1

    def post_write(self, local: BlockList, remote: BlockList, offset: int, regions: range) -> Write:
        if self.refuses:
            raise TransportError("no")
        write = Write(local.raw, remote.raw[offset : offset + local.size], regions)
        write.status = "DONE" if self.at_once else "PROC"
        self.writes.append(write)
        return write

    def post_read(self, _peer: str, local: list[int], *_: object) -> Write:
        return Write(tuple(local), (), range(1))

    def state(self, write: Write) -> str:
        return write.status

    def bytes_moved(self, write: Write) -> int:
        return write.expected_bytes

    def release(self, write: Write) -> bool:
        write.released = not self.keeps
        return write.released

    def notify(self, peer: str, message: bytes) -> None:
        if self.deaf:
            raise TransportError("gone")
        self.said.append((peer, message))

    def notices(self) -> list[tuple[str, bytes]]:
        heard, self.heard = self.heard, []
        return heard


class Mover(FakeMover[Wire]):
    """Transfers with everything around them played by hand."""

    def __init__(self) -> None:
        super().__init__(Wire(), REGIONS)
        self.transfers.obey(m.AddPeer("other", 1, "agent", b"", []))
        self.wire.said.clear()
        self.told.clear()

    def obey(self, *messages: m.ToMover) -> None:
        for message in messages:
            self.transfers.obey(message)
        self.poll()

    def push(self, blocks: int = 6, *, ttl_ns: int = TTL_NS, worker: str = "other") -> None:
        remote = list(range(50, 50 + blocks))
        self.obey(m.Push("l1", 3, worker, 1, remote, self.clock() + ttl_ns))

    def step(self, *chunks: m.PushChunk) -> PushStep:
        step = PushStep(chunks, LAYERS)
        self.transfers.begin_step(step)
        self.poll()
        return step

    def await_(self, *, ttl_ns: int = TTL_NS, partial: bool = False) -> None:
        deadline = self.clock() + ttl_ns
        self.obey(m.Await("r", "l1", 3, "other", 1, [7, 8], deadline, partial))

    def poll(self, seconds: float = 0) -> None:
        self.clock.advance(seconds)
        self.transfers.poll()

    def complete(self, *writes: Write, status: str = "DONE") -> None:
        for write in writes or self.wire.writes:
            write.status = status
        self.poll()

    def hear(self, message: bytes, peer: str = "agent") -> None:
        self.wire.heard.append((peer, message))
        self.poll()

    def busy(self) -> bool:
        return self.transfers.busy

    def take(self, kind: type[m.FromMover]) -> list[m.FromMover]:
        found = [x for x in self.told if isinstance(x, kind)]
        self.told[:] = [x for x in self.told if not isinstance(x, kind)]
        return found

    @property
    def ends(self) -> list[tuple[bool, str]]:
        return [(x.written, x.reason) for x in self.told if isinstance(x, m.PushEnded)]

    @property
    def landed(self) -> list[tuple[bool, str]]:
        return [(x.published, x.reason) for x in self.told if isinstance(x, m.LandingEnded)]


def chunk(number: int, first: int, blocks: int, *, ready: bool = False) -> m.PushChunk:
    return m.PushChunk("l1", number, first, list(range(10 + first, 10 + first + blocks)), ready)


@pytest.fixture
def mover() -> Mover:
    return Mover()


# -- the writer ----------------------------------------------------------------------------------


def test_each_layer_is_written_when_it_is_final_and_not_before(mover: Mover) -> None:
    mover.push()
    step = mover.step(chunk(0, 0, 6))
    assert mover.wire.writes == []
    step.layer_final(0, 1)
    mover.poll()
    (write,) = mover.wire.writes
    assert (write.local, write.remote) == ((10, 11, 12, 13, 14, 15), (50, 51, 52, 53, 54, 55))
    assert write.regions == range(1)
    # Two more before the mover looks again: one WRITE.
    step.layer_final(1, 2)
    step.layer_final(2, 3)
    mover.poll()
    assert [x.regions for x in mover.wire.writes] == [range(1), range(1, 3)]
    step.all_final()
    mover.poll()
    assert mover.wire.writes[-1].regions == range(3, 4)
    assert not mover.take(m.PushChunkDone)
    mover.complete()
    assert mover.take(m.PushChunkDone) == [m.PushChunkDone("l1", 0)]
    assert not mover.wire.said
    mover.obey(m.PushFinish("l1", 1))
    assert mover.ends == [(True, "")]
    (words,) = [x[1].split(b"|") for x in mover.wire.said]
    assert words[:4] == [b"pushed", b"3", b"l1", str(6 * 4 * 64).encode()]
    assert words[5:] == [b"6", b"24"]  # blocks, and pieces of all layers
    assert mover.wire.lists == 0
    assert all(x.released for x in mover.wire.writes)


def test_a_gap_between_layers_is_waited_for() -> None:
    step = PushStep([], LAYERS)
    step.layer_final(1, 2)
    step.layer_final(2, 3)
    assert step.final() == 0
    step.layer_final(0, 1)
    assert step.final() == 3
    step.all_final()
    assert step.final() == LAYERS


def test_a_layer_is_final_when_the_device_says_so() -> None:
    marks = [False, False]
    step = PushStep([], LAYERS)
    step.layer_final(0, 1, lambda: marks[0])
    step.layer_final(1, 2, lambda: marks[1])
    assert step.final() == 0
    assert step.waiting
    marks[1] = True
    assert step.final() == 0  # what is queued runs in order
    marks[0] = True
    assert step.final() == 2
    assert not step.waiting


def test_layers_with_k_and_v_apart_are_two_regions() -> None:
    names = ["a/k", "a/v", "b/k", "b/v"]
    regions = [LocalRegion(x, 0, 1, 1, "DRAM", 0) for x in names]
    assert region_ends(regions) == {"a": (0, 2), "b": (2, 4)}


def test_what_was_computed_before_goes_at_once_and_chunks_of_later_steps_follow(
    mover: Mover,
) -> None:
    mover.push()
    mover.wire.at_once = True
    first = mover.step(chunk(0, 0, 2, ready=True), chunk(1, 2, 2))
    assert [(x.remote, x.regions) for x in mover.wire.writes] == [((50, 51), range(4))]
    first.all_final()
    second = mover.step(chunk(2, 4, 2))
    mover.obey(m.PushFinish("l1", 3))
    assert not mover.ends
    second.all_final()
    mover.poll()
    assert sorted(x.remote for x in mover.wire.writes) == [(50, 51), (52, 53), (54, 55)]
    assert mover.ends == [(True, "")]


def test_a_step_may_come_before_its_order(mover: Mover) -> None:
    """They come on different ways."""
    mover.wire.at_once = True
    mover.step(chunk(0, 0, 6)).all_final()
    assert not mover.wire.writes
    mover.push()
    assert len(mover.wire.writes) == 1
    mover.obey(m.PushFinish("l1", 1))
    assert mover.ends == [(True, "")]


def test_a_device_that_has_yet_to_come_so_far_is_asked_often(mover: Mover) -> None:
    """Hooks are called when layers are queued, all at once: nobody says when they have run."""

    def asked() -> bool:
        mover.poll()
        return mover.transfers.busy and mover.transfers.waited_for

    mover.push()
    step = mover.step(chunk(0, 0, 6))
    assert not asked()
    step.all_final(lambda: False)
    assert asked()
    # Nobody waits for a push that stops.
    mover.obey(m.PushStop("l1", "REVOKED"))
    assert mover.ends == [(False, "REVOKED")]
    assert not asked()


def test_a_write_that_hangs_is_not_asked_after_for_ever_because_of_a_device_that_does_too(
    mover: Mover,
) -> None:
    mover.push()
    step = mover.step(chunk(0, 0, 6))
    step.layer_final(0, 1)
    step.layer_final(1, 2, lambda: False)
    mover.poll()
    mover.obey(m.PushStop("l1", "REVOKED"))
    assert mover.transfers.busy
    mover.clock.advance(120)
    assert not mover.transfers.busy


def test_a_push_takes_as_long_as_something_of_it_is_in_flight(mover: Mover) -> None:
    """NIXL may copy while it posts; and WRITEs that fly side by side take their time once."""
    post = mover.wire.post_write

    def slow(*args: Any) -> Write:
        mover.clock.advance(0.25)
        return post(*args)

    mover.wire.post_write = slow  # type: ignore[assignment, method-assign]
    mover.push()
    mover.obey(m.PushBlocks(chunk(0, 0, 4, ready=True)))
    mover.poll(1)
    mover.obey(m.PushBlocks(chunk(1, 4, 1, ready=True)))
    mover.poll(1)
    mover.complete(*mover.wire.writes)
    # Nothing flies for a while: prefill computes.
    mover.poll(3)
    mover.obey(m.PushBlocks(chunk(2, 5, 1, ready=True)), m.PushFinish("l1", 3))
    mover.poll(0.5)
    mover.complete()
    (ended,) = [x for x in mover.told if isinstance(x, m.PushEnded)]
    assert ended.written
    assert ended.transfer_ns == (0.25 + 1 + 0.25 + 1 + 0.25 + 0.5) * NS
    (words,) = [x[1].split(b"|") for x in mover.wire.said]
    assert int(words[4]) == ended.transfer_ns


def test_what_takes_as_long_as_its_bytes_is_not_stalled(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what waits for others to the same peer, whichever was posted first."""
    # A block of all layers takes a second.
    monkeypatch.setattr(push_writer, "SLOWEST_BYTES_A_SECOND", LAYERS * BYTES)
    mover.push()
    mover.obey(m.PushBlocks(chunk(0, 0, 4, ready=True)))
    mover.poll(5 + 3)
    mover.obey(m.PushBlocks(chunk(1, 4, 2, ready=True)))
    mover.poll(2.9)
    assert not mover.take(m.PushStopping)
    # The first has had its own four seconds, those of the second, and five.
    mover.poll(0.2)
    assert mover.take(m.PushStopping) == [m.PushStopping("l1", "TRANSFER_STALLED")]


def test_a_write_that_hangs_past_its_deadline_is_asked_after_all_the_same(mover: Mover) -> None:
    """Its destination may only have been paused, and waits for a word."""
    mover.push()
    mover.obey(m.PushBlocks(chunk(0, 0, 6, ready=True)), m.PushFinish("l1", 1))
    mover.poll(6)
    mover.poll(120)
    assert mover.transfers.unsettled  # the mover looks once a second
    assert not mover.busy()
    mover.complete()
    assert mover.ends == [(False, "TRANSFER_STALLED")]
    assert mover.wire.said[-1][1].startswith(b"gone|")
    assert not mover.transfers.unsettled


def test_a_write_that_failed_and_cannot_be_released_may_still_write(mover: Mover) -> None:
    """As one of which NIXL had posted some pieces when another was refused."""
    mover.push()
    mover.obey(m.PushBlocks(chunk(0, 0, 6, ready=True)), m.PushFinish("l1", 1))
    mover.wire.keeps = True
    mover.complete(status="ERR")
    assert not mover.ends
    assert [x[1].split(b"|")[0] for x in mover.wire.said] == [b"stopping"]
    mover.wire.keeps = False
    mover.poll(1)
    assert mover.ends == [(False, "TRANSFER_FAILED")]
    assert mover.wire.said[-1][1].startswith(b"gone|")


def test_a_push_that_is_over_is_not_begun_again_and_that_is_said(mover: Mover) -> None:
    mover.push()
    mover.obey(m.PushBlocks(chunk(0, 0, 6, ready=True)), m.PushFinish("l1", 1))
    mover.complete()
    assert mover.ends == [(True, "")]
    mover.push()
    mover.obey(m.PushBlocks(chunk(0, 0, 6, ready=True)))
    assert mover.ends == [(True, ""), (False, "LEASE_USED")]
    assert len(mover.wire.writes) == 1
    assert mover.wire.lists == 0


def test_a_process_of_several_numbers_is_dropped_with_the_last(mover: Mover) -> None:
    """One that lost its place for a while has the NIXL agent it had."""
    mover.obey(m.AddPeer("other", 3, "agent", b"", []), m.DropPeer("other", 1))
    assert not mover.wire.dropped
    mover.obey(m.Push("l1", 3, "other", 3, [50], mover.clock() + TTL_NS))
    mover.obey(m.PushBlocks(chunk(0, 0, 1, ready=True)), m.PushFinish("l1", 1))
    mover.complete()
    assert mover.ends == [(True, "")]
    mover.obey(m.DropPeer("other", 3))
    assert mover.wire.dropped == ["agent"]


def test_after_a_stop_nothing_is_posted_and_the_end_waits_for_what_flies(mover: Mover) -> None:
    mover.push()
    step = mover.step(chunk(0, 0, 6))
    step.layer_final(0, 1)
    mover.poll()
    mover.obey(m.PushStop("l1", "REVOKED"))
    step.all_final()
    mover.poll(60)
    assert len(mover.wire.writes) == 1
    assert mover.ends == []
    # Whoever waits need not wait for the end, but must keep its blocks until then.
    assert mover.wire.said == [("agent", b"stopping|3|l1|REVOKED")]
    assert mover.take(m.PushStopping) == [m.PushStopping("l1", "REVOKED")]
    mover.complete()
    assert mover.ends == [(False, "REVOKED")]
    assert mover.wire.said[1:] == [("agent", b"gone|3|l1|REVOKED")]
    # What comes for it later is dropped.
    mover.step(chunk(1, 0, 2, ready=True))
    mover.push()
    assert len(mover.wire.writes) == 1


def test_a_stop_for_a_lease_that_was_never_heard_of_is_answered_and_remembered(
    mover: Mover,
) -> None:
    mover.obey(m.PushStop("l1", "REVOKED"))
    assert mover.ends == [(False, "REVOKED")]
    # Said again: only if asked to.
    mover.obey(m.PushStop("l1", "REVOKED"))
    assert len(mover.ends) == 1
    mover.obey(m.PushStop("l1", "REVOKED", anew=True))
    assert len(mover.ends) == 2
    mover.push()
    mover.step(chunk(0, 0, 2, ready=True))
    assert not mover.wire.writes
    assert mover.ends[2:] == [(False, "LEASE_USED")]


@pytest.mark.parametrize("status", ["ERR", "refused"])
def test_an_error_ends_the_push(mover: Mover, status: str) -> None:
    mover.push()
    mover.wire.refuses = status == "refused"
    mover.step(chunk(0, 0, 6)).all_final()
    mover.poll()
    if status == "ERR":
        mover.complete(status="ERR")
    mover.poll()
    assert mover.ends == [(False, "TRANSFER_FAILED")]
    assert mover.wire.said == [("agent", b"gone|3|l1|TRANSFER_FAILED")]


def test_a_write_that_stands_still_ends_the_push_when_it_has_ended(mover: Mover) -> None:
    mover.push()
    mover.step(chunk(0, 0, 6)).all_final()
    mover.poll()
    mover.poll(WRITE_STALL_NS / NS + 1)
    assert not mover.ends
    mover.complete()
    assert mover.ends == [(False, "TRANSFER_STALLED")]


def test_nothing_is_posted_when_the_deadline_is_near(mover: Mover) -> None:
    mover.push(ttl_ns=NS)
    mover.clock.now += NS - DEADLINE_MARGIN_NS + 1
    mover.step(chunk(0, 0, 6)).all_final()
    mover.poll()
    assert not mover.wire.writes
    assert mover.ends == [(False, "LEASE_EXPIRED")]
    # More time in time lets it go on.
    other = Mover()
    other.push(ttl_ns=NS)
    other.obey(m.ExtendPush("l1", other.clock() + TTL_NS))
    other.clock.now += NS
    other.step(chunk(0, 0, 6)).all_final()
    other.poll()
    assert len(other.wire.writes) == 1


def test_what_completes_after_the_deadline_is_not_said_to_be_written(mover: Mover) -> None:
    """A paused process: it looks at its clock after completion."""
    mover.push(ttl_ns=2 * NS)
    mover.step(chunk(0, 0, 6)).all_final()
    mover.transfers.obey(m.PushFinish("l1", 1))
    mover.poll()
    mover.clock.now += 3 * NS
    mover.complete()
    assert mover.ends == [(False, "LEASE_EXPIRED")]
    assert mover.wire.said[-1] == ("agent", b"gone|3|l1|LEASE_EXPIRED")


def test_a_destination_that_is_not_known_or_does_not_hear(mover: Mover) -> None:
    mover.push(worker="nobody")
    assert mover.ends == [(False, "PEER_UNKNOWN")]
    other = Mover()
    other.wire.at_once = other.wire.deaf = True
    other.push()
    other.step(chunk(0, 0, 6)).all_final()
    other.obey(m.PushFinish("l1", 1))
    assert other.ends == [(False, "PEER_UNREACHABLE")]


def test_a_destination_that_is_attested_dead_ends_what_flies(mover: Mover) -> None:
    mover.push()
    mover.step(chunk(0, 0, 6)).all_final()
    mover.poll()
    mover.obey(m.DropPeer("other", 1))
    assert mover.ends == [(False, "PEER_FENCED")]
    assert mover.wire.writes[0].released


def test_an_idle_push_needs_no_polling(mover: Mover) -> None:
    mover.push()
    mover.clock.advance(10)
    assert not mover.busy()
    step = mover.step(chunk(0, 0, 6))
    assert not mover.busy()  # the step wakes it
    step.layer_final(0, 1)
    assert mover.busy()
    mover.poll()
    assert mover.busy()
    assert mover.transfers.waited_for
    mover.complete()
    assert not mover.busy()


# -- the landing zone ----------------------------------------------------------------------------


def test_a_notice_in_time_publishes(mover: Mover) -> None:
    mover.await_()
    assert mover.busy()
    assert mover.transfers.written_to
    mover.hear(b"pushed|3|l1|1024|77")
    assert mover.results.take() == ({"r"}, set())
    assert mover.take(m.LandingEnded) == [m.LandingEnded("r", "l1", True, "", 1024, 77)]
    # Twice is once.
    mover.hear(b"pushed|3|l1|1024|77")
    mover.hear(b"gone|3|l1|REVOKED")
    assert mover.results.take() == (set(), set())
    assert not mover.landed


@pytest.mark.parametrize(
    ("counted", "partial", "whole"),
    [
        (b"|2", False, True),
        (b"|2", True, True),
        (b"|1", False, False),
        (b"|1", True, False),
        # Of an agent from before partial blocks: it has written the full ones.
        (b"", False, True),
        (b"", True, False),
        (b"|", True, False),
        (b"|x", True, False),
    ],
)
def test_only_who_has_written_all_blocks_is_believed(
    mover: Mover, counted: bytes, partial: bool, whole: bool
) -> None:
    mover.await_(partial=partial)
    mover.hear(b"pushed|3|l1|1024|77" + counted)
    assert mover.results.take() == ({"r"}, set() if whole else {"r"})
    assert mover.landed == [(whole, "" if whole else "INCOMPLETE")]


@pytest.mark.parametrize(("counted", "pieces"), [(b"", 0), (b"|9", 9), (b"|9|and what comes", 9)])
def test_the_writers_pieces_are_told_if_it_counts_them(
    mover: Mover, counted: bytes, pieces: int
) -> None:
    mover.await_()
    mover.hear(b"pushed|3|l1|1024|77|2" + counted)
    (ended,) = [x for x in mover.told if isinstance(x, m.LandingEnded)]
    assert (ended.published, ended.bytes_moved, ended.descriptors) == (True, 1_024, pieces)


@pytest.mark.parametrize(
    ("message", "peer"),
    [
        (b"pushed|3|l1|1|1", "another"),
        (b"pushed|2|l1|1|1", "agent"),
        (b"pushed|3|l2|1|1", "agent"),
        (b"gone|3|l1|X", "another"),
        (b"gone|4|l1|X", "agent"),
        (b"pushed", "agent"),
        (b"pushed|||", "agent"),
    ],
)
def test_a_foreign_notice_changes_nothing(mover: Mover, message: bytes, peer: str) -> None:
    mover.await_()
    mover.hear(message, peer)
    assert mover.results.take() == (set(), set())
    assert not mover.told
    mover.hear(b"pushed|3|l1|1|1")
    assert mover.landed == [(True, "")]


def test_a_late_notice_publishes_nothing_and_ends_the_quarantine(mover: Mover) -> None:
    mover.await_(ttl_ns=NS)
    mover.clock.now += NS + 1
    mover.hear(b"pushed|3|l1|1|1")
    assert mover.results.take() == ({"r"}, {"r"})
    assert mover.landed == [(False, "LATE")]


def test_the_deadline_gives_up_and_the_notice_after_it_ends_it(mover: Mover) -> None:
    mover.await_(ttl_ns=NS)
    mover.poll(1.1)
    assert mover.results.take() == ({"r"}, {"r"})
    assert mover.take(m.LandingGivenUp) == [m.LandingGivenUp("r", "l1", "LATE")]
    assert not mover.landed
    mover.poll(1)
    assert not mover.told  # once
    mover.hear(b"pushed|3|l1|1|1")
    assert mover.landed == [(False, "LATE")]
    assert mover.results.take() == (set(), set())


def test_more_time_moves_the_deadline(mover: Mover) -> None:
    mover.await_(ttl_ns=NS)
    mover.obey(m.ExtendRead("r", mover.clock() + TTL_NS))
    mover.poll(2)
    mover.hear(b"pushed|3|l1|1|1")
    assert mover.landed == [(True, "")]


def test_a_writer_that_stops_fails_the_load_and_frees_nothing_until_it_has_gone(
    mover: Mover,
) -> None:
    mover.await_()
    mover.hear(b"stopping|3|l1|TRANSFER_STALLED")
    assert mover.results.take() == ({"r"}, {"r"})
    assert mover.take(m.LandingGivenUp) == [m.LandingGivenUp("r", "l1", "TRANSFER_STALLED")]
    assert not mover.landed
    mover.hear(b"gone|3|l1|TRANSFER_STALLED")
    assert mover.landed == [(False, "TRANSFER_STALLED")]
    assert mover.results.take() == (set(), set())


@pytest.mark.parametrize("how", ["gone", "abandon", "unawait", "fence", "failure"])
def test_whatever_ends_the_waiting_fails_the_load_once(mover: Mover, how: str) -> None:
    mover.await_()
    match how:
        case "gone":
            mover.hear(b"gone|3|l1|PREEMPTED")
        case "abandon":
            mover.obey(m.Abandon("r", "REVOKED"))
        case "unawait":
            mover.obey(m.Unawait("r", "l1", "SOURCE_LOST"))
        case "fence":
            mover.obey(m.DropPeer("other", 1))
        case "failure":
            mover.transfers.fail_everything()
    assert mover.results.take() == ({"r"}, {"r"})
    stopped = {
        "gone": [(False, "PREEMPTED")],
        "unawait": [(False, "SOURCE_LOST")],
        "fence": [(False, "PEER_FENCED")],
    }
    assert mover.landed == stopped.get(how, [])
    assert len(mover.take(m.LandingGivenUp)) == (how in ("abandon", "failure"))
    mover.transfers.obey(m.Unawait("r", "l1", "")) if how != "failure" else mover.transfers.refuse(
        m.Unawait("r", "l1", "")
    )
    assert len(mover.landed) == 1
    assert mover.results.take() == (set(), set())


def end_before_the_word(mover: Mover, how: str) -> None:
    """vLLM hears how a landing ended, and then comes the word that a read is to follow."""
    match how:
        case "late":
            mover.clock.advance(60)
            mover.poll()
        case "stopping":
            mover.hear(b"stopping|3|l1|TRANSFER_STALLED")
        case "gone":
            mover.hear(b"gone|3|l1|PREEMPTED")
        case "written":
            mover.hear(b"pushed|3|l1|1|1")
        case "fenced":
            mover.obey(m.DropPeer("other", 1))
        case "broken":
            mover.transfers.fail_everything()
    finished, _ = mover.results.take()
    assert finished == {"r"}


def read_of_the_landing(mover: Mover) -> m.Read:
    return m.Read("r", "l2", "other", 1, [7, 8], [1, 2], mover.clock() + TTL_NS, False)


def test_a_quiet_end_makes_way_for_a_read(mover: Mover) -> None:
    mover.await_()
    mover.obey(m.Unawait("r", "l1", "PULLED_INSTEAD", quiet=True))
    assert not mover.told
    assert mover.results.take() == (set(), set())
    mover.obey(read_of_the_landing(mover))
    assert mover.transfers.reading("r")


@pytest.mark.parametrize("follows", ["read", "refuse"])
@pytest.mark.parametrize("how", ["late", "stopping", "gone", "written", "fenced", "broken"])
def test_what_follows_a_quiet_end_does_not_tell_vllm_again(
    mover: Mover, how: str, follows: str
) -> None:
    mover.await_()
    end_before_the_word(mover, how)
    obey = mover.transfers.refuse if how == "broken" else mover.transfers.obey
    obey(m.Unawait("r", "l1", "PULLED_INSTEAD", quiet=True))
    obey(read_of_the_landing(mover) if follows == "read" else m.Refuse("r"))
    assert mover.results.take() == (set(), set())
    # Nor does anything land in blocks that the request computes in by now.
    assert not mover.transfers.reading("r")
    ended = mover.take(m.ReadEnded)
    said = [(x.lease_id, x.published) for x in ended if isinstance(x, m.ReadEnded)]
    assert said == [("l2", False)] * (follows == "read")
    # Another load of the same request is its own.
    obey(m.Refuse("r"))
    assert mover.results.take() == ({"r"}, {"r"})


def test_one_that_is_given_up_is_listened_to_for_a_while_only(mover: Mover) -> None:
    mover.await_(ttl_ns=NS)
    mover.obey(m.Abandon("r", "REVOKED"))
    mover.clock.advance(2.5)
    assert mover.busy()
    mover.clock.advance(1)
    assert not mover.busy()
    assert not mover.transfers.written_to


# -- a broken mover ------------------------------------------------------------------------------


def test_a_broken_mover_says_of_a_push_only_what_it_knows(mover: Mover) -> None:
    mover.push()
    mover.step(chunk(0, 0, 6)).all_final()
    mover.poll()
    mover.transfers.fail_everything()
    assert not mover.ends  # a WRITE may be in flight for ever
    mover.transfers.refuse(m.PushStop("l1", "REVOKED"))
    assert not mover.ends
    mover.transfers.refuse(m.Push("l2", 1, "other", 1, [1], 0))
    assert mover.ends == [(False, "MOVER_FAILED")]
    mover.transfers.refuse(m.DropPeer("other", 1))
    assert len(mover.ends) == 2


def test_a_landing_zone_that_a_broken_mover_is_told_of_may_be_written_to(mover: Mover) -> None:
    mover.transfers.fail_everything()
    mover.transfers.refuse(m.Await("r", "l1", 3, "other", 1, [7, 8], mover.clock() + TTL_NS))
    assert mover.results.take() == ({"r"}, {"r"})
    assert len(mover.take(m.LandingGivenUp)) == 1
    mover.transfers.refuse(m.Unawait("r", "l1", "X"))
    assert len(mover.landed) == 1
