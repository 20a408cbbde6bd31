"""Agent frameworks, each in its own process, as a user runs the examples."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
FRAMEWORKS = ("openai_agents_sdk", "langgraph_agent", "pydantic_ai_agent")
PLAIN = "openai_client"
"""OpenAI's own client: its loop is the example's, and sends a tool's result as the user's words."""


def needs_frameworks() -> pytest.MarkDecorator:
    """They are in an environment of their own, which `make test` sets up."""
    return pytest.mark.skipif(not PYTHON.exists(), reason="run `make frameworks` first")


async def run_example(name: str, gateway: str, model: str, *flags: str) -> dict[str, Any]:
    """Runs it to its end; the JSON that it ends with."""
    child = await asyncio.create_subprocess_exec(
        PYTHON,
        "-m",
        f"examples.{name}",
        *("--gateway", gateway, "--model", model, "--json", *flags),
        cwd=ROOT,
        # Warnings would be the library's own; nothing is to be sent anywhere.
        env={**os.environ, "LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    text = out.decode() + err.decode()
    assert child.returncode == 0, text
    print(text)
    found: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return found


class VllmStandIn:
    """Answers chat requests in vLLM's form. It asks for the first tool after a question of the
    user, if it may, and says something after a tool's result."""

    def __init__(self) -> None:
        self._answers = 0

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self._answers += 1
        message: dict[str, Any] = {"role": "assistant", "content": "It was the deploy of noon."}
        finish = "stop"
        tools, choice = body.get("tools") or [], body.get("tool_choice", "auto")
        if tools and choice != "none" and body["messages"][-1]["role"] == "user":
            finish = "tool_calls"
            call = {"name": tools[0]["function"]["name"], "arguments": '{"service": "checkout"}'}
            message["content"] = None
            message["tool_calls"] = [
                {"id": f"call-{self._answers}", "type": "function", "function": call}
            ]
        prompt = sum(len(str(one.get("content"))) for one in body["messages"]) // 4
        cached = 16 * (len(body["messages"]) // 2)
        return {
            "id": f"chatcmpl-{self._answers}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [
                {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 7,
                "total_tokens": prompt + 7,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
            "kv_transfer_params": None,
        }
