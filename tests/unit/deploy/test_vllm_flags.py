"""Every command line for an engine, in deployment files and on pages, is given to vLLM's own
parser."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.agents import DEPLOY
from tests.unit.deploy.test_chart import named, render, values
from tests.unit.deploy.test_compose import services
from tests.unit.deploy.test_systemd import text_of
from tests.unit.test_documents import FOREIGN, PAGES, name_of

ROOT = DEPLOY.parent


def of_compose() -> dict[str, list[str]]:
    """What the containers run: entry point and command."""
    return {
        f"compose {name}": [*one["entrypoint"], *one["command"]]
        for name, one in services().items()
        if "--kv-transfer-config" in one.get("command", ())
    }


def of_chart() -> dict[str, list[str]]:
    """Of all engines that it makes in its example."""
    found = {}
    for name in ("prefill-0", "prefill-1", "decode-0"):
        objects = render(values("engines"))
        (one,) = named(objects, "StatefulSet", name)["spec"]["template"]["spec"]["containers"]
        found[f"chart {name}"] = [*one["command"], *one["args"]]
    return found


def of_unit() -> dict[str, list[str]]:
    """As systemd reads it: `$NAME` is several words, `${NAME}` is one."""
    example = (DEPLOY / "systemd/engine.env.example").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(\w+)=(.*)$", example, re.MULTILINE))
    (line,) = re.findall(r"^ExecStart=(.+)$", text_of("kvshuttle-engine@.service"), re.MULTILINE)
    words = []
    for word in shlex.split(line.replace("%i", "prefill-0")):
        several = re.fullmatch(r"\$(\w+)", word)
        if several:
            words += variables[several[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], word))
    return {"systemd engine": words}


def of_pages() -> dict[str, list[str]]:
    """From `vllm serve` to the end of its quoted configuration, or of the line."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ").replace("…", "MODEL")
        for number, block in enumerate(re.findall(r"vllm serve [^`'#]*?(?:'[^']*'|\n|#)", text), 1):
            found[f"{name_of(page)} {number}"] = shlex.split(block, comments=True)
    return found


LINES = {**of_compose(), **of_chart(), **of_unit(), **of_pages()}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """That of `vllm serve`."""
    serve = pytest.importorskip("vllm.entrypoints.cli.serve", exc_type=ImportError)
    arguments = pytest.importorskip("vllm.utils.argparse_utils", exc_type=ImportError)
    made: argparse.ArgumentParser = arguments.FlexibleArgumentParser()
    serve.ServeSubcommand().subparser_init(made.add_subparsers())
    return made


def test_all_ways_to_start_an_engine_are_looked_at() -> None:
    pages = {name.split()[0] for name in of_pages()}
    assert {"README.md", "docs/agent.md", "docs/deploy.md", "docs/tracing.md"} <= pages
    assert len(of_compose()) == 2


@pytest.mark.parametrize("name", sorted(LINES))
def test_vllm_takes_it(parser: argparse.ArgumentParser, name: str) -> None:
    program, *words = LINES[name]
    assert Path(program).name == "vllm"
    # The option is on its way out: the model is named by its place.
    assert not [word for word in words if word.startswith("--model")]
    taken: Any = parser.parse_args(words)
    assert taken.model_tag
    if "--kv-transfer-config" in words:
        assert taken.kv_transfer_config.kv_connector == "KVShuttleConnector"


def test_vllm_has_the_flags_that_are_spoken_of(parser: argparse.ArgumentParser) -> None:
    for flag in FOREIGN["vllm"]:
        assert f"--{flag}" in known(parser), flag


def known(parser: argparse.ArgumentParser) -> set[str]:
    """All options of its only subcommand."""
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return set(commands.choices["serve"]._option_string_actions)
