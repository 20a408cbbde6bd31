"""`kvshuttle` and `python -m kvshuttle.cli`."""

from __future__ import annotations

import os
import sys


def run() -> int:
    """The console script. Failures are told by the program, not by gRPC's core."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvshuttle.cli.app import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
