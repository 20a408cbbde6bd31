"""One schedule: what a seed draws, a time of faults, a time of healing, and what must be left."""

from __future__ import annotations

import hashlib
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import kvshuttle.dataplane.eager
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.v1 import types_pb2
from tests.simulation.clients import Behaviour
from tests.simulation.faults import FAULTS, Faults
from tests.simulation.invariants import Transitions, record_transitions
from tests.simulation.kernel import MS, SECOND, Kernel, Violation, between
from tests.simulation.worker import WorkerSpec
from tests.simulation.world import Shape, World

__all__ = ["Outcome", "draw", "limits_of", "prepare", "run"]

DRIFT_PPM = 50_000
"""A hundred times what clocks do, so that a missing allowance is a matter of tenths of seconds."""
HEAL_S = 90
"""A lease lives for its TTL, renewed for 12 s, plus guard and drift; a replica for 10 s; a turn for
20 s; a reader may be paused for 12 s."""

transitions: Transitions = Counter()
"""Every step of every lease in this process."""
logged_errors: list[str] = []
"""What the agents logged as errors of their own."""


@dataclass
class Outcome:
    """How a schedule went."""

    seed: int
    violation: str = ""
    detail: str = ""
    faults: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)

    @property
    def trace_hash(self) -> str:
        """Equal for two runs of a seed."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


class _Quiet:
    """A logger that keeps errors: an agent catches its own exceptions, a simulation must not."""

    def _nothing(self, *args: object, **kwargs: object) -> None:
        pass

    debug = info = warning = error = _nothing

    def is_enabled_for(self, level: int) -> bool:
        return False

    def exception(self, event: str, **kwargs: object) -> None:
        logged_errors.append(f"{event} {kwargs}\n{traceback.format_exc()}")


def prepare() -> None:
    """Once a process: quiet logs, counted transitions, eager returns in small pieces."""
    if getattr(prepare, "done", False):
        return
    prepare.done = True  # type: ignore[attr-defined]
    record_transitions(transitions)
    vars(kvshuttle.dataplane.eager)["EAGER_PIECE_BLOCKS"] = 3
    for name, module in list(sys.modules.items()):
        if name.startswith("kvshuttle.dataplane.") and hasattr(module, "_log"):
            module._log = _Quiet()  # type: ignore[attr-defined]


def limits_of(rng: random.Random, *, drifts: bool) -> Limits:
    """Times short enough for a schedule to see them pass."""
    return Limits(
        lease_ttl_ns=rng.choice([3, 5, 9]) * SECOND,
        lease_ttl_max_ns=12 * SECOND,
        lease_lifetime_max_ns=20 * SECOND,
        guard_ns=rng.choice([200, 1_000, 2_000]) * MS,
        clock_drift_ppm=DRIFT_PPM if drifts else 200,
        heartbeat_ns=rng.choice([100, 300, 300, 1_000, 1_000]) * MS,
        silence_ns=3 * SECOND,
        turn_timeout_ns=20 * SECOND,
        retention_ns=6 * SECOND,
        retention_max_ns=10 * SECOND,
        prefill_retention_ns=3 * SECOND,
        min_tokens=1,
        tick_ns=250 * MS,
        forward=rng.choice(["pull", "push", "push", "auto"]),
        push_min_compute_ns=20 * MS,
    )


def draw(kernel: Kernel) -> Shape:
    """A cluster and how its people behave."""
    rng = kernel.rng
    drifts = rng.random() < 0.35
    ranks = 2 if rng.random() < 0.2 else 1
    blocks = rng.choice([24, 32, 48])
    P, D, B = (  # noqa: N806
        types_pb2.WORKER_ROLE_PREFILL,
        types_pb2.WORKER_ROLE_DECODE,
        types_pb2.WORKER_ROLE_BOTH,
    )
    roles = rng.choice([[P, D], [P, D], [P, D, D], [P, D, B], [P, P, D]])
    specs = [WorkerSpec(f"w{i}", role, blocks=blocks, ranks=ranks) for i, role in enumerate(roles)]
    if rng.random() < 0.08:
        for spec in specs:
            spec.caching = False
    if rng.random() < 0.1:
        rng.choice(specs).push = False
    if rng.random() < 0.4:
        chunk = rng.choice([40, 64, 100])
        for spec in specs:
            spec.chunk_tokens = chunk
    if rng.random() < 0.5:
        for spec in specs:
            spec.overlap = True
    if rng.random() < 0.25:
        # Long ones leave time for others to ask for what they have yet to fill.
        step_ms = rng.choice([150.0, 800.0])
        for spec in specs:
            spec.step_ms = step_ms
    if drifts:
        kernel.fault("clock_drift", ppm=DRIFT_PPM)
    delayed = rng.random() < 0.35
    if delayed:
        kernel.fault("message_delay")
    adversarial = rng.random() < 0.5
    if adversarial:
        kernel.fault("adversarial_reuse")
    some = rng.random
    return Shape(
        limits=limits_of(rng, drifts=drifts),
        specs=specs,
        durable=some() < 0.85,
        sqlite=some() < 0.06,
        adversarial=adversarial,
        one_sided=some() < 0.6,
        copy_messages=some() < 0.1,
        sessions=rng.choice([1, 2, 3, 4]),
        turns=rng.choice([4, 6, 8]),
        drift_ppm=DRIFT_PPM if drifts else 0,
        stream_ms=rng.choice([40.0, 250.0, 600.0]) if delayed else 3.0,
        call_ms=rng.choice([10.0, 200.0, 800.0]) if delayed else 3.0,
        behaviour=Behaviour(
            abort=rng.choice([0.0, 0.1, 0.35]),
            concurrent=rng.choice([0.0, 0.2, 0.6]),
            end_session=rng.choice([0.0, 0.0, 0.1]),
            duplicate=rng.choice([0.0, 0.0, 0.3]),
            siblings=rng.choice([0.0, 0.0, 0.3]),
            fork=rng.choice([0.0, 0.2, 0.5]),
            late_request=rng.choice([0.0, 0.1, 0.3]),
            think_ms=rng.choice([5.0, 50.0, 400.0, 3_000.0]),
        ),
    )


_MILESTONES = {"fork_now": ("brought", "brought", "grant")}


def _plan_faults(world: World, faults: Faults, active_ns: int) -> None:
    rng, kernel = world.rng, world.kernel
    for kind, (share, most) in FAULTS.items():
        if rng.random() >= share:
            continue
        for _ in range(rng.randint(1, most)):
            inject = getattr(faults, kind)
            milestone = rng.choice(_MILESTONES.get(kind, ("time", "grant", "read")))
            if milestone == "time":
                kernel.at(rng.randrange(50 * MS, active_ns), None, inject)
            else:
                # Where it hurts: just after a lease was granted or a READ was posted; a fork, when
                # an eager return has brought something.
                delay = between(rng, 0.05, rng.choice([2.0, 30.0, 500.0]))
                kernel.when(milestone, rng.randint(1, 8), _later(kernel, delay, active_ns, inject))


def _later(
    kernel: Kernel, delay: int, until_ns: int, inject: Callable[[], None]
) -> Callable[[], None]:
    def then() -> None:
        if kernel.now + delay < until_ns:
            kernel.at(delay, None, inject)

    return then


@contextmanager
def _caught(outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except Violation as violation:
        outcome.violation = violation.invariant
        outcome.detail = str(violation)
    except Exception as error:  # whatever breaks is a finding
        outcome.violation = "exception"
        outcome.detail = f"{error!r}\n{traceback.format_exc()}"


def run(seed: int, *, trace: bool = False) -> Outcome:
    """Runs a seed."""
    prepare()
    outcome = Outcome(seed)
    kernel = Kernel(seed, trace=trace)
    logged_errors.clear()
    world: World | None = None
    with kernel.virtual_time():
        try:
            with _caught(outcome):
                world = World(kernel, draw(kernel))
                _drive(world)
        finally:
            if world is not None:
                world.close()
    outcome.faults = dict(kernel.faults)
    outcome.numbers = {"steps": kernel.steps, "virtual_s": kernel.now // SECOND}
    if world is not None:
        outcome.numbers |= {
            "reads": world.fabric.posted,
            "partial_loads": kernel.times("partial_load"),
            "deferred_frees": kernel.times("deferred_free"),
            "waits_for_step": kernel.times("waits_for_step"),
            "writes": world.fabric.written,
            "pushes": world.checker.pushes,
            "eager_grants": world.checker.eager_grants,
            "shared_grants": world.checker.shared_grants,
            "finished": world.cluster.finished,
            "aborted": world.cluster.aborted,
            "errors": world.cluster.errors,
        }
    outcome.trace = kernel.trace or []
    return outcome


def _drive(world: World) -> None:
    kernel = world.kernel

    def after_step() -> None:
        world.checker.check()
        if logged_errors:
            raise Violation("exception", f"in an agent: {logged_errors[0]}")

    kernel.after_step = after_step
    active_ns = kernel.rng.randint(5, 14) * SECOND
    _plan_faults(world, Faults(world), active_ns)
    kernel.run(active_ns)
    kernel.log("world", "heals")
    world.heal()
    left: list[str] = []
    for _ in range(HEAL_S):
        kernel.run(kernel.now + SECOND)
        world.settle()
        left = world.leftovers()
        if not left:
            break
    if left:
        stuck = any(x.startswith("request") for x in left)
        raise Violation("stuck" if stuck else "bounded", f"after {HEAL_S} s: {'; '.join(left)}")
