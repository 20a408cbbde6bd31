"""Watches: whoever applies what a watch says has what a list would return, whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshuttle.controlplane.model import commands as c
from kvshuttle.controlplane.model.effects import (
    Effects,
    LeaseChange,
    LeaseDropped,
    SessionChange,
    SessionDropped,
)
from kvshuttle.controlplane.model.errors import (
    BudgetExceededError,
    InvalidFieldError,
    WatchCompactedError,
)
from kvshuttle.controlplane.model.limits import MS, SECOND, Limits
from kvshuttle.controlplane.model.session import Session
from kvshuttle.controlplane.model.state import REVISIONS_PER_EPOCH
from kvshuttle.controlplane.model.terms import (
    ReplicaState,
    ReturnPolicy,
    SessionKey,
    TransferOutcome,
    TurnOutcome,
    WorkerRole,
)
from kvshuttle.controlplane.services.watch import (
    Changed,
    Hub,
    Hubs,
    Piece,
    Progress,
    token,
)
from kvshuttle.controlplane.services.watch_sources import Leases, Sessions, Wish
from tests.unit.controlplane.world import World

# -- a hub alone ---------------------------------------------------------------------------------


def change(revision: int, name: str = "") -> SessionChange:
    key = SessionKey("t", name or f"s{revision}")
    return SessionChange(revision, Session(key, 0, 0, version=revision), ())


class Watched:
    """A hub whose source is a dict that a test fills; `decided` is ahead of `publish`."""

    def __init__(self, **limits: Any) -> None:
        self.limits = dataclasses.replace(Limits(), watch_progress_ns=20 * MS, **limits)
        self.hub: Hub[SessionChange | SessionDropped] = Hub(self.limits, 0)
        self.revision = 0
        self.state: dict[Any, SessionChange] = {}
        self.unpublished: list[SessionChange | SessionDropped] = []

    def decide(self, name: str = "") -> None:
        self.revision += 1
        item = change(self.revision, name)
        self.state[item.key] = item
        self.unpublished.append(item)

    def drop(self, name: str) -> None:
        self.revision += 1
        key = SessionKey("t", name)
        del self.state[key]
        self.unpublished.append(SessionDropped(self.revision, key))

    def publish(self, count: int = 0) -> None:
        for _ in range(count):
            self.decide()
        for item in self.unpublished:
            self.hub.publish(item)
        self.unpublished = []

    async def settled(self) -> None:
        self.publish()

    def names(self, wish: Wish) -> list[Any]:
        return list(self.state)

    def read(self, name: Any, wish: Wish) -> SessionChange | None:
        return self.state.get(name)

    def watch(self, resume: str = "", wish: Wish | None = None) -> AsyncGenerator[Any, None]:
        return self.hub.watch(resume, wish or Wish(), self, self.settled)


async def whole(reader: AsyncGenerator[Any, None]) -> tuple[dict[Any, int], int]:
    """The next snapshot, put together: versions by name, and its revision."""
    known: dict[Any, int] = {}
    while True:
        piece = await anext(reader)
        if not isinstance(piece, Piece):
            continue
        if piece.first:
            known = {}
        for item in piece.items:
            if isinstance(item, SessionDropped):
                known.pop(item.key, None)
            else:
                known[item.key] = item.session.version
        if piece.complete:
            return known, piece.revision


async def test_a_slow_reader_is_told_and_resynchronised() -> None:
    watched = Watched(watch_buffer=3)
    reader = watched.watch()
    assert (await anext(reader)).complete
    watched.publish(2)
    assert (await anext(reader)).item.revision == 1
    watched.publish(10)
    piece = await anext(reader)
    assert isinstance(piece, Piece)
    assert piece.first
    assert piece.revision == 12
    assert len(piece.items) == 12
    watched.publish(1)
    assert (await anext(reader)).item.revision == 13
    await reader.aclose()
    assert not watched.hub._readers
    assert watched.hub._count.total == 0


async def test_a_change_in_the_snapshot_is_not_told_again() -> None:
    """It was decided before the snapshot, and is durable only after it was asked for."""
    watched = Watched()
    watched.publish(1)
    watched.decide("a")
    reader = watched.watch()
    known, revision = await whole(reader)
    assert revision == 2
    assert known[SessionKey("t", "a")] == 2
    watched.publish(1)
    told = await anext(reader)
    assert isinstance(told, Changed)
    assert told.item.revision == 3
    await reader.aclose()


async def test_the_world_may_go_on_while_a_snapshot_is_sent() -> None:
    watched = Watched(snapshot_piece=2)
    for name in "abcdef":
        watched.decide(name)
    reader = watched.watch()
    first = await anext(reader)
    assert (first.first, first.complete, len(first.items)) == (True, False, 2)
    watched.decide("a")  # was sent already
    watched.decide("f")  # was not sent yet
    watched.drop("b")
    watched.drop("e")
    watched.decide("g")  # is new
    watched.publish()
    known = {item.key.session_id: item.session.version for item in first.items}
    pieces = 1
    while True:
        piece = await anext(reader)
        assert not piece.first
        assert len(piece.items) <= 2
        pieces += 1
        for item in piece.items:
            if isinstance(item, SessionDropped):
                known.pop(item.key.session_id, None)
            else:
                known[item.key.session_id] = item.session.version
        if piece.complete:
            break
    assert known == {key.session_id: item.session.version for key, item in watched.state.items()}
    assert piece.revision == watched.revision
    assert pieces > 3
    await reader.aclose()


async def test_nothing_of_a_snapshot_is_sent_before_it_is_durable() -> None:
    watched = Watched()
    watched.decide("a")
    reader = watched.watch()
    await anext(reader)
    assert not watched.unpublished
    await reader.aclose()


async def test_a_reader_too_slow_for_its_snapshot_starts_again() -> None:
    watched = Watched(snapshot_piece=2, watch_buffer=3)
    for number in range(6):
        watched.decide(f"s{number}")
    reader = watched.watch()
    assert (await anext(reader)).first
    watched.publish(10)
    piece = await anext(reader)
    assert piece.first, "the pieces of the first snapshot are void"
    known = {item.key: item.session.version for item in piece.items}
    while not piece.complete:
        piece = await anext(reader)
        known |= {item.key: item.session.version for item in piece.items}
    assert known == {key: item.session.version for key, item in watched.state.items()}
    await reader.aclose()


async def test_a_quiet_watch_says_that_it_lives() -> None:
    watched = Watched()
    watched.publish(4)
    reader = watched.watch(token(2))
    assert [(await anext(reader)).item.revision for _ in range(2)] == [3, 4]
    progress = await anext(reader)
    assert isinstance(progress, Progress)
    assert progress.revision == 4
    await reader.aclose()


@pytest.mark.parametrize("bad", ["x", "-1", "0x10", "1_0", " 1", "", "f" * 33, "١"])
async def test_what_is_no_resume_token_is_refused(bad: str) -> None:
    watched = Watched()
    watched.publish(4)
    reader = watched.watch(bad or "?")
    with pytest.raises(InvalidFieldError, match="resume_token"):
        await anext(reader)
    assert watched.hub._count.total == 0


async def test_too_old_and_never_given_tokens_are_out_of_range() -> None:
    watched = Watched(watch_history=3)
    watched.publish(10)
    for revision in (6, 11, 1 << 100):
        with pytest.raises(WatchCompactedError):
            await anext(watched.watch(token(revision)))
    reader = watched.watch(token(7))
    assert (await anext(reader)).item.revision == 8
    await reader.aclose()


async def test_watches_are_bounded_and_a_tenant_has_its_part() -> None:
    watched = Watched(watches_max=3, watches_per_tenant=2)
    mine = [watched.watch(wish=Wish("t")) for _ in range(2)]
    for reader in mine:
        await anext(reader)
    with pytest.raises(BudgetExceededError, match="tenant t has 2 watches"):
        await anext(watched.watch(wish=Wish("t")))
    other = watched.watch(wish=Wish("u"))
    await anext(other)
    with pytest.raises(BudgetExceededError, match="the server has 3"):
        await anext(watched.watch(wish=Wish("v")))
    await mine[0].aclose()
    again = watched.watch(wish=Wish("v"))
    await anext(again)
    for reader in (mine[1], other, again):
        await reader.aclose()
    assert not watched.hub._readers


# -- the whole, under whatever happens -----------------------------------------------------------

WISHES = [Wish(), Wish("t0"), Wish("t1", "s1"), Wish(None, "s0")]


class Mirror:
    """A reader that keeps what it is told, and checks that it is told every change once."""

    def __init__(self, town: Town, kind: str, wish: Wish) -> None:
        self.town, self.kind, self.wish = town, kind, wish
        self.known: dict[Any, Any] = {}
        self.token = ""
        self.cut: int | None = None
        self.stream: AsyncGenerator[Any, None] | None = None

    def connect(self, resume: bool) -> None:
        hub: Any = getattr(self.town.hubs, self.kind)
        source: Any = getattr(self.town, self.kind)
        given = self.token if resume else ""
        if not given:
            self.cut, self.token = None, ""
        self.stream = hub.watch(given, self.wish, source, self.town.settled)

    async def close(self) -> None:
        if self.stream is not None:
            await self.stream.aclose()
        self.stream = None

    async def read(self) -> bool:
        """One message; whether there was more than progress."""
        assert self.stream is not None
        try:
            event = await anext(self.stream)
        except WatchCompactedError:
            self.connect(resume=False)
            return True
        if isinstance(event, Piece):
            if event.first:
                self.known, self.cut, self.token = {}, None, ""
            for item in event.items:
                self._apply(item)
            if event.complete:
                self.cut = event.revision
                self.token = token(event.revision)
            return True
        if isinstance(event, Progress):
            assert self.cut is not None
            assert event.revision >= self.cut
            assert not self._missed(event.revision)
            self.cut = event.revision
            self.token = token(event.revision)
            return False
        assert self.cut is not None, "a change came before its snapshot was complete"
        # The next one of those that were published, and no other.
        missed = self._missed(self.town.hubs.sessions.last)
        assert missed[0].revision == event.item.revision
        self._apply(event.item)
        self.cut = event.item.revision
        self.token = token(event.item.revision)
        return True

    def _missed(self, until: int) -> list[Any]:
        kinds: Any = (
            (SessionChange, SessionDropped)
            if self.kind == "sessions"
            else (LeaseChange, LeaseDropped)
        )
        assert self.cut is not None
        return [
            x
            for x in self.town.published
            if isinstance(x, kinds) and self.cut < x.revision <= until and self.wish.matches(x.key)
        ]

    def _apply(self, item: Any) -> None:
        assert self.wish.matches(item.key)
        if isinstance(item, SessionDropped | LeaseDropped):
            self.known.pop(item.name, None)
        elif isinstance(item, SessionChange):
            self.known[item.name] = (item.session, item.replicas)
        else:
            self.known[item.name] = item.lease

    def check(self) -> None:
        """Equal to what is there now."""
        state = self.town.state
        if self.kind == "sessions":
            assert self.known == {
                key: (state.as_shown(session), state.replicas_of_session(key))
                for key, session in state.sessions.items()
                if self.wish.matches(key)
            }
        else:
            there = {x.lease_id: x for x in state.leases.values() if self.wish.matches(x.key)}
            opened = {name: lease for name, lease in there.items() if lease.open}
            assert {n: x for n, x in self.known.items() if x.open} == opened
            # Ended ones are known if they ended under the reader's eyes.
            assert self.known.items() <= there.items()


class Town(World):
    """A registry, its hubs, and the time between a decision and its being durable."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pending: list[Effects] = []
        self.published: list[Any] = []
        super().__init__(
            dataclasses.replace(
                Limits(),
                snapshot_piece=2,
                watch_buffer=12,
                watch_history=40,
                watch_progress_ns=MS,
                ended_lease_kept_ns=5 * SECOND,
                ended_session_kept_ns=5 * SECOND,
                session_idle_ns=500 * SECOND,
            )
        )
        self.sessions = Sessions(lambda: self.state)
        self.leases = Leases(lambda: self.state)

    def start(self) -> None:
        self.pending.clear()  # what was not durable is lost
        self.hubs = Hubs(self.limits, (self.store.load().epoch + 1) * REVISIONS_PER_EPOCH)
        super().start()
        self.publish(99)
        self.refs = {
            name: self.connect(name, role)
            for name, role in (("p", WorkerRole.PREFILL), ("d", WorkerRole.DECODE))
        }

    def do(self, decision: Any) -> Any:
        self.pending.append(decision.effects)
        self.sent += decision.effects.commands
        return decision.result

    def publish(self, count: int) -> None:
        """So many decisions become durable, and known."""
        for effects in self.pending[:count]:
            self.store.commit(effects.records)
            for item in effects.changes:
                self.published.append(item)
                self.hubs.publish(item)
        del self.pending[:count]

    async def settled(self) -> None:
        self.publish(len(self.pending))
        # Before its caller goes on, more may happen.
        for _ in range(self.random.randrange(3)):
            self.step(self.random.choice(EVENTS), self.random.randrange(6))
            self.publish(self.random.randrange(2))

    def step(self, what: str, n: int) -> None:
        self.now += SECOND // 10
        key = SessionKey(f"t{n % 2}", f"s{n % 3}")
        session = self.state.sessions.get(key)
        replicas = self.state.replicas_of_session(key)
        if what == "begin":
            self.begin(key=key, policy=ReturnPolicy.ALWAYS)
        elif what == "end" and session is not None and session.running():
            number = session.running()[0].number
            self.do(self.registry.end_turn(self.now, key, number, TurnOutcome.COMPLETED))
        elif what == "end_session" and session is not None:
            self.do(self.registry.end_session(self.now, key))
        elif what == "offer":
            self.offered(key, 10 + n)
        elif what == "gone" and replicas:
            found = replicas[n % len(replicas)]
            self.agent(
                found.worker, "replica_changed", key, found.head_hash, ReplicaState.GONE, 0, "X"
            )
        elif what == "harden":
            for order in self.told(self.refs["d"], c.Harden):
                self.harden(order, self.refs["d"])
        elif what == "stop":
            for lease in [x for x in self.state.leases.values() if x.open][: 1 + n]:
                self.stop(lease.destination, lease.lease_id, TransferOutcome.UNUSED)
        elif what == "wait":
            self.keep_alive(10 * (1 + n) * (1 + n))

    def offered(self, key: SessionKey, blocks: int) -> None:
        from kvshuttle.controlplane.model.reports import ReplicaReport
        from kvshuttle.controlplane.model.terms import Leg

        report = ReplicaReport(
            key=key,
            head_hash=bytes([blocks]),
            num_blocks=blocks,
            num_tokens=blocks * 32,
            state=ReplicaState.HARD,
            hold_remaining_ns=300 * SECOND,
            leg=Leg.DECODE,
        )
        self.agent(self.refs["d"], "offered", report)


EVENTS = ["begin", "begin", "end", "end_session", "offer", "gone", "harden", "stop", "wait"]
ACTIONS = [*EVENTS, "publish", "publish", "read", "read", "read", "resume", "afresh", "restart"]


async def run(seed: int, actions: list[tuple[str, int]]) -> None:
    town = Town(seed)
    mirrors = [Mirror(town, kind, wish) for kind in ("sessions", "leases") for wish in WISHES]
    for mirror in mirrors:
        mirror.connect(resume=False)
    for what, n in actions:
        mirror = mirrors[n % len(mirrors)]
        if what == "publish":
            town.publish(1 + n)
        elif what == "read":
            await mirror.read()
        elif what in ("resume", "afresh"):
            await mirror.close()
            mirror.connect(resume=what == "resume")
        elif what == "restart":
            for each in mirrors:
                await each.close()
            town.start()
            for each in mirrors:
                each.connect(resume=True)
        else:
            town.step(what, n)
    town.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    town.publish(len(town.pending))
    for mirror in mirrors:
        while await mirror.read():
            pass
        mirror.check()
        await mirror.close()
    assert not town.hubs.sessions._readers
    assert not town.hubs.leases._readers


async def test_what_is_no_longer_listed_is_said_to_be_gone() -> None:
    town = Town(0)
    town.random.randrange = lambda *_: 0  # type: ignore[method-assign]
    mirrors = [Mirror(town, kind, Wish()) for kind in ("sessions", "leases")]
    for mirror in mirrors:
        mirror.connect(resume=False)
        await mirror.read()
    for what in ("begin", "end", "offer", "begin", "harden", "stop", "end_session"):
        town.step(what, 0)
        town.publish(99)
        for mirror in mirrors:
            while await mirror.read():
                pass
    for mirror in mirrors:
        assert mirror.known
        mirror.check()
    town.keep_alive(12)
    town.publish(999)
    assert not town.state.sessions
    assert not town.state.leases
    for mirror in mirrors:
        while await mirror.read():
            pass
        assert not mirror.known, "told, not found out by a new snapshot"
        await mirror.close()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7)), min_size=5, max_size=80),
)
def test_a_watch_and_a_list_agree_whatever_happens(
    seed: int, actions: list[tuple[str, int]]
) -> None:
    asyncio.run(run(seed, actions))
