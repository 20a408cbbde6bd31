"""Hints in headers and in bodies."""

from __future__ import annotations

import pytest

from kvshuttle.gateway.errors import ApiError
from kvshuttle.gateway.hints import hints_of_body, hints_of_headers
from kvshuttle.v1 import types_pb2 as types


def test_headers() -> None:
    assert hints_of_headers({}) is None
    found = hints_of_headers({"x-kvshuttle-expected-idle": "20.5", "x-kvshuttle-value": " High "})
    assert found is not None
    assert found.expected_idle.ToMilliseconds() == 20_500
    assert found.value == types.SESSION_VALUE_HIGH
    only = hints_of_headers({"x-kvshuttle-value": "low"})
    assert only is not None
    assert not only.HasField("expected_idle")


def test_bodies() -> None:
    found = hints_of_body(b'{"expected_idle_s": 20}')
    assert (found.expected_idle.seconds, found.value) == (20, types.SESSION_VALUE_UNSPECIFIED)
    assert hints_of_body(b'{"value": "low", "expected_idle_s": null}').value


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1e9", ""])
def test_a_header_that_is_no_time(text: str) -> None:
    with pytest.raises(ApiError, match="seconds, a number from 0 to a year") as raised:
        hints_of_headers({"x-kvshuttle-expected-idle": text})
    assert (raised.value.status, raised.value.param) == (400, "X-KVShuttle-Expected-Idle")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", "body"),
        (b"[1]", "body"),
        (b"\xff", "body"),
        (b"{}", "body"),
        (b"[" * 100_000, "body"),
        (b'{"expected_idle": 20}', "expected_idle"),
        (b'{"expected_idle_s": true}', "expected_idle_s"),
        (b'{"expected_idle_s": "20"}', "expected_idle_s"),
        (b'{"expected_idle_s": 1e999}', "expected_idle_s"),
        (b'{"expected_idle_s": 1%b}' % (b"0" * 400), "expected_idle_s"),
        (b'{"value": "great"}', "value"),
        (b'{"value": 3}', "value"),
    ],
)
def test_a_body_that_says_nothing_that_can_be_meant(raw: bytes, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        hints_of_body(raw)
    assert (raised.value.status, raised.value.param) == (400, param)
