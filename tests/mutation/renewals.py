# ruff: noqa: E501
"""Ways to break renewals of many leases at once."""

from __future__ import annotations

from tests.mutation.mutant import AGENT, CONTROL, Mutant

__all__ = ["RENEWALS"]

RENEWALS = (
    Mutant(
        "bulk_destination_first",
        "the source is extended first, then the destination",
        CONTROL + "model/extension_events.py",
        "        w.command(\n            source,\n            ExtendLeases(",
        "        w.command(ref, ExtendLeases(0, epoch, named, limits.lease_ttl_ns, limits.guard_ns, w.state.workers[ref.worker_id].clock, False))\n        w.command(\n            source,\n            ExtendLeases(",
        ("tests/unit/controlplane/test_extensions.py::test_the_source_first_then_the_destination",),
    ),
    Mutant(
        "bulk_after_the_guard",
        "the destination is extended within the guard of the asking",
        CONTROL + "model/extension_events.py",
        "    late = w.now_ns - asked.asked_ns > w.limits.guard_ns\n",
        "    late = False\n",
        (
            "tests/unit/controlplane/test_extensions.py::test_an_answer_after_the_guard_extends_nothing",
        ),
    ),
    Mutant(
        "bulk_of_others",
        "a worker extends its own leases only",
        CONTROL + "model/extension_events.py",
        "    ok &= leases.destination[slots] == leases.number_of(ref)\n",
        "",
        (
            "tests/unit/controlplane/test_extensions.py::test_only_its_own_leases_are_a_destinations_to_extend",
        ),
    ),
    Mutant(
        "bulk_for_ever",
        "no lease outlives its longest life",
        CONTROL + "model/extension_events.py",
        "    ok &= leases.create_ns[slots] >= until_ns - limits.lease_lifetime_max_ns\n",
        "",
        ("tests/unit/controlplane/test_extensions.py::test_no_lease_outlives_its_longest_life",),
    ),
    Mutant(
        "bulk_of_a_stopping_lease",
        "what is being stopped is not extended",
        CONTROL + "model/extension_events.py",
        "    going &= ~leases.stopping[slots]\n",
        "",
        (
            "tests/unit/controlplane/test_extensions.py::test_what_ends_or_is_stopped_meanwhile_is_not_extended",
        ),
    ),
    Mutant(
        "bulk_of_a_pending_lease",
        "what is not granted is not extended",
        CONTROL + "model/extension_events.py",
        "    going: npt.NDArray[np.bool_] = (state == LeaseState.GRANTED) | (state == LeaseState.ACTIVE)\n",
        "    going: npt.NDArray[np.bool_] = state > 0\n",
        ("tests/unit/controlplane/test_extensions.py::test_what_is_not_granted_is_not_extended",),
    ),
    Mutant(
        "bulk_not_looked_at_again",
        "what was stopped meanwhile is left out",
        CONTROL + "model/extension_events.py",
        "    slots = slots[_going(w, slots)]\n",
        "",
        (
            "tests/unit/controlplane/test_extensions.py::test_what_ends_or_is_stopped_meanwhile_is_not_extended",
        ),
    ),
    Mutant(
        "bulk_missing_extended",
        "what the source does not hold is not extended",
        CONTROL + "model/extension_events.py",
        "    seqs = asked.seqs[~np.isin(asked.seqs, missing)] if len(missing) else asked.seqs\n",
        "    seqs = asked.seqs\n",
        (
            "tests/unit/controlplane/test_extensions.py::test_what_the_source_does_not_hold_is_not_extended",
        ),
    ),
    Mutant(
        "bulk_answer_of_another",
        "only the source that was asked can answer",
        CONTROL + "model/extension_events.py",
        "    if asked is None or asked.source != ref:\n",
        "    if asked is None:\n",
        (
            "tests/unit/controlplane/test_extensions.py::test_only_the_source_that_was_asked_answers",
        ),
    ),
    Mutant(
        "bulk_answered_twice",
        "an answer counts once",
        CONTROL + "model/extension_events.py",
        "    del w.state.extensions[number]\n    destination",
        "    destination",
        (
            "tests/unit/controlplane/test_extensions.py::test_only_the_source_that_was_asked_answers",
        ),
    ),
    Mutant(
        "bulk_over_budget",
        "renewals are within the budgets",
        CONTROL + "model/extension_events.py",
        "            if not admission.may_extend(w, worker, leases.name_of(int(tenant))):",
        "            if False:",
        (
            "tests/unit/controlplane/test_extensions.py::test_a_source_short_of_blocks_extends_nothing",
        ),
    ),
    Mutant(
        "bulk_old_answers_kept",
        "answers that would come too late are not waited for",
        CONTROL + "model/extension_events.py",
        "    _forget_old(w)\n    for number",
        "    for number",
        (
            "tests/unit/controlplane/test_extensions.py::test_what_will_not_be_answered_any_more_is_not_waited_for",
        ),
    ),
    Mutant(
        "bulk_books_not_moved",
        "the books know that a lease lasts longer",
        CONTROL + "model/extension_events.py",
        "    leases.extend(slots, w.now_ns + asked.ttl_ns)\n",
        "",
        ("tests/unit/controlplane/test_extensions.py::test_the_source_first_then_the_destination",),
    ),
    Mutant(
        "bulk_stale_asof",
        "a destination counts from the as_of that it is told",
        AGENT + "extensions.py",
        "    deadline = destination_deadline(command.as_of, command.ttl.ToNanoseconds())\n    named",
        "    deadline = now + command.ttl.ToNanoseconds()\n    named",
        (
            "tests/unit/dataplane/test_extensions.py::test_the_destination_counts_longer_and_its_mover_too",
        ),
    ),
    Mutant(
        "bulk_shortens",
        "a renewal shortens nothing",
        AGENT + "extensions.py",
        "        if deadline <= grant.deadline_ns:\n            continue\n",
        "",
        (
            "tests/unit/dataplane/test_extensions.py::test_the_destination_counts_longer_and_its_mover_too",
        ),
    ),
    Mutant(
        "bulk_mover_not_told",
        "the mover counts longer too",
        AGENT + "extensions.py",
        "        if grant.request_id:\n            out.order(m.ExtendRead(grant.request_id, deadline))",
        "        pass",
        (
            "tests/unit/dataplane/test_extensions.py::test_the_destination_counts_longer_and_its_mover_too",
        ),
    ),
    Mutant(
        "bulk_of_another_epoch",
        "numbers count within their epoch",
        AGENT + "extensions.py",
        "        if grant.number[0] != command.lease_epoch or grant.number[1] not in named:",
        "        if grant.number[1] not in named:",
        (
            "tests/unit/dataplane/test_extensions.py::test_the_destination_counts_longer_and_its_mover_too",
        ),
    ),
    Mutant(
        "bulk_revives_closing",
        "a lease that is closing is not revived",
        AGENT + "source.py",
        "seq not in missing or lease.closing:",
        "seq not in missing:",
        ("tests/unit/dataplane/test_extensions.py::test_a_lease_that_is_closing_is_not_revived",),
    ),
    Mutant(
        "bulk_source_does_not_hold",
        "the source holds longer",
        AGENT + "source.py",
        "                lease.deadline_ns = deadline\n                self._out.order(m.Serve(lease.lease_id, deadline))",
        "                self._out.order(m.Serve(lease.lease_id, deadline))",
        (
            "tests/unit/dataplane/test_extensions.py::test_the_source_holds_longer_and_says_what_it_lacks",
        ),
    ),
    Mutant(
        "bulk_source_says_no",
        "the source's movers say yes for longer",
        AGENT + "source.py",
        "                lease.deadline_ns = deadline\n                self._out.order(m.Serve(lease.lease_id, deadline))",
        "                lease.deadline_ns = deadline",
        (
            "tests/unit/dataplane/test_extensions.py::test_the_source_holds_longer_and_says_what_it_lacks",
        ),
    ),
    Mutant(
        "bulk_source_of_another_epoch",
        "the source's numbers count within their epoch",
        AGENT + "source.py",
        "            if epoch != command.lease_epoch or seq not in missing",
        "            if seq not in missing",
        (
            "tests/unit/dataplane/test_extensions.py::test_the_source_holds_longer_and_says_what_it_lacks",
        ),
    ),
    Mutant(
        "never_asks",
        "a lease that is needed is asked for in time",
        AGENT + "destination.py",
        "        extensions.ask(self._out, self._needed(), now)\n",
        "        pass\n",
        (
            "tests/unit/dataplane/test_extensions.py::test_a_read_asks_for_more_time_when_half_of_it_is_over",
        ),
    ),
    Mutant(
        "asks_without_end",
        "a lease is asked for now and then, not at every step",
        AGENT + "extensions.py",
        "        grant.ask_ns = min(now + max(ASK_AGAIN_NS, left // 2), grant.deadline_ns)\n",
        "",
        (
            "tests/unit/dataplane/test_extensions.py::test_a_read_asks_for_more_time_when_half_of_it_is_over",
        ),
    ),
    Mutant(
        "renewal_revives_a_stopped_lease",
        "what is being stopped is not renewed",
        CONTROL + "model/lease_events.py",
        "    if not lease.open or lease.stop is not None:\n",
        "    if not lease.open:\n",
        ("tests/unit/controlplane/test_lease_rules.py::test_what_stops_a_lease_stops_its_renewal",),
    ),
    Mutant(
        "renewal_for_ever",
        "a renewed lease has a longest life",
        CONTROL + "model/lease_events.py",
        "    lease = lease.renewing(min(ttl_ns, left), w.now_ns).asked(request)\n",
        "    lease = lease.renewing(ttl_ns, w.now_ns).asked(request)\n",
        (
            "tests/unit/controlplane/test_lease_rules.py::test_renewals_end_with_the_longest_life_of_a_lease",
        ),
    ),
    Mutant(
        "renewal_uncapped",
        "a renewal is for so long at most",
        CONTROL + "model/lease_events.py",
        "    ttl_ns = min(ttl_ns, w.limits.lease_ttl_max_ns)\n",
        "",
        (
            "tests/unit/controlplane/test_registry.py::test_renewal_is_source_first_within_the_guard_and_capped",
        ),
    ),
    Mutant(
        "renewal_of_another_version",
        "an answer to an older Extend renews nothing",
        CONTROL + "model/lease_events.py",
        " or lease.renewal.version != version:",
        ":",
        (
            "tests/unit/controlplane/test_lease_rules.py::test_a_renewal_that_nobody_answered_may_be_asked_for_again_after_the_guard",
        ),
    ),
    Mutant(
        "renewal_shortens_the_books",
        "a renewal shortens nothing in the books",
        CONTROL + "model/lease.py",
        "            deadline_ns=max(self.deadline_ns, now_ns + self.renewal.ttl_ns),",
        "            deadline_ns=now_ns + self.renewal.ttl_ns,",
        ("tests/unit/controlplane/test_lease.py::test_a_renewal_never_shortens",),
    ),
)
