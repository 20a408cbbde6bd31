"""Engines on a CPU that schedule a step while the one before runs, as vLLM does on GPUs.

vLLM turns asynchronous scheduling off on CPUs because it is of no use there; its code for it, the
scheduler, the queue of batches and the worker's, works there all the same once what asks CUDA for
streams and events is answered by what does nothing. `sitecustomize.py` beside this file does that
in each of an engine's processes.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["schedules_ahead"]


def schedules_ahead() -> dict[str, str]:
    """What an engine's environment must have for it."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
