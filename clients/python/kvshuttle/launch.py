"""The console scripts. One that lacks its extra says which, and how to get it."""

from __future__ import annotations

import importlib
import sys


def controlplane() -> int:
    """`kvshuttle-controlplane`."""
    return _main("kvshuttle-controlplane", "kvshuttle.controlplane.__main__", "controlplane")


def gateway() -> int:
    """`kvshuttle-gateway`."""
    return _main("kvshuttle-gateway", "kvshuttle.gateway.__main__", "gateway")


def cli() -> int:
    """`kvshuttle`."""
    return _main("kvshuttle", "kvshuttle.cli.__main__", "cli", function="run")


def _main(program: str, module: str, extra: str, *, function: str = "main") -> int:
    try:
        code: int | None = getattr(importlib.import_module(module), function)()
    except ModuleNotFoundError as error:
        # One of ours that is missing is a defect, not an extra that was left out.
        if error.name is None or error.name.partition(".")[0] == "kvshuttle":
            raise
        print(  # noqa: T201 - a console script's answer
            f"{program}: the Python module {error.name} is not installed. It comes with the extra "
            f"{extra}: pip install 'kvshuttle[{extra}]'",
            file=sys.stderr,
        )
        return 1
    return code or 0
