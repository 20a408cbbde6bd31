"""The compact tables are what plain dicts of objects would be, however few objects they keep."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvshuttle.controlplane.model.agenda import Agenda, Due
from kvshuttle.controlplane.model.bundles import ROWS
from kvshuttle.controlplane.model.lease import Lease, Stop
from kvshuttle.controlplane.model.lease_table import LeaseTable
from kvshuttle.controlplane.model.packed import PackedLeases, PackedSessions
from kvshuttle.controlplane.model.replica import Replica
from kvshuttle.controlplane.model.session import Placement, Plan, Session, Turn, Usage
from kvshuttle.controlplane.model.session_table import ReplicaTable, SessionTable
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Direction,
    Hints,
    LeaseState,
    ReplicaState,
    ReturnMode,
    SessionKey,
    SessionState,
    SessionValue,
    TransferStats,
    TurnOutcome,
    TurnState,
    WorkerRef,
)

SECOND = 1_000_000_000
HOT = pytest.mark.parametrize("hot", [0, 1, 3, 1_000])


def session(key: SessionKey, rng: random.Random) -> Session:
    ended = rng.random() < 0.3
    turn = Turn(
        number=1,
        token=f"token-{rng.random()}",
        decode=Placement(WorkerRef("d", 3), "http://d"),
        plan=Plan(ReturnMode.LAZY, "CHEAPER_TO_MOVE", rng.randrange(1 << 40), 5, 6),
        begin_ns=rng.randrange(1 << 62),
        retention_ns=300 * SECOND,
        prefill=Placement(WorkerRef("p", 4), "http://p") if rng.random() < 0.5 else None,
        state=TurnState.ENDED,
        outcome=TurnOutcome.FAILED,
        usage=Usage(1, 2, 3, 4),
        request_id="request",
    )
    return Session(
        key,
        rng.randrange(1 << 62),
        rng.randrange(1 << 62),
        SessionState.ENDED if ended else SessionState.ACTIVE,
        turn_count=rng.randrange(9),
        turns=(turn,) * rng.randrange(3),
        hints=Hints(rng.randrange(99), SessionValue.HIGH) if rng.random() < 0.5 else Hints(),
        version=rng.randrange(1 << 60),
    )


def replica(rng: random.Random) -> Replica:
    return Replica(
        WorkerRef(f"w{rng.randrange(3)}", 1),
        bytes([rng.randrange(3)]) * 32,
        rng.randrange(1, 9),
        99,
        ReplicaState.HARD,
        rng.randrange(1 << 62),
    )


@HOT
@pytest.mark.parametrize("seed", range(5))
def test_sessions_and_replicas(hot: int, seed: int) -> None:
    rng = random.Random(seed)
    # Enough of them to fill bundles, and to leave them half empty.
    keys = [SessionKey(f"t{i % 3}", f"s{i}") for i in range(4 * ROWS)]
    table, plain = SessionTable(hot), {}
    replicas = ReplicaTable(table)
    held: dict[SessionKey, dict[tuple[str, bytes], Replica]] = {}
    for _ in range(2_500):
        key = SessionKey(*rng.choice(keys))
        match rng.randrange(6):
            case 0 | 1:
                plain[key] = table[key] = session(key, rng)
            case 2:
                assert table.get(key) == plain.get(key)
            case 3 if key in plain:
                for name in list(held.pop(key, ())):
                    replicas.drop(key, name)
                assert table.pop(key) == plain.pop(key)
            case 4 if key in plain:
                one = replica(rng)
                assert replicas.put(key, one) == held.setdefault(key, {}).get(one.name)
                held[key][one.name] = one
            case 5 if held.get(key):
                name = rng.choice(list(held[key]))
                assert replicas.drop(key, name) == held[key].pop(name)
                if not held[key]:
                    del held[key]
        assert table.active(key) is (key in plain and plain[key].active)
    assert dict(table.items()) == plain
    assert [key for key in keys if table.active(key)] == [
        key for key in keys if key in plain and plain[key].active
    ]
    assert list(table.values()) == [table[key] for key in table]
    assert {key: replicas[key] for key in replicas} == held
    for worker in ("w0", "w1", "w2"):
        counts = {
            key: n for key, found in held.items() if (n := sum(name[0] == worker for name in found))
        }
        assert replicas.of_worker.get(worker, {}) == counts
        assert replicas.count_of[worker] == sum(counts.values())
    floor = SessionKey("t1", "s1")
    assert list(table.after(floor)) == sorted(key for key in plain if key > floor)


def test_packed_sessions_are_taken_up() -> None:
    rng = random.Random(3)
    known = [session(SessionKey("t", f"s{i}"), rng) for i in range(5 * ROWS // 2)]
    table = SessionTable(hot=4)
    packed = PackedSessions(known)
    assert packed == known
    assert packed.latest_ns() == max(x.update_ns for x in known)
    table.load(packed)
    assert list(table.values()) == known
    assert [table[x.key] for x in known] == known
    assert list(table.after(SessionKey("t", ""))) == sorted(x.key for x in known)


def test_all_indexes_share_one_key() -> None:
    table = SessionTable(hot=0)
    first = SessionKey("t", "s")
    table[first] = session(first, random.Random(1))
    again = SessionKey("t", "s")
    assert table.own(again) is first
    table[again] = session(again, random.Random(2))
    assert table.own(again) is first


def lease(epoch: int, seq: int, state: LeaseState, rng: random.Random) -> Lease:
    granted = state is not LeaseState.PENDING
    return Lease(
        f"l-{epoch}-{seq}",
        seq,
        SessionKey("t", "s"),
        1,
        "token",
        Direction.RETURN,
        WorkerRef(f"w{rng.randrange(3)}", rng.randrange(2)),
        WorkerRef(f"w{rng.randrange(3)}", 1),
        epoch,
        30 * SECOND,
        rng.randrange(1 << 60),
        b"h" * 32,
        BlockRange(0, 5),
        state,
        grant_ns=5 if granted else 0,
        deadline_ns=rng.randrange(1, 1_000) if granted else 0,
        stats=TransferStats(1, 2, 3, 4, 5) if rng.random() < 0.3 else None,
        stop=Stop(LeaseState.REVOKED, "X") if granted and rng.random() < 0.3 else None,
        range=BlockRange(0, 5) if granted else None,
    )


@HOT
@pytest.mark.parametrize("seed", range(5))
def test_leases(hot: int, seed: int) -> None:
    rng = random.Random(seed)
    table = LeaseTable(hot)
    plain: dict[str, Lease] = {}
    numbers = {1: itertools.count(1), 2: itertools.count(5_000_000_000)}
    for step in range(3_000):
        match rng.randrange(5):
            case 0:
                epoch = rng.choice((1, 2))
                seq = next(numbers[epoch]) if rng.random() < 0.9 else 0
                if seq:
                    one = lease(epoch, seq, rng.choice(list(LeaseState)[:3]), rng)
                    plain[one.lease_id] = table[one.lease_id] = one
            case 1 if plain:
                one = plain[rng.choice(list(plain))]
                if one.open and one.state is not LeaseState.PENDING:
                    one = replace(one, state=LeaseState.COMPLETED, end_ns=7)
                elif one.open:
                    one = replace(one, state=LeaseState.GRANTED, grant_ns=9, deadline_ns=step)
                plain[one.lease_id] = table[one.lease_id] = one
            case 2 if plain:
                lease_id = rng.choice(list(plain))
                assert table[lease_id] == plain[lease_id]
            case 3 if plain and rng.random() < 0.5:
                lease_id = rng.choice(list(plain))
                assert table.pop(lease_id) == plain.pop(lease_id)
    assert dict(table.items()) == plain
    assert list(table.newest()) == list(reversed(plain.values()))
    still = {i for i, x in plain.items() if x.open}
    assert set(table.open_ids()) == still
    assert table.open_count == len(still)
    assert set(table.ended) == set(plain) - still
    refs = {WorkerRef("w1", 0), WorkerRef("w1", 1)}
    assert table.boots_of("w1") <= refs
    assert set(table.open_of(table.boots_of("w1"))) == {
        i for i in still if plain[i].source in refs or plain[i].destination in refs
    }
    for state, count in table.count_by_state().items():
        assert count == sum(plain[i].state is state for i in still)
    for epoch in (1, 2):
        seqs = np.array([x.seq for x in plain.values() if x.epoch == epoch], np.uint64)
        found = table.slots(epoch, np.append(seqs, np.uint64(77_777_777_777)))
        mine = sorted(x.seq for x in plain.values() if x.epoch == epoch and x.open)
        assert sorted(int(table.seq[slot]) for slot in found) == mine
    due: list[str] = []
    for now in (100, 500, 1_000, 3_000):
        want = {i for i in still if plain[i].deadline_ns and plain[i].deadline_ns <= now}
        while found_now := table.due(now, 7):
            assert len(found_now) <= 7
            for lease_id in found_now:
                due.append(lease_id)
                table[lease_id] = replace(table[lease_id], state=LeaseState.EXPIRED)
        assert set(due) == want
        assert not table.behind(now)
    assert [plain[i].deadline_ns for i in due] == sorted(plain[i].deadline_ns for i in due)


@pytest.mark.parametrize("seed", range(8))
def test_leases_taken_up_at_once_are_those_entered_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    known = [
        lease(epoch, seq, rng.choice(list(LeaseState)), rng)
        for epoch, first in ((1, 1), (7, 5_000_000_000))
        for seq in range(first, first + rng.choice((0, 3, 700)))
    ]
    shuffled = rng.sample(known, len(known))
    packed = PackedLeases(shuffled)
    assert packed.latest_ns() == max(
        (max(x.create_ns, x.grant_ns, x.end_ns) for x in known), default=0
    )
    assert list(packed) == shuffled
    packed.sort()
    assert list(packed) == known
    at_once, plain = LeaseTable(hot=3), LeaseTable(hot=3)
    at_once.load(packed)
    for one in known:
        plain[one.lease_id] = one
    assert list(at_once.items()) == list(plain.items())
    assert list(at_once.ended) == list(plain.ended)
    assert at_once.count_by_state() == plain.count_by_state()
    assert sorted(at_once.open_ids()) == sorted(plain.open_ids())
    for worker_id in ("w0", "w1", "w2"):
        refs = at_once.boots_of(worker_id)
        assert set(at_once.open_of(refs)) == set(plain.open_of(plain.boots_of(worker_id)))
    # What comes later finds its place beside them.
    for table in (at_once, plain):
        for seq in (5_000_001_000, 5_000_001_001):
            table[f"l-7-{seq}"] = lease(7, seq, LeaseState.GRANTED, random.Random(seq))
    for now_ns in (100, 400, 2_000):
        due = at_once.due(now_ns, 10_000)
        assert due == plain.due(now_ns, 10_000)
        for lease_id in due:
            for table in (at_once, plain):
                table[lease_id] = replace(table[lease_id], state=LeaseState.EXPIRED)
        assert at_once.outdated(now_ns, 50) == plain.outdated(now_ns, 50)
    for epoch in (1, 7):
        seqs = np.array([x.seq for x in known if x.epoch == epoch], np.uint64)
        assert sorted(at_once.seq[at_once.slots(epoch, seqs)]) == sorted(
            plain.seq[plain.slots(epoch, seqs)]
        )


def test_a_lease_that_is_extended_while_a_burst_is_worked_off_is_not_due() -> None:
    table = LeaseTable(10)
    leases = [lease(n, 1, LeaseState.GRANTED, random.Random(n)) for n in range(1, 6)]
    for n, one in enumerate(leases):
        table[one.lease_id] = replace(one, deadline_ns=100 + n)
    assert table.due(200, 2) == [leases[0].lease_id, leases[1].lease_id]
    for one in leases[:2]:
        table[one.lease_id] = replace(table[one.lease_id], state=LeaseState.EXPIRED)
    table.extend(table.slots(3, np.array([1], np.uint64)), 900)
    # One that is made meanwhile gets a free place, and is not due either.
    fresh = lease(9, 1, LeaseState.GRANTED, random.Random(9))
    table[fresh.lease_id] = replace(fresh, deadline_ns=800)
    assert table.behind(200)
    assert table.due(200, 9) == [leases[3].lease_id, leases[4].lease_id]
    for one in leases[3:]:
        table[one.lease_id] = replace(table[one.lease_id], state=LeaseState.EXPIRED)
    assert not table.behind(799)
    assert table.due(800, 9) == [fresh.lease_id]
    table[fresh.lease_id] = replace(table[fresh.lease_id], state=LeaseState.EXPIRED)
    assert table.due(899, 9) == []
    assert table.due(900, 9) == [leases[2].lease_id]


def test_a_lease_that_is_read_by_another_string_keeps_its_own() -> None:
    table = LeaseTable(hot=0)
    known = [lease(1, n, LeaseState.GRANTED, random.Random(n)) for n in range(1, 100)]
    for one in known:
        table[one.lease_id] = one
    for one in known:
        again = "".join(one.lease_id)
        assert again is not one.lease_id
        # The first look unpacks it, the second finds what the first has packed again.
        for _ in range(2):
            assert table[again].lease_id is one.lease_id


def test_a_deadline_that_was_extended_among_many_is_the_leases() -> None:
    for hot in (0, 10):
        table = LeaseTable(hot)
        one = lease(1, 1, LeaseState.GRANTED, random.Random(1))
        table[one.lease_id] = one
        (slot,) = table.slots(1, np.array([1], np.uint64))
        table.extend(np.array([slot]), 5_000)
        assert table[one.lease_id].deadline_ns == 5_000
        assert table[one.lease_id].ttl_ns == 5_000 - one.grant_ns
        assert table.due(4_999, 9) == []
        assert table.due(5_000, 9) == [one.lease_id]


@given(
    st.lists(st.integers(0, 400), max_size=40),
    st.lists(st.integers(0, 400), max_size=5),
    st.sampled_from(list(Due)),
    st.integers(0, 400),
)
def test_an_agenda_that_is_filled_at_once_is_one_that_is_filled_bit_by_bit(
    due: list[int], before: list[int], kind: Due, opened: int
) -> None:
    at_once, plain = Agenda(), Agenda()
    for agenda in (at_once, plain):
        for quarter in before:
            agenda.add(quarter * SECOND // 4, kind, f"before-{quarter}")
        agenda.pop(opened * SECOND // 4, 2)
    due_ns = np.array(due, np.int64) * (SECOND // 4)
    at_once.add_all(due_ns, kind, list(range(len(due))))
    for name, one in enumerate(due_ns.tolist()):
        plain.add(one, kind, name)
    for now in range(0, 101, 20):
        assert len(at_once) == len(plain)
        mine, other = (agenda.pop(now * SECOND, 1_000) for agenda in (at_once, plain))
        assert sorted(map(str, mine)) == sorted(map(str, other))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 400),  # due, in quarter seconds
            st.sampled_from(list(Due)),
            st.integers(0, 40),  # how much later the next step is
            st.integers(1, 5),
        ),
        max_size=60,
    )
)
def test_the_agenda_is_a_heap(steps: list[tuple[int, Due, int, int]]) -> None:
    agenda = Agenda()
    pending: dict[int, int] = {}
    now = 0
    for name, (due, kind, later, at_most) in enumerate(steps):
        agenda.add(due * SECOND // 4, kind, name)
        pending[name] = due * SECOND // 4
        now += later * SECOND // 4
        got = agenda.pop(now, at_most)
        # Of equal deadlines any may come first.
        names = [x for _, x in got if isinstance(x, int)]
        due_now = sorted(x for x in pending.values() if x <= now)
        assert [pending[x] for x in names] == due_now[:at_most]
        assert [steps[x][1] for x in names] == [kind for kind, _ in got]
        for x in names:
            del pending[x]
        assert len(agenda) == len(pending)
        assert agenda.behind(now) is (len(due_now) > at_most)
