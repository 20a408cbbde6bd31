"""Which workers may exchange KV, by how theirs is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.controlplane.model.errors import FingerprintMismatchError, UnsupportedError
from kvshuttle.controlplane.model.terms import WorkerRole
from tests.unit.controlplane.world import World, split

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.mark.parametrize(("one", "other"), [(1, 1), (1, 2), (4, 2), (8, 1), (8, 2)])
def test_blocks_that_come_apart_by_heads_may_be_split_otherwise(one: int, other: int) -> None:
    world = World()
    world.connect("p", P, **split(one))
    world.connect("d", D, **split(other))
    assert {x.num_ranks for x in world.state.workers.values()} == {one, other}


@pytest.mark.parametrize("opaque", [("p",), ("d",), ("p", "d")])
def test_blocks_that_do_not_come_apart_must_be_split_alike(opaque: tuple[str, ...]) -> None:
    def shape(name: str, ranks: int) -> dict[str, Any]:
        whole = {"heads": ((0, 0),) * ranks} if name in opaque else {}
        return split(ranks) | whole

    world = World()
    world.connect("p", P, **shape("p", 2))
    with pytest.raises(UnsupportedError, match="cannot be taken apart by heads") as refused:
        world.connect("d", D, **shape("d", 1))
    assert refused.value.metadata == {"what": "ranks", "ours": "2", "theirs": "1"}
    world.connect("d", D, **shape("d", 2))


@pytest.mark.parametrize(
    ("ranks", "total"), [(3, 4), (8, 6), (2, 0), (2, -2), (2, "four"), (2, "\u00b2")]
)
def test_heads_that_ranks_cannot_share_are_refused(ranks: int, total: object) -> None:
    hello = split(ranks, 24) | {"fingerprint": (("kv_heads", str(total)),)}
    with pytest.raises(UnsupportedError, match=f"{total} KV heads over {ranks} ranks") as refused:
        World().connect("p", P, **hello)
    assert refused.value.metadata["what"] == "kv_heads"


@pytest.mark.parametrize(
    "heads", [((0, 2), (0, 2)), ((2, 2), (0, 2)), ((0, 1), (1, 3)), ((0, 4), (0, 4))]
)
def test_a_rank_that_keeps_other_heads_than_vllm_gives_it_is_refused(
    heads: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(UnsupportedError, match=r"rank \d of worker p keeps"):
        World().connect("p", P, **(split(2) | {"heads": heads}))


def test_other_numbers_of_heads_are_other_models() -> None:
    world = World()
    world.connect("p", P, **split(1))
    with pytest.raises(FingerprintMismatchError, match="kv_heads"):
        world.connect("d", D, **split(1, total=8))
