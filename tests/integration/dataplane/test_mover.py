"""The mover over real NIXL, between two processes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS, boottime_ns
from kvshuttle.dataplane.limits import STOPPED_LOOK_NS, STOPPED_POLLING_NS

pytest.importorskip("nixl._api", reason="NIXL is installed with the engines", exc_type=ImportError)
pytestmark = pytest.mark.engines

BLOCK_BYTES, LAYERS = 4096, 3


class Far:
    """One process with a mover in it."""

    def __init__(
        self, name: str, faults: dict[str, Any] | None = None, heads: int | None = None
    ) -> None:
        self.worker = (name, 1)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.dataplane.mover_process",
                json.dumps(faults or {}),
                *([] if heads is None else [str(heads)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hello = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, "the process ended"
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue  # NIXL prints to standard output

    def ask(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def order(self, message: m.ToMover) -> None:
        self.ask(order=base64.b64encode(m.encode(message)).decode())

    def event(self, kind: str, seconds: float = 20) -> dict[str, Any]:
        """The next event of this kind; others before it are dropped."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            event = self.ask(events=left)
            if event is not None and event[0] == kind:
                return dict(event[1])
        raise AssertionError(f"no {kind} within {seconds} s")

    def event_of(self, kind: str, lease: str) -> dict[str, Any]:
        """As `event`, of this lease: processes are shared, and say more than one test hears."""
        while True:
            found = self.event(kind)
            if found["lease_id"] == lease:
                return found

    def results(self, seconds: float = 20) -> tuple[list[str], list[str]]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            finished, failed = self.ask(results=True)
            if finished:
                return finished, failed
        raise AssertionError("no results")

    def meet(self, other: Far, heads: m.HeadSlice | None = m.WHOLE) -> None:
        self.order(
            m.AddPeer(
                *other.worker,
                other.hello["name"],
                base64.b64decode(other.hello["metadata"]),
                [m.PeerRegion(*r) for r in other.hello["regions"]],
                heads,
            )
        )
        assert self.event("PeerReady")["error"] == ""

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def source() -> Iterator[Far]:
    far = Far("source")
    try:
        yield far
    finally:
        far.close()


@contextlib.contextmanager
def reader_of(source: Far, name: str, faults: dict[str, Any] | None = None) -> Iterator[Far]:
    far = Far(name, faults)
    try:
        far.meet(source)
        source.meet(far)
        yield far
    finally:
        far.close()


@pytest.fixture(scope="module")
def reader(source: Far) -> Iterator[Far]:
    with reader_of(source, "reader") as far:
        yield far


_numbers = itertools.count(1)


@pytest.fixture
def lease() -> str:
    """A fresh id a test: the processes are shared."""
    return f"lease-{next(_numbers)}"


def deadline(seconds: float = 30) -> int:
    return boottime_ns() + int(seconds * NS)


def read(source: Far, lease: str, until: int | None = None, first: int = 10) -> m.Read:
    local = [first, first + 1, first + 10]
    return m.Read(
        f"req-{lease}", lease, *source.worker, local, [3, 4, 9], until or deadline(), True
    )


def test_a_read_under_a_lease_moves_exactly_its_blocks(
    source: Far, reader: Far, lease: str
) -> None:
    for block in (3, 4, 9):
        source.ask(fill=[block, block])
    source.order(m.Serve(lease, deadline()))
    reader.order(read(source, lease))
    assert reader.results() == ([f"req-{lease}"], [])
    ended = reader.event("ReadEnded")
    assert ended["published"]
    assert ended["bytes_moved"] == 3 * LAYERS * BLOCK_BYTES
    assert ended["descriptors"] == 2 * LAYERS  # two of the blocks are neighbours
    for mine, theirs in ((10, 3), (11, 4), (20, 9)):
        assert reader.ask(peek=mine) == [(theirs + layer) * BLOCK_BYTES for layer in range(LAYERS)]
    assert reader.ask(peek=12) == [0] * LAYERS
    assert source.event("ReaderDone")["lease_id"] == lease


def test_blocks_in_falling_order_are_neighbours_too(source: Far, reader: Far, lease: str) -> None:
    for block in (57, 58, 59):
        source.ask(fill=[block, block])
    source.order(m.Serve(lease, deadline()))
    order = m.Read(
        f"req-{lease}", lease, *source.worker, [62, 61, 60], [59, 58, 57], deadline(), True
    )
    reader.order(order)
    assert reader.results() == ([f"req-{lease}"], [])
    assert reader.event_of("ReadEnded", lease)["descriptors"] == LAYERS
    for mine, theirs in ((62, 59), (61, 58), (60, 57)):
        assert reader.ask(peek=mine) == [(theirs + layer) * BLOCK_BYTES for layer in range(LAYERS)]


def test_what_the_source_does_not_hold_is_not_published(
    source: Far, reader: Far, lease: str
) -> None:
    source.order(m.Serve(f"not-{lease}", deadline()))  # it polls, but not for this lease
    reader.order(read(source, lease))
    assert reader.results() == ([f"req-{lease}"], [f"req-{lease}"])
    ended = reader.event("ReadEnded")
    assert (ended["published"], ended["reason"]) == (False, "SOURCE_LET_GO")


def test_after_unserve_the_answer_is_no(source: Far, reader: Far, lease: str) -> None:
    source.order(m.Serve(lease, deadline()))
    source.order(m.Serve(f"not-{lease}", deadline()))
    source.order(m.Unserve(lease))
    assert source.event("Unserved")["lease_id"] == lease
    reader.order(read(source, lease))
    assert reader.results() == ([f"req-{lease}"], [f"req-{lease}"])


def test_nothing_is_posted_after_the_deadline(source: Far, reader: Far, lease: str) -> None:
    source.order(m.Serve(lease, deadline()))
    reader.order(read(source, lease, deadline(-1), first=40))
    assert reader.results() == ([f"req-{lease}"], [f"req-{lease}"])
    ended = reader.event("ReadEnded")
    while ended["lease_id"] != lease:
        ended = reader.event("ReadEnded")
    assert ended["reason"] == "LEASE_EXPIRED"
    assert reader.ask(peek=40) == [0] * LAYERS


def test_an_unknown_peer_fails_the_load_only(reader: Far) -> None:
    reader.order(m.Read("r1", "l1", "nobody", 7, [1], [1], deadline(), True))
    assert reader.results() == (["r1"], ["r1"])
    ended = reader.event("ReadEnded")
    while ended["request_id"] != "r1":
        ended = reader.event("ReadEnded")
    assert ended["reason"] == "PEER_UNKNOWN"


def test_a_stalled_read_is_given_up_and_its_blocks_stay_until_let_go(
    source: Far, lease: str
) -> None:
    with reader_of(source, "stalled", {"fault_stall_reads": True}) as reader:
        source.order(m.Serve(lease, deadline()))
        reader.order(read(source, lease))
        reader.order(m.Abandon(f"req-{lease}", "REVOKED"))
        assert reader.results() == ([f"req-{lease}"], [f"req-{lease}"])
        # vLLM has been told, but the landing blocks are not free: no ReadEnded.
        assert reader.event("ReadGivenUp")["reason"] == "REVOKED"
        assert reader.ask(events=0.5) is None
        reader.order(m.DropPeer(*source.worker))
        ended = reader.event("ReadEnded")
        assert (ended["published"], ended["reason"]) == (False, "REVOKED")


def unattended(source: Far, lease: str, number: int, *, last: bool) -> m.Read:
    return m.Read(
        f"{lease}#{number}",
        lease,
        *source.worker,
        [50 + number],
        [3 + number],
        deadline(),
        True,
        attended=False,
        last=last,
    )


def test_pieces_of_one_lease_leave_it_open_until_the_last(
    source: Far, reader: Far, lease: str
) -> None:
    for block in (3, 4):
        source.ask(fill=[block, block])
    source.order(m.Serve(lease, deadline()))
    for number in (0, 1):
        reader.order(unattended(source, lease, number, last=number == 1))
        ended = reader.event("ReadEnded")
        while ended["lease_id"] != lease:
            ended = reader.event("ReadEnded")
        assert (ended["request_id"], ended["published"]) == (f"{lease}#{number}", True)
        assert reader.ask(peek=50 + number) == [
            (3 + number + layer) * BLOCK_BYTES for layer in range(LAYERS)
        ]
        if number == 0:
            # Asked, answered yes, and nobody was told that the reader has finished.
            while (event := source.ask(events=0.3)) is not None:
                assert event[1]["lease_id"] != lease
    done = source.event("ReaderDone")
    assert done["lease_id"] == lease
    # vLLM knows no such requests: naming one to it would end the engine.
    assert reader.ask(results=True) == [[], []]


def test_vllm_hears_nothing_of_an_unattended_read_that_fails(
    source: Far, reader: Far, lease: str
) -> None:
    source.order(m.Serve(f"not-{lease}", deadline()))
    reader.order(unattended(source, lease, 2, last=True))
    ended = reader.event("ReadEnded")
    while ended["lease_id"] != lease:
        ended = reader.event("ReadEnded")
    assert not ended["published"]
    assert reader.ask(results=True) == [[], []]


def test_an_unattended_read_that_stalls_is_said_to_be_given_up(source: Far, lease: str) -> None:
    with reader_of(source, "stalled-2", {"fault_stall_reads": True}) as reader:
        source.order(m.Serve(lease, deadline()))
        reader.order(unattended(source, lease, 3, last=True))
        reader.order(m.Abandon(f"{lease}#3", "REVOKED"))
        assert reader.event("ReadGivenUp") == {"request_id": f"{lease}#3", "reason": "REVOKED"}
        assert reader.ask(events=0.5) is None
        reader.order(m.DropPeer(*source.worker))
        assert reader.event("ReadEnded")["reason"] == "REVOKED"
        assert reader.ask(results=True) == [[], []]


def test_a_planted_corruption_changes_the_first_block_only(source: Far, lease: str) -> None:
    with reader_of(source, "corrupt", {"fault_corrupt_returned_block": True}) as reader:
        for block in (3, 4, 9):
            source.ask(fill=[block, block])
        source.order(m.Serve(lease, deadline()))
        reader.order(read(source, lease))
        assert reader.results() == ([f"req-{lease}"], [])
        assert reader.ask(peek=10) == [0x3F * BLOCK_BYTES] * LAYERS
        assert reader.ask(peek=11) == [(4 + layer) * BLOCK_BYTES for layer in range(LAYERS)]


def test_a_dead_source_ends_the_read_in_bounded_time(lease: str) -> None:
    doomed = Far("doomed")
    try:
        with reader_of(doomed, "survivor") as reader:
            doomed.process.kill()
            doomed.process.wait()
            reader.order(read(doomed, lease, deadline(3)))
            assert reader.results(20) == ([f"req-{lease}"], [f"req-{lease}"])
    finally:
        doomed.close()


def test_an_order_that_is_none_changes_nothing(source: Far, lease: str) -> None:
    with reader_of(source, "garbled") as reader:
        for junk in (b"", b"\xc1\x00junk", b"{}"):
            reader.ask(order=base64.b64encode(junk).decode())
        source.order(m.Serve(lease, deadline()))
        reader.order(read(source, lease))
        assert reader.results() == ([f"req-{lease}"], [])


def test_a_mover_that_fails_lets_nobody_wait(source: Far, lease: str) -> None:
    with reader_of(source, "broken", {"fault_stall_reads": True}) as broken:
        source.order(m.Serve(lease, deadline()))
        broken.order(read(source, lease))
        # No agent sends such an order; it stands for a defect.
        odd = m.Read("odd", lease, *source.worker, [1, 2, 3], [1, 2, 3, 4, 5], deadline(), True)
        broken.order(odd)
        # The source counts as unreachable, so no request is promised anything any more.
        assert broken.event("PeerReady")["error"] == "MOVER_FAILED"
        assert "3 local blocks" in broken.event("MoverFailed")["error"]
        # What was in flight: vLLM is told, its blocks are not free before the source is dead.
        assert broken.results() == ([f"req-{lease}"], [f"req-{lease}"])

        broken.order(read(source, f"later-{lease}"))
        assert broken.results() == ([f"req-later-{lease}"], [f"req-later-{lease}"])
        ended = broken.event("ReadEnded")
        assert (ended["lease_id"], ended["reason"]) == (f"later-{lease}", "MOVER_FAILED")
        broken.order(m.Unserve(lease))
        assert broken.event("Unserved")["lease_id"] == lease
        broken.order(m.Refuse("refused"))
        assert broken.results() == (["refused"], ["refused"])
        broken.order(m.DropPeer(*source.worker))
        assert broken.event("ReadEnded")["lease_id"] == lease


# Pushes: here `source` writes into a landing zone of `reader`'s.


def step(far: Far, *chunks: m.PushChunk) -> None:
    """A step of the engine begins in this process."""
    far.ask(step=base64.b64encode(msgspec.msgpack.encode(list(chunks))).decode())


def landing(source: Far, lease: str, blocks: list[int], until: int | None = None) -> m.Await:
    return m.Await(f"req-{lease}", lease, 5, *source.worker, blocks, until or deadline())


def push(reader: Far, lease: str, blocks: list[int], until: int | None = None) -> m.Push:
    return m.Push(lease, 5, *reader.worker, blocks, until or deadline())


def layers(value: int) -> list[int]:
    return [(value + layer) * BLOCK_BYTES for layer in range(LAYERS)]


def test_a_push_moves_each_layer_as_it_is_filled(source: Far, reader: Far, lease: str) -> None:
    here, there = [30, 31, 33], [50, 51, 52]
    for block in (*here, 34):
        source.ask(fill=[block, block])
    reader.order(landing(source, lease, there))
    source.order(push(reader, lease, there))
    step(source, m.PushChunk(lease, 0, 0, here, False))
    for layer in range(LAYERS):
        # One layer more, and no other.
        assert reader.ask(peek=52)[layer:] == [0] * (LAYERS - layer)
        source.ask(layer=layer)
        end = time.monotonic() + 20
        while reader.ask(peek=52)[layer] == 0:
            assert time.monotonic() < end, "the layer was not written"
    assert reader.ask(results=True) == [[], []]  # nobody has said that this was all
    source.ask(step_over=True)
    source.order(m.PushFinish(lease, 1))
    assert source.event_of("PushChunkDone", lease)["number"] == 0
    ended = source.event_of("PushEnded", lease)
    assert ended["written"]
    assert ended["bytes_moved"] == 3 * LAYERS * BLOCK_BYTES
    assert reader.results() == ([f"req-{lease}"], [])
    landed = reader.event_of("LandingEnded", lease)
    assert landed["published"]
    assert landed["bytes_moved"] == 3 * LAYERS * BLOCK_BYTES
    for mine, its in zip(there, here, strict=True):
        assert reader.ask(peek=mine) == layers(its)
    assert reader.ask(peek=53) == [0] * LAYERS


def test_chunks_of_two_steps_and_what_was_there_before(
    source: Far, reader: Far, lease: str
) -> None:
    for block in range(40, 46):
        source.ask(fill=[block, block])
    there = list(range(54, 60))
    reader.order(landing(source, lease, there))
    source.order(push(reader, lease, there))
    step(
        source,
        m.PushChunk(lease, 0, 0, [40, 41], True),
        m.PushChunk(lease, 1, 2, [42], False),
    )
    source.ask(step_over=True)
    step(source, m.PushChunk(lease, 2, 3, [45, 44, 43], False))
    source.order(m.PushFinish(lease, 3))
    source.ask(step_over=True)
    assert reader.results() == ([f"req-{lease}"], [])
    for mine, its in zip(there, (40, 41, 42, 45, 44, 43), strict=True):
        assert reader.ask(peek=mine) == layers(its)


def test_a_push_of_what_is_there_already(source: Far, reader: Far, lease: str) -> None:
    source.ask(fill=[47, 47])
    reader.order(landing(source, lease, [61]))
    source.order(push(reader, lease, [61]))
    source.order(m.PushBlocks(m.PushChunk(lease, 0, 0, [47], True)))
    source.order(m.PushFinish(lease, 1))
    assert reader.results() == ([f"req-{lease}"], [])
    assert reader.ask(peek=61) == layers(47)


def test_a_push_that_is_stopped_says_so_to_its_landing_zone(
    source: Far, reader: Far, lease: str
) -> None:
    reader.order(landing(source, lease, [62]))
    source.order(push(reader, lease, [62]))
    step(source, m.PushChunk(lease, 0, 0, [48], False))
    source.order(m.PushStop(lease, "PREEMPTED"))
    assert reader.results() == ([f"req-{lease}"], [f"req-{lease}"])
    ended = reader.event_of("LandingEnded", lease)
    assert (ended["published"], ended["reason"]) == (False, "PREEMPTED")
    source.ask(step_over=True)
    stopped = source.event_of("PushEnded", lease)
    assert (stopped["written"], stopped["reason"]) == (False, "PREEMPTED")


def test_a_landing_zone_gives_up_at_its_deadline_and_hears_the_writer_later(
    source: Far, reader: Far, lease: str
) -> None:
    reader.order(landing(source, lease, [63], deadline(0.3)))
    source.order(push(reader, lease, [63]))
    assert reader.results() == ([f"req-{lease}"], [f"req-{lease}"])
    assert reader.event_of("LandingGivenUp", lease)["reason"] == "LATE"
    source.order(m.PushStop(lease, "REVOKED"))
    assert reader.event_of("LandingEnded", lease)["reason"] == "REVOKED"


def test_a_reader_that_dies_ends_what_is_written_to_it_or_its_fence_does(
    source: Far, lease: str
) -> None:
    with reader_of(source, f"dies-{lease}") as far:
        far.order(landing(source, lease, [5]))
        source.order(push(far, lease, [5]))
        step(source, m.PushChunk(lease, 0, 0, [48], False))
        far.process.kill()
        far.process.wait()
        source.ask(step_over=True)
        source.order(m.DropPeer(*far.worker))
        ended = source.event_of("PushEnded", lease)
        assert ended["lease_id"] == lease


def test_a_writer_whose_reader_hung_past_its_deadline_says_when_it_has_stopped(
    source: Far, lease: str
) -> None:
    """On that word the control plane lets the reader have its blocks back; nobody orders the writer
    anything any more."""
    with reader_of(source, f"hangs-{lease}") as reader:
        until = deadline(3)
        reader.order(landing(source, lease, [20, 21], until))
        source.order(push(reader, lease, [20, 21], until))
        os.kill(reader.process.pid, signal.SIGSTOP)
        try:
            source.order(m.PushBlocks(m.PushChunk(lease, 0, 0, [48, 49], True)))
            source.order(m.PushFinish(lease, 1))
            wait_past(until + STOPPED_POLLING_NS + STOPPED_LOOK_NS)
        finally:
            os.kill(reader.process.pid, signal.SIGCONT)
        assert not source.event_of("PushEnded", lease)["written"]


def wait_past(instant_ns: int) -> None:
    """Until the agent's clock shows it."""
    while boottime_ns() <= instant_ns:
        time.sleep(0.05)
