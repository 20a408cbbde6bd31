"""The store that a start is measured with is one that a control plane could have left."""

from __future__ import annotations

from pathlib import Path

from benchmarks.controlplane.stored import write_store
from benchmarks.controlplane.traces import ChainLengths
from kvshuttle.controlplane.model.ledger import Ledger
from kvshuttle.controlplane.model.limits import Limits
from kvshuttle.controlplane.model.registry import Registry
from kvshuttle.controlplane.model.terms import LeaseState
from kvshuttle.controlplane.planner import Planner
from kvshuttle.controlplane.store.sqlite import SqliteStore


def test_it_has_a_running_turn_and_a_granted_lease_in_every_session(tmp_path: Path) -> None:
    write_store(tmp_path / "store.db", 300, 8, ChainLengths(""))
    store = SqliteStore(tmp_path / "store.db")
    snapshot = store.load()
    registry = Registry(Limits(), Planner())
    registry.start(snapshot.latest_ns() + 1, snapshot, "not used")
    store.close()
    state = registry.state
    assert len(state.sessions) == len(state.turns) == len(state.leases) == 300
    assert state.ledger == Ledger.of(state)
    for session in state.sessions.values():
        ended, runs = session.turns
        assert runs.running
        assert not ended.running
        assert state.turns[runs.token] == session.key
        (lease_id,) = state.turn_leases(runs.token)
        lease = state.leases[lease_id]
        assert lease.state is LeaseState.GRANTED
        assert (lease.key, lease.turn) == (session.key, runs.number)
        assert lease.source in {w.ref for w in state.workers.values()}
        assert runs.prefill is not None
        assert lease.destination == runs.prefill.worker
    assert state.turns_on.total() == 600
