"""All ways to break the lease protocol, one rule each.

A mutant is a piece of source and what takes its place. The piece must be there exactly once: a
test says so, so that the tables do not go stale unseen.
"""

from __future__ import annotations

from tests.mutation.core import CORE
from tests.mutation.eager import EAGER
from tests.mutation.partial import PARTIAL
from tests.mutation.pauses import PAUSES
from tests.mutation.prefixes import PREFIXES
from tests.mutation.pushes import PUSHES
from tests.mutation.recovery import RECOVERY
from tests.mutation.renewals import RENEWALS
from tests.mutation.retention import RETENTION
from tests.mutation.streams import STREAMS

__all__ = ["MUTANTS"]

MUTANTS = (
    *CORE,
    *EAGER,
    *PARTIAL,
    *PAUSES,
    *PREFIXES,
    *PUSHES,
    *RENEWALS,
    *RECOVERY,
    *RETENTION,
    *STREAMS,
)
