"""For all tests."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts into the background with SIGINT ignored, and every
# child inherits that: programs whose end by Ctrl-C is tested would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
