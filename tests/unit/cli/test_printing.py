"""Numbers, tables, JSON shapes, bars."""

from __future__ import annotations

import datetime

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from kvshuttle.cli import human
from kvshuttle.cli.output import Column, Rows
from kvshuttle.cli.pool import bar, parts, shares
from kvshuttle.cli.shape import shape
from kvshuttle.v1 import agent_service_pb2 as agents
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (human.span(0.00842), "8.42 ms"),
        (human.span(0.9999), "1 s"),
        (human.span(59.97), "1 m 0 s"),
        (human.span(200), "3 m 20 s"),
        (human.span(7_500), "2 h 5 m"),
        (human.span(90_000), "1 d 1 h"),
        (human.span(-3), "-3 s"),
        (human.size(999), "999 B"),
        (human.size(7_360_000), "7.36 MB"),
        (human.size(999_999), "1 MB"),
        (human.gigabytes(1.472e9), "1.47 GB/s"),
        (human.gigabytes(3_000_000), "3 MB/s"),
        (human.throughput(0, 1), "-"),
        (human.share(1, 1_000), "0.1 %"),
        (human.share(0, 0), "-"),
        (human.short(12_340), "12.3k"),
        (human.short(999_900), "1.0M"),
    ],
)
def test_numbers(said: str, text: str) -> None:
    assert said == text


def test_ages_are_never_below_zero() -> None:
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    ahead = Timestamp()
    ahead.FromDatetime(at + datetime.timedelta(seconds=5))
    assert human.age(ahead, at) == "0 s"
    assert human.age(Timestamp(), at) == "-"


def test_a_narrow_table_loses_what_matters_least() -> None:
    rows = Rows([Column("A", keep=90), Column("LONG", keep=10), Column("B", keep=80)])
    rows.add("aaaaaaaa", "xxxxxxxxxx", "bbbb")
    assert rows.fitting(100) == ([0, 1, 2], [])
    assert rows.fitting(24) == ([0, 2], ["LONG"])
    assert rows.fitting(5) == ([0], ["LONG", "B"])
    with pytest.raises(ValueError, match="2 cells for 3"):
        rows.add("a", "b")


def test_shapes_have_the_apis_names_and_plain_values() -> None:
    lease = leases.Lease(lease_id="l", state=leases.LEASE_STATE_GRANTED, head_hash=b"\x01\xff")
    lease.ttl.FromMilliseconds(1_500)
    lease.create_time.FromNanoseconds(1_700_000_000_123_000_000)
    found = shape(lease)
    assert set(found) == {
        f"{field.name}_s" if field.name == "ttl" else field.name
        for field in leases.Lease.DESCRIPTOR.fields
    }
    assert (found["state"], found["head_hash"], found["ttl_s"]) == ("granted", "01ff", 1.5)
    assert found["create_time"] == "2023-11-14T22:13:20.123Z"
    assert found["grant_time"] is None
    assert found["stats"] is None
    newer = leases.Lease()
    newer.state = 99  # type: ignore[assignment]
    assert shape(newer)["state"] == "unknown-99"


def test_tokens_and_memory_never_get_out() -> None:
    assert "turn_token" not in shape(sessions.BeginTurnResponse(turn_token="secret"))
    endpoint = agents.RankEndpoint(agent_metadata=b"m", regions=[agents.MemoryRegion()])
    assert "agent_metadata" not in shape(endpoint)
    assert "base_address" not in shape(endpoint)["regions"][0]


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=6), st.integers(8, 200))
def test_cells_of_a_bar(values: list[int], width: int) -> None:
    cells = shares(tuple(values), width)
    if not any(values):
        assert not any(cells)
        return
    assert sum(cells) == width
    assert all((cell > 0) == (value > 0) for cell, value in zip(cells, values, strict=True))


@given(st.integers(0, 1_000), st.integers(0, 1_200), st.integers(0, 1_200), st.integers(0, 1_200))
def test_parts_of_a_pool_make_up_the_whole(total: int, free: int, held: int, bad: int) -> None:
    pool = cluster.PoolStats(
        total_blocks=total, free_blocks=free, held_blocks=held, quarantined_blocks=bad
    )
    found = parts(pool)
    assert sum(found) == total
    assert min(found) >= 0
    assert bar(pool, 20).cell_len == 20
