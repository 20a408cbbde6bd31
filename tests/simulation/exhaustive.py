"""Every order of events around one lease, up to a number of faults, states that were seen pruned.

    python -m tests.simulation.exhaustive                one fault a path, some minutes
    python -m tests.simulation.exhaustive --faults 3 --steps 2000000
    python -m tests.simulation.exhaustive --world push   the one of pushes alone
    ... --world push --faults 2 --after 'hold d> | request | stall d'   all that can follow that

What is not held up happens at once; holding up a channel, an engine or a mover until some later
action is a fault like any other, so all delays are explored as far as the number of faults goes.
In the worlds of a push (`pushscope.py`, `overlapscope.py`, `pushactions.py`) each state is also
brought to its end: when nothing goes wrong any more, and the dead are fenced, nothing may be held.
A state is reached again by doing its actions again from the beginning: the objects are the real
ones, and cannot be copied. It ends with one JSON line; exit status 1: an invariant was violated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvshuttle.controlplane.model.terms import LeaseState, TurnOutcome, WorkerRef
from kvshuttle.dataplane.scheduler import FinishedRequest, Tick
from tests.simulation import pushactions
from tests.simulation.kernel import MS, SECOND, Kernel, Violation
from tests.simulation.overlapscope import OverlapWorld
from tests.simulation.pushscope import PushWorld
from tests.simulation.schedule import logged_errors, prepare, transitions
from tests.simulation.smallscope import (
    BLOCK_TOKENS,
    BLOCKS,
    DRIFT_PPM,
    HASHES,
    KEY,
    PREFILL,
    Node,
    SmallWorld,
)

__all__ = ["Exploration", "actions", "do", "explore"]

WORLDS = {
    "turn": "A lease of a turn",
    "eager": "An eager lease",
    "push": "A push",
    "overlap": "A push by an engine that schedules ahead",
}
STEPS = {"turn": 25_000, "eager": 25_000, "push": 12_000, "overlap": 12_000}
"""What takes a minute, more or less: 2 ms each, and 5 ms in the world of a push, where each new
state is brought to its end too."""

JUMPS = 2
"""How often time passes in one path."""
CHANNELS = ("s>", "s<", "d>", "d<", "notices")

FAULTS: dict[str, Callable[[SmallWorld], bool]] = {
    # What may go wrong, and where that means something.
    **{f"hold {name}": (lambda n: lambda w: n not in w.held)(name) for name in CHANNELS},
    "cut s": lambda w: w.nodes["s"].conversation is not None,
    "cut d": lambda w: w.nodes["d"].conversation is not None,
    "crash cp": lambda w: True,
    "crash d": lambda w: w.nodes["d"].alive,
    "crash s": lambda w: w.nodes["s"].alive,
    "stall d": lambda w: w.nodes["d"].alive and not w.nodes["d"].stalled,
    "pause d": lambda w: w.nodes["d"].alive and not w.nodes["d"].mover_paused,
    "lose notice": lambda w: bool(w.fabric.notices),
    "revoke": lambda w: w.lease_id in w.registry.state.open_leases,
    "renew": lambda w: w.lease_id in w.registry.state.open_leases,
    "end turn": lambda w: w.token in w.registry.state.turns,
    "abort": lambda w: w.request == "loading" and not w.nodes["d"].stalled,
    "end session": lambda w: w.eager and KEY in w.registry.state.eager_of,
    # The engine's cache of what nothing references is pushed out, or blocks are wanted.
    "pressure d": lambda w: w.eager and w.nodes["d"].alive and not w.nodes["d"].stalled,
    "make room": lambda w: w.eager and w.nodes["d"].alive and not w.nodes["d"].stalled,
}


def actions(world: SmallWorld, faults_left: int) -> list[str]:
    """What can happen next."""
    found: list[str] = []
    if not world.used:
        found.append("begin")
    elif world.eager and not world.used.get("turn") and world.may_begin():
        found.append("turn")
    elif _over(world):
        return found
    for worker_id, node in world.nodes.items():
        if node.alive and node.conversation is None:
            found.append(f"hello {worker_id}")
        elif not node.alive and not world.used.get(f"fence {worker_id}"):
            found.append(f"fence {worker_id}")
    reader = world.nodes["d"]
    if not reader.alive:
        found.append("boot d")
    elif reader.stalled:
        found.append("go d")
    elif world.request in ("none", "waiting") and world.token == "second":
        found.append("request")
    if reader.alive and reader.mover_paused:
        found.append("resume d")
    found += [f"release {name}" for name in CHANNELS if name in world.held]
    if world.fabric.flying:
        found.append("read")
    if _due(world):
        found.append("tick")
    if world.used and world.used.get("time", 0) < JUMPS:
        found += [f"time {name}" for name in _instants(world)]
    if faults_left > 0:
        found += [name for name, may in FAULTS.items() if not world.used.get(name) and may(world)]
    return found


def _over(world: SmallWorld) -> bool:
    """Whether nobody has anything to do with the lease any more, nor will have."""
    source, reader = world.nodes["s"], world.nodes["d"]
    return (
        world.lease_id not in world.registry.state.open_leases
        and not (source.alive and source.agent.source.open_leases)
        and not (reader.alive and (reader.agent.destination.open_grants or reader.orders[0]))
        and not world.fabric.flying
        and not any(x.up or x.down or x.pending or x.agent._inbox for x in world.nodes.values())
    )


def _due(world: SmallWorld) -> bool:
    """Whether the control plane's next tick will do something."""
    lease = world.registry.state.leases.get(world.lease_id)
    if lease is None or not lease.open:
        return False
    with world.kernel.on(world.cp_thread):
        now = world.clock.now_ns()
    if lease.state is LeaseState.PENDING:
        return now >= lease.create_ns + world.limits.guard_ns
    return now >= lease.deadline_ns


def _instants(world: SmallWorld) -> dict[str, int]:
    """Moments that are worth waiting for, in true time."""
    now = world.kernel.now
    found = {}
    source, reader = world.nodes["s"], world.nodes["d"]
    lease = world.registry.state.leases.get(world.lease_id)
    if lease is not None and (lease.state is LeaseState.PENDING or lease.renewal is not None):
        # The last moment at which the control plane, whose clock is slow, still grants.
        asked = lease.renewal.asked_ns if lease.renewal is not None else lease.create_ns
        with world.kernel.on(world.cp_thread):
            left = asked + world.limits.guard_ns - world.clock.now_ns()
        found["guard"] = now + left * 1_000_000 // (1_000_000 - DRIFT_PPM // 2)
        found["too late"] = found["guard"] + MS
    for held in source.agent.source.open_leases:
        found["source"] = now + _until(source, held.deadline_ns)
    for grant in reader.agent.destination.open_grants:
        # Just before the reader's deadline, where its right is still whole.
        found["reader"] = now + _until(reader, grant.deadline_ns) - MS
        found["after"] = now + _until(reader, grant.deadline_ns) + MS
    return {name: at for name, at in found.items() if at > now}


def _until(node: Node, deadline_ns: int) -> int:
    left = deadline_ns - node.machine.boottime()
    return left * 1_000_000 // (1_000_000 + node.machine.ppm) + 1_000


def do(world: SmallWorld, action: str) -> None:
    """One action, and what follows from it at once."""
    nodes, used = world.nodes, world.used
    kind, _, which = action.partition(" ")
    name = "time" if kind == "time" else action
    if action in FAULTS or kind in ("fence", "time", "begin", "turn"):
        used[name] = used.get(name, 0) + 1
    match kind:
        case "begin":
            pass
        case "turn":
            world.turn()
        case "pressure":
            _push_out(nodes["d"])
        case "make":
            with world.kernel.on(nodes["d"].thread):
                nodes["d"].agent.make_room(nodes["d"].pool.total_blocks)
                nodes["d"].agent.next_deadline()
        case "hold":
            world.held.add(which)
        case "release":
            world.held.discard(which)
        case "hello":
            nodes[which].say_hello()
        case "tick":
            world.post(world.registry.tick)
        case "read":
            world.fabric.finish(world.fabric.flying[0])
        case "lose":
            world.fabric.notices.popleft()
        case "time":
            world.kernel.now = _instants(world)[which]
            nodes["d"].beat()
            nodes["s"].beat()
            _tick(world)
        case "request":
            _request(world)
        case "abort":
            _abort(world)
        case "stall" | "go":
            nodes["d"].stalled = kind == "stall"
            _tick(world)
        case "pause" | "resume":
            nodes["d"].mover_paused = kind == "pause"
        case "cut":
            nodes[which].cut()
        case "boot":
            nodes["d"] = world.boot("d")
        case "fence":
            dead = nodes[which]
            world.fabric.attested_dead(dead.transports[0])
            ref = WorkerRef(which, dead.incarnation)
            world.attempt(lambda now: world.registry.fence(now, ref, "seen dead"))
        case "crash":
            _crash(world, which)
        case "revoke":
            world.attempt(lambda now: world.registry.revoke(now, world.lease_id, "OPERATOR"))
        case "renew":
            world.attempt(lambda now: world.registry.renew(now, world.lease_id, 3 * SECOND))
        case "end" if which == "session":
            world.attempt(lambda now: world.registry.end_session(now, KEY))
        case "end":
            turn = world.registry.state.sessions[KEY].find_token(world.token)
            assert turn is not None
            world.attempt(
                lambda now: world.registry.end_turn(now, KEY, turn.number, TurnOutcome.CANCELLED),
            )
        case _:
            raise ValueError(action)
    _settle(world)


def _tick(world: SmallWorld) -> None:
    for node in world.nodes.values():
        if node.alive and not node.stalled:
            node.agent.post(Tick())


def _crash(world: SmallWorld, which: str) -> None:
    if which == "cp":
        for node in world.nodes.values():
            node.cut()
        world.start_control()
        return
    world.nodes[which].die()
    if which == "d":
        world.request = "dead"


def _request(world: SmallWorld) -> None:
    node = world.nodes["d"]
    key = (world.token, PREFILL)
    with world.kernel.on(node.thread):
        # As vLLM does it: first what its own cache has, then what the connector has beyond.
        hits: list[int] = []
        for block_hash in HASHES:
            block_id = node.pool.lookup(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        computed = len(hits) * BLOCK_TOKENS
        tokens = node.agent.look("r", key, HASHES, BLOCKS * BLOCK_TOKENS + 5, computed)
        if tokens is None:
            world.request = "waiting"
            return
        if BLOCKS + 1 - len(hits) > node.pool.free_blocks - sum(
            not node.pool.blocks[i].refs for i in hits
        ):
            # It waits for blocks, and others are asked to let go.
            node.agent.make_room(BLOCKS + 1)
            node.agent.next_deadline()
            world.request = "waiting"
            return
        node.pool.touch(hits)
        world.request_blocks = hits + node.pool.allocate(BLOCKS + 1 - len(hits))
        world.request_external = tokens
        world.request_hits = len(hits)
        node.agent.allocated("r", key, world.request_blocks, tokens)
    world.request = "loading" if tokens else "found" if len(hits) == BLOCKS else "computes"


def _abort(world: SmallWorld) -> None:
    """vLLM keeps the blocks until the worker has reported."""
    node = world.nodes["d"]
    full = world.request_hits + world.request_external // BLOCK_TOKENS
    with world.kernel.on(node.thread):
        node.agent.finished(
            (world.token, PREFILL),
            FinishedRequest(
                "r", HASHES[:full], tuple(world.request_blocks[:full]), full * BLOCK_TOKENS, True
            ),
        )
    world.request = "aborted"


def _settle(world: SmallWorld) -> None:
    for _ in range(2):
        world.flow()
        _results(world)
    for node in world.nodes.values():
        if node.alive and not (world.eager and node is world.nodes["d"]):
            # Memory pressure: what nothing references is handed out and overwritten, always (where
            # a copy in the cache is the point, it is a fault).
            _push_out(node)
    world.checker.check()


def _push_out(node: Node) -> None:
    node.pool.free(node.pool.allocate(node.pool.free_blocks))


def _results(world: SmallWorld) -> None:
    """vLLM's step takes what the mover has to say."""
    node = world.nodes["d"]
    if not node.alive or node.stalled:
        return
    finished, failed = node.results.take()
    if not finished:
        return
    blocks, world.request_blocks = world.request_blocks, []
    if world.request == "aborted":
        world.request = "gone"
    elif failed:
        with world.kernel.on(node.thread):
            node.agent.load_failed(sorted(failed))
        world.request = "failed"
    elif world.request == "loading":
        loaded = world.request_hits + world.request_external // BLOCK_TOKENS
        for block_hash, block_id in zip(HASHES[:loaded], blocks, strict=False):
            node.pool.insert(block_hash, block_id, 0)
        world.request = "loaded"
    else:
        raise Violation("engine", f"a load is reported of a request that is {world.request}")
    node.pool.free(blocks)


@dataclass
class Exploration:
    """How far it went."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    complete: bool = False
    violation: str = ""
    path: list[str] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)


def explore(
    *, faults: int, steps: int, world: str = "turn", after: tuple[str, ...] = ()
) -> Exploration:
    """Breadth first, for so many steps at most, of what can follow these actions."""
    prepare()
    result = Exploration()
    seen: set[bytes] = set()
    start = _walk(after, faults, world, seen)
    seen.add(start.digest)
    frontier = [start]
    while frontier:
        following: list[_Place] = []
        for place in frontier:
            if result.steps >= steps:
                result.states = len(seen)
                return result
            for action in place.actions:
                result.steps += 1
                try:
                    found = _walk((*place.path, action), faults, world, seen)
                except Violation as violation:
                    result.violation, result.path = str(violation), [*place.path, action]
                    return result
                if found.digest not in seen:
                    seen.add(found.digest)
                    following.append(found)
                    result.requests[found.request] += 1
        frontier = following
        result.depth += 1
        result.states = len(seen)
    result.complete = not frontier
    return result


@dataclass(frozen=True, slots=True)
class _Place:
    """A state, and one way to it."""

    path: tuple[str, ...]
    digest: bytes
    actions: tuple[str, ...]
    request: str


def _walk(path: tuple[str, ...], faults: int, name: str, seen: set[bytes]) -> _Place:
    logged_errors.clear()
    kernel = Kernel(0)
    with kernel.virtual_time():
        found = _walk_push(kernel, path, faults, name, seen) if name in _PUSHES else None
        if found is None:
            world = SmallWorld(kernel, eager=name == "eager")
            for action in path:
                do(world, action)
            spent = sum(times for name, times in world.used.items() if name in FAULTS)
            if spent >= faults:
                world.used_up = FAULTS
            left = tuple(actions(world, faults - spent))
            found = _Place(path, world.digest(), left, world.request)
        if logged_errors:
            raise Violation("exception", logged_errors[0])
        return found


_PUSHES = {"push": PushWorld, "overlap": OverlapWorld}


def _walk_push(
    kernel: Kernel, path: tuple[str, ...], faults: int, name: str, seen: set[bytes]
) -> _Place:
    world = _PUSHES[name](kernel)
    for action in path:
        pushactions.do(world, action)
    spent = sum(times for name, times in world.used.items() if name in pushactions.FAULTS)
    if spent >= faults:
        world.used_up = pushactions.FAULTS
    left = tuple(pushactions.actions(world, faults - spent))
    found = _Place(path, world.digest(), left, world.answer.state)
    if found.digest not in seen:
        pushactions.end(world)
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.exhaustive")
    parser.add_argument("--faults", type=int, default=1, help="faults in one path at most")
    parser.add_argument("--steps", type=int, default=0, help="in each world; as a rule a minute's")
    parser.add_argument("--world", choices=(*WORLDS, "all"), default="all")
    parser.add_argument("--after", default="", help="actions to begin with: 'hold d> | request'")
    options = parser.parse_args()
    beginning = tuple(x for x in options.after.split(" | ") if x)
    if beginning and options.world == "all":
        parser.error("--after: what begins so? Name one --world")
    began = time.monotonic()
    results = []
    for world, title in WORLDS.items():
        if options.world not in (world, "all"):
            continue
        steps = options.steps or STEPS[world]
        result = explore(faults=options.faults, steps=steps, world=world, after=beginning)
        results.append(result)
        print(f"{title}:")
        print(f"  {result.states} states, {result.steps} steps, {result.depth} deep")
        print(f"  where the request was: {dict(sorted(result.requests.items()))}")
        if result.violation:
            print(f"  {result.violation}\n  after: {' | '.join(result.path)}")
    for (before, after), times in sorted(transitions.items()):
        print(f"  {before.name:>8} to {after.name:<10} {times:>9}")
    print(
        json.dumps(
            {
                "states": sum(x.states for x in results),
                "steps": sum(x.steps for x in results),
                "depth": min(x.depth for x in results),
                "complete": all(x.complete for x in results),
                "violations": sum(bool(x.violation) for x in results),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )
    return 1 if any(x.violation for x in results) else 0


if __name__ == "__main__":
    sys.exit(main())
