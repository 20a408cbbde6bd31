"""The table of replicas, against a list that is looked through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.dataplane.holds import Hold, HoldKind
from kvshuttle.dataplane.replicas import Replica, ReplicaTable

SESSIONS = st.sampled_from([("acme", "s1"), ("acme", "s2"), ("other", "s1")])
HEADS = st.sampled_from([b"a", b"b", b"c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), SESSIONS, HEADS, st.booleans()),
        st.tuples(st.sampled_from(["remove", "soften"]), SESSIONS, HEADS, st.just(False)),
        st.tuples(st.just("bound"), SESSIONS, HEADS, st.booleans()),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_it_finds_what_looking_through_all_of_them_would(
    steps: list[tuple[str, tuple[str, str], bytes, bool]],
) -> None:
    table = ReplicaTable()
    plain: list[Replica] = []
    soft: list[Replica] = []

    def lose(replica: Replica) -> None:
        plain.remove(replica)
        if replica in soft:
            soft.remove(replica)

    for what, session, head, hard in steps:
        key = (*session, head)
        there = next((r for r in plain if r.key == key), None)
        assert table.get(key) is there
        if what == "add":
            hold = Hold(HoldKind.REPLICA, (1,), 1) if hard else None
            replica = Replica(*session, (b"first", head), hold, 0)
            if there is not None:
                lose(there)
            plain.append(replica)
            if not hard:
                soft.append(replica)
            table.add(replica)
        elif what == "remove":
            if there is not None:
                lose(there)
            table.remove(key)
        elif what == "soften" and there is not None:
            if there.hold is not None:
                soft.append(there)
            there.hold = None
            table.turned_soft(there)
        elif what == "bound":
            for replica in table.soft_beyond(2):
                assert replica is soft[0]
                table.remove(replica.key)
                lose(replica)
        assert table.all() == plain
        assert table.hard == [r for r in plain if r.hold is not None]
        for tenant, session_id in [("acme", "s1"), ("acme", "s2"), ("other", "s1")]:
            assert table.of_session(tenant, session_id) == [
                r for r in plain if (r.tenant, r.session_id) == (tenant, session_id)
            ]
