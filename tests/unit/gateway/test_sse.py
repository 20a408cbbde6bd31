"""Passing a stream of events through."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.gateway.sse import EventPassthrough

STREAM = (
    b": hi\n\n"
    b'data: {"choices":[{"delta":{"content":"a \\"usage\\" of"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3}}\r\n\r\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM))))
def test_nothing_is_changed_however_it_is_cut(cuts: list[int]) -> None:
    events = EventPassthrough()
    edges = [0, *sorted(cuts), len(STREAM)]
    out = b""
    for start, end in itertools.pairwise(edges):
        ready = events.feed(STREAM[start:end])
        assert not ready or ready.endswith((b"\n\n", b"\r\n\r\n"))
        out += ready
    out += events.finish()
    assert out == STREAM
    assert events.usage == {"prompt_tokens": 3}
    assert events.saw_done


def test_a_keep_alive_is_no_token() -> None:
    events = EventPassthrough()
    events.feed(b": keep-alive\n\n")
    assert not events.saw_data
    events.feed(b"data: 1\n\n")
    assert events.saw_data


def test_half_an_event_is_kept_back() -> None:
    events = EventPassthrough()
    assert events.feed(b'data: {"a"') == b""
    assert not events.saw_data
