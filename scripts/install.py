"""Installs a requirements file into the environment that runs it, with one line of progress.

pip's own output goes to `install.log` in the environment; its end is shown when pip fails. Uses
the standard library alone, since nothing else is installed yet.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

# Shown when pip finds no CPU build of torch: PyPI has none for Linux.
TORCH_HINT = """
pip found no CPU build of torch ({pin}) in the indexes it is set up with. Set one of
  PIP_FIND_LINKS=DIR         a folder that has the wheel, torch-{version}-cp311-....whl
  PIP_EXTRA_INDEX_URL=URL    PyTorch's package index for CPU wheels
and run make again. `make test-fast` needs neither torch nor vLLM.
"""
# Lines between two progress lines where there is no terminal to redraw one on.
QUIET_STEP = 40


def pins(path: Path) -> list[str]:
    """The pins in a requirements file and in those that it includes."""
    found: list[str] = []
    for line in path.read_text().splitlines():
        text = line.strip()
        if text.startswith("-r "):
            found += pins(path.parent / text[3:].strip())
        elif text and not text.startswith("#"):
            found.append(text)
    return found


class Progress:
    """One line that says how far it is."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._terminal = sys.stdout.isatty()
        self._start = time.monotonic()

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._start:.0f} s"

    def package(self, name: str) -> None:
        self._done = min(self._done + 1, self._total)
        if self._terminal:
            line = f"  {self._title}: {self._done}/{self._total} packages  {name}"
            print(f"\r\033[K{line[:99]}", end="", flush=True)
        elif self._done % QUIET_STEP == 0:
            print(f"  {self._title}: {self._done}/{self._total} packages", flush=True)

    def unpacking(self) -> None:
        start = "\r\033[K" if self._terminal else ""
        end = "" if self._terminal else "\n"
        print(f"{start}  {self._title}: unpacking, {self._seconds()} so far", end=end, flush=True)

    def end(self, word: str) -> None:
        start = "\r\033[K" if self._terminal else ""
        print(f"{start}  {self._title}: {self._total} packages, {word} in {self._seconds()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("requirements", type=Path)
    options = parser.parse_args()
    wanted = pins(options.requirements)
    progress = Progress(options.requirements.name, len(wanted))
    log_path = Path(sys.prefix) / "install.log"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--root-user-action=ignore", "--progress-bar=off"]
    command += ["-r", str(options.requirements)]
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            word, _, rest = line.partition(" ")
            if word == "Collecting" or line.startswith("Requirement already satisfied"):
                progress.package(rest.split(" (")[0].strip().removeprefix("already satisfied: "))
            elif line.startswith("Installing collected packages"):
                progress.unpacking()
    if pip.returncode == 0:
        progress.end("installed")
        return 0
    progress.end("failed")
    text = log_path.read_text()
    print("\n".join(text.splitlines()[-15:]), file=sys.stderr)
    torch = next((pin for pin in wanted if pin.startswith("torch==")), None)
    if torch and "for torch==" in text:
        print(TORCH_HINT.format(pin=torch, version=torch.split("==")[1]), file=sys.stderr)
    print(f"pip's whole output: {log_path}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
