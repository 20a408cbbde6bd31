"""vLLM's API server, whose streamed chat answers end with `kv_transfer_params`.

In vLLM 0.32 only answers that are not streamed carry them: a proxy that streams has nothing to
give to prefill on the next turn, and one that does not stream has no time to first token.
Upstream's example proxy for multi-turn expects them in the last chunk (vllm-project/vllm pull
request 40186, open, adds them there). The benchmark's bidirectional arm runs decode through this
module, so that upstream is measured at what it is meant to do. Nothing else is changed, and no
other arm uses it.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import AsyncIterator, Callable
from typing import Any

__all__ = ["with_params"]

_DONE = "data: [DONE]"


def with_params(
    generator: Callable[..., AsyncIterator[str]],
) -> Callable[..., AsyncIterator[str]]:
    """Wraps `chat_completion_stream_generator(self, request, results, …)`."""

    async def wrapped(
        server: Any, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> AsyncIterator[str]:
        params: Any = None

        async def watched() -> AsyncIterator[Any]:
            nonlocal params
            async for result in results:
                params = getattr(result, "kv_transfer_params", None) or params
                yield result

        async for event in generator(server, request, watched(), *args, **kwargs):
            if event.startswith(_DONE) and params:
                chunk = {
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "kv_transfer_params": params,
                }
                yield f"data: {json.dumps(chunk)}\n\n"
            yield event

    return wrapped


def main() -> None:
    """Patches and serves."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    OpenAIServingChat.chat_completion_stream_generator = with_params(
        OpenAIServingChat.chat_completion_stream_generator
    )
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
