"""Pydantic AI behind kvshuttle's gateway: one session, tool calls and all.

python -m examples.pydantic_ai_agent --gateway http://127.0.0.1:8080 --model MODEL
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
from pydantic_ai import Agent, ModelSettings
from pydantic_ai.capabilities import Hooks
from pydantic_ai.messages import ModelRequest, ToolCallPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.providers.openai import OpenAIProvider

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
    from pydantic_ai.messages import ModelMessage, ModelResponse
    from pydantic_ai.models import ModelRequestParameters


class Planned(WrapperModel):
    """For a model that cannot ask for tools: a question is followed by reading the log."""

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        response = await super().request(messages, model_settings, model_request_parameters)
        last = messages[-1]
        if isinstance(last, ModelRequest) and isinstance(last.parts[-1], UserPromptPart):
            plan = ToolCallPart("read_log", {"service": SERVICE})
            response.parts = [*response.parts, plan]
        return response


async def main(told: Options) -> None:
    # These two lines are all that a conversation needs to be known to kvshuttle.
    http = attach(openai.DefaultAsyncHttpxClient())
    provider = OpenAIProvider(base_url=f"{told.gateway}/v1", api_key=told.api_key, http_client=http)
    model = OpenAIChatModel(told.model, provider=provider)
    settings = ModelSettings(temperature=0, max_tokens=64)
    if told.planned:
        settings["tool_choice"] = "none"
    shown = Shown()
    conversation = AsyncConversation(told.session)

    async def before_tool(ctx: Any, *, call: Any, tool_def: Any, args: Any) -> Any:
        """Tells the control plane what the framework is about to do."""
        await conversation.tool_running(TOOL_SECONDS)
        await shown.turn(conversation)
        return args

    agent = Agent(
        Planned(model) if told.planned else model,
        instructions=SYSTEM,
        model_settings=settings,
        capabilities=[Hooks(before_tool_execute=before_tool)],
    )

    @agent.tool_plain
    async def read_log(service: str) -> str:
        """Reads the log of a service."""
        return await read_the_log(service, told.tool_takes)

    async with http, conversation:
        history: list[ModelMessage] = []
        for question in QUESTIONS:
            result = await agent.run(question, message_history=history)
            await shown.turn(conversation)
            print(f"{question}\n  {result.output.strip()}", flush=True)
            history = result.all_messages()
    shown.end(conversation.session_id, told.json)


if __name__ == "__main__":
    asyncio.run(main(options(__doc__ or "")))
