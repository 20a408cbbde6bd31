"""The Responses API and Anthropic's messages on real engines, asked by the makers' own clients.

Each conversation's words are the plain engine's for the same chat, and what is said to be cached is
what vLLM counted as loaded from decode: prefill's own cache is empty before each turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import anthropic
import openai
import pytest

from kvshuttle.localstack import Engine, local_http, user
from tests.e2e.conftest import Cluster
from tests.e2e.steps import BLOCK
from tests.support.conversation import MAX_TOKENS, Conversation, Oracle, text

pytestmark = pytest.mark.usefixtures("nothing_leaked")

ALWAYS = {"X-KVShuttle-Return": "always"}
LONG = text(6_000, 3)


@dataclass(frozen=True)
class Said:
    """An answer, whatever its API calls things."""

    text: str
    prompt: int
    cached: int
    headers: dict[str, str]
    # As the client sends it back with the next turn.
    again: list[dict[str, Any]]


class Client(Protocol):
    """One API, by its own client."""

    def ask(self, history: list[Any], *, stream: bool) -> Said:
        """One turn."""


class Responses:
    """OpenAI's client."""

    def __init__(self, url: str) -> None:
        self.sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, history: list[Any], *, stream: bool) -> Said:
        asked: dict[str, Any] = {
            "model": "model",
            "input": history,
            "max_output_tokens": MAX_TOKENS,
            "temperature": 0.0,
            "extra_headers": ALWAYS,
        }
        if stream:
            with self.sdk.responses.stream(**asked) as events:
                answer: Any = events.get_final_response()
                headers = dict(events._response.headers)
        else:
            raw = self.sdk.responses.with_raw_response.create(**asked)
            answer, headers = raw.parse(), dict(raw.headers)
        usage = answer.usage
        found = usage.input_tokens_details.cached_tokens
        again = [one.to_dict() for one in answer.output]
        return Said(answer.output_text, usage.input_tokens, found, headers, again)


class Messages:
    """Anthropic's client."""

    def __init__(self, url: str) -> None:
        self.sdk = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def ask(self, history: list[Any], *, stream: bool) -> Said:
        asked: dict[str, Any] = {
            "model": "model",
            "messages": history,
            "max_tokens": MAX_TOKENS,
            "extra_body": {"temperature": 0.0},
            "extra_headers": ALWAYS,
        }
        if stream:
            with self.sdk.messages.stream(**asked) as events:
                answer: Any = events.get_final_message()
                headers = dict(events.response.headers)
        else:
            raw = self.sdk.messages.with_raw_response.create(**asked)
            answer, headers = raw.parse(), dict(raw.headers)
        usage = answer.usage
        found = usage.cache_read_input_tokens
        prompt = usage.input_tokens + found + usage.cache_creation_input_tokens
        content = [one.to_dict() for one in answer.content]
        again = [{"role": "assistant", "content": content}]
        return Said(answer.content[0].text, prompt, found, headers, again)


@pytest.fixture(scope="module")
def responses(cluster: Cluster) -> Iterator[Responses]:
    client = Responses(cluster.gateway.url)
    with client.sdk:
        yield client


@pytest.fixture(scope="module")
def messages(cluster: Cluster) -> Iterator[Messages]:
    client = Messages(cluster.gateway.url)
    with client.sdk:
        yield client


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_conversation_comes_back_turn_by_turn(
    cluster: Cluster, oracle: Oracle, api: str, request: pytest.FixtureRequest
) -> None:
    client: Client = request.getfixturevalue(api)
    talk = Conversation(api, seed={"responses": 200, "messages": 201}[api])
    history: list[Any] = []
    least, sessions = 0, set()
    for number in range(1, 4):
        cluster.forget_prefill()
        before = cluster.returned_tokens()
        expected = oracle.answer(talk.say())
        history.append(talk.messages[-1])
        said = client.ask(history, stream=number != 2)
        assert (said.text, said.prompt) == (expected.text, expected.prompt_tokens)
        # Each API says it in a place of its own; here it is what came back, and nothing else.
        returned = cluster.returned_tokens() - before
        assert said.cached == returned
        assert least <= returned <= said.prompt
        assert said.headers["x-kvshuttle-turn"] == str(number)
        sessions.add(said.headers["x-kvshuttle-session"])
        least = said.prompt // BLOCK * BLOCK
        talk.heard(expected)
        history += said.again
        cluster.wait_offered(said.headers["x-kvshuttle-session"], least)
    assert len(sessions) == 1


def test_a_stored_response_is_gone_on_from(
    cluster: Cluster, plain: Engine, responses: Responses
) -> None:
    theirs = openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0)
    known: list[str | None] = [None, None]
    sessions = set()
    with theirs:
        for number in range(2):
            answers: list[Any] = []
            for at, sdk in enumerate((responses.sdk, theirs)):
                raw = sdk.responses.with_raw_response.create(
                    model="model",
                    input=text(100, 300 + number),
                    max_output_tokens=MAX_TOKENS,
                    temperature=0.0,
                    previous_response_id=known[at],
                )
                answers.append(raw.parse())
                known[at] = answers[-1].id
                if sdk is responses.sdk:
                    sessions.add(raw.headers["x-kvshuttle-session"])
            ours, expected = answers
            assert ours.output_text == expected.output_text
            assert ours.usage.input_tokens == expected.usage.input_tokens
    assert len(sessions) == 1
    assert known[0] is not None
    assert responses.sdk.responses.retrieve(known[0]).output_text == ours.output_text
    with pytest.raises(openai.NotFoundError) as raised:
        responses.sdk.responses.create(model="model", input="x", previous_response_id="resp_x")
    assert raised.value.code == "previous_response_not_found"


def test_a_session_is_named_by_what_clients_send(responses: Responses, messages: Messages) -> None:
    """In this order; the first two of a request count where it has several."""
    headers = {"X-Session-ID": "d-1", "X-Claude-Code-Session-Id": "d-2", "Session-Id": "d-3"}
    fields = {"prompt_cache_key": "d-4", "conversation": "d-5"}
    named = []
    while headers or fields:
        raw = responses.sdk.responses.with_raw_response.create(
            model="model",
            input="Who?",
            max_output_tokens=1,
            extra_headers=headers,
            extra_body=fields,
        )
        named.append(raw.headers["x-kvshuttle-session"])
        first = headers or fields
        del first[next(iter(first))]
    metadata: Any = {"user_id": "user_1_account__session_00000000-d6"}
    answer = messages.sdk.messages.with_raw_response.create(
        model="model",
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=1,
        metadata=metadata,
    )
    named.append(answer.headers["x-kvshuttle-session"])
    assert named == ["d-1", "d-2", "d-3", "d-4", "d-5", "00000000-d6"]


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("/v1/messages", {"model": "nobody"}),
    "field": ("/v1/messages", {"max_tokens": None}),
    "long": ("/v1/messages", {"messages": [user(LONG)], "stream": True}),
    "responses-model": ("/v1/responses", {"model": "nobody"}),
    "responses-field": ("/v1/responses", {"input": None}),
    "responses-long": ("/v1/responses", {"input": LONG, "stream": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_its_apis_shape(cluster: Cluster, plain: Engine, name: str) -> None:
    path, changes = REFUSED[name]
    usual: dict[str, Any] = {"model": "model"}
    if path == "/v1/messages":
        usual |= {"messages": [user("x")], "max_tokens": 5}
    else:
        usual |= {"input": "x", "max_output_tokens": 5}
    body = {key: value for key, value in (usual | changes).items() if value is not None}
    ours, theirs = (
        local_http.post(url + path, json=body, timeout=60)
        for url in (cluster.gateway.url, plain.url)
    )
    assert ours.status_code == theirs.status_code >= 400
    error = ours.json()["error"]
    if path == "/v1/messages":
        assert ours.json()["type"] == "error"
        assert error["type"] == ("not_found_error" if name == "model" else "invalid_request_error")
    else:
        assert {"message", "type", "param", "code"} <= error.keys()
    expected = theirs.json()["error"]["message"]
    assert error["message"].partition("<dict")[0] == expected.partition("<dict")[0]


def test_a_client_that_leaves_in_the_middle(
    cluster: Cluster, responses: Responses, messages: Messages
) -> None:
    """Both engines let go; `nothing_leaked` looks."""
    long: dict[str, Any] = {"model": "model", "extra_body": {"ignore_eos": True}}
    with contextlib.closing(
        responses.sdk.responses.create(
            input=text(80, 301), max_output_tokens=900, stream=True, **long
        )
    ) as events:
        assert next(one for one in events if one.type == "response.output_text.delta")
    with messages.sdk.messages.stream(
        messages=[{"role": "user", "content": text(80, 302)}], max_tokens=900, **long
    ) as stream:
        assert next(one for one in stream if one.type == "content_block_delta")
