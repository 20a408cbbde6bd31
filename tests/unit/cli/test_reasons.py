"""The table of reasons against the words in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kvshuttle.cli.reasons import NOTHING, REASONS, reason

ROOT = Path(__file__).resolve().parents[3]
WORD = re.compile(r"[A-Z]+(_[A-Z]+)+")
MODEL = sorted((ROOT / "controlplane/kvshuttle/controlplane/model").glob("*.py"))
SOURCES = [
    *MODEL,
    *sorted((ROOT / "controlplane/kvshuttle/controlplane/planner").glob("*.py")),
    ROOT / "controlplane/kvshuttle/controlplane/forwarding.py",
    *(
        ROOT / "dataplane/kvshuttle/dataplane" / f"{name}.py"
        for name in (
            "destination",
            "eager",
            "push_landing",
            "push_source",
            "landing_zones",
            "push_writer",
            "source",
            "transfers",
            "scheduler",
        )
    ),
]
# Refusals of agents' hellos, which agents log, and bugs; no operator's command shows them.
ELSEWHERE = {
    "BOOT_CONFLICT",
    "FINGERPRINT_MISMATCH",
    "ILLEGAL_TRANSITION",
    "INVALID_FIELD",
    "LINEAGE_CHANGED",
}


def words(path: Path) -> set[str]:
    """String constants that look like reasons, but for names of what a module offers."""
    tree = ast.parse(path.read_text())
    exported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            exported = {
                one.value
                for one in ast.walk(node.value)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    constants = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and WORD.fullmatch(node.value)
    }
    assigned = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
        if target.id == node.value.value
    }
    return constants - (exported - assigned)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_word_of_the_code_is_explained(path: Path) -> None:
    missing = words(path) - set(REASONS) - ELSEWHERE
    assert not missing, f"explain them in kvshuttle/cli/reasons.py: {sorted(missing)}"


def test_words_are_found_at_all() -> None:
    found = set().union(*(words(path) for path in SOURCES))
    assert {"CHEAPER_TO_MOVE", "SOURCE_LOST", "GRANT_TIMEOUT", "WORKER_WATERMARK"} <= found


@pytest.mark.parametrize("word", sorted(REASONS))
def test_each_has_a_sentence_and_says_what_to_do(word: str) -> None:
    known = REASONS[word]
    assert known.meaning
    assert known.meaning[0].islower() or known.meaning.startswith("NIXL"), "it follows a colon"
    assert not known.meaning.endswith(".")
    assert known.remedy
    assert not known.remedy.endswith(".")
    if not known.fine:
        assert word.isupper()


def test_a_word_of_a_newer_server_is_no_error() -> None:
    assert "does not know" in reason("FROM_THE_FUTURE").meaning
    assert reason("NO_REPLICA").remedy != NOTHING
