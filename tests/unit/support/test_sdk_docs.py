"""docs/sdk.md names what scripts/sdk.py needs, and the versions that are pinned."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.sdk import DEBIAN

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "sdk.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", DEBIAN)
def test_debians_packages(language: str) -> None:
    assert f"Debian: `{DEBIAN[language]}`" in DOCS


def test_versions_of_the_frameworks() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements" / "frameworks.txt").read_text().splitlines()
        if "==" in line
    )
    for title, package in (
        ("OpenAI Agents SDK", "openai-agents"),
        ("LangGraph", "langgraph"),
        ("langchain-openai", "langchain-openai"),
        ("Pydantic AI", "pydantic-ai-slim"),
    ):
        release = ".".join(pins[package].split(".")[:2])
        assert f"{title} {release}" in DOCS
