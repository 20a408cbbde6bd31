"""For all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine decides no test: neither how long an example takes, nor how long to make one.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

# What takes most of the time of the tests that need no engine: programs that are started, killed
# and waited for, compilers, screens, bytes at random. They run in `make test`, and not in
# `make test-fast`.
SLOW = (
    "integration/cli",
    "integration/controlplane/test_crash.py",
    "integration/controlplane/test_fuzz.py",
    "integration/controlplane/test_hygiene.py",
    "integration/frameworks",
    "integration/sdk",
    "unit/cli/test_top.py",
    "unit/controlplane/test_store_crash.py",
    "unit/deploy/test_vllm_flags.py",
    "unit/support/test_localstack.py",
)

# A shell without job control starts what it puts into the background with SIGINT ignored, and every
# child inherits that: programs whose end by Ctrl-C is tested would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is slow."""
    here = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(here / name) for name in SLOW):
            item.add_marker("slow")
