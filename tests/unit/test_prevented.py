"""What users of earlier systems report of transfers between prefill and decode, and what here
prevents it: a test for each, named for it. The agent's side and the control plane's are the real
code, each with its surroundings played by hand."""

from __future__ import annotations

import pytest

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.errors import IncarnationMismatchError
from kvshuttle.controlplane.model.reports import LeaseReport
from kvshuttle.controlplane.model.terms import LeaseState, TransferOutcome, TurnOutcome, WorkerRole
from kvshuttle.dataplane import messages as m
from kvshuttle.dataplane.clock import NS
from kvshuttle.dataplane.faults import Faults
from kvshuttle.dataplane.limits import DEADLINE_MARGIN_NS
from kvshuttle.dataplane.scheduler import FinishedRequest, StreamDown, Tick
from kvshuttle.dataplane.transfers import Results, Transfers
from kvshuttle.dataplane.transport import ReadHandle
from kvshuttle.v1 import agent_service_pb2 as agent_pb2
from kvshuttle.v1 import types_pb2
from tests.unit.controlplane.world import KEY, World
from tests.unit.dataplane.fakes import FakeClock
from tests.unit.dataplane.test_scheduler_side import DECODE, PREFILL, Bench, chain, ended, load

SOURCE_LEAST_S = 35.0
"""TTL and guard: no source lets go sooner by itself."""


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def world() -> World:
    return World()


def tick(bench: Bench) -> None:
    bench.agent.post(Tick())
    bench.agent.drain()
    bench.agent.next_deadline()


def released(bench: Bench) -> list[str]:
    return [event.reason for event in bench.out.take("source_released")]


# -- silently wrong KV after expiry ----------------------------------------------------------------


def test_wrong_kv_after_expiry__no_read_is_posted_near_the_deadline(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4), ttl=30)
    bench.clock.advance(30 - DEADLINE_MARGIN_NS / NS + 0.001)
    assert bench.look(chain(4)) == 0
    assert not [order for order in bench.out.orders if isinstance(order, m.Read)]


class Wire:
    """A transport that completes and answers when a test says so."""

    def __init__(self) -> None:
        self.status = "PROC"
        self.answers: list[tuple[str, bytes]] = []

    def add_peer(self, *_: object) -> None:
        pass

    drop_peer = notify = add_peer

    def post_read(self, *_: object) -> ReadHandle:
        return ReadHandle(None, 0)

    def state(self, _: object) -> str:
        return self.status

    def bytes_moved(self, _: object) -> int:
        return 1_000

    def release(self, _: object) -> bool:
        return True

    def notices(self) -> list[tuple[str, bytes]]:
        answers, self.answers = self.answers, []
        return answers


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("in time", ""),
        ("paused while it read", "LATE"),
        ("paused while it asked", "LATE"),
        ("the source had let go", "SOURCE_LET_GO"),
        ("the source is silent", "SOURCE_SILENT"),
    ],
)
def test_wrong_kv_after_expiry__what_was_read_late_is_not_published(way: str, reason: str) -> None:
    """A process finds out after its pause, and after completion it asks the source."""
    wire, clock, results = Wire(), FakeClock(), Results()
    said: list[m.FromMover] = []
    mover = Transfers(wire, [], results, said.append, Faults(), clock)  # type: ignore[arg-type]
    mover.obey(m.AddPeer("other", 1, "agent", b"", []))
    deadline = clock() + 30 * NS
    mover.obey(m.Read("r", "l1", "other", 1, [1], [2], deadline, is_return=True))
    wire.status = "DONE"
    if way == "paused while it read":
        clock.advance(30.1)
    mover.poll()
    clock.advance(30.1 if way == "paused while it asked" else 0.1)
    if way != "the source is silent":
        wire.answers.append(("agent", b"no|l1" if way == "the source had let go" else b"yes|l1"))
    mover.poll()
    clock.advance(1.5)
    mover.poll()
    (ended,) = [message for message in said if isinstance(message, m.ReadEnded)]
    assert (ended.published, ended.reason) == (not reason, reason)
    # vLLM computes what it was told has failed.
    assert results.take() == ({"r"}, {"r"} if reason else set())


def test_wrong_kv_after_expiry__the_source_outlasts_every_reader() -> None:
    """From the Harden on, whatever the network does: the reader counts from its own heartbeat,
    which was earlier than the grant, and the grant comes within the guard."""
    reader, source = Bench(), Bench()
    source.expect(DECODE)
    source.offer(chain(4))
    source.harden(chain(4), ttl=30)
    # The latest grant there can be, with the newest heartbeat that there can be.
    for bench in (reader, source):
        bench.clock.advance(5)
    reader.expect(PREFILL, "l1")
    reader.grant(chain(4), ttl=30)
    for _ in range(300):
        for bench in (reader, source):
            bench.clock.advance(0.1)
            tick(bench)
        if not source.agent.source.open_leases:
            break
        reads_until = [grant.deadline_ns for grant in reader.agent.destination.open_grants]
        assert all(source.agent.source.open_leases[0].deadline_ns >= end for end in reads_until)
    assert not reader.agent.destination.open_grants


def test_wrong_kv_after_expiry__blocks_are_not_reused_while_anybody_may_read(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(4))
    bench.harden(chain(4), ttl=30)
    bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
    bench.clock.advance(SOURCE_LEAST_S)
    tick(bench)
    assert not released(bench)
    for block_id in (10, 11, 12, 13):
        with pytest.raises(AssertionError, match="is referenced"):
            bench.pool.reuse(block_id)


def test_wrong_kv_after_expiry__one_equal_length_is_not_one_equal_prefix(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4))
    assert bench.look(chain(4, "other")) == 0


# -- blocks stranded by aborts ---------------------------------------------------------------------


def test_stranded_by_aborts__a_turn_that_is_cancelled_before_its_grant(world: World) -> None:
    prefill, decode, turn, order = world.returning()
    world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.CANCELLED))
    assert [x.lease_id for x in world.told(decode, c.ReaderStopped)] == [order.lease_id]
    # Its source answers late: nobody is granted anything.
    world.harden(order, decode)
    assert not world.told(prefill, c.Grant)
    assert not world.state.open_leases


def test_stranded_by_aborts__a_turn_that_is_cancelled_after_its_grant(world: World) -> None:
    prefill, decode, turn, order = world.returning()
    world.harden(order, decode)
    world.do(world.registry.end_turn(world.now, KEY, turn.number, TurnOutcome.CANCELLED))
    assert [x.lease_id for x in world.told(prefill, c.Revoke)] == [order.lease_id]
    world.stop(prefill, order.lease_id, TransferOutcome.REVOKED)
    assert [x.lease_id for x in world.told(decode, c.ReaderStopped)] == [order.lease_id]


def test_stranded_by_aborts__a_turn_whose_gateway_died(world: World) -> None:
    _, decode, _, order = world.returning()
    world.harden(order, decode)
    world.keep_alive(700)
    assert not world.state.open_leases
    assert not world.state.turns


def test_stranded_by_aborts__a_request_aborted_before_its_load(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4))
    bench.agent.finished(("t", PREFILL), FinishedRequest("r", (), (), 133, True))
    (stopped,) = bench.out.take("stopped")
    assert stopped.outcome == agent_pb2.TRANSFER_OUTCOME_UNUSED
    assert not bench.agent.destination.open_grants
    assert bench.held == 0


def test_stranded_by_aborts__a_request_aborted_during_its_load(bench: Bench) -> None:
    load(bench)
    bench.agent.finished(("t", PREFILL), FinishedRequest("r", (), (), 133, True))
    bench.pool.free(range(20, 25))
    assert bench.held == 4  # something may still write to them
    ended(bench, published=False, reason="REQUEST_ENDED")
    assert bench.pool.free_blocks == bench.pool.total_blocks
    assert len(bench.out.take("stopped")) == 1


def test_stranded_by_aborts__a_grant_that_no_request_ever_uses(bench: Bench) -> None:
    bench.expect(PREFILL, "l1")
    bench.grant(chain(4), ttl=30)
    bench.clock.advance(31)
    tick(bench)
    (stopped,) = bench.out.take("stopped")
    assert stopped.outcome == agent_pb2.TRANSFER_OUTCOME_UNUSED
    assert not bench.agent.destination.open_grants


def test_stranded_by_aborts__a_source_whose_reader_never_comes(bench: Bench) -> None:
    """Minutes, not for ever, and without anybody's help."""
    bench.expect(DECODE)
    bench.offer(chain(4))
    bench.harden(chain(4), ttl=30)
    bench.agent.post(StreamDown(1))
    bench.clock.advance(SOURCE_LEAST_S * 1.001)
    tick(bench)
    bench.agent.post(m.Unserved("l1"))
    bench.agent.drain()
    assert released(bench) == ["DEADLINE"]
    bench.clock.advance(100)
    tick(bench)
    assert bench.held == 0
    assert bench.pool.free_blocks == bench.pool.total_blocks


# -- everything lost on a control plane's restart --------------------------------------------------


def test_lost_on_restart__sessions_turns_leases_and_numbers_are_there(world: World) -> None:
    prefill, decode, turn, order = world.returning()
    world.harden(order, decode)
    session = world.state.sessions[KEY]
    world.start()
    assert world.state.sessions[KEY] == session
    assert world.lease(order.lease_id).state is LeaseState.GRANTED
    assert world.state.turns[turn.token] == KEY
    assert world.pair() == (prefill, decode)


def test_lost_on_restart__what_decode_holds_is_found_again(world: World) -> None:
    _, decode = world.pair()
    world.begin()
    world.offer(decode, 20)
    world.start()
    world.connect("p", WorkerRole.PREFILL)
    world.connect("d", WorkerRole.DECODE)
    world.offer(decode, 20)  # as in its inventory
    assert world.begin().plan.reason == "CHEAPER_TO_MOVE"
    assert len(world.told(decode, c.Harden)) == 1


def test_lost_on_restart__an_agent_keeps_its_holds_and_a_read_goes_on(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(4), turn="t")
    bench.harden(chain(4), "l9")
    load(bench)
    held = bench.held
    bench.agent.post(StreamDown(1))
    bench.agent.drain()
    assert bench.held == held
    inventory = {lease.lease_id: lease for lease in bench.agent.lease_inventory()}
    assert inventory["l9"].is_source
    assert inventory["l1"].transferring
    assert len(bench.agent.source.inventory()) == 1
    ended(bench)
    (stopped,) = bench.out.take("stopped")
    assert stopped.outcome == agent_pb2.TRANSFER_OUTCOME_PUBLISHED


# -- leases that expire in the middle of a read ----------------------------------------------------


def test_expiring_mid_read__a_lease_is_renewed_while_it_is_read(bench: Bench) -> None:
    load(bench)
    (read,) = [order for order in bench.out.orders if isinstance(order, m.Read)]
    extend = agent_pb2.Extend(lease_id="l1", version=9, as_of=bench.clock() + 20 * NS)
    extend.ttl.FromSeconds(30)
    bench.obey(extend=extend)
    (longer,) = [order for order in bench.out.orders if isinstance(order, m.ExtendRead)]
    assert longer.deadline_ns == read.deadline_ns + 20 * NS


def test_expiring_mid_read__the_source_is_first_to_count_longer(world: World) -> None:
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.do(world.registry.renew(world.now, order.lease_id, 60 * NS))
    (to_source,) = world.told(decode, c.Extend)
    assert not world.told(prefill, c.Extend)
    world.agent(decode, "extended", order.lease_id, to_source.version, True)
    (to_reader,) = world.told(prefill, c.Extend)
    assert to_reader.ttl_ns <= to_source.ttl_ns


def test_expiring_mid_read__the_books_deadline_does_not_free_the_source(world: World) -> None:
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.agent(prefill, "active", order.lease_id)
    world.keep_alive(36)
    assert world.lease(order.lease_id).state is LeaseState.EXPIRED
    assert not world.told(decode, c.ReaderStopped)
    world.stop(prefill, order.lease_id, TransferOutcome.DISCARDED)
    assert len(world.told(decode, c.ReaderStopped)) == 1


@pytest.mark.parametrize("way", ["revoke", "release", "stream", "drain", "reset"])
def test_expiring_mid_read__nothing_but_the_reader_or_time_ends_a_hold(
    bench: Bench, way: str
) -> None:
    bench.expect(DECODE)
    bench.offer(chain(4))
    bench.harden(chain(4), ttl=30)
    if way == "revoke":
        bench.obey(revoke=agent_pb2.Revoke(lease_id="l1", version=5, reason="OPERATOR"))
    elif way == "release":
        bench.obey(release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"))
    elif way == "stream":
        bench.agent.post(StreamDown(1))
    elif way == "drain":
        bench.obey(drain=agent_pb2.Drain())
    else:
        bench.agent.source.drop_replicas("RESET")
    tick(bench)
    assert bench.agent.source.lease_count == 1
    assert all(bench.pool.references[block_id] for block_id in (10, 11, 12, 13))


# -- stale peers after a restart -------------------------------------------------------------------


def test_stale_peers__a_restarted_engine_is_another_worker(world: World) -> None:
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.lose(decode)
    world.sent.clear()
    again = world.connect("d", WorkerRole.DECODE, boot_id="another", ranks=("new address",))
    assert again != decode
    # The peer hears of the new one, and what it was to read of the old one is stopped.
    assert [x.worker for x in world.told(prefill, c.AnnouncePeer)] == [again]
    assert not world.state.replicas
    # The old one's block ids are in no grant: a late answer of it is dropped.
    world.harden(order, decode)
    assert not world.told(prefill, c.Grant)


def test_stale_peers__a_grant_names_the_boot(bench: Bench) -> None:
    """Of another boot under the same name, nothing is read."""
    bench.expect(PREFILL, "l1")
    grant = agent_pb2.Grant(
        lease_id="l1",
        version=2,
        turn_token="t",
        direction=types_pb2.DIRECTION_RETURN,
        source=types_pb2.WorkerRef(worker_id="other", incarnation=2),
        blocks=types_pb2.BlockDescriptors(
            range=types_pb2.BlockRange(end=4),
            block_ids=range(4),
            hashes=b"".join(chain(4)),
            hash_size=32,
        ),
        as_of=bench.clock(),
    )
    grant.ttl.FromSeconds(30)
    bench.obey(grant=grant)
    assert bench.look(chain(4)) is None  # it is not connected to that boot yet
    bench.clock.advance(1)
    assert bench.look(chain(4)) == 0
    assert not [order for order in bench.out.orders if isinstance(order, m.Read)]


def test_stale_peers__a_restarted_reader_does_not_read_on(world: World) -> None:
    """What the boot before it was granted is not its own."""
    prefill, decode, _, order = world.returning()
    world.harden(order, decode)
    world.lose(prefill)
    reads = LeaseReport(order.lease_id, 2, is_source=False, transferring=True)
    again = world.connect("p", WorkerRole.PREFILL, boot_id="another", leases=(reads,))
    assert [x.lease_id for x in world.told(again, c.Revoke)] == [order.lease_id]
    # Nor does its word free the source of the one before.
    world.stop(again, order.lease_id, TransferOutcome.REVOKED)
    assert not world.told(decode, c.ReaderStopped)


def test_stale_peers__a_fence_is_for_one_boot(world: World) -> None:
    prefill, _ = world.pair()
    world.lose(prefill)
    again = world.connect("p", WorkerRole.PREFILL, boot_id="another")
    with pytest.raises(IncarnationMismatchError):
        world.do(world.registry.fence(world.now, prefill, "host powered off"))
    assert world.state.workers["p"].ref == again
    assert world.state.workers["p"].connected


def test_stale_peers__commands_of_a_stream_before_are_not_obeyed(bench: Bench) -> None:
    bench.expect(DECODE)
    bench.offer(chain(4))
    for generation, epoch in ((0, 5), (1, 4)):
        bench.obey(
            generation=generation,
            epoch=epoch,
            release_replica=agent_pb2.ReleaseReplica(tenant="acme", session_id="s"),
        )
    assert len(bench.agent.source.inventory()) == 1
