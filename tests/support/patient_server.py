"""vLLM's server for a machine that has fewer cores than its engines have ranks.

vLLM's processes look for each other's messages in a tight loop for a second after each one before
they wait to be told. That is fine where every rank has a core. Here such a loop keeps from the core
whoever has the message, and transfers end with SOURCE_SILENT because a mover got no core for a
second. So here they wait to be told at once. Run with `python -m`; the processes that it starts
import it too.
"""

from __future__ import annotations

import runpy
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

BUSY_S = 0.001
# A word may be lost where its sender's thread got no core for a while; vLLM looks again after five
# seconds, which is longer than anything that is tested waits.
LOOK_AGAIN_MS = 5

_init = shm_broadcast.SpinCondition.__init__


def _patient(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs | {"busy_loop_s": BUSY_S})


shm_broadcast.SpinCondition.__init__ = _patient
shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LOOK_AGAIN_MS


def main() -> None:
    """Runs the server."""
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
