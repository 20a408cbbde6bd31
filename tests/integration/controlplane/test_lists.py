"""Lists of many sessions: by key, a page at a time, none of which looks at all of them."""

from __future__ import annotations

import pytest

from kvshuttle.controlplane.services import sessions as service
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types
from tests.integration.controlplane.agent import hashes
from tests.integration.controlplane.conftest import Cluster, T, eventually


async def pages(cluster: Cluster, size: int, **only: object) -> list[list[str]]:
    """The ids of every page."""
    found: list[list[str]] = []
    token = ""
    while True:
        request = sessions.ListSessionsRequest(page_size=size, page_token=token)
        for name, value in only.items():
            setattr(request, name, value)
        page = await cluster.sessions.ListSessions(request, timeout=T)
        found.append([session.session_id for session in page.sessions])
        token = page.next_page_token
        if not token:
            return found


async def test_pages_follow_one_another_by_key(cluster: Cluster) -> None:
    await cluster.pair()
    names = [f"s{number:02d}" for number in range(7)]
    for name in reversed(names):
        await cluster.begin(name)
    assert await pages(cluster, 3) == [names[:3], names[3:6], names[6:]]
    assert await pages(cluster, 7) == [names]


async def test_a_session_that_comes_or_goes_between_pages_moves_no_other(cluster: Cluster) -> None:
    await cluster.pair()
    for name in ("b", "d", "f"):
        await cluster.begin(name)
    request = sessions.ListSessionsRequest(page_size=2)
    page = await cluster.sessions.ListSessions(request, timeout=T)
    for name in ("a", "e"):
        await cluster.begin(name)
    request.page_token = page.next_page_token
    page = await cluster.sessions.ListSessions(request, timeout=T)
    assert [session.session_id for session in page.sessions] == ["e", "f"]


async def test_what_few_match_is_found_over_short_pages(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LIST_SCAN", 4)
    _, decode = await cluster.pair()
    for number in range(10):
        begun = await cluster.begin(f"s{number}")
        if number in (2, 7):
            chain = hashes(f"s{number}", 20)
            await decode.offer(chain, f"s{number}", begun.turn_token, types.LEG_DECODE)
    request = sessions.EndSessionRequest(session_id="s8")
    await cluster.sessions.EndSession(request, timeout=T)
    ended = await pages(cluster, 5, state=sessions.SESSION_STATE_ENDED)
    assert ended == [[], [], ["s8"]]
    active = await pages(cluster, 5, state=sessions.SESSION_STATE_ACTIVE)
    assert [x for page in active for x in page] == [
        f"s{number}" for number in (0, 1, 2, 3, 4, 5, 6, 7, 9)
    ]
    await eventually(lambda: cluster.session("s7"), lambda s: bool(s.replicas))
    here = await pages(cluster, 5, worker_id="d")
    assert [x for page in here for x in page] == ["s2", "s7"]
    assert len(here) == 3
