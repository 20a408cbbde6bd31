"""The first oracle: whatever the gateway answers, one plain engine answers too."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

# Between any two ways to compute a prompt in float32 lies about 1e-5; wrong KV is far beyond.
TOLERANCE = 1e-3
REQUEST_TIMEOUT_S = 180.0
Body = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One sample: tokens, the logprob of each, and of each the runner-up."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    runners_up: tuple[float, ...]
    finish: str | None
    text: str


@dataclass(frozen=True)
class Reply:
    """What came back: a status, and choices where it is 200."""

    status: int
    choices: tuple[Choice, ...]
    problem: str = ""


def parse_choice(choice: dict[str, Any]) -> Choice:
    """Of an answer that came in one piece."""
    content = (choice.get("logprobs") or {}).get("content") or []
    return Choice(
        tokens=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(entry["logprob"] for entry in content),
        runners_up=tuple(
            max((t["logprob"] for t in entry["top_logprobs"][1:]), default=float("-inf"))
            for entry in content
        ),
        finish=choice.get("finish_reason"),
        text=(choice.get("message") or {}).get("content") or "",
    )


@dataclass
class Judge:
    """Asks the plain engine what it would have answered. Any thread."""

    plain_url: str
    transport: httpx.BaseTransport | None = None
    identical: int = 0
    ties: int = 0
    largest_difference: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._http = httpx.Client(
            base_url=self.plain_url,
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            transport=self.transport,
        )

    def close(self) -> None:
        """Closes its connections."""
        self._http.close()

    def check(self, body: Body, reply: Reply) -> list[str]:
        """In what the reply differs from the plain engine's, in words."""
        # One sample is enough: at temperature 0 all are the same.
        plain_body = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        plain_body |= {"n": 1, "top_logprobs": 2}
        response = self._http.post("/v1/chat/completions", json=plain_body)
        if response.status_code != reply.status:
            return [f"status {reply.status} ({reply.problem}), plain {response.status_code}"]
        if reply.status != 200:
            return []
        expected = parse_choice(response.json()["choices"][0])
        wanted = body.get("n", 1)
        found = [] if len(reply.choices) == wanted else [f"{len(reply.choices)} choices"]
        for number, choice in enumerate(reply.choices):
            found += [f"choice {number}: {x}" for x in self._compare(choice, expected)]
        if not found:
            with self._lock:
                self.identical += 1
        return found

    def _compare(self, ours: Choice, plain: Choice) -> list[str]:
        if not ours.tokens or len(ours.tokens) != len(ours.logprobs):
            return [f"{len(ours.tokens)} tokens with {len(ours.logprobs)} logprobs"]
        for at, (a, b) in enumerate(zip(ours.tokens, plain.tokens, strict=False)):
            if a == b:
                continue
            if plain.logprobs[at] - plain.runners_up[at] < TOLERANCE:
                # Two tokens are equally likely; any rounding decides, in plain vLLM too.
                with self._lock:
                    self.ties += 1
                return self._logprobs(ours, plain, at)
            return [f"token {at} is {a}, plain {b}", *self._logprobs(ours, plain, at)]
        if len(ours.tokens) != len(plain.tokens):
            return [f"{len(ours.tokens)} tokens, plain {len(plain.tokens)}"]
        found = self._logprobs(ours, plain, len(ours.tokens))
        for what in ("finish", "text"):
            if getattr(ours, what) != getattr(plain, what):
                found.append(f"{what} is {getattr(ours, what)!r}, plain {getattr(plain, what)!r}")
        return found

    def _logprobs(self, ours: Choice, plain: Choice, count: int) -> list[str]:
        off = [
            abs(a - b) for a, b in zip(ours.logprobs[:count], plain.logprobs[:count], strict=True)
        ]
        worst = max(off, default=0.0)
        with self._lock:
            self.largest_difference = max(self.largest_difference, worst)
        return [f"logprob {off.index(worst)} is off by {worst:.6f}"] if worst > TOLERANCE else []
