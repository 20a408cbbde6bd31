"""What the gateway itself answers when it cannot serve a request, in OpenAI's error format."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


# So much of what an engine says of its error is repeated.
_SAID_CHARS = 300


class ApiError(Exception):
    """A request that ends here. The message names the field and what to do about it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers: dict[str, str] = dict(headers or {})

    def body(self) -> bytes:
        """The response body."""
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code)


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | int | None = None
) -> bytes:
    """`{"error": {...}}` with OpenAI's four fields."""
    return json.dumps(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    ).encode()


def bad_request(message: str, *, param: str | None, code: str = "invalid_value") -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def body_too_large(limit_bytes: int) -> ApiError:
    """413: the connection is closed, since the rest of the body is not read."""
    return ApiError(
        413,
        f"The request body is larger than {limit_bytes} bytes. Shorten the conversation, or ask "
        "the operator to raise --max-body-bytes.",
        kind="invalid_request_error",
        param="body",
        code="request_too_large",
        headers={"connection": "close"},
    )


def body_too_slow() -> ApiError:
    """408: the connection is closed, since the rest of the body is not read."""
    return ApiError(
        408,
        "The request's body did not arrive in time. Send it again.",
        kind="timeout_error",
        param="body",
        headers={"connection": "close"},
    )


def unauthorized(message: str) -> ApiError:
    """401: no key, or one that the gateway does not know."""
    return ApiError(
        401,
        message,
        kind="authentication_error",
        param="Authorization",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def response_not_found(response_id: str) -> ApiError:
    """404: no engine that this gateway may ask keeps it."""
    return ApiError(
        404,
        f"No response {response_id[:80]!r} is kept here. Engines keep responses only if they are "
        "told to (VLLM_ENABLE_RESPONSES_API_STORE=1), and a gateway knows those that went through "
        "it. Send the whole conversation in `input`.",
        kind="invalid_request_error",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def too_many_requests(whose: str, most: int, flag: str) -> ApiError:
    """429: as many requests run as may."""
    return ApiError(
        429,
        f"{whose} has {most} requests running, as many as it may. Wait for one to end, or ask the "
        f"operator to raise {flag}.",
        kind="rate_limit_error",
        code="too_many_requests",
        headers={"retry-after": "1"},
    )


def over_budget(reason: str, message: str, retry_after_s: float) -> ApiError:
    """429: the control plane has no turn for this tenant now, and the operator wants no request
    without one."""
    return ApiError(
        429,
        f"No turn for this request: {message} Wait for others of yours to end.",
        kind="rate_limit_error",
        code=reason,
        headers={"retry-after": str(max(1, math.ceil(retry_after_s)))},
    )


def stopping() -> ApiError:
    """503: the gateway's time to let requests end is over."""
    return ApiError(
        503,
        "The gateway is being stopped. Send the request again, to another one.",
        kind="service_unavailable_error",
        code="gateway_stopping",
        headers={"retry-after": "1", "connection": "close"},
    )


def no_engine_known() -> ApiError:
    """503: there is nowhere to send the request."""
    return ApiError(
        503,
        "No engine is known: the control plane named none and none is configured. Try again, or "
        "ask the operator to check /health or set --decode-url.",
        kind="service_unavailable_error",
        code="no_engine",
        headers={"retry-after": "1"},
    )


def engines_unreachable(tried: int) -> ApiError:
    """502: engines are known and none could be reached."""
    return ApiError(
        502,
        f"None of the {tried} engines tried could be reached. Try again; the operator finds the "
        "reason in the gateway's log and on /health.",
        kind="bad_gateway_error",
        code="engine_unreachable",
        headers={"retry-after": "1"},
    )


def engine_answered(status: int, message: str) -> ApiError:
    """502: engines were reached, and all that they had to say is an error."""
    said = " ".join(message[:_SAID_CHARS].split()).rstrip(".")
    return ApiError(
        502,
        f"The engine answered {status}{f': {said}' if said else ''}. Try again; the operator finds "
        "the reason in the engine's log.",
        kind="bad_gateway_error",
        code="engine_error",
        headers={"retry-after": "1"},
    )


def engine_broke_off(status: int = 502) -> ApiError:
    """502: the engine stopped in the middle of its answer. 504: it said nothing for too long."""
    if status == 504:
        return ApiError(
            504,
            "The engine did not answer in time. Try again, or ask the operator to raise "
            "--decode-timeout-s.",
            kind="timeout_error",
            code="engine_timeout",
        )
    return ApiError(
        status,
        "The engine stopped in the middle of its answer. Try again.",
        kind="bad_gateway_error",
        code="engine_broke_off",
    )


def event_too_long(limit_bytes: int) -> ApiError:
    """502: what the engine streams has no end in sight."""
    return ApiError(
        502,
        f"The engine sent an event of more than {limit_bytes} bytes. Ask for a shorter answer or "
        "fewer log probabilities, or without `stream`.",
        kind="bad_gateway_error",
        code="engine_event_too_long",
    )


def internal_error() -> ApiError:
    """500: a defect of the gateway."""
    return ApiError(
        500,
        "The gateway failed on this request. The operator finds the reason in its log.",
        kind="internal_server_error",
        code="gateway_error",
    )
