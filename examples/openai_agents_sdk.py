"""The OpenAI Agents SDK behind kvshuttle's gateway: one session, tool calls and all.

python -m examples.openai_agents_sdk --gateway http://127.0.0.1:8080 --model MODEL
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import TYPE_CHECKING, Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunHooks,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai.types.responses import ResponseFunctionToolCall

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
from kvshuttle.client.agents import AsyncConversation, attach

if TYPE_CHECKING:
    from agents import ModelResponse, RunContextWrapper, Tool


class Hints(RunHooks[Any]):
    """Tells the control plane what the framework is about to do."""

    def __init__(self, conversation: AsyncConversation, shown: Shown) -> None:
        self._conversation = conversation
        self._shown = shown

    async def on_tool_start(
        self, context: RunContextWrapper[Any], agent: Agent[Any], tool: Tool
    ) -> None:
        await self._conversation.tool_running(TOOL_SECONDS)
        await self._shown.turn(self._conversation)


class Planned(OpenAIChatCompletionsModel):
    """For a model that cannot ask for tools: a question is followed by reading the log."""

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        response = await super().get_response(*args, **kwargs)
        items = kwargs["input"] if "input" in kwargs else args[1]
        if isinstance(items, str) or items[-1].get("role") == "user":
            response.output.append(
                ResponseFunctionToolCall(
                    type="function_call",
                    call_id=f"call-{uuid.uuid4().hex}",
                    name="read_log",
                    arguments=json.dumps({"service": SERVICE}),
                )
            )
        return response


async def main(told: Options) -> None:
    set_tracing_disabled(True)  # it would be sent to OpenAI

    @function_tool
    async def read_log(service: str) -> str:
        """Reads the log of a service."""
        return await read_the_log(service, told.tool_takes)

    # These two lines are all that a conversation needs to be known to kvshuttle.
    http = attach(openai.DefaultAsyncHttpxClient())
    client = openai.AsyncOpenAI(
        base_url=f"{told.gateway}/v1", api_key=told.api_key, http_client=http
    )
    kind = Planned if told.planned else OpenAIChatCompletionsModel
    agent = Agent(
        name="on-call",
        instructions=SYSTEM,
        tools=[read_log],
        model=kind(model=told.model, openai_client=client),
        # Else the framework would let the model choose after a tool call.
        reset_tool_choice=False,
        model_settings=ModelSettings(
            temperature=0, max_tokens=64, tool_choice="none" if told.planned else None
        ),
    )
    shown = Shown()
    async with client, AsyncConversation(told.session) as conversation:
        history: list[Any] = []
        for question in QUESTIONS:
            history.append({"role": "user", "content": question})
            result = await Runner.run(agent, history, hooks=Hints(conversation, shown))
            await shown.turn(conversation)
            print(f"{question}\n  {str(result.final_output).strip()}", flush=True)
            history = result.to_input_list()
    shown.end(conversation.session_id, told.json)


if __name__ == "__main__":
    asyncio.run(main(options(__doc__ or "")))
