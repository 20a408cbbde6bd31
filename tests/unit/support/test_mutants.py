"""The table of mutants fits the source that it is to break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda x: x.name)
def test_a_mutant_breaks_what_is_there(mutant: Mutant) -> None:
    source = (ROOT / mutant.path).read_text()
    assert source.count(mutant.before) == 1, mutant.rule
    compile(source.replace(mutant.before, mutant.after), mutant.path, "exec")


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
