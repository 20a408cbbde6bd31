"""A store as a control plane leaves it that is killed among many sessions, made in a minute and not
in the half hour that as many turns take: one session is played through the registry, and its rows
are written for all of them, each with names, times, chain length and workers of its own.
"""

from __future__ import annotations

import base64
import random
import time
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvshuttle.controlplane.model.effects import PutLease, PutSession, PutTerm, PutWorker
from kvshuttle.controlplane.model.limits import SECOND, Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.reports import Descriptors, Hello, ReplicaReport
from kvshuttle.controlplane.model.state import Snapshot
from kvshuttle.controlplane.model.terms import (
    BlockRange,
    Leg,
    ReplicaState,
    SessionKey,
    TurnOutcome,
    WorkerRole,
)
from kvshuttle.controlplane.model.turn_events import BeginTurn
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.store.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.controlplane.traces import ChainLengths
    from kvshuttle.controlplane.model.effects import Record
    from kvshuttle.controlplane.model.lease import Lease
    from kvshuttle.controlplane.model.session import Session, Turn
    from kvshuttle.controlplane.model.terms import WorkerRef

__all__ = ["write_store"]

TENANT = "default"
BLOCK_TOKENS = 32
BATCH = 4_000


def write_store(
    path: Path, sessions: int, agents: int, lengths: ChainLengths, ttl_s: int = 600
) -> None:
    """Sessions with an ended turn, a running one and a granted lease each, among so many boots.
    The file's log is merged, as a commit does it now and then."""
    now_ns = time.time_ns()
    registry = Registry(Limits(lease_ttl_ns=ttl_s * SECOND, eager=False), Planner())
    start = registry.start(now_ns, Snapshot(), "lineage-of-a-store")
    records: list[Record] = list(start.effects.records)
    half = agents // 2
    prefills: list[WorkerRef] = []
    decodes: list[WorkerRef] = []
    for number in range(agents):
        prefill = number < half
        name = f"p{number}" if prefill else f"d{number - half}"
        role = WorkerRole.PREFILL if prefill else WorkerRole.DECODE
        welcome = registry.hello(now_ns, _hello(name, role))
        records += welcome.effects.records
        (prefills if prefill else decodes).append(welcome.result.worker.ref)
    session, lease = _played(registry, now_ns)
    term = next(one for one in records if isinstance(one, PutTerm))
    boots = {one.worker.ref: one for one in records if isinstance(one, PutWorker)}
    last = max(ref.incarnation for ref in boots)
    store = SqliteStore(path)
    try:
        store.load()
        store.commit([replace(term, last_incarnation=last), *boots.values()])
        batch: list[Record] = []
        for record in _copies(session, lease, sessions, prefills, decodes, lengths):
            batch.append(record)
            if len(batch) >= BATCH:
                store.commit(batch)
                batch = []
        store.commit(batch)
    finally:
        store.close()


def _hello(name: str, role: WorkerRole) -> Hello:
    return Hello(
        worker_id=name,
        boot_id=f"boot-{name}",
        role=role,
        url=f"http://10.0.0.{name[1:]}:8000",
        fingerprint=(("model", "m"),),
        block_size=BLOCK_TOKENS,
        num_blocks=2**31,
        bytes_per_block=736_000,
        prefix_caching=True,
        num_ranks=1,
        ranks=("rank",),
        highest_epoch=0,
        lineage_id="",
        clock=1,
    )


def _played(registry: Registry, now_ns: int) -> tuple[Session, Lease]:
    """A session with an ended turn and a running one whose return is granted, as the registry
    leaves them."""
    key = SessionKey(TENANT, "s0000000")
    first = registry.begin_turn(now_ns, BeginTurn(key, "t" * 22, f"{key.session_id}-1")).result
    head, decode = b"h" * 32, first.decode.worker
    offered = ReplicaReport(
        key=key,
        head_hash=head,
        num_blocks=3_000,
        num_tokens=3_000 * BLOCK_TOKENS,
        state=ReplicaState.HARD,
        hold_remaining_ns=3_600 * SECOND,
        turn_token=first.token,
        leg=Leg.DECODE,
    )
    batch = registry.agent(now_ns, decode)
    batch.offered(offered)
    batch.finish()
    registry.end_turn(now_ns + 10_000_000, key, 1, TurnOutcome.COMPLETED)
    now_ns += SECOND
    begin = BeginTurn(key, "u" * 22, f"{key.session_id}-2")
    registry.begin_turn(now_ns, begin)
    (lease_id,) = registry.state.open_leases
    batch = registry.agent(now_ns, decode)
    batch.hardened(lease_id, 1, Descriptors(BlockRange(0, 64), head, "ids"))
    batch.finish()
    return registry.state.sessions[key], registry.state.leases[lease_id]


class _Copy(NamedTuple):
    """What is its own of one session among many."""

    key: SessionKey
    prefill: WorkerRef
    decode: WorkerRef
    late_ns: int

    def turn(self, turn: Turn, token: str) -> Turn:
        """One of its turns."""
        assert turn.prefill is not None
        named = {"prefill": self.prefill.worker_id, "decode": self.decode.worker_id}
        candidates = tuple(replace(one, **named) for one in turn.plan.candidates)
        return replace(
            turn,
            token=token,
            prefill=replace(turn.prefill, worker=self.prefill),
            decode=replace(turn.decode, worker=self.decode),
            plan=replace(turn.plan, candidates=candidates),
            begin_ns=turn.begin_ns + self.late_ns,
            end_ns=turn.end_ns + self.late_ns if turn.end_ns else 0,
            request_id=f"{self.key.session_id}-{turn.number}",
        )


def _copies(
    session: Session,
    lease: Lease,
    count: int,
    prefills: list[WorkerRef],
    decodes: list[WorkerRef],
    lengths: ChainLengths,
) -> Iterator[Record]:
    drawn = random.Random(1)
    lineage, epoch, _ = lease.lease_id.rsplit("-", 2)
    ended, runs = session.turns
    for number in range(count):
        key = SessionKey(TENANT, f"s{number:07d}")
        copy = _Copy(key, drawn.choice(prefills), drawn.choice(decodes), number * 1_000_000)
        token = base64.urlsafe_b64encode(drawn.randbytes(16))[:-2].decode()
        yield PutSession(
            replace(
                session,
                key=key,
                create_ns=session.create_ns + copy.late_ns,
                update_ns=session.update_ns + copy.late_ns,
                turns=(copy.turn(ended, token[::-1]), copy.turn(runs, token)),
                last_prefill=copy.prefill.worker_id,
                version=session.version + number,
            )
        )
        yield PutLease(
            replace(
                lease,
                lease_id=f"{lineage}-{epoch}-{number + 1}",
                seq=number + 1,
                key=key,
                turn_token=token,
                source=copy.decode,
                destination=copy.prefill,
                ask_head=f"{key.session_id}:1".encode().ljust(32, b"."),
                ask_range=BlockRange(0, lengths.draw()),
                create_ns=lease.create_ns + copy.late_ns,
                grant_ns=lease.grant_ns + copy.late_ns,
                deadline_ns=lease.deadline_ns + copy.late_ns,
            )
        )
