# ruff: noqa: E501
"""Ways to break the index of prefixes and the choice between placements: see docs/planner.md."""

from __future__ import annotations

from tests.mutation.mutant import AGENT, CONTROL, Mutant

__all__ = ["PREFIXES"]

_EVENTS = ("tests/unit/controlplane/test_prefix_events.py",)
_INDEX = ("tests/unit/controlplane/test_prefixes.py",)
_CHOICES = ("tests/unit/controlplane/test_planner_choices.py",)

PREFIXES = (
    Mutant(
        "prefix_of_another_tenant",
        "a session finds nothing of another tenant's",
        CONTROL + "model/prefixes.py",
        "        known = self._tenants.get(tenant)\n        if known is None:\n            return\n        for index",
        "        known = next(iter(self._tenants.values()), None)\n        if known is None:\n            return\n        for index",
        _INDEX,
    ),
    Mutant(
        "prefix_may_ask_because_of_others",
        "that another tenant has something is not even said",
        CONTROL + "model/prefixes.py",
        "        return tenant in self._tenants\n",
        "        return bool(self._tenants)\n",
        _INDEX,
    ),
    Mutant(
        "prefix_source_of_the_child",
        "the source is asked for the replica of the session that has it",
        CONTROL + "model/lease_events.py",
        "            source_key or key,\n",
        "            key,\n",
        _EVENTS,
    ),
    Mutant(
        "prefix_released_after_use",
        "what a session has left where it no longer runs stays there",
        CONTROL + "model/replica_events.py",
        "    if not _from_prefill(w, lease):\n        return\n",
        "",
        _EVENTS,
    ),
    Mutant(
        "prefix_asked_twice",
        "a question that is repeated makes no second lease",
        CONTROL + "model/prefix_events.py",
        "        return  # asked again\n",
        "        pass\n",
        _EVENTS,
    ),
    Mutant(
        "prefix_unbounded",
        "the index has so many hashes at most",
        CONTROL + "model/prefixes.py",
        "            self._make_room()\n",
        "            pass\n",
        _INDEX,
    ),
    Mutant(
        "prefix_though_never",
        "a turn that wants no return may not ask",
        CONTROL + "model/turn_events.py",
        "        and ask.policy is not ReturnPolicy.NEVER\n",
        "",
        _EVENTS,
    ),
    Mutant(
        "prefix_waits_for_ever",
        "a request that asks waits no longer than for a grant",
        AGENT + "destination.py",
        '            if now < until:\n                return self._later(request_id, until if worth is None else min(until, worth))\n            return self._no(request_id, "GRANT_TIMEOUT")',
        "            return None",
        ("tests/unit/dataplane/test_asking.py",),
    ),
    Mutant(
        "planner_without_margins",
        "no session goes to and fro for a small difference",
        CONTROL + "planner/planner.py",
        "least_us < first.ttft_us:",
        "0 < first.ttft_us:",
        _CHOICES,
    ),
    Mutant(
        "planner_forgets_what_waits",
        "what a worker was given counts until it is done",
        CONTROL + "planner/rates.py",
        "        backlog.tokens += tokens\n",
        "",
        _CHOICES,
    ),
    Mutant(
        "planner_one_wild_sample",
        "one sample moves a rate no farther than a factor of eight would",
        CONTROL + "planner/rates.py",
        "            sample = min(max(sample, known / OUTLIER), known * OUTLIER)\n",
        "",
        _CHOICES,
    ),
    Mutant(
        "planner_direct_of_any_length",
        "a long prompt does not hold up the answers at decode",
        CONTROL + "planner/planner.py",
        '            return "LONG_PROMPT"\n',
        "            pass\n",
        _CHOICES,
    ),
)
