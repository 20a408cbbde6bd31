"""The leak oracle sees a defect of the agent: code that fails to let go, not a session that lasts.

Each defect is planted in a running engine's table of holds; the oracle has to name it, and has to
be content again when the defect is gone and has given back what it took.
"""

from __future__ import annotations

import re
import zlib

import pytest

from tests.e2e.conftest import DECODE, PREFILL, Cluster
from tests.e2e.steps import turn
from tests.support.conversation import Conversation, Oracle
from tests.support.leaks import assert_nothing_leaked

pytestmark = pytest.mark.usefixtures("nothing_leaked")


@pytest.mark.parametrize(
    ("worker", "defect", "said"),
    [
        # The read has landed, and the request has it; nobody lets the landing blocks go.
        (DECODE, {"keep_hold": "landing"}, r"decode-0 has \d+ held blocks; decode-0 has 1 holds"),
        # The reader has stopped, and the source keeps its range.
        (PREFILL, {"keep_hold": "source"}, r"prefill-0 has \d+ held blocks; prefill-0 has 1 holds"),
        # The session has ended, and its replica stays, and the hold of its last, partial block.
        (DECODE, {"keep_hold": "replica"}, r"decode-0 has \d+ held blocks; decode-0 has 2 holds"),
        # No table counts them: only the pool shows that they are missing.
        (DECODE, {"lose_references": "landing"}, r"left behind: decode-0 has \d+ free blocks, had"),
        (
            PREFILL,
            {"lose_references": "source"},
            r"left behind: prefill-0 has \d+ free blocks, had",
        ),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)
def test_a_planted_leak_is_named(
    cluster: Cluster, oracle: Oracle, worker: str, defect: dict[str, str], said: str
) -> None:
    name = "-".join(["leak", worker, *defect, *defect.values()])
    # Words that no engine has cached: something has to move.
    seed = zlib.crc32(name.encode())
    with cluster.faults(worker, **defect):
        turn(cluster, oracle, Conversation(name, seed=seed))
        with pytest.raises(AssertionError) as seen:
            assert_nothing_leaked(cluster.view, cluster.baseline, timeout_s=5)
    assert re.search(said, str(seen.value)), seen.value
    # Nobody else is accused: what is left behind is the defect's, and nothing beside it.
    assert (PREFILL if worker == DECODE else DECODE) not in str(seen.value)
    # One more turn lets holds end, and with the first of them what had leaked comes back.
    turn(cluster, oracle, Conversation(f"{name}-after", seed=seed + 1))
