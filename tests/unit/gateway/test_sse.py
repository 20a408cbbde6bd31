"""Passing a stream of events through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.gateway.dialects import DIALECTS, Usage
from kvshuttle.gateway.sse import EventPassthrough

STREAM = (
    b": hi\n\n"
    b'data: {"choices":[{"delta":{"content":"a \\"usage\\" of"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3}}\r\n\r\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM))))
def test_nothing_is_changed_however_it_is_cut(cuts: list[int]) -> None:
    events = EventPassthrough(DIALECTS["chat"])
    edges = [0, *sorted(cuts), len(STREAM)]
    out = b""
    for start, end in itertools.pairwise(edges):
        ready = events.feed(STREAM[start:end])
        assert not ready or ready.endswith((b"\n\n", b"\r\n\r\n"))
        out += ready
    out += events.finish()
    assert out == STREAM
    assert events.usage == Usage(prompt=3)
    assert events.saw_done


def test_a_keep_alive_is_no_token() -> None:
    events = EventPassthrough(DIALECTS["chat"])
    events.feed(b": keep-alive\n\n")
    assert not events.saw_data
    events.feed(b"data: 1\n\n")
    assert events.saw_data


def test_half_an_event_is_kept_back() -> None:
    events = EventPassthrough(DIALECTS["chat"])
    assert events.feed(b'data: {"a"') == b""
    assert not events.saw_data


TRUE = Usage(prompt=20, cached=4)
RESPONSES = (
    b'event: response.created\ndata: {"response":{"usage":null},"sequence_number":0}\n\n'
    b'event: response.output_text.delta\ndata: {"delta":"a \\"usage\\": 1","sequence_number":7}\n\n'
    b'event: response.completed\ndata: { "response" : {"usage": {"input_tokens":20, '
    b'"input_tokens_details":{"cached_tokens": 19 ,"cached_tokens_per_turn":[ 19 ]}}}}\n\n'
)
MESSAGES = (
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":20,"output_tokens":0}}}\n\n'
    b'event: content_block_start\ndata: {"content_block":{"input":{"usage":'
    b'{"input_tokens":1,"cache_read_input_tokens":19}}}}\n\n'
    b'event: message_delta\ndata: {"usage":{"input_tokens":1,"cache_read_input_tokens":19,'
    b'"output_tokens":5}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


@given(st.lists(st.integers(0, len(RESPONSES))))
def test_only_the_numbers_of_the_usage_change(cuts: list[int]) -> None:
    events = EventPassthrough(DIALECTS["responses"], lambda: TRUE)
    edges = [0, *sorted(cuts), len(RESPONSES)]
    out = b"".join(events.feed(RESPONSES[a:b]) for a, b in itertools.pairwise(edges))
    assert out == RESPONSES.replace(b": 19 ", b": 4 ").replace(b"[ 19 ]", b"[ 4 ]")
    assert events.usage == Usage(prompt=20, cached=19)
    assert events.ended


def test_what_was_read_from_a_cache_is_no_input_of_messages() -> None:
    events = EventPassthrough(DIALECTS["messages"], lambda: TRUE)
    out = events.feed(MESSAGES)
    assert out == MESSAGES.replace(
        b'{"input_tokens":1,"cache_read_input_tokens":19,"output',
        b'{"input_tokens":16,"cache_read_input_tokens":4,"output',
    )
    assert events.ended
    assert not events.saw_error


@pytest.mark.parametrize(
    ("parts", "seen"), [(1, (False, False)), (2, (True, False)), (3, (True, True))]
)
def test_the_first_events_of_responses_are_no_tokens(parts: int, seen: tuple[bool, bool]) -> None:
    events = EventPassthrough(DIALECTS["responses"])
    events.feed(b"\n\n".join(RESPONSES.split(b"\n\n")[:parts]) + b"\n\n")
    assert (events.saw_data, events.saw_done) == seen
