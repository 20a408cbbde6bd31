"""OpenAI's own client, without an event loop and with streamed answers: an agent's loop by hand.

python -m examples.openai_client --gateway http://127.0.0.1:8080 --model MODEL
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import openai

from examples.shared import (
    QUESTIONS,
    SERVICE,
    SYSTEM,
    TOOL_SECONDS,
    Options,
    Shown,
    options,
    read_the_log,
)
from kvshuttle.client.agents import Conversation, attach

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam


def main(told: Options) -> None:
    # These two lines are all that a conversation needs to be known to kvshuttle.
    http = attach(openai.DefaultHttpxClient())
    client = openai.OpenAI(base_url=f"{told.gateway}/v1", api_key=told.api_key, http_client=http)

    shown = Shown()
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM}]

    def ask(text: str) -> str:
        messages.append({"role": "user", "content": text})
        answer = client.chat.completions.create(
            model=told.model,
            messages=messages,
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        messages.append({"role": "assistant", "content": said})
        shown.add(conversation.report())
        return said

    with client, Conversation(told.session) as conversation:
        for question in QUESTIONS:
            ask(question)
            # This agent's plan: after each question it reads the log, which takes a while.
            conversation.tool_running(TOOL_SECONDS)
            started = time.monotonic()
            log = asyncio.run(read_the_log(SERVICE, told.tool_takes))
            took = time.monotonic() - started
            said = ask(f"This is the log of {SERVICE}, read in {took:.0f} s:\n{log}")
            print(f"{question}\n  {said.strip()}", flush=True)
    shown.end(conversation.session_id, told.json)


if __name__ == "__main__":
    main(options(__doc__ or ""))
