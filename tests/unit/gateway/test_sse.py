"""Passing a stream of events through."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.gateway import limits
from kvshuttle.gateway.dialects import DIALECTS, Route, Usage
from kvshuttle.gateway.legs import DecodeStream, EngineHttp, LegFailed
from kvshuttle.gateway.liveness import Liveness
from kvshuttle.gateway.metrics import Metrics
from kvshuttle.gateway.settings import load
from kvshuttle.gateway.sse import EventPassthrough, EventTooLongError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

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


class Looked(bytearray):
    """Counts the bytes that are looked through for a boundary or copied as a whole."""

    looked = 0

    def __add__(self, other: Any) -> Looked:
        Looked.looked += len(self)
        return Looked(bytearray(self) + other)

    def __contains__(self, mark: Any) -> bool:
        Looked.looked += len(self)
        return super().__contains__(mark)

    def __getitem__(self, place: Any) -> Any:
        return Looked(super().__getitem__(place))

    def rfind(self, mark: Any, start: Any = 0, end: Any = None) -> int:
        Looked.looked += len(self) - start
        return super().rfind(mark, start)


@pytest.mark.parametrize("piece", [64, 1_448])
def test_a_long_event_is_looked_through_once(piece: int) -> None:
    event = b"data: " + b"a" * 300_000 + b"\n\n"
    events = EventPassthrough(DIALECTS["chat"])
    events._rest = Looked()
    Looked.looked = 0
    events.feed(event[:1])
    out = [events.feed(event[at : at + piece]) for at in range(1, len(event), piece)]
    assert b"".join(out) == event
    # For each of two boundaries, and a little again at each seam.
    assert len(event) < Looked.looked < 3 * len(event)


def test_an_event_without_an_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EVENT_BYTES", 1_000)
    events = EventPassthrough(DIALECTS["chat"])
    whole = b"data: " + b"a" * 900 + b"\n\n"
    assert events.feed(whole + whole + whole) == whole * 3
    assert events.feed(b"a" * 1_000) == b""
    with pytest.raises(EventTooLongError, match="1000 bytes"):
        events.feed(b"a")


class Marks:
    """A dialect's pattern that counts the bytes it is asked to look through."""

    count = 0

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def search(self, text: Any, start: int = 0) -> Any:
        Marks.count += len(text) - start
        return self._pattern.search(text, start)


def decode_stream(route: Route, pieces: Iterator[bytes]) -> DecodeStream:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def probe(_url: str) -> None:
        pass

    settings = load([])
    known = DIALECTS[route]
    marks = {name: Marks(getattr(known, name)) for name in ("begun", "error", "end")}
    return DecodeStream(
        EngineHttp(settings, Metrics()),
        Liveness(probe, settings.engine_hang_s),
        "http://e",
        httpx.Response(200, content=body()),
        time.monotonic(),
        settings,
        type("Counted", (type(known),), marks)(),
    )


def in_pieces(text: bytes, size: int) -> Iterator[bytes]:
    return (text[at : at + size] for at in range(0, len(text), size))


BEFORE: dict[Route, bytes] = {
    "chat": b": keep-alive\n\n",
    "messages": b"event: ping\ndata: {}\n\n",
    "responses": b'event: response.created\ndata: {"response":{}}\n\n',
}


@pytest.mark.parametrize("size", [1, 64, 1_448])
@pytest.mark.parametrize("route", list(BEFORE))
@pytest.mark.parametrize("junk", [b"", b"x" * 100_000, b"\n" * 50_000, b": hi\n\n" * 9_000])
async def test_what_comes_before_the_first_token_is_looked_through_once(
    route: Route, size: int, junk: bytes
) -> None:
    first = b'event: some.thing\ndata: {"a": 1}\n\n'
    before = BEFORE[route] + junk + b"\n\n"
    Marks.count = 0
    stream = decode_stream(route, in_pieces(before + first + b"data: 2\n\n", size))
    await stream.wait_for_first_token()
    work = Marks.count
    said = await stream.next_chunk()
    await stream.close()

    assert said is not None
    assert said.startswith(before)
    assert len(said) < len(before + first) + size
    # Three patterns; a line's start again with each piece of it, the rest at its end.
    assert work < 6 * len(said) + 3 * 1_024 * 1_024 * (size == 1) + 200_000


@pytest.mark.parametrize("route", list(BEFORE))
async def test_a_stream_that_never_begins_is_given_up(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENT_BYTES", 10_000)
    stream = decode_stream(route, in_pieces(BEFORE[route] + b"x" * 20_000, 100))
    with pytest.raises(LegFailed, match="10000 bytes before the first token") as raised:
        await stream.wait_for_first_token()
    await stream.close()
    assert raised.value.failure == "broke_off"
