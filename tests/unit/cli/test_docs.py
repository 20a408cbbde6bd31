"""docs/cli.md against the program."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from kvshuttle.cli import exits
from kvshuttle.cli.app import program
from kvshuttle.cli.options import common_options

PAGE = (Path(__file__).resolve().parents[3] / "docs/cli.md").read_text()


@pytest.mark.parametrize("name", sorted(program.commands))
def test_every_command_and_its_options_are_there(name: str) -> None:
    assert f"| `{name}" in PAGE
    common = {param.name for param in common_options()}
    command = program.commands[name]
    for param in command.params:
        if isinstance(param, click.Option) and param.name not in common:
            if param.opts[0] in ("--limit", "--reason"):
                continue
            assert re.search(rf"{param.opts[0]}\b", PAGE), param.opts


def test_every_common_option_and_its_variable_are_there() -> None:
    for param in common_options():
        assert f"`{param.opts[0]}" in PAGE, param.opts
        names = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or ())
        for variable in names:
            tail = variable.rpartition("CONTROL_PLANE")[2]
            assert f"`{variable}`" in PAGE or (tail and f"`…{tail}`" in PAGE), variable


def test_exit_statuses_are_there() -> None:
    for status in (exits.OK, exits.BAD_NEWS, exits.USAGE, exits.UNREACHABLE, exits.REFUSED):
        assert f"| {status} |" in PAGE
    assert f"| {exits.INTERRUPTED} |" in PAGE


def test_every_command_of_the_program_has_its_section_in_the_help() -> None:
    listed = [name for _, names in program.sections for name in names]
    assert sorted(listed) == sorted(program.commands)
