"""What can happen in the world of a push, and what must have ended when all of it is over."""

from __future__ import annotations

from collections.abc import Callable

from kvshuttle.controlplane.model.terms import LeaseState, TurnOutcome, WorkerRef
from kvshuttle.dataplane.limits import DEADLINE_MARGIN_NS
from kvshuttle.dataplane.scheduler import Tick
from tests.simulation.kernel import MS, SECOND, Violation
from tests.simulation.pushscope import PushNode, PushWorld
from tests.simulation.smallscope import DRIFT_PPM, KEY, Node

__all__ = ["FAULTS", "actions", "do", "end"]

JUMPS = 1
"""How often time passes in one path; at its end it does so anyway."""
_CHANNELS = ("s>", "s<", "d>", "d<", "d^", "notices")
"""Up to and down from the control plane, from decode's mover to its scheduler, between movers."""
_OVER = frozenset({"done", "aborted", "gone", "dead"})


def _alive(name: str) -> Callable[[PushWorld], bool]:
    return lambda w: name in w.nodes and w.nodes[name].alive


def _runs(name: str) -> Callable[[PushWorld], bool]:
    return lambda w: w.nodes[name].alive and not w.nodes[name].stalled


FAULTS: dict[str, Callable[[PushWorld], bool]] = {
    # What may go wrong, and where that means something.
    **{f"hold {name}": (lambda n: lambda w: n not in w.held)(name) for name in _CHANNELS},
    "cut s": lambda w: w.nodes["s"].conversation is not None,
    "cut d": lambda w: w.nodes["d"].conversation is not None,
    "crash cp": lambda w: True,
    "old store": lambda w: True,
    "lose store": lambda w: True,
    **{f"crash {name}": _alive(name) for name in ("s", "d", "s'", "d'")},
    "stall s": _runs("s"),
    "stall d": _runs("d"),
    "pause s": lambda w: w.nodes["s"].alive and not w.nodes["s"].mover_paused,
    "pause d": lambda w: w.nodes["d"].alive and not w.nodes["d"].mover_paused,
    # The next one that is sent.
    "lose notice": lambda w: True,
    "fail write": lambda w: bool(w.fabric.writing),
    "revoke": lambda w: bool(w.registry.state.open_leases),
    "renew": lambda w: bool(w.registry.state.open_leases),
    "end turn": lambda w: w.token in w.registry.state.turns,
    "abort s": lambda w: _runs("s")(w) and w.may_abort,
    "abort d": lambda w: _runs("d")(w) and w.answer.state == "loading",
    "preempt s": lambda w: _runs("s")(w) and w.prompt.state == "between",
}


def actions(world: PushWorld, faults_left: int) -> list[str]:
    """What can happen next."""
    if _over(world):
        return []
    found: list[str] = []
    for name, node in world.nodes.items():
        if node.alive and node.conversation is None:
            found.append(f"hello {name}")
        elif not node.alive and not world.used.get(f"fence {name}"):
            found.append(f"fence {name}")
        if node.stalled:
            found.append(f"go {name}")
        if node.mover_paused:
            found += [f"resume {name}"]
            if node.steps and node.orders[0]:
                found.append(f"overtake {name}")
    for name in ("s", "d"):
        if _lost(world, name):
            found.append(f"lost {name}")
        if f"{name}'" not in world.nodes and world.nodes[name].conversation is None:
            found.append(f"replace {name}")
    if _runs("s")(world):
        found += [
            name for name, may in (("step", world.may_step), ("over", world.may_end_step)) if may
        ]
    if _runs("d")(world) and world.answer.state in ("none", "waiting"):
        found.append("request")
    elif _runs("d")(world) and world.answer.state in ("loaded", "failed", "computes"):
        found.append("finish")
    found += [f"release {name}" for name in _CHANNELS if name in world.held]
    if world.fabric.flying:
        found.append("read")
    if world.fabric.writing:
        found.append("write first")
        if len(world.fabric.writing) > 1:
            found.append("write last")
        if len(world.fabric.writing[0].local) - world.fabric.writing[0].copied > 1:
            found.append("write half")
    if _due(world):
        found.append("tick")
    if world.used.get("time", 0) < JUMPS:
        found += [f"time {name}" for name in _instants(world)]
    if faults_left > 0:
        found += [name for name, may in FAULTS.items() if not world.used.get(name) and may(world)]
    return found


def _over(world: PushWorld) -> bool:
    """Whether nobody has anything to do with the turn any more, nor will have."""
    return (
        world.prompt.state in _OVER
        and world.answer.state in _OVER
        and not world.fabric.writing
        and not world.fabric.flying
        and not _left_over(world)
        and not any(x.up or x.down or x.pending or x.agent._inbox for x in _living(world))
    )


def _living(world: PushWorld) -> list[Node]:
    return [x for x in world.nodes.values() if x.alive]


def _lost(world: PushWorld, worker_id: str) -> bool:
    """Whether the control plane has a stream that has ended, and will notice."""
    worker = world.registry.state.workers.get(worker_id)
    if worker is None or not worker.connected:
        return False
    return not any(
        f"boot-{x.name}" == worker.boot_id and x.alive and x.conversation is not None
        for x in world.nodes.values()
    )


def _due(world: PushWorld) -> bool:
    """Whether the control plane's next tick will do something."""
    state = world.registry.state
    with world.kernel.on(world.cp_thread):
        now = world.clock.now_ns()
    for lease_id in state.open_leases:
        lease = state.leases[lease_id]
        if lease.state is not LeaseState.PENDING and now >= lease.deadline_ns:
            return True
        if not lease.push and lease.state is LeaseState.PENDING:
            return now >= lease.create_ns + world.limits.guard_ns
    return False


def _instants(world: PushWorld) -> dict[str, int]:
    """Moments that are worth waiting for, in true time."""
    now = world.kernel.now
    found: dict[str, int] = {}

    def note(name: str, node: Node, deadline_ns: int) -> None:
        left = deadline_ns - node.machine.boottime()
        found[name] = now + left * 1_000_000 // (1_000_000 + node.machine.ppm) + MS

    for name, node in world.nodes.items():
        if not node.alive:
            continue
        for push in node.transfers[0].pushes._pushes.values():
            note(f"margin {name}", node, push.deadline_ns - DEADLINE_MARGIN_NS)
            note(f"writer {name}", node, push.deadline_ns)
        for zone in node.transfers[0].zones._landings.values():
            if not zone.told:
                note(f"late {name}", node, zone.deadline_ns)
        for landing in node.agent.landings._by_lease.values():
            if landing.reads or not (landing.granted or landing.abandoned):
                note(f"patience {name}", node, landing.patience_ns)
            elif not (landing.said or landing.abandoned):
                note(f"ask {name}", node, landing.grant.ask_ns)
        for grant in node.agent.destination.open_grants:
            note(f"reader {name}", node, grant.deadline_ns)
    state = world.registry.state
    for lease_id in state.open_leases:
        lease = state.leases[lease_id]
        if lease.deadline_ns:
            with world.kernel.on(world.cp_thread):
                left = lease.deadline_ns - world.clock.now_ns()
            found["books"] = now + left * 1_000_000 // (1_000_000 - DRIFT_PPM // 2) + MS
    return {name: at for name, at in found.items() if at > now}


def do(world: PushWorld, action: str) -> None:
    """One action, and what follows from it at once."""
    nodes, used = world.nodes, world.used
    kind, _, which = action.partition(" ")
    name = "time" if kind == "time" else action
    if action in FAULTS or kind in ("fence", "time"):
        used[name] = used.get(name, 0) + 1
    match kind:
        case "hold":
            world.held.add(which)
        case "release":
            world.held.discard(which)
        case "hello":
            nodes[which].say_hello()
        case "lost":
            ref, generation, _ = _stream(world, which)
            world.attempt(lambda now: world.registry.stream_lost(now, ref, generation, "lost"))
        case "tick":
            world.post(world.registry.tick)
        case "read":
            world.fabric.finish(world.fabric.flying[0])
        case "write":
            write = world.fabric.writing[-1 if which == "last" else 0]
            world.fabric.move_write(
                write, 1 if which == "half" else len(write.local) - write.copied
            )
        case "fail":
            world.fabric.fail_write(world.fabric.writing[0])
        case "lose" if which == "notice":
            world.fabric.lose_next = True
        case "time":
            world.kernel.now = _instants(world)[which]
            _tick(world)
        case "step":
            world.step()
        case "over":
            world.step_over()
        case "request":
            world.ask()
        case "finish":
            world.finish_answer()
        case "abort" if which == "s":
            world.finish_prompt(aborted=True)
        case "abort":
            world.abort_answer()
        case "preempt":
            world.preempt()
        case "stall" | "go":
            nodes[which].stalled = kind == "stall"
            _tick(world)
        case "pause" | "resume":
            nodes[which].mover_paused = kind == "pause"
        case "overtake":
            _overtake(nodes[which])
        case "cut":
            nodes[which].cut()
        case "replace":
            world.replace(which)
        case "fence":
            _fence(world, nodes[which])
        case "crash" if which != "cp":
            _die(world, which)
        case "crash" | "old" | "lose":
            if kind == "old":
                world.old_store()
            elif kind == "lose":
                world.lose_store()
            for node in nodes.values():
                node.cut()
            world.start_control()
        case "revoke":
            lease_id = sorted(world.registry.state.open_leases)[-1]
            world.attempt(lambda now: world.registry.revoke(now, lease_id, "OPERATOR"))
        case "renew":
            lease_id = sorted(world.registry.state.open_leases)[-1]
            world.attempt(lambda now: world.registry.renew(now, lease_id, 3 * SECOND))
        case "end":
            _end_turn(world)
        case _:
            raise ValueError(action)
    _settle(world)


def _stream(world: PushWorld, worker_id: str) -> tuple[WorkerRef, int, str]:
    worker = world.registry.state.workers[worker_id]
    return worker.ref, worker.stream_generation, worker.boot_id


def _tick(world: PushWorld) -> None:
    for node in _living(world):
        node.beat()
        if not node.stalled:
            node.agent.post(Tick())


def _overtake(node: Node) -> None:
    """The mover goes on, and hears of the engine's steps before its orders."""
    node.mover_paused = False
    with node.world.kernel.on(node.thread):
        while node.steps:
            node.transfers[0].begin_step(node.steps.popleft())
            node.transfers[0].poll()


def _die(world: PushWorld, name: str) -> None:
    node = world.nodes[name]
    node.die()
    node.stalled = node.mover_paused = False
    if name == "s":
        world.prompt.state = "dead"
    elif name == "d":
        world.answer.state = "dead"


def _fence(world: PushWorld, node: Node) -> None:
    """Under every number that it has had."""
    world.fabric.attested_dead(node.transports[0])
    for number in {*node.agent.incarnations, node.incarnation} - {0}:
        ref = WorkerRef(node.spec.worker_id, number)
        world.attempt(lambda now, ref=ref: world.registry.fence(now, ref, "seen dead"))  # type: ignore[misc]


def _end_turn(world: PushWorld) -> None:
    session = world.registry.state.sessions.get(KEY)
    turn = session.find_token(world.token) if session is not None else None
    if turn is not None and turn.running:
        number = turn.number
        world.attempt(lambda now: world.registry.end_turn(now, KEY, number, TurnOutcome.CANCELLED))


def _settle(world: PushWorld) -> None:
    for _ in range(2):
        world.flow()
        world.results()
    for node in _living(world):
        # Memory pressure: what nothing references is handed out and overwritten, always.
        node.pool.free(node.pool.allocate(node.pool.free_blocks))
    world.checker.check()


# -- the end -------------------------------------------------------------------------------------


def end(world: PushWorld) -> None:
    """Nothing goes wrong any more, and time passes: nothing may be held that no dead process is in
    the way of; and nothing at all when the dead have been fenced."""
    world.held.clear()
    world.fabric.lose_next = False
    for node in _living(world):
        node.stalled = node.mover_paused = False
    _tick(world)
    for _ in range(5):
        _reconnect(world)
        _move_on(world)
        world.kernel.now += 4 * SECOND
        _tick(world)
        _settle(world)
        while _due(world):
            world.post(world.registry.tick)
        _settle(world)
    if world.answer.state in ("loading", "aborted"):
        raise Violation("stuck", "decode's request waits for its load for ever")
    if world.answer.state in ("loaded", "failed", "computes"):
        world.finish_answer()
    _end_turn(world)
    world.attempt(lambda now: world.registry.end_session(now, KEY))
    _settle(world)
    dead = [x for x in world.nodes.values() if not x.alive or not x.connected]
    if not dead and (left := _left_over(world)):
        raise Violation("bounded", f"when all is over, {'; '.join(left)}")
    for name, node in list(world.nodes.items()):
        if node in dead:
            if node.alive:
                # Another boot has its place.
                _die(world, name)
            _fence(world, node)
            _settle(world)
    _move_on(world)
    _settle(world)
    if left := _left_over(world):
        raise Violation("bounded", f"when the dead are fenced, {'; '.join(left)}")


def _reconnect(world: PushWorld) -> None:
    for worker_id in ("s", "d"):
        if _lost(world, worker_id):
            ref, generation, _ = _stream(world, worker_id)
            world.attempt(
                lambda now, ref=ref, generation=generation: world.registry.stream_lost(  # type: ignore[misc]
                    now, ref, generation, "lost"
                ),
            )
        boots = [x for x in world.nodes.values() if x.spec.worker_id == worker_id]
        if not any(x.alive for x in boots):
            world.nodes[f"{worker_id}''"] = world.boot(worker_id)
    for node in _living(world):
        if node.conversation is None:
            node.say_hello()
            _settle(world)


def _move_on(world: PushWorld) -> None:
    """Everything that moves arrives, except at a dead process: NIXL may never say so."""
    while True:
        reads = [x for x in world.fabric.flying if x.source.alive]
        writes = [x for x in world.fabric.writing if x.target.alive]
        if reads:
            world.fabric.finish(reads[0])
        elif writes:
            world.fabric.move_write(writes[0], len(writes[0].local) - writes[0].copied)
        elif _runs("s")(world) and world.may_end_step:
            world.step_over()
        elif _runs("s")(world) and world.may_step:
            world.step()
        else:
            return
        _settle(world)


def _left_over(world: PushWorld) -> list[str]:
    """What is held, or waited for."""
    state = world.registry.state
    left = [f"{i} is {state.leases[i].state.name}" for i in sorted(state.open_leases)]
    left += [f"{i} waits for its writer" for i in state.orphans]
    left += [f"{i} is not known to have stopped" for x in state.unstopped.values() for i in x]
    for node in _living(world):
        assert isinstance(node, PushNode)
        agent, transfers = node.agent, node.transfers[0]
        used = node.pool.total_blocks - node.pool.free_blocks
        stats = agent.pool_stats()
        names = ("held_blocks", "holds", "quarantined_blocks")
        counts = {name: getattr(stats, name) for name in names}
        counts |= {
            "landings": len(agent.landings._by_lease),
            "zones": len(transfers.zones._landings),
            "reads": len(transfers._reads),
            "early chunks": len(transfers.pushes._early),
            "blocks referenced": used,
        }
        if not world.books_lost:
            # Where the books have lost a boot that was written to, and another has its place,
            # nobody can attest its death. Nothing is held for it.
            counts |= {
                "pushes": len(agent.push._pushes),
                "WRITEs": len(transfers.pushes._pushes),
            }
        left += [f"{node.name}: {count} {name}" for name, count in counts.items() if count]
    return left
