"""What the examples have in common: their flags, their tool, and how they show what a turn cost."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshuttle.client.agents import AsyncConversation, TurnReport

SYSTEM = (
    "You are the on-call engineer of a web shop. You answer in one or two sentences. Whenever a "
    "question is about a service, you read that service's log with the tool read_log first."
)
QUESTIONS = (
    "Customers say that the checkout was slow around noon. What happened?",
    "Thank you. Look again, please: is it over, and what should be done first?",
)
SERVICE = "checkout"
TOOL_SECONDS = 20.0
"""What the agent knows of its tool: about so long until the model is asked again."""

_LOG = """\
11:58:02 checkout INFO 212 orders a minute, 95th percentile 240 ms
11:59:40 checkout INFO deploy 4.18.0 begins: new address check
12:00:11 checkout WARN pool of database connections is used up, 40 of 40
12:00:12 checkout WARN request waited 1,900 ms for a connection
12:01:30 checkout ERROR 17 requests gave up waiting for a connection
12:04:55 checkout INFO deploy 4.18.0 is rolled back
12:06:20 checkout INFO pool of database connections is at 12 of 40
12:07:03 checkout INFO 208 orders a minute, 95th percentile 260 ms"""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What an example is told."""

    gateway: str
    model: str
    api_key: str
    session: str | None
    planned: bool
    tool_takes: float
    json: bool


def options(about: str) -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--gateway", required=True, help="the gateway's URL, without /v1")
    parser.add_argument("--model", required=True, help="the model's name there")
    parser.add_argument("--api-key", default="none", help="a key that the gateway knows")
    parser.add_argument("--session", help="the conversation's name (default: a new one)")
    parser.add_argument(
        "--planned",
        action="store_true",
        help="for a model that cannot ask for tools: after each question the agent's own plan "
        "asks for the log. The framework runs the tool and sends its result as ever",
    )
    parser.add_argument(
        "--tool-takes",
        type=float,
        default=2.0,
        help="how long the tool really takes here, in seconds",
    )
    parser.add_argument("--json", action="store_true", help="ends with all turns as JSON")
    return Options(**vars(parser.parse_args()))


async def read_the_log(service: str, seconds: float) -> str:
    """Stands for any slow tool."""
    await asyncio.sleep(seconds)
    if service == SERVICE:
        return _LOG
    return f"{service} has no log. There is one of: {SERVICE}."


class Shown:
    """Prints what each turn cost."""

    def __init__(self) -> None:
        self.reports: list[TurnReport] = []

    async def turn(self, conversation: AsyncConversation) -> None:
        """The last answer's turn; call it before the next request."""
        self.add(await conversation.report())

    def add(self, report: TurnReport | None) -> None:
        """One more turn."""
        if report is None:
            print("  turn: the gateway does not know what it cost", flush=True)
            return
        self.reports.append(report)
        print(
            f"  turn {report.turn}: {report.prompt_tokens} tokens of prompt, of which "
            f"{report.cached_tokens} were found or returned and "
            f"{report.prompt_tokens - report.cached_tokens} computed ({report.mode}, "
            f"{report.reason})",
            flush=True,
        )

    def end(self, session_id: str, as_json: bool) -> None:
        """All of them."""
        if as_json:
            turns = [dataclasses.asdict(report) for report in self.reports]
            json.dump({"session": session_id, "turns": turns}, sys.stdout)
            print()
