"""Runs the conversation three ways and measures each turn."""

from __future__ import annotations

import statistics
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshuttle.demo import script
from kvshuttle.demo.cluster import MODEL_NAME, DemoCluster
from kvshuttle.localstack import Answer, ChatClient, ControlPlaneView, Message, user
from kvshuttle.localstack.metrics import EXTERNAL_HITS, LOCAL_HITS, PROMPT_TOKENS
from kvshuttle.v1 import lease_service_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_TOKENS = 48
# The reader reports a transfer at once; the control plane has it some ms after.
LEASE_REPORT_TIMEOUT_S = 5.0
# In float32 it is about 1e-5 between any two ways to compute the same prompt; wrong KV shows here
# before it turns a token.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class TurnResult:
    """One turn, all three ways."""

    turn: int
    question: str
    text: str
    prompt_tokens: int
    # vLLM's own counters on prefill, over the turn with the return.
    returned_tokens: int
    recomputed_tokens: int
    # Bytes that NIXL counted for the turn's return leases.
    returned_bytes: int
    ttft_with_s: float
    ttft_without_s: float
    # In what the turn differs from the plain engine, in words.
    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether the plain engine says the same."""
        return not self.differences

    @property
    def ratio(self) -> float:
        """Time to first token with the return, as a part of that without."""
        return self.ttft_with_s / self.ttft_without_s


@dataclass
class _Way:
    """One client's conversation. Its salt keeps vLLM's prefix caches from serving another's."""

    session: str
    returns: str


class Conversation:
    """The same conversation through the gateway with and without the return, turn about."""

    def __init__(self, cluster: DemoCluster) -> None:
        self._cluster = cluster
        run = uuid.uuid4().hex[:8]
        # What a return does is what is shown, so no turn may do without where that is cheaper.
        self._with = _Way(f"demo-with-{run}", "always")
        self._without = _Way(f"demo-without-{run}", "never")
        self._messages: list[Message] = [{"role": "system", "content": script.SYSTEM}]

    def run(self, turns: int) -> Iterator[TurnResult]:
        """Yields each turn as it is done. Raises httpx.HTTPError and grpc.RpcError."""
        with (
            ChatClient(self._cluster.gateway.url, model=MODEL_NAME) as gateway,
            ChatClient(self._cluster.plain.url, model=MODEL_NAME) as plain,
            ControlPlaneView(self._cluster.control_plane.target) as view,
        ):
            for turn in range(1, turns + 1):
                self._messages.append(user(script.message(turn)))
                result, answer = self._turn(turn, gateway, plain, view)
                # The plain engine's answer is the history of all three.
                self._messages.append(answer.message())
                yield result
            for way in (self._with, self._without):
                view.end_session(way.session)

    def _turn(
        self, turn: int, gateway: ChatClient, plain: ChatClient, view: ControlPlaneView
    ) -> tuple[TurnResult, Answer]:
        # The plain engine first, twice: for the prompt, as prefill does it, then for the answer
        # with the prompt's full blocks cached, as decode does it. So the turn with the return and
        # the plain engine compute the same tokens in the same steps.
        self._ask(plain, None, max_tokens=1)
        expected = self._ask(plain, None)
        # Who goes first changes with every turn, so that neither gains from it.
        if turn % 2:
            without = self._ask(gateway, self._without)
        before = self._cluster.prefill.metrics()
        with_return = self._ask(gateway, self._with)
        after = self._cluster.prefill.metrics()
        if not turn % 2:
            without = self._ask(gateway, self._without)

        prompt, external, local = (
            int(after.total(name) - before.total(name))
            for name in (PROMPT_TOKENS, EXTERNAL_HITS, LOCAL_HITS)
        )
        found = [f"with the return: {text}" for text in _differences(with_return, expected)]
        found += [f"without: {text}" for text in _differences(without, expected)]
        result = TurnResult(
            turn=turn,
            question=script.question(turn),
            text=expected.text,
            prompt_tokens=with_return.prompt_tokens,
            returned_tokens=external,
            recomputed_tokens=prompt - external - local,
            returned_bytes=self._returned_bytes(view, turn) if external else 0,
            ttft_with_s=with_return.ttft_s,
            ttft_without_s=without.ttft_s,
            differences=tuple(found),
        )
        return result, expected

    def _ask(self, client: ChatClient, way: _Way | None, max_tokens: int = MAX_TOKENS) -> Answer:
        options: dict[str, Any] = {"max_tokens": max_tokens}
        if way is not None:
            options |= {
                "session": way.session,
                "returns": way.returns,
                "cache_salt": way.session,
            }
        return client.ask(self._messages, **options)

    def _returned_bytes(self, view: ControlPlaneView, turn: int) -> int:
        deadline = time.monotonic() + LEASE_REPORT_TIMEOUT_S
        while True:
            counted = sum(
                lease.stats.bytes
                for lease in view.leases(self._with.session)
                if lease.turn == turn
                and lease.direction == types_pb2.DIRECTION_RETURN
                and lease.state == lease_service_pb2.LEASE_STATE_COMPLETED
            )
            if counted or time.monotonic() > deadline:
                return counted
            time.sleep(0.05)


def _differences(answer: Answer, expected: Answer) -> list[str]:
    if answer.token_ids != expected.token_ids or not answer.token_ids:
        return [f"it says {answer.text!r} where the plain engine says {expected.text!r}"]
    if answer.text != expected.text or answer.finish_reason != expected.finish_reason:
        return ["the same tokens reached the client as another text"]
    if len(answer.logprobs) != len(expected.logprobs):
        return ["there is not one logprob for each token"]
    off = max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True))
    return [f"a logprob is off by {off:.4f}"] if off > LOGPROB_TOLERANCE else []


def problems(results: Sequence[TurnResult], turns: int) -> list[str]:
    """Why the demo has failed, in words; empty when it has not."""
    found = [f"turn {r.turn}, {text}" for r in results for text in r.differences]
    found += [
        f"turn {r.turn}: {r.returned_tokens} tokens and {r.returned_bytes} bytes were returned"
        for r in results
        if r.turn >= 2 and not (r.returned_tokens and r.returned_bytes)
    ]
    if len(results) < turns:
        found.append(f"only {len(results)} of {turns} turns were run")
    return found


def summary(results: Sequence[TurnResult]) -> dict[str, Any]:
    """The demo's last line: medians over the turns that have something to return."""
    later = [r for r in results if r.turn >= 2]

    found: dict[str, Any] = {
        "turns": len(results),
        "identical": bool(results) and all(r.identical for r in results),
        # Of no turns there is no median.
        "returned_tokens": None,
        "recomputed_tokens": None,
        "ttft_ms_with": None,
        "ttft_ms_without": None,
        "ttft_ratio": None,
    }
    if later:
        with_ms = statistics.median(r.ttft_with_s * 1e3 for r in later)
        without_ms = statistics.median(r.ttft_without_s * 1e3 for r in later)
        found |= {
            "returned_tokens": round(statistics.median(r.returned_tokens for r in later)),
            "recomputed_tokens": round(statistics.median(r.recomputed_tokens for r in later)),
            "ttft_ms_with": round(with_ms, 1),
            "ttft_ms_without": round(without_ms, 1),
            "ttft_ratio": round(with_ms / without_ms, 3),
        }
    return found
