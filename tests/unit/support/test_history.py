"""Each rule of the history checker sees a history that was forged to break it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.history import Entry, History

LEASE = "lineage-7-3"


def control(event: str, life: str = "cp#1", **fields: Any) -> Entry:
    return Entry("cp", life, event, {"event": event} | fields)


def agent(where: str, event: str, at: int, life: str = "", **fields: Any) -> Entry:
    return Entry(where, life or f"{where}#1", event, {"event": event, "at": at} | fields)


def good() -> list[Entry]:
    """A lease from d to p, from its grant to its end."""
    granted: dict[str, Any] = {"lease_id": LEASE, "epoch": 7, "source": "d", "destination": "p"}
    return [
        agent("p", "welcomed", 1, worker="p", incarnation=1, epoch=7, lineage="lineage"),
        agent("d", "welcomed", 1, worker="d", incarnation=2, epoch=7, lineage="lineage"),
        agent("d", "obeys", 10, order="harden", lease=LEASE, version=1, epoch=7),
        agent("d", "range_held", 10, lease=LEASE, blocks="3-5,9"),
        control("lease_granted", **granted),
        agent("p", "obeys", 20, order="grant", lease=LEASE, version=2, epoch=7),
        agent("p", "handed_out", 30, blocks="20-24"),
        agent("p", "landing_held", 31, lease=LEASE, read="r", blocks="20-23"),
        agent("p", "read_posted", 32, "p#mover", lease=LEASE, read="r"),
        agent("d", "handed_out", 33, blocks="6-8,10"),
        agent("p", "read_completed", 34, "p#mover", lease=LEASE, read="r"),
        agent("p", "read_over", 36, "p#mover", lease=LEASE, read="r", published=True),
        agent("p", "landing_let_go", 37, lease=LEASE, read="r"),
        agent("d", "obeys", 40, order="reader_stopped", lease=LEASE, version=3, epoch=7),
        agent("d", "range_let_go", 41, lease=LEASE, reason="READER_STOPPED"),
        agent("d", "handed_out", 42, blocks="3-9"),
        agent("p", "handed_out", 43, blocks="20-24"),
    ]


def find(entries: list[Entry], where: str, name: str, **fields: Any) -> int:
    return next(
        n
        for n, x in enumerate(entries)
        if (x.where, x.name) == (where, name)
        and all(x.fields.get(key) == value for key, value in fields.items())
    )


def changed(where: str, name: str, change: dict[str, Any], **fields: Any) -> list[Entry]:
    """The good history with one entry's fields changed."""
    entries = good()
    n = find(entries, where, name, **fields)
    old = entries[n]
    entries[n] = Entry(old.where, old.life, old.name, old.fields | change)
    return entries


def added(*more: Entry, before: int | None = None) -> list[Entry]:
    entries = good()
    at = len(entries) if before is None else before
    return entries[:at] + list(more) + entries[at:]


def test_a_good_history_has_no_problem() -> None:
    assert History(good()).problems() == []


def test_a_process_that_was_killed_in_the_midst_is_no_problem() -> None:
    """Each beginning of the history, where the rest was never written."""
    for length in range(len(good())):
        assert History(good()[:length]).problems() == []


GRANT = control("lease_granted", lease_id=LEASE, epoch=7)
AGAIN = control("lease_granted", life="cp#2", lease_id="lineage-7-4", epoch=7)
FORGED: list[tuple[str, list[Entry], str]] = [
    ("granted twice by one", added(GRANT), "granted twice"),
    ("granted twice by two", added(Entry("cp", "cp#2", GRANT.name, GRANT.fields)), "granted twice"),
    (
        "obeyed twice",
        added(agent("p", "obeys", 50, order="grant", lease=LEASE, version=2, epoch=7)),
        "obeyed twice",
    ),
    (
        "obeyed by another boot too",
        added(agent("p", "obeys", 50, "p#2", order="grant", lease=LEASE, version=2, epoch=7)),
        "obeyed twice",
    ),
    ("granted in a later term", changed("cp", "lease_granted", {"epoch": 8}), "granted in epoch 8"),
    ("one term of two processes", added(AGAIN), "epoch 7 of lineage is of cp#1 and of cp#2"),
    (
        "a stale order is obeyed",
        added(
            agent("d", "welcomed", 50, worker="d", incarnation=2, epoch=9, lineage="lineage"),
            agent("d", "obeys", 51, order="harden", lease="lineage-7-5", version=1, epoch=7),
        ),
        "obeyed epoch 7 (harden lineage-7-5) after 9",
    ),
    (
        "a stale welcome is obeyed",
        added(agent("d", "welcomed", 50, worker="d", incarnation=2, epoch=6, lineage="lineage")),
        "obeyed epoch 6 (welcome ) after 7",
    ),
    (
        "a grant comes in another term",
        changed("p", "obeys", {"epoch": 8}, order="grant"),
        "granted in 7, obeyed in 8",
    ),
    (
        "read without a grant",
        added(agent("x", "read_posted", 50, lease="lineage-7-9", read="q")),
        "x#1 reads under lineage-7-9 without a grant",
    ),
    (
        "read for two requests",
        added(agent("p", "read_posted", 50, "p#mover", lease=LEASE, read="other"), before=13),
        "is read for r and for other",
    ),
    (
        "read by two workers",
        added(
            agent("x", "obeys", 38, order="grant", lease=LEASE, version=2, epoch=7),
            agent("x", "read_posted", 39, lease=LEASE, read="r2"),
            before=13,
        ),
        "is read by p and by x",
    ),
    ("read before it is held", changed("d", "range_held", {"at": 33}), "before it was held"),
    (
        "read though nobody holds",
        changed("d", "range_held", {"lease": "lineage-7-8"}),
        "nobody held it",
    ),
    (
        "complete after the source's deadline",
        changed("d", "range_let_go", {"reason": "DEADLINE", "at": 33}),
        "complete after its source's deadline",
    ),
    (
        "let go while read",
        changed("d", "obeys", {"at": 33}, order="reader_stopped"),
        "told to let go while p#mover read",
    ),
    (
        "read after it is let go",
        changed("d", "obeys", {"at": 15}, order="reader_stopped"),
        "after its source was told to let go",
    ),
    (
        "a leased block is handed out",
        changed("d", "handed_out", {"blocks": "4"}, at=33),
        f"d#1 handed out [4] of source {LEASE}",
    ),
    (
        "a landing block is handed out",
        added(agent("p", "handed_out", 33, blocks="23-30"), before=9),
        f"p#1 handed out [23] of landing {LEASE} r",
    ),
    (
        "one incarnation for two boots",
        added(agent("d", "welcomed", 50, "d#2", incarnation=2, epoch=7, lineage="lineage")),
        "incarnation 2 is of d#1 and of d#2",
    ),
]


@pytest.mark.parametrize(
    ("entries", "problem"), [x[1:] for x in FORGED], ids=[x[0] for x in FORGED]
)
def test_a_forged_history_is_seen(entries: list[Entry], problem: str) -> None:
    assert any(problem in found for found in History(entries).problems()), History(
        entries
    ).problems()


PUSH = "lineage-7-6"


def pushed() -> list[Entry]:
    """A lease under which p writes to d, from its offer to its end."""
    return [
        agent("d", "handed_out", 9, blocks="20-24"),
        agent("d", "landing_held", 10, lease=PUSH, read="r", blocks="20-23"),
        control("lease_granted", lease_id=PUSH, epoch=7, source="p", destination="d"),
        agent("p", "obeys", 20, order="grant", lease=PUSH, version=2, epoch=7),
        agent("p", "chunk_held", 21, lease=PUSH, chunk=0, blocks="3-6"),
        agent("p", "write_posted", 22, "p#mover", lease=PUSH, chunk=0),
        agent("p", "write_posted", 24, "p#mover", lease=PUSH, chunk=0),
        agent("p", "chunk_let_go", 26, lease=PUSH, chunk=0),
        agent("p", "writes_over", 27, "p#mover", lease=PUSH, reason=""),
        agent("p", "handed_out", 28, blocks="3-6"),
        agent("d", "landing_let_go", 30, lease=PUSH, read="r", reason=""),
        agent("d", "handed_out", 31, blocks="20-24"),
    ]


def test_a_good_push_has_no_problem() -> None:
    for length in range(len(pushed()) + 1):
        assert History(pushed()[:length]).problems() == []


@pytest.mark.parametrize(
    ("where", "name", "change", "problem"),
    [
        ("p", "obeys", {"order": "extend"}, f"p#mover writes under {PUSH} without a grant"),
        ("d", "landing_held", {"at": 23}, "before its landing zone was held"),
        ("d", "landing_let_go", {"at": 23}, "was let go while p#mover wrote"),
        ("d", "landing_let_go", {"at": 25, "reason": "LATE"}, "was let go while p#mover wrote"),
        ("p", "chunk_let_go", {"lease": "another"}, "p#1 handed out [3, 4, 5, 6] of chunk"),
        (
            "d",
            "landing_let_go",
            {"read": "q"},
            "d#1 handed out [20, 21, 22, 23] of landing",
        ),
    ],
)
def test_a_forged_push_is_seen(where: str, name: str, change: dict[str, Any], problem: str) -> None:
    entries = pushed()
    n = find(entries, where, name)
    old = entries[n]
    entries[n] = Entry(old.where, old.life, old.name, old.fields | change)
    assert any(problem in found for found in History(entries).problems()), problem


def test_the_landing_zone_of_a_dead_writer_may_go_before_its_last_word() -> None:
    entries = pushed()
    n = find(entries, "d", "landing_let_go")
    fields = entries[n].fields | {"at": 25, "reason": "PEER_FENCED"}
    entries[n] = Entry("d", "d#1", "landing_let_go", fields)
    assert History(entries).problems() == []


def test_what_may_be() -> None:
    """Things that look like breaches and are none."""
    # Pieces of one eager lease.
    pieces = added(
        agent("p", "obeys", 50, order="grant", lease="lineage-7-9", version=2, epoch=7),
        agent("p", "read_posted", 51, "p#mover", lease="lineage-7-9", read="lineage-7-9#0"),
        agent("p", "read_posted", 52, "p#mover", lease="lineage-7-9", read="lineage-7-9#1"),
    )
    assert History(pieces).problems() == []
    # NIXL has told the source before the reader has looked.
    assert History(changed("d", "range_let_go", {"at": 33})).problems() == []
    # Another boot of the engine has its own blocks, and may be handed out any.
    other = added(agent("d", "handed_out", 33, "d#2", blocks="3-9"), before=10)
    assert History(other).problems() == []
    # A lease of another store has the same numbers.
    lineage = control("lease_granted", life="other#1", lease_id="store-7-3", epoch=7)
    assert History(added(lineage)).problems() == []


def test_two_processes_lines_in_one_are_read(tmp_path: Path) -> None:
    """A program that writes a line in two pieces lets another's come between."""
    log = tmp_path / "engine.log"
    one, two = (
        json.dumps({"part": "agent.journal", "event": name, "pid": 5, "of": {"n": 1}})
        for name in ("chunk_held", "chunk_let_go")
    )
    log.write_text(f'{one}{two}\n\n(Worker) {{"torn": 1, {one}\nvLLM says {{"x"}} {two}\n')
    history = History()
    history.read_agent(log)
    assert [x.name for x in history.entries] == ["chunk_held", "chunk_let_go"] * 2


def test_logs_are_read(tmp_path: Path) -> None:
    """With vLLM's lines among the agent's, and a line that was cut off."""
    engine, control_plane = tmp_path / "engine.log", tmp_path / "cp.log"
    lines = [
        "INFO 11-30 vLLM says something {not json}",
        json.dumps({"part": "agent.link", "event": "connected", "pid": 5}),
        "(EngineCore pid=5) "
        + json.dumps({"part": "agent.journal", "event": "handed_out", "pid": 5, "blocks": "1-3,7"}),
        '{"part": "agent.journal", "event": "handed_o',
    ]
    engine.write_text("\n".join(lines))
    control_plane.write_text(
        "\n".join(json.dumps({"event": x}) for x in ("started", "a", "started", "b"))
    )
    history = History()
    history.read_agent(engine, "p")
    history.read_control_plane(control_plane, "cp")
    found = [(x.where, x.life, x.name) for x in history.entries]
    assert found == [
        ("p", "p#5", "handed_out"),
        ("cp", "cp#1", "started"),
        ("cp", "cp#1", "a"),
        ("cp", "cp#2", "started"),
        ("cp", "cp#2", "b"),
    ]
    assert history.entries[0].blocks == {1, 2, 3, 7}
