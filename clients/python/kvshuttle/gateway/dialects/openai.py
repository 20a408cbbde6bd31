"""OpenAI's chat completions and completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvshuttle.gateway.dialects import said
from kvshuttle.gateway.dialects.base import Dialect, Route, estimate, start_of
from kvshuttle.gateway.dialects.listening import ChatListener, Listener, TextListener

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Chat", "Completions", "prompt_count"]

_NOT_IN_PREFILL = frozenset(
    {
        # Its one token is thrown away; and vLLM 0.32 on CPU dies of a seeded request whose prompt
        # it computes in pieces ("CPU Generator does not use offset").
        "seed",
        "stream_options",
        "best_of",
        "min_tokens",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "echo",
        "return_token_ids",
        "return_prompt_text",
    }
)
# A completion's first turn is recognized in its later ones by this much of its start.
_PROMPT_HEAD_CHARS = said.PIECE_CHARS
_PROMPT_HEAD_TOKENS = said.PIECE_TOKENS


class _Completion(Dialect):
    not_in_prefill = _NOT_IN_PREFILL

    def limit_to_one_token(self, fields: dict[str, Any]) -> None:
        fields["n"] = 1
        fields["max_tokens"] = 1
        if self.route == "chat" or "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1

    def can_be_split(self, fields: Mapping[str, Any]) -> bool:
        """Prompt logprobs need the whole prompt computed where they are wanted (vLLM then ignores
        cached KV); a beam search is several requests inside the engine."""
        return fields.get("prompt_logprobs") is None and fields.get("use_beam_search") is not True


class Chat(_Completion):
    """`/v1/chat/completions`."""

    route: Route = "chat"  # type: ignore[misc]
    path = "/v1/chat/completions"

    def can_be_split(self, fields: Mapping[str, Any]) -> bool:
        """vLLM answers a chat's echo with prompt logprobs whether or not logprobs are asked for."""
        return super().can_be_split(fields) and not fields.get("echo")

    def prompt_tokens(self, fields: Mapping[str, Any]) -> int:
        return estimate(fields.get("messages"), fields.get("tools"))

    def start(self, fields: Mapping[str, Any]) -> list[Any] | None:
        found = start_of(fields.get("messages"))
        return None if found is None else [*found, fields.get("tools")]

    def said(self, fields: Mapping[str, Any]) -> list[Any]:
        return said.of_messages(fields.get("messages"))

    def listener(self, fields: Mapping[str, Any]) -> Listener:
        return ChatListener()


class Completions(_Completion):
    """`/v1/completions`."""

    route: Route = "completions"  # type: ignore[misc]
    path = "/v1/completions"

    def can_be_split(self, fields: Mapping[str, Any]) -> bool:
        """Several prompts are several requests inside the engine."""
        if fields.get("echo") and fields.get("logprobs") is not None:
            return False
        return super().can_be_split(fields) and prompt_count(fields.get("prompt")) <= 1

    def prompt_tokens(self, fields: Mapping[str, Any]) -> int:
        """Exact for a prompt of token ids."""
        prompt = fields.get("prompt")
        prompts = prompt if isinstance(prompt, list) and prompt_count(prompt) > 1 else [prompt]
        return sum(_tokens_of_prompt(one) for one in prompts)

    def start(self, fields: Mapping[str, Any]) -> list[Any] | None:
        prompt = fields.get("prompt")
        if prompt_count(prompt) > 1:
            return None
        prompt = said.the_prompt(prompt)
        if isinstance(prompt, str) and prompt:
            return [prompt[:_PROMPT_HEAD_CHARS]]
        if isinstance(prompt, list) and prompt:
            return [prompt[:_PROMPT_HEAD_TOKENS]]
        return None

    def said(self, fields: Mapping[str, Any]) -> list[Any]:
        return said.of_prompt(fields.get("prompt"))

    def listener(self, fields: Mapping[str, Any]) -> Listener:
        return TextListener(fields.get("prompt"))


def prompt_count(prompt: Any) -> int:
    """How many prompts a completion's `prompt` is: a list of token ids is one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _tokens_of_prompt(prompt: Any) -> int:
    if isinstance(prompt, str):
        return estimate(prompt)
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str | list):
            return _tokens_of_prompt(prompt[0])
        return len(prompt)
    return 0
