"""A cluster on virtual time: machines, control planes, workers, conversations, operators."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.terms import WorkerRef
from kvshuttle.controlplane.store import MemoryStore, SqliteStore, Store
from tests.simulation.clients import Behaviour, Cluster, Conversation
from tests.simulation.control import ControlPlane
from tests.simulation.fabric import Fabric, SimTransport
from tests.simulation.invariants import Checker
from tests.simulation.kernel import Kernel, Machine, Violation, between
from tests.simulation.stream import Stream
from tests.simulation.worker import Boot, WorkerSpec

if TYPE_CHECKING:
    from kvshuttle.controlplane.model.effects import Decision
    from kvshuttle.controlplane.model.registry import Registry
    from kvshuttle.controlplane.model.state import Snapshot

__all__ = ["Shape", "World"]


@dataclass
class Shape:
    """What is drawn once a schedule."""

    limits: Limits
    specs: list[WorkerSpec]
    durable: bool = True
    sqlite: bool = False
    adversarial: bool = False
    one_sided: bool = True
    copy_messages: bool = False
    sessions: int = 2
    turns: int = 4
    drift_ppm: int = 0
    stream_ms: float = 3.0
    call_ms: float = 3.0
    behaviour: Behaviour = field(default_factory=Behaviour)


class World:
    """Everything of one schedule."""

    def __init__(self, kernel: Kernel, shape: Shape) -> None:
        self.kernel = kernel
        self.rng = kernel.rng
        self.shape = shape
        self.cuts: set[frozenset[str]] = set()
        self.fabric = Fabric(kernel, self.cut_off, self._kill_end, shape.one_sided)
        self.checker = Checker(kernel, self.fabric)
        self.control_machine = self._machine("cp")
        self.machines = {spec.worker_id: self._machine(spec.worker_id) for spec in shape.specs}
        self.boots: dict[str, Boot | None] = {spec.worker_id: None for spec in shape.specs}
        self.dead_boots: list[Boot] = []
        # Incarnations that the durable books gave to each boot, as an operator sees them.
        self._registered: dict[str, list[int]] = {}
        self._boot_count = 0
        self._control_count = 0
        self._lineages = 0
        self._directory: Path | None = None
        self._expected = MemoryStore()
        self._memory: MemoryStore | None = None
        self.control: ControlPlane | None = None
        # A control plane that does not know that it has been replaced.
        self.stale: ControlPlane | None = None
        self.stream_delay: dict[str, float] = {}
        self._lost_store = True
        self._healed = False
        # The version of the weights that engines start with; whether they are being changed.
        self.weights = 0
        self.changing_weights = False
        self.start_control()
        for spec in shape.specs:
            self.boot(spec)
        self.cluster = Cluster(
            kernel,
            shape.behaviour,
            self.call,
            self.boots.get,
            [spec.worker_id for spec in shape.specs],
            self._spawn,
        )
        self.conversations = [
            Conversation(self.cluster, f"tenant{i % 2}", f"s{i}", shape.turns)
            for i in range(shape.sessions)
        ]

    def _spawn(self, tenant: str, session_id: str, chain: list[bytes]) -> None:
        """A fork of another conversation, of two turns at most."""
        turns = self.rng.choice([1, 2])
        self.conversations.append(Conversation(self.cluster, tenant, session_id, turns, chain))

    def _machine(self, name: str) -> Machine:
        # Rates differ from true time by half of the stated bound, so from one another by all.
        half = self.shape.drift_ppm // 2
        ppm = self.rng.choice((-half, half, 0)) if half else 0
        return Machine(self.kernel, name, ppm=ppm)

    def cut_off(self, a: str, b: str) -> bool:
        """Whether two machines cannot reach each other."""
        return frozenset((a, b)) in self.cuts

    def close(self) -> None:
        """Removes files."""
        for control in (self.control, self.stale):
            if control is not None and control.alive:
                control.crash("the end")
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # The control plane.

    def start_control(self, *, accept_lineage: bool = False) -> None:
        """A new process, on the store as it is."""
        assert self.control is None
        lost, self._lost_store = self._lost_store, False
        if lost:
            self._lineages += 1
            self._expected = MemoryStore()
            self._memory = None
        store = self._open_store(new=lost)
        self._compare(store)
        self._control_count += 1

        def prepare(snapshot: Snapshot) -> Snapshot:
            # server.py begins a new store's numbers at the wall clock's second, so that none is
            # given twice; here the clock may have been set back too, and chance stands for that.
            if snapshot.epoch == 0:
                return dataclasses.replace(snapshot, last_incarnation=self.rng.getrandbits(40))
            return snapshot

        self.control = ControlPlane(
            self.kernel,
            self.control_machine,
            f"cp{self._control_count}",
            store,
            self.shape.limits,
            lineage=f"lineage{self._lineages}",
            accept_lineage=accept_lineage or self._healed,
            prepare=prepare,
            sync=not self.shape.durable,
            observe=self.checker.decided,
            committed=self._expected.commit,
            died=self._control_died,
            registered=self._seen_registered,
        )
        self.checker.began(self.control, f"lineage{self._lineages}")

    def _open_store(self, *, new: bool) -> Store:
        if not self.shape.sqlite:
            # It outlives the process: it stands for the disk.
            if self._memory is None:
                self._memory = MemoryStore()
            return self._memory
        if self._directory is None:
            shm = Path("/dev/shm")
            self._directory = Path(
                tempfile.mkdtemp(prefix="kvshuttle-sim-", dir=shm if shm.is_dir() else None)
            )
        if new:
            for file in self._directory.iterdir():
                file.unlink()
        return SqliteStore(self._directory / "store.db")

    def _compare(self, store: Store) -> None:
        """What a store remembers is what was committed to it, no more and no less."""
        has, had = store.load(), self._expected.load()
        for name in ("epoch", "lineage_id", "last_incarnation", "time_ns"):
            if getattr(has, name) != getattr(had, name):
                raise Violation("store", f"{name}: {getattr(has, name)}, not {getattr(had, name)}")
        names = {"sessions": "key", "leases": "lease_id", "workers": "ref"}
        for name, key in names.items():
            one = {getattr(x, key): x for x in getattr(has, name)}
            other = {getattr(x, key): x for x in getattr(had, name)}
            if one != other:
                wrong = sorted(
                    str(k) for k in one.keys() | other.keys() if one.get(k) != other.get(k)
                )
                raise Violation("store", f"{name} differ after a restart: {wrong[:3]}")

    def _seen_registered(self, boot_id: str, incarnation: int) -> None:
        self._registered.setdefault(boot_id, []).append(incarnation)

    def _control_died(self, control: ControlPlane) -> None:
        if control is self.control:
            self.control = None
        if control is self.stale:
            self.stale = None

    def lose_store(self) -> None:
        """The next control plane finds nothing."""
        self._lost_store = True

    def replace_control(self) -> None:
        """A successor starts while the old process runs on; the store is the successor's."""
        old, self.control = self.control, None
        assert old is not None
        old.fenced_off = True
        self.stale = old
        self.start_control()

    def call(
        self,
        event: Callable[[Registry, int], Decision[Any]],
        done: Callable[[Any], None],
        failed: Callable[[str], None],
    ) -> None:
        """A client's RPC: there and back, or nothing."""
        kernel, rng = self.kernel, self.rng
        control = self.control
        if self.stale is not None and rng.random() < 0.5:
            control = self.stale
        if control is None:
            kernel.at(between(rng, 1, 30), None, failed, "unavailable")
            return

        def answer(how: Callable[[Any], None]) -> Callable[[Any], None]:
            return lambda result: kernel.at(
                between(rng, 0.1, self.shape.call_ms), None, how, result
            )

        kernel.at(
            between(rng, 0.1, self.shape.call_ms),
            control.thread,
            control.call,
            event,
            answer(done),
            answer(failed),
        )

    # Workers.

    def boot(self, spec: WorkerSpec, *, elsewhere: bool = False) -> Boot:
        """Starts an engine; elsewhere: on a machine that is not its worker's."""
        self._boot_count += 1
        boot = Boot(
            self.kernel,
            self._machine(f"{spec.worker_id}b") if elsewhere else self.machines[spec.worker_id],
            self.fabric,
            spec,
            self._boot_count,
            adversarial=self.shape.adversarial,
            dial=self._dial,
            check_post=self.checker.posting,
            check_write=self.checker.writing,
            welcomed=self.checker.welcomed,
        )
        boot.pool.weights.version = self.weights
        self.boots[spec.worker_id] = boot
        self.checker.watch(boot)
        return boot

    def crash_worker(self, worker_id: str) -> None:
        """The engine's processes die."""
        boot = self.boots[worker_id]
        if boot is None:
            return
        self.kernel.log(boot.name, "dies")
        self.boots[worker_id] = None
        boot.crash()
        self.dead_boots.append(boot)
        self.cluster.boot_died(boot)

    def kill(self, boot: Boot) -> None:
        """SIGKILL of an engine; it comes back, or does not."""
        worker_id = boot.spec.worker_id
        if self.boots[worker_id] is not boot:
            return
        self.kernel.fault("crash_worker", boot.name)
        self.crash_worker(worker_id)
        if self.rng.random() < 0.7:
            self.kernel.at(between(self.rng, 50, 5_000), None, self.restart_worker, worker_id)

    def _kill_end(self, transport: SimTransport) -> None:
        for boot in self.boots.values():
            if boot is not None and transport in boot.transports:
                self.kill(boot)
                return

    def restart_worker(self, worker_id: str) -> None:
        """A new boot in its place."""
        if self.boots[worker_id] is None:
            self.boot(next(s for s in self.shape.specs if s.worker_id == worker_id))

    def fence(self, boot: Boot) -> None:
        """An operator attests that a boot is dead, by every number that it was registered with: it
        may have died before it heard of the last, and leases may wait for any."""
        assert not boot.alive
        for transport in boot.transports:
            self.fabric.attested_dead(transport)
        for number in dict.fromkeys(reversed(self._registered[boot.boot_id])):
            self.call(
                partial(_fence, ref=WorkerRef(boot.spec.worker_id, number)),
                lambda _: None,
                lambda _: None,
            )

    def _dial(self, boot: Boot) -> Stream | None:
        control = self.control
        if self.stale is not None and self.rng.random() < 0.5:
            control = self.stale
        if control is None or not control.serving:
            return None
        name = boot.machine.name
        if self.cut_off(name, "cp"):
            return None
        stream = Stream(
            self.kernel,
            boot.link_thread,
            boot.heard,
            boot.closed,
            control,
            delay_ms=self.stream_delay.get(name, self.shape.stream_ms),
            blocked=lambda: self.cut_off(name, "cp"),
            copy=self.shape.copy_messages,
        )
        control.dialled.append(stream)
        return stream

    # The end.

    def heal(self) -> None:
        """Faults are over: everything runs, everybody is reachable, the dead are attested."""
        self.cuts.clear()
        self.fabric.be_well()
        self.shape.behaviour.abort = 0.0
        if self.stale is not None and self.stale.alive:
            self.stale.crash("seen by an operator")
        for machine in (self.control_machine, *self.machines.values()):
            machine.wake()
        threads = [t for b in self.boots.values() if b is not None for t in b.threads]
        if self.control is not None:
            self.control.crash_in = None
            threads.append(self.control.thread)
        for thread in threads:
            while thread.paused:
                thread.resume()
        self._healed = True
        if self.control is None:
            self.start_control()
        # Started again with the flag, if it was not.
        elif not self.control.registry.accept_lineage_change and self._lineages > 1:
            self.control.crash("to be started with the flag")
            self.start_control()
        for worker_id, boot in list(self.boots.items()):
            if boot is None:
                self.restart_worker(worker_id)
        for conversation in self.conversations:
            conversation.turns_left = 0

    def settle(self) -> None:
        """Again and again until nothing is left: ends sessions, fences the dead."""
        for conversation in self.conversations:
            if conversation.quiet:
                conversation.end_session()
        for boot in self.dead_boots:
            if boot.boot_id in self._registered:
                self.fence(boot)

    def leftovers(self) -> list[str]:
        """What has not ended."""
        left = [
            f"request {i} is {r.status.value} on {b.name}"
            for i, (r, b) in self.cluster.open_requests.items()
        ]
        for boot in self.boots.values():
            if boot is None:
                left.append("a worker is down")
                continue
            left += self._held(boot)
            if not boot.connected:
                left.append(f"{boot.name} is not connected ({boot.refused})")
        if self.control is None:
            left.append("no control plane")
        else:
            state = self.control.registry.state
            left += [f"{i} is {state.leases[i].state.name}" for i in sorted(state.open_leases)]
        left += [f"{c.key.session_id} runs" for c in self.conversations if not c.quiet]
        return left

    def _held(self, boot: Boot) -> list[str]:
        stats = boot.agent.pool_stats()
        used = boot.pool.total_blocks - boot.pool.free_blocks
        proven = self._lineages == 1 or not stats.quarantined_blocks
        if not proven and used == stats.held_blocks == stats.quarantined_blocks:
            # The control plane that could have passed on an attestation has lost its store: the
            # one case in which a quarantine has no end. It is capped.
            return []
        if (
            self._lineages > 1
            and not used
            and stats.open_leases == len(boot.agent.push.open_leases)
        ):
            # Nor could it pass on that of a boot that was written to. Nothing is held for that.
            return []
        left = [
            f"{boot.name}: {name} = {getattr(stats, name)}"
            for name in ("held_blocks", "holds", "quarantined_blocks", "open_leases")
            if getattr(stats, name)
        ]
        if used:
            left.append(f"{boot.name}: {used} blocks are referenced")
        return left


def _fence(registry: Registry, now: int, ref: WorkerRef) -> Decision[Any]:
    return registry.fence(now, ref, "seen dead")
