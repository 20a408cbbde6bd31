"""A conversation as an agent behind the gateway sees it: what its requests carry, what answers say,
and what is sent about it. No HTTP happens here: each thing to send is a step that its driver takes.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from kvshuttle.client.sessions import hints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvshuttle.client.sessions import Value

__all__ = ["Known", "Message", "Pause", "Steps", "Talk", "TurnReport", "TurnSeen"]

_R = TypeVar("_R")

SESSION_HEADER = "x-session-id"
EXPECTED_IDLE_HEADER = "x-kvshuttle-expected-idle"
VALUE_HEADER = "x-kvshuttle-value"
_SEEN_PREFIX = "x-kvshuttle-"
_API = "/v1/"
_SESSIONS = "/v1/kvshuttle/sessions/"

REPORT_WITHIN_S = 2.0
"""The gateway ends a turn just after its answer's last byte: a report may have to wait for that."""
_REPORT_PAUSES_S = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Between its questions; the last one again and again."""


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """What the gateway said of a turn in its answer's headers."""

    session_id: str
    turn: int | None
    """None: the control plane placed no turn."""
    mode: str
    """How earlier KV was meant to reach prefill: none, lazy, eager, direct."""
    reason: str
    fallback: str


@dataclass(frozen=True, slots=True)
class TurnReport:
    """A turn that has ended, as the control plane knows it."""

    turn: int
    outcome: str
    mode: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, what prefill did not compute: its own cache, and what was returned to it."""
    output_tokens: int
    time_to_first_token_s: float | None


@dataclass(frozen=True, slots=True)
class Message:
    """Something to send about the session; `what` names it in a warning."""

    method: str
    path: str
    body: dict[str, Any] | None
    what: str


@dataclass(frozen=True, slots=True)
class Pause:
    """A while without a message."""

    seconds: float


Steps = Generator[Message | Pause, dict[str, Any] | None, _R]
"""Takes the JSON that answers a message, or None if it could not be delivered."""


@dataclass(frozen=True, slots=True)
class _Gateway:
    """Where the last answer came from, and the key that was shown there."""

    http: Any
    sessions_url: str
    headers: dict[str, str] = field(repr=False)


class Known:
    """What is known of a conversation. Its parts are set by the agent and by the HTTP hooks."""

    def __init__(self, session_id: str | None, value: Value | None) -> None:
        """ValueError for an id that the gateway would refuse."""
        self.session_id = session_id if session_id is not None else uuid.uuid4().hex
        if not 1 <= len(self.session_id) <= 256 or not self.session_id.isprintable():
            raise ValueError(
                f"session_id is {self.session_id[:40]!r}: give 1 to 256 printable characters"
            )
        hints(value=value)
        self.value = value
        self.idle_s: float | None = None
        self.last: TurnSeen | None = None
        self.gateway: _Gateway | None = None

    def headers(self) -> dict[str, str]:
        """What a request carries."""
        found = {SESSION_HEADER: self.session_id}
        if self.value is not None:
            found[VALUE_HEADER] = self.value
        if self.idle_s is not None:
            found[EXPECTED_IDLE_HEADER] = f"{self.idle_s:g}"
        return found

    def note(self, http: Any, request: Any, headers: Mapping[str, str]) -> None:
        """An answer has come. One that names no session is not a gateway's."""
        session_id = headers.get(_SEEN_PREFIX + "session")
        url = request.url
        if session_id is None or _API not in url.path:
            return
        self.idle_s = None
        turn = headers.get(_SEEN_PREFIX + "turn", "")
        self.last = TurnSeen(
            session_id,
            int(turn) if turn.isdecimal() else None,
            headers.get(_SEEN_PREFIX + "mode", ""),
            headers.get(_SEEN_PREFIX + "reason", ""),
            headers.get(_SEEN_PREFIX + "fallback", ""),
        )
        prefix = url.path[: url.path.rindex(_API)]
        key = request.headers.get("authorization")
        self.gateway = _Gateway(
            http,
            f"{url.scheme}://{url.netloc.decode('ascii')}{prefix}{_SESSIONS}",
            {} if key is None else {"authorization": key},
        )

    def url(self, path: str) -> str:
        """Of what is sent about the session; only once there was an answer."""
        assert self.gateway is not None
        assert self.last is not None
        return f"{self.gateway.sessions_url}{quote(self.last.session_id, safe='')}{path}"


class Talk:
    """What can be said and asked of a conversation."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def tool_running(self, about_s: float) -> Steps[bool]:
        """A tool runs, for about so many seconds: the next turn comes after it. Whether it was
        taken; before the first answer there is nobody to tell."""
        return self.hint(expected_idle_s=about_s)

    def hint(
        self, *, expected_idle_s: float | None = None, value: Value | None = None
    ) -> Steps[bool]:
        """What is known of the time until the next turn, and what the KV is worth. Whether it was
        taken. Raises ValueError for what cannot be meant."""
        if hints(expected_idle_s=expected_idle_s, value=value) is None:
            raise ValueError("hint: give expected_idle_s or value")
        self._known.value = value or self._known.value
        said = {"expected_idle_s": expected_idle_s, "value": value}
        body = {name: one for name, one in said.items() if one is not None}
        return (yield Message("POST", "/hint", body, "a hint")) is not None

    def over(self) -> Steps[bool]:
        """The session is over: its KV is released everywhere. Whether it was taken."""
        return (yield Message("DELETE", "", None, "its end")) is not None

    def report(self, within_s: float = REPORT_WITHIN_S) -> Steps[TurnReport | None]:
        """What the last answer's turn cost; None if nobody can say within that time, in seconds."""
        for pause_s in _pauses(within_s):
            found = yield Message("GET", "", None, "a question")
            if found is None:
                return None
            if (report := _report(found, self._known.last)) is not None:
                return report
            yield Pause(pause_s)
        return None


def _pauses(within_s: float) -> Iterator[float]:
    """Pauses until that time has passed; at least one."""
    until = time.monotonic() + within_s
    for pause_s in itertools.chain(_REPORT_PAUSES_S, itertools.repeat(_REPORT_PAUSES_S[-1])):
        yield pause_s
        if time.monotonic() >= until:
            return


def _report(found: dict[str, Any], seen: TurnSeen | None) -> TurnReport | None:
    for turn in found["turns"]:
        if seen is not None and turn["turn"] == seen.turn and turn["state"] == "ended":
            return TurnReport(
                turn["turn"],
                turn["outcome"],
                turn["mode"],
                turn["reason"],
                turn["prompt_tokens"],
                turn["cached_tokens"],
                turn["output_tokens"],
                turn["time_to_first_token_s"],
            )
    return None
