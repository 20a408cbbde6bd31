"""Everything that goes wrong, each kind on its own, at moments that the seed decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvshuttle.controlplane.model.terms import LeaseState
from tests.simulation.clients import chain_hash
from tests.simulation.engine import BLOCK_TOKENS
from tests.simulation.kernel import SECOND, Thread, between
from tests.simulation.weights import Operator

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel
    from tests.simulation.worker import Boot
    from tests.simulation.world import World

__all__ = ["FAULTS", "KINDS", "Faults"]


class Faults:
    """Injects into one world; a method a kind, called at a random moment of the active time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kernel: Kernel = world.kernel
        self.rng = world.rng

    # Picking.

    def _boot(self) -> Boot | None:
        alive = [b for b in self.world.boots.values() if b is not None]
        return self.rng.choice(alive) if alive else None

    def _busy_boot(self) -> Boot | None:
        """One that reads, if any does."""
        reading = sorted({r.reader.name.split("/")[0] for r in self.world.fabric.flying})
        busy = [b for b in self.world.boots.values() if b is not None and b.name in reading]
        return self.rng.choice(busy) if busy else self._boot()

    def _hold_up(self, threads: list[Thread], low_ms: float, high_ms: float) -> None:
        for thread in threads:
            thread.pause()

        def go_on() -> None:
            for thread in threads:
                thread.resume()

        self.kernel.at(between(self.rng, low_ms, high_ms), None, go_on)

    # Networks.

    def stream_cut(self) -> None:
        """A stream breaks; what was on its way is lost."""
        boot = self._boot()
        if boot is not None and boot.stream is not None and boot.stream.open:
            self.kernel.fault("stream_cut", boot.name)
            boot.stream.cut("cut")

    def slow_stream(self) -> None:
        """One agent's stream is much slower than the others': their orders change."""
        boot = self._boot()
        if boot is None:
            return
        slow = self.rng.choice([50.0, 300.0, 1_200.0])
        self.kernel.fault("slow_stream", boot.name, ms=slow)
        self.world.stream_delay[boot.machine.name] = slow
        if boot.stream is not None:
            boot.stream.delay_ms = slow
        self.kernel.at(between(self.rng, 500, 4_000), None, self._fast_again, boot)

    def _fast_again(self, boot: Boot) -> None:
        self.world.stream_delay.pop(boot.machine.name, None)
        if boot.stream is not None:
            boot.stream.delay_ms = self.world.shape.stream_ms

    def partition_control(self) -> None:
        """A worker and the control plane cannot reach each other."""
        boot = self._boot()
        if boot is not None:
            self._cut(boot.machine.name, "cp", "partition_control")

    def partition_agents(self) -> None:
        """Two workers cannot reach each other."""
        if len(self.world.machines) >= 2:
            a, b = self.rng.sample(sorted(self.world.machines), 2)
            self._cut(a, b, "partition_agents")

    def _cut(self, a: str, b: str, kind: str) -> None:
        self.kernel.fault(kind, a, other=b)
        pair = frozenset((a, b))
        self.world.cuts.add(pair)
        self.kernel.at(between(self.rng, 100, 6_000), None, self.world.cuts.discard, pair)

    def notice_loss(self) -> None:
        """NIXL's notices get lost for a while."""
        self.world.fabric.notice_loss = 0.5
        self.kernel.log("fault", "notices get lost")
        self.kernel.at(between(self.rng, 500, 4_000), None, self._no_notice_loss)

    def _no_notice_loss(self) -> None:
        self.world.fabric.notice_loss = 0.0

    def slow_reads(self) -> None:
        """READs take as long as leases do."""
        self.kernel.fault("slow_reads")
        fabric = self.world.fabric
        fabric.slow_ms = self.rng.choice([500.0, 3_000.0, 6_000.0])
        fabric.notice_slow_ms = self.rng.choice([5.0, 400.0, 1_500.0])
        self.kernel.at(between(self.rng, 500, 5_000), None, self._fast_reads)

    def _fast_reads(self) -> None:
        self.world.fabric.slow_ms, self.world.fabric.notice_slow_ms = 20.0, 5.0

    def read_errors(self) -> None:
        """READs fail half done."""
        self.world.fabric.read_error = 0.4
        self.kernel.log("fault", "reads fail")
        self.kernel.at(between(self.rng, 500, 4_000), None, self._no_read_errors)

    def _no_read_errors(self) -> None:
        self.world.fabric.read_error = 0.0

    def write_fails(self) -> None:
        """The next WRITE fails."""
        self.world.fabric.fail_next_write = True

    def crash_mid_read(self) -> None:
        """The source of the next READ dies while it runs, and NIXL never says so."""
        self.world.fabric.kill_next_source = True

    def crash_mid_write(self) -> None:
        """The target of the next WRITE dies while it runs, and NIXL never says so."""
        self.world.fabric.kill_next_target = True

    # Processes.

    def pause_worker(self) -> None:
        """SIGSTOP of all of an engine's processes, in the middle of a read if there is one."""
        boot = self._busy_boot()
        if boot is not None:
            self.kernel.fault("pause_worker", boot.name)
            self._hold_up(boot.threads, 200, 12_000)

    def pause_mover(self) -> None:
        """SIGSTOP of a worker process, mostly one that reads."""
        boot = self._busy_boot()
        if boot is not None:
            self.kernel.fault("pause_mover", boot.name)
            self._hold_up([self.rng.choice(boot.mover_threads)], 200, 12_000)

    def slow_step(self) -> None:
        """One step of an engine takes seconds: commands wait in its inbox."""
        boot = self._boot()
        if boot is not None:
            self.kernel.fault("slow_step", boot.name)
            self._hold_up([boot.engine_thread], 300, 6_000)

    def suspend_worker(self) -> None:
        """A virtual machine is suspended: only CLOCK_BOOTTIME notices."""
        boot = self._busy_boot()
        if boot is None:
            return
        self.kernel.fault("suspend_worker", boot.name)
        boot.machine.suspend()
        self._hold_up(boot.threads, 500, 12_000)
        # Just before the threads go on: events of one instant run in order of their making.
        self._wake_with(boot.machine.wake, boot.threads)

    def _wake_with(self, wake: Callable[[], None], threads: list[Thread]) -> None:
        thread = threads[0]
        resume = thread.resume

        def waking() -> None:
            wake()
            thread.resume = resume  # type: ignore[method-assign]
            resume()

        thread.resume = waking  # type: ignore[method-assign]

    def pause_control(self) -> None:
        """SIGSTOP of the control plane."""
        control = self.world.control
        if control is not None:
            self.kernel.fault("pause_control", control.name)
            self._hold_up([control.thread], 100, 5_000)

    def suspend_control(self) -> None:
        """The control plane's virtual machine is suspended."""
        control = self.world.control
        if control is not None:
            self.kernel.fault("suspend_control", control.name)
            control.machine.suspend()
            self._hold_up([control.thread], 100, 6_000)
            self._wake_with(control.machine.wake, [control.thread])

    def crash_control(self) -> None:
        """SIGKILL between any two of its steps, and a restart."""
        control = self.world.control
        if control is None:
            return
        self.kernel.fault("crash_control", control.name)
        control.crash_in = self.rng.choice([0, 1, 2, 3, 5, 8, 13])
        self._restart_control_later()

    def _restart_control_later(self) -> None:
        self.kernel.at(between(self.rng, 100, 5_000), None, self._restart_control)

    def _restart_control(self) -> None:
        world = self.world
        if world.control is not None and world.control.crash_in is not None:
            world.control.crash("at last")
        if world.control is None:
            world.start_control()

    def slow_commits(self) -> None:
        """The control plane's disk is slow: what is decided leaves late."""
        control = self.world.control
        if control is not None:
            self.kernel.fault("slow_commits", control.name)
            control.commit_ms = self.rng.choice([100.0, 800.0, 2_000.0])
            self.kernel.at(between(self.rng, 500, 3_000), None, self._fast_commits)

    def _fast_commits(self) -> None:
        if self.world.control is not None:
            self.world.control.commit_ms = 3.0

    def stale_control(self) -> None:
        """A successor starts while the old control plane runs on, without its store."""
        world = self.world
        if world.control is not None and world.stale is None and not world.shape.sqlite:
            self.kernel.fault("stale_control", world.control.name)
            world.replace_control()

    def lost_store(self) -> None:
        """The control plane comes back with an empty store; an operator says that it may."""
        world = self.world
        if world.control is None or world.stale is not None:
            return
        self.kernel.fault("lost_store", world.control.name)
        world.control.crash("the disk is gone")
        world.lose_store()

        def back() -> None:
            if world.control is None:
                world.start_control(accept_lineage=self.rng.random() < 0.5)

        self.kernel.at(between(self.rng, 100, 3_000), None, back)

    def crash_worker(self) -> None:
        """SIGKILL of an engine; it comes back, or does not."""
        boot = self._busy_boot()
        if boot is None:
            return
        self.world.kill(boot)

    def second_boot(self) -> None:
        """An engine is started twice under one worker_id. The first still runs, and reads: it
        keeps its place, or loses it because the control plane does not hear it."""
        boot = self._busy_boot()
        if boot is None:
            return
        self.kernel.fault("second_boot", boot.name)
        if self.rng.random() < 0.6:
            self._cut(boot.machine.name, "cp", "partition_control")
        second = self.world.boot(boot.spec, elsewhere=True)
        # Only the first has the worker's address; the second goes away again.
        self.world.boots[boot.spec.worker_id] = boot

        def away() -> None:
            second.crash()
            self.world.dead_boots.append(second)

        self.kernel.at(between(self.rng, 500, 6_000), None, away)

    # Clocks.

    def wall_jump(self) -> None:
        """Somebody sets a wall clock; nothing may depend on it."""
        world = self.world
        machine = self.rng.choice([world.control_machine, *world.machines.values()])
        self.kernel.fault("wall_jump", machine.name)
        machine.jump(self.rng.choice([-86_400, -30, 30, 86_400]) * SECOND)

    # Load.

    def memory_pressure(self) -> None:
        """Requests of nobody's turn fill a pool: blocks that are let go are reused at once."""
        boot = self._boot()
        if boot is None:
            return
        self.kernel.fault("memory_pressure", boot.name)
        cluster, rng = self.world.cluster, self.rng
        for _ in range(rng.randint(1, 4)):
            blocks = rng.randint(2, max(2, boot.pool.total_blocks // 2))
            hashes: list[bytes] = []
            for _ in range(blocks + 2):
                cluster.contents += 1
                hashes.append(chain_hash(hashes[-1] if hashes else b"noise", cluster.contents))
            cluster.submit(
                boot.spec.worker_id,
                None,
                tuple(hashes),
                blocks * BLOCK_TOKENS + 5,
                rng.choice([1, 30]),
                lambda _: None,
            )

    def preempt(self) -> None:
        """vLLM takes a running request's blocks: it starts again."""
        boot = self._boot()
        if boot is not None:
            boot.engine.preempt_next = True

    # People.

    def fork_now(self) -> None:
        """An agent forks, and its child asks for what has just come back."""
        known = [x for x in self.world.conversations if x.chain and not x.ended]
        if known:
            self.rng.choice(known).fork()

    def end_session(self) -> None:
        """A session ends in the midst of its turns, with a lease open if one is."""
        world = self.world
        control = world.control
        if control is None:
            return
        state = control.registry.state
        leased = sorted({state.leases[i].key.session_id for i in state.open_leases})
        candidates = [c for c in world.conversations if c.key.session_id in leased]
        conversation = self.rng.choice(candidates or world.conversations)
        self.kernel.fault("session_end", conversation.key.session_id)
        conversation.end_session()

    def revoke(self) -> None:
        """An operator revokes a lease."""
        lease_id = self._open_lease()
        if lease_id is not None:
            self.kernel.fault("revoke", lease_id)
            self.world.call(
                lambda registry, now: registry.revoke(now, lease_id, "OPERATOR"),
                lambda _: None,
                lambda _: None,
            )

    def renew(self) -> None:
        """Somebody renews a lease, over and over."""
        lease_id = self._open_lease(granted=True)
        if lease_id is None:
            return
        self.kernel.fault("renew", lease_id)
        if self.rng.random() < 0.5:
            self._deafen_source(lease_id)
        ttl = self.rng.choice([1, 3, 8]) * SECOND

        def again(times: int) -> None:
            self.world.call(
                lambda registry, now: registry.renew(now, lease_id, ttl),
                lambda _: None,
                lambda _: None,
            )
            if times:
                self.kernel.at(between(self.rng, 200, 2_000), None, again, times - 1)

        again(self.rng.randint(0, 4))

    def _deafen_source(self, lease_id: str) -> None:
        """The source does not hear of the renewal for a while, or its answer is not heard."""
        control = self.world.control
        assert control is not None
        source = self.world.boots.get(control.registry.state.leases[lease_id].source.worker_id)
        if source is None:
            return
        match self.rng.choice(("step", "partition", "slow")):
            case "step":
                self.kernel.fault("slow_step", source.name)
                self._hold_up([source.engine_thread], 1_000, 9_000)
            case "partition":
                self._cut(source.machine.name, "cp", "partition_control")
            case _ if source.stream is not None:
                self.kernel.fault("slow_stream", source.name, ms=5_000)
                source.stream.delay_ms = 5_000.0

    def _open_lease(self, *, granted: bool = False) -> str | None:
        control = self.world.control
        if control is None:
            return None
        state = control.registry.state
        found = [
            i
            for i in sorted(state.open_leases)
            if not granted or state.leases[i].state is not LeaseState.PENDING
        ]
        if granted:
            # Rather one that nobody uses yet: it will see its deadline.
            unused = [i for i in found if state.leases[i].state is LeaseState.GRANTED]
            found = unused or found
        return self.rng.choice(found) if found else None

    def drain(self) -> None:
        """An operator drains a worker and thinks better of it."""
        worker_id = self.rng.choice(sorted(self.world.machines))
        self.kernel.fault("drain", worker_id)
        self._drain(worker_id, False)
        self.kernel.at(between(self.rng, 300, 4_000), None, self._drain, worker_id, True)

    def _drain(self, worker_id: str, undo: bool) -> None:
        self.world.call(
            lambda registry, now: registry.drain(now, worker_id, undo),
            lambda _: None,
            lambda _: None,
        )

    def new_weights(self) -> None:
        """An operator pauses all engines and gives them other weights."""
        if not self.world.changing_weights:
            self.world.changing_weights = True
            self.kernel.fault("pause_engines", "all")
            Operator(self.world).look()

    def fence(self) -> None:
        """An engine dies and an operator attests it at once."""
        boot = self._busy_boot()
        if boot is None or not boot.incarnation:
            return
        self.kernel.fault("fence", boot.name)
        worker_id = boot.spec.worker_id
        self.world.crash_worker(worker_id)
        self.kernel.at(between(self.rng, 1, 500), None, self.world.fence, boot)
        if self.rng.random() < 0.7:
            delay = between(self.rng, 50, 5_000)
            self.kernel.at(delay, None, self.world.restart_worker, worker_id)


FAULTS: dict[str, tuple[float, int]] = {
    # kind: (share of schedules that try it, times at most)
    "stream_cut": (0.3, 3),
    "slow_stream": (0.3, 2),
    "partition_control": (0.3, 2),
    "partition_agents": (0.3, 2),
    "notice_loss": (0.4, 2),
    "slow_reads": (0.35, 2),
    "read_errors": (0.7, 3),
    "write_fails": (0.35, 2),
    "crash_mid_read": (0.42, 1),
    "crash_mid_write": (0.65, 1),
    "pause_worker": (0.25, 2),
    "pause_mover": (0.3, 2),
    "slow_step": (0.35, 3),
    "suspend_worker": (0.25, 2),
    "pause_control": (0.25, 2),
    "suspend_control": (0.25, 1),
    "crash_control": (0.35, 3),
    "slow_commits": (0.25, 2),
    "stale_control": (0.26, 1),
    "lost_store": (0.2, 2),
    "crash_worker": (0.3, 2),
    "second_boot": (0.2, 1),
    "wall_jump": (0.2, 2),
    "memory_pressure": (0.4, 4),
    "preempt": (0.3, 3),
    "end_session": (0.25, 2),
    "fork_now": (0.4, 4),
    "revoke": (0.4, 3),
    "renew": (0.45, 4),
    "drain": (0.2, 1),
    "fence": (0.25, 1),
    "new_weights": (0.3, 2),
}

_COUNTED_OTHERWISE = (
    "notice_loss",
    "read_errors",
    "write_fails",
    "crash_mid_read",
    "crash_mid_write",
    "end_session",
    "fork_now",
    "preempt",
)

KINDS = (
    *(k for k in FAULTS if k not in _COUNTED_OTHERWISE),
    "notice_lost",
    "read_error",
    "read_hangs",
    "write_error",
    "write_hangs",
    "session_end",
    "message_delay",
    "clock_drift",
    "adversarial_reuse",
    "late_request",
    "abort",
    "abort_during_load",
    "fork",
    "concurrent_turns",
    "pause_engines",
    "sibling",
    "duplicate",
    "preempt",
)
"""Every kind that must take effect in at least a tenth of all schedules."""
