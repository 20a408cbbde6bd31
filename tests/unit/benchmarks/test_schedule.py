"""Schedules of prompts, fixed and after recorded sessions, and the texts that fill them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.ttft.schedule import MAX_GAP_S, MIN_NEW_TOKENS, fixed, from_traces, read_traces
from benchmarks.ttft.texts import CLOSE_ENOUGH, History, fit
from kvshuttle.localstack import Message, user


def count(messages: Sequence[Message]) -> int:
    """A tokenizer for tests: words, and four a message for its template."""
    return sum(len(m["content"].split()) + 4 for m in messages)


def session(name: str, turns: int, *, rewritten: int = -1) -> dict[str, object]:
    """A recorded session that grows by 1,000 a turn; at `rewritten` half of it is replaced."""
    made = []
    for at in range(turns):
        prompt = 10_000 + 1_000 * at
        shared = 0 if not at else (prompt // 2 if at == rewritten else prompt - 1_000)
        made.append([at * 30.0, prompt, shared, 200, 5.0])
    return {"id": name, "turns": made}


def test_the_fixed_schedule_is_the_published_one_from_turn_two_on() -> None:
    plan = fixed(0, turns=4, output_tokens=64, gap_s=2.0)
    assert [t.prompt_tokens for t in plan.turns] == [1_500, 2_000, 2_500, 3_000]
    assert [t.shared_tokens for t in plan.turns] == [0, 1_500, 2_000, 2_500]
    assert plan.tokens == 3_064


def test_recorded_sessions_are_scaled_to_the_window_and_only_grow_where_they_grew() -> None:
    plans = from_traces([session("s1", 40)], count=1, turns=5, window=3_000, max_output=32)
    (plan,) = plans
    assert plan.kind == "trace"
    prompts = [t.prompt_tokens for t in plan.turns]
    assert prompts == sorted(prompts)
    assert 3_000 <= prompts[-1] <= 3_000 + 5 * (32 + MIN_NEW_TOKENS)
    for before, turn in zip(plan.turns, plan.turns[1:], strict=False):
        assert turn.shared_tokens == before.prompt_tokens
        assert turn.prompt_tokens >= before.prompt_tokens + before.output_tokens + MIN_NEW_TOKENS
        assert 0 < turn.gap_s <= MAX_GAP_S
        assert turn.output_tokens <= 32


def test_a_rewritten_history_stays_rewritten() -> None:
    found = [
        turn
        for seed in range(20)
        for plan in from_traces(
            [session("s1", 12, rewritten=8)],
            count=1,
            turns=6,
            window=2_000,
            max_output=32,
            seed=seed,
        )
        for before, turn in zip(plan.turns, plan.turns[1:], strict=False)
        if turn.shared_tokens < before.prompt_tokens
    ]
    assert found
    assert all(turn.prompt_tokens > turn.shared_tokens for turn in found)


def test_sessions_that_are_short_in_turns_or_tokens_are_left_out() -> None:
    sessions = [session("few", 9), session("small", 20) | {"turns": [[0, 100, 0, 5, 1]] * 20}]
    assert from_traces(sessions, count=2, turns=5, window=2_000, max_output=32) == []


def test_traces_are_read_gzipped_and_plain(tmp_path: Path) -> None:
    line = json.dumps(session("s1", 3)) + "\n"
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(line)
    with gzip.open(packed, "wt") as file:
        file.write(line + "\n")
    assert read_traces(plain) == read_traces(packed) == [json.loads(line)]


@pytest.mark.parametrize("tokens", [40, 300, 1_500])
def test_a_message_is_made_to_length(tokens: int) -> None:
    history = [user("hello"), {"role": "assistant", "content": "good day to you"}]
    message = fit(history, tokens, "seed", count)
    assert abs(count([*history, message]) - tokens) <= 14
    assert message == fit(history, tokens, "seed", count)


def test_a_history_that_is_too_long_already_is_refused() -> None:
    with pytest.raises(ValueError, match="30 are wanted"):
        fit([user("word " * 100)], 30, "seed", count)


def test_a_conversation_grows_to_the_plan() -> None:
    history = History(fixed(3, turns=4, output_tokens=64, gap_s=0), count)
    before: list[Message] = []
    for turn, wanted in enumerate((1_500, 2_000, 2_500, 3_000), start=1):
        messages = history.ask(turn)
        assert messages[: len(before)] == before
        assert abs(count(messages) - wanted) <= CLOSE_ENOUGH + 6
        answer = {"role": "assistant", "content": "so it goes " * 20}
        history.heard(answer)
        before = [*messages, answer]


def test_a_rewritten_conversation_keeps_whole_messages_only() -> None:
    plan = fixed(0, turns=3, output_tokens=64, gap_s=0)
    last = plan.turns[2]
    shorter = type(last)(2_500, 1_700, last.output_tokens, 0.0)
    history = History(type(plan)("x", "trace", 0, (*plan.turns[:2], shorter)), count)
    first = history.ask(1)
    history.heard({"role": "assistant", "content": "yes"})
    history.ask(2)
    history.heard({"role": "assistant", "content": "no"})
    messages = history.ask(3)
    assert messages[0] == first[0]
    assert [m["content"] for m in messages[1:2]] == ["yes"]
    assert len(messages) == 3
    assert abs(count(messages) - 2_500) <= CLOSE_ENOUGH + 6
