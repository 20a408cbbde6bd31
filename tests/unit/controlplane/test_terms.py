"""Epochs, numbers of boots, and time: over restarts, copies, reboots and wrong clocks."""

from __future__ import annotations

import pytest

from kvshuttle.controlplane.clock import Timeline
from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.errors import (
    NoWorkerError,
    SupersededError,
    WorkerFencedError,
)
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.terms import (
    Hints,
    LeaseState,
    TurnOutcome,
    WorkerRole,
    WorkerState,
)
from kvshuttle.controlplane.store import MemoryStore
from tests.unit.controlplane.world import KEY, World

DAY = 24 * 3_600
YEAR = 365 * DAY


def copy_of(world: World) -> World:
    """Another control plane, on a copy of the store as it is now."""
    store = MemoryStore()
    for name in ("_term", "_sessions", "_leases", "_workers"):
        value = getattr(world.store, name)
        setattr(store, name, dict(value) if isinstance(value, dict) else value)
    other = World(store=store)
    other.now = world.now
    return other


# -- epochs --------------------------------------------------------------------------------------


def test_every_start_has_a_higher_epoch() -> None:
    world = World()
    for epoch in range(1, 5):
        assert world.state.epoch == epoch
        world.start()


def test_an_agent_that_reconnects_does_not_raise_the_epoch() -> None:
    """It has obeyed this very epoch, and leases that wait for their sources go on."""
    world = World()
    _, _, _, order = world.returning()
    world.connect("p", WorkerRole.PREFILL, highest_epoch=world.state.epoch, lineage_id="lineage")
    assert world.state.epoch == 1
    assert world.lease(order.lease_id).state is LeaseState.PENDING


def test_a_restart_does_not_raise_the_epoch_further() -> None:
    world = World()
    world.pair()
    world.start()
    world.connect("p", WorkerRole.PREFILL, highest_epoch=1, lineage_id="lineage")
    world.connect("d", WorkerRole.DECODE, highest_epoch=1, lineage_id="lineage")
    assert world.state.epoch == 2


def test_a_store_that_is_behind_goes_above_what_agents_obeyed() -> None:
    world = World()
    world.connect("p", WorkerRole.PREFILL, highest_epoch=9, lineage_id="lineage")
    assert world.state.epoch == 10
    # The others of that time do not raise it again.
    world.connect("d", WorkerRole.DECODE, highest_epoch=9, lineage_id="lineage")
    assert world.state.epoch == 10
    world.start()
    assert world.state.epoch == 11


def test_an_epoch_that_a_copy_used_too_is_not_used_for_its_agents() -> None:
    """Both copies began epoch 2; whoever obeyed the other's must not take ours for it."""
    world = World()
    world.pair()
    other = copy_of(world)
    world.start()
    assert (world.state.epoch, other.state.epoch) == (2, 2)
    world.connect("p", WorkerRole.PREFILL, highest_epoch=1, lineage_id="lineage")
    other.connect("p", WorkerRole.PREFILL, highest_epoch=2, lineage_id="lineage")
    assert other.state.epoch == 3


def test_what_was_pending_under_a_lower_epoch_is_not_granted_under_a_higher() -> None:
    world = World()
    _, decode, _, order = world.returning()
    world.connect("x", WorkerRole.PREFILL, highest_epoch=9, lineage_id="lineage")
    assert world.lease(order.lease_id).end_reason == "STALE_EPOCH"
    world.harden(order, decode)
    assert not [x for _, x in world.sent if isinstance(x, c.Grant)]


def test_a_control_plane_that_was_overtaken_says_so() -> None:
    world = World()
    world.returning()
    other = copy_of(world)
    other.connect("p", WorkerRole.PREFILL, highest_epoch=1, lineage_id="lineage")
    assert other.state.epoch == 2
    before = len(world.sent)
    with pytest.raises(SupersededError, match=r"obeyed epoch 2.*another control plane has taken"):
        world.connect("p", WorkerRole.PREFILL, highest_epoch=2, lineage_id="lineage")
    assert world.state.epoch == 1
    assert len(world.sent) == before


# -- boots ---------------------------------------------------------------------------------------


def test_numbers_of_boots_are_never_given_again() -> None:
    world = World()
    seen = set()
    for boot in range(20):
        ref = world.connect("p", WorkerRole.PREFILL, boot_id=f"b{boot}")
        assert ref.incarnation not in seen
        seen.add(ref.incarnation)
        if boot % 3:
            world.do(world.registry.fence(world.now, ref, "x"))
        else:
            world.lose(ref)
        if boot % 4 == 0:
            world.start()
        if boot % 5 == 0:
            world.tick(3 * 3_600)  # until it is forgotten


def test_a_fenced_boot_does_not_come_back_after_others() -> None:
    world = World()
    first = world.connect("p", WorkerRole.PREFILL, boot_id="one")
    world.do(world.registry.fence(world.now, first, "x"))
    second = world.connect("p", WorkerRole.PREFILL, boot_id="two")
    world.lose(second)
    world.start()
    with pytest.raises(WorkerFencedError):
        world.connect("p", WorkerRole.PREFILL, boot_id="one")
    assert world.connect("p", WorkerRole.PREFILL, boot_id="two") == second


def test_what_was_said_while_a_stream_was_down_is_said_again() -> None:
    world = World()
    prefill, decode = world.pair()
    world.do(world.registry.drain(world.now, "d", False))
    world.lose(decode)
    world.do(world.registry.drain(world.now, "d", True))
    world.do(world.registry.fence(world.now, prefill, "x"))
    world.sent.clear()
    world.connect("d", WorkerRole.DECODE)
    assert [x.undo for x in world.told(decode, c.Drain)] == [True]
    assert [x.worker for x in world.told(decode, c.PeerFenced)] == [prefill]


def test_nothing_is_granted_before_both_inventories_are_in() -> None:
    world = World()
    world.returning()
    world.start()
    world.sent.clear()
    with pytest.raises(NoWorkerError):
        world.begin()
    decode = world.connect("d", WorkerRole.DECODE)
    world.offer(decode, 20)
    assert world.begin().prefill is None
    assert not [x for _, x in world.sent if isinstance(x, c.Harden | c.Grant)]
    world.connect("p", WorkerRole.PREFILL)
    world.begin()
    assert len(world.told(decode, c.Harden)) == 1


# -- time ----------------------------------------------------------------------------------------


def restarted_at(world: World, wall_ns: int) -> None:
    """A process that starts when the wall clock says this."""
    world.now = max(wall_ns, world.store.load().latest_ns() + 1)
    world.start()


@pytest.mark.parametrize("wall_s", [0, 1, -YEAR])
def test_a_clock_that_was_set_back_does_not_turn_time_back(wall_s: int) -> None:
    """As after a reboot of a machine without a battery, or with CLOCK_BOOTTIME at 0."""
    world = World()
    world.pair()
    turn = world.begin()
    world.now += 500 * SECOND
    world.begin()
    last = world.now
    restarted_at(world, wall_s * SECOND)
    assert world.now > last
    world.pair()
    assert world.begin().begin_ns > last
    world.keep_alive(599)
    assert world.state.sessions[KEY].find(turn.number).running
    world.keep_alive(2)
    assert world.state.sessions[KEY].find(turn.number).outcome is TurnOutcome.ABANDONED


def test_a_store_from_the_far_future_works() -> None:
    """Somebody once set the clock wrong: times shown are wrong, durations are not."""
    world = World()
    world.now += 60 * YEAR * SECOND
    _, decode, _, order = world.returning()
    world.harden(order, decode)
    restarted_at(world, 1_000 * SECOND)
    assert world.now > 60 * YEAR * SECOND
    assert world.lease(order.lease_id).open
    world.tick(31)
    assert world.lease(order.lease_id).state is LeaseState.EXPIRED
    world.tick(601)
    assert not world.state.sessions[KEY].running()
    world.tick(DAY - 60)
    assert world.state.sessions[KEY].active
    world.tick(61)
    assert not world.state.sessions[KEY].active


def test_a_clock_that_was_set_forward_forgets_no_session() -> None:
    world = World()
    _, decode, _, _ = world.returning()
    restarted_at(world, world.now + YEAR * SECOND)
    world.tick()
    assert world.state.sessions[KEY].active
    world.connect("d", WorkerRole.DECODE)
    world.offer(decode, 20)
    world.connect("p", WorkerRole.PREFILL)
    world.keep_alive(599)
    assert [turn.number for turn in world.state.sessions[KEY].running()] == [1, 2]
    assert world.begin().plan.reason == "CHEAPER_TO_MOVE"
    # One that is not used for as long as its KV can be held is over in the end.
    restarted_at(world, world.now + YEAR * SECOND)
    world.tick(601)
    assert not world.state.sessions[KEY].running()
    world.tick(Limits().retention_max_ns / SECOND)
    assert world.state.sessions[KEY].active
    restarted_at(world, world.now + 2 * DAY * SECOND)
    world.tick(Limits().retention_max_ns / SECOND + 1)
    assert not world.state.sessions[KEY].active


def test_the_newest_time_of_a_store_is_that_of_any_row() -> None:
    world = World()
    _, decode, _, order = world.returning()
    times = []
    for later in (
        lambda: world.do(world.registry.update_session(world.now, KEY, Hints(5))),
        lambda: world.harden(order, decode),
        lambda: world.stop(world.lease(order.lease_id).destination, order.lease_id),
        lambda: world.do(world.registry.fence(world.now, decode, "x")),
    ):
        world.now += SECOND
        later()
        assert world.store.load().latest_ns() == world.now
        times.append(world.now)
    assert world.store.load().time_ns < times[0]
    assert world.state.workers["d"].state is WorkerState.FENCED


def test_a_step_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Timeline()
    before = line.now_ns()
    for wall in (0, 2**62):
        monkeypatch.setattr("time.time_ns", lambda wall=wall: wall)
        assert 0 <= line.now_ns() - before < 60 * SECOND


def test_a_reboot_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = 10**9
    monkeypatch.setattr("kvshuttle.controlplane.clock._boot_ns", lambda: boot)
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    line = Timeline()
    assert line.not_before(5) == 0
    assert line.now_ns() == 10**18
    boot += 50
    assert line.now_ns() == 10**18 + 50
    # Rebooted, and the battery is flat.
    boot = 7
    monkeypatch.setattr("time.time_ns", lambda: 10**10)
    line = Timeline()
    behind = line.not_before(10**18 + 50)
    assert behind == 10**18 + 51 - 10**10
    assert line.now_ns() == 10**18 + 51
