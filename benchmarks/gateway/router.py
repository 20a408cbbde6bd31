"""vLLM's own router, from PyPI, in an environment of its own: next to vLLM nothing may move its
pins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["VERSION", "install"]

# Apache-2.0.
VERSION = "0.1.17"
_INSTALL_TIMEOUT_S = 240.0


def install(folder: Path) -> tuple[list[str] | None, str]:
    """The command that starts it, or None and why there is none."""
    command = folder / "bin" / "vllm-router"
    if not command.exists():
        python = folder / "bin" / "python"
        try:
            for step in (
                [sys.executable, "-m", "venv", str(folder)],
                [str(python), "-m", "pip", "install", "-q", f"vllm-router=={VERSION}"],
            ):
                subprocess.run(step, check=True, capture_output=True, timeout=_INSTALL_TIMEOUT_S)
        except subprocess.CalledProcessError as failed:
            return None, failed.stderr.decode(errors="replace").strip().splitlines()[-1]
        except (OSError, subprocess.TimeoutExpired) as failed:
            return None, str(failed)
    return [str(command)], ""
