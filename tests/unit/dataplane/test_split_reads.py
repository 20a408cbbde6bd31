"""A rank that reads from several ranks of its source, and a source that several ranks read from."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.scheduler import CommandBatch, FinishedRequest, SchedulerAgent, StreamUp
from kvshuttle.dataplane.shapes import Heads
from kvshuttle.dataplane.transport import ReadHandle, TransportError
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.dataplane.fakes import FakeClock, FakeMover, FakeOutbox, FakePool

TTL_NS = 30 * NS
LEFT, RIGHT = m.HeadSlice(0, 0, 2, 4, 2), m.HeadSlice(2, 0, 2, 4, 2)


@dataclass
class Wire:
    """A transport whose peers complete, refuse and answer one by one."""

    status: dict[str, str] = field(default_factory=dict)
    refuses: set[str] = field(default_factory=set)
    posted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    heard: list[tuple[str, bytes]] = field(default_factory=list)

    def add_peer(self, name: str, metadata: bytes, *_: object) -> None:
        if metadata == b"broken":
            raise TransportError(f"peer {name}: not there")

    def drop_peer(self, name: str) -> None:
        self.dropped.append(name)

    def post_read(self, name: str, *_: object) -> ReadHandle:
        if name in self.refuses:
            raise TransportError(f"peer {name}: no")
        self.posted.append(name)
        return ReadHandle(name, 0, 30)

    def state(self, handle: ReadHandle) -> str:
        return self.status.get(handle.raw, "PROC")

    def bytes_moved(self, handle: ReadHandle) -> int:
        return {"left": 100, "right": 10}[handle.raw]

    def release(self, handle: ReadHandle) -> bool:
        self.released.append(handle.raw)
        return True

    def notify(self, *_: object) -> None:
        pass

    def notices(self) -> list[tuple[str, bytes]]:
        heard, self.heard = self.heard, []
        return heard


class Mover(FakeMover[Wire]):
    """The one rank of a worker, whose peer has two."""

    def __init__(self, right: m.HeadSlice | None = RIGHT) -> None:
        super().__init__(Wire())
        self.transfers.obey(m.AddPeer("other", 1, "left", b"", [], LEFT))
        self.transfers.obey(m.AddPeer("other", 1, "right", b"", [], right))

    def read(self) -> None:
        until = self.clock() + TTL_NS
        self.transfers.obey(m.Read("r", "l1", "other", 1, [1], [2], until, is_return=True))

    def poll(self, **status: str) -> None:
        self.wire.status |= status
        self.transfers.poll()

    def hear(self, peer: str, message: bytes) -> None:
        self.wire.heard.append((peer, message))
        self.transfers.poll()

    def ended(self) -> list[tuple[bool, str, int]]:
        return [
            (x.published, x.reason, x.bytes_moved) for x in self.told if isinstance(x, m.ReadEnded)
        ]


def test_all_ranks_must_have_completed_and_said_yes() -> None:
    mover = Mover()
    mover.read()
    assert mover.wire.posted == ["left", "right"]
    mover.poll(left="DONE")
    mover.hear("left", b"yes|l1")
    mover.poll()
    assert mover.ended() == []
    mover.poll(right="DONE")
    mover.poll()
    assert mover.ended() == []
    mover.hear("right", b"yes|l1")
    assert mover.ended() == [(True, "", 110)]
    assert mover.results.take() == ({"r"}, set())
    assert mover.wire.released == ["left", "right"]


def test_one_no_is_a_no() -> None:
    mover = Mover()
    mover.read()
    mover.poll(left="DONE", right="DONE")
    mover.hear("left", b"yes|l1")
    mover.hear("right", b"no|l1")
    assert mover.ended() == [(False, "SOURCE_LET_GO", 110)]


def test_a_part_that_fails_leaves_the_other_in_quarantine() -> None:
    mover = Mover()
    mover.read()
    mover.poll(left="ERR")
    assert mover.results.take() == ({"r"}, {"r"})
    assert mover.ended() == []  # the right part may still be written to
    mover.poll(right="DONE")
    assert mover.ended() == [(False, "TRANSFER_FAILED", 0)]


def test_a_part_that_is_refused_leaves_the_posted_one_in_quarantine() -> None:
    mover = Mover()
    mover.wire.refuses = {"right"}
    mover.read()
    assert (mover.wire.posted, mover.results.take()) == (["left"], ({"r"}, {"r"}))
    assert mover.ended() == []
    mover.poll(left="DONE")
    assert mover.ended() == [(False, "TRANSFER_FAILED", 0)]


def test_the_first_refusal_ends_it_at_once() -> None:
    mover = Mover()
    mover.wire.refuses = {"left"}
    mover.read()
    assert mover.ended() == [(False, "TRANSFER_FAILED", 0)]


def test_half_of_the_heads_are_not_read() -> None:
    """A rank that could not be reached, or of which nothing is read, must not go unnoticed."""
    mover = Mover(right=None)
    mover.read()
    assert (mover.wire.posted, mover.ended()) == ([], [(False, "PEER_UNKNOWN", 0)])


def test_a_fence_ends_reads_from_every_rank() -> None:
    mover = Mover()
    mover.read()
    mover.transfers.obey(m.DropPeer("other", 1))
    assert mover.ended() == [(False, "PEER_FENCED", 0)]
    assert sorted(mover.wire.released) == sorted(mover.wire.dropped) == ["left", "right"]
    mover.read()
    assert mover.ended()[1:] == [(False, "PEER_UNKNOWN", 0)]


# The scheduler side.


class Bench:
    """An agent whose worker is split over `ours`."""

    def __init__(self, ours: list[Heads]) -> None:
        self.out = FakeOutbox(len(ours))
        self.clock = FakeClock()
        self.agent = SchedulerAgent(
            FakePool(100),
            self.out,
            self.clock,
            block_size=32,
            worker_id="w",
            counts=lambda: (0, 0),
            heads=ours,
        )
        welcome = agent_pb2.AgentWelcome(incarnation=1, lineage_id="L", clock_drift_ppm=200)
        self.agent.post(StreamUp(1, 5, welcome))
        self.agent.drain()

    def announce(self, theirs: list[Heads]) -> list[m.AddPeer]:
        self.out.orders.clear()
        self.obey(
            agent_pb2.AgentCommand(
                peer=agent_pb2.Peer(
                    worker=types_pb2.WorkerRef(worker_id="other", incarnation=1),
                    ranks=[
                        agent_pb2.RankEndpoint(
                            rank=i, agent_name=f"a{i}", first_head=x.first, num_heads=x.count
                        )
                        for i, x in enumerate(theirs)
                    ],
                )
            )
        )
        return [x for x in self.out.orders if isinstance(x, m.AddPeer)]

    def obey(self, command: agent_pb2.AgentCommand) -> None:
        self.agent.post(CommandBatch(1, 5, [command]))
        self.agent.drain()

    def answer(self, error: str = "") -> str | None:
        self.agent.post(m.PeerReady("other", 1, error))
        self.agent.drain()
        return self.agent.eager.peers.get(("other", 1))


ONE, TWO = [Heads(0, 4)], [Heads(0, 2), Heads(2, 2)]


def test_each_rank_is_told_whom_to_reach_and_what_to_read() -> None:
    orders = Bench(ONE).announce(TWO)
    assert [(x.agent_name, x.heads) for x in orders] == [("a0", LEFT), ("a1", RIGHT)]
    orders = Bench(TWO).announce(ONE)
    assert [(x.agent_name, x.heads) for x in orders] == [
        ("a0", m.HeadSlice(0, 0, 2, 2, 4)),
        ("a0", m.HeadSlice(0, 2, 2, 2, 4)),
    ]


def test_a_peer_can_be_read_when_every_connection_stands() -> None:
    bench = Bench(ONE)
    bench.announce(TWO)
    assert bench.answer() is None
    assert bench.answer() == ""


@pytest.mark.parametrize("first", [True, False])
def test_one_connection_that_fails_is_not_hidden_by_another(first: bool) -> None:
    bench = Bench(ONE)
    bench.announce(TWO)
    bench.answer("no route" if first else "")
    assert bench.answer("" if first else "no route") == "no route"
    # Announced again, it is tried again.
    bench.announce(TWO)
    bench.answer()
    assert bench.answer() == ""


def test_a_peer_that_cannot_be_matched_is_not_read() -> None:
    bench = Bench(ONE)
    assert bench.announce([Heads(0, 0), Heads(0, 0)]) == []
    assert "only equal splits" in (bench.agent.eager.peers["other", 1])


def test_a_source_waits_for_every_reader_before_it_lets_go() -> None:
    """One rank, read by two: the first that has finished must not end it for the second."""
    bench = Bench(ONE)
    bench.announce(TWO)
    hashes = tuple(f"{i:032d}".encode() for i in range(2))
    source = bench.agent.source
    bench.obey(_expect())
    bench.agent.finished(
        ("t", types_pb2.LEG_DECODE), FinishedRequest("r", hashes, (1, 2), 64, aborted=False)
    )
    bench.obey(_harden(hashes[-1]))
    bench.out.orders.clear()
    source.reader_done("l1")
    assert not [x for x in bench.out.orders if isinstance(x, m.Unserve)]
    source.reader_done("l1")
    assert [x for x in bench.out.orders if isinstance(x, m.Unserve)] == [m.Unserve("l1")]


def _expect() -> agent_pb2.AgentCommand:
    expect = agent_pb2.ExpectTurn(
        turn_token="t", tenant="acme", session_id="s", turn=1, leg=types_pb2.LEG_DECODE
    )
    expect.retention.FromSeconds(100)
    return agent_pb2.AgentCommand(expect_turn=expect)


def _harden(head: bytes) -> agent_pb2.AgentCommand:
    harden = agent_pb2.Harden(
        lease_id="l1",
        version=1,
        tenant="acme",
        session_id="s",
        head_hash=head,
        range=types_pb2.BlockRange(start=0, end=2),
        destination=types_pb2.WorkerRef(worker_id="other", incarnation=1),
    )
    harden.ttl.FromSeconds(30)
    harden.guard.FromSeconds(5)
    return agent_pb2.AgentCommand(harden=harden)
