"""What vLLM 0.32 answers on each of its generating routes, in its own shapes.

After vllm/entrypoints: openai/chat_completion, openai/completion, openai/responses (protocol.py,
serving.py) and anthropic (protocol.py, serving.py). Prompts are 20 tokens, answers 5; a leg finds
`CACHED[leg]` tokens in its engine's cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

PROMPT, OUTPUT = 20, 5
CACHED = {"prefill": 16, "decode": 19, "plain": 19}


@dataclass(frozen=True)
class Asked:
    """What an answer depends on."""

    path: str
    body: dict[str, Any]
    leg: str
    engine: str
    response_id: str = "resp_1"
    cached: int = 0

    @property
    def transfer_params(self) -> dict[str, Any] | None:
        return {"secret": self.engine} if self.leg != "plain" else None

    @property
    def output(self) -> int:
        for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
            if self.body.get(name):
                return int(self.body[name])
        return OUTPUT


def openai_usage(asked: Asked) -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT,
        "completion_tokens": asked.output,
        "prompt_tokens_details": {"cached_tokens": asked.cached},
    }


def responses_usage(asked: Asked) -> dict[str, Any]:
    return {
        "input_tokens": PROMPT,
        "input_tokens_details": {
            "cached_tokens": asked.cached,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [PROMPT],
            "cached_tokens_per_turn": [asked.cached],
        },
        "output_tokens": asked.output,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
        "total_tokens": PROMPT + asked.output,
    }


def messages_usage(asked: Asked) -> dict[str, Any]:
    return {
        "input_tokens": PROMPT - asked.cached,
        "output_tokens": asked.output,
        "cache_read_input_tokens": asked.cached,
    }


def whole(asked: Asked, usage: dict[str, Any] | None = None) -> dict[str, Any]:
    """An answer that is not streamed."""
    if asked.path == "/v1/responses":
        return response(asked, "completed", usage or responses_usage(asked))
    if asked.path == "/v1/messages":
        return {
            "id": "chatcmpl-1",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": "Grüße"}],
            "model": "m",
            "stop_reason": "end_turn",
            "usage": usage or messages_usage(asked),
            **({"kv_transfer_params": asked.transfer_params} if asked.transfer_params else {}),
        }
    return {
        "id": "c1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Grüße"}}],
        "usage": usage or openai_usage(asked),
        "kv_transfer_params": asked.transfer_params,
    }


def response(asked: Asked, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
    text: dict[str, Any] = {
        "type": "output_text",
        "text": "Grüße",
        "annotations": [],
        "logprobs": None,
    }
    item = {
        "id": "msg_1",
        "content": [text],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    }
    return {
        "id": asked.body.get("request_id") or asked.response_id,
        "object": "response",
        "model": "m",
        "output": [item] if usage is not None else [],
        "background": bool(asked.body.get("background")),
        "previous_response_id": asked.body.get("previous_response_id"),
        "status": status,
        "usage": usage,
        "kv_transfer_params": asked.transfer_params if usage is not None else None,
    }


CHAT_EVENTS = [
    b'data: {"id":"c1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b": keep-alive\n\n",
    'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"Grüße \\u00e9 {"}}]}\n\n'.encode(),
    b'data: {"id":"c1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
]
CHAT_DONE = b"data: [DONE]\n\n"


def events(asked: Asked) -> list[bytes]:
    """A stream's events, the end left out."""
    if asked.path == "/v1/responses":
        return _responses_events(asked)
    if asked.path == "/v1/messages":
        return _messages_events(asked)
    made = list(CHAT_EVENTS)
    if (asked.body.get("stream_options") or {}).get("include_usage"):
        chunk = {"id": "c1", "choices": [], "usage": openai_usage(asked)}
        made.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return made


def end(asked: Asked) -> bytes:
    """How the stream ends."""
    if asked.path == "/v1/responses":
        done = response(asked, "completed", responses_usage(asked))
        return _event("response.completed", {"response": done, "sequence_number": 6})
    if asked.path == "/v1/messages":
        return _event("message_stop", {})
    return CHAT_DONE


def error(status: int, message: str, path: str) -> bytes:
    """A refusal of vLLM's own."""
    if path.startswith("/v1/messages"):
        body: dict[str, Any] = {
            "type": "error",
            "error": {"type": "BadRequestError", "message": message},
        }
    else:
        body = {
            "error": {"message": message, "type": "BadRequestError", "param": None, "code": status}
        }
    return json.dumps(body).encode()


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    data = json.dumps({**fields, "type": kind}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def _responses_events(asked: Asked) -> list[bytes]:
    begun = response(asked, "in_progress", None)
    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    item = {"id": "msg_1", "type": "message", "status": "in_progress", "content": []}
    # Words that must not be taken for the usage or for an end.
    text = 'the "usage" of event: response.completed'
    return [
        _event("response.created", {"response": begun, "sequence_number": 0}),
        _event("response.in_progress", {"response": begun, "sequence_number": 1}),
        _event(
            "response.output_item.added", {"item": item, "output_index": 0, "sequence_number": 2}
        ),
        _event("response.output_text.delta", {**where, "delta": "Grüße", "sequence_number": 3}),
        _event("response.output_text.done", {**where, "text": text, "sequence_number": 4}),
        _event(
            "response.output_item.done", {"item": item, "output_index": 0, "sequence_number": 5}
        ),
    ]


def _messages_events(asked: Asked) -> list[bytes]:
    message: dict[str, Any] = {
        "id": "chatcmpl-1",
        "content": [],
        "model": "m",
        "role": "assistant",
        "stop_reason": None,
        "usage": {"input_tokens": PROMPT, "output_tokens": 0},
    }
    tool = {"type": "tool_use", "id": "t", "name": "usage", "input": {"usage": {"input_tokens": 7}}}
    return [
        _event("message_start", {"message": message}),
        _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        _event(
            "content_block_delta",
            {"index": 0, "delta": {"type": "text_delta", "text": "Grüße"}},
        ),
        _event("content_block_stop", {"index": 0}),
        _event("content_block_start", {"index": 1, "content_block": tool}),
        _event("content_block_stop", {"index": 1}),
        _event(
            "message_delta",
            {
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": messages_usage(asked),
            },
        ),
    ]
