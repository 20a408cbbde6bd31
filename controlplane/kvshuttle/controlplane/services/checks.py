"""Requests' fields: each error names the field, its value and what to do."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, TypeVar

from kvshuttle.controlplane.model.errors import InvalidFieldError
from kvshuttle.controlplane.model.terms import Hints, SessionValue
from kvshuttle.controlplane.services.convert import duration_ns
from kvshuttle.controlplane.services.wire import COUNT_MAX
from kvshuttle.urls import wrong_in_base_url
from kvshuttle.v1 import types_pb2 as types

if TYPE_CHECKING:
    from collections.abc import Iterable
    from enum import IntEnum

    from google.protobuf.duration_pb2 import Duration

    from kvshuttle.controlplane.model.limits import Limits
    from kvshuttle.v1 import agent_service_pb2 as agents

__all__ = ["Checks"]

E = TypeVar("E", bound="IntEnum")
DURATION_MAX_NS = 366 * 24 * 3_600 * 1_000_000_000
"""No hint or TTL means more than a year; arithmetic stays far from any overflow."""


class Checks:
    """One method a kind of field; each returns the checked value."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def text(self, field: str, value: str, most: int, *, required: bool = False) -> str:
        """Printable text."""
        if required and not value:
            raise InvalidFieldError(field, value, f"give 1 to {most} printable characters")
        if len(value) > most:
            raise InvalidFieldError(field, value, f"at most {most} characters are allowed")
        if value and not value.isprintable():
            raise InvalidFieldError(field, value, "only printable characters are allowed")
        return value

    def session_id(self, value: str) -> str:
        """A session's name."""
        return self.text("session_id", value, self.limits.session_id_chars, required=True)

    def request_id(self, value: str) -> str:
        """A retry's name; may be empty."""
        return self.text("request_id", value, self.limits.request_id_chars)

    def turn_token(self, value: str) -> str:
        """A turn's token; may be empty. It is not shown in the error."""
        if len(value) > self.limits.turn_token_chars:
            raise InvalidFieldError(
                "turn_token",
                f"({len(value)} characters)",
                f"give the token of BeginTurn, at most {self.limits.turn_token_chars} characters",
            )
        return value

    def worker_id(self, field: str, value: str, *, required: bool = True) -> str:
        """A worker's name."""
        return self.text(field, value, self.limits.worker_id_chars, required=required)

    def base_url(self, field: str, value: str) -> str:
        """A server's base URL, as gateways put an API's path behind it."""
        self.text(field, value, self.limits.url_chars, required=True)
        wrong = wrong_in_base_url(value)
        if wrong:
            raise InvalidFieldError(field, value, f"{wrong}; give a base URL like http://host:8000")
        return value

    def enum(
        self,
        field: str,
        value: int,
        kind: type[E],
        default: E | None = None,
        *,
        never: E | None = None,
    ) -> E:
        """A known value but `never`; 0 means `default`, and is refused where there is none."""
        if value == 0 and default is not None:
            return default
        try:
            if value == 0 or value == never:
                raise ValueError
            return kind(value)
        except ValueError:
            names = ", ".join(member.name for member in kind if member and member != never)
            raise InvalidFieldError(field, value, f"use one of {names}") from None

    def count(self, field: str, value: int) -> int:
        """A number of tokens; sums of them last for as long as the process."""
        if value > COUNT_MAX:
            raise InvalidFieldError(field, value, f"at most {COUNT_MAX} is believed")
        return value

    def duration(self, field: str, message: Duration, least_ns: int = 0) -> int:
        """A duration in ns."""
        ns = duration_ns(message)
        if message.nanos < 0 or not least_ns <= ns <= DURATION_MAX_NS:
            shown = f"{ns / 1e9:g} s"
            raise InvalidFieldError(
                field, shown, f"give {least_ns / 1e9:g} s to {DURATION_MAX_NS / 1e9:g} s"
            )
        return ns

    def hints(self, message: types.SessionHints, prefix: str = "hints") -> Hints:
        """What of the hints is set."""
        idle = None
        if message.HasField("expected_idle"):
            idle = self.duration(f"{prefix}.expected_idle", message.expected_idle)
        value = None
        if message.value:
            value = self.enum(f"{prefix}.value", message.value, SessionValue)
        return Hints(idle, value)

    def hints_masked(
        self, before: Hints, message: types.SessionHints, paths: Iterable[str]
    ) -> Hints:
        """Hints after an update: the masked fields, or those that are set."""
        given = self.hints(message)
        paths = list(paths)
        if not paths:
            return before.merged(given)
        after = before
        for path in paths:
            match path.removeprefix("hints."):
                case "expected_idle":
                    after = Hints(given.expected_idle_ns, after.value)
                case "value":
                    after = Hints(after.expected_idle_ns, given.value)
                case "hints" | "*":
                    after = given
                case _:
                    raise InvalidFieldError("update_mask", path, "use expected_idle or value")
        return after

    def hello(self, hello: agents.AgentHello) -> None:
        """Who an agent says that it is. What it says stays in the books and is shown to callers."""
        limits = self.limits
        self.worker_id("hello.worker_id", hello.worker_id)
        self.text("hello.boot_id", hello.boot_id, limits.worker_id_chars, required=True)
        self.base_url("hello.url", hello.url)
        for name in ("lineage_id", "vllm_version", "agent_version", "nixl_backend"):
            self.text(f"hello.{name}", getattr(hello, name), limits.text_chars)
        for name in ("block_size", "num_blocks", "bytes_per_block"):
            if not getattr(hello, name):
                raise InvalidFieldError(f"hello.{name}", 0, "give the engine's value")
        if hello.bytes_per_block > limits.block_bytes_max:
            raise InvalidFieldError(
                "hello.bytes_per_block",
                hello.bytes_per_block,
                f"at most {limits.block_bytes_max} is believed",
            )
        if hello.highest_epoch > limits.epoch_max:
            raise InvalidFieldError(
                "hello.highest_epoch",
                hello.highest_epoch,
                f"no control plane was started more than {limits.epoch_max} times: restart the "
                "engine",
            )
        for name, most in (("fingerprint", limits.fingerprint_fields), ("ranks", limits.ranks_max)):
            count = len(getattr(hello, name))
            if count > most:
                raise InvalidFieldError(f"hello.{name}", f"{count} of them", f"at most {most}")
        for field in hello.fingerprint:
            self.text("hello.fingerprint.name", field.name, limits.text_chars, required=True)
            self.text(f"hello.fingerprint[{field.name}]", field.value, limits.url_chars)

    def page_size(self, value: int) -> int:
        """How many to list."""
        if value < 0:
            raise InvalidFieldError("page_size", value, "0 or more is allowed")
        return min(value or self.limits.page_size_default, self.limits.page_size_max)

    def page_token(self, value: str, *kinds: type[int | str]) -> list[Any] | None:
        """Where the page before ended: a value of each kind that the list's order has."""
        if not value:
            return None
        try:
            decoded = json.loads(base64.urlsafe_b64decode(value.encode()))
        except (ValueError, RecursionError):
            decoded = None
        if not isinstance(decoded, list) or [*map(type, decoded)] != [*kinds]:
            raise InvalidFieldError(
                "page_token", value, "pass the next_page_token of the page before"
            )
        return decoded

    @staticmethod
    def next_page(*parts: object) -> str:
        """The token for what follows."""
        return base64.urlsafe_b64encode(json.dumps(parts, separators=(",", ":")).encode()).decode()
