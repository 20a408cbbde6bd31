"""Whether upstream's offload tier with peer-to-peer sharing starts here; its error where not."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.ttft.arms import Pool
from kvshuttle.localstack import Engine, ProcessError, Stack
from kvshuttle.localstack.ports import free_port

__all__ = ["first_raised", "reason_it_does_not_run"]

# An exception's own line in a traceback, as vLLM logs it: the text behind the log's prefix.
_RAISED = re.compile(r"(?:\] )?((?:[A-Za-z_.]+Error|Exception): .*)$")


def reason_it_does_not_run(pool: Pool, directory: Path) -> str | None:
    """Starts one engine with it. None: it runs, and should be an arm."""
    directory.mkdir(parents=True, exist_ok=True)
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": free_port()}],
        },
    }
    engine = Engine(pool.spec("offload", 0, kv_transfer=transfer), log_dir=directory)
    try:
        with Stack() as stack:
            stack.start(engine)
    except ProcessError as error:
        return first_raised(engine.log_path.read_text(errors="replace")) or str(error)
    return None


def first_raised(log: str) -> str | None:
    """The first exception in a log: the cause; those after it are of the processes around it."""
    for line in log.splitlines():
        if " WARNING " in line or " INFO " in line:
            continue
        found = _RAISED.search(line)
        if found:
            return found.group(1)
    return None
