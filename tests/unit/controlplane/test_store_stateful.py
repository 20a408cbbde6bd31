"""Both stores against a model of two lines a table, whatever is written in whatever order."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from kvshuttle.controlplane.model.effects import (
    DropLease,
    DropSession,
    DropWorker,
    PutLease,
    PutSession,
    PutTerm,
    PutWorker,
    Record,
)
from kvshuttle.controlplane.model.lease import Lease, Renewal, Stop
from kvshuttle.controlplane.model.session import Placement, Plan, Session, Turn, Usage
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    Hints,
    LeaseState,
    ReturnMode,
    SessionKey,
    SessionState,
    SessionValue,
    TransferStats,
    TurnOutcome,
    TurnState,
    WorkerRef,
    WorkerRole,
    WorkerState,
)
from kvshuttle.controlplane.model.worker import Worker
from kvshuttle.controlplane.store import MemoryStore, SqliteStore
from kvshuttle.controlplane.store.memory import at_rest

# -- anything that can be written -----------------------------------------------------------------

TIMES = st.integers(0, 1 << 62)
COUNTS = st.integers(0, 1 << 31)
WORDS = st.text(max_size=12)
NAMES = st.sampled_from(["", "x", "é\"'\0", "名前", "a" * 256])
KEYS = st.builds(SessionKey, st.sampled_from(["t", "u"]), NAMES)
REFS = st.builds(WorkerRef, st.sampled_from(["p", "d", "é"]), st.integers(0, 3))
PLACES = st.builds(Placement, REFS, WORDS)
REQUESTS = st.lists(WORDS, max_size=3).map(tuple)
TURNS = st.builds(
    Turn,
    number=st.integers(1, 99),
    token=WORDS,
    decode=PLACES,
    plan=st.builds(Plan, st.sampled_from(ReturnMode), WORDS, COUNTS, TIMES, TIMES),
    begin_ns=TIMES,
    retention_ns=TIMES,
    prefill=st.none() | PLACES,
    state=st.sampled_from(TurnState),
    outcome=st.sampled_from(TurnOutcome),
    end_ns=TIMES,
    usage=st.none() | st.builds(Usage, COUNTS, COUNTS, COUNTS, TIMES),
    request_id=WORDS,
)
SESSIONS = st.builds(
    Session,
    key=KEYS,
    create_ns=TIMES,
    update_ns=TIMES,
    state=st.sampled_from(SessionState),
    turn_count=COUNTS,
    turns=st.lists(TURNS, max_size=3).map(tuple),
    hints=st.builds(Hints, st.none() | TIMES, st.none() | st.sampled_from(SessionValue)),
    last_prefill=WORDS,
    version=TIMES,
    requests=REQUESTS,
    gaps=st.binary(max_size=18),
    hint_ns=TIMES,
)
RANGES = st.builds(BlockRange, COUNTS, COUNTS)
LEASES = st.builds(
    Lease,
    lease_id=st.sampled_from(["l-1-1", "l-1-2", "l-2-1", "é"]),
    seq=COUNTS,
    key=KEYS,
    turn=COUNTS,
    turn_token=WORDS,
    direction=st.sampled_from(Direction),
    source=REFS,
    destination=REFS,
    epoch=COUNTS,
    ttl_ns=TIMES,
    create_ns=TIMES,
    ask_head=st.binary(max_size=32),
    ask_range=RANGES,
    state=st.sampled_from(LeaseState),
    version=COUNTS,
    range=st.none() | RANGES,
    head_hash=st.binary(max_size=32),
    grant_ns=TIMES,
    deadline_ns=TIMES,
    end_ns=TIMES,
    end_reason=WORDS,
    stats=st.none() | st.builds(TransferStats, COUNTS, COUNTS, COUNTS, TIMES, TIMES),
    stop=st.none() | st.builds(Stop, st.sampled_from(LeaseState), WORDS),
    reader_stopped=st.booleans(),
    renewal=st.none() | st.builds(Renewal, TIMES, TIMES, COUNTS, st.booleans()),
    requests=REQUESTS,
    push=st.booleans(),
    source_key=st.none() | KEYS,
)
WORKERS = st.builds(
    Worker,
    ref=REFS,
    boot_id=WORDS,
    role=st.sampled_from(WorkerRole),
    url=WORDS,
    state=st.sampled_from(WorkerState),
    register_ns=TIMES,
    heard_ns=TIMES,
    draining=st.booleans(),
    stream_generation=COUNTS,
    fingerprint=st.just((("model", "m"),)),
    block_size=COUNTS,
    num_blocks=COUNTS,
    clock=TIMES,
    vllm_version=WORDS,
    agent_version=WORDS,
    end_ns=TIMES,
    requests=REQUESTS,
    fenced_boots=REQUESTS,
)
RECORDS: st.SearchStrategy[Record] = st.one_of(
    SESSIONS.map(PutSession),
    SESSIONS.map(PutSession),
    LEASES.map(PutLease),
    LEASES.map(PutLease),
    WORKERS.map(PutWorker),
    st.builds(PutTerm, COUNTS, NAMES, TIMES, TIMES),
    KEYS.map(DropSession),
    st.sampled_from(["l-1-1", "l-1-2", "never"]).map(DropLease),
    REFS.map(DropWorker),
)


class Model:
    """What a store is to remember."""

    def __init__(self) -> None:
        self.term = PutTerm(0, "", 0, 0)
        self.sessions: dict[SessionKey, Session] = {}
        self.leases: dict[str, Lease] = {}
        self.workers: dict[str, Worker] = {}

    def write(self, record: Record) -> None:
        match record:
            case PutTerm():
                self.term = record
            case PutSession(session):
                self.sessions[session.key] = session
            case DropSession(key):
                self.sessions.pop(key, None)
            case PutLease(lease):
                self.leases[lease.lease_id] = replace(lease, renewal=None)
            case DropLease(lease_id):
                self.leases.pop(lease_id, None)
            case PutWorker(worker):
                self.workers[worker.ref.worker_id] = at_rest(worker)
            case DropWorker(ref):
                known = self.workers.get(ref.worker_id)
                if known is not None and known.ref == ref:
                    del self.workers[ref.worker_id]

    def check(self, found: Snapshot) -> None:
        term = PutTerm(found.epoch, found.lineage_id, found.last_incarnation, found.time_ns)
        assert term == self.term
        assert {x.key: x for x in found.sessions} == self.sessions
        assert {x.lease_id: x for x in found.leases} == self.leases
        assert {x.ref.worker_id: x for x in found.workers} == self.workers
        assert len(list(found.sessions)) == len(self.sessions)
        assert len(list(found.leases)) == len(self.leases)


class StoreMachine(RuleBasedStateMachine):
    """Commits, failures, ends of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvshuttle-store-"))
        self.model = Model()
        self.memory = MemoryStore()
        self.file: Any = SqliteStore(self.folder / "s.db")
        self.file.load()
        self.copies = 0

    def teardown(self) -> None:
        self.file.close()
        shutil.rmtree(self.folder)

    @rule(records=st.lists(RECORDS, max_size=6))
    def commit(self, records: list[Record]) -> None:
        self.memory.commit(records)
        self.file.commit(records)
        for record in records:
            self.model.write(record)

    @rule(records=st.lists(RECORDS, min_size=1, max_size=6))
    def fail(self, records: list[Record]) -> None:
        """What was to be written breaks off: none of it is there."""

        def broken() -> Iterator[Record]:
            yield from records
            raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError):
            self.file.commit(broken())

    @rule()
    def reopen(self) -> None:
        self.file.close()
        self.file = SqliteStore(self.folder / "s.db")

    @rule()
    def killed(self) -> None:
        """Another process finds what this one has committed, though it closed nothing."""
        self.copies += 1
        copy = self.folder / f"copy{self.copies}"
        copy.mkdir()
        for name in ("s.db", "s.db-wal"):
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, copy / name)
        store = SqliteStore(copy / "s.db")
        self.model.check(store.load())
        store.close()

    @invariant()
    def both_remember(self) -> None:
        self.model.check(self.memory.load())
        self.model.check(self.file.load())


def test_stores_remember_what_the_model_does() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
