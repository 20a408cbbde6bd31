# ruff: noqa: E501
"""Ways to break retention and the budgets.

Not here, since nothing could tell: the order of the new and the old hold when a replica is trimmed
(nothing is handed out between them, on the one thread that may).
"""

from __future__ import annotations

from tests.mutation.mutant import AGENT, CONTROL, Mutant

__all__ = ["RETENTION"]

RETENTION = (
    Mutant(
        "hold_uncapped",
        "no hold outlasts the longest retention",
        CONTROL + "model/retention.py",
        "    return min(wanted, limits.retention_max_ns)",
        "    return wanted",
        ("tests/unit/controlplane/test_retention.py::test_holds_are_bounded",),
    ),
    Mutant(
        "hint_not_heard",
        "a hold lasts for what the client expects",
        CONTROL + "model/retention.py",
        "        wanted = max(wanted, 4 * absence.expected_ns)\n",
        "        pass\n",
        ("tests/unit/controlplane/test_retention.py::test_the_hold_of_a_session_without_a_past",),
    ),
    Mutant(
        "relief_takes_running",
        "what a turn is using does not go",
        CONTROL + "model/retention_events.py",
        "        if session is None or session.running():",
        "        if session is None:",
        (
            "tests/unit/controlplane/test_rules_seen.py::test_what_a_turn_uses_does_not_go_though_nothing_else_is_there",
        ),
    ),
    Mutant(
        "relief_every_beat",
        "a worker is given time to show relief",
        CONTROL + "model/retention_events.py",
        " or w.now_ns < w.state.relieved_ns.get(ref.worker_id, 0):",
        ":",
        (
            "tests/unit/controlplane/test_retention_events.py::test_over_its_budget_the_longest_away_goes_first_and_no_more_than_needed",
        ),
    ),
    Mutant(
        "relief_never_for_free",
        "few free blocks are relieved",
        CONTROL + "model/retention_events.py",
        "        int(limits.free_share_relief * pool.total_blocks) - pool.free_blocks,",
        "        0,",
        (
            "tests/unit/controlplane/test_retention_events.py::test_without_a_free_block_holds_go_even_within_the_budget",
        ),
    ),
    Mutant(
        "relief_never_for_held",
        "too many held blocks are relieved",
        CONTROL + "model/retention_events.py",
        "        pool.held_blocks - int(limits.held_share_worker * pool.total_blocks),",
        "        0,",
        (
            "tests/unit/controlplane/test_retention_events.py::test_over_its_budget_the_longest_away_goes_first_and_no_more_than_needed",
        ),
    ),
    Mutant(
        "tenant_held_unbounded",
        "a tenant holds its share of a worker at most",
        CONTROL + "model/retention_events.py",
        "        if share and excess > 0:",
        "        if False:",
        (
            "tests/unit/controlplane/test_retention_events.py::test_a_tenant_over_its_share_pays_for_itself",
        ),
    ),
    Mutant(
        "relief_takes_from_all",
        "who holds little does not pay for who holds much",
        CONTROL + "model/retention_events.py",
        "    excess -= go(beyond, min(excess, sum(beyond.values())))\n",
        "",
        (
            "tests/unit/controlplane/test_retention_events.py::test_who_holds_little_is_not_pushed_out_by_who_holds_much",
        ),
    ),
    Mutant(
        "relief_takes_too_much",
        "no more goes than it takes",
        CONTROL + "model/retention.py",
        "        going.append((candidate, min(blocks, candidate.blocks)))",
        "        going.append((candidate, candidate.blocks))",
        ("tests/unit/controlplane/test_retention.py::test_as_many_blocks_go_as_are_asked_for",),
    ),
    Mutant(
        "corrects_always",
        "a hold that differs little is left as it is",
        CONTROL + "model/retention_events.py",
        "    if abs(wanted_ns - announced_ns) > w.limits.retention_slack * announced_ns:",
        "    if True:",
        (
            "tests/unit/controlplane/test_retention_events.py::test_a_hold_that_is_about_right_is_left_as_it_is",
        ),
    ),
    Mutant(
        "prefill_held_for_the_session",
        "a hint does not move what prefill holds",
        CONTROL + "model/retention_events.py",
        "        if worker is None or worker.role is WorkerRole.PREFILL:",
        "        if worker is None:",
        (
            "tests/unit/controlplane/test_rules_seen.py::test_a_hint_moves_what_decode_holds_and_nothing_at_prefill",
        ),
    ),
    Mutant(
        "agent_never_softens",
        "a hold ends with its retention",
        AGENT + "source.py",
        "            if now >= replica.expires_ns:",
        "            if False:",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_hold_ends_with_its_retention_and_the_replica_turns_soft",
        ),
    ),
    Mutant(
        "agent_ignores_no_retention",
        "a retention of nothing ends the hold",
        AGENT + "source.py",
        '        if retention_ns <= 0:\n            self._soften(replica, "RELEASED")',
        "        if False:\n            pass",
        ("tests/unit/dataplane/test_rules_seen.py::test_a_retention_of_nothing_ends_the_hold",),
    ),
    Mutant(
        "agent_trims_all",
        "a trimmed replica keeps its start",
        AGENT + "source.py",
        "            replica.hold = self._holds.take(HoldKind.REPLICA, whole.block_ids[:keep_blocks])\n            self._holds.release(whole)",
        "            replica.hold = self._holds.take(HoldKind.REPLICA, whole.block_ids[-keep_blocks:])\n            self._holds.release(whole)",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_replica_is_trimmed_and_keeps_its_start",
        ),
    ),
    Mutant(
        "agent_longest_goes_first",
        "under pressure the soonest to expire goes first",
        AGENT + "source.py",
        "key=lambda r: r.expires_ns):",
        "key=lambda r: -r.expires_ns):",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_under_pressure_the_soonest_to_expire_goes_first_and_leases_stay",
        ),
    ),
    Mutant(
        "soft_unbounded",
        "so many soft replicas are remembered at most",
        AGENT + "source.py",
        "        for replica in self._replicas.soft_beyond(MAX_SOFT_REPLICAS):",
        "        for replica in ():",
        ("tests/unit/dataplane/test_rules_seen.py::test_so_many_soft_replicas_are_remembered",),
    ),
    Mutant(
        "soft_not_shortened",
        "a soft replica is as long as its blocks are there",
        AGENT + "source.py",
        "                if index < replica.available and replica.hold is None:\n                    replica.available = index",
        "                if False:\n                    replica.available = index",
        (
            "tests/unit/dataplane/test_eager.py::test_a_soft_replica_gets_shorter_as_its_tail_is_reused",
        ),
    ),
    Mutant(
        "hardens_beyond_what_stayed",
        "a block that is computed again is not hardened",
        AGENT + "source.py",
        "range(start, min(end, replica.available, len(replica.soft_ids))):",
        "range(start, min(end, len(replica.soft_ids))):",
        (
            "tests/unit/dataplane/test_hazards.py::test_a_block_that_is_being_computed_again_is_not_hardened",
        ),
    ),
    Mutant(
        "hardens_anothers_block",
        "a soft replica is hardened where it lies",
        AGENT + "source.py",
        "            found.append(replica.soft_ids[index])\n",
        "            found.append(self._store.lookup(replica.hashes[index]))\n",
        (
            "tests/unit/dataplane/test_hazards.py::test_a_soft_replica_is_hardened_where_it_lies_and_not_where_its_hash_is_found",
        ),
    ),
    Mutant(
        "leased_unbounded",
        "leases hold their share of a worker at most",
        CONTROL + "model/admission.py",
        "    if total > capacity:\n        reason, over",
        "    if False:\n        reason, over",
        ("tests/unit/controlplane/test_admission.py::test_half_of_the_room_is_no_room",),
    ),
    Mutant(
        "tenant_leased_unbounded",
        "a tenant leases its share of a worker at most",
        CONTROL + "model/admission.py",
        "    if own_share and has > (own := int(own_share * size)):",
        "    if False and has > (own := int(own_share * size)):",
        (
            "tests/unit/controlplane/test_admission.py::test_over_its_budget_a_tenants_turn_recomputes",
        ),
    ),
    Mutant(
        "tenant_unfair",
        "beyond the calm share a tenant has an equal part",
        CONTROL + "model/admission.py",
        "    if total > calm and has > fair:",
        "    if False:",
        (
            "tests/unit/controlplane/test_admission.py::test_a_greedy_tenant_leaves_room_for_another",
        ),
    ),
    Mutant(
        "victims_just_granted",
        "a lease is not stopped for another before its request can be here",
        CONTROL + "model/admission.py",
        "    found = [x for x in found if x.grant_ns <= old_ns]\n",
        "",
        (
            "tests/unit/controlplane/test_admission.py::test_a_lease_whose_request_is_on_its_way_is_not_stopped_for_another",
        ),
    ),
    Mutant(
        "watermark_ignored",
        "a worker without free blocks is asked for nothing",
        CONTROL + "model/admission.py",
        '    if _under_watermark(limits, source):\n        return "WORKER_WATERMARK", []\n',
        "",
        (
            "tests/unit/controlplane/test_admission.py::test_under_the_watermark_nothing_is_hardened",
        ),
    ),
    Mutant(
        "quarantine_ignored",
        "a worker full of quarantine is granted nothing",
        CONTROL + "model/lease_events.py",
        "    if admission.quarantine_full(w.limits, destination):\n        fail",
        "    if False:\n        fail",
        (
            "tests/unit/controlplane/test_admission.py::test_a_destination_full_of_quarantine_is_granted_nothing",
        ),
    ),
)
