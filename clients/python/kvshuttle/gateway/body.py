"""Reading a request's body, and making the two legs' bodies from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from kvshuttle.gateway.dialects import DIALECTS
from kvshuttle.gateway.dialects.base import dumped
from kvshuttle.gateway.errors import ApiError, bad_request

if TYPE_CHECKING:
    from kvshuttle.gateway.dialects import Dialect, Route

Leg = Literal["prefill", "decode"]

KV_PARAMS = "kv_transfer_params"
# What tells an engine to move memory: only the gateway may say it. The second is the same for
# encoder caches, of which kvshuttle makes no use.
TRANSFER_PARAMS = (KV_PARAMS, "ec_transfer_params")
# Where vLLM, or a client library that was used wrongly, could carry the parameters too: vLLM puts
# the entries of vllm_xargs next to kv_transfer_params into a request's extra arguments.
_CARRIERS = ("extra_body", "vllm_xargs")

# Far beyond what any request needs, and far below what Python's own recursion bears: whatever walks
# a body later (this module, the JSON encoder, the engine) may rely on it.
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A parsed request without transfer parameters from outside."""

    route: Route
    fields: dict[str, Any]
    # Whether the client sent transfer parameters; they are gone from `fields`.
    dropped_kv_params: bool

    @property
    def dialect(self) -> Dialect:
        """The API that it speaks."""
        return DIALECTS[self.route]

    def drop(self, name: str) -> None:
        """Leaves out a field, as if the client had not sent it."""
        self.fields.pop(name, None)

    @property
    def previous_response_id(self) -> str | None:
        """The stored response that it goes on from."""
        previous = self.fields.get("previous_response_id") if self.route == "responses" else None
        return previous if isinstance(previous, str) and previous else None

    @property
    def model(self) -> str:
        """The model's name; empty if the client names none."""
        model = self.fields.get("model")
        return model if isinstance(model, str) else ""


def parse(route: Route, raw: bytes) -> RequestBody:
    """Parses a body. Raises a 400 ApiError that says where and what is wrong."""
    try:
        fields = json.loads(raw, parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise bad_request(
            f"The request body is not UTF-8 (byte {error.start}). Send JSON in UTF-8.",
            param="body",
            code="invalid_json",
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"The request body is not valid JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}. Send one JSON object.",
            param="body",
            code="invalid_json",
        ) from None
    except ValueError as error:  # a number that JSON cannot say or Python refuses
        raise bad_request(
            f"The request body is not valid JSON: {error}. Send one JSON object.",
            param="body",
            code="invalid_json",
        ) from None
    if not isinstance(fields, dict):
        raise bad_request(
            "The request body is JSON, but not an object. Send one JSON object.",
            param="body",
            code="invalid_json",
        )
    # Each level needs a bracket: few requests have enough of them to be looked through.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth_exceeds(fields, MAX_DEPTH):
        raise _too_deep()
    dropped = False
    for name in TRANSFER_PARAMS:
        dropped |= fields.pop(name, None) is not None
    for carrier in _CARRIERS:
        inner = fields.get(carrier)
        if isinstance(inner, dict) and not inner.keys().isdisjoint(TRANSFER_PARAMS):
            fields[carrier] = {k: v for k, v in inner.items() if k not in TRANSFER_PARAMS}
            dropped = True
    return RequestBody(route, fields, dropped)


def _too_deep() -> ApiError:
    return bad_request(
        f"The request body is nested too deeply. Flatten it to {MAX_DEPTH} levels.",
        param="body",
        code="invalid_json",
    )


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Whether lists and objects are nested in more levels than `limit`; without recursion."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is out of range")
    return value


def leg_body(body: RequestBody, leg: Leg, turn_token: str | None) -> bytes:
    """The body of a leg; without a token the engine sees a plain request."""
    fields = body.dialect.prefill(body.fields) if leg == "prefill" else dict(body.fields)
    if turn_token is not None:
        fields[KV_PARAMS] = {"kvshuttle": {"turn_token": turn_token, "leg": leg}}
    # ASCII escapes: they are the only form in which half a surrogate pair survives.
    return dumped(fields)


def is_disaggregable(body: RequestBody) -> bool:
    """Whether two legs make sense."""
    return body.dialect.can_be_split(body.fields)


def estimate_prompt_tokens(body: RequestBody) -> int:
    """A guess of the prompt's length in tokens; exact for a prompt of token ids."""
    return body.dialect.prompt_tokens(body.fields)


def without_kv_params(raw: bytes) -> bytes:
    """A response body without what the engine says about the transfer.

    vLLM always writes the fields; `null` says nothing, so such a body stays byte for byte.
    """
    if not any(f'"{name}"'.encode() in raw for name in TRANSFER_PARAMS):
        return raw
    try:
        fields = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(fields, dict) or all(fields.get(name) is None for name in TRANSFER_PARAMS):
        return raw
    for name in TRANSFER_PARAMS:
        if fields.get(name) is not None:
            del fields[name]
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
