# ruff: noqa: E501
"""Ways to break the lease protocol, one rule each."""

from __future__ import annotations

from tests.mutation.mutant import AGENT, CONTROL, Mutant

__all__ = ["CORE"]

CORE = (
    Mutant(
        "cp_stop_releases_source",
        "a revoke stops renewal only",
        CONTROL + "model/lease_events.py",
        "        lease = lease.stopping(final, reason)\n",
        (
            "        lease = lease.stopping(final, reason)\n"
            "        w.command(lease.source, ReaderStopped(lease.lease_id, lease.version))\n"
        ),
        (
            "tests/unit/controlplane/test_lease_rules.py::test_a_turn_cancelled_after_the_grant_waits_for_its_reader_and_no_longer",
        ),
    ),
    Mutant(
        "cp_lost_dest_releases",
        "a lost stream is not the reader's end",
        CONTROL + "model/worker_events.py",
        "            w.put_lease(lease.ended(LeaseState.FAILED, reason, w.now_ns))\n",
        (
            "            w.put_lease(lease.ended(LeaseState.FAILED, reason, w.now_ns))\n"
            "            lease_events.reader_is_stopped(w, w.state.leases[lease.lease_id])\n"
        ),
        ("tests/unit/controlplane/test_recovery.py",),
    ),
    Mutant(
        "reconcile_always_stops_source",
        "reconciliation stops renewal only",
        CONTROL + "model/recovery.py",
        "    elif lease.reader_stopped:\n",
        "    elif True:\n",
        ("tests/unit/controlplane/test_recovery.py::test_row",),
    ),
    Mutant(
        "no_guard_in_source_deadline",
        "the source holds for TTL + guard",
        AGENT + "clock.py",
        "(ttl_ns + guard_ns) *",
        "(ttl_ns) *",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_source_keeps_its_range_for_ttl_guard_and_drift",
        ),
    ),
    Mutant(
        "no_drift",
        "the source allows for drifting clocks",
        AGENT + "clock.py",
        " * (1_000_000 + 2 * drift_ppm) // 1_000_000",
        "",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_source_keeps_its_range_for_ttl_guard_and_drift",
        ),
    ),
    Mutant(
        "ttl_from_arrival",
        "a destination counts from as_of",
        AGENT + "clock.py",
        "    return as_of + ttl_ns",
        "    return boottime_ns() + ttl_ns",
        ("tests/unit/dataplane/test_eager.py::test_nothing_is_posted_near_the_deadline",),
    ),
    Mutant(
        "no_guard_check",
        "a grant comes within the guard of the asking",
        CONTROL + "model/lease_events.py",
        "    if not lease.push and w.now_ns - lease.create_ns > w.limits.guard_ns:",
        "    if False:",
        ("tests/unit/controlplane/test_registry.py::test_nothing_is_granted_after_the_guard",),
    ),
    Mutant(
        "no_renew_guard",
        "a renewal comes within the guard of the asking",
        CONTROL + "model/lease_events.py",
        "late = w.now_ns - lease.renewal.asked_ns > w.limits.guard_ns",
        "late = False",
        (
            "tests/unit/controlplane/test_registry.py::test_renewal_is_source_first_within_the_guard_and_capped",
        ),
    ),
    Mutant(
        "source_extend_ignored",
        "the source is extended first",
        AGENT + "source.py",
        (
            "        lease.deadline_ns = max(\n"
            "            lease.deadline_ns,\n"
            "            source_deadline("
        ),
        ("        _ = max(\n            lease.deadline_ns,\n            source_deadline("),
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_an_extension_moves_the_source_deadline",
        ),
    ),
    Mutant(
        "end_stream_noop",
        "what a closed stream had queued is dropped",
        AGENT + "scheduler.py",
        "            life.open = False",
        "            pass",
        (
            "tests/unit/dataplane/test_hazards.py::test_a_grant_that_queues_while_its_stream_is_replaced_is_not_obeyed",
        ),
    ),
    Mutant(
        "no_post_margin",
        "nothing is posted after the deadline less the margin",
        AGENT + "transfers.py",
        "elif now > order.deadline_ns - DEADLINE_MARGIN_NS:",
        "elif False:",
        (
            "tests/unit/dataplane/test_transfers.py::test_nothing_is_posted_when_the_deadline_is_near",
        ),
    ),
    Mutant(
        "no_late_check",
        "the clock is looked at after completion",
        AGENT + "transfers.py",
        "if state.completed_ns > state.deadline_ns:",
        "if False:",
        ("tests/unit/dataplane/test_transfers.py::test_what_completed_late_is_over_at_once",),
    ),
    Mutant(
        "no_late_and_confirm_check",
        "the clock is looked at after the source's answer",
        AGENT + "transfers.py",
        "late = self._clock() > state.deadline_ns",
        "late = False",
        ("tests/unit/dataplane/test_transfers.py::test_a_yes_that_is_read_late_publishes_nothing",),
    ),
    Mutant(
        "always_held",
        "the source says whether it still holds",
        AGENT + "transfers.py",
        "held = deadline is not None and self._clock() <= deadline",
        "held = True",
        ("tests/unit/dataplane/test_transfers.py::test_the_source_says_whether_it_still_holds",),
    ),
    Mutant(
        "no_confirm",
        "the source is asked before anything is published",
        AGENT + "transfers.py",
        ("            state.phase = _Phase.CONFIRMING\n            return True"),
        (
            "            state.phase = _Phase.CONFIRMING\n"
            "            state.held = True\n"
            "            return True"
        ),
        (
            "tests/unit/dataplane/test_transfers.py::test_nothing_is_published_before_the_source_has_answered",
        ),
    ),
    Mutant(
        "let_go_in_proc",
        "a quarantine ends when NIXL has let go",
        AGENT + "transfers.py",
        'if not part.done and self._transport.state(part.handle) == "PROC":',
        "if False:",
        ("tests/unit/dataplane/test_transfers.py::test_blocks_are_free_only_when_nixl_has_let_go",),
    ),
    Mutant(
        "never_give_up_deadline",
        "a read is given up before its deadline",
        AGENT + "transfers.py",
        ("if now > state.deadline_ns - DEADLINE_MARGIN_NS:\n            self._give_up"),
        ("if False:\n            self._give_up"),
        ("tests/unit/dataplane/test_transfers.py::test_a_read_is_given_up_before_its_deadline",),
    ),
    Mutant(
        "close_releases_at_once",
        "a range goes when no rank says yes any more",
        AGENT + "source.py",
        "            lease.closing = reason\n",
        ("            lease.closing = reason\n            self._holds.release(lease.hold)\n"),
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_source_keeps_its_range_until_the_reader_has_stopped",
        ),
    ),
    Mutant(
        "revoke_says_stopped_while_reading",
        "a reader that reads has not stopped",
        AGENT + "destination.py",
        (
            '            self._out.order(m.Abandon(grant.request_id, reason or "REVOKED"))\n'
            "            return\n"
        ),
        (
            '            self._out.order(m.Abandon(grant.request_id, reason or "REVOKED"))\n'
            '            self._say_stopped(lease_id, agent_pb2.TRANSFER_OUTCOME_REVOKED, "")\n'
            "            return\n"
        ),
        ("tests/unit/dataplane/test_scheduler_side.py::test_a_reader_that_reads_has_not_stopped",),
    ),
    Mutant(
        "no_landing_hold",
        "landing blocks are held from their allocation",
        AGENT + "destination.py",
        "        self._loads[request_id] = load\n",
        ("        self._loads[request_id] = load\n        self._holds.release(load.hold)\n"),
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_published_load_is_reported_and_its_hold_ends",
        ),
    ),
    Mutant(
        "abort_frees_landing",
        "an aborted load keeps its landing blocks",
        AGENT + "destination.py",
        "            load.orphaned = True\n",
        ("            load.orphaned = True\n            self._holds.release(load.hold)\n"),
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_landing_blocks_of_an_aborted_request_stay_until_nothing_writes",
        ),
    ),
    Mutant(
        "failed_load_frees_landing",
        "a failed load's blocks are in quarantine",
        AGENT + "destination.py",
        "            self._holds.quarantine(load.hold)\n",
        "            self._holds.release(load.hold)\n",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_failed_load_is_a_quarantine_until_nothing_writes",
        ),
    ),
    Mutant(
        "offer_unwritten",
        "only written blocks are offered",
        AGENT + "destination.py",
        "        return load.first\n",
        "        return None\n",
        (
            "tests/unit/dataplane/test_hazards.py::test_a_request_aborted_during_its_load_offers_only_what_it_had_before",
        ),
    ),
    Mutant(
        "match_by_count",
        "blocks match by hash, never by count",
        AGENT + "matching.py",
        "        if own[i] != offered[i]:",
        "        if False:",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_request_loads_the_common_hash_prefix_beyond_its_own_cache",
        ),
    ),
    Mutant(
        "clock_monotonic",
        "the agent's clock runs in a suspended machine",
        AGENT + "clock.py",
        "time.clock_gettime_ns(time.CLOCK_BOOTTIME)",
        "time.clock_gettime_ns(time.CLOCK_MONOTONIC)",
        ("tests/unit/test_clocks.py::test_a_suspended_machine_wakes_up_after_its_deadlines",),
    ),
    Mutant(
        "clock_wall",
        "clock steps do not matter to the agent",
        AGENT + "clock.py",
        "time.clock_gettime_ns(time.CLOCK_BOOTTIME)",
        "time.clock_gettime_ns(time.CLOCK_REALTIME)",
        ("tests/unit/test_clocks.py::test_a_clock_that_is_set_moves_no_deadline",),
    ),
    Mutant(
        "cp_clock_monotonic",
        "the control plane's clock runs in a suspended machine",
        CONTROL + "clock.py",
        "return time.clock_gettime_ns(time.CLOCK_BOOTTIME)",
        "return time.monotonic_ns()",
        ("tests/unit/test_clocks.py::test_a_suspended_machine_wakes_up_after_its_deadlines",),
    ),
    Mutant(
        "cp_clock_wall",
        "clock steps do not matter to the control plane",
        CONTROL + "clock.py",
        "return _boot_ns() + self._offset_ns",
        "return time.time_ns()",
        ("tests/unit/test_clocks.py::test_a_clock_that_is_set_moves_no_deadline",),
    ),
    Mutant(
        "second_boot_ok",
        "a second live boot is refused",
        CONTROL + "model/worker_events.py",
        "if before is not None and not same_boot and before.connected:",
        "if False:",
        ("tests/unit/controlplane/test_registry.py::test_a_live_boot_is_not_pushed_out",),
    ),
    Mutant(
        "lineage_ok",
        "a changed lineage needs the operator's flag",
        CONTROL + "model/worker_events.py",
        "if says.lineage_id and says.lineage_id != state.lineage_id and not accept_lineage:",
        "if False:",
        (
            "tests/unit/controlplane/test_registry.py::test_an_agent_of_another_store_needs_the_operators_word",
        ),
    ),
    Mutant(
        "epoch_not_raised",
        "the epoch goes above any that an agent saw",
        CONTROL + "model/recovery.py",
        "    if highest >= state.epoch and highest >",
        "    if False and highest >",
        ("tests/unit/controlplane/test_registry.py::test_nothing_is_granted_in_a_stale_epoch",),
    ),
    Mutant(
        "no_claim",
        "a lease is claimed by one request",
        AGENT + "destination.py",
        'if leg.claimed_by not in ("", request_id):',
        "if False:",
        ("tests/unit/dataplane/test_scheduler_side.py::test_one_lease_serves_one_request",),
    ),
    Mutant(
        "one_rank_done",
        "the reader has stopped when all its ranks have",
        AGENT + "source.py",
        "lease.ranks_done >= self.readers.get(lease.destination, self._out.num_ranks)",
        "lease.ranks_done >= 1",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_the_readers_own_notice_ends_the_lease_after_all_ranks",
        ),
    ),
    Mutant(
        "other_split_one_reader_done",
        "the reader has stopped when all its ranks' reads have ended, however many there are",
        AGENT + "source.py",
        "lease.ranks_done >= self.readers.get(lease.destination, self._out.num_ranks)",
        "lease.ranks_done >= self._out.num_ranks",
        (
            "tests/unit/dataplane/test_split_reads.py::test_a_source_waits_for_every_reader_before_it_lets_go",
        ),
    ),
    Mutant(
        "half_of_the_heads",
        "a rank reads all of its heads or nothing",
        AGENT + "transfers.py",
        "return list(sources) if all(heads == x.my_heads for x in sources.values()) else []",
        "return list(sources)",
        ("tests/unit/dataplane/test_split_reads.py::test_half_of_the_heads_are_not_read",),
    ),
    Mutant(
        "one_yes_is_enough",
        "every rank of the source says that it still held",
        AGENT + "transfers.py",
        "return None if None in answers else True",
        "return True if True in answers else None",
        (
            "tests/unit/dataplane/test_split_reads.py::test_all_ranks_must_have_completed_and_said_yes",
        ),
    ),
    Mutant(
        "a_part_in_flight_forgotten",
        "the landing blocks are free when every part has ended",
        AGENT + "transfers.py",
        "return all(part.handle is None for part in state.parts)",
        "return any(part.handle is None for part in state.parts)",
        (
            "tests/unit/dataplane/test_split_reads.py::test_a_part_that_fails_leaves_the_other_in_quarantine",
        ),
    ),
    Mutant(
        "connection_failed_unseen",
        "a peer is read only if every connection to it stands",
        AGENT + "destination.py",
        '            self._peers.setdefault(worker, "")',
        '            self._peers[worker] = ""',
        (
            "tests/unit/dataplane/test_split_reads.py::test_one_connection_that_fails_is_not_hidden_by_another",
        ),
    ),
    Mutant(
        "heads_taken_on_trust",
        "ranks keep what the split of the heads gives them",
        CONTROL + "model/splits.py",
        "        if (first, count) != expected:",
        "        if False:",
        ("tests/unit/controlplane/test_splits.py",),
    ),
    Mutant(
        "one_rank_unserved",
        "the range goes when all ranks say no",
        AGENT + "source.py",
        "lease.ranks_unserved >= self._out.num_ranks",
        "lease.ranks_unserved >= 1",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_source_keeps_its_range_until_every_rank_says_no_to_the_reader",
        ),
    ),
    Mutant(
        "first_rank_ends_load",
        "a load ends with its last rank",
        AGENT + "destination.py",
        "        if load.ranks_left:\n            return\n        journal",
        "        journal",
        ("tests/unit/dataplane/test_scheduler_side.py::test_every_rank_must_have_ended",),
    ),
    Mutant(
        "superseded_reader_gone",
        "another boot does not prove the old one dead",
        CONTROL + "model/recovery.py",
        '            w.put_lease(lease.ended(LeaseState.FAILED, "DESTINATION_RESTARTED", w.now_ns))',
        '            lease_events.reader_gone(w, lease, LeaseState.FAILED, "X")',
        ("tests/unit/controlplane/test_recovery.py::test_row",),
    ),
    Mutant(
        "expiry_stops_reader",
        "an expiry in the books proves nothing of the reader",
        CONTROL + "model/lease_events.py",
        '            _end(w, lease, LeaseState.EXPIRED, "DEADLINE")\n        lease = w',
        (
            '            lease = _end(w, lease, LeaseState.EXPIRED, "DEADLINE")\n'
            "            reader_is_stopped(w, lease)\n"
            "        lease = w"
        ),
        (
            "tests/unit/controlplane/test_admission.py::test_an_ended_lease_counts_until_its_source_lets_go",
        ),
    ),
    Mutant(
        "hello_hides_grants",
        "a hello carries the whole inventory",
        AGENT + "scheduler.py",
        "for grant in self.destination.open_grants:",
        "for grant in ():",
        (
            "tests/unit/test_prevented.py::test_lost_on_restart__an_agent_keeps_its_holds_and_a_read_goes_on",
        ),
    ),
    Mutant(
        "eager_no_quarantine",
        "an eager read that hangs keeps its blocks",
        AGENT + "eager.py",
        "        self.holds.quarantine(job.piece.hold)\n",
        "        self.holds.release(job.piece.hold)\n",
        ("tests/unit/dataplane/test_eager.py::test_a_read_that_does_not_end_is_a_quarantine",),
    ),
    Mutant(
        "eager_publishes_failed",
        "an eager read that failed enters nothing",
        AGENT + "eager.py",
        "        if piece.published:\n",
        "        if True:\n",
        ("tests/unit/dataplane/test_eager.py::test_what_was_not_confirmed_is_not_entered",),
    ),
    Mutant(
        "renew_dest_first",
        "the source is extended first, then the destination",
        CONTROL + "model/lease_events.py",
        ("    assert lease.renewal is not None\n    w.command(\n        lease.source,"),
        (
            "    assert lease.renewal is not None\n"
            "    dest = w.worker(lease.destination)\n"
            "    if dest is not None:\n"
            "        w.command(lease.destination, Extend(lease_id, lease.version, lease.renewal.ttl_ns, w.limits.guard_ns, dest.clock, False))\n"
            "    w.command(\n"
            "        lease.source,"
        ),
        (
            "tests/unit/controlplane/test_lease_rules.py::test_a_renewal_that_nobody_answered_may_be_asked_for_again_after_the_guard",
        ),
    ),
    Mutant(
        "make_room_takes_leases",
        "pressure takes no leased range",
        AGENT + "source.py",
        (
            "        if self._store.free_blocks >= wanted_free:\n            return\n        for replica"
        ),
        (
            "        for lease in list(self._leases.values()):\n"
            '            self._close(lease, "PRESSURE")\n'
            "        if self._store.free_blocks >= wanted_free:\n"
            "            return\n"
            "        for replica"
        ),
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_under_pressure_the_soonest_to_expire_goes_first_and_leases_stay",
        ),
    ),
    Mutant(
        "session_end_releases_leases",
        "a session's end leaves leased ranges",
        AGENT + "source.py",
        '                self._forget(replica, "RELEASED")\n',
        (
            '                self._forget(replica, "RELEASED")\n'
            "        for lease in list(self._leases.values()):\n"
            '            self._close(lease, "RELEASED")\n'
        ),
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_source_keeps_its_range_until_the_reader_has_stopped",
        ),
    ),
    Mutant(
        "no_boot_id_check",
        "a message for another boot is dropped",
        AGENT + "conversation.py",
        "if response.boot_id != self.hello.boot_id:",
        "if False:",
        ("tests/unit/dataplane/test_hazards.py::test_a_message_for_another_boot_is_not_heard",),
    ),
    Mutant(
        "reserve_no_reader_stop_on_reconnect",
        "a reader that came back without the lease has stopped",
        CONTROL + "model/recovery.py",
        (
            "        # destination-lacks, ended-destination-lacks\n"
            '        lease_events.reader_gone(w, lease, LeaseState.FAILED, "RECONNECTED")'
        ),
        "        pass",
        (
            "tests/unit/controlplane/test_eager.py::test_a_restart_keeps_the_count_until_the_inventories_say_otherwise",
        ),
    ),
    Mutant(
        "lookup_never_gives_up",
        "a lookup answers in bounded time",
        AGENT + "destination.py",
        (
            "            if now < until:\n"
            "                return self._later(request_id, until if worth is None else min(until, worth))\n"
            '            return self._no(request_id, "GRANT_TIMEOUT")'
        ),
        "            return None",
        ("tests/unit/dataplane/test_eager.py::test_a_turn_waits_no_longer_than_told",),
    ),
    Mutant(
        "abandon_ignored",
        "a load whose request is gone is abandoned",
        AGENT + "destination.py",
        '            self._out.order(m.Abandon(request_id, "REQUEST_ENDED"))\n',
        "            pass\n",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_landing_blocks_of_an_aborted_request_stay_until_nothing_writes",
        ),
    ),
    Mutant(
        "stall_never",
        "a read that stands still is given up",
        AGENT + "transfers.py",
        "if now > state.posted_ns + self._patience_ns(state.order):",
        "if False:",
        ("tests/unit/dataplane/test_transfers.py::test_a_read_that_stands_still_is_given_up",),
    ),
    Mutant(
        "dest_extend_stale_asof",
        "an extension counts from a fresh as_of",
        AGENT + "destination.py",
        "deadline = destination_deadline(command.as_of, command.ttl.ToNanoseconds())",
        "deadline = self._clock() + command.ttl.ToNanoseconds()",
        (
            "tests/unit/dataplane/test_rules_seen.py::test_an_extension_counts_from_the_heartbeat_that_it_names",
        ),
    ),
    Mutant(
        "grant_twice_allowed",
        "a lease is granted once",
        AGENT + "destination.py",
        ("        if command.lease_id in self._grants:\n            return\n"),
        "",
        (
            "tests/unit/dataplane/test_rules_seen.py::test_a_repeated_grant_does_not_stop_the_read_of_the_first",
        ),
    ),
    Mutant(
        "source_never_expires",
        "every hold ends in bounded time",
        AGENT + "source.py",
        "            if now >= lease.deadline_ns:\n",
        "            if False:\n",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_source_keeps_its_range_for_ttl_guard_and_drift",
        ),
    ),
    Mutant(
        "source_expires_early",
        "a source never lets go before its deadline",
        AGENT + "source.py",
        "            if now >= lease.deadline_ns:\n",
        "            if now >= lease.deadline_ns - 2_000_000_000:\n",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_source_keeps_its_range_for_ttl_guard_and_drift",
        ),
    ),
    Mutant(
        "renewal_survives_reconnect",
        "a reconnect stops a renewal under way",
        CONTROL + "model/recovery.py",
        "            lease = lease.renewal_over()  # noqa: PLW2901\n",
        "",
        (
            "tests/unit/controlplane/test_rules_seen.py::test_a_new_stream_ends_a_renewal_whose_answer_may_be_lost",
        ),
    ),
    Mutant(
        "fence_no_peer",
        "a fence reaches the workers that read or were read",
        CONTROL + "model/worker_events.py",
        "            w.command(other.ref, PeerFenced(ref))",
        "            pass",
        ("tests/unit/controlplane/test_rules_seen.py::test_everybody_hears_of_a_fence",),
    ),
    Mutant(
        "epoch_not_checked",
        "a stale epoch is not obeyed",
        AGENT + "scheduler.py",
        "if not current or batch.epoch < self.highest_epoch:",
        "if not current:",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_closed_stream_and_an_older_term_are_not_obeyed",
        ),
    ),
    Mutant(
        "generation_not_checked",
        "what another stream had queued is not obeyed",
        AGENT + "scheduler.py",
        "current = batch.generation == self._generation and batch.life.open",
        "current = True",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_a_closed_stream_and_an_older_term_are_not_obeyed",
        ),
    ),
    Mutant(
        "hardened_version_ignored",
        "a stale answer of the source grants nothing",
        CONTROL + "model/lease_events.py",
        "    if version != lease.version:\n        return  # no",
        "    if False:\n        return  # no",
        (
            "tests/unit/controlplane/test_lease_rules.py::test_an_answer_to_something_else_grants_nothing",
        ),
    ),
    Mutant(
        "eager_below_watermark",
        "an eager return leaves the pool its watermark",
        AGENT + "eager.py",
        "room = self.store.free_blocks - int(EAGER_FREE_SHARE * self.store.total_blocks)",
        "room = self.store.free_blocks",
        ("tests/unit/dataplane/test_eager.py::test_it_never_takes_the_last_free_blocks",),
    ),
    Mutant(
        "eager_outlives_session",
        "the end of a session stops its eager return",
        CONTROL + "model/turn_events.py",
        "    eager_events.end_session(w, key)\n",
        "",
        ("tests/unit/controlplane/test_eager.py::test_the_end_of_the_session_stops_it",),
    ),
    Mutant(
        "turn_end_strands_lease",
        "the end of a turn stops its leases",
        CONTROL + "model/turn_events.py",
        '        lease_events.stop(w, w.state.leases[lease_id], LeaseState.REVOKED, "TURN_ENDED")\n',
        "        pass\n",
        (
            "tests/unit/controlplane/test_lease_rules.py::test_a_turn_cancelled_after_the_grant_waits_for_its_reader_and_no_longer",
        ),
    ),
    Mutant(
        "quarantine_uncapped",
        "unprovable quarantine is capped",
        AGENT + "destination.py",
        "return self._holds.quarantined_blocks > QUARANTINE_SHARE * self._store.total_blocks",
        "return False",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_beyond_the_quarantine_cap_no_new_landing_zone_is_taken",
        ),
    ),
)
