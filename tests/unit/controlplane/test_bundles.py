"""Rows in bundles are what they would be in a dict, and little of what has gone stays in memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshuttle.controlplane.model.bundles import ROWS, Bundle, Bundles


class Owner:
    """Remembers where rows are, as a table does."""

    def __init__(self) -> None:
        self.bundles: Bundles[int] = Bundles()
        self.places: dict[int, Bundle[int]] = {}

    def put(self, key: int, row: bytes) -> None:
        self.places[key] = self.bundles.put(key, row)

    def drop(self, key: int) -> int:
        """How many others were moved for it."""
        moved = self.bundles.drop(self.places.pop(key), key)
        for other, row in moved:
            self.put(other, row)
        return len(moved)

    def all(self) -> dict[int, bytes]:
        return {key: self.bundles.get(bundle, key)[1] for key, bundle in self.places.items()}


def row(key: int) -> bytes:
    return b"what all have in common, and %d" % key


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pdga"), st.integers(0, 99)), max_size=120),
    st.lists(st.binary(max_size=90), min_size=1, max_size=200),
)
def test_a_dict_of_rows(steps: list[tuple[str, int]], rows: list[bytes]) -> None:
    owner, plain = Owner(), dict(enumerate(rows))
    owner.places = dict(
        zip(plain, owner.bundles.put_all(list(plain), list(plain.values())), strict=True)
    )
    fresh = len(rows)
    for what, number in steps:
        key = list(plain)[number % len(plain)] if plain else 0
        match what:
            case "p":
                plain[fresh] = rows[number % len(rows)]
                owner.put(fresh, plain[fresh])
                fresh += 1
            case "d" if plain:
                owner.drop(key)
                del plain[key]
            case "g" if plain:
                assert owner.bundles.get(owner.places[key], key) == (key, plain[key])
            case "a":
                several = range(fresh, fresh + number)
                some = [rows[n % len(rows)] for n in several]
                owner.places.update(zip(several, owner.bundles.put_all(several, some), strict=True))
                plain.update(zip(several, some, strict=True))
                fresh += number
    assert owner.all() == plain


def test_a_key_comes_back_as_it_was_put_in() -> None:
    bundles: Bundles[str] = Bundles()
    keys = [f"key-{n}" for n in range(ROWS + 3)]
    for key, bundle in zip(keys, [bundles.put(key, b"") for key in keys], strict=True):
        again = "".join(key)
        assert again is not key
        assert bundles.get(bundle, again)[0] is key


@pytest.mark.parametrize("order", ["first", "last", "any"])
def test_rows_that_have_gone_take_no_more_room_than_those_that_are_there(order: str) -> None:
    rng = random.Random(1)
    owner, moved = Owner(), 0
    for key in range(100 * ROWS):
        owner.put(key, row(key))
    keys = list(owner.places)
    if order == "any":
        rng.shuffle(keys)
    elif order == "last":
        keys.reverse()
    for dropped, key in enumerate(keys, 1):
        moved += owner.drop(key)
        closed = {bundle for bundle in owner.places.values() if bundle.data}
        assert len(closed) * ROWS <= 2 * len(owner.places)
        # What is moved is no more than what has gone.
        assert moved <= dropped
    assert not owner.places


def test_what_is_not_there_is_not_found() -> None:
    owner = Owner()
    for key in range(ROWS + 1):
        owner.put(key, row(key))
    full, filling = owner.places[0], owner.places[ROWS]
    owner.drop(0)
    owner.drop(ROWS)
    for bundle, key in ((full, 0), (filling, ROWS), (full, ROWS)):
        with pytest.raises(ValueError, match="not in list"):
            owner.bundles.get(bundle, key)
        with pytest.raises(ValueError, match="not in list"):
            owner.bundles.drop(bundle, key)


def test_rows_take_a_part_of_their_bytes_in_memory() -> None:
    rows = [row(key) * 20 for key in range(100 * ROWS)]
    bundles: Bundles[int] = Bundles()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        places = bundles.put_all(range(len(rows)), rows)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(places) == len(rows)
    # Not only is what is kept of them short: nothing lies around it.
    assert after - before < sum(map(len, rows)) / 4
