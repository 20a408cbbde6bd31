"""Taking note of an answer as it goes by, so that the next turn is known by it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from kvshuttle.gateway import limits
from kvshuttle.gateway.dialects import said

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BlocksListener", "ChatListener", "Listener", "ResponseListener", "TextListener"]

_WHOLE_RESPONSE = re.compile(rb"(?m)^event: ?response\.(?:completed|incomplete)\r?$")


class Listener:
    """Hears one answer, whole or as a stream's events. Of several choices it hears the first."""

    # Events without this are not looked into.
    mark = b'"choices"'

    def __init__(self) -> None:
        self._chars = 0
        self._lost = False

    def whole(self, raw: bytes) -> None:
        """An answer that is not streamed."""
        if (fields := _object(raw)) is not None:
            self._answer(fields)

    def events(self, raw: bytes) -> None:
        """Some whole events."""
        if self._lost:
            return
        for fields in self._objects(raw):
            self._event(fields)
        self._lost = self._lost or self._chars > limits.HEARD_CHARS

    def said(self) -> list[Any] | None:
        """What the answer adds to what was said; None if that is not known."""
        return None if self._lost else self._said()

    def _objects(self, raw: bytes) -> Iterator[dict[str, Any]]:
        for line in raw.split(b"\n"):
            if not line.startswith(b"data:") or self.mark not in line:
                continue
            if (fields := _object(line[len(b"data:") :])) is not None:
                yield fields

    def _heard(self, parts: list[str], text: Any) -> None:
        if isinstance(text, str):
            self._chars += len(text)
            parts.append(text)

    def _answer(self, fields: dict[str, Any]) -> None:
        raise NotImplementedError

    def _event(self, fields: dict[str, Any]) -> None:
        raise NotImplementedError

    def _said(self) -> list[Any] | None:
        raise NotImplementedError


class ChatListener(Listener):
    """A chat's answer."""

    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] | None = None
        self._text: list[str] = []
        self._calls: dict[Any, tuple[list[str], list[str]]] = {}

    def _answer(self, fields: dict[str, Any]) -> None:
        self._message = _first(fields, "message")

    def _event(self, fields: dict[str, Any]) -> None:
        delta = _first(fields, "delta")
        if delta is None:
            return
        self._heard(self._text, delta.get("content"))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                name, arguments = self._calls.setdefault(call.get("index"), ([], []))
                self._heard(name, function.get("name"))
                self._heard(arguments, function.get("arguments"))

    def _said(self) -> list[Any] | None:
        message = self._message or {
            "content": "".join(self._text),
            "tool_calls": [
                {"function": {"name": "".join(name), "arguments": "".join(arguments)}}
                for name, arguments in self._calls.values()
            ],
        }
        return said.of_messages([{**message, "role": "assistant"}])


class TextListener(Listener):
    """A completion's answer. It goes on in the middle of the prompt's last piece."""

    def __init__(self, prompt: Any) -> None:
        super().__init__()
        self._prompt = said.the_prompt(prompt)
        self._text: list[str] = []

    def _answer(self, fields: dict[str, Any]) -> None:
        self._event(fields)

    def _event(self, fields: dict[str, Any]) -> None:
        choice = _first(fields, None)
        if choice is not None:
            self._heard(self._text, choice.get("text"))

    def _said(self) -> list[Any] | None:
        if not isinstance(self._prompt, str):
            return None  # which tokens the text is, is not known
        before = said.of_prompt(self._prompt)
        return said.of_prompt(self._prompt + "".join(self._text))[len(before) :]


class BlocksListener(Listener):
    """An answer of Anthropic's API."""

    mark = b'"content_block'

    def __init__(self) -> None:
        super().__init__()
        self._content: Any = None
        self._blocks: dict[Any, tuple[dict[str, Any], list[str]]] = {}

    def _answer(self, fields: dict[str, Any]) -> None:
        self._content = fields.get("content")

    def _event(self, fields: dict[str, Any]) -> None:
        at = fields.get("index")
        block, delta = fields.get("content_block"), fields.get("delta")
        if isinstance(block, dict):
            self._blocks[at] = (block, [])
        elif isinstance(delta, dict) and at in self._blocks:
            parts = self._blocks[at][1]
            self._heard(parts, delta.get("text"))
            self._heard(parts, delta.get("partial_json"))

    def _said(self) -> list[Any] | None:
        content = self._content
        if content is None:
            content = [_whole(block, "".join(heard)) for block, heard in self._blocks.values()]
        return said.of_messages([{"role": "assistant", "content": content}])


class ResponseListener(Listener):
    """A response; a stream ends with all of it."""

    mark = b'"response'

    def __init__(self) -> None:
        super().__init__()
        self._output: Any = None

    def _answer(self, fields: dict[str, Any]) -> None:
        self._output = fields.get("output")

    def _event(self, fields: dict[str, Any]) -> None:
        response = fields.get("response")
        if isinstance(response, dict) and response.get("output"):
            self._output = response["output"]

    def _objects(self, raw: bytes) -> Iterator[dict[str, Any]]:
        if _WHOLE_RESPONSE.search(raw):
            yield from super()._objects(raw)

    def _said(self) -> list[Any] | None:
        return None if self._output is None else said.of_input(self._output)


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _first(fields: dict[str, Any], name: str | None) -> dict[str, Any] | None:
    """The first choice, or a member of it."""
    for choice in fields.get("choices") or ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            found = choice if name is None else choice.get(name)
            return found if isinstance(found, dict) else None
    return None


def _whole(block: dict[str, Any], heard: str) -> dict[str, Any]:
    """A block with all that came after its start."""
    if block.get("type") == "tool_use":
        return {**block, "input": heard or block.get("input")}
    if isinstance(text := block.get("text"), str):
        return {**block, "text": text + heard}
    return block
