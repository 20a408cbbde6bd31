"""docs/runbook.md: a section an alert, and every command, setting and metric in it exists."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from kvshuttle.cli.app import program
from kvshuttle.controlplane.settings import Settings
from kvshuttle.gateway import GatewaySettings
from tests.unit.observability.catalogue import ROOT, all_series
from tests.unit.observability.queries import rules

PAGE = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL))
ALERTS = [rule["alert"] for rule in rules()]
# Of vLLM, with which engines are started, and of the operator's command line.
OTHERS = {"--target", "--gpu-memory-utilization", "--max-num-batched-tokens"}


def test_there_is_a_section_for_each_alert_and_no_other() -> None:
    assert sorted(SECTIONS) == sorted(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_section_says_what_it_means_how_to_check_and_what_to_do(alert: str) -> None:
    parts = re.split(r"\*\*(Meaning|Check|Remedy)\.\*\* ", SECTIONS[alert])
    assert parts[0].strip() == ""
    assert parts[1::2] == ["Meaning", "Check", "Remedy"]
    assert all(len(text.split()) >= 5 for text in parts[2::2])
    named = set(re.findall(r"KVShuttle\w+", SECTIONS[alert]))
    assert named <= set(ALERTS)


def commands() -> list[str]:
    """Every `kvshuttle …` in the page."""
    inline = re.findall(r"`(kvshuttle [^`]+)`", PAGE)
    blocks = re.findall(r"^ {4}(kvshuttle [^#\n]+)", PAGE, re.MULTILINE)
    return [re.sub(r"\s+", " ", one).strip() for one in inline + blocks]


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_a_command_can_be_given(line: str) -> None:
    words = shlex.split(line.replace(" N", " 1"))[1:]
    command = program.commands[words[0]]
    # Parsed as given, but not run.
    with click.Context(program, info_name="kvshuttle") as parent:
        command.make_context(words[0], words[1:], parent=parent)


def test_settings_and_metrics_that_are_named_exist() -> None:
    known = OTHERS | {
        f"--{name.replace('_', '-')}"
        for settings in (Settings, GatewaySettings)
        for name in settings.model_fields
    }
    text = re.sub(r"`kvshuttle [^`]+`", "", PAGE)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known
    series = set(all_series()) | {name.removesuffix("_bucket") for name in all_series()}
    assert set(re.findall(r"kvshuttle_\w+", PAGE)) <= series


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
