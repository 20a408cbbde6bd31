"""A client of the OpenAI API that times the first token and keeps tokens and logprobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SESSION_HEADER = "X-Session-ID"
RETURN_HEADER = "X-KVShuttle-Return"
# An answer of 100 tokens takes seconds here; what takes this long hangs.
TIMEOUT_S = 180.0

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    text: str
    # vLLM's own token ids, where `return_token_ids` was asked for and answered.
    token_ids: tuple[int, ...]
    # One a generated token.
    logprobs: tuple[float, ...]
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    # From the request to the first piece of content, as the client saw it.
    ttft_s: float
    total_s: float
    headers: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> Message:
        """As the next turn's history has it."""
        return {"role": "assistant", "content": self.text}


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


class ChatClient:
    """Talks to one base URL, a gateway's or an engine's. Greedy unless told otherwise.

    `returns` is what it asks for where a request does not say.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "model",
        timeout_s: float = TIMEOUT_S,
        returns: str | None = None,
    ) -> None:
        self.url = url
        self._returns = returns
        self._model = model
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def body(
        self, messages: Sequence[Message], *, max_tokens: int, **parameters: Any
    ) -> dict[str, Any]:
        """The request body: greedy, exact length not forced, logprobs and token ids asked for."""
        return {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "seed": 0,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            **parameters,
        }

    def ask(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = 32,
        session: str | None = None,
        returns: str | None = None,
        stream: bool = True,
        headers: Mapping[str, str] | None = None,
        on_first_token: Callable[[], None] | None = None,
        **parameters: Any,
    ) -> Answer:
        """One chat completion. Raises httpx.HTTPError, with the body for an error status.

        `session` and `returns` (auto, never, always) are the gateway's headers; `on_first_token`
        is called once, by the thread that reads the stream; other keywords go into the body.
        """
        sent = dict(headers or {})
        if session is not None:
            sent[SESSION_HEADER] = session
        if returns is None:
            returns = self._returns
        if returns is not None:
            sent[RETURN_HEADER] = returns
        body = self.body(messages, max_tokens=max_tokens, **parameters)
        return self._stream(body, sent, on_first_token) if stream else self._whole(body, sent)

    def _whole(self, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        start = time.perf_counter()
        response = self._http.post("/v1/chat/completions", json=body, headers=headers)
        total = time.perf_counter() - start
        _raise_with_body(response)
        answer = response.json()
        choice = answer["choices"][0]
        return Answer(
            text=choice["message"]["content"] or "",
            token_ids=tuple(choice.get("token_ids") or ()),
            logprobs=_logprobs(choice),
            finish_reason=choice["finish_reason"],
            ttft_s=total,
            total_s=total,
            headers=dict(response.headers),
            **_usage(answer.get("usage")),
        )

    def _stream(
        self,
        body: dict[str, Any],
        headers: Mapping[str, str],
        on_first_token: Callable[[], None] | None,
    ) -> Answer:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        text: list[str] = []
        token_ids: list[int] = []
        logprobs: list[float] = []
        finish: str | None = None
        usage: dict[str, Any] | None = None
        first: float | None = None
        ended = False
        start = time.perf_counter()
        with self._http.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.status_code != 200:
                response.read()
            _raise_with_body(response)
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    ended = True
                    break
                chunk = json.loads(data)
                if "error" in chunk:
                    raise httpx.RemoteProtocolError(f"error in the stream: {data}")
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if first is None and (piece or choice.get("token_ids")):
                        first = time.perf_counter() - start
                        if on_first_token is not None:
                            on_first_token()
                    text.append(piece)
                    token_ids += choice.get("token_ids") or ()
                    logprobs += _logprobs(choice)
                    finish = choice.get("finish_reason") or finish
            total = time.perf_counter() - start
        if not ended:
            raise httpx.RemoteProtocolError("the stream ended without [DONE]")
        return Answer(
            text="".join(text),
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=finish,
            ttft_s=total if first is None else first,
            total_s=total,
            headers=dict(response.headers),
            **_usage(usage),
        )


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    content = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(entry["logprob"] for entry in content)


def _usage(usage: Mapping[str, Any] | None) -> dict[str, int]:
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    return {
        "prompt_tokens": usage.get("prompt_tokens") or 0,
        "completion_tokens": usage.get("completion_tokens") or 0,
        "cached_tokens": details.get("cached_tokens") or 0,
    }


def _raise_with_body(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise httpx.HTTPStatusError(
            f"{response.status_code}: {response.text[:2_000]}",
            request=response.request,
            response=response,
        )
