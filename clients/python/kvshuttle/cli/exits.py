"""Exit statuses, for scripts. docs/cli.md has this table."""

from __future__ import annotations

OK = 0
BAD_NEWS = 1
"""The command worked, and its answer is bad news: no worker is ready, there is no such session."""
USAGE = 2
"""The command line cannot be meant as it is, or the server says so of what was asked."""
UNREACHABLE = 3
"""No answer from the control plane, or not in time."""
REFUSED = 4
"""The control plane answered, and refused."""
INTERRUPTED = 130
"""As shells have it for SIGINT."""

# `doctor` follows the convention of monitoring checks instead.
DOCTOR_OK = 0
DOCTOR_WARNINGS = 1
DOCTOR_PROBLEMS = 2
