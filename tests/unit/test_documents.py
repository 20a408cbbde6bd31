"""What the pages and the deployment files tell a reader to type, name and follow exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from kvshuttle.cli.app import program
from kvshuttle.cli.options import common_options
from kvshuttle.controlplane.settings import Settings
from kvshuttle.gateway import GatewaySettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "clients").glob("*/README.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
)
FILES = sorted(
    [
        *(ROOT / "deploy/compose").glob("*.yaml"),
        *(ROOT / "deploy/docker").glob("*"),
        *(ROOT / "deploy/helm").rglob("*.yaml"),
        *(ROOT / "deploy/systemd").glob("*"),
    ]
)
PYTHON = [
    source
    for root in (
        "benchmarks",
        "clients",
        "controlplane",
        "dataplane",
        "examples",
        "scripts",
        "tests",
    )
    for source in sorted((ROOT / root).rglob("*.py"))
    if "node_modules" not in source.parts
]
# How the settings' objects call what their programs take besides.
SERVERS: dict[str, type[Settings] | type[GatewaySettings]] = {
    "kvshuttle-controlplane": Settings,
    "kvshuttle-gateway": GatewaySettings,
}
OF_EVERY_SERVER = {"--config", "--help", "--version"}
# Of other programs. vLLM's are given to its own parser in unit/deploy/test_vllm_flags.py.
FOREIGN = {
    "aws": {"description", "group-id", "group-name", "protocol", "source-group", "vpc-id"},
    "buf": {
        *("cacert", "cert", "exclude-path", "http2-prior-knowledge", "key", "list-services"),
        *("protocol", "reflect-header"),
    },
    "docker": {"build", "profile", "rm"},
    "Dockerfile": {"create-home", "from", "home-dir", "system", "uid"},
    "helm": {"create-namespace"},
    "Prometheus": {"storage"},
    "pip": {"no-cache-dir", "no-deps"},
    "systemctl": {"now"},
    "vllm": {
        *(
            "data-parallel-external-lb",
            "data-parallel-rank",
            "enable-dbo",
            "enable-fault-tolerance",
        ),
        *("enable-prefix-caching", "enable-sleep-mode"),
        *("enable-prompt-tokens-details", "ubatch-size"),
        "gpu-memory-utilization",
        *("kv-cache-dtype", "kv-transfer-config", "max-num-batched-tokens"),
        *("otlp-traces-endpoint", "scheduling-policy", "tensor-parallel-size"),
    },
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snippets(page: Path) -> list[str]:
    """What is set as code: blocks, and what stands between backticks."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    if page.suffix != ".md":
        # Comments are for people; lists of words are a command's.
        return re.findall(r"^ *#\s{2,}(\S.*)$", text, re.MULTILINE)
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```\w*\n(.*?)^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)
    text = re.sub(r"^ {4,}\S.*$", "", text, flags=re.MULTILINE)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    return [*lines, *indented, *re.findall(r"`([^`]+)`", text)]


def commands(page: Path) -> list[list[str]]:
    """The words of each command in it."""
    found = []
    for snippet in snippets(page):
        line = re.sub(r"\s+", " ", re.sub(r"(^|\s)#\s.*", "", snippet))
        line = line.replace("…", "").replace('"$(', "").replace(')"', "")
        for one in re.split(r"&&|\|(?!\w)|;", line):
            try:
                words = shlex.split(one)
            except ValueError:
                continue  # prose, or half of a longer one
            while words and (re.fullmatch(r"[A-Z]\w*=.*", words[0]) or words[0] == "eval"):
                words.pop(0)
            if words:
                found.append([words[0].rpartition("/")[2], *words[1:]])
    return found


def of_program(*names: str) -> list[Any]:
    """Each use of these programs, once."""
    uses = {
        (name_of(page), *words)
        for page in PAGES + FILES
        for words in commands(page)
        if words[0] in names
    }
    return [
        pytest.param(where, words, id=" ".join([where, *words])) for where, *words in sorted(uses)
    ]


@pytest.mark.parametrize(("where", "words"), of_program("kvshuttle"))
def test_the_command_line_can_be_given(
    where: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed as given, but not run."""
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith((".pem", ".key")):
            (tmp_path / word).touch()
    arguments = ["1" if word == "N" else word for word in words[1:]]
    at = next((at for at, word in enumerate(arguments) if word in program.commands), None)
    if at is None:  # the program itself, or an option of every command
        common = {option for param in common_options() for option in param.opts}
        assert not words[1:] or words[1] in common, f"{where}: there is no {shlex.join(words)}"
        return
    name = arguments.pop(at)
    if not arguments:
        return  # only spoken of
    with click.Context(program, info_name="kvshuttle") as parent:
        program.commands[name].make_context(name, arguments, parent=parent)


@pytest.mark.parametrize(("where", "words"), of_program(*SERVERS))
def test_the_servers_take_what_they_are_given(where: str, words: list[str]) -> None:
    known = SERVERS[words[0]].model_fields
    for word in words[1:]:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        assert not word.startswith("--") or name in known or f"--{name}" in OF_EVERY_SERVER, where


@pytest.mark.parametrize(("where", "words"), of_program("make"))
def test_make_has_the_target_and_reads_the_variables(where: str, words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        variable, is_variable, _ = word.partition("=")
        if is_variable:
            assert f"$({variable})" in makefile or f"$(if $({variable})" in makefile, where
        else:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"{where}: {word}"


@pytest.mark.parametrize(("where", "words"), of_program("python", "python3"))
def test_python_has_the_module(where: str, words: list[str]) -> None:
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None, where
    elif words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), where


@pytest.mark.parametrize(("where", "words"), of_program("docker", "helm", "promtool"))
def test_files_that_are_given_to_other_programs_exist(where: str, words: list[str]) -> None:
    for word in words:
        if word.startswith("deploy/"):
            assert (ROOT / word).exists(), where


def options() -> set[str]:
    """Of every program here, without the dashes."""
    found = {name.replace("_", "-") for one in SERVERS.values() for name in one.model_fields}
    found |= {f"no-{name}" for name in found}
    for command in program.commands.values():
        for param in command.params:
            found |= {one.lstrip("-") for one in (*param.opts, *param.secondary_opts)}
    for source in PYTHON:
        text = source.read_text(encoding="utf-8")
        found |= set(re.findall(r'add_argument\(\s*"--([\w-]+)"', text))
    return found | {one.lstrip("-") for one in OF_EVERY_SERVER}


def test_every_option_that_is_named_exists() -> None:
    known = options().union(*FOREIGN.values())
    for page in PAGES + FILES:
        named = re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", page.read_text(encoding="utf-8"))
        assert set(named) <= known, name_of(page)


def test_every_variable_that_is_named_is_read() -> None:
    prefixes = {
        str(settings.model_config["env_prefix"]): settings.model_fields
        for settings in SERVERS.values()
    }
    known = {
        f"{prefix}{name}".upper()
        for prefix, names in prefixes.items()
        for name in [*names, "config"]
    }
    for param in common_options():
        known |= {param.envvar} if isinstance(param.envvar, str) else set(param.envvar or ())
    for source in PYTHON:
        text = source.read_text(encoding="utf-8")
        known |= set(re.findall(r'"(KVSHUTTLE_[A-Z_]+)"', text))
    for page in PAGES + FILES:
        named = re.findall(r"\bKVSHUTTLE_[A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8"))
        assert set(named) <= known, name_of(page)


def test_every_file_that_is_named_exists() -> None:
    tops = "benchmarks|clients|controlplane|dataplane|deploy|docs|examples|proto|scripts|tests"
    for page in PAGES:
        if page.name == "comparison.md":
            continue  # it names other projects' files
        for snippet in snippets(page):
            for named in re.findall(rf"(?<![\w./-])(?:{tops})/[\w./-]*\w", snippet):
                if not {"build", "dist", "gen"}.isdisjoint(named.split("/")):
                    continue  # made by make sdk
                assert (ROOT / named).exists(), f"{name_of(page)}: {named}"


def anchors(page: Path) -> set[str]:
    """Of the headings, as they are made where the pages are read."""
    text = re.sub(r"^    [^\n]*$|^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target
