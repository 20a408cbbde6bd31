"""The planted leaks leak, one hold at a time, and give back when they are gone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvshuttle.dataplane.faults import Faults, LeakyHolds
from kvshuttle.dataplane.holds import HoldKind
from tests.unit.dataplane.fakes import FakePool

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("defect", "counted"), [({"keep_hold": "source"}, 1), ({"lose_references": "source"}, 0)]
)
def test_one_hold_leaks_until_the_defect_is_gone(
    tmp_path: Path, defect: dict[str, str], counted: int
) -> None:
    file = tmp_path / "faults.json"
    pool = FakePool(20)
    holds = LeakyHolds(pool, Faults(file=str(file)))
    whole = pool.free_blocks
    blocks = pool.allocate(6)
    taken = [holds.adopt(HoldKind.SOURCE, blocks[i : i + 2]) for i in (0, 2)]
    other = holds.adopt(HoldKind.LANDING, blocks[4:])
    file.write_text(json.dumps(defect))
    for hold in (other, *taken):
        holds.release(hold)
    assert holds.count == counted
    assert pool.free_blocks == whole - 2
    file.unlink()
    holds.release(holds.adopt(HoldKind.LANDING, pool.allocate(1)))
    assert holds.count == 0
    assert pool.free_blocks == whole
