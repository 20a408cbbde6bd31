"""What the mover decides: when it posts, what it publishes, when blocks are let go, what it
answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane import transfers
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.limits import (
    CONFIRM_TIMEOUT_NS,
    CONNECT_LINGER_NS,
    DEADLINE_MARGIN_NS,
    READ_STALL_NS,
)
from kvshuttle.dataplane.transport import LocalRegion, ReadHandle
from tests.unit.dataplane.fakes import FakeMover

TTL_NS = 30 * NS


@dataclass
class Wire:
    """A transport that completes, lets go and answers when a test says so."""

    status: str = "PROC"
    lets_go: bool = True
    posted: int = 0
    said: list[bytes] = field(default_factory=list)
    heard: list[tuple[str, bytes]] = field(default_factory=list)

    def add_peer(self, *_: object) -> None:
        pass

    drop_peer = add_peer

    def post_read(self, *_: object) -> ReadHandle:
        self.posted += 1
        return ReadHandle(None, 0)

    def state(self, _: object) -> str:
        return self.status

    def bytes_moved(self, _: object) -> int:
        return 1_000

    def release(self, _: object) -> bool:
        return self.lets_go

    def notify(self, _: str, message: bytes) -> None:
        self.said.append(message)

    def notices(self) -> list[tuple[str, bytes]]:
        heard, self.heard = self.heard, []
        return heard


class Mover(FakeMover[Wire]):
    """Transfers with everything around them played by hand."""

    def __init__(self) -> None:
        super().__init__(Wire())
        self.transfers.obey(m.AddPeer("other", 1, "agent", b"", []))
        self.wire.said.clear()

    def read(self, name: str = "r", *, ttl_ns: int = TTL_NS, attended: bool = True) -> None:
        deadline = self.clock() + ttl_ns
        self.transfers.obey(
            m.Read(name, "l1", "other", 1, [1], [2], deadline, is_return=True, attended=attended)
        )

    def poll(self, seconds: float = 0) -> None:
        self.clock.advance(seconds)
        self.transfers.poll()

    def hear(self, message: bytes) -> None:
        self.wire.heard.append(("agent", message))
        self.poll()

    def ended(self) -> list[tuple[bool, str]]:
        return [(x.published, x.reason) for x in self.told if isinstance(x, m.ReadEnded)]


@pytest.fixture
def mover() -> Mover:
    return Mover()


# Posting.


def test_nothing_is_posted_when_the_deadline_is_near(mover: Mover) -> None:
    mover.read(ttl_ns=DEADLINE_MARGIN_NS - 1)
    assert mover.wire.posted == 0
    assert mover.ended() == [(False, "LEASE_EXPIRED")]
    assert mover.results.take() == ({"r"}, {"r"})
    mover.read(ttl_ns=DEADLINE_MARGIN_NS)
    assert mover.wire.posted == 1


def test_nothing_is_read_of_a_boot_that_is_not_known(mover: Mover) -> None:
    mover.transfers.obey(
        m.Read("r", "l1", "other", 2, [1], [2], mover.clock() + TTL_NS, is_return=True)
    )
    assert (mover.wire.posted, mover.ended()) == (0, [(False, "PEER_UNKNOWN")])


# Publishing.


def test_nothing_is_published_before_the_source_has_answered(mover: Mover) -> None:
    mover.read()
    mover.wire.status = "DONE"
    mover.poll()
    mover.poll(0.5)
    assert (mover.ended(), mover.results.take()) == ([], (set(), set()))
    mover.hear(b"yes|l1")
    assert mover.ended() == [(True, "")]
    assert mover.results.take() == ({"r"}, set())


def test_what_completed_late_is_over_at_once(mover: Mover) -> None:
    """It is not worth a question to the source."""
    mover.read()
    mover.wire.status = "DONE"
    mover.poll(TTL_NS / NS + 0.001)
    assert mover.ended() == [(False, "LATE")]


def test_a_yes_that_is_read_late_publishes_nothing(mover: Mover) -> None:
    mover.read()
    mover.wire.status = "DONE"
    mover.poll()
    mover.clock.advance(TTL_NS / NS)
    mover.hear(b"yes|l1")
    assert mover.ended() == [(True, "")]  # at the deadline itself it is still good
    mover.read("again")
    mover.poll()
    mover.clock.advance(TTL_NS / NS + 0.001)
    mover.hear(b"yes|l1")
    assert mover.ended()[1:] == [(False, "LATE")]


def test_a_no_of_the_source_publishes_nothing(mover: Mover) -> None:
    mover.read()
    mover.wire.status = "DONE"
    mover.poll()
    mover.hear(b"no|l1")
    assert mover.ended() == [(False, "SOURCE_LET_GO")]


def test_an_answer_about_another_lease_is_none(mover: Mover) -> None:
    mover.read()
    mover.wire.status = "DONE"
    mover.poll()
    mover.hear(b"yes|l2")
    assert mover.ended() == []
    mover.poll(CONFIRM_TIMEOUT_NS / NS + 0.001)
    assert mover.ended() == [(False, "SOURCE_SILENT")]


def test_a_renewed_read_counts_to_its_new_deadline(mover: Mover) -> None:
    mover.read(ttl_ns=4 * NS)
    mover.transfers.obey(m.ExtendRead("r", mover.clock() + TTL_NS))
    # One that is older than what is known takes nothing away.
    mover.transfers.obey(m.ExtendRead("r", mover.clock() + NS))
    mover.poll(4.5)
    assert mover.ended() == []
    mover.wire.status = "DONE"
    mover.poll()
    mover.hear(b"yes|l1")
    assert mover.ended() == [(True, "")]


# Giving up.


def given_up(mover: Mover) -> bool:
    """The request was told to recompute, and nothing says that the blocks are free."""
    return mover.results.take() == ({"r"}, {"r"}) and not mover.ended()


def test_a_read_is_given_up_before_its_deadline(mover: Mover) -> None:
    mover.read(ttl_ns=4 * NS)
    mover.poll(4 - DEADLINE_MARGIN_NS / NS)
    assert not given_up(mover)
    mover.poll(0.001)
    assert given_up(mover)
    mover.wire.status = "DONE"
    mover.poll()
    assert mover.ended() == [(False, "LEASE_EXPIRED")]


def test_a_read_that_stands_still_is_given_up(mover: Mover) -> None:
    mover.read()
    mover.poll(READ_STALL_NS / NS)
    assert not given_up(mover)
    mover.poll(0.001)
    assert given_up(mover)
    mover.wire.status = "DONE"
    mover.poll()
    assert mover.ended() == [(False, "TRANSFER_STALLED")]


@pytest.mark.parametrize("status", ["DONE", "ERR"])
def test_blocks_are_free_only_when_nixl_has_let_go(mover: Mover, status: str) -> None:
    mover.read()
    mover.transfers.obey(m.Abandon("r", "REQUEST_ENDED"))
    assert given_up(mover)
    for _ in range(3):
        mover.poll(100)
        assert mover.ended() == []  # it may still write, however long ago it was given up
    mover.wire.status, mover.wire.lets_go = status, False
    mover.poll()
    assert mover.ended() == []
    mover.wire.lets_go = True
    mover.poll()
    assert mover.ended() == [(False, "REQUEST_ENDED")]
    # What came late is not published, and said once.
    mover.hear(b"yes|l1")
    assert mover.ended() == [(False, "REQUEST_ENDED")]


def test_a_completed_read_whose_handle_stays_is_not_free(mover: Mover) -> None:
    mover.read()
    mover.wire.status, mover.wire.lets_go = "DONE", False
    mover.poll()
    mover.hear(b"yes|l1")
    # Its worker has told vLLM, which is made to look.
    assert mover.told[-1] == m.ReadGivenUp("r", "RELEASE_FAILED")
    assert mover.ended() == []
    mover.wire.lets_go = True
    mover.poll()
    assert mover.ended() == [(False, "RELEASE_FAILED")]


def test_a_large_read_may_take_longer(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "SLOWEST_BYTES_A_SECOND", 1)
    mover.read()
    (region,) = mover.transfers._regions = [LocalRegion("layer", 0, 8, 10, "DRAM", 0)]
    size = region.block_bytes
    mover.poll(READ_STALL_NS / NS + size)
    assert not given_up(mover)
    mover.poll(0.001)
    assert given_up(mover)


def test_a_source_attested_dead_ends_its_reads(mover: Mover) -> None:
    mover.read()
    mover.transfers.obey(m.DropPeer("other", 2))
    assert mover.ended() == []
    mover.transfers.obey(m.DropPeer("other", 1))
    assert mover.ended() == [(False, "PEER_FENCED")]
    assert mover.results.take() == ({"r"}, {"r"})


def test_vllm_hears_nothing_of_an_unattended_read(mover: Mover) -> None:
    mover.read(attended=False)
    mover.transfers.obey(m.Abandon("r", "PRESSURE"))
    assert [x for x in mover.told if isinstance(x, m.ReadGivenUp)] == [
        m.ReadGivenUp("r", "PRESSURE")
    ]
    mover.wire.status = "DONE"
    mover.poll()
    assert mover.ended() == [(False, "PRESSURE")]
    assert mover.results.take() == (set(), set())


def test_and_when_one_is_refused(mover: Mover) -> None:
    mover.transfers.obey(m.Refuse("r"))
    assert mover.results.take() == ({"r"}, {"r"})
    assert mover.told[-1] == m.ReadGivenUp("r", "REFUSED")


def test_the_engine_is_made_to_look_when_a_read_is_given_up(mover: Mover) -> None:
    """Its worker tells vLLM, in a step; an engine that rests would take ten seconds to it."""
    mover.read()
    mover.transfers.obey(m.Abandon("r", "REVOKED"))
    assert mover.results.take() == ({"r"}, {"r"})
    assert mover.told[-1] == m.ReadGivenUp("r", "REVOKED")


# Serving.


@pytest.mark.parametrize(
    ("way", "answer"),
    [
        ("held", b"yes|l1"),
        ("closing", b"no|l1"),
        ("past its deadline", b"no|l1"),
        ("never served", b"no|l1"),
        ("another lease", b"no|l1"),
    ],
)
def test_the_source_says_whether_it_still_holds(mover: Mover, way: str, answer: bytes) -> None:
    if way != "never served":
        name = "l2" if way == "another lease" else "l1"
        mover.transfers.obey(m.Serve(name, mover.clock() + TTL_NS))
    if way == "closing":
        mover.transfers.obey(m.Unserve("l1"))
    # At the deadline itself it still holds; the agent's own rules say for how long beyond.
    mover.clock.advance(TTL_NS / NS + (0.001 if way == "past its deadline" else 0))
    mover.hear(b"done|l1")
    assert mover.wire.said == [answer]
    done = [x for x in mover.told if isinstance(x, m.ReaderDone)]
    assert done == ([m.ReaderDone("l1")] if way == "held" else [])


def test_a_reader_that_goes_on_does_not_end_the_lease(mover: Mover) -> None:
    mover.transfers.obey(m.Serve("l1", mover.clock() + TTL_NS))
    mover.hear(b"ask|l1")
    assert mover.wire.said == [b"yes|l1"]
    assert not [x for x in mover.told if isinstance(x, m.ReaderDone)]


def test_no_yes_follows_the_word_that_a_lease_is_not_served(mover: Mover) -> None:
    mover.transfers.obey(m.Serve("l1", mover.clock() + TTL_NS))
    mover.transfers.obey(m.Unserve("l1"))
    assert mover.told[-1] == m.Unserved("l1")
    mover.hear(b"ask|l1")
    assert mover.wire.said == [b"no|l1"]


def test_a_peer_that_is_met_is_polled_for_until_the_connection_is_up() -> None:
    """So that the first transfer does not wait for it; then nothing is polled any more."""
    mover = FakeMover(Wire())
    busy = []
    for passed_ns in (0, CONNECT_LINGER_NS - 1, 1):
        if not passed_ns:
            mover.transfers.obey(m.AddPeer("other", 1, "agent", b"", []))
        mover.clock.now += passed_ns
        busy.append(mover.transfers.busy)
    assert busy == [True, True, False]
    assert not mover.transfers.unsettled
