"""The soak's first oracle objects to what is wrong, and to nothing else."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.soak.cluster import bad_lines
from tests.soak.judge import Choice, Judge, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY: dict[str, Any] = {"messages": [], "max_tokens": 3}
# Token, logprob, logprob of the runner-up: the last is as good as a tie.
PLAIN = ((11, -0.1, -3.0), (12, -0.2, -2.0), (13, -0.7, -0.7004))


def answer(request: httpx.Request) -> httpx.Response:
    """As the plain engine; an error where the prompt asks for one."""
    body = json.loads(request.content)
    if body["messages"] == ["too long"]:
        return httpx.Response(400, json={"error": {"message": "too long"}})
    content = [
        {"logprob": own, "top_logprobs": [{"logprob": own}, {"logprob": other}]}
        for _, own, other in PLAIN
    ]
    choice = {
        "token_ids": [token for token, _, _ in PLAIN],
        "logprobs": {"content": content},
        "finish_reason": "length",
        "message": {"content": "abc"},
    }
    return httpx.Response(200, json={"choices": [choice]})


@pytest.fixture
def judge() -> Iterator[Judge]:
    """One whose plain engine is `answer`."""
    judge = Judge("http://plain", transport=httpx.MockTransport(answer))
    yield judge
    judge.close()


def reply(
    tokens: tuple[int, ...] = (11, 12, 13),
    logprobs: tuple[float, ...] = (-0.1, -0.2, -0.7),
    *,
    text: str = "abc",
    finish: str = "length",
    count: int = 1,
) -> Reply:
    """An answer; the plain engine's unless said otherwise."""
    return Reply(200, (Choice(tokens, logprobs, (), finish, text),) * count)


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (reply((11, 99, 13)), "token 1 is 99, plain 12"),
        (reply((11, 12), (-0.1, -0.2)), "2 tokens, plain 3"),
        (reply((11, 12, 13), (-0.1, -0.2)), "3 tokens with 2 logprobs"),
        (reply((), ()), "0 tokens with 0 logprobs"),
        (reply(logprobs=(-0.1, -0.25, -0.7)), "logprob 1 is off by 0.05"),
        # A tie excuses what follows it, not what came before.
        (reply((11, 12, 77), (-0.15, -0.2, -0.7)), "logprob 0 is off by 0.05"),
        (reply(text="abd"), "text is 'abd', plain 'abc'"),
        (reply(finish="stop"), "finish is 'stop', plain 'length'"),
        (reply(count=2), "2 choices"),
        (Reply(500, (), "broken"), r"status 500 \(broken\), plain 200"),
        (Reply(0, (), "ReadError"), r"status 0 \(ReadError\), plain 200"),
    ],
)
def test_what_is_wrong_is_named(judge: Judge, ours: Reply, said: str) -> None:
    found = judge.check(BODY, ours)
    assert len(found) == 1
    assert re.search(said, found[0]), found
    assert judge.identical == 0


@pytest.mark.parametrize(
    "ours",
    [reply(), reply(logprobs=(-0.1002, -0.2, -0.7)), reply((11, 12, 77), (-0.1, -0.2, -0.7004))],
    ids=["same", "rounded", "tie"],
)
def test_what_is_right_passes(judge: Judge, ours: Reply) -> None:
    assert judge.check(BODY, ours) == []
    assert judge.identical == 1


def test_an_error_that_the_plain_engine_has_too_is_no_violation(judge: Judge) -> None:
    body = BODY | {"messages": ["too long"]}
    assert judge.check(body, Reply(400, (), "too long")) == []
    assert judge.check(body, reply()) == ["status 200 (), plain 400"]


def test_all_samples_are_looked_at(judge: Judge) -> None:
    good, bad = reply().choices[0], reply((11, 99, 13)).choices[0]
    assert judge.check(BODY | {"n": 2}, Reply(200, (good, good))) == []
    assert judge.check(BODY | {"n": 2}, Reply(200, (good, bad))) == [
        "choice 1: token 1 is 99, plain 12"
    ]


def test_a_core_may_be_dead_only_where_the_soak_has_killed_it() -> None:
    dead = "(APIServer pid=17) ERROR vllm.v1.engine.exceptions.EngineDeadError: see above"
    assert bad_lines("engine", dead, ()) == [dead]
    assert bad_lines("engine", dead, {7, 170}) == [dead]
    assert bad_lines("engine", dead, {17}) == []
    other = '(EngineCore pid=17) {"event": "hook_failed"}'
    assert bad_lines("engine", f"all is well\n{other}", {17}) == [other]
    assert bad_lines("service", f"{dead}\nTraceback", ()) == ["Traceback"]
