"""Clients whose conversations go on, start again, fork, shrink, are rewritten and are left."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from kvshuttle.localstack import user
from tests.soak.judge import REQUEST_TIMEOUT_S, Body, Choice, Judge, Reply, parse_choice
from tests.support.conversation import text

if TYPE_CHECKING:
    from random import Random

    from kvshuttle.localstack import Message
    from tests.soak.cluster import SoakCluster
    from tests.soak.tally import Tally

# What takes longer, with little memory and a program that is paused for seconds, hangs.
HANG_S = 120.0
# Conversations that end up near the window, where the engine refuses what is too long.
MOST_WORDS = 1_250
# Between requests to a gateway that is not there.
DEAD_S = 0.2
SHARED = ("shared-a", "shared-b")


@dataclass
class Talk:
    """A client's copy of one conversation."""

    session: str | None
    messages: list[Message] = field(default_factory=list)

    @property
    def words(self) -> int:
        """Of the whole history."""
        return sum(len(m["content"].split()) for m in self.messages)


class SoakClient(threading.Thread):
    """One client, one request at a time, until told to stop. All choices come from `chance`."""

    def __init__(
        self, name: str, cluster: SoakCluster, judge: Judge, tally: Tally, chance: Random
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = threading.Event()
        self._cluster = cluster
        self._judge = judge
        self._tally = tally
        self._chance = chance
        self._talks: list[Talk] = []
        self._names = 0
        self._http = httpx.Client(
            base_url=cluster.gateway.url, timeout=REQUEST_TIMEOUT_S, trust_env=False
        )

    def run(self) -> None:
        """Until told to stop."""
        try:
            while not self.stopping.is_set():
                self._step()
        except Exception as error:
            self._tally.violation(f"{self.name} broke: {error!r}")
            raise
        finally:
            self._http.close()

    # One step: what to send, how, and what becomes of it.

    def _step(self) -> None:
        talk = self._pick()
        self._edit(talk)
        body = self._body(talk)
        headers = {} if talk.session is None else {"X-Session-ID": talk.session}
        if self._chance.random() < 0.15:
            headers["X-KVShuttle-Return"] = self._chance.choice(["never", "always"])
        if self._chance.random() < 0.1:
            # Two requests at once may have one id.
            headers["X-Request-ID"] = self._chance.choice(["same-1", "same-2"])
        if self._chance.random() < 0.2:
            self._cancel(body, headers, self._chance.uniform(0.0, 2.5))
            if self._chance.random() < 0.5:
                talk.messages.pop()
            return
        if self._chance.random() < 0.05:
            self._end(talk, after_s=self._chance.uniform(0.0, 1.0))
        began = time.monotonic()
        reply = self._ask(body, headers)
        ended = time.monotonic()
        out = self._cluster.was_out(began, ended)
        if reply.status != 200 and out:
            self._tally.add("failed_in_outage", client=self.name, problem=reply.problem[:200])
            talk.messages.pop()
            time.sleep(DEAD_S)
            return
        if ended - began > HANG_S and not out:
            self._tally.violation(f"{self.name}: {talk.session} took {ended - began:.0f} s")
        found = self._judge.check(body, reply)
        self._tally.add(
            "turn", client=self.name, session=talk.session, s=round(ended - began, 2), wrong=found
        )
        if found:
            self._tally.violation(
                f"{self.name}: {talk.session} at {time.strftime('%H:%M:%S')}: {'; '.join(found)}",
                body=body,
            )
        if reply.choices:
            talk.messages.append({"role": "assistant", "content": reply.choices[0].text})
        else:
            talk.messages.clear()
        time.sleep(self._chance.choice([0.0, 0.0, 0.2, 1.0]))

    def _pick(self) -> Talk:
        if not self._talks or (len(self._talks) < 4 and self._chance.random() < 0.2):
            self._names += 1
            kind = self._chance.random()
            talk = Talk(f"{self.name}-{self._names}")
            if kind < 0.2:
                # Several clients under one name, each with its own idea of what was said.
                talk = Talk(self._chance.choice(SHARED), [user(text(150, 7)), _assistant(40, 8)])
            elif kind < 0.4:
                # Recognised by its start.
                talk.session = None
            self._talks.append(talk)
        return self._chance.choice(self._talks)

    def _edit(self, talk: Talk) -> None:
        chance = self._chance
        kind = chance.random()
        if talk.words > MOST_WORDS and chance.random() < 0.7:
            del talk.messages[chance.choice([0, 2]) :]
        elif talk.messages and kind < 0.12:
            # Said otherwise in the midst of it.
            at = chance.randrange(len(talk.messages))
            words = len(talk.messages[at]["content"].split())
            talk.messages[at] = {
                "role": talk.messages[at]["role"],
                "content": text(max(words, 1), chance.randrange(1_000_000)),
            }
        elif talk.messages and kind < 0.22:
            # Back to an earlier point.
            del talk.messages[chance.randrange(len(talk.messages)) // 2 * 2 :]
        elif talk.messages and kind < 0.3:
            # A branch, under its own name or the same.
            other = Talk(talk.session, list(talk.messages))
            if chance.random() < 0.5:
                self._names += 1
                other.session = f"{self.name}-{self._names}-fork"
            self._talks = [*self._talks[-3:], other]
        elif kind < 0.34:
            self._end(talk)
        words = chance.choice([1, 10, 40, 120, 120, 300, 600])
        talk.messages.append(user(text(words, chance.randrange(1_000_000))))

    def _body(self, talk: Talk) -> Body:
        chance = self._chance
        body: Body = {
            "model": "model",
            "messages": list(talk.messages),
            "max_tokens": chance.choice([1, 2, 8, 16, 16, 33, 64, 200, 320]),
            "temperature": 0.0,
            "seed": 0,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
        }
        if chance.random() < 0.5:
            body["ignore_eos"] = True
        if chance.random() < 0.1:
            # vLLM refuses several samples at temperature 0; this is the same token by token.
            body |= {"n": 2, "temperature": 1.0, "top_k": 1}
            # With a seed vLLM 0.32 dies of a prompt that it computes in pieces, on CPU.
            del body["seed"]
        if chance.random() < 0.6:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    # The wire.

    def _ask(self, body: Body, headers: dict[str, str]) -> Reply:
        try:
            if body.get("stream"):
                return self._stream(body, headers)
            response = self._http.post("/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            return Reply(0, (), repr(error))
        if response.status_code != 200:
            return Reply(response.status_code, (), response.text[:500])
        return Reply(200, tuple(parse_choice(c) for c in response.json()["choices"]))

    def _stream(self, body: Body, headers: dict[str, str]) -> Reply:
        parts: dict[int, dict[str, Any]] = {}
        with self._http.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.status_code != 200:
                return Reply(response.status_code, (), response.read().decode()[:500])
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:"):
                    continue
                if data == "[DONE]":
                    return Reply(200, tuple(_whole(p) for _, p in sorted(parts.items())))
                chunk = json.loads(data)
                if "error" in chunk:
                    return Reply(0, (), f"error in the stream: {data[:500]}")
                for choice in chunk["choices"]:
                    part = parts.setdefault(
                        choice["index"], {"tokens": [], "logprobs": [], "text": [], "finish": None}
                    )
                    part["tokens"] += choice.get("token_ids") or ()
                    content = (choice.get("logprobs") or {}).get("content") or ()
                    part["logprobs"] += [entry["logprob"] for entry in content]
                    part["text"].append(choice["delta"].get("content") or "")
                    part["finish"] = choice.get("finish_reason") or part["finish"]
        return Reply(0, (), "the stream ended without [DONE]")

    def _cancel(self, body: Body, headers: dict[str, str], after_s: float) -> None:
        """Sends, and hangs up after so long, whatever has come by then."""
        deadline = time.monotonic() + after_s
        timeout = httpx.Timeout(30.0, read=max(after_s, 0.001))
        try:
            with self._http.stream(
                "POST", "/v1/chat/completions", json=body, headers=headers, timeout=timeout
            ) as response:
                for _ in response.iter_bytes():
                    if time.monotonic() > deadline:
                        break
                else:
                    return  # it was answered before
        except httpx.ConnectError:
            time.sleep(DEAD_S)
            return  # nobody was there to hang up on
        except httpx.HTTPError:
            pass
        self._tally.add("cancel", client=self.name, after_s=round(after_s, 3))

    def _end(self, talk: Talk, after_s: float = 0.0) -> None:
        """Ends the conversation's session, now or in the midst of its next turn."""
        session = talk.session
        if session is None:
            return

        def end() -> None:
            time.sleep(after_s)
            try:
                self._cluster.view.end_session(session)
            except grpc.RpcError:
                return  # unknown yet, or the control plane is away
            self._tally.add("session_ended", session=session)

        threading.Thread(target=end, daemon=True).start()


def _assistant(words: int, seed: int) -> Message:
    return {"role": "assistant", "content": text(words, seed)}


def _whole(part: dict[str, Any]) -> Choice:
    return Choice(
        tokens=tuple(part["tokens"]),
        logprobs=tuple(part["logprobs"]),
        runners_up=(),
        finish=part["finish"],
        text="".join(part["text"]),
    )
