"""What is taken from a log for the reason."""

from __future__ import annotations

from benchmarks.ttft.offload_tier import first_raised

LOG = """\
(APIServer pid=1) WARNING 11-29 [system_utils.py:255] This can cause errors like `OSError: [24] x`
(Worker pid=2) ERROR 11-29 [multiproc_executor.py:1063]     raise Exception(
(Worker pid=2) ERROR 11-29 [multiproc_executor.py:1063] Exception: only on GPUs
(EngineCore pid=3) ERROR 11-29 [core.py:1510] RuntimeError: Worker failed
RuntimeError: Engine core initialization failed
"""


def test_the_first_exception_is_the_reason_and_a_warning_is_none() -> None:
    assert first_raised(LOG) == "Exception: only on GPUs"
    assert first_raised(LOG.splitlines()[-1]) == "RuntimeError: Engine core initialization failed"
    assert first_raised("INFO all is well") is None
