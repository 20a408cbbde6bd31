"""Pauses between tries to connect."""

from __future__ import annotations

from kvshuttle.dataplane.backoff import Backoff
from kvshuttle.dataplane.limits import RECONNECT_MAX_S, RECONNECT_MIN_S


def test_pauses_double_up_to_a_bound() -> None:
    agents = [[backoff.pause() for _ in range(10)] for backoff in (Backoff() for _ in range(1_000))]
    longest = [max(pauses) for pauses in zip(*agents, strict=True)]
    for number, seconds in enumerate(longest):
        most = min(RECONNECT_MIN_S * 2**number, RECONNECT_MAX_S)
        assert 0.9 * most < seconds <= most


def test_pauses_are_spread_over_their_whole_range() -> None:
    agents = [Backoff(1.0, 1.0).pause() for _ in range(10_000)]
    tenths = [sum(int(x * 10) == n for x in agents) for n in range(10)]
    assert min(tenths) > 800


def test_only_a_connection_that_lasted_ends_the_patience() -> None:
    backoff = Backoff(1.0, 1_000.0)
    for _ in range(11):
        backoff.pause()
    backoff.worked(0.5)
    assert max(backoff.pause() for _ in range(200)) > 100
    backoff.worked(1_000.0)
    assert backoff.pause() <= 1.0
