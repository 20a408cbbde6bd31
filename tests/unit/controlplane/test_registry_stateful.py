"""The registry against a model of what it owes everybody, over memory and SQLite.

The model is small on purpose: it knows sessions by their turns' numbers, and of each lease only who
may be reading under it. Whatever events come, in whatever order: no number or grant is given twice,
no source is let go while somebody may read, leases take the steps of their table only, nothing is
lost by a restart, what is counted is what is there, and no turn is left without a way to its end.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.errors import DomainError, NotFoundError, NoWorkerError
from kvshuttle.controlplane.model.lease import TRANSITIONS, Lease
from kvshuttle.controlplane.model.limits import SECOND
from kvshuttle.controlplane.model.reports import (
    Descriptors,
    Heartbeat,
    LeaseReport,
    PoolStats,
    ReplicaReport,
)
from kvshuttle.controlplane.model.session import Usage
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Hints,
    LeaseState,
    Leg,
    ReplicaState,
    ReturnPolicy,
    SessionKey,
    SessionValue,
    TransferOutcome,
    TurnOutcome,
    WorkerRef,
    WorkerRole,
    WorkerState,
)
from kvshuttle.controlplane.store import MemoryStore, SqliteStore
from tests.unit.controlplane.test_admission import Town

KEYS = [SessionKey(tenant, name) for tenant in ("a", "b") for name in ("1", "2", "3")]
ROLES = {"p": WorkerRole.PREFILL, "d": WorkerRole.DECODE}
LIMITS = {
    # Small enough to be met, and nothing that goes by itself within one run but leases.
    "eager_leases_per_worker": 2,
    "eager_waiting_per_worker": 2,
    "lease_unread_ns": 0,
    "lease_lifetime_max_ns": 100 * SECOND,
    "ended_lease_kept_ns": 60 * SECOND,
    "ended_session_kept_ns": 200 * SECOND,
    "turn_timeout_ns": 400 * SECOND,
    "session_idle_ns": 100_000 * SECOND,
    "lost_worker_kept_ns": 100_000 * SECOND,
    "replicas_per_session": 3,
    "leased_share_tenant": 0.4,
    "held_share_tenant": 0.3,
}


@dataclasses.dataclass
class Model:
    """What must be so."""

    # Number of turns begun, and those that run with when they began; sessions that have ended.
    turns: dict[SessionKey, int] = dataclasses.field(default_factory=dict)
    running: dict[SessionKey, dict[int, int]] = dataclasses.field(default_factory=dict)
    ended_ns: dict[SessionKey, int] = dataclasses.field(default_factory=dict)
    tokens: set[str] = dataclasses.field(default_factory=set)
    # Grants that were sent, and to which boots somebody may read under them.
    granted: set[str] = dataclasses.field(default_factory=set)
    reads: dict[str, WorkerRef] = dataclasses.field(default_factory=dict)
    holds: dict[str, WorkerRef] = dataclasses.field(default_factory=dict)
    # The last seen of each lease.
    leases: dict[str, Lease] = dataclasses.field(default_factory=dict)
    epochs: list[int] = dataclasses.field(default_factory=list)
    incarnations: dict[int, str] = dataclasses.field(default_factory=dict)


class RegistryMachine(RuleBasedStateMachine):
    """Every event, and time."""

    sqlite = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvshuttle-registry-"))
        self.store: Any = SqliteStore(self.folder / "s.db") if self.sqlite else MemoryStore()
        self.town: Town | None = None
        self.model = Model()
        self.boots = {"p": "p1", "d": "d1"}
        self.refs: dict[str, WorkerRef] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    # -- the surroundings ------------------------------------------------------------------------
    @initialize(eager=st.booleans())
    def begin(self, eager: bool) -> None:
        self.town = Town(self.store, eager=eager, **LIMITS)
        for name in ROLES:
            self.town.lose(self.town.state.workers[name].ref)
        self._started()
        for name in ROLES:
            self._hello(name, forget=True)

    @property
    def world(self) -> Town:
        assert self.town is not None
        return self.town

    def _started(self) -> None:
        epoch = self.world.state.epoch
        assert all(epoch > before for before in self.model.epochs)
        self.model.epochs.append(epoch)

    def _connected(self, name: str) -> bool:
        worker = self.world.state.workers.get(name)
        return worker is not None and worker.connected

    def _hello(self, name: str, *, forget: bool) -> None:
        """A boot connects and says what it has; or it has forgotten what it could."""
        model, ref = self.model, self.refs.get(name)
        reports = [
            LeaseReport(lease_id, 1, True) for lease_id, boot in model.holds.items() if boot == ref
        ]
        if forget:
            for lease_id in [x for x, boot in model.reads.items() if boot == ref]:
                del model.reads[lease_id]
        reports += [
            LeaseReport(lease_id, 2, False, True)
            for lease_id, boot in model.reads.items()
            if boot == ref
        ]
        self.world.sent = [x for x in self.world.sent if x[0].worker_id != name]
        boot = self.boots[name]
        self.refs[name] = self.world.connect(
            name,
            ROLES[name],
            boot_id=boot,
            leases=tuple(reports),
            replicas=() if forget else self._replicas(ref),
        )
        number = self.refs[name].incarnation
        assert model.incarnations.setdefault(number, boot) == boot

    def _replicas(self, ref: WorkerRef | None) -> tuple[ReplicaReport, ...]:
        """What a boot has, as the books had it."""
        state = self.world.state
        return tuple(
            ReplicaReport(key, x.head_hash, x.num_blocks, x.num_tokens, x.state, 100 * SECOND)
            for key in state.sessions
            for x in state.replicas_of_session(key)
            if x.worker == ref
        )

    def _agent(self, ref: WorkerRef, event: str, *args: Any) -> None:
        if self._connected(ref.worker_id):
            self.world.agent(ref, event, *args)

    def _pick(self, n: int) -> Lease | None:
        leases = sorted(self.world.state.leases)
        return self.world.state.leases[leases[n % len(leases)]] if leases else None

    def _orders(self, kind: type[Any]) -> list[tuple[WorkerRef, Any]]:
        """Commands of a kind that boots which are connected have yet to obey; taken out."""
        return [(ref, x) for ref in self.refs.values() for x in self.world.told(ref, kind)]

    # -- sessions and turns ----------------------------------------------------------------------
    @rule(
        key=st.sampled_from(KEYS),
        blocks=st.sampled_from([20, 60, 150]),
        late=st.booleans(),
        returns=st.booleans(),
    )
    def converse(self, key: SessionKey, blocks: int, late: bool, returns: bool) -> None:
        """A whole turn that leaves something at decode, and perhaps the next one's begin."""
        self.begin_turn(key, ReturnPolicy.AUTO, 0, None)
        session = self.world.state.sessions.get(key)
        if session is None or not session.running():
            return
        turn = session.running()[-1]
        if late:
            self.end_turn(key, 0, TurnOutcome.COMPLETED, True)
        if self._connected("d"):
            self.world.offered(self.refs["d"], key, blocks, turn)
        if not late:
            self.end_turn(key, 0, TurnOutcome.COMPLETED, True)
        if returns:
            self.begin_turn(key, ReturnPolicy.ALWAYS, 5_000, None)

    @rule(
        key=st.sampled_from(KEYS),
        policy=st.sampled_from(ReturnPolicy),
        tokens=st.sampled_from([0, 10, 5_000]),
        idle=st.none() | st.integers(0, 10**12),
    )
    def begin_turn(
        self, key: SessionKey, policy: ReturnPolicy, tokens: int, idle: int | None
    ) -> None:
        model = self.model
        try:
            turn = self.world.begin(
                key=key, policy=policy, prompt_tokens=tokens, hints=Hints(idle, None)
            )
        except NoWorkerError:
            assert not all(self._ready(name) for name in ROLES)
            return
        assert turn.number == model.turns.get(key, 0) + 1
        assert turn.token not in model.tokens
        model.tokens.add(turn.token)
        model.turns[key] = turn.number
        model.running.setdefault(key, {})[turn.number] = self.world.now
        model.ended_ns.pop(key, None)

    def _ready(self, name: str) -> bool:
        worker = self.world.state.workers.get(name)
        return worker is not None and worker.ready

    @rule(
        key=st.sampled_from(KEYS),
        back=st.integers(0, 5),
        outcome=st.sampled_from([TurnOutcome.COMPLETED, TurnOutcome.CANCELLED, TurnOutcome.FAILED]),
        named=st.booleans(),
    )
    def end_turn(self, key: SessionKey, back: int, outcome: TurnOutcome, named: bool) -> None:
        model, world = self.model, self.world
        number = model.turns.get(key, 0) - back
        session = world.state.sessions.get(key)
        turn = session.find(number) if session is not None else None
        token = turn.token if named and turn is not None else ""
        try:
            world.do(
                world.registry.end_turn(
                    world.now, key, number, outcome, Usage(1, 2, 3, 4), Hints(5), token
                )
            )
        except NotFoundError:
            assert number <= 0 or key not in model.turns
            return
        model.running.get(key, {}).pop(number, None)

    @rule(
        key=st.sampled_from(KEYS),
        value=st.sampled_from(SessionValue),
        idle=st.integers(0, 900),
        over=st.sampled_from([True, False, False, False]),
    )
    def client(self, key: SessionKey, value: SessionValue, idle: int, over: bool) -> None:
        if over:
            self.end_session(key)
        else:
            self.update(key, value, idle)

    def update(self, key: SessionKey, value: SessionValue, idle: int) -> None:
        world = self.world
        try:
            hints = Hints(idle * SECOND, value)
            world.do(world.registry.update_session(world.now, key, hints))
        except DomainError:
            assert key not in self.model.turns or key in self.model.ended_ns

    def end_session(self, key: SessionKey) -> None:
        world, model = self.world, self.model
        try:
            world.do(world.registry.end_session(world.now, key))
        except NotFoundError:
            assert key not in model.turns
            return
        model.running.pop(key, None)
        model.ended_ns.setdefault(key, world.now)

    # -- agents ------------------------------------------------------------------------------------
    @rule(
        key=st.sampled_from(KEYS),
        leg=st.sampled_from([Leg.PREFILL, Leg.DECODE]),
        blocks=st.sampled_from([1, 30, 60, 150]),
        latest=st.booleans(),
    )
    def offer(self, key: SessionKey, leg: Leg, blocks: int, latest: bool) -> None:
        session = self.world.state.sessions.get(key)
        turn = session.turns[-1] if session is not None and session.turns else None
        ref = self.refs["p" if leg is Leg.PREFILL else "d"]
        if self._connected(ref.worker_id):
            self.world.offered(ref, key, blocks, turn if latest else None, leg=leg)

    @rule(
        key=st.sampled_from(KEYS),
        n=st.integers(0, 5),
        state=st.sampled_from([ReplicaState.SOFT, ReplicaState.GONE, ReplicaState.HARD]),
        share=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def replica_changed(self, key: SessionKey, n: int, state: ReplicaState, share: float) -> None:
        replicas = self.world.state.replicas_of_session(key)
        if replicas:
            x = replicas[n % len(replicas)]
            blocks = int(x.num_blocks * share)
            self._agent(x.worker, "replica_changed", key, x.head_hash, state, blocks, "REUSED")

    @rule(wrong=st.sampled_from(["version", "range", "nothing", "source", "refuse"]))
    def harden_wrongly(self, wrong: str) -> None:
        if wrong == "refuse":
            self.refuse()
        else:
            self.harden(wrong)

    @rule(
        reading=st.booleans(),
        renewed=st.booleans(),
        done=st.booleans(),
        outcome=st.sampled_from(TransferOutcome),
    )
    def move(self, reading: bool, renewed: bool, done: bool, outcome: TransferOutcome) -> None:
        """What was asked for is held, granted, and perhaps read, renewed and stopped."""
        self.harden("")
        for lease_id in sorted(self.model.reads):
            lease = self.world.state.leases.get(lease_id)
            ref = self.model.reads[lease_id]
            if lease is None or not self._connected(ref.worker_id):
                continue
            if reading:
                self._agent(ref, "active", lease_id)
            if renewed and lease.open and lease.stop is None:
                self.renew_one(lease, 60)
                self.extended()
        if done:
            for _ in range(len(self.model.reads)):
                self.stop(0, outcome)

    @rule(wrong=st.just(""))
    def harden(self, wrong: str) -> None:
        for ref, order in self._orders(c.Harden):
            span = order.range
            version = order.version + (wrong == "version")
            if wrong == "range":
                span = BlockRange(span.start, span.end + 1)
            if wrong == "nothing":
                span = BlockRange(span.start, span.start)
            said_by = self.refs["p" if ref.worker_id == "d" else "d"] if wrong == "source" else ref
            before = self.model.granted | set()
            self.model.holds[order.lease_id] = ref
            self._agent(
                said_by,
                "hardened",
                order.lease_id,
                version,
                Descriptors(span, order.head_hash, "ids"),
            )
            if wrong:
                assert not self._new_grants() - before
            self._take_grants()

    def refuse(self) -> None:
        for ref, order in self._orders(c.Harden):
            self._agent(ref, "refused", order.lease_id, "REPLICA_GONE")

    def _new_grants(self) -> set[str]:
        return {x.lease_id for _, x in self.world.sent if isinstance(x, c.Grant)}

    def _take_grants(self) -> None:
        """Grants reach their boots: from now on somebody may read."""
        for ref, grant in self._orders(c.Grant):
            assert grant.lease_id not in self.model.granted, "granted twice"
            assert grant.lease_id in self.model.holds, "granted before anybody held it"
            self.model.granted.add(grant.lease_id)
            self.model.reads[grant.lease_id] = ref

    @rule(n=st.integers(0, 20))
    def active(self, n: int) -> None:
        lease = self._pick(n)
        if lease is not None and lease.lease_id in self.model.reads:
            self._agent(self.model.reads[lease.lease_id], "active", lease.lease_id)

    @rule(n=st.integers(0, 20), outcome=st.sampled_from(TransferOutcome))
    def stop(self, n: int, outcome: TransferOutcome) -> None:
        """A reader has stopped, and says so if anybody hears it."""
        reads = sorted(self.model.reads)
        if not reads:
            return
        lease_id = reads[n % len(reads)]
        ref = self.model.reads[lease_id]
        if self._connected(ref.worker_id) and self.refs[ref.worker_id] == ref:
            del self.model.reads[lease_id]
            self.world.stop(ref, lease_id, outcome)

    @rule(n=st.integers(0, 20))
    def stop_by_another(self, n: int) -> None:
        """Only the reader itself can say that it has stopped."""
        lease = self._pick(n)
        if lease is not None and self._connected(lease.source.worker_id):
            self.world.stop(lease.source, lease.lease_id)

    @rule()
    def revoked(self) -> None:
        """Readers that are told to stop do so."""
        for ref, order in self._orders(c.Revoke):
            if order.lease_id and self.model.reads.get(order.lease_id) == ref:
                del self.model.reads[order.lease_id]
                self.world.stop(ref, order.lease_id, TransferOutcome.REVOKED)

    @rule(n=st.integers(0, 20))
    def source_released(self, n: int) -> None:
        """A source's own deadline: later than any reader's."""
        lease = self._pick(n)
        if lease is None or lease.lease_id not in self.model.holds:
            return
        if lease.grant_ns and self.world.now <= lease.deadline_ns:
            return
        self.model.reads.pop(lease.lease_id, None)
        del self.model.holds[lease.lease_id]
        self._agent(lease.source, "source_released", lease.lease_id, "DEADLINE")

    @rule(
        name=st.sampled_from(sorted(ROLES)),
        free=st.sampled_from([0, 60, 900]),
        held=st.sampled_from([0, 500, 900]),
        quarantined=st.sampled_from([0, 0, 200]),
    )
    def heartbeat(self, name: str, free: int, held: int, quarantined: int) -> None:
        pool = PoolStats(
            total_blocks=1_000, free_blocks=free, held_blocks=held, quarantined_blocks=quarantined
        )
        self._agent(self.refs[name], "heartbeat", Heartbeat(self.world.now, pool))

    # -- renewals --------------------------------------------------------------------------------
    @rule(n=st.integers(0, 20), ttl=st.sampled_from([1, 60, 10_000]))
    def renew(self, n: int, ttl: int) -> None:
        lease = self._pick(n)
        if lease is not None:
            self.renew_one(lease, ttl)

    def renew_one(self, lease: Lease, ttl: int) -> None:
        world = self.world
        try:
            world.do(world.registry.renew(world.now, lease.lease_id, ttl * SECOND))
        except DomainError:
            return  # it has ended, is not granted yet, or a budget is in the way

    @rule()
    def extended(self) -> None:
        for ref, order in self._orders(c.Extend):
            self._agent(ref, "extended", order.lease_id, order.version, order.is_source)

    @rule(share=st.sampled_from([0.0, 0.5]))
    def bulk(self, share: float) -> None:
        """All that is read under is asked for; the source has a part of it."""
        state = self.world.state
        seqs = [
            state.leases[x].seq
            for x, ref in self.model.reads.items()
            if ref == self.refs["p"] and x in state.leases
        ]
        self._agent(self.refs["p"], "leases_needed", state.epoch, np.array(seqs, np.uint64))
        for ref, order in self._orders(c.ExtendLeases):
            if order.is_source:
                missing = order.seqs[: int(len(order.seqs) * share)]
                self._agent(ref, "leases_extended", order.extension, missing)

    @rule(n=st.integers(0, 20))
    def revoke(self, n: int) -> None:
        lease = self._pick(n)
        if lease is not None:
            self.world.do(self.world.registry.revoke(self.world.now, lease.lease_id, "X"))

    @rule(
        name=st.sampled_from(sorted(ROLES)),
        what=st.sampled_from(
            ["none"] * 6 + ["lose", "lose", "reboot", "fence", "drain", "restart", "all reboot"]
        ),
        back=st.sampled_from([True, True, False]),
    )
    def trouble(self, name: str, what: str, back: bool) -> None:
        if what == "none":
            return
        if what == "restart":
            self.restart(lost=not back)
        elif what == "all reboot":
            self.restart(lost=True)
            self.another_boot(name)
        elif what == "drain":
            self.drain(name, undo=False)
        elif what == "fence":
            self.fence(name)
        else:
            self.lose(name)
            if what == "reboot":
                self.another_boot(name)
        if back and what != "drain":
            self.come_back(False)

    # -- boots and streams -----------------------------------------------------------------------
    def lose(self, name: str) -> None:
        if self._connected(name):
            self.world.lose(self.refs[name])
            # What was under way is lost with the stream.
            self.world.sent = [x for x in self.world.sent if x[0].worker_id != name]

    @rule(forget=st.booleans())
    def come_back(self, forget: bool) -> None:
        """All that are lost; a fenced one with another boot."""
        for name in ROLES:
            if self._fenced(name):
                self.another_boot(name)
            elif not self._connected(name):
                self._hello(name, forget=forget)
            self.drain(name, undo=True)

    def _fenced(self, name: str) -> bool:
        worker = self.world.state.workers.get(name)
        return worker is not None and worker.state is WorkerState.FENCED

    def another_boot(self, name: str) -> None:
        """The process died, or so it seems: the old boot may read on."""
        if not self._connected(name):
            old = self.refs[name]
            self.model.holds = {x: r for x, r in self.model.holds.items() if r != old}
            self.boots[name] += "+"
            self._hello(name, forget=False)

    def fence(self, name: str) -> None:
        world, ref = self.world, self.refs[name]
        if name not in world.state.workers:
            return
        world.do(world.registry.fence(world.now, ref, "seen dead"))
        self.model.reads = {x: r for x, r in self.model.reads.items() if r != ref}
        self.model.holds = {x: r for x, r in self.model.holds.items() if r != ref}

    def drain(self, name: str, undo: bool) -> None:
        if not self._fenced(name):
            self.world.do(self.world.registry.drain(self.world.now, name, undo))

    # -- time and restarts -----------------------------------------------------------------------
    @rule(seconds=st.sampled_from([0.1, 0.1, 1, 1, 6, 31, 70, 250]))
    def wait(self, seconds: float) -> None:
        self.world.keep_alive(seconds)
        self._forget()

    def _forget(self) -> None:
        """What goes by itself after a time."""
        model, limits, now = self.model, self.world.limits, self.world.now
        for key, turns in model.running.items():
            session = self.world.state.sessions.get(key)
            for number, begin_ns in list(turns.items()):
                found = session.find(number) if session is not None else None
                if (found is None or not found.running) and (
                    now - begin_ns >= limits.turn_timeout_ns
                ):
                    del turns[number]  # nobody has ended it in time
        for key, ended_ns in list(model.ended_ns.items()):
            if key not in self.world.state.sessions:
                assert now - ended_ns >= limits.ended_session_kept_ns
                for book in (model.turns, model.running, model.ended_ns):
                    book.pop(key, None)

    def restart(self, lost: bool) -> None:
        """The process is killed; only the store remembers. Streams of agents are cut."""
        world = self.world
        before = dict(world.state.sessions.items())
        if self.sqlite:
            self.store.close()
            self.store = SqliteStore(self.folder / "s.db")
            world.store = self.store
        world.start()
        world.sent.clear()
        self._started()
        after = dict(world.state.sessions.items())
        assert after.keys() == before.keys()
        for key, session in after.items():
            old = before[key]
            assert (session.turn_count, session.state) == (old.turn_count, old.state)
            assert {t.token for t in session.running()} == {t.token for t in old.running()}
            assert (session.hints, session.gaps) == (old.hints, old.gaps)
        assert not any(x.state is LeaseState.PENDING for x in world.state.leases.values())
        # What need not be stored (ACTIVE, an Extend under way) is as it was before.
        self.model.leases = {}
        if not lost:
            for name in ROLES:
                if not self._fenced(name):
                    self._hello(name, forget=False)

    # -- what must be so -------------------------------------------------------------------------
    @precondition(lambda self: self.town is not None)
    @invariant()
    def sources_are_let_go_only_when_nobody_reads(self) -> None:
        self._take_grants()
        for ref, order in self._orders(c.ReaderStopped):
            assert order.lease_id not in self.model.reads, "a source is let go while somebody reads"
            if self.model.holds.get(order.lease_id) == ref:
                del self.model.holds[order.lease_id]

    @precondition(lambda self: self.town is not None)
    @invariant()
    def leases_take_the_steps_of_their_table(self) -> None:
        seen = {lease.lease_id: lease for lease in self.world.state.leases.values()}
        limits, now = self.world.limits, self.world.now
        for lease_id, lease in seen.items():
            before = self.model.leases.get(lease_id)
            if before is None:
                assert lease.version >= 1
                continue
            assert lease.version >= before.version or not lease.open
            if lease.state is not before.state:
                assert lease.state in _reachable(before.state), (before.state, lease.state)
            assert lease.deadline_ns >= before.deadline_ns or not lease.open
            life_ns = limits.lease_lifetime_max_ns + limits.lease_ttl_ns
            if lease.open and lease.deadline_ns > max(
                before.deadline_ns, now + limits.lease_ttl_ns
            ):
                assert lease.deadline_ns <= lease.create_ns + life_ns
        self.model.leases = seen

    @precondition(lambda self: self.town is not None)
    @invariant()
    def sessions_are_as_the_model_has_them(self) -> None:
        self._forget()
        sessions = self.world.state.sessions
        assert set(sessions) == set(self.model.turns)
        for key, count in self.model.turns.items():
            session = sessions[key]
            assert session.turn_count == count
            assert session.active == (key not in self.model.ended_ns)
            running = {turn.number for turn in session.running()}
            assert running == set(self.model.running.get(key, ()))

    @precondition(lambda self: self.town is not None)
    @invariant()
    def counts_are_what_is_there(self) -> None:
        world = self.world
        world.check()
        state, limits = world.state, world.limits
        # One that is being stopped goes on beside the one that takes its place.
        eager = [x for x in state.leases.values() if x.open and x.eager and x.stop is None]
        assert len({x.key for x in eager}) == len(eager), "two eager leases of a session"
        assert {(x.key, x.lease_id) for x in eager} <= set(state.eager_of.items())
        for lease in state.leases.values():
            # Of an ended turn nothing goes on that nobody has been told to stop.
            if lease.open and not lease.eager and lease.stop is None:
                assert lease.turn_token in state.turns, "a lease outlives its turn"
        for name, waiting in state.eager_waiting.items():
            assert len(waiting) <= limits.eager_waiting_per_worker
            assert state.eager_on[name] >= 0
        for key in state.sessions:
            here = [r.worker.worker_id for r in state.replicas_of_session(key)]
            assert all(here.count(x) <= limits.replicas_per_session for x in here)

    @precondition(lambda self: self.town is not None)
    @invariant()
    def the_store_has_what_must_survive(self) -> None:
        snapshot, state = self.store.load(), self.world.state
        assert (snapshot.epoch, snapshot.last_incarnation) == (
            state.epoch,
            state.last_incarnation,
        )
        stored = {session.key: session for session in snapshot.sessions}
        assert stored.keys() == set(state.sessions)
        for key, session in stored.items():
            now = state.sessions[key]
            assert (session.turns, session.hints, session.requests) == (
                now.turns,
                now.hints,
                now.requests,
            )
        leases = {lease.lease_id: lease for lease in snapshot.leases}
        assert leases.keys() == set(state.leases)
        for lease_id, lease in leases.items():
            now_ = state.leases[lease_id]
            # ACTIVE, and an extension among many, need not survive.
            assert lease.open == now_.open
            assert (lease.reader_stopped, lease.stop) == (now_.reader_stopped, now_.stop)
            if not lease.open:
                assert (lease.state, lease.end_reason) == (now_.state, now_.end_reason)


def _reachable(state: LeaseState) -> set[LeaseState]:
    """By any number of steps: a rule may take several."""
    found: set[LeaseState] = set()
    todo = [state]
    while todo:
        for after in TRANSITIONS[todo.pop()]:
            if after not in found:
                found.add(after)
                todo.append(after)
    return found


class SqliteMachine(RegistryMachine):
    """The same, on disk."""

    sqlite = True


# Walks of a busy cluster, where hypothesis looks for the smallest that breaks something: how often
# each rule is taken, and with what.
WALK: list[tuple[int, str, dict[str, list[Any]]]] = [
    (
        8,
        "converse",
        {"key": KEYS, "blocks": [20, 60, 90], "late": [True, False], "returns": [True, False]},
    ),
    (
        10,
        "move",
        {
            "reading": [True, False],
            "renewed": [True, False],
            "done": [True, False],
            "outcome": list(TransferOutcome),
        },
    ),
    (
        3,
        "begin_turn",
        {"key": KEYS, "policy": list(ReturnPolicy), "tokens": [0, 10, 5_000], "idle": [None, 5]},
    ),
    (
        4,
        "end_turn",
        {
            "key": KEYS,
            "back": [0, 0, 1, 3],
            "outcome": [TurnOutcome.COMPLETED, TurnOutcome.CANCELLED],
            "named": [True, False],
        },
    ),
    (
        2,
        "client",
        {
            "key": KEYS,
            "value": list(SessionValue),
            "idle": [0, 60, 900],
            "over": [True, False, False],
        },
    ),
    (
        2,
        "offer",
        {
            "key": KEYS,
            "leg": [Leg.PREFILL, Leg.DECODE],
            "blocks": [1, 30, 150],
            "latest": [True, False],
        },
    ),
    (
        2,
        "replica_changed",
        {
            "key": KEYS,
            "n": [0, 1, 2],
            "state": [ReplicaState.SOFT, ReplicaState.GONE, ReplicaState.HARD],
            "share": [0.0, 0.5, 1.0],
        },
    ),
    (1, "harden_wrongly", {"wrong": ["version", "range", "nothing", "source", "refuse"]}),
    (2, "stop", {"n": list(range(9)), "outcome": list(TransferOutcome)}),
    (1, "stop_by_another", {"n": list(range(9))}),
    (2, "revoked", {}),
    (1, "source_released", {"n": list(range(9))}),
    (
        2,
        "heartbeat",
        {"name": ["p", "d"], "free": [0, 60, 900], "held": [0, 900], "quarantined": [0, 0, 200]},
    ),
    (1, "extended", {}),
    (3, "bulk", {"share": [0.0, 0.5]}),
    (1, "revoke", {"n": list(range(9))}),
    (
        2,
        "trouble",
        {
            "name": ["p", "d"],
            "what": ["lose", "lose", "reboot", "fence", "drain", "restart", "all reboot"],
            "back": [True, True, False],
        },
    ),
    (2, "come_back", {"forget": [True, False]}),
    (4, "wait", {"seconds": [0.1, 0.1, 1, 6, 31, 70, 250]}),
]
INVARIANTS = (
    "sources_are_let_go_only_when_nobody_reads",
    "leases_take_the_steps_of_their_table",
    "sessions_are_as_the_model_has_them",
    "counts_are_what_is_there",
    "the_store_has_what_must_survive",
)


def walk(machine: RegistryMachine, seed: int, steps: int) -> set[tuple[LeaseState, str]]:
    """Random steps; returns how leases ended."""
    luck = random.Random(seed)
    weights = [weight for weight, _, _ in WALK]
    ends: set[tuple[LeaseState, str]] = set()
    taken: list[str] = []
    try:
        machine.begin(eager=luck.random() < 0.5)
        for _ in range(steps):
            ((_, name, choices),) = luck.choices(WALK, weights)
            given = {argument: luck.choice(values) for argument, values in choices.items()}
            taken.append(f"{name}({given})")
            getattr(machine, name)(**given)
            for each in INVARIANTS:
                getattr(machine, each)()
            ends |= {(x.state, x.end_reason) for x in machine.model.leases.values() if not x.open}
    except Exception as error:
        error.add_note(f"seed {seed}, after: " + "\n".join(taken[-30:]))
        raise
    finally:
        machine.teardown()
    return ends


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_walks_over_memory(first: int) -> None:
    ends: set[tuple[LeaseState, str]] = set()
    for seed in range(first, first + 20):
        ends |= walk(RegistryMachine(), seed, 150)
    # Not shallow: most ways to an end were taken.
    assert {state for state, _ in ends} == {
        LeaseState.COMPLETED,
        LeaseState.FAILED,
        LeaseState.EXPIRED,
        LeaseState.REVOKED,
    }
    assert len(ends) > 15, ends


def test_walks_over_sqlite() -> None:
    for seed in range(1_000, 1_004):
        walk(SqliteMachine(), seed, 100)


def test_over_memory() -> None:
    run_state_machine_as_test(
        RegistryMachine,
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
        ),
    )


def test_over_sqlite() -> None:
    run_state_machine_as_test(
        SqliteMachine,
        settings=settings(
            max_examples=8, stateful_step_count=30, deadline=None, suppress_health_check=CHECKS
        ),
    )
