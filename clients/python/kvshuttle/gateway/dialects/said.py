"""What is said in a conversation, piece by piece, alike in whatever form clients send it back.

A message of the assistant's is its text, then its tool calls. What clients leave out, add or write
in another way when they send an answer back does not count: thoughts, ids, marks for caching, space
around a text, whether a text is alone or in a list, how arguments are spaced.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["of_input", "of_messages", "of_prompt", "plain", "the_prompt"]

# One client puts a line into its instructions that differs in each request; vLLM drops it.
_PER_REQUEST = "x-anthropic-billing-header"
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})
_NOT_SAID = frozenset({"cache_control", "id", "call_id", "tool_call_id", "tool_use_id", "status"})
# A completion's prompt has no messages. What differs after the last whole piece is not seen yet.
PIECE_CHARS = 256
PIECE_TOKENS = 64


def plain(value: Any) -> Any:
    """Without marks for caching; a text is a text, alone or in a list."""
    if isinstance(value, str):
        return None if value.startswith(_PER_REQUEST) else value
    if isinstance(value, list):
        items = [one for item in value if (one := plain(item)) is not None]
        return items[0] if len(items) == 1 and isinstance(items[0], str) else items
    if isinstance(value, dict):
        if isinstance(text := value.get("text"), str):
            return plain(text)
        return {name: plain(one) for name, one in value.items() if name != "cache_control"}
    return value


def of_messages(messages: Any) -> list[Any]:
    """Of chat messages, OpenAI's or Anthropic's."""
    return [piece for message in _list(messages) for piece in _message(message)]


def of_input(items: Any) -> list[Any]:
    """Of the input or the output of a response."""
    if isinstance(items, str):
        return [["user", items]]
    return [piece for item in _list(items) for piece in _item(item)]


def of_prompt(prompt: Any) -> list[Any]:
    """Of a completion's prompt: one text, or one list of token ids."""
    prompt = the_prompt(prompt)
    if not isinstance(prompt, str | list):
        return []
    size = PIECE_CHARS if isinstance(prompt, str) else PIECE_TOKENS
    return [prompt[at : at + size] for at in range(0, len(prompt) - size + 1, size)]


def the_prompt(prompt: Any) -> Any:
    """The only one of a list of prompts, or what is no list of them."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _message(message: Any) -> list[Any]:
    if not isinstance(message, dict):
        return [message]
    role, content = message.get("role"), message.get("content")
    if role != "assistant":
        return [[role, _without_ids(plain(content))]]
    said = _blocks(content)
    for call in [*_list(message.get("tool_calls")), message.get("function_call")]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            said.append(_call(function.get("name"), function.get("arguments")))
    return said


def _item(item: Any) -> list[Any]:
    if not isinstance(item, dict):
        return [item]
    kind = item.get("type")
    if kind in _THOUGHTS:
        return []
    if kind in ("function_call", "custom_tool_call"):
        return [_call(item.get("name"), item.get("arguments", item.get("input")))]
    if kind in (None, "message") and "role" in item:
        return _message(item)
    return [_without_ids(plain(item))]


def _blocks(content: Any) -> list[Any]:
    """What the assistant said: its text in one piece, then the rest in order."""
    texts, others = [], []
    for block in [content] if isinstance(content, str) else _list(content):
        if isinstance(block, str):
            texts.append(block)
        elif not isinstance(block, dict) or block.get("type") in _THOUGHTS:
            continue
        elif isinstance(text := block.get("text", block.get("refusal")), str):
            texts.append(text)
        elif block.get("type") == "tool_use":
            others.append(_call(block.get("name"), block.get("input")))
        else:
            others.append(_without_ids(plain(block)))
    text = "".join(texts).strip()
    return [["assistant", text], *others] if text else others


def _call(name: Any, arguments: Any) -> list[Any]:
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if arguments is None:
            arguments = {}
        arguments = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        pass
    return ["call", name, arguments]


def _without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ids(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_ids(one) for name, one in value.items() if name not in _NOT_SAID}
    return value
