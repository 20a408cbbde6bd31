"""Numbers are changed inside JSON, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.gateway.jsonspans import member, with_numbers

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    before=st.dictionaries(st.text().filter(lambda name: name != "usage"), values, max_size=3),
    after=st.dictionaries(st.text().filter(lambda name: name != "usage"), values, max_size=3),
    number=st.integers(0, 10**6),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_the_rest_stays_byte_for_byte(
    before: dict[str, Any], after: dict[str, Any], number: int, indent: int | None, ascii_only: bool
) -> None:
    def text(count: int) -> bytes:
        whole = {**before, "usage": {"a": {"usage": 1, "n": [8, count]}}}
        whole.update({name: value for name, value in after.items() if name not in whole})
        made = json.dumps(whole, indent=indent, ensure_ascii=ascii_only)
        return made.encode("utf-8", "surrogatepass")

    assert with_numbers(text(12345), {("usage", "a", "n", 1): number}) == text(number)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b'{"usage": {"n": 1',
        b'{"usage": {"n": null}}',
        b'{"usage": {"n": 1.5}}',
        b'{"usage": {"n": "1"}}',
        b'{"usage": {"m": 1}}',
        b'{"usage": 7}',
        b'{"usage" {"n": 1}}',
        b'{"usage": {"n": 1}\xff}',
        b'{"a": "\\"usage\\": {\\"n\\": 1}"}',
    ],
)
def test_what_is_not_there_is_not_made(raw: bytes) -> None:
    assert with_numbers(raw, {("usage", "n"): 5}) == raw


def test_of_two_members_with_one_name_the_last_counts() -> None:
    assert with_numbers(b'{"n": 1, "n": 2}', {("n",): 3}) == b'{"n": 1, "n": 3}'
    assert member('{"a": [1]}', ("a", 1)) is None
