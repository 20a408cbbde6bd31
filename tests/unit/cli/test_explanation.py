"""What is said of a turn, for each way that it may have gone."""

from __future__ import annotations

from typing import Any

import pytest

from kvshuttle.cli.explanation import explain, next_turn
from kvshuttle.v1 import cluster_service_pb2 as cluster
from kvshuttle.v1 import lease_service_pb2 as leases
from kvshuttle.v1 import session_service_pb2 as sessions
from kvshuttle.v1 import types_pb2 as types


def turn(number: int = 2, *, prompt: int = 400, cached: int = 0, **plan: Any) -> sessions.Turn:
    plan.setdefault("return_mode", sessions.RETURN_MODE_LAZY)
    plan.setdefault("reason", "CHEAPER_TO_MOVE")
    plan.setdefault("reusable_tokens", 320)
    made = sessions.Turn(
        turn=number,
        state=sessions.TURN_STATE_ENDED,
        outcome=sessions.TURN_OUTCOME_COMPLETED,
        prefill=sessions.Placement(worker=types.WorkerRef(worker_id="p", incarnation=1)),
        decode=sessions.Placement(worker=types.WorkerRef(worker_id="d", incarnation=1)),
        plan=sessions.Plan(**plan),
        usage=sessions.TurnUsage(prompt_tokens=prompt, cached_tokens=cached),
    )
    made.plan.predicted_recompute.FromMilliseconds(160)
    made.plan.predicted_transfer.FromMilliseconds(17)
    made.usage.time_to_first_token.FromMilliseconds(200)
    return made


def lease(
    state: leases.LeaseState.ValueType = leases.LEASE_STATE_COMPLETED,
    *,
    number: int = 2,
    tokens: int = 0,
    reason: str = "",
    wait_ms: int = 8,
    eager: bool = False,
) -> leases.Lease:
    made = leases.Lease(
        lease_id=f"l{number}",
        turn=number,
        direction=types.DIRECTION_RETURN,
        state=state,
        end_reason=reason,
        eager=eager,
        destination=types.WorkerRef(worker_id="p", incarnation=1),
    )
    if tokens:
        made.stats.tokens, made.stats.blocks, made.stats.bytes = tokens, tokens // 32, tokens * 1000
        made.stats.transfer_time.FromMilliseconds(5)
        made.stats.wait_time.FromMilliseconds(wait_ms)
    return made


def one(made: sessions.Turn, *listed: leases.Lease) -> Any:
    session = sessions.Session(session_id="s", turn_count=made.turn, turns=[made])
    worker = cluster.Worker(prefill_tokens_per_second=2_000)
    (story,) = explain(session, listed, {"p": worker})
    return story


def test_what_came_back() -> None:
    story = one(turn(cached=320), lease(tokens=320))
    assert story.verdict == "good"
    assert "320 tokens came back: 320 kB in 5 ms (64 MB/s)" in story.outcome
    assert story.returned_tokens == 320
    assert "80 tokens" in story.first_token
    assert "40 ms" in story.first_token


def test_a_part_is_never_more_than_the_whole() -> None:
    """The worker's rate is of now, and was another then."""
    assert "; of it about 40 ms" in one(turn(cached=320), lease(tokens=320)).first_token
    fast = turn(cached=320)
    fast.usage.time_to_first_token.FromMilliseconds(30)
    said = one(fast, lease(tokens=320)).first_token
    assert "of it" not in said
    assert "at the worker's rate of now about 40 ms" in said


def test_slower_than_predicted_is_told() -> None:
    story = one(turn(cached=320), lease(tokens=320, wait_ms=500))
    assert story.verdict == "neutral"
    assert "29 times what was predicted" in story.outcome
    assert story.advice


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [("TRANSFER_STALLED", "bad"), ("SOURCE_LOST", "bad"), ("LOCAL_HIT", "good")],
)
def test_planned_and_nothing_came(reason: str, verdict: str) -> None:
    story = one(turn(), lease(leases.LEASE_STATE_FAILED, reason=reason))
    assert story.verdict == verdict
    assert bool(story.advice) == (verdict == "bad")


def test_the_first_turn_is_no_trouble_and_a_later_one_without_kv_is() -> None:
    plan: dict[str, Any] = {
        "return_mode": sessions.RETURN_MODE_NONE,
        "reason": "NO_REPLICA",
        "reusable_tokens": 0,
    }
    first = one(turn(1, **plan))
    assert first.verdict == "good"
    assert "least loaded" in first.placement
    later = one(turn(3, **plan))
    assert later.verdict == "bad"
    assert "retention" in later.advice


def test_open_and_forgotten_leases() -> None:
    running = turn()
    running.state = sessions.TURN_STATE_RUNNING
    assert one(running, lease(leases.LEASE_STATE_GRANTED)).verdict == "open"
    assert one(running).verdict == "open"
    assert one(turn()).verdict == "neutral"
    assert "no longer listed" in one(turn(cached=320)).outcome


def test_an_eager_return_belongs_to_the_turn_after_it() -> None:
    plan: dict[str, Any] = {"return_mode": sessions.RETURN_MODE_EAGER, "reason": "EAGER_HIT"}
    story = one(turn(2, cached=320, **plan), lease(number=1, tokens=320, eager=True))
    assert story.verdict == "good"
    assert "before the turn began" in story.outcome
    lost = one(turn(2, cached=0, **plan), lease(number=1, tokens=320, eager=True))
    assert lost.verdict == "bad"
    hardly = one(turn(2, cached=64, **plan), lease(number=1, tokens=320, eager=True))
    assert hardly.verdict == "bad"
    assert "64 of 400 prompt tokens" in hardly.outcome
    assert "edits its history" in hardly.advice


def test_what_is_ready_for_the_next_turn() -> None:
    session = sessions.Session(session_id="s", turn_count=2)
    ahead = lease(number=2, tokens=320, eager=True)
    assert "320 tokens lie in p's cache" in next_turn(session, [ahead])
    assert "on its way" in next_turn(
        session, [lease(leases.LEASE_STATE_ACTIVE, number=2, eager=True)]
    )
    gone = lease(leases.LEASE_STATE_FAILED, number=2, eager=True, reason="SOURCE_LOST")
    assert "SOURCE_LOST" in next_turn(session, [gone])
    hit = lease(number=2, eager=True, reason="LOCAL_HIT")
    assert "nothing had to be brought" in next_turn(session, [hit])
    assert next_turn(session, [lease(number=1, tokens=320, eager=True)]) == ""
    session.state = sessions.SESSION_STATE_ENDED
    assert next_turn(session, [ahead]) == ""


def test_words_of_a_newer_server() -> None:
    story = one(turn(return_mode=9, reason="FROM_THE_FUTURE"))
    assert "does not know" in story.plan


def test_what_was_compared_is_shown_beside_what_happened() -> None:
    made = turn(cached=320, placement="KV_IS_THERE")
    made.plan.predicted_ttft.FromMilliseconds(100)
    made.plan.candidates.extend(
        [
            sessions.Candidate(
                prefill_worker_id="p",
                decode_worker_id="d",
                return_mode=sessions.RETURN_MODE_LAZY,
                ttft_us=100_000,
                transfer_us=17_000,
                compute_us=73_000,
                forward_us=10_000,
                compute_tokens=80,
                assumed=["LINK_RATE"],
            ),
            sessions.Candidate(
                decode_worker_id="d",
                return_mode=sessions.RETURN_MODE_DIRECT,
                ttft_us=90_000,
                compute_us=90_000,
                rejected="LONG_PROMPT",
            ),
        ]
    )
    told = one(made, lease(tokens=320))
    first, second, again = told.compared
    assert (again.how, again.first_token_s) == ("compute it all", 0.243)
    assert "400 tokens to compute" in again.parts
    assert (first.where, first.how, first.chosen) == ("p → d", "move, then compute", True)
    assert "17 ms move, 73 ms compute, 10 ms on to decode" in first.parts
    assert first.note.startswith("LINK_RATE: nobody has reported")
    assert (second.where, second.chosen) == ("d", False)
    assert second.note.startswith("not chosen: LONG_PROMPT")
    assert told.placement.startswith("prefill on p, decode on d: KV_IS_THERE")
    assert (told.actual.first_token_s, told.actual.off) == (0.2, 2.0)
    assert (told.actual.moved_s, told.actual.computed_tokens) == (0.005, 80)
    assert one(turn(cached=320)).actual is None


def test_a_prefix_of_another_session_is_named() -> None:
    shared = lease(number=1, tokens=320)
    shared.source_session_id = "parent"
    told = one(
        turn(1, cached=320, return_mode=sessions.RETURN_MODE_NONE, reason="NO_REPLICA"), shared
    )
    assert "320 tokens came back" in told.outcome
    assert "parent of its tenant began the same way" in told.outcome
    assert told.verdict == "good"


def test_how_the_prompt_reached_decode() -> None:
    push, pull = types.FORWARD_MODE_PUSH, types.FORWARD_MODE_PULL
    said = one(turn(forward_mode=push, forward_reason="OVERLAP_PAYS")).plan
    assert "pushed to decode while prefill computes" in said
    said = one(turn(forward_mode=pull, forward_reason="TOO_SHORT_TO_OVERLAP")).plan
    assert "decode reads when prefill has ended: prefill computes too little" in said
    # Where nothing else was ever meant, nothing is said of it.
    assert "decode" not in one(turn(forward_mode=pull, forward_reason="CONFIGURED")).plan
