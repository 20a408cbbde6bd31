"""The console scripts where an extra was left out."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As if the module had never been installed.
_WITHOUT = """
import sys
missing, function = sys.argv[1:3]
sys.argv = [function, "--version"]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from kvshuttle import launch
sys.exit(getattr(launch, function)())
"""


@pytest.mark.parametrize(
    ("function", "program", "extra", "missing"),
    [
        ("cli", "kvshuttle", "cli", "click"),
        ("cli", "kvshuttle", "cli", "rich"),
        ("controlplane", "kvshuttle-controlplane", "controlplane", "uvloop"),
        ("gateway", "kvshuttle-gateway", "gateway", "starlette"),
    ],
)
def test_a_missing_extra_is_named_with_its_remedy(
    function: str, program: str, extra: str, missing: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT, missing, function],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr == (
        f"{program}: the Python module {missing} is not installed. It comes with the extra "
        f"{extra}: pip install 'kvshuttle[{extra}]'\n"
    )


def test_a_module_of_ours_that_is_missing_is_a_defect_and_says_so() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT.replace("name.partition(\".\")[0]", "name"),
         "kvshuttle.cli.app", "cli"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert "ModuleNotFoundError" in ran.stderr
    assert "extra" not in ran.stderr
