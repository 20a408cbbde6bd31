"""LangGraph, with LangChain's ChatOpenAI, behind kvshuttle's gateway: one session, tools and all.

python -m examples.langgraph_agent --gateway http://127.0.0.1:8080 --model MODEL
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import openai
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

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


class Hints(AsyncCallbackHandler):
    """Tells the control plane what the framework is about to do."""

    def __init__(self, conversation: AsyncConversation, shown: Shown) -> None:
        self._conversation = conversation
        self._shown = shown

    async def on_tool_start(self, *args: Any, **kwargs: Any) -> None:
        await self._conversation.tool_running(TOOL_SECONDS)
        await self._shown.turn(self._conversation)


async def main(told: Options) -> None:
    @tool
    async def read_log(service: str) -> str:
        """Reads the log of a service."""
        return await read_the_log(service, told.tool_takes)

    # These two lines are all that a conversation needs to be known to kvshuttle.
    http = attach(openai.DefaultAsyncHttpxClient())
    llm = ChatOpenAI(
        model=told.model,
        base_url=f"{told.gateway}/v1",
        api_key=lambda: told.api_key,
        http_async_client=http,
        temperature=0,
        max_completion_tokens=64,
    )
    model = llm.bind_tools([read_log], tool_choice="none" if told.planned else None)

    async def ask(state: MessagesState) -> dict[str, Any]:
        answer = await model.ainvoke([SystemMessage(SYSTEM), *state["messages"]])
        assert isinstance(answer, AIMessage)
        if told.planned and isinstance(state["messages"][-1], HumanMessage):
            # For a model that cannot ask for tools: a question is followed by reading the log.
            answer.tool_calls.append(
                tool_call(name="read_log", args={"service": SERVICE}, id=f"call-{uuid.uuid4().hex}")
            )
        return {"messages": [answer]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([read_log]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    agent = graph.compile(checkpointer=InMemorySaver())

    shown = Shown()
    async with http, AsyncConversation(told.session) as conversation:
        for question in QUESTIONS:
            found = await agent.ainvoke(
                {"messages": [HumanMessage(question)]},
                {
                    "configurable": {"thread_id": conversation.session_id},
                    "callbacks": [Hints(conversation, shown)],
                },
            )
            await shown.turn(conversation)
            print(f"{question}\n  {str(found['messages'][-1].content).strip()}", flush=True)
    shown.end(conversation.session_id, told.json)


if __name__ == "__main__":
    asyncio.run(main(options(__doc__ or "")))
