# ruff: noqa: E501
"""Ways to break what an agent does while vLLM is paused: see docs/agent.md."""

from __future__ import annotations

from tests.mutation.mutant import AGENT, Mutant

__all__ = ["PAUSES"]

TESTS = ("tests/unit/dataplane/test_pause.py",)

PAUSES = (
    Mutant(
        "pause_takes_eager_in",
        "nothing is brought to an engine whose weights may be changing",
        AGENT + "eager.py",
        "        if self.paused:\n",
        "        if False:\n",
        TESTS,
    ),
    Mutant(
        "pause_lets_eager_go_on",
        "nor does what had begun go on",
        AGENT + "scheduler.py",
        '            self.eager.yield_room("ENGINE_PAUSED")\n',
        "            pass\n",
        TESTS,
    ),
    Mutant(
        "pause_keeps_grants",
        "what nobody reads yet goes back: it would keep its source from pausing, and be of old weights",
        AGENT + "scheduler.py",
        '            self.destination.let_go_unread("ENGINE_PAUSED")\n',
        "",
        TESTS,
    ),
    Mutant(
        "pause_takes_grants",
        "what is granted meanwhile goes back too",
        AGENT + "destination.py",
        "        if self._eager.paused:\n",
        "        if False:\n",
        TESTS,
    ),
    Mutant(
        "pause_does_not_wait",
        "a pause waits for what is read or written, or vLLM cannot reset its cache",
        AGENT + "scheduler.py",
        "        if not self._pauses or not self._holds.moving:\n",
        "        if True:\n",
        TESTS,
    ),
    Mutant(
        "pause_waits_for_replicas",
        "a replica is no reason to wait: it would last for minutes",
        AGENT + "holds.py",
        "return self._moving > 0",
        "return bool(self._holds)",
        TESTS,
    ),
    Mutant(
        "pause_waits_for_ever",
        "a quarantine may never end",
        AGENT + "scheduler.py",
        "return now - self._settling_ns < PAUSE_WAIT_NS",
        "return True",
        TESTS,
    ),
    Mutant(
        "pause_counts_from_the_beginning",
        "answers that a pause waits for do not count",
        AGENT + "scheduler.py",
        "            self._settling_ns = None\n            return False\n",
        "            return False\n",
        TESTS,
    ),
    Mutant(
        "pause_asked_again_does_not_wait",
        "whoever asks again waits again",
        AGENT + "scheduler.py",
        "        # Whoever asks again waits again.\n        self._settling_ns = None\n",
        "",
        TESTS,
    ),
    Mutant(
        "reset_obeys_before_it_lets_go",
        "a lease that begins in the midst of a reset would be in its way",
        AGENT + "scheduler.py",
        "        self._let_go_for_reset()\n        self.drain()\n",
        "        self.drain()\n",
        TESTS,
    ),
)
