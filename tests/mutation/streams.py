# ruff: noqa: E501
"""Ways to break the agents' streams, and offers that come early or late.

Not here: what depends on the moment at which gRPC ends a read, or the writer's thread wakes.
"""

from __future__ import annotations

from tests.mutation.mutant import AGENT, CONTROL, Mutant

__all__ = ["STREAMS"]

STREAMS = (
    Mutant(
        "late_offer_lost",
        "decode's offer counts though its turn has ended first",
        AGENT + "scheduler.py",
        "        if leg is None and key[1] == types_pb2.LEG_DECODE:",
        "        if False:",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_what_decode_leaves_is_offered_though_its_turn_is_over",
        ),
    ),
    Mutant(
        "past_turns_unbounded",
        "so many past turns are remembered",
        AGENT + "turns.py",
        "            while len(self._past) > MAX_PAST_TURNS:",
        "            while False:",
        ("tests/unit/dataplane/test_rules_seen.py::test_so_many_turns_are_remembered",),
    ),
    Mutant(
        "turns_unbounded",
        "so many turns are remembered",
        AGENT + "turns.py",
        "        while len(self._legs) > MAX_TURNS:",
        "        while False:",
        ("tests/unit/dataplane/test_rules_seen.py::test_so_many_turns_are_remembered",),
    ),
    Mutant(
        "aborted_prefill_offers",
        "an aborted prefill leaves nothing",
        AGENT + "scheduler.py",
        "        if pushed or (request.aborted and leg.leg == types_pb2.LEG_PREFILL):",
        "        if pushed:",
        ("tests/unit/dataplane/test_scheduler_side.py::test_an_aborted_prefill_leaves_nothing",),
    ),
    Mutant(
        "forward_of_an_ended_turn",
        "an ended turn forwards nothing",
        CONTROL + "model/replica_events.py",
        "        if turn is not None and turn.running:",
        "        if turn is not None:",
        (
            "tests/unit/controlplane/test_registry.py::test_forward_is_not_made_for_a_turn_that_is_over",
        ),
    ),
    Mutant(
        "forward_twice",
        "a turn has one forward lease",
        CONTROL + "model/replica_events.py",
        "            return  # one a turn: the children of n > 1 compute",
        "            break",
        ("tests/unit/controlplane/test_registry.py::test_forward_follows_the_prefill_leg_once",),
    ),
    Mutant(
        "offer_of_an_ended_session",
        "what nobody will ask for is let go",
        CONTROL + "model/replica_events.py",
        "    if session is None or not session.active:\n        # The",
        "    if session is None:\n        # The",
        ("tests/unit/controlplane/test_rules_seen.py::test_what_an_ended_session_left_is_let_go",),
    ),
    Mutant(
        "replicas_unbounded",
        "a session has so many replicas on a worker",
        CONTROL + "model/replica_events.py",
        "    if len(here) > w.limits.replicas_per_session:",
        "    if False:",
        ("tests/unit/controlplane/test_registry.py::test_replicas_of_one_session_are_bounded",),
    ),
    Mutant(
        "offer_while_draining",
        "a draining worker offers nothing",
        AGENT + "source.py",
        " or leg.retention_ns <= 0 or self.draining:",
        " or leg.retention_ns <= 0:",
        (
            "tests/unit/dataplane/test_rules_seen.py::test_a_draining_worker_holds_and_offers_nothing_new",
        ),
    ),
    Mutant(
        "harden_while_draining",
        "a draining worker hardens nothing",
        AGENT + "source.py",
        "        if self.draining:\n            self._refuse",
        "        if False:\n            self._refuse",
        (
            "tests/unit/dataplane/test_rules_seen.py::test_a_draining_worker_holds_and_offers_nothing_new",
        ),
    ),
    Mutant(
        "harden_twice",
        "a lease is hardened once",
        AGENT + "source.py",
        "        if known is not None:\n            return\n",
        "",
        ("tests/unit/dataplane/test_rules_seen.py::test_a_repeated_harden_holds_and_answers_once",),
    ),
    Mutant(
        "hardens_anothers_range",
        "only what was asked for is granted",
        CONTROL + "model/lease_events.py",
        "    if not lease.push and not (\n        lease.ask_range.start <= blocks.range.start and blocks.range.end <= lease.ask_range.end\n    ):\n",
        "    if False:\n",
        ("tests/unit/controlplane/test_rules_seen.py::test_only_what_was_asked_for_is_granted",),
    ),
    Mutant(
        "reads_for_a_past_turn",
        "nothing is read for a turn that is over",
        AGENT + "turns.py",
        "        leg = self._legs.pop(key, None)\n        if leg is not None:\n            self._past",
        "        leg = self._legs.get(key)\n        if leg is not None:\n            self._past",
        (
            "tests/unit/dataplane/test_scheduler_side.py::test_nothing_is_read_for_a_turn_that_is_over",
        ),
    ),
    Mutant(
        "ended_stream_obeyed",
        "what is read from an ended stream counts for nothing",
        CONTROL + "services/agents.py",
        "        if stream.end_reason:\n            return  # replaced",
        "        if False:\n            return  # replaced",
        (
            "tests/unit/controlplane/test_streams.py::test_what_is_read_from_an_ended_stream_counts_for_nothing",
        ),
    ),
    Mutant(
        "replaced_stream_keeps_its_queue",
        "what a replaced stream had queued is dropped",
        CONTROL + "services/agents.py",
        '            older.queue.clear()\n            older.end("REPLACED")',
        '            older.end("REPLACED")',
        (
            "tests/unit/controlplane/test_streams.py::test_what_a_replaced_stream_had_queued_is_dropped",
        ),
    ),
    Mutant(
        "command_for_another_boot",
        "a command goes to its boot only",
        CONTROL + "services/agents.py",
        "            if stream is None or stream.ref != ref or stream.end_reason:",
        "            if stream is None or stream.end_reason:",
        ("tests/unit/controlplane/test_streams.py::test_a_command_for_another_boot_is_dropped",),
    ),
    Mutant(
        "old_streams_loss_counts",
        "the end of an older stream is no loss",
        CONTROL + "model/worker_events.py",
        "    if worker is None or worker.stream_generation != generation or not worker.connected:",
        "    if worker is None or not worker.connected:",
        (
            "tests/unit/controlplane/test_registry.py::test_a_late_end_of_an_old_stream_does_not_lose_the_new_one",
        ),
    ),
    Mutant(
        "silence_unnoticed",
        "a worker that says nothing is lost",
        CONTROL + "model/worker_events.py",
        "        if worker.connected and w.now_ns - worker.heard_ns > w.limits.silence_ns:",
        "        if False:",
        ("tests/unit/controlplane/test_registry.py::test_silence_is_a_loss",),
    ),
    Mutant(
        "link_follows_the_overtaken",
        "a control plane that was overtaken is not heard",
        AGENT + "link.py",
        "                    if response.epoch < conversation.hello.highest_epoch:",
        "                    if False:",
        (
            "tests/integration/dataplane/test_link.py::test_a_control_plane_that_was_overtaken_is_not_obeyed",
        ),
    ),
    Mutant(
        "link_does_not_end_its_stream",
        "what an ended stream had queued is dropped before the next hello",
        AGENT + "link.py",
        "        self._agent.end_stream(conversation.life)\n",
        "",
        ("tests/integration/dataplane/test_link.py",),
    ),
    Mutant(
        "link_does_not_tell_the_epoch",
        "a hello names the highest epoch heard",
        AGENT + "link.py",
        "            self._agent.saw_epoch(response.epoch)\n",
        "            pass\n",
        (
            "tests/integration/dataplane/test_link.py::test_a_control_plane_that_was_overtaken_is_not_obeyed",
        ),
    ),
    Mutant(
        "events_unbounded",
        "messages are bounded by bytes",
        AGENT + "batches.py",
        "        if taken and size > EVENTS_BYTES:",
        "        if False:",
        ("tests/unit/dataplane/test_batches.py::test_batches",),
    ),
    Mutant(
        "commands_unbounded",
        "commands are bounded by bytes",
        CONTROL + "services/agents.py",
        "        if taken and size > limits.commands_bytes:",
        "        if False:",
        (
            "tests/integration/controlplane/test_agents.py::test_many_large_grants_do_not_make_a_message_too_large",
        ),
    ),
    Mutant(
        "late_end_of_a_namesake",
        "a late EndTurn ends no turn of another session",
        CONTROL + "model/turn_events.py",
        "    if token and token != turn.token:",
        "    if False:",
        (
            "tests/unit/controlplane/test_registry.py::test_a_late_end_of_a_forgotten_sessions_turn_ends_none_of_its_namesakes",
        ),
    ),
)
